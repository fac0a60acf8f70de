"""What the leases permit to remove of what leads past an encrypting backend."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from flanneld.model import Lease, LeaseAttrs
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.permits import LeasePermits
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import LINKS, ROUTES, Resource, Route, WireGuard

OWN = Lease(LeaseAttrs(IPv4Address("192.0.2.5")), IPv4Network("10.1.5.0/24"))
#: More than the removal guard lets go at once.
CLEAR: list[Resource] = [
    Route(IPv4Network(f"10.1.{number}.0/24"), "eth0", IPv4Address(f"192.0.2.{number}"))
    for number in range(10, 40)
]
TUNNELLED: list[Resource] = [Route(IPv4Network("10.1.9.0/24"), "flannel-wg")]
DEVICES: list[Resource] = [WireGuard("flannel.1", 1450)]


def permits(*, encrypts: bool) -> LeasePermits:
    guard = RemovalGuard(is_on=True)
    peers = Peers(OWN, [IPv4Network("10.1.0.0/16")], guard)
    return LeasePermits(peers, guard, lambda: True, lambda resource: encrypts and resource in CLEAR)


def test_nothing_goes_before_the_leases_are_known() -> None:
    assert permits(encrypts=False).drops({ROUTES: CLEAR + TUNNELLED, LINKS: DEVICES}) == {}


def test_what_leads_past_the_encryption_goes_before_the_leases_are_known() -> None:
    assert permits(encrypts=True).drops({ROUTES: CLEAR + TUNNELLED, LINKS: DEVICES}) == {ROUTES: CLEAR}
    assert permits(encrypts=True).drops({ROUTES: TUNNELLED, LINKS: DEVICES}) == {}
