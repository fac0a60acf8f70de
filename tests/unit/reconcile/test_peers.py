"""From batches of events to what the kernel has to be told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from flanneld.backends import vxlan
from flanneld.backends.host_gw import HostGw
from flanneld.errors import LEASES_END
from flanneld.model import Added, Cached, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.network.obstacles import HostNetworks, Obstacle
from flanneld.reconcile.peers import Peers
from flanneld.state.desired import Delta
from flanneld.state.permits import HOLD, RemovalGuard
from flanneld.state.resources import Ipip, Kind, Resource, Route, State
from tests.unit.backends.test_host_gw import SUBNET, V4, V6, made, peer
from tests.unit.backends.test_vxlan import config as vxlan_config
from tests.unit.backends.test_vxlan import host as vxlan_host
from tests.unit.backends.test_vxlan import peer as vxlan_peer

OWN = Lease(LeaseAttrs(IPv4Address("192.168.0.5"), None, "host-gw"), IPv4Network("10.1.5.0/24"))
OLD, NEW = (peer(V4, public_ip=IPv4Address(f"192.168.0.{number}")) for number in (6, 7))
GONE = Removed(OLD.key)
#: A peer cannot be at our own address.
SENSELESS = peer(V4, public_ip=OWN.attrs.public_ip)


def route(lease: Lease) -> Route:
    return Route(SUBNET, "eth0", lease.attrs.public_ip)


def state(*resources: Resource) -> State:
    return {resource.key: resource for resource in resources}


class Plan(NamedTuple):
    """What is to be made, and what is to be removed."""

    puts: tuple[Resource, ...] = ()
    drops: tuple[Resource, ...] = ()

    @classmethod
    def of(cls, delta: Delta) -> Plan:
        return cls(tuple(put.want for put in delta.puts), delta.drops)


def take(peers: Peers, *events: Event) -> Plan:
    return Plan.of(peers.take(events, made()))


@pytest.fixture
def peers() -> Peers:
    """Of a node that knows one peer."""
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    take(peers, Snapshot((OWN, OLD)))
    return peers


def test_the_backend_is_told_our_own_lease_with_each_peer() -> None:
    asked: list[tuple[Lease, Lease]] = []

    class Asked(HostGw):
        def peer(self, own: Lease, lease: Lease) -> Iterator[Resource]:
            asked.append((own, lease))
            return super().peer(own, lease)

    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    peers.take([Snapshot((OWN, OLD))], made(kind=Asked))
    assert asked == [(OWN, OLD)]


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


def test_first_snapshot_is_desired_but_moves_nothing() -> None:
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    assert not peers.synced
    assert take(peers, Added(OLD)) == Plan()
    assert take(peers, Snapshot((OWN, OLD))) == Plan()
    assert peers.synced
    assert peers.desired.state == state(route(OLD))


@pytest.mark.parametrize("number", [10, 11])
def test_peers_at_the_start_are_told_of_one_by_one_if_they_are_few(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    leases = [replace(OLD, subnet=IPv4Network(f"10.1.{100 + each}.0/24")) for each in range(number)]
    take(peers, Snapshot((OWN, *leases)))
    peers.log_changes(7.0)
    assert [line.split(" via ")[0] for line in caplog.messages] == [
        f"Subnet added: {each}" for each in leases if number == 10
    ]


def test_public_ips_are_those_of_followed_peers_once_all_are_known() -> None:
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    other = Lease(LeaseAttrs(IPv4Address("192.168.0.9"), None, "vxlan"), IPv4Network("10.1.9.0/24"))
    take(peers, Cached((OWN, OLD), "a file"))
    assert (peers.cached, peers.public_ips()) == ("a file", None)
    take(peers, Snapshot((OWN, OLD, other)))
    assert (peers.cached, peers.public_ips()) == ("", {OLD.attrs.public_ip, OLD.attrs.public_ipv6})


def test_lease_that_was_made_again_behind_our_back_counts_from_then_on() -> None:
    inside = replace(OLD, attrs=replace(OLD.attrs, public_ip=IPv4Address("10.1.99.9")), created=5)
    around = Lease(NEW.attrs, IPv4Network("10.1.99.0/24"), created=7)
    again = replace(inside, created=9)
    histories: list[list[Event]] = [
        [Snapshot((OWN, inside, around)), Snapshot((OWN, again, around))],
        [Snapshot((OWN, inside, around)), Removed(inside.key), Added(again)],
        [Snapshot((OWN, around)), Added(inside), Added(again)],
        [Snapshot((OWN, again, around))],
    ]
    for events in histories:
        peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
        peers.take(events, made())
        assert [text.partition(":")[0] for text in peers.unsafe()] == [str(inside)]
        peers.take([Added(inside)], made())
        assert [text.partition(":")[0] for text in peers.unsafe()] == [str(around)]


def test_own_needs_are_desired_beside_those_of_the_peers(peers: Peers) -> None:
    device = Ipip("flannel.ipip", IPv4Address("192.168.0.5"), 1480)
    peers.set_local([device])
    assert peers.local_resources() == (device,)
    assert peers.desired.state == state(route(OLD), device)
    assert sorted(peers.desired_kinds()) == [Kind.LINK, Kind.ROUTE]


def test_another_backend_decides_about_every_lease_again(peers: Peers) -> None:
    peers.reconsider(made(V6))
    assert peers.desired.state == {}
    peers.reconsider(made())
    assert peers.desired.state == state(route(OLD))


# ---- leases that are refused ----------------------------------------------------------------------


def test_route_to_a_peer_stays_when_its_lease_turns_senseless(peers: Peers) -> None:
    assert take(peers, Added(SENSELESS)) == Plan()
    assert peers.desired.state == state(route(OLD))
    assert peers.view().desired == {OLD.key: (route(OLD),)}


@pytest.mark.parametrize("end", [Added(NEW), GONE, Snapshot((OWN,))])
def test_subnet_of_a_senseless_lease_is_unclear_until_the_lease_changes(peers: Peers, end: Event) -> None:
    take(peers, Added(SENSELESS))
    assert peers.unclear == {SUBNET}
    assert "our own public IP" in peers.view().reasons[OLD.key].text
    take(peers, end)
    assert peers.unclear == set()
    assert peers.view().reasons == {}


def test_unreadable_lease_keeps_its_route_and_is_unclear_until_it_is_read(peers: Peers) -> None:
    assert take(peers, Snapshot((OWN,), frozenset({OLD.key}))) == Plan()
    assert peers.desired.state == state(route(OLD))
    assert peers.unclear == {SUBNET}
    take(peers, Added(OLD))
    assert peers.unclear == set()


def test_lease_of_another_backend_loses_its_route_and_is_not_unclear(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    take(peers, Added(SENSELESS))
    assert take(peers, Added(peer(V4, backend_type="vxlan"))) == Plan(drops=(route(OLD),))
    assert peers.unclear == set()
    reason = peers.view().reasons[OLD.key].text
    assert "is a vxlan node, we run host-gw" in reason
    assert caplog.messages[-1] == f"Ignoring a lease: {reason}"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("x" * 1_000_000, f"type that is none: {'x' * 200}... and 999800 more; "),
        ("vxlan\u202e", "type that is none: vxlan\\u202e; "),
    ],
    ids=["a megabyte", "a mark of direction"],
)
def test_a_type_that_no_backend_has_tells_nothing_of_the_node(
    peers: Peers, caplog: pytest.LogCaptureFixture, word: str, told: str
) -> None:
    take(peers, Added(OLD))
    assert take(peers, Added(peer(V4, backend_type=word))) == Plan()
    assert peers.desired.state == state(route(OLD))
    assert told in peers.view().reasons[OLD.key].text
    assert all(len(line) < 1000 for line in caplog.messages)


@pytest.mark.parametrize(
    ("subnet", "reason"),
    [
        ("10.1.5.128/25", "it overlaps our own subnet 10.1.5.0/24; give one of both nodes another subnet"),
        ("10.2.6.0/24", "it is outside our network 10.1.0.0/16; restart its daemon"),
    ],
)
def test_lease_of_addresses_that_it_must_not_have_leads_nowhere(
    peers: Peers, subnet: str, reason: str
) -> None:
    lease = Lease(OLD.attrs, IPv4Network(subnet))
    assert take(peers, Added(lease)) == Plan()
    assert peers.view().reasons[lease.key].text.startswith(reason)


def test_each_refusal_is_logged_once_until_the_lease_makes_sense_again(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    take(peers, Added(SENSELESS))
    peers.reconsider(made())
    assert caplog.text.count("Refusing the data of lease 10.1.6.0/24") == 1
    take(peers, Added(NEW), Added(SENSELESS))
    assert caplog.text.count("Refusing the data of lease 10.1.6.0/24") == 2


def test_two_leases_that_claim_one_mac_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    first = vxlan_peer(V4)
    clone = replace(
        first, attrs=replace(first.attrs, public_ip=NEW.attrs.public_ip), subnet=IPv4Network("10.1.7.0/24")
    )
    peers.take([Added(first), Added(clone)], vxlan.VxlanBackend(vxlan_config(), vxlan_host()))
    assert "10.1.6.0/24 and 10.1.7.0/24 both claim " in caplog.text
    assert "; 10.1.6.0/24 has it: are these cloned machines" in caplog.text


# ---- leases that overlap --------------------------------------------------------------------------

#: Inside the subnet of ``OLD``, at another node.
INSIDE = replace(NEW, subnet=IPv4Network("10.1.6.128/25"))


def route_to(lease: Lease) -> Route:
    assert lease.subnet
    return replace(route(lease), destination=lease.subnet)


def test_lease_inside_another_one_is_followed_once_that_is_gone(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert take(peers, Added(INSIDE)) == Plan()
    assert {key: reason.text for key, reason in peers.view().reasons.items()} == {
        INSIDE.key: "it overlaps the lease 10.1.6.0/24, which precedes it; give its node a subnet of the"
        f" usual SubnetLen; {LEASES_END}"
    }
    peers.reconsider(made())
    moved = replace(INSIDE, attrs=replace(INSIDE.attrs, public_ip=IPv4Address("192.168.0.9")))
    assert take(peers, Added(moved)) == Plan()
    assert caplog.text.count("Lease 10.1.6.128/25 is not followed: it overlaps the lease 10.1.6.0/24") == 1
    assert take(peers, GONE) == Plan(puts=(route_to(moved),), drops=(route(OLD),))
    assert peers.view().reasons == {}
    assert take(peers, Added(OLD)) == Plan(puts=(route(OLD),), drops=(route_to(moved),))
    peers.log_changes(0.0)
    assert caplog.text.count("Lease 10.1.6.128/25 is followed: ") == 1
    assert caplog.text.count("Lease 10.1.6.128/25 is not followed: ") == 2


@pytest.mark.parametrize("wide", ["10.1.6.0/23", "10.1.128.0/17"])
def test_wide_lease_cuts_off_no_node_of_regular_size(peers: Peers, wide: str) -> None:
    """Typed by hand, for instance: it is followed only while it covers no other node."""
    lease = replace(NEW, subnet=IPv4Network(wide))
    led = Plan() if lease.subnet and lease.subnet.overlaps(SUBNET) else Plan(puts=(route_to(lease),))
    assert take(peers, Added(lease)) == led
    inside = replace(OLD, subnet=IPv4Network("10.1.130.0/24"))
    drops = led.puts
    assert take(peers, Added(inside)) == Plan(puts=(route_to(inside),), drops=drops)


def test_lease_that_leads_nowhere_itself_precedes_none(peers: Peers) -> None:
    take(peers, GONE, Added(peer(V4, backend_type="vxlan")))
    assert take(peers, Added(INSIDE)) == Plan(puts=(route_to(INSIDE),))


def test_overlapped_lease_takes_over_where_an_obstacle_withdraws_the_other(peers: Peers) -> None:
    take(peers, Added(INSIDE))
    assert Plan.of(peers.look(OLDS_ADDRESS, made())) == Plan(puts=(route_to(INSIDE),), drops=(route(OLD),))
    assert Plan.of(peers.look(HostNetworks(), made())) == Plan(puts=(route(OLD),), drops=(route_to(INSIDE),))


def test_lease_that_goes_while_it_is_overlapped_is_forgotten(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    take(peers, Added(INSIDE))
    assert take(peers, Removed(INSIDE.key)) == Plan()
    assert peers.view().reasons == {}
    take(peers, Added(INSIDE))
    assert caplog.text.count("is not followed") == 2
    take(peers, Removed(INSIDE.key), GONE)
    assert take(peers, Added(INSIDE)) == Plan(puts=(route_to(INSIDE),))


# ---- the log --------------------------------------------------------------------------------------


def test_each_change_of_a_lease_is_told_once(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    take(peers, Added(NEW))
    take(peers, GONE)
    take(peers, Added(OLD))
    assert caplog.messages == []
    peers.log_changes(0.0)
    peers.log_changes(0.0)
    assert caplog.messages == [
        "Subnet added: 10.1.6.0/24 via 192.168.0.6, fd77::6",
        "Subnet added: 10.1.6.0/24 via 192.168.0.7, fd77::6, which changed",
        "Subnet removed: 10.1.6.0/24",
        "Subnet added: 10.1.6.0/24 via 192.168.0.6, fd77::6",
    ]


def test_many_changes_are_told_in_one_line(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    crowd = [Lease(OLD.attrs, IPv4Network((0x0A010A00 + (each << 8), 24))) for each in range(10)]
    take(peers, Snapshot((OWN, *crowd)))
    peers.log_changes(0.0)
    take(peers, Added(OLD), *(Removed(each.key) for each in crowd))
    peers.log_changes(0.5)
    assert caplog.messages == ["Leases: 11 new or changed, 1 gone"]
    assert peers.log_due == 1.0
    peers.log_changes(1.0)
    assert caplog.messages[1:] == ["Leases: 1 new or changed, 10 gone"]
    assert peers.log_due == math.inf


# ---- loss of many leases, and of our own ----------------------------------------------------------


def test_the_brake_hears_of_each_peer_that_is_back_or_gone_for_good() -> None:
    removal_guard = RemovalGuard()
    peers = Peers(OWN, [(IPv4Network("10.0.0.0/8"), 24)], removal_guard)
    crowd = [Lease(OLD.attrs, IPv4Network((0x0A020000 + (each << 8), 24))) for each in range(12)]
    take(peers, Snapshot((OWN, *crowd)))
    take(peers, Snapshot((OWN,)))
    take(peers, *(Added(lease) for lease in crowd[:11]))
    assert removal_guard.holds
    take(peers, Removed(crowd[11].key))
    assert not removal_guard.holds
    assert len(peers) == 11


def test_own_lease_that_cannot_be_read_is_not_lost(peers: Peers) -> None:
    assert take(peers, Snapshot((), frozenset({OWN.key}))) == Plan(drops=(route(OLD),))


def test_a_list_without_our_own_lease_is_passed_over_and_read_again() -> None:
    now = [0.0]
    removal_guard = RemovalGuard(is_on=False, now=lambda: now[0])
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], removal_guard)
    take(peers, Snapshot((OWN, OLD)))
    for _ in range(2):
        assert take(peers, Snapshot(())) == Plan()
        assert not removal_guard.is_due()
        now[0] += HOLD
        assert removal_guard.is_due()
    assert take(peers, Snapshot((OWN,))) == Plan(drops=(route(OLD),))
    assert not removal_guard.holds


# ---- leases that would harm this host ------------------------------------------------------------

ON_A_BRIDGE = HostNetworks(frozenset({Obstacle(SUBNET, "br7", "network")}))
NEWS_ADDRESS = HostNetworks(local=frozenset({IPv4Network("192.168.0.7/32")}))
OLDS_ADDRESS = HostNetworks(local=frozenset({IPv4Network("192.168.0.6/32")}))


def test_obstacle_withdraws_what_leads_to_a_peer_until_it_is_gone(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert Plan.of(peers.look(ON_A_BRIDGE, made())) == Plan(drops=(route(OLD),))
    assert peers.unsafe() == [f"{SUBNET}: {peers.view().reasons[OLD.key].text}"]
    assert peers.unclear == set()
    assert take(peers, Added(NEW)) == Plan()
    assert Plan.of(peers.look(ON_A_BRIDGE, made())) == Plan()
    assert Plan.of(peers.look(HostNetworks(), made())) == Plan(puts=(route(NEW),))
    assert peers.unsafe() == []
    for _ in range(2):
        peers.log_changes(0.0)
    assert sum("Unsafe lease" in line for line in caplog.messages) == 1
    assert caplog.messages.count(f"Lease {SUBNET} no longer harms this host") == 1


def test_lease_that_announces_an_address_of_this_host_is_withdrawn(peers: Peers) -> None:
    assert Plan.of(peers.look(NEWS_ADDRESS, made())) == Plan()
    assert take(peers, Added(NEW)) == Plan(drops=(route(OLD),))
    assert take(peers, Added(OLD)) == Plan(puts=(route(OLD),))


@pytest.mark.parametrize("later", [peer(V4, backend_type="vxlan"), SENSELESS])
def test_lease_that_is_refused_for_another_reason_is_called_unsafe_no_longer(
    peers: Peers, later: Lease
) -> None:
    peers.look(NEWS_ADDRESS, made())
    take(peers, Added(NEW))
    assert peers.unsafe()
    take(peers, Added(later))
    assert peers.unsafe() == []
    assert OLD.key in peers.view().reasons


def test_routes_kept_for_an_unparsable_lease_are_withdrawn_on_a_loop(peers: Peers) -> None:
    nonsense = Added(Lease(LeaseAttrs(OWN.attrs.public_ip, None, "host-gw"), SUBNET))
    assert take(peers, nonsense) == Plan()
    assert peers.unclear == {SUBNET}
    assert Plan.of(peers.look(OLDS_ADDRESS, made())) == Plan(drops=(route(OLD),))


def test_lease_around_the_public_ips_of_others_withdraws_them() -> None:
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
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
