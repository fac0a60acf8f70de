"""Simulated cluster: many nodes in one process, on a virtual clock, with the product's own code."""
