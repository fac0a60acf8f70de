"""``flannelctl``: status and diagnosis of a node."""
