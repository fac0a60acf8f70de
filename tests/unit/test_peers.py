"""From batches of events to what the kernel has to be told."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.brake import HOLD, Brake
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.network.diff import Plan
from flanneld.network.obstacles import HostNetworks, Obstacle, Obstacles
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


# ---- leases that would harm this host ------------------------------------------------------------

ON_A_BRIDGE = Obstacles(HostNetworks(frozenset({Obstacle(SUBNET, "br7", "network")})))
NEWS_ADDRESS = Obstacles(HostNetworks(local=frozenset({IPv4Network("192.168.0.7/32")})))
OLDS_ADDRESS = Obstacles(HostNetworks(local=frozenset({IPv4Network("192.168.0.6/32")})))


def test_obstacle_withdraws_what_leads_to_a_peer_until_it_is_gone(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert peers.look(ON_A_BRIDGE, made()) == Plan(drops=(route(OLD),))
    assert peers.unsafe() == [f"{SUBNET}: {peers.view().reasons[OLD.key]}"]
    assert peers.unclear == set()
    assert take(peers, Added(NEW)) == Plan()
    assert peers.look(ON_A_BRIDGE, made()) == Plan()
    assert peers.look(Obstacles(), made()) == Plan(puts=(route(NEW),))
    assert peers.unsafe() == []
    peers.tell()
    said = [record.getMessage() for record in caplog.records]
    assert sum("Unsafe lease" in line for line in said) == 1
    assert f"Lease {SUBNET} no longer harms this host" in said


def test_lease_that_announces_an_address_of_this_host_is_withdrawn(peers: Peers) -> None:
    assert peers.look(NEWS_ADDRESS, made()) == Plan()
    assert take(peers, Added(NEW)) == Plan(drops=(route(OLD),))
    assert take(peers, Added(OLD)) == Plan(puts=(route(OLD),))


def test_what_nonsense_has_kept_is_withdrawn_when_it_would_be_a_loop(peers: Peers) -> None:
    nonsense = Added(Lease(LeaseAttrs(OWN.attrs.public_ip, None, "host-gw"), SUBNET))
    assert take(peers, nonsense) == Plan()
    assert peers.unclear == {SUBNET}
    assert peers.look(OLDS_ADDRESS, made()) == Plan(drops=(route(OLD),))


def test_lease_around_the_public_ips_of_others_withdraws_them() -> None:
    peers = Peers(OWN, [IPv4Network("10.1.0.0/16")], Brake())
    inside = Lease(LeaseAttrs(IPv4Address("10.1.9.9"), None, "host-gw"), SUBNET)
    around = Lease(LeaseAttrs(IPv4Address("192.168.0.9"), None, "host-gw"), IPv4Network("10.1.9.0/24"))
    take(peers, Snapshot((OWN, inside)))
    led = Route(around.subnet or SUBNET, "eth0", around.attrs.public_ip)
    assert take(peers, Added(around)) == Plan(puts=(led,), drops=(route(inside),))
    assert take(peers, Removed(around.key)) == Plan(puts=(route(inside),), drops=(led,))


def test_unreadable_lease_keeps_nothing_where_an_obstacle_is(peers: Peers) -> None:
    take(peers, Snapshot((OWN,), frozenset({OLD.key})))
    assert peers.unclear == {SUBNET}
    peers.look(ON_A_BRIDGE, made())
    assert peers.unclear == set()
