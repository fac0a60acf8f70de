"""The kinds of devices that backends make: one module each, with its codec as ``CODEC``."""
