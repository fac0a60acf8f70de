"""Tests with another daemon are collected only when there is one: ``FLANNELD_PEER`` is its command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import peer_command

collect_ignore = [] if peer_command() else ["test_kube_peer.py", "test_peer.py", "test_udp.py"]


@pytest.fixture
def backend(ipv4_backend: dict[str, Any]) -> dict[str, Any]:
    """Each backend by turns; v0.12.0 knows IPv4 only."""
    return ipv4_backend
