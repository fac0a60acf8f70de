"""Faults of a live network as data, and what the doctor must say about each."""
