"""Several networks in one daemon, each with its own lease, subnet file and controller."""
