"""Backends for clouds that route packets themselves: each node keeps one route in the cloud's table."""
