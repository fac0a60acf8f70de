"""Which leases are unsafe depends on the host and the set of leases, never on the order of the news."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import Lease, LeaseAttrs, LeaseKey
from flanneld.network.obstacles import HostNetworks, Obstacle, Obstacles
from flanneld.reconcile.claims import LeaseSafety

NO_LEASES: dict[LeaseKey, Lease] = {}
NETWORKS = (IPv4Network("10.5.0.0/16"), IPv6Network("fc00:5::/48"))
OWN = Lease(
    LeaseAttrs(IPv4Address("198.18.0.1"), IPv6Address("fd00::1")),
    IPv4Network("10.5.1.0/24"),
    IPv6Network("fc00:5:0:1::/64"),
)


def lease(number: int, public_ip: str, length: int = 24, created: int = 0) -> Lease:
    subnet = IPv4Network((int(IPv4Address("10.5.0.0")) + (number << 8), length), strict=False)
    return Lease(LeaseAttrs(IPv4Address(public_ip)), subnet, created=created)


def safety_of(*leases: Lease, facts: Obstacles | None = None) -> LeaseSafety:
    safety = LeaseSafety(OWN, NETWORKS, {each.key: each for each in leases}.get)
    safety.look(facts or Obstacles(), ())
    safety.update(leases, ())
    return safety


def host(*nets: str, local: str = "198.18.0.1/32") -> Obstacles:
    found = frozenset(Obstacle(IPv4Network(net), "br7", "network") for net in nets)
    return Obstacles(HostNetworks(found, frozenset({IPv4Network(local)})))


def verdicts(safety: LeaseSafety, leases: list[Lease]) -> dict[LeaseKey, str]:
    return {each.key: str(harm) for each in leases if (harm := safety.harm(each))}


leases = st.builds(
    lease,
    st.integers(0, 7),
    st.one_of(
        st.integers(1, 5).map(lambda host: f"198.18.0.{host}"),
        st.integers(0, 7).map(lambda number: f"10.5.{number}.9"),
    ),
    st.sampled_from([22, 24, 25]),
    st.integers(0, 3),
)
hosts = st.sampled_from(
    [host(), host("10.5.3.0/24"), host("10.5.4.128/25"), host("10.5.0.0/17"), host(local="198.18.0.4/32")]
)


@given(st.lists(st.one_of(leases, leases.map(lambda each: each.key), hosts), max_size=20))
def test_verdicts_after_any_history_are_those_of_the_set_alone(history: list[object]) -> None:
    now, facts = dict[LeaseKey, Lease](), Obstacles()
    safety = LeaseSafety(OWN, NETWORKS, now.get)
    known: dict[LeaseKey, str] = {}
    for item in history:
        if isinstance(item, Obstacles):
            facts = item
            safety.look(facts, now.values())
            affected = set(now)
        elif isinstance(item, Lease):
            now[item.key] = item
            affected = safety.update([item], ()) | {item.key}
        else:
            assert isinstance(item, tuple)
            affected = safety.update((), [item]) | {item} if now.pop(item, None) else set()
        for key in affected:
            known.pop(key, None)
        known |= verdicts(safety, [now[key] for key in affected if key in now])

        assert known == verdicts(safety_of(*now.values(), facts=facts), list(now.values()))


def test_lease_with_our_own_public_ip_is_left_to_the_backend() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.look(host(), ())
    assert safety.harm(lease(7, "198.18.0.1")) is None
    assert not safety.is_reachable(lease(7, "198.18.0.1"))


def test_lease_that_is_itself_unsafe_takes_no_public_ips_along() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.look(host("10.5.3.0/24"), ())
    around, inside = lease(3, "198.18.0.3"), lease(7, "10.5.3.9")
    safety.update([around, inside], ())
    assert verdicts(safety, [around, inside]).keys() == {around.key}


@pytest.mark.parametrize("length", [24, 22, 18])
@pytest.mark.parametrize(
    ("around", "inside", "cut_off"),
    [
        pytest.param(9, 4, "around", id="a newcomer's subnet around the public IP of a node"),
        pytest.param(4, 9, "inside", id="a newcomer's public IP in the subnet of a node"),
        pytest.param(4, 4, "inside", id="created in the same second"),
        pytest.param(0, 4, "inside", id="the one order is unknown"),
        pytest.param(4, 0, "inside", id="the other order is unknown"),
        pytest.param(0, 0, "inside", id="both orders are unknown"),
    ],
)
def test_of_subnet_and_public_ip_inside_it_the_older_lease_is_followed(
    around: int, inside: int, cut_off: str, length: int
) -> None:
    leases = {"around": lease(80, "198.18.0.3", length, around), "inside": lease(7, "10.5.80.9", 24, inside)}
    safety = safety_of(*leases.values())
    assert verdicts(safety, list(leases.values())).keys() == {leases[cut_off].key}
    assert safety.is_reachable(leases["inside"]) is (cut_off == "around")


def test_host_precedes_older_leases() -> None:
    # An older node's public IP in our own subnet is not reached from here, whatever others do.
    inside = lease(7, "10.5.1.9", 24, 1)
    assert "lies in the leased subnet 10.5.1.0/24" in str(safety_of(inside).harm(inside))
    # A subnet around an address of this host harms it, however old the lease is.
    around = lease(80, "198.18.0.3", 24, 1)
    safety = safety_of(around, lease(7, "10.5.80.9", 24, 2), facts=host("10.5.80.9/32"))
    assert str(safety.harm(around)).startswith("br7 is connected to 10.5.80.9/32; ")
    assert verdicts(safety, [lease(7, "10.5.80.9", 24, 2)]) == {}


def test_newcomer_that_the_hosts_network_stood_in_the_way_of_is_refused_for_the_older_then() -> None:
    newcomer, older = lease(80, "198.18.0.3", 24, 9), lease(7, "10.5.80.9", 24, 4)
    for order in ([newcomer, older], [older, newcomer]):
        safety = LeaseSafety(OWN, NETWORKS, {each.key: each for each in order}.get)
        safety.look(host("10.5.80.0/24"), ())
        for each in order:
            safety.update([each], ())
        safety.look(Obstacles(), order)
        assert verdicts(safety, order).keys() == {newcomer.key}


def test_lease_that_is_not_followed_itself_cuts_no_younger_one_off() -> None:
    outside = Lease(LeaseAttrs(IPv4Address("10.5.80.9")), IPv4Network("10.6.1.0/24"), created=1)
    ours = lease(1, "10.5.80.9", 25, 1)
    blocked = lease(3, "10.5.80.9", 24, 1)
    around = lease(80, "198.18.0.3", 24, 2)
    safety = safety_of(outside, ours, blocked, around, facts=host("10.5.3.0/24"))
    assert safety.harm(around) is None


def test_order_of_creation_decides_in_ipv6_too_and_only_for_the_families_of_a_lease() -> None:
    subnet = IPv6Network("fc00:5:0:7::/64")
    around = Lease(LeaseAttrs(IPv4Address("198.18.0.3")), IPv4Network("10.5.7.0/24"), subnet, created=2)
    public_ip = IPv6Address("fc00:5:0:7::9")
    attrs = LeaseAttrs(IPv4Address("198.18.0.4"), public_ip)
    keys: list[tuple[LeaseKey, bool]] = [
        ((None, IPv6Network("fc00:5:0:8::/64")), True),
        ((IPv4Network("10.5.8.0/24"), None), False),
    ]
    for key, harm in keys:
        older = Lease(attrs, key[0], key[1], created=1)
        found = safety_of(around, older).harm(around)
        assert (found is not None and f"{subnet} is around {public_ip}" in str(found)) is harm


def test_both_families_are_looked_at() -> None:
    subnet = IPv6Network("fc00:5:0:7::/64")
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.look(Obstacles(HostNetworks(frozenset({Obstacle(subnet, "br7", "network")}))), ())
    both = Lease(LeaseAttrs(IPv4Address("198.18.0.7")), IPv4Network("10.5.7.0/24"), subnet)
    assert str(safety.harm(both)).startswith("br7 is connected to fc00:5:0:7::/64; ")
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:1::9")), None, IPv6Network("fc00:5:0:8::/64"))
    assert "which lies in the leased subnet fc00:5:0:1::/64" in str(safety.harm(inside))


def test_public_ip_above_our_own_is_looked_at_as_well() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.look(host(local="198.18.0.4/32"), ())
    assert safety.harm(lease(7, "198.18.0.4")) is not None


def test_ipv6_public_ip_inside_a_leased_subnet_is_affected_by_it() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:9::7")), None, IPv6Network("fc00:5:0:8::/64"))
    safety.update([inside], ())
    around = Lease(LeaseAttrs(None, IPv6Address("fd00::9")), None, IPv6Network("fc00:5:0:9::/64"))
    assert inside.key in safety.update([around], ())


def test_public_ip_in_two_leased_subnets_is_said_to_lie_in_the_longer_prefix() -> None:
    wide, narrow = lease(4, "198.18.0.2", 22), lease(4, "10.5.4.9", 25)
    for order in ([wide, narrow], [narrow, wide]):
        safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
        safety.update(order, ())
        assert "lies in the leased subnet 10.5.4.0/25" in str(safety.harm(narrow))


def test_lease_whose_public_ip_has_left_the_network_is_affected_by_no_subnet_there() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.update([lease(2, "10.5.7.9")], ())
    safety.update([lease(2, "198.18.0.2")], ())
    assert safety.update([lease(7, "198.18.0.7")], ()) == set()


def test_lease_of_another_host_is_reachable_and_of_concern_only_inside_the_network() -> None:
    safety = LeaseSafety(OWN, NETWORKS, NO_LEASES.get)
    safety.look(host(), ())
    assert safety.is_reachable(lease(7, "198.18.0.7")) is True
    assert safety.concerns(IPv4Network("10.5.7.0/24")) is True
    assert safety.concerns(IPv4Network("192.0.2.0/24")) is False
