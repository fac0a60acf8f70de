"""The summary of ``flannelctl status``: a row for each part, and what is unknown."""

from __future__ import annotations

from typing import Any

import pytest

from flanneld.ctl.commands import status_table
from flanneld.ctl.output import when
from flanneld.ctl.source import DataSource
from tests.unit.ctl.documents import status_of

NOW = 1_000_000.0
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "pid": 7,
    "started": NOW,
    "health": {"conditions": []},
    "store": {"name": "etcd v3 at x", "answers": True},
    "network": {
        "backend": "vxlan",
        "ranges": [{"network": "10.5.0.0/16", "subnet_len": 24}, {"network": "fc00::/48", "subnet_len": 64}],
    },
    "lease": {"subnets": ["10.5.1.0/24", "fc00:0:0:1::/64"], "expires": NOW},
    "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1", "2001:db8::1"], "public_ips": []},
    "mtu": 1450,
    "devices": ["flannel.1", "flannel-v6.1"],
    "peers": [{"subnets": ["a"], "state": state} for state in ("pending", "in the kernel", "pending")],
    "last_sync": NOW,
    "repairs": [
        {"kind": "route", "cause": "a dump", "number": 2},
        {"kind": "link", "cause": "x", "number": 1},
    ],
    "refused": [],
    "removal_guard": {"holds": False},
    "firewall": {"place": "nft", "not_in_place": []},
}


def rows(document: dict[str, Any], origin: str = "daemon") -> dict[str, str]:
    return dict(status_table(DataSource(origin, status_of(document))).rows)  # type: ignore[arg-type]


def test_status_of_a_daemon_has_a_row_for_each_part() -> None:
    assert rows(DOCUMENT) == {
        "daemon": f"flanneld 1.0, pid 7, since {when(NOW)}",
        "ready": "yes",
        "conditions": "none",
        "store": "etcd v3 at x",
        "backend": "vxlan",
        "network": "10.5.0.0/16, fc00::/48",
        "lease": f"10.5.1.0/24,fc00:0:0:1::/64, until {when(NOW)}",
        "uplink": "eth0, MTU 1500, 192.0.2.1, 2001:db8::1",
        "MTU": "1450",
        "devices": "flannel.1, flannel-v6.1",
        "peers": "3, 1 in the kernel, 2 pending",
        "last sync": when(NOW),
        "repairs": "2 route after a dump, 1 link after x",
        "refused": "none",
        "removal guard": "off",
        "firewall": "nft, in place, 0 repairs",
    }


def test_status_of_which_nothing_is_known_says_so() -> None:
    found = rows({}, "host")
    assert found.pop("daemon") == "does not answer"
    assert set(found.values()) == {"unknown"}


@pytest.mark.parametrize(
    ("changes", "row", "text"),
    [
        (
            {"version": "", "pid": 0},
            "daemon",
            f"flanneld of an unknown version, pid unknown, since {when(NOW)}",
        ),
        ({"started": 0}, "daemon", "flanneld 1.0, pid 7, since never"),
        (
            {"health": {"missing": ["a"], "waiting": ["b"], "late": ["c"], "conditions": []}},
            "ready",
            "no: a; b; c",
        ),
        ({"health": {"waiting": ["b"]}}, "ready", "no: b"),
        ({"health": {}}, "conditions", "unknown"),
        (
            {"health": {"conditions": [{"part": "a", "problem": "b"}, {"part": "c", "problem": "d"}]}},
            "conditions",
            "a: b; c: d",
        ),
        ({"store": {"name": "x", "answers": False, "problem": "it is away"}}, "store", "x; it is away"),
        (
            {"store": {"name": "x", "answers": True, "cache": "a file"}},
            "store",
            "x; leases are taken from a file",
        ),
        ({"network": {"backend": "host-gw", "also": "vxlan"}}, "backend", "host-gw, also vxlan"),
        ({"network": {"backend": None}}, "backend", "unknown"),
        ({"network": {"backend": "vxlan"}}, "network", "unknown"),
        ({"network": None}, "network", "unknown"),
        ({"lease": None}, "lease", "none"),
        ({"lease": {"subnets": ["a", "b"]}}, "lease", "a,b by the subnet file"),
        ({"lease": {"subnets": ["a"], "expires": None}}, "lease", "a, reserved"),
        ({"mtu_lowered_from": 1500}, "MTU", "1450, lowered from 1500 by -follow-path-mtu"),
        ({"devices": []}, "devices", "none"),
        ({"peers": []}, "peers", "0"),
        ({"last_sync": None}, "last sync", "never"),
        ({"repairs": []}, "repairs", "none"),
        (
            {"refused": [{"object": "route a", "reason": "b"}, {"object": "c", "reason": "d"}]},
            "refused",
            "route a: b; c: d",
        ),
        (
            {"removal_guard": {"holds": True, "number": 1}},
            "removal guard",
            "holds removals back, 1 time so far",
        ),
        ({"removal_guard": {"holds": False, "number": 2}}, "removal guard", "off, 2 times so far"),
        (
            {
                "firewall": {
                    "place": "nft",
                    "not_in_place": ["IPv4", "IPv6"],
                    "repairs": [{"through": "a", "by": "b", "number": number} for number in (1, 2)],
                }
            },
            "firewall",
            "nft, not in place: IPv4, IPv6, 3 repairs",
        ),
    ],
)
def test_part_of_the_status_is_told_with_what_is_not_as_usual(
    changes: dict[str, Any], row: str, text: str
) -> None:
    assert rows(DOCUMENT | changes)[row] == text


def test_daemon_that_does_not_answer_is_told_with_its_last_words() -> None:
    event = {"time": 0.0, "severity": "E", "source": "main", "text": "no etcd"}
    told = rows({"events": [event]}, "host")
    assert told["daemon"] == "does not answer; its last error, 1970-01-01T00:00:00Z: no etcd"
    assert rows({"store": DOCUMENT["store"]}, "store")["lease"] == "none"
