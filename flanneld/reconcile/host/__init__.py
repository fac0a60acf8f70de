"""The host beneath the network: uplink, other networks, news of the kernel, and services for backends."""
