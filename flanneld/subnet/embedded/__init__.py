"""Leases in a file of this host: SQLite behind the contract of etcd's clients."""
