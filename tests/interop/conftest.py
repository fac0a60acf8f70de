"""Tests with another daemon are collected only when there is one: ``FLANNELD_PEER`` is its command."""

from __future__ import annotations

from tests.lab import peer_command

collect_ignore = [] if peer_command() else ["test_kube_peer.py", "test_peer.py"]
