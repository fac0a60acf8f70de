"""The packet filter: rules as data, and the ways in which they get into the kernel."""
