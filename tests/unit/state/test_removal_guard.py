"""When the removal guard holds, and when it lets go."""

from __future__ import annotations

import math
from ipaddress import IPv4Network

import pytest

from flanneld.model import Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.state.permits import HOLD, RemovalGuard
from tests.clock import Clock


@pytest.fixture
def removal_guard(clock: Clock) -> RemovalGuard:
    return RemovalGuard(now=clock)


def keys(number: int) -> list[LeaseKey]:
    return [(IPv4Network((0x0A050000 + (each << 8), 24)), None) for each in range(number)]


def snapshot(number: int) -> Snapshot:
    return Snapshot(tuple(Lease(LeaseAttrs(), *key) for key in keys(number)))


@pytest.mark.parametrize(("known", "left"), [(11, 5), (12, 5), (5000, 0)])
def test_more_than_half_of_more_than_ten_are_held(removal_guard: RemovalGuard, known: int, left: int) -> None:
    held = removal_guard.pass_on(snapshot(left), keys(known))
    assert held.unreadable == frozenset(keys(known)[left:])
    assert held.leases == snapshot(left).leases


@pytest.mark.parametrize(("known", "left"), [(10, 0), (12, 6), (11, 6), (0, 5)])
def test_few_peers_or_the_lesser_half_may_go_at_once(
    removal_guard: RemovalGuard, known: int, left: int
) -> None:
    assert removal_guard.pass_on(snapshot(left), keys(known)) == snapshot(left)
    assert removal_guard.next_reading == math.inf


def test_list_is_read_again_after_thirty_seconds(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    assert removal_guard.next_reading == clock.time + 30.0
    clock.time += 30.0
    assert removal_guard.is_due()
    assert removal_guard.next_reading == math.inf


def test_list_is_read_again_though_its_time_was_missed(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    clock.time += 2 * HOLD
    assert removal_guard.is_due()


def test_removals_that_are_held_are_counted_with_their_reason(
    removal_guard: RemovalGuard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert (removal_guard.holds, removal_guard.holds_total, removal_guard.reason) == (False, 0, "")
    reason = "12 of 20 peers are gone from the list of leases"
    for _ in range(2):
        removal_guard.pass_on(snapshot(8), keys(20))
        assert (removal_guard.holds, removal_guard.holds_total, removal_guard.reason) == (True, 1, reason)
    clock.time += HOLD
    removal_guard.pass_on(snapshot(8), keys(20))
    assert not removal_guard.holds
    assert removal_guard.holds_sweep(stale=11, kept=3)
    reason = "11 of 14 routes lead to peers that are not in the list of leases"
    assert (removal_guard.holds, removal_guard.holds_total, removal_guard.reason) == (True, 2, reason)
    assert len(caplog.messages) == 3
    assert caplog.messages[1] == "Removals resumed: the leases were relisted"
    assert caplog.messages[2] == f"Removals suspended: {reason}; relisting in 30 s"


def test_list_that_lacks_nothing_is_not_worth_a_word(
    removal_guard: RemovalGuard, caplog: pytest.LogCaptureFixture
) -> None:
    removal_guard.pass_on(snapshot(20), keys(20))
    assert caplog.messages == []


def test_return_of_the_last_peer_is_logged_and_ends_no_wait_for_a_sweep(
    removal_guard: RemovalGuard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    said = "Removals resumed: all missing peers are accounted for"
    for sweep_is_held in (False, True):
        removal_guard.pass_on(snapshot(0), keys(20))
        assert removal_guard.holds_sweep(stale=11 * sweep_is_held, kept=3) is sweep_is_held
        for key in keys(20):
            removal_guard.heard_of(key)
        assert removal_guard.holds is sweep_is_held
    assert caplog.messages.count(said) == 1


def test_sweep_that_was_released_once_is_never_held_again(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    clock.time += HOLD
    removal_guard.pass_on(snapshot(0), keys(20))
    assert removal_guard.holds_sweep(stale=11, kept=3), "the release of removals is none of the sweep"
    for _ in range(2):
        clock.time += HOLD
        removal_guard.pass_on(snapshot(0), keys(20))
        clock.time += HOLD
        removal_guard.pass_on(snapshot(0), keys(20))
        assert not removal_guard.holds_sweep(stale=500, kept=0)


def test_the_list_is_read_again_once_after_the_wait(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    assert not removal_guard.is_due()
    clock.time += HOLD
    assert removal_guard.is_due()
    assert not removal_guard.is_due()


def test_second_list_without_the_peers_is_applied(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    clock.time += HOLD
    assert removal_guard.pass_on(snapshot(3), keys(20)) == snapshot(3)
    assert removal_guard.pass_on(snapshot(1), keys(20)) != snapshot(1), "and the next one is held anew"


def test_early_second_list_does_not_prolong_the_hold(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    clock.time += HOLD - 1
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += 1
    assert removal_guard.is_due()


def test_peers_that_are_back_end_the_wait(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    removal_guard.pass_on(snapshot(20), keys(20))
    clock.time += HOLD
    assert not removal_guard.is_due()
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable


def test_peers_that_are_back_one_by_one_end_the_wait(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    for key in keys(20):
        assert removal_guard.holds
        removal_guard.heard_of(key)
    assert not removal_guard.holds
    clock.time += HOLD - 1
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += HOLD - 1
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable, "a loss of its own is held as long as any"


def test_another_loss_is_held_as_long_as_the_first(removal_guard: RemovalGuard, clock: Clock) -> None:
    removal_guard.pass_on(snapshot(0), keys(20))
    for key in keys(19):
        removal_guard.heard_of(key)
    clock.time += HOLD
    assert removal_guard.is_due()
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable == frozenset(keys(20))
    clock.time += HOLD - 1
    assert removal_guard.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += 1
    assert removal_guard.is_due()
    assert removal_guard.pass_on(snapshot(0), keys(20)) == snapshot(0)


def test_a_sweep_is_held_until_the_list_was_read_again(removal_guard: RemovalGuard, clock: Clock) -> None:
    assert removal_guard.holds_sweep(stale=11, kept=3)
    assert removal_guard.pass_on(snapshot(3), keys(3)) == snapshot(3)
    assert removal_guard.holds_sweep(stale=11, kept=3), "that was too early"
    clock.time += HOLD
    assert removal_guard.holds_sweep(stale=11, kept=3)
    removal_guard.pass_on(snapshot(3), keys(3))
    assert not removal_guard.holds_sweep(stale=11, kept=3)


@pytest.mark.parametrize(("stale", "kept"), [(5, 5), (10, 0), (50, 50)])
def test_a_smaller_sweep_is_not_held(removal_guard: RemovalGuard, stale: int, kept: int) -> None:
    assert not removal_guard.holds_sweep(stale, kept)


def test_a_brake_that_is_off_holds_nothing(clock: Clock) -> None:
    removal_guard = RemovalGuard(is_on=False, now=clock)
    assert removal_guard.pass_on(snapshot(0), keys(500)) == snapshot(0)
    assert not removal_guard.holds_sweep(stale=500, kept=0)
