"""The distance between what a table holds and what it should hold."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.udp.control import ProxyPeer
from flanneld.state.desired import Delta, difference, macs_of, without_ways_to
from flanneld.state.resources import (
    Address,
    FdbEntry,
    Key,
    Neighbor,
    Resource,
    Route,
    State,
    Vxlan,
)
from flanneld.state.table import Claim, Put, Seen

MAC = "02:00:00:00:00:0"


def ip(number: int) -> IPv4Address:
    return IPv4Address(f"192.168.0.{number}")


def device(number: int) -> Vxlan:
    return Vxlan("flannel.1", 1, number, ip(number), 8472, f"{MAC}{number}", 1450)


def route(number: int) -> Route:
    return Route(IPv4Network("10.1.1.0/24"), "flannel.1", ip(number))


EVERY_KIND: tuple[Resource, ...] = (
    route(1),
    FdbEntry("flannel.1", f"{MAC}1", ip(1)),
    device(1),
    Neighbor("flannel.1", ip(1), f"{MAC}1"),
    Address("flannel.1", ip(1)),
)


def state(*resources: Resource) -> dict[Key, Resource]:
    return {resource.key: resource for resource in resources}


def seen(*found: Resource, claim: Claim = Claim.OURS) -> list[Seen]:
    return [Seen(resource, claim) for resource in found]


def carried_out(desired: State, actual: State) -> dict[Key, Resource]:
    puts, stale = difference(desired, seen(*actual.values()))
    after = {**actual, **{put.want.key: put.want for put in puts}}
    for resource in stale:
        del after[resource.key]
    return after


def test_different_object_is_replaced_without_a_removal() -> None:
    assert difference(state(route(1)), seen(route(2))) == ([Put(route(1), route(2), Claim.OURS)], [])


def test_equal_object_is_not_written() -> None:
    assert difference(state(*EVERY_KIND), seen(*EVERY_KIND)) == ([], [])


def test_missing_objects_are_put_in_the_desired_order() -> None:
    puts, _ = difference(state(*EVERY_KIND), [])
    assert puts == [Put(resource) for resource in EVERY_KIND]


def test_foreign_object_is_left_alone_and_told_of_where_it_is_in_the_way() -> None:
    assert difference({}, seen(route(1), claim=Claim.FOREIGN)) == ([], [])
    assert difference(state(route(1)), seen(route(2), claim=Claim.FOREIGN)) == (
        [Put(route(1), route(2), Claim.FOREIGN)],
        [],
    )


def test_stale_objects_are_dropped() -> None:
    assert difference({}, seen(route(1), claim=Claim.LEFT)) == ([], [route(1)])


def test_a_delta_of_either_half_is_something_to_do() -> None:
    assert Delta(puts=(Put(route(1)),))
    assert Delta(drops=(route(1),))
    assert not Delta()


numbers = st.integers(1, 3)
resources: st.SearchStrategy[Resource] = st.one_of(
    st.builds(device, numbers),
    st.builds(route, numbers),
    st.builds(lambda n, m: FdbEntry("flannel.1", f"{MAC}{n}", ip(m)), numbers, numbers),
    st.builds(lambda n, m: Neighbor("flannel.1", ip(n), f"{MAC}{m}"), numbers, numbers),
    st.builds(lambda n: Address("flannel.1", ip(n)), numbers),
)
states = st.lists(resources, max_size=10).map(lambda found: state(*found))


@given(states, states)
def test_a_difference_leads_to_the_wanted_state_and_then_nothing_is_left_to_do(
    desired: dict[Key, Resource], actual: dict[Key, Resource]
) -> None:
    after = carried_out(desired, actual)
    assert after == desired
    assert difference(desired, seen(*after.values())) == ([], [])


@given(states, states)
def test_a_difference_touches_only_what_differs(
    desired: dict[Key, Resource], actual: dict[Key, Resource]
) -> None:
    puts, stale = difference(desired, seen(*actual.values()))
    assert all(actual.get(put.want.key) == put.was != put.want for put in puts)
    assert all(resource.key not in desired for resource in stale)


def test_route_to_a_subnet_is_kept_without_its_neighbour_and_so_is_what_a_driver_made() -> None:
    subnet, other = IPv4Network("10.1.1.0/24"), IPv4Network("10.1.2.0/24")
    peers = [ProxyPeer("flannel0", net, ip(1)) for net in (subnet, other)]
    stale: tuple[Resource, ...] = (route(1), *peers, FdbEntry("flannel.1", f"{MAC}1", ip(1)))
    assert without_ways_to({subnet}, stale) == stale[2:]


def test_what_leads_to_some_subnets_is_left_out_with_the_entry_of_its_mac() -> None:
    subnet, other = IPv4Network("10.1.1.0/24"), IPv4Network("10.1.2.0/24")

    def way(net: IPv4Network, number: int) -> tuple[Resource, ...]:
        mac, base = f"{MAC}{number}", net.network_address
        return (
            Neighbor("flannel.1", base, mac),
            FdbEntry("flannel.1", mac, ip(number)),
            Route(net, "flannel.1", base, onlink=True),
        )

    stale = (*way(subnet, 1), *way(other, 2), device(1))
    assert without_ways_to({subnet}, stale) == (*way(other, 2), device(1))
    assert without_ways_to(set(), stale) == stale


def test_mac_of_an_unclear_lease_is_known_from_an_earlier_reading_too() -> None:
    subnet = IPv4Network("10.1.1.0/24")
    entry = FdbEntry("flannel.1", f"{MAC}1", ip(1))
    assert without_ways_to({subnet}, [entry]) == (entry,)
    assert without_ways_to({subnet}, [entry], [entry.mac]) == ()
    assert list(macs_of({subnet}, [Neighbor("flannel.1", subnet.network_address, entry.mac)])) == [entry.mac]
