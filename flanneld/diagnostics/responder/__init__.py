"""Answers to queries of other nodes (``-answer-port``)."""
