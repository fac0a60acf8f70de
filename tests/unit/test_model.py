"""The lease table: what it learns from the store, and what it makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import (
    FAMILIES,
    Added,
    Cached,
    Change,
    Event,
    Family,
    IPNetwork,
    Lease,
    LeaseAttrs,
    LeaseKey,
    LeaseTable,
    Removed,
    Snapshot,
    Uplink,
    contests,
    is_a_hosts,
    is_same_node,
    lies_in,
    name_of,
    overlap,
)

OWN: LeaseKey = (IPv4Network("10.1.1.0/24"), None)
FIVE: LeaseKey = (IPv4Network("10.1.5.0/24"), None)
SIX: LeaseKey = (IPv4Network("10.1.6.0/24"), None)
DUAL: LeaseKey = (IPv4Network("10.1.7.0/24"), IPv6Network("fd00:0:0:7::/64"))
ONLY_IPV6: LeaseKey = (None, IPv6Network("fd00:0:0:8::/64"))
KEYS = (OWN, FIVE, SIX, DUAL, ONLY_IPV6)


def attrs(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.168.0.{number}"), backend_type="host-gw")


def lease(key: LeaseKey, number: int = 1, expires: float | None = 100.0, asof: int = 1) -> Lease:
    return Lease(attrs(number), *key, expires=expires, asof=asof)


def table(*events: Event) -> LeaseTable:
    made = LeaseTable(OWN)
    for event in events:
        made.apply(event)
    return made


def snapshot(*leases: Lease, unreadable: Iterable[LeaseKey] = ()) -> Snapshot:
    return Snapshot(leases, frozenset(unreadable))


def content(made: LeaseTable) -> dict[LeaseKey, LeaseAttrs]:
    return {each.key: each.attrs for each in made}


def test_a_new_lease_is_a_change() -> None:
    made = table()
    assert made.apply(Added(lease(FIVE))) == Change(put=(lease(FIVE),))
    assert content(made) == {FIVE: attrs(1)}


@pytest.mark.parametrize("event", [Added, snapshot], ids=["added", "snapshot"])
def test_a_renewal_changes_nothing(event: type[Added]) -> None:
    made = table(Added(lease(FIVE)))
    renewed = lease(FIVE, expires=200.0, asof=2)
    assert made.apply(event(renewed)) == Change()
    assert list(made) == [renewed]


@pytest.mark.parametrize("event", [Added, snapshot], ids=["added", "snapshot"])
def test_changed_attributes_are_a_change(event: type[Added]) -> None:
    made = table(Added(lease(FIVE, 1)))
    assert made.apply(event(lease(FIVE, 2))) == Change(put=(lease(FIVE, 2),))
    assert content(made) == {FIVE: attrs(2)}


def test_changed_backend_data_are_a_change() -> None:
    before = Lease(LeaseAttrs(backend_type="vxlan", backend_data={"VtepMAC": "02:00:00:00:00:01"}), *FIVE)
    after = Lease(LeaseAttrs(backend_type="vxlan", backend_data={"VtepMAC": "02:00:00:00:00:02"}), *FIVE)
    assert table(Added(before)).apply(Added(after)) == Change(put=(after,))


def test_a_lease_that_comes_back_is_new_again() -> None:
    made = table(Added(lease(FIVE)), Removed(FIVE))
    assert made.apply(Added(lease(FIVE))) == Change(put=(lease(FIVE),))


def test_a_removed_lease_is_gone_once() -> None:
    made = table(Added(lease(FIVE)))
    assert made.apply(Removed(FIVE)) == Change(gone=(FIVE,))
    assert made.apply(Removed(FIVE)) == Change()
    assert len(made) == 0


def test_a_snapshot_takes_away_what_it_lacks_and_adds_what_is_new() -> None:
    made = table(Added(lease(FIVE)), Added(lease(DUAL)))
    assert made.apply(snapshot(lease(DUAL), lease(SIX))) == Change(put=(lease(SIX),), gone=(FIVE,))


def test_an_empty_snapshot_takes_everything_away() -> None:
    made = table(Added(lease(FIVE)), Added(lease(ONLY_IPV6)))
    assert set(made.apply(snapshot()).gone) == {FIVE, ONLY_IPV6}
    assert len(made) == 0


def test_an_unreadable_lease_stays_what_it_was() -> None:
    made = table(Added(lease(FIVE)), Added(lease(SIX)))
    assert made.apply(snapshot(lease(SIX), unreadable=[FIVE])) == Change()
    assert content(made) == {FIVE: attrs(1), SIX: attrs(1)}


def test_lease_of_which_one_of_two_values_can_be_read_stays() -> None:
    made = table(Added(lease(FIVE)))
    assert made.apply(snapshot(lease(FIVE), unreadable=[FIVE])) == Change()


def test_an_unreadable_lease_that_was_unknown_stays_unknown() -> None:
    made = table()
    assert made.apply(snapshot(unreadable=[FIVE])) == Change()
    assert len(made) == 0


@pytest.mark.parametrize("event", [Added(lease(OWN)), Removed(OWN), snapshot(lease(OWN)), snapshot()])
def test_our_own_lease_is_left_out(event: Event) -> None:
    made = table()
    assert made.apply(event) == Change()
    assert len(made) == 0


def test_only_a_snapshot_makes_the_table_complete() -> None:
    made = table(Added(lease(FIVE)), Removed(SIX))
    assert not made.synced
    made.apply(snapshot())
    assert made.synced
    made.apply(Removed(FIVE))
    assert made.synced


def test_leases_out_of_a_cache_are_added_and_do_not_make_the_table_complete() -> None:
    made = table(Added(lease(FIVE)))
    assert made.apply(Cached((lease(SIX),), "a file")) == Change(put=(lease(SIX),))
    assert (content(made), made.synced, made.cached) == ({FIVE: attrs(1), SIX: attrs(1)}, False, "a file")
    assert made.apply(snapshot(lease(FIVE))) == Change(gone=(SIX,))
    assert (made.synced, made.cached) == (True, "")
    assert made.apply(Cached((lease(SIX),), "a file")) == Change(), "the store knows better"
    assert made.cached == ""


def test_a_lease_has_the_name_that_operators_know() -> None:
    assert [name_of(key) for key in (FIVE, DUAL, ONLY_IPV6)] == [
        "10.1.5.0/24",
        "10.1.7.0/24,fd00:0:0:7::/64",
        "fd00:0:0:8::/64",
    ]


def test_table_names_the_leases_that_cannot_be_read_until_they_are_heard_of_again() -> None:
    made = table(Added(lease(FIVE)), snapshot(unreadable=[FIVE, SIX, DUAL]))
    assert made.unreadable == {FIVE, SIX, DUAL}
    made.apply(Added(lease(FIVE)))
    made.apply(Removed(SIX))
    assert made.unreadable == {DUAL}
    made.apply(snapshot())
    assert made.unreadable == set()


def test_list_of_a_table_is_a_copy_and_its_length_is_that_of_the_table() -> None:
    made = table(Added(lease(FIVE)), Added(lease(SIX)))
    leases = made.leases()
    made.apply(Removed(FIVE))
    assert leases == [lease(FIVE), lease(SIX)]
    assert (len(leases), len(made)) == (2, 1)


def test_every_family_has_its_own_addresses_data_and_subnet() -> None:
    four, six = IPv4Address("192.168.0.1"), IPv6Address("fd77::1")
    assert (four.version, six.version) == FAMILIES
    uplink = Uplink("eth0", 2, 1500, four, IPv4Address("203.0.113.1"), six, IPv6Address("2001:db8::1"))
    assert [uplink.local(family) for family in FAMILIES] == [four, six]
    assert [str(uplink.public(family)) for family in FAMILIES] == ["203.0.113.1", "2001:db8::1"]
    announced = LeaseAttrs(four, six, "vxlan", {"VNI": 4}, {"VNI": 6})
    assert [announced.public(family) for family in FAMILIES] == [four, six]
    assert [announced.data(family) for family in FAMILIES] == [{"VNI": 4}, {"VNI": 6}]
    assert tuple(Lease(announced, *DUAL).net(family) for family in FAMILIES) == DUAL


@pytest.mark.parametrize(
    ("addresses", "line"),
    [
        (("192.168.0.1", "203.0.113.1"), "eth0, MTU 1500, 192.168.0.1 announced as 203.0.113.1"),
        ((None, None), "eth0, MTU 1500, fd77::1 announced as 2001:db8::1"),
    ],
)
def test_uplink_is_shown_with_the_addresses_of_the_families_in_use(
    addresses: tuple[str | None, str | None], line: str
) -> None:
    local, public = (None if text is None else IPv4Address(text) for text in addresses)
    six = (None, None) if local else (IPv6Address("fd77::1"), IPv6Address("2001:db8::1"))
    assert str(Uplink("eth0", 2, 1500, local, public, *six)) == line


@pytest.mark.parametrize(
    ("theirs", "ours", "result"),
    [
        (FIVE, FIVE, True),
        (FIVE, SIX, False),
        (DUAL, FIVE, False),
        (DUAL, (None, DUAL[1]), True),
        (DUAL, (DUAL[0], None), True),
        (FIVE, ONLY_IPV6, False),
        ((IPv4Network("10.1.5.128/25"), None), FIVE, True),
        ((IPv4Network("10.1.0.0/16"), None), FIVE, False),
    ],
)
def test_lease_contests_what_it_overlaps_in_one_family_unless_it_is_around_it(
    theirs: LeaseKey, ours: LeaseKey, result: bool
) -> None:
    assert contests(theirs, ours) is result


# ---- for all histories ---------------------------------------------------------------------------

leases = st.builds(
    lease,
    st.sampled_from(KEYS),
    st.integers(1, 3),
    st.none() | st.floats(1, 1000),
    st.integers(0, 5),
)
stores = st.lists(leases, unique_by=lambda each: each.key, max_size=len(KEYS))
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Added, leases),
    st.builds(Removed, st.sampled_from(KEYS)),
    st.builds(Snapshot, stores.map(tuple), st.frozensets(st.sampled_from(KEYS), max_size=1)),
)
histories = st.lists(events, max_size=12)


@given(histories)
def test_changes_reproduce_the_table(history: list[Event]) -> None:
    made, mirror = LeaseTable(OWN), dict[LeaseKey, LeaseAttrs]()
    for event in history:
        change = made.apply(event)
        for key in change.gone:
            del mirror[key]
        for each in change.put:
            assert mirror.get(each.key) != each.attrs
            mirror[each.key] = each.attrs
        assert mirror == content(made)
        assert OWN not in mirror


@given(histories, stores)
def test_snapshot_corrects_any_history(history: list[Event], store: list[Lease]) -> None:
    made = table(*history, snapshot(*store))
    assert set(made) == {each for each in store if each.key != OWN}


@given(st.data(), st.lists(st.builds(Added, leases) | st.builds(Removed, st.sampled_from(KEYS)), max_size=12))
def test_the_order_of_events_about_different_leases_does_not_matter(
    data: st.DataObject, history: list[Added | Removed]
) -> None:
    def key(event: Added | Removed) -> LeaseKey:
        return event.lease.key if isinstance(event, Added) else event.key

    of_each_lease = {k: iter([event for event in history if key(event) == k]) for k in KEYS}
    shuffled_keys = data.draw(st.permutations([key(event) for event in history]))
    shuffled = [next(of_each_lease[k]) for k in shuffled_keys]
    assert set(table(*shuffled)) == set(table(*history))


@given(stores, stores)
def test_events_lead_to_the_same_state_as_a_snapshot(before: list[Lease], after: list[Lease]) -> None:
    gone = [Removed(each.key) for each in before if each.key not in {other.key for other in after}]
    by_events = table(snapshot(*before), *gone, *map(Added, after))
    by_snapshot = table(snapshot(*before), snapshot(*after))
    assert set(by_events) == set(by_snapshot)


def some_network(family: Family) -> st.SearchStrategy[IPNetwork]:
    """Often inside each other: few of the first and of the last bits are set."""
    bits = 32 if family == 4 else 128
    numbers = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda ends: ends[0] << (bits - 2) | ends[1]
    )
    kind = IPv4Network if family == 4 else IPv6Network
    return st.tuples(numbers, st.integers(0, bits)).map(lambda parts: kind(parts, strict=False))


networks = st.sampled_from(FAMILIES).flatmap(some_network)


@given(networks, networks)
def test_networks_overlap_and_lie_in_each_other_as_ipaddress_has_it(one: Any, other: Any) -> None:
    same_family = one.version == other.version
    assert overlap(one, other) == (same_family and one.overlaps(other))
    assert lies_in(one, other) == (same_family and one.subnet_of(other))


def test_attributes_are_told_to_an_operator_without_pythons_notation() -> None:
    attrs = LeaseAttrs(IPv4Address("192.0.2.1"), None, "vxlan", {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"})
    assert str(attrs) == '192.0.2.1, backend vxlan, {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"}'
    assert str(LeaseAttrs()) == "no public IP, backend unnamed"


V4_IP, V6_IP = IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (LeaseAttrs(V4_IP), LeaseAttrs(V4_IP, V6_IP), True),
        (LeaseAttrs(V4_IP, V6_IP), LeaseAttrs(V4_IP), True),
        (LeaseAttrs(None, V6_IP), LeaseAttrs(V4_IP, V6_IP), False),
        (LeaseAttrs(IPv4Address("192.0.2.2"), V6_IP), LeaseAttrs(V4_IP, V6_IP), False),
        (LeaseAttrs(V4_IP, V6_IP), LeaseAttrs(None, V6_IP), True),
        (LeaseAttrs(V4_IP), LeaseAttrs(None, V6_IP), False),
        (LeaseAttrs(), LeaseAttrs(), False),
    ],
)
def test_one_node_is_one_public_ip_in_the_first_family_that_ours_has(
    theirs: LeaseAttrs, ours: LeaseAttrs, expected: bool
) -> None:
    assert is_same_node(theirs, ours) is expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param(("192.0.2.1", "1.0.0.0", "126.0.0.1", "128.0.0.1", "223.255.255.255"), True, id="IPv4"),
        pytest.param(("240.0.0.1", "255.255.255.254"), True, id="the reserved ones of IPv4"),
        pytest.param(("2001:db8::1", "fd00::1", "fe80::1", "::2", "fe00::"), True, id="IPv6"),
        pytest.param(("64:ff9b::c000:201", "::fffe:c000:201", "1::ffff:c000:201"), True, id="near mapped"),
        pytest.param(("0.0.0.0", "0.0.0.1", "0.255.255.255", "::"), False, id="unspecified"),
        pytest.param(("127.0.0.1", "127.255.255.255", "::1"), False, id="loopback"),
        pytest.param(("224.0.0.1", "239.255.255.255", "ff02::1", "ffff::"), False, id="multicast"),
        pytest.param(("255.255.255.255",), False, id="broadcast"),
        pytest.param(("::ffff:192.0.2.1", "::ffff:0:0", "::ffff:ffff:ffff"), False, id="mapped"),
    ],
)
def test_address_can_be_that_of_one_host(texts: tuple[str, ...], expected: bool) -> None:
    assert [is_a_hosts(ip_address(text)) for text in texts] == [expected] * len(texts)
