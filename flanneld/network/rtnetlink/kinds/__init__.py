"""Kinds of devices that backends create: one module each, with its codec as ``CODEC``."""
