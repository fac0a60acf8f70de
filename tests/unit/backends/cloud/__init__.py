"""The backends for clouds, against the servers of the lab on loopback."""
