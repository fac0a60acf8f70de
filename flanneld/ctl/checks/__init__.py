"""Checks of ``flannelctl doctor``: one small function each over facts."""

from __future__ import annotations

from flanneld.ctl.checks import cloud, cluster, encryption, host, kernel, stale_objects
from flanneld.ctl.findings import registered

__all__ = ["CHECKS", "cloud", "cluster", "encryption", "host", "kernel", "stale_objects"]

#: All checks, sorted by theme.
CHECKS = registered()
