"""Tests with another daemon are collected only when there is one.

``FLANNELD_PEER`` is the command of one that keeps its leases in v2 of etcd's API, ``FLANNELD_PEER_V3`` of
one that keeps them in v3, ``FLANNELD_PEER_V06`` of Go's v0.6.2 with its server and client.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import peer_command

collect_ignore = [] if peer_command() else ["test_peer.py", "test_udp.py"]
if not peer_command("v3"):
    collect_ignore += ["test_v3_peer.py", "test_wireguard_peer.py"]
if not peer_command() and not peer_command("v3"):
    collect_ignore += ["test_ipsec_peer.py", "test_kube_peer.py"]
if not peer_command("v0.6"):
    collect_ignore += ["test_v06_peer.py"]


@pytest.fixture
def backend(ipv4_backend: dict[str, Any]) -> dict[str, Any]:
    """Each backend by turns; v0.12.0 knows IPv4 only."""
    return ipv4_backend
