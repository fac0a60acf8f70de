"""The table of ``flannelctl peers``: what the daemon last saw of each peer."""

from __future__ import annotations

from typing import Any

import pytest

from flanneld.ctl.nodes import handshake, is_lost, peers_table
from flanneld.ctl.output import when
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import ProbeStatus, SessionStatus
from tests.unit.ctl.documents import status_of

NOW = 1_000_000.0
PEER: dict[str, Any] = {
    "subnets": ["10.5.2.0/24"],
    "public_ips": ["192.0.2.2", "2001:db8::2"],
    "backend": "vxlan",
    "state": "in the kernel",
}
OF_LEASE = ("10.5.2.0/24", "192.0.2.2,2001:db8::2", "vxlan", "in the kernel")


def session(**changes: Any) -> dict[str, Any]:
    return {"subnet": "10.5.2.0/24", "state": "established", "handshake": NOW - 30.0} | changes


def table(*peers: dict[str, Any], is_wide: bool = False, **document: Any) -> list[tuple[str, ...]]:
    source = DataSource("daemon", status_of({"time": NOW, "peers": peers} | document))
    shown = peers_table(source, is_wide=is_wide)
    return [tuple(shown.columns), *map(tuple, shown.rows)]


@pytest.mark.parametrize(
    ("peers", "more", "rows"),
    [
        ([PEER], (), [(*OF_LEASE, "")]),
        ([PEER | {"state": "refused", "reason": "no MAC"}], (), [(*OF_LEASE[:3], "refused", "no MAC")]),
        ([PEER | {"conflicts": ["a", "b"]}], (), [(*OF_LEASE, "with a, b")]),
        ([PEER | {"reason": "no MAC", "conflicts": ["a"]}], (), [(*OF_LEASE, "no MAC")]),
        ([PEER | {"backend": None, "public_ips": []}], (), [("10.5.2.0/24", "-", "-", "in the kernel", "")]),
        (
            [
                PEER | {"probe": {"target": "10.5.2.0", "time": NOW, "rtt": 0.01234}},
                PEER | {"probe": {"target": "10.5.2.0", "time": NOW, "rtt": None}},
                PEER | {"probe": None},
                PEER,
            ],
            ("probe",),
            [(*OF_LEASE, word, "") for word in ("12.34 ms", "no answer", "-", "-")],
        ),
        (
            [
                PEER | {"sessions": [session(rx_bytes=2048, tx_bytes=7, endpoint="192.0.2.2:1")]},
                PEER | {"sessions": [session(), session(rx_bytes=5, handshake=NOW - 90)]},
                PEER | {"sessions": []},
                PEER,
            ],
            ("handshake", "received", "sent", "endpoint"),
            [
                (*OF_LEASE, "30 s ago", "2.0 KiB", "7 B", "192.0.2.2:1", ""),
                (*OF_LEASE, "30 s ago, 90 s ago", "0 B, 5 B", "0 B", "-", ""),
                (*OF_LEASE, "-", "-", "-", "-", ""),
                (*OF_LEASE, "-", "-", "-", "-", ""),
            ],
        ),
    ],
    ids=["sound", "refused", "conflicts", "a reason and conflicts", "unknown", "probes", "sessions"],
)
def test_peers_are_shown_with_the_columns_that_the_daemon_tells_of(
    peers: list[dict[str, Any]], more: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    head = ("subnet", "public ip", "backend", "state", *more, "reason")
    assert table(*peers) == [head, *rows]


def test_wide_table_has_what_else_the_lease_says() -> None:
    lease = {"macs": ["02:00:00:00:00:02", "02:00:00:00:00:03"], "also": "wireguard", "expires": NOW}
    head, first, second = table(PEER | lease, PEER, is_wide=True)
    assert head[4:] == ("also", "mac", "lease ends", "reason")
    assert first[4:] == ("wireguard", "02:00:00:00:00:02,02:00:00:00:00:03", when(NOW), "")
    assert second[4:] == ("-", "-", "-", "")


@pytest.mark.parametrize(
    ("stamp", "state", "now", "shown"),
    [
        (NOW, "established", NOW, "0 s ago"),
        (NOW - 61, "idle", NOW, "61 s ago"),
        (NOW + 1, "established", NOW, "in the future"),
        (NOW, "silent", NOW, "no answer"),
        (None, "silent", None, "no answer"),
        (None, "idle", NOW, "none yet"),
        (None, "idle", None, "none yet"),
        (NOW, "established", None, when(NOW)),
    ],
)
def test_handshake_is_shown_by_its_age_if_the_time_is_known(
    stamp: float | None, state: str, now: float | None, shown: str
) -> None:
    assert handshake(SessionStatus("10.5.2.0/24", state, stamp), now) == shown
    peer = PEER | {"sessions": [session(state=state, handshake=stamp)]}
    told = status_of({"peers": [peer]} | ({} if now is None else {"time": now}))
    (row,) = peers_table(DataSource("daemon", told)).rows
    assert row[4] == shown


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, False),
        ({"state": "pending"}, False),
        ({"state": "missing"}, True),
        ({"state": "refused"}, True),
        ({"probe": ProbeStatus("10.5.2.0", NOW, 0.1)}, False),
        ({"probe": ProbeStatus("10.5.2.0", NOW, None)}, True),
        ({"probe": None}, False),
        ({"sessions": [session(), session(state="idle")]}, False),
        ({"sessions": [session(), session(state="silent")]}, True),
        ({"sessions": [session()], "probe": ProbeStatus("10.5.2.0", NOW, None)}, True),
    ],
)
def test_peer_is_lost_if_it_is_not_in_the_kernel_or_did_not_answer(
    changes: dict[str, Any], lost: bool
) -> None:
    (peer,) = status_of({"peers": [PEER | changes]}).each_peer
    assert is_lost(peer) is lost
