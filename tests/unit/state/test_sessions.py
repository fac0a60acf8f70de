"""Sessions with peers: their states, and the sentence about those that stay silent."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import pytest

from flanneld.ctl.nodes import is_lost, peers_table
from flanneld.ctl.source import DataSource
from flanneld.state.table import TunnelSession, silence
from tests.unit.ctl.documents import status_of

SUBNETS = [IPv4Network(f"10.5.{number}.0/24") for number in range(1, 9)]


def test_a_session_is_established_silent_or_idle() -> None:
    one = SUBNETS[0]
    assert TunnelSession(one, is_established=True, is_silent=True).state == "established"
    assert TunnelSession(one, is_established=False, is_silent=True).state == "silent"
    assert TunnelSession(one, is_established=False).state == "idle"


def test_silent_peers_are_named_by_their_subnets() -> None:
    quiet = [TunnelSession(net, is_established=False) for net in SUBNETS]
    assert silence(quiet) == ""
    loud = [TunnelSession(net, is_established=False, is_silent=True) for net in SUBNETS]
    assert silence([*quiet, *loud[:1]]).startswith("no handshake with the nodes of 10.5.1.0/24, though")
    assert ", 10.5.5.0/24, and 3 more, though" in silence(loud)


def test_peers_are_shown_with_their_sessions() -> None:
    session = {"subnet": "10.5.2.0/24", "state": "established", "endpoint": "192.0.2.2:51820"}
    counts = {"handshake": 970.0, "rx_bytes": 512, "tx_bytes": 5 << 20}
    peer = {
        "subnets": ["10.5.2.0/24"],
        "public_ips": ["192.0.2.2"],
        "backend": "wireguard",
        "state": "in the kernel",
        "reason": "",
        "conflicts": [],
        "sessions": [session | counts],
    }
    other = {**peer, "subnets": ["10.5.3.0/24"], "sessions": []}
    table = peers_table(DataSource("daemon", status_of({"peers": [peer, other], "time": 1000.0})))
    assert table.columns[4:8] == ("handshake", "received", "sent", "endpoint")
    assert [tuple(row[4:8]) for row in table.rows] == [
        ("30 s ago", "512 B", "5.0 MiB", "192.0.2.2:51820"),
        ("-", "-", "-", "-"),
    ]


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, False),
        ({"state": "pending"}, False),
        ({"state": "refused"}, True),
        ({"sessions": [{"subnet": "10.5.2.0/24", "state": "idle"}]}, False),
        ({"sessions": [{"subnet": "10.5.2.0/24", "state": "silent"}]}, True),
        ({"probe": {"target": "10.5.2.0", "time": 1.0, "rtt": 0.001}}, False),
        ({"probe": {"target": "10.5.2.0", "time": 1.0, "rtt": None}}, True),
    ],
)
def test_peers_fails_where_a_peer_does_not_answer(changes: dict[str, Any], lost: bool) -> None:
    peer = {"subnets": ["10.5.2.0/24"], "state": "in the kernel", **changes}
    assert is_lost(status_of({"peers": [peer]}).each_peer[0]) is lost
