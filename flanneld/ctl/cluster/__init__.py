"""All nodes of the cluster as seen from this one: leases and probes; no access to the other hosts."""
