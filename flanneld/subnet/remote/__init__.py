"""Server and client of the REST API of flannel v0.6.2 for leases."""
