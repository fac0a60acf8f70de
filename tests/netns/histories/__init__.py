"""Random histories of one node: what may happen in them, and what must hold when all is quiet again."""
