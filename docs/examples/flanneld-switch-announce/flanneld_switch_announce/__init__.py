"""Backend for flanneld that announces this node's subnet to a switch."""
