"""Who wants what, and who gets it when two want the same."""

from __future__ import annotations

import random
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from time import process_time

from hypothesis import example, given
from hypothesis import strategies as st

from flanneld.model import LeaseKey
from flanneld.state.desired import LOCAL, Delta, DesiredState, rank
from flanneld.state.resources import FdbEntry, Key, Resource, Route, Vxlan

MACS = ("02:00:00:00:00:01", "02:00:00:00:00:02")
NINE: LeaseKey = (IPv4Network("10.1.9.0/24"), None)
TEN: LeaseKey = (IPv4Network("10.1.10.0/24"), None)
ELEVEN: LeaseKey = (IPv4Network("10.1.11.0/24"), None)
OWNERS: tuple[LeaseKey, ...] = (
    LOCAL,
    NINE,
    TEN,
    (IPv4Network("10.1.10.0/25"), None),
    (IPv4Network("10.1.10.0/24"), IPv6Network("fd00:0:0:1::/64")),
    (IPv4Network("10.1.10.0/24"), IPv6Network("fd00:0:0:2::/64")),
    (None, IPv6Network("fd00:0:0:1::/64")),
)


def fdb(remote: int, mac: str = MACS[0]) -> FdbEntry:
    return FdbEntry("flannel.1", mac, IPv4Address(f"192.168.0.{remote}"))


def route(number: int) -> Route:
    return Route(IPv4Network(f"10.1.{number}.0/24"), "eth0", IPv4Address("192.168.0.1"))


def change(
    desired: DesiredState, owner: LeaseKey, wish: Iterable[Resource]
) -> tuple[list[Resource], list[Resource]]:
    """Let an owner want something: what the kernel must get and lose then."""
    return steps(desired.since(desired.set(owner, wish)))


def steps(delta: Delta) -> tuple[list[Resource], list[Resource]]:
    """What is to be made, and what is to be removed."""
    return [put.want for put in delta.puts], list(delta.drops)


def test_new_claims_are_put_and_former_ones_dropped() -> None:
    desired = DesiredState()
    desired.set(NINE, [route(1), route(2)])
    assert change(desired, NINE, [route(2), route(3)]) == ([route(3)], [route(1)])
    assert set(desired.state.values()) == {route(2), route(3)}


def test_intermediate_values_cause_no_change() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(1)])
    before = desired.set(NINE, [fdb(2)])
    desired.set(NINE, [])
    assert steps(desired.since(before)) == ([], [fdb(1)])


def test_changed_resource_is_replaced_not_dropped() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(1)])
    assert change(desired, NINE, [fdb(2)]) == ([fdb(2)], [])


def test_the_same_wish_again_is_nothing() -> None:
    desired = DesiredState()
    desired.set(NINE, [route(1), fdb(1)])
    assert change(desired, NINE, [route(1), fdb(1)]) == ([], [])


def test_an_empty_wish_is_a_farewell() -> None:
    desired = DesiredState()
    desired.set(NINE, [route(1)])
    assert (NINE in desired, desired.of_owner(NINE)) == (True, (route(1),))
    assert change(desired, NINE, []) == ([], [route(1)])
    assert (NINE in desired, desired.of_owner(NINE), list(desired.owners())) == (False, (), [])


def test_unknown_owner_can_be_removed() -> None:
    assert change(DesiredState(), NINE, []) == ([], [])


def test_the_lower_subnet_wins_whoever_comes_first() -> None:
    first, last = DesiredState(), DesiredState()
    first.set(NINE, [fdb(9)])
    assert change(first, TEN, [fdb(10)]) == ([], [])
    last.set(TEN, [fdb(10)])
    assert change(last, NINE, [fdb(9)]) == ([fdb(9)], [])
    assert first.state == last.state == {fdb(9).key: fdb(9)}


def test_the_other_takes_over_when_the_winner_leaves() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(9)])
    desired.set(TEN, [fdb(10)])
    assert change(desired, NINE, []) == ([fdb(10)], [])
    assert change(desired, TEN, []) == ([], [fdb(10)])


def test_nothing_happens_when_the_loser_leaves() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(9)])
    desired.set(TEN, [fdb(10)])
    assert change(desired, TEN, []) == ([], [])


def test_local_resources_win_over_every_lease() -> None:
    lowest: LeaseKey = (IPv4Network("0.0.0.0/8"), IPv6Network("::/16"))
    assert min((lowest, *OWNERS), key=rank) is LOCAL


def test_a_conflict_names_who_has_it_and_who_goes_without() -> None:
    desired = DesiredState()
    desired.set(TEN, [fdb(10), route(10)])
    desired.set(NINE, [fdb(9), route(9)])
    assert list(desired.conflicts(NINE)) == [(fdb(9), NINE, TEN)]
    assert list(desired.conflicts(TEN)) == [(fdb(9), NINE, TEN)]


def test_conflict_names_a_loser() -> None:
    desired = DesiredState()
    for number, owner in ((9, NINE), (10, TEN), (11, ELEVEN)):
        desired.set(owner, [fdb(number)])
    assert list(desired.conflicts(ELEVEN)) == [(fdb(9), NINE, ELEVEN)]


def test_a_conflict_ends_with_one_of_its_parties() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(9)])
    desired.set(TEN, [fdb(10)])
    desired.set(NINE, [])
    assert list(desired.conflicts(TEN)) == []


def test_keys_with_several_claims_are_listed_with_each_claim_until_one_is_left() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(9), route(9)])
    assert desired.rivals() == {}
    desired.set(TEN, [fdb(10)])
    listed = desired.rivals()
    assert listed == {fdb(9).key: {NINE: fdb(9), TEN: fdb(10)}}
    desired.set(NINE, [fdb(8)])
    assert desired.rivals() == {fdb(9).key: {NINE: fdb(8), TEN: fdb(10)}}
    desired.set(TEN, [])
    assert desired.rivals() == {}
    assert listed == {fdb(9).key: {NINE: fdb(9), TEN: fdb(10)}}


def test_machine_with_the_mac_of_our_own_device_is_named_a_clone() -> None:
    state = DesiredState()
    device = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, MACS[0], 1450)
    state.set(LOCAL, [device])
    state.set(NINE, [FdbEntry("flannel.1", MACS[0], IPv4Address("192.0.2.7"))])
    state.set(TEN, [FdbEntry("flannel.1", MACS[1], IPv4Address("192.0.2.8"))])
    assert [state.cloned_device(owner) for owner in (NINE, TEN)] == [device, None]


def test_list_of_all_wishes_is_a_copy() -> None:
    desired = DesiredState()
    desired.set(NINE, [route(1)])
    listed = desired.by_owner()
    desired.set(NINE, [])
    assert listed == {NINE: (route(1),)}
    assert desired.by_owner() == {}


def test_two_that_want_the_very_same_are_at_peace() -> None:
    desired = DesiredState()
    desired.set(NINE, [fdb(1)])
    desired.set(TEN, [fdb(1)])
    assert list(desired.conflicts(NINE)) == list(desired.conflicts(TEN)) == []
    assert change(desired, NINE, []) == ([], [])


def test_thousands_of_machines_with_one_mac_take_no_time() -> None:
    owners: list[LeaseKey] = [(IPv4Network((i << 8, 24)), None) for i in range(5000)]
    random.Random(1).shuffle(owners)
    desired = DesiredState()
    began = process_time()
    for i, owner in enumerate(owners):
        desired.set(owner, [fdb(i % 250)])
        list(desired.conflicts(owner))
    assert process_time() - began < 2


# ---- for all wishes ------------------------------------------------------------------------------

resources = st.builds(fdb, st.integers(1, 3), st.sampled_from(MACS)) | st.builds(route, st.integers(1, 2))
wishes = st.lists(resources, max_size=4)
moves = st.lists(st.tuples(st.sampled_from(OWNERS), wishes), max_size=12)


def naive(standing: dict[LeaseKey, list[Resource]]) -> dict[Key, Resource]:
    """The lowest owner is written last, and of its own wishes the last one counts."""
    state = {}
    for owner in sorted(standing, key=rank, reverse=True):
        state.update({resource.key: resource for resource in standing[owner]})
    return state


@given(moves)
@example([(TEN, [fdb(1)]), (NINE, [fdb(1), fdb(2)]), (LOCAL, [fdb(3)]), (LOCAL, [])])
def test_the_state_is_what_a_plain_computation_gives(history: list[tuple[LeaseKey, list[Resource]]]) -> None:
    desired, standing = DesiredState(), dict[LeaseKey, list[Resource]]()
    for owner, wish in history:
        desired.set(owner, wish)
        standing[owner] = wish
        assert desired.state == naive(standing)
    assert set(desired.owners()) == {owner for owner, wish in standing.items() if wish}


@given(moves)
def test_returned_delta_leads_from_the_former_state_to_the_new_one(
    history: list[tuple[LeaseKey, list[Resource]]],
) -> None:
    desired, mirror = DesiredState(), dict[Key, Resource]()
    for owner, wish in history:
        puts, drops = change(desired, owner, wish)
        for resource in drops:
            assert mirror.pop(resource.key) == resource
        for resource in puts:
            assert mirror.get(resource.key) != resource
            mirror[resource.key] = resource
        assert mirror == desired.state


@given(st.data(), st.dictionaries(st.sampled_from(OWNERS), wishes))
def test_the_order_in_which_owners_come_does_not_matter(
    data: st.DataObject, standing: dict[LeaseKey, list[Resource]]
) -> None:
    states = []
    for _ in range(2):
        desired = DesiredState()
        for owner in data.draw(st.permutations(list(standing))):
            desired.set(owner, standing[owner])
        states.append(desired.state)
    assert states[0] == states[1]


@given(moves)
def test_there_is_a_conflict_exactly_where_wishes_differ(
    history: list[tuple[LeaseKey, list[Resource]]],
) -> None:
    desired = DesiredState()
    for owner, wish in history:
        desired.set(owner, {resource.key: resource for resource in wish}.values())
    claims = [(owner, resource) for owner in desired.owners() for resource in desired.of_owner(owner)]
    for owner in desired.owners():
        found = {resource.key for resource, _, _ in desired.conflicts(owner)}
        mine = desired.of_owner(owner)
        assert found == {r.key for r in mine if any(r.key == o.key and r != o for _, o in claims)}
