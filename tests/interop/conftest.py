"""Tests with another daemon are collected only when there is one, and counted as not run otherwise.

``FLANNELD_PEER`` is the command of one that keeps its leases in v2 of etcd's API, ``FLANNELD_PEER_V3`` of
one that keeps them in v3, ``FLANNELD_PEER_V06`` of Go's v0.6.2 with its server and client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import PEER_VARIABLES, peer_command
from tests.report import not_run

#: The APIs of daemons, and the tests that take one of these.
TAKERS = {
    ("v2",): ("test_peer.py", "test_udp.py"),
    ("v3",): ("test_v3_peer.py", "test_wireguard_peer.py"),
    ("v2", "v3"): ("test_ipsec_peer.py", "test_kube_peer.py"),
    ("v0.6",): ("test_v06_peer.py",),
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    for apis, names in TAKERS.items():
        if collection_path.name in names and not any(map(peer_command, apis)):
            missing = " or ".join(PEER_VARIABLES[api] for api in apis)
            not_run(config, f"files of tests/interop: no Go daemon; set {missing} to its command")
            return True
    return None


@pytest.fixture
def backend(ipv4_backend: dict[str, Any]) -> dict[str, Any]:
    """Each backend by turns; v0.12.0 knows IPv4 only."""
    return ipv4_backend
