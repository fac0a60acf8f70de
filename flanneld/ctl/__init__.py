"""``flannelctl``: what a node does, and what is wrong with it."""
