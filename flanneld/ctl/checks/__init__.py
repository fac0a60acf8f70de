"""Checks of ``flannelctl doctor``: one small function each over facts."""

from __future__ import annotations

from flanneld.ctl.checks import (
    cloud,
    cluster,
    containers,
    encryption,
    host,
    kernel,
    nodes,
    packets,
    stale_objects,
)
from flanneld.ctl.findings import registered

__all__ = [
    "CHECKS",
    "cloud",
    "cluster",
    "containers",
    "encryption",
    "host",
    "kernel",
    "nodes",
    "packets",
    "stale_objects",
]

#: All checks, sorted by theme.
CHECKS = registered()
