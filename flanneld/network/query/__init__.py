"""Queries between nodes: the messages, and a survey of many nodes at once."""
