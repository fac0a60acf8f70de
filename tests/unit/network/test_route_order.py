"""Which of several routes to one network counts, and whose it is."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from flanneld.network.rtnetlink.routes import Behind, in_order
from flanneld.state.resources import Key, Resource, RivalRoute, Route
from flanneld.state.table import Claim, Seen


def route(number: int) -> Route:
    return Route(IPv4Network("10.1.1.0/24"), "flannel.1", IPv4Address(f"192.168.0.{number}"))


def state(*resources: Resource) -> dict[Key, Resource]:
    return {resource.key: resource for resource in resources}


def ours(resource: Resource) -> Seen:
    return Seen(resource)


def foreign(resource: Resource) -> Seen:
    return Seen(resource, Claim.FOREIGN)


def counting(
    desired: dict[Key, Resource], found: list[Seen], known: dict[Key, Resource] | None = None
) -> list[Seen]:
    return list(in_order(desired, found, {} if known is None else known))


RIVALS = (route(2), RivalRoute(route(1).key))
CONNECTED = RivalRoute(route(1).key, is_connected=True)
WANTED = state(route(1))


def test_the_first_of_the_wrong_ones_counts() -> None:
    assert counting(WANTED, [foreign(route(2)), foreign(route(3))]) == [foreign(route(2))]


def test_one_behind_the_right_one_does_not_count() -> None:
    assert counting(WANTED, [ours(route(1)), foreign(route(2))]) == [ours(route(1))]


def test_all_to_a_network_that_is_not_wanted_count() -> None:
    found = [ours(route(1)), foreign(route(2)), ours(route(3))]
    assert counting({}, found) == found


def test_routes_found_to_be_ours_are_noted_and_those_of_others_are_not() -> None:
    known: dict[Key, Resource] = {}
    counting(WANTED, [foreign(route(1))], known)
    assert known == {}
    counting(WANTED, [ours(route(2))], known)
    assert known == state(route(2))
    counting(WANTED, [ours(route(1))], known)
    assert known == WANTED


def test_routes_of_ours_are_forgotten_when_they_are_neither_wanted_nor_there() -> None:
    known = dict(WANTED)
    counting({}, [ours(route(1))], known)
    assert known == WANTED
    counting({}, [], known)
    assert known == {}


def test_lost_route_stays_ours_while_it_is_wanted() -> None:
    known = dict(WANTED)
    counting(WANTED, [], known)
    assert known == WANTED


@pytest.mark.parametrize("rival", RIVALS)
def test_a_route_behind_another_one_to_its_network_has_to_come_first(rival: Resource) -> None:
    assert counting(WANTED, [foreign(rival), ours(route(1))]) == [Seen(Behind(route(1)))]


@pytest.mark.parametrize("rival", RIVALS)
def test_operators_route_that_serves_is_not_brought_to_the_front(rival: Resource) -> None:
    assert counting(WANTED, [foreign(rival), foreign(route(1))]) == [foreign(route(1))]


def test_connected_network_is_never_put_behind_ours() -> None:
    known = dict(WANTED)
    assert counting(WANTED, [foreign(CONNECTED), ours(route(1))], known) == [ours(route(1))]


def test_of_two_ipv6_routes_to_a_network_either_may_come_first() -> None:
    one, other = (
        Route(IPv6Network("fc00::/64"), "eth0", IPv6Address(f"fd00::{number}")) for number in (1, 2)
    )
    assert counting(state(one), [foreign(other), ours(one)]) == [ours(one)]
