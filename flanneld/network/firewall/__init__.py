"""Packet filter: rules as data, and the drivers that install them."""
