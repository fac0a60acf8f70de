"""From batches of events to what the kernel has to be told."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.brake import HOLD, Brake
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.network.diff import Plan
from flanneld.network.resources import Route
from flanneld.peers import Peers
from tests.unit.test_host_gw import SUBNET, made, peer

OWN = Lease(LeaseAttrs(IPv4Address("192.168.0.5"), None, "host-gw"), IPv4Network("10.1.5.0/24"))
OLD, NEW = (peer((True, False), public_ip=IPv4Address(f"192.168.0.{number}")) for number in (6, 7))
GONE = Removed(OLD.key)


def route(lease: Lease) -> Route:
    return Route(SUBNET, "eth0", lease.attrs.public_ip)


def take(peers: Peers, *events: Event) -> Plan:
    return peers.take(events, made())


@pytest.fixture
def peers() -> Peers:
    """Of a node that knows one peer."""
    peers = Peers(OWN, [IPv4Network("10.1.0.0/16")], Brake())
    take(peers, Snapshot((OWN, OLD)))
    return peers


def test_a_peer_that_moves_is_followed(peers: Peers) -> None:
    assert take(peers, Added(NEW)) == Plan(puts=(route(NEW),))


def test_a_peer_that_moves_and_goes_in_one_batch_takes_along_what_is_in_the_kernel(peers: Peers) -> None:
    assert take(peers, Added(NEW), GONE) == Plan(drops=(route(OLD),))


def test_a_peer_that_goes_and_comes_back_elsewhere_is_followed(peers: Peers) -> None:
    assert take(peers, GONE, Added(NEW)) == Plan(puts=(route(NEW),))


def test_a_peer_that_goes_and_comes_back_as_it_was_changes_nothing(peers: Peers) -> None:
    assert take(peers, GONE, Added(OLD)) == Plan()
    assert take(peers, Added(NEW), Added(OLD)) == Plan()


def test_a_peer_that_comes_and_goes_in_one_batch_leaves_nothing_to_do(peers: Peers) -> None:
    take(peers, GONE)
    assert take(peers, Added(NEW), GONE) == Plan()


def test_the_brake_hears_of_each_peer_that_is_back_or_gone_for_good() -> None:
    brake = Brake()
    peers = Peers(OWN, [IPv4Network("10.0.0.0/8")], brake)
    crowd = [Lease(OLD.attrs, IPv4Network((0x0A020000 + (each << 8), 24))) for each in range(12)]
    take(peers, Snapshot((OWN, *crowd)))
    take(peers, Snapshot((OWN,)))
    take(peers, *(Added(lease) for lease in crowd[:11]))
    assert brake.holds
    take(peers, Removed(crowd[11].key))
    assert not brake.holds
    assert len(peers) == 11


def test_a_list_without_our_own_lease_is_passed_over_and_read_again() -> None:
    now = [0.0]
    brake = Brake(is_on=False, now=lambda: now[0])
    peers = Peers(OWN, [IPv4Network("10.1.0.0/16")], brake)
    take(peers, Snapshot((OWN, OLD)))
    for _ in range(2):
        assert take(peers, Snapshot(())) == Plan()
        assert not brake.is_due()
        now[0] += HOLD
        assert brake.is_due()
    assert take(peers, Snapshot((OWN,))) == Plan(drops=(route(OLD),))
    assert not brake.holds
