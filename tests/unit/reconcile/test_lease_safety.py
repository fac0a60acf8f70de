"""Which leases are unsafe depends on the host and the set of leases, never on the order of the news."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import Lease, LeaseAttrs, LeaseKey
from flanneld.network.obstacles import HostNetworks, Obstacle, Obstacles
from flanneld.reconcile.lease_safety import LeaseSafety

NETWORKS = (IPv4Network("10.5.0.0/16"), IPv6Network("fc00:5::/48"))
OWN = Lease(
    LeaseAttrs(IPv4Address("198.18.0.1"), IPv6Address("fd00::1")),
    IPv4Network("10.5.1.0/24"),
    IPv6Network("fc00:5:0:1::/64"),
)


def lease(number: int, public_ip: str, length: int = 24) -> Lease:
    subnet = IPv4Network((int(IPv4Address("10.5.0.0")) + (number << 8), length), strict=False)
    return Lease(LeaseAttrs(IPv4Address(public_ip)), subnet)


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
)
hosts = st.sampled_from(
    [host(), host("10.5.3.0/24"), host("10.5.4.128/25"), host("10.5.0.0/17"), host(local="198.18.0.4/32")]
)


@given(st.lists(st.one_of(leases, leases.map(lambda each: each.key), hosts), max_size=20))
def test_verdicts_after_any_history_are_those_of_the_set_alone(history: list[object]) -> None:
    safety, now, facts = LeaseSafety(OWN, NETWORKS), dict[LeaseKey, Lease](), Obstacles()
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

        fresh = LeaseSafety(OWN, NETWORKS)
        fresh.look(facts, ())
        fresh.update(now.values(), ())
        assert known == verdicts(fresh, list(now.values()))


def test_lease_with_our_own_public_ip_is_left_to_the_backend() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    safety.look(host(), ())
    assert safety.harm(lease(7, "198.18.0.1")) is None
    assert not safety.is_reachable(lease(7, "198.18.0.1"))


def test_lease_that_is_itself_unsafe_takes_no_public_ips_along() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    safety.look(host("10.5.3.0/24"), ())
    around, inside = lease(3, "198.18.0.3"), lease(7, "10.5.3.9")
    safety.update([around, inside], ())
    assert verdicts(safety, [around, inside]).keys() == {around.key}


def test_both_families_are_looked_at() -> None:
    subnet = IPv6Network("fc00:5:0:7::/64")
    safety = LeaseSafety(OWN, NETWORKS)
    safety.look(Obstacles(HostNetworks(frozenset({Obstacle(subnet, "br7", "network")}))), ())
    both = Lease(LeaseAttrs(IPv4Address("198.18.0.7")), IPv4Network("10.5.7.0/24"), subnet)
    assert str(safety.harm(both)).startswith("br7 is connected to fc00:5:0:7::/64; ")
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:1::9")), None, IPv6Network("fc00:5:0:8::/64"))
    assert "which lies in the leased subnet fc00:5:0:1::/64" in str(safety.harm(inside))


def test_public_ip_above_our_own_is_looked_at_as_well() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    safety.look(host(local="198.18.0.4/32"), ())
    assert safety.harm(lease(7, "198.18.0.4")) is not None


def test_ipv6_public_ip_inside_a_leased_subnet_is_affected_by_it() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    inside = Lease(LeaseAttrs(None, IPv6Address("fc00:5:0:9::7")), None, IPv6Network("fc00:5:0:8::/64"))
    safety.update([inside], ())
    around = Lease(LeaseAttrs(None, IPv6Address("fd00::9")), None, IPv6Network("fc00:5:0:9::/64"))
    assert inside.key in safety.update([around], ())


def test_public_ip_in_two_leased_subnets_is_said_to_lie_in_the_longer_prefix() -> None:
    wide, narrow = lease(4, "198.18.0.2", 22), lease(4, "10.5.4.9", 25)
    for order in ([wide, narrow], [narrow, wide]):
        safety = LeaseSafety(OWN, NETWORKS)
        safety.update(order, ())
        assert "lies in the leased subnet 10.5.4.0/25" in str(safety.harm(narrow))


def test_lease_whose_public_ip_has_left_the_network_is_affected_by_no_subnet_there() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    safety.update([lease(2, "10.5.7.9")], ())
    safety.update([lease(2, "198.18.0.2")], ())
    assert safety.update([lease(7, "198.18.0.7")], ()) == set()


def test_lease_of_another_host_is_reachable_and_of_concern_only_inside_the_network() -> None:
    safety = LeaseSafety(OWN, NETWORKS)
    safety.look(host(), ())
    assert safety.is_reachable(lease(7, "198.18.0.7")) is True
    assert safety.concerns(IPv4Network("10.5.7.0/24")) is True
    assert safety.concerns(IPv4Network("192.0.2.0/24")) is False
