"""Leases behind a server of flannel's: the REST API of v0.6.2, both its sides."""
