"""The distance between two states, and the order in which it is walked."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.udp.resources import PumpPeer
from flanneld.state.diff import Plan, compare, diff, plan, without_ways_to
from flanneld.state.resources import (
    Address,
    FdbEntry,
    Key,
    Kind,
    Neighbor,
    Resource,
    RivalRoute,
    Route,
    State,
    Vxlan,
)

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


def carried_out(steps: Plan, actual: State) -> dict[Key, Resource]:
    after = dict(actual)
    after.update({resource.key: resource for resource in steps.puts})
    for resource in steps.drops:
        del after[resource.key]
    return after


def test_foundations_are_made_first_and_removed_last() -> None:
    everything = [Kind.LINK, Kind.ADDRESS, Kind.NEIGHBOR, Kind.FDB, Kind.ROUTE]
    made = diff(state(*EVERY_KIND), {})
    assert [resource.kind for resource in made.puts] == everything
    removed = diff({}, state(*EVERY_KIND))
    assert [resource.kind for resource in removed.drops] == everything[::-1]


def test_what_differs_is_made_over_without_being_removed() -> None:
    steps = diff(state(route(1)), state(route(2)))
    assert (steps.puts, steps.drops) == ((route(1),), ())
    assert steps.over == state(route(2))


def test_what_is_right_is_not_touched() -> None:
    steps = diff(state(*EVERY_KIND), state(*EVERY_KIND))
    assert not steps
    assert steps == Plan()


def test_a_plan_of_either_half_is_something_to_do() -> None:
    assert plan([route(1)], [])
    assert plan([], [route(1)])


def test_a_part_of_a_plan_keeps_the_order() -> None:
    whole = plan(EVERY_KIND, EVERY_KIND)
    part = whole.only(lambda resource: resource.kind in (Kind.ROUTE, Kind.LINK))
    assert part == Plan((device(1), route(1)), (route(1), device(1)))


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
def test_a_plan_leads_to_the_wanted_state_and_then_nothing_is_left_to_do(
    wanted: dict[Key, Resource], actual: dict[Key, Resource]
) -> None:
    after = carried_out(diff(wanted, actual), actual)
    assert after == wanted
    assert not diff(wanted, after)


@given(states, states)
def test_a_plan_touches_only_what_differs(wanted: dict[Key, Resource], actual: dict[Key, Resource]) -> None:
    steps = diff(wanted, actual)
    assert all(actual.get(resource.key) != resource for resource in steps.puts)
    assert all(resource.key not in wanted for resource in steps.drops)


@given(st.lists(resources), st.lists(resources))
def test_a_plan_is_always_in_order(puts: list[Resource], drops: list[Resource]) -> None:
    steps = plan(puts, drops)
    kinds = [resource.kind for resource in steps.puts]
    assert kinds == sorted(kinds)
    kinds = [resource.kind for resource in steps.drops]
    assert kinds == sorted(kinds, reverse=True)


def test_plan_that_only_moves_routes_to_the_front_is_something_to_do() -> None:
    assert plan([], [], [route(1)])
    assert plan([], [], [route(1)]).behind == (route(1),)
    assert not plan([], [])


def test_part_of_a_plan_keeps_what_is_behind() -> None:
    whole = plan([device(1)], [], [route(1), route(2)])
    assert whole.only(lambda resource: resource == route(2)) == Plan(behind=(route(2),))


def test_route_to_a_subnet_is_kept_without_its_neighbour_and_so_is_what_a_driver_made() -> None:
    subnet, other = IPv4Network("10.1.1.0/24"), IPv4Network("10.1.2.0/24")
    peers = [PumpPeer("flannel0", net, ip(1)) for net in (subnet, other)]
    stale = (route(1), *peers, FdbEntry("flannel.1", f"{MAC}1", ip(1)))
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


RIVALS = (route(2), RivalRoute(route(1).key))
CONNECTED = RivalRoute(route(1).key, is_connected=True)


def test_foreign_object_is_left_alone() -> None:
    assert compare({}, [(route(1), False), (route(2), True)]) == Plan(drops=(route(2),))
    assert compare(state(route(1)), [(route(1), True), (route(2), False)]) == Plan()


@pytest.mark.parametrize("there", [*RIVALS, CONNECTED])
def test_route_of_others_in_the_place_of_a_new_one_blocks_it(there: Resource) -> None:
    blocked = ((route(1), there),)
    assert compare(state(route(1)), [(there, False)]) == Plan(blocked=blocked)


@pytest.mark.parametrize("there", RIVALS)
def test_route_of_others_in_the_place_of_ours_is_replaced(there: Resource) -> None:
    expected = Plan(puts=(route(1),), over={there.key: there})
    assert compare(state(route(1)), [(there, False)], state(route(3))) == expected


def test_connected_network_is_never_replaced_nor_put_behind_ours() -> None:
    ours = state(route(1))
    expected = Plan(blocked=((route(1), CONNECTED),))
    assert compare(ours, [(CONNECTED, False)], dict(ours)) == expected
    assert compare(ours, [(CONNECTED, False), (route(1), True)], dict(ours)) == Plan()


def test_routes_found_to_be_ours_are_noted_and_those_of_others_are_not() -> None:
    ours: dict[Key, Resource] = {}
    compare(state(route(1)), [(route(1), False)], ours)
    assert ours == {}
    compare(state(route(1)), [(route(2), True)], ours)
    assert ours == state(route(2))
    compare(state(route(1)), [(route(1), True)], ours)
    assert ours == state(route(1))


@pytest.mark.parametrize("rival", RIVALS)
def test_a_route_behind_another_one_to_its_network_has_to_come_first(rival: Resource) -> None:
    wanted = state(route(1))
    assert compare(wanted, [(rival, False), (route(1), True)]) == Plan(behind=(route(1),))
    assert compare(wanted, [(route(1), True), *((rival, False) for rival in RIVALS)]) == Plan()


@pytest.mark.parametrize("rival", RIVALS)
def test_operators_route_that_serves_is_not_brought_to_the_front(rival: Resource) -> None:
    assert compare(state(route(1)), [(rival, False), (route(1), False)]) == Plan()


def test_of_two_ipv6_routes_to_a_network_either_may_come_first() -> None:
    one, other = (
        Route(IPv6Network("fc00::/64"), "eth0", IPv6Address(f"fd00::{number}")) for number in (1, 2)
    )
    assert compare(state(one), [(other, False), (one, True)]) == Plan()
