"""Which of several overlapping leases is followed depends on their set, never on the order of the news."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import IPNetwork, Lease, LeaseAttrs, LeaseKey, overlap
from flanneld.reconcile.claims import AddressClaims, Overlaps
from flanneld.state.desired import rank

RANGES: list[tuple[IPNetwork, int]] = [(IPv4Network("10.5.0.0/16"), 24), (IPv6Network("fc00:5::/48"), 64)]


def key(text: str) -> LeaseKey:
    """Return the key that is written as in a log: ``10.5.3.0/24,fc00::/64``."""
    ipv4, _, ipv6 = text.rpartition(",") if ":" in text else (text, "", "")
    return (IPv4Network(ipv4) if ipv4 else None, IPv6Network(ipv6) if ipv6 else None)


class Overlapping(Overlaps):
    """Overlaps of leases that are noted by their keys."""

    def __init__(self) -> None:
        own = Lease(LeaseAttrs(), IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5:0:1::/64"))
        self.claims = AddressClaims(own, RANGES, dict[LeaseKey, Lease]().get)
        self.led: set[LeaseKey] = set()
        super().__init__(self.claims, self.led.__contains__)

    def set(self, key: LeaseKey, *, leads: bool) -> None:
        self.claims.update([Lease(LeaseAttrs(), *key)] if leads else (), () if leads else [key])
        if (key in self.led) != leads:
            (self.led.add if leads else self.led.discard)(key)
            self.note(key)


def settled(keys: Iterable[LeaseKey]) -> Overlapping:
    overlaps = Overlapping()
    for each in keys:
        overlaps.set(each, leads=True)
    overlaps.settle()
    return overlaps


def verdicts(overlaps: Overlaps, keys: Iterable[LeaseKey]) -> dict[LeaseKey, LeaseKey]:
    return {each: winner for each in keys if (winner := overlaps.winners.get(each))}


@pytest.mark.parametrize(
    ("loser", "winner"),
    [
        ("10.5.3.128/25", "10.5.3.0/24"),
        ("10.5.0.0/20", "10.5.3.0/24"),
        ("10.5.3.128/26", "10.5.3.128/25"),
        ("10.5.3.64/26", "10.5.3.0/25"),
        ("10.5.4.0/24,fc00:5:0:4:8000::/65", "10.5.3.0/24,fc00:5:0:4::/64"),
        ("fc00:5:0:3:8000::/65", "10.5.7.0/24,fc00:5:0:3::/64"),
    ],
)
def test_regular_length_wins_and_then_the_lower_subnet(loser: str, winner: str) -> None:
    for order in ((loser, winner), (winner, loser)):
        keys = [key(each) for each in order]
        assert verdicts(settled(keys), keys) == {key(loser): key(winner)}


def test_leases_beside_one_another_and_equal_ones_are_followed() -> None:
    keys = [
        key(text)
        for text in (
            "10.5.3.0/24",
            "10.5.3.0/24,fc00:5:0:3::/64",
            "10.5.4.0/25",
            "10.5.4.128/25",
            "10.5.8.0/21",
        )
    ]
    overlaps = settled(keys)
    assert verdicts(overlaps, keys) == {}


def test_neighbours_of_a_wide_lease_are_not_inside_it() -> None:
    keys = [key(text) for text in ("10.5.2.0/23", "10.5.1.0/24", "10.5.4.0/24", "10.5.5.0/24")]
    assert verdicts(settled(keys), keys) == {}


def test_lease_that_goes_is_forgotten_with_all_that_was_decided() -> None:
    regular, wide = key("10.5.3.0/24"), key("10.5.0.0/20")
    overlaps = settled([regular, wide])
    overlaps.set(wide, leads=False)
    assert overlaps.settle() == [wide]
    assert wide not in overlaps.winners
    assert not overlaps.claims.odd
    overlaps.set(regular, leads=False)
    assert overlaps.settle() == []


def test_lease_that_is_not_followed_itself_takes_nothing_from_others() -> None:
    regular, wide, small = key("10.5.3.0/24"), key("10.5.0.0/20"), key("10.5.9.0/25")
    overlaps = settled([small, wide, regular])
    assert verdicts(overlaps, [regular, wide, small]) == {wide: regular}
    overlaps.set(regular, leads=False)
    assert overlaps.settle() == [wide, small]
    assert verdicts(overlaps, [regular, wide, small]) == {small: wide}


def test_change_that_decides_about_nothing_else_is_told_to_nobody() -> None:
    overlaps = settled([key("10.5.0.0/20"), key("10.5.3.0/24")])
    for text in ("10.5.20.0/24", "10.5.4.0/24", "10.5.2.0/24"):
        overlaps.set(key(text), leads=True)
        assert overlaps.settle() == []


subnets = st.builds(
    lambda number, length: IPv4Network((0x0A050000 + (number << 6), length), strict=False),
    st.integers(0, 31),
    st.sampled_from([22, 23, 24, 24, 24, 25, 26]),
)
subnets_v6 = st.builds(
    lambda number, length: IPv6Network(((0xFC00_0005 << 96) + (number << 62), length), strict=False),
    st.integers(0, 15),
    st.sampled_from([62, 63, 64, 64, 65]),
)
keys = st.one_of(
    st.tuples(subnets, st.none()), st.tuples(st.none(), subnets_v6), st.tuples(subnets, subnets_v6)
)


@given(st.lists(st.tuples(keys, st.booleans(), st.booleans()), max_size=25))
def test_decisions_after_any_history_are_those_of_the_set_alone(
    history: list[tuple[LeaseKey, bool, bool]],
) -> None:
    overlaps, now = Overlapping(), set[LeaseKey]()
    known: dict[LeaseKey, LeaseKey] = {}
    for each, leads, settles in [*history, (key("10.9.0.0/24"), False, True)]:
        (now.add if leads else now.discard)(each)
        overlaps.set(each, leads=leads)
        if settles:
            before, changed = known, overlaps.settle()
            known = verdicts(overlaps, now)
            assert {key for key in before | known if before.get(key) != known.get(key)} <= set(changed)
            assert len(set(changed)) == len(changed)
    assert known.keys() == verdicts(settled(sorted(now, key=rank)), now).keys()
    assert all(_is_nested(each, winner) and winner in now - known.keys() for each, winner in known.items())


@given(st.sets(keys, max_size=15))
def test_no_two_followed_leases_overlap_and_none_is_left_out_without_need(now: set[LeaseKey]) -> None:
    losers = verdicts(settled(now), now)
    followed = now - losers.keys()
    for each in now:
        nested = {other for other in now if other != each and _is_nested(each, other)}
        if each in followed:
            assert not nested & followed
        else:
            assert losers[each] in nested & followed


def _is_nested(one: LeaseKey, other: LeaseKey) -> bool:
    """Return True if a subnet of one lease lies inside one of the other, and both differ."""
    return any(
        ours is not None and theirs is not None and ours != theirs and overlap(ours, theirs)
        for ours, theirs in zip(one, other, strict=True)
    )
