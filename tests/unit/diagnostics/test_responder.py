"""Whom a node answers, and how often."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from flanneld.diagnostics.responder import RATE, Budget, Place, device
from flanneld.diagnostics.status import store_kind
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Vxlan
from tests.clock import Clock

NETWORKS = [ip_network("10.5.0.0/16"), ip_network("fc00:5::/48")]
PEERS = [Lease(LeaseAttrs(IPv4Address("198.18.0.7"), backend_type="host-gw"))]
HERE = ip_address("10.5.1.0")


@pytest.mark.parametrize(
    ("source", "in_overlay", "at_uplink"),
    [
        ("10.5.7.3", True, False),
        ("fc00:5:0:7::1", True, False),
        ("198.18.0.7", False, True),
        ("198.18.0.8", False, False),
        ("203.0.113.1", False, False),
        ("::1", False, False),
    ],
)
def test_answers_go_to_the_network_or_a_peer_only(source: str, in_overlay: bool, at_uplink: bool) -> None:
    for place, expected in ((Place(HERE, True), in_overlay), (Place(HERE, False), at_uplink)):
        assert place.admits(ip_address(source), NETWORKS, lambda: PEERS) is expected


def test_answers_are_limited_and_come_back_with_time(daemon_clock: Clock) -> None:
    budget, now = Budget(), daemon_clock.now()

    def taken(seconds: float) -> int:
        return sum(budget.take(now + seconds) for _ in range(10 * int(RATE)))

    assert [taken(seconds) for seconds in (0.0, 0.125, 0.25, 0.75)] == [RATE, 12, 13, RATE / 2]
    assert taken(3600.0) == RATE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("etcd v3 at 192.0.2.1:2379 under /coreos.com/network", "etcd v3"),
        ("etcd v3 at a:1 under /x and etcd v2 at a:1 under /x", "etcd v2+v3"),
        ("etcd at user@192.0.2.1", "etcd"),
        ("Kubernetes at 192.0.2.1", "kubernetes"),
        ("flannel server 192.0.2.1:8888", "remote"),
        ("store /var/lib/flannel/leases.db", "file"),
        ("Consul at 192.0.2.1", "consul"),
    ],
)
def test_kind_of_store_tells_no_address(name: str, kind: str) -> None:
    assert store_kind(name) == kind


def test_device_of_another_kind_has_neither_vni_nor_port() -> None:
    made = Vxlan("flannel.1", 1, 2, HERE, 8472, "02:00:00:00:00:01", 1450)
    assert device([made]) == {"vni": 1, "port": 8472}
    assert device([]) == {"vni": None, "port": None}
