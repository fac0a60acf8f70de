"""Traces of a Go flanneld, for tests without one."""

from __future__ import annotations

from tests.lab import Node

GO_ENV = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.8.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=false\n"


def write_as_go(node: Node) -> None:
    """Leave subnet.env as a Go flanneld does that has run here: a new file in place of the old one."""
    text = node.subnet_file.read_text() if node.subnet_file.exists() else GO_ENV
    new = node.subnet_file.with_name("subnet.env.new")
    new.write_text(text)
    new.replace(node.subnet_file)
