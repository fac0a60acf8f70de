"""Which leases are unsafe depends on the host and the set of leases, never on the order of the news."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.errors import Refused, Unsafe
from flanneld.model import FAMILIES, IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey, lies_in, overlap
from flanneld.network.obstacles import HostNetworks, Obstacle
from flanneld.reconcile.claims import AddressClaims, Cells

NO_LEASES: dict[LeaseKey, Lease] = {}
RANGES: tuple[tuple[IPNetwork, int], ...] = (
    (IPv4Network("10.5.0.0/16"), 24),
    (IPv6Network("fc00:5::/48"), 64),
)
OWN = Lease(
    LeaseAttrs(IPv4Address("198.18.0.1"), IPv6Address("fd00::1")),
    IPv4Network("10.5.1.0/24"),
    IPv6Network("fc00:5:0:1::/64"),
)


def lease(number: int, public_ip: str, length: int = 24, created: int = 0) -> Lease:
    subnet = IPv4Network((int(IPv4Address("10.5.0.0")) + (number << 8), length), strict=False)
    return Lease(LeaseAttrs(IPv4Address(public_ip)), subnet, created=created)


def claims_of(*leases: Lease, facts: HostNetworks | None = None) -> AddressClaims:
    claims = AddressClaims(OWN, RANGES, {each.key: each for each in leases}.get)
    claims.look(facts or HostNetworks())
    claims.update(leases, ())
    return claims


def host(*nets: str, local: str = "198.18.0.1/32") -> HostNetworks:
    found = frozenset(Obstacle(IPv4Network(net), "br7", "network") for net in nets)
    return HostNetworks(found, frozenset({IPv4Network(local)}))


def verdicts(claims: AddressClaims, leases: list[Lease]) -> dict[LeaseKey, str]:
    return {each.key: str(harm) for each in leases if (harm := claims.refusal(each))}


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
    now, facts = dict[LeaseKey, Lease](), HostNetworks()
    claims = AddressClaims(OWN, RANGES, now.get)
    known: dict[LeaseKey, str] = {}
    for item in history:
        if isinstance(item, HostNetworks):
            facts = item
            claims.look(facts)
            affected = set(now)
        elif isinstance(item, Lease):
            now[item.key] = item
            affected = claims.update([item], ()) | {item.key}
        else:
            assert isinstance(item, tuple)
            affected = claims.update((), [item]) | {item} if now.pop(item, None) else set()
        for key in affected:
            known.pop(key, None)
        known |= verdicts(claims, [now[key] for key in affected if key in now])

        assert known == verdicts(claims_of(*now.values(), facts=facts), list(now.values()))


def both(ipv4: Lease, number: int, public: int, length: int) -> Lease:
    """Return a lease with an IPv6 subnet, too."""
    subnet = IPv6Network(((0xFC00_0005 << 96) + (number << 64), length), strict=False)
    home = 0xFC00_0005 << 96 | public << 64 | 9 if public else 0xFD00 << 112 | 7
    attrs = LeaseAttrs(ipv4.attrs.public_ip, IPv6Address(home))
    return Lease(attrs, ipv4.subnet, subnet, created=ipv4.created)


dual = st.builds(both, leases, st.integers(0, 7), st.integers(0, 7), st.sampled_from([62, 64, 65]))


def by_the_rules(lease: Lease, others: Collection[Lease], facts: HostNetworks) -> type[Refused] | None:
    """Return how a lease is refused, by reading the rules one by one for all leases."""
    nets = [net for net in lease.key if net is not None]
    if any(overlap(net, ours) for net in nets for ours in OWN.key if ours is not None):
        return Refused
    if any(not any(lies_in(net, network) for network, _ in RANGES) for net in nets):
        return Refused
    if any(lies_in(each.net, net) for each in facts.obstacles for net in nets):
        return Unsafe
    for family in FAMILIES:
        public_ip, subnet = lease.attrs.public(family), lease.net(family)
        if public_ip is not None and subnet is not None and public_ip != OWN.attrs.public(family):
            around = [each for each in others if has(each.net(family), public_ip)]
            taken = [each for each in around if not 0 < lease.created < each.created]
            if any(has(net, public_ip) for net in (*facts.local, *OWN.key)):
                return Unsafe
            if public_ip in facts.broadcast or any(is_sound(each, facts) for each in taken):
                return Unsafe
        for each in others:
            inside = each.net(family) and has(subnet, each.attrs.public(family))
            if inside and 0 < each.created < lease.created and is_sound(each, facts):
                return Unsafe
    return None


def has(net: IPNetwork | None, address: IPAddress | None) -> bool:
    return net is not None and address is not None and address in net


def is_sound(lease: Lease, facts: HostNetworks) -> bool:
    return by_the_rules(replace(lease, attrs=LeaseAttrs()), (), facts) is None


@given(st.lists(st.one_of(leases, dual), max_size=12), hosts)
def test_verdicts_are_those_of_the_rules_one_by_one(known: list[Lease], facts: HostNetworks) -> None:
    now = {each.key: each for each in known}
    claims = claims_of(*now.values(), facts=facts)
    for each in now.values():
        reason = claims.refusal(each)
        assert (None if reason is None else type(reason)) == by_the_rules(each, now.values(), facts)


def test_subnet_of_a_family_that_the_network_lacks_leaves_the_other_one_in_force() -> None:
    around = Lease(LeaseAttrs(), IPv4Network("10.5.7.0/24"), IPv6Network("fc00:9:0:7::/64"), created=2)
    inside = lease(3, "10.5.7.9", created=9)
    claims = AddressClaims(OWN, RANGES[:1], {each.key: each for each in (around, inside)}.get)
    claims.update([around, inside], ())
    assert claims.refusal(around) is None
    assert "lies in the leased subnet 10.5.7.0/24" in str(claims.refusal(inside))


def test_lease_with_our_own_public_ip_is_left_to_the_backend() -> None:
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    claims.look(host())
    assert claims.refusal(lease(7, "198.18.0.1")) is None
    assert not claims.is_reachable(lease(7, "198.18.0.1"))


def test_lease_that_is_itself_unsafe_takes_no_public_ips_along() -> None:
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    claims.look(host("10.5.3.0/24"))
    around, inside = lease(3, "198.18.0.3"), lease(7, "10.5.3.9")
    claims.update([around, inside], ())
    assert verdicts(claims, [around, inside]).keys() == {around.key}


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
    claims = claims_of(*leases.values())
    assert verdicts(claims, list(leases.values())).keys() == {leases[cut_off].key}
    assert claims.is_reachable(leases["inside"]) is (cut_off == "around")


def test_host_precedes_older_leases() -> None:
    # An older node's public IP in our own subnet is not reached from here, whatever others do.
    inside = lease(7, "10.5.1.9", 24, 1)
    assert "lies in the leased subnet 10.5.1.0/24" in str(claims_of(inside).refusal(inside))
    # A subnet around an address of this host harms it, however old the lease is.
    around = lease(80, "198.18.0.3", 24, 1)
    claims = claims_of(around, lease(7, "10.5.80.9", 24, 2), facts=host("10.5.80.9/32"))
    assert str(claims.refusal(around)).startswith("br7 is connected to 10.5.80.9/32; ")
    assert verdicts(claims, [lease(7, "10.5.80.9", 24, 2)]) == {}


def test_newcomer_that_the_hosts_network_stood_in_the_way_of_is_refused_for_the_older_then() -> None:
    newcomer, older = lease(80, "198.18.0.3", 24, 9), lease(7, "10.5.80.9", 24, 4)
    for order in ([newcomer, older], [older, newcomer]):
        claims = AddressClaims(OWN, RANGES, {each.key: each for each in order}.get)
        claims.look(host("10.5.80.0/24"))
        for each in order:
            claims.update([each], ())
        claims.look(HostNetworks())
        assert verdicts(claims, order).keys() == {newcomer.key}


def test_lease_that_is_not_followed_itself_cuts_no_younger_one_off() -> None:
    outside = Lease(LeaseAttrs(IPv4Address("10.5.80.9")), IPv4Network("10.6.1.0/24"), created=1)
    ours = lease(1, "10.5.80.9", 25, 1)
    blocked = lease(3, "10.5.80.9", 24, 1)
    around = lease(80, "198.18.0.3", 24, 2)
    claims = claims_of(outside, ours, blocked, around, facts=host("10.5.3.0/24"))
    assert claims.refusal(around) is None


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
        found = claims_of(around, older).refusal(around)
        assert (found is not None and f"{subnet} is around {public_ip}" in str(found)) is harm


def test_both_families_are_looked_at() -> None:
    subnet = IPv6Network("fc00:5:0:7::/64")
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    claims.look(HostNetworks(frozenset({Obstacle(subnet, "br7", "network")})))
    both = Lease(LeaseAttrs(IPv4Address("198.18.0.7")), IPv4Network("10.5.7.0/24"), subnet)
    assert str(claims.refusal(both)).startswith("br7 is connected to fc00:5:0:7::/64; ")
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:1::9")), None, IPv6Network("fc00:5:0:8::/64"))
    assert "which lies in the leased subnet fc00:5:0:1::/64" in str(claims.refusal(inside))


def test_public_ip_above_our_own_is_looked_at_as_well() -> None:
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    claims.look(host(local="198.18.0.4/32"))
    assert claims.refusal(lease(7, "198.18.0.4")) is not None


def test_ipv6_public_ip_inside_a_leased_subnet_is_affected_by_it() -> None:
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:9::7")), None, IPv6Network("fc00:5:0:8::/64"))
    claims.update([inside], ())
    around = Lease(LeaseAttrs(None, IPv6Address("fd00::9")), None, IPv6Network("fc00:5:0:9::/64"))
    assert inside.key in claims.update([around], ())


def test_public_ip_in_two_leased_subnets_is_said_to_lie_in_the_longer_prefix() -> None:
    wide, narrow = lease(4, "198.18.0.2", 22), lease(4, "10.5.4.9", 25)
    for order in ([wide, narrow], [narrow, wide]):
        claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
        claims.update(order, ())
        assert "lies in the leased subnet 10.5.4.0/25" in str(claims.refusal(narrow))


@pytest.mark.parametrize("left", [1, 0], ids=["while others are inside", "as the last one"])
@pytest.mark.parametrize("moves", [True, False], ids=["moves out", "is gone"])
def test_public_ip_that_has_left_the_network_affects_a_subnet_there_once(*, moves: bool, left: int) -> None:
    inside, around, other = (
        lease(2, "10.5.7.9", created=1),
        lease(7, "198.18.0.7", created=2),
        lease(3, "10.5.9.9"),
    )
    now = {each.key: each for each in (inside, around, *[other][:left])}
    claims = AddressClaims(OWN, RANGES, now.get)
    claims.update(now.values(), ())
    assert claims.refusal(around) is not None
    del now[inside.key]
    put = [lease(2, "198.18.0.2")] if moves else []
    now.update({each.key: each for each in put})
    assert around.key in claims.update(put, () if moves else [inside.key])
    assert claims.refusal(around) is None
    assert claims.update([around], ()) == set()


@pytest.mark.parametrize(
    ("subnet", "is_inside"),
    [
        ("10.4.255.0/24", False),
        ("10.5.0.0/24", True),
        ("10.5.255.0/24", True),
        ("10.5.255.255/32", True),
        ("10.6.0.0/24", False),
        ("10.6.0.0/32", False),
        ("10.5.128.0/17", True),
        ("10.4.0.0/15", False),
    ],
)
def test_subnet_is_inside_the_network_with_all_its_addresses(subnet: str, is_inside: bool) -> None:
    own = Lease(OWN.attrs, None, OWN.key[1])
    found = AddressClaims(own, RANGES, NO_LEASES.get).refusal(Lease(LeaseAttrs(), IPv4Network(subnet)))
    assert ("" if found is None else str(found)).startswith("" if is_inside else "it is outside our network")
    assert (found is None) is is_inside


def test_lease_of_another_host_is_reachable_and_of_concern_only_inside_the_network() -> None:
    claims = AddressClaims(OWN, RANGES, NO_LEASES.get)
    claims.look(host())
    assert claims.is_reachable(lease(7, "198.18.0.7")) is True
    assert claims.concerns(IPv4Network("10.5.7.0/24")) is True
    assert claims.concerns(IPv4Network("192.0.2.0/24")) is False


@pytest.mark.parametrize("length", [16, 20, 24, 28, 30, 32])
def test_what_overlaps_a_network_is_found_whatever_the_size_of_a_cell(length: int) -> None:
    nets = [
        IPv4Network(text)
        for text in (
            "10.5.0.0/16",
            "10.5.0.0/20",
            "10.5.3.0/24",
            "10.5.3.16/28",
            "10.5.3.17/32",
            "10.5.3.18/31",
            "10.5.4.0/28",
            "10.5.255.255/32",
            "10.6.0.0/24",
        )
    ]
    for kept in (nets, *([each] for each in nets)):
        cells: Cells[str] = Cells({4: length})
        for each in kept:
            cells.add(each, str(each))
        for net in nets:
            around = {str(each) for each in kept if overlap(each, net)}
            place = 4, int(net.network_address), 32 - net.prefixlen
            assert sorted(claim.owner for claim in cells.touching(*place)) == sorted(around)
            assert not (around and cells.is_free(*place))


class CountedOwner:
    """Owner that counts how often it is compared with another one."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedOwner.comparisons += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)


def test_owners_of_one_address_are_not_compared_with_one_another() -> None:
    cells: Cells[CountedOwner] = Cells({})
    net, owners = IPv4Network("10.5.7.9/32"), [CountedOwner() for _ in range(200)]
    CountedOwner.comparisons = 0
    for owner in owners:
        cells.add(net, owner)
    for owner in owners[1:]:
        cells.discard(net, owner)
    assert [claim.owner for claim in cells.touching(4, int(net.network_address), 0)] == owners[:1]
    assert CountedOwner.comparisons < len(owners)
