"""Cloud backends: the cloud routes the packets, and each node maintains its own route in a cloud table."""
