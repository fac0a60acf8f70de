"""Two keyspaces as one: whatever comes when, the table of peers is that of both."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.model import Added, Event, Lease, LeaseAttrs, LeaseKey, LeaseTable, Removed, Snapshot
from flanneld.subnet.etcd.union import LeaseUnion, OwnInBoth

SIDES = ("v3", "v2")
Told = tuple[str, Event]


def key(number: int) -> LeaseKey:
    return (IPv4Network((f"10.5.{number}.0", 24)), None)


def lease(number: int, host: int = 1, **changes: float | None) -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{host}"), backend_type="host-gw")
    return replace(Lease(attrs, *key(number), expires=100.0), **changes)


keys = st.integers(0, 3)
leases = st.builds(lease, keys, st.integers(1, 3))
snapshots = st.lists(leases, max_size=4, unique_by=lambda each: each.key).map(
    lambda found: Snapshot(tuple(found))
)
events = st.one_of(leases.map(Added), keys.map(key).map(Removed), snapshots)
histories = st.lists(st.tuples(st.sampled_from(SIDES), events), max_size=20)
first_snapshots = st.tuples(snapshots, snapshots).map(lambda pair: list(zip(SIDES, pair, strict=True)))


def table() -> LeaseTable:
    return LeaseTable(own=(None, None))


def held(table: LeaseTable) -> dict[LeaseKey, LeaseAttrs]:
    return {each.key: each.attrs for each in table}


def joined(history: list[Told]) -> LeaseTable:
    """The table that is told by the union."""
    union, whole = LeaseUnion(SIDES), table()
    for side, event in history:
        for news in union.fold(side, event):
            whole.apply(news)
    return whole


def apart(history: list[Told], side: str) -> LeaseTable:
    """The table that one side would make alone."""
    alone = table()
    for name, event in history:
        if name == side:
            alone.apply(event)
    return alone


@given(first_snapshots, histories)
def test_the_table_is_what_both_sides_have_and_v3_counts(first: list[Told], history: list[Told]) -> None:
    whole = [*first, *history]
    assert held(joined(whole)) == held(apart(whole, "v2")) | held(apart(whole, "v3"))


@given(first_snapshots, histories, st.randoms())
def test_the_order_between_the_sides_makes_no_difference(
    first: list[Told], history: list[Told], random: object
) -> None:
    whole = [*first, *history]
    sides = {side: [told for told in whole if told[0] == side] for side in SIDES}
    mixed = []
    while any(sides.values()):
        side = random.choice([name for name in SIDES if sides[name]])  # type: ignore[attr-defined]
        mixed.append(sides[side].pop(0))
    assert held(joined(mixed)) == held(joined(whole))


@given(first_snapshots, histories, snapshots)
def test_a_snapshot_of_one_side_removes_no_peer_of_the_other(
    first: list[Told], history: list[Told], last: Snapshot
) -> None:
    whole = [*first, *history]
    for side, other in (SIDES, SIDES[::-1]):
        assert held(apart(whole, other)).keys() <= held(joined([*whole, (side, last)])).keys()


@given(st.lists(events, max_size=20))
def test_while_one_side_is_unknown_nothing_is_gone_and_nothing_is_complete(history: list[Event]) -> None:
    union, whole = LeaseUnion(SIDES), table()
    ever: set[LeaseKey] = set()
    for event in history:
        for news in union.fold("v3", event):
            assert isinstance(news, Added)
            whole.apply(news)
            ever.add(news.lease.key)
    assert held(whole).keys() == ever
    assert not whole.synced


def test_lease_unreadable_in_one_api_keeps_its_state() -> None:
    union = LeaseUnion(SIDES)
    union.fold("v3", Snapshot((lease(1),)))
    union.fold("v2", Snapshot(()))
    (event,) = union.fold("v3", Snapshot((), frozenset({key(1), key(2)})))
    assert event == Snapshot((lease(1),), frozenset({key(2)}))
    assert union.fold("v2", Removed(key(2))) == []


def test_a_subnet_that_the_sides_give_to_two_nodes_is_disputed() -> None:
    union = LeaseUnion(SIDES)
    union.fold("v3", Snapshot((lease(1, 1), lease(2, 2))))
    union.fold("v2", Snapshot((lease(1, 3), lease(2, 2))))
    assert list(union.disputes()) == [(lease(1, 1), lease(1, 3))]
    union.fold("v2", Added(lease(1, 1)))
    assert list(union.disputes()) == []


# ---- our own lease ---------------------------------------------------------------------------


def own(v3: Lease | None = None, v2: Lease | None = None) -> OwnInBoth:
    made = OwnInBoth(SIDES)
    made.written("v3", v3 or lease(1, asof=100, expires=500.0))
    made.written("v2", v2 or lease(1, asof=7, expires=400.0))
    return made


def told(events: list[Event]) -> Lease:
    (event,) = events
    assert isinstance(event, Added)
    return event.lease


def test_the_ends_of_the_halves_are_told_apart_and_a_lost_one_has_ended() -> None:
    both = own()
    assert [both.ends(side) for side in SIDES] == [500.0, 400.0]
    both.hear("v3", Removed(key(1)), 50.0)
    assert [both.ends(side) for side in SIDES] == [float("-inf"), 400.0]


def test_the_whole_ends_with_the_half_that_ends_first() -> None:
    assert own().whole().expires == 400.0
    assert own(v2=lease(1, expires=None)).whole().expires == 500.0
    assert own(lease(1, expires=None), lease(1, expires=None)).whole().expires is None


def test_the_indices_of_both_are_in_that_of_the_whole() -> None:
    both = own()
    assert [both.asof(side, both.whole().asof) for side in SIDES] == [100, 7]


@pytest.mark.parametrize("side", SIDES)
def test_own_writes_are_no_events(side: str) -> None:
    both = own()
    whole = both.whole()
    for asof in (3, both.asof(side, whole.asof)):
        assert both.hear(side, Added(lease(1, 1, asof=asof)), 50.0) == []
        (told,) = both.hear(side, Added(lease(1, 9, asof=asof)), 50.0)
        assert isinstance(told, Added)
        assert (told.lease.attrs, told.lease.asof) == (lease(1, 9).attrs, whole.asof)


@pytest.mark.parametrize("side", SIDES)
def test_a_later_write_of_another_node_is_told_as_later(side: str) -> None:
    both = own()
    before = both.whole()
    news = told(both.hear(side, Added(lease(1, 9, asof=101)), 50.0))
    assert news.attrs == lease(1, 9).attrs
    assert news.asof > before.asof
    assert both.asof(side, news.asof) == 101


@pytest.mark.parametrize("side", SIDES)
def test_a_half_that_is_lost_makes_the_whole_end_now_and_both_end_it(side: str) -> None:
    both = own()
    before = both.whole()
    assert told(both.hear(side, Removed(key(1)), 50.0)) == replace(before, expires=50.0)
    both.written(side, lease(1, asof=200, expires=600.0))
    assert both.whole().expires in (400.0, 500.0)
    assert both.hear("v2", Removed(key(1)), 50.0) != [Removed(key(1))]
    assert both.hear("v3", Removed(key(1)), 50.0) == [Removed(key(1))]


def test_another_node_in_a_half_that_was_lost_is_not_fought() -> None:
    both = own()
    both.hear("v2", Removed(key(1)), 50.0)
    news = told(both.hear("v2", Added(lease(1, 9, asof=20)), 60.0))
    assert (news.attrs, news.expires) == (lease(1).attrs, 60.0)
    assert both.asof("v2", news.asof) == 7


def test_a_half_that_somebody_put_back_for_us_is_there_again() -> None:
    both = own()
    both.hear("v2", Removed(key(1)), 50.0)
    assert both.hear("v2", Added(lease(1, asof=20, expires=300.0)), 60.0) == []
    assert both.whole().expires == 300.0


def test_lease_is_reserved_while_a_half_that_is_there_does_not_end() -> None:
    both = OwnInBoth(SIDES)
    both.written("v3", lease(1, expires=500.0))
    assert both.missing == 1
    assert not both.is_reserved
    both.written("v2", lease(1, expires=None))
    assert both.is_reserved
    both.hear("v2", Removed(key(1)), 50.0)
    assert not both.is_reserved
