"""Several networks in one daemon: each with a lease, a subnet file and a controller of its own."""
