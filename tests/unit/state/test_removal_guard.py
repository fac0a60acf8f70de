"""When the mass-removal brake holds, and when it lets go."""

from __future__ import annotations

import math
from ipaddress import IPv4Network

import pytest

from flanneld.model import Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.state.removal_guard import HOLD, Brake
from tests.clock import Clock


@pytest.fixture
def brake(clock: Clock) -> Brake:
    return Brake(now=clock)


def keys(number: int) -> list[LeaseKey]:
    return [(IPv4Network((0x0A050000 + (each << 8), 24)), None) for each in range(number)]


def snapshot(number: int) -> Snapshot:
    return Snapshot(tuple(Lease(LeaseAttrs(), *key) for key in keys(number)))


@pytest.mark.parametrize(("known", "left"), [(11, 5), (12, 5), (5000, 0)])
def test_more_than_half_of_more_than_ten_are_held(brake: Brake, known: int, left: int) -> None:
    held = brake.pass_on(snapshot(left), keys(known))
    assert held.unreadable == frozenset(keys(known)[left:])
    assert held.leases == snapshot(left).leases


@pytest.mark.parametrize(("known", "left"), [(10, 0), (12, 6), (11, 6), (0, 5)])
def test_few_peers_or_the_lesser_half_may_go_at_once(brake: Brake, known: int, left: int) -> None:
    assert brake.pass_on(snapshot(left), keys(known)) == snapshot(left)
    assert brake.next_reading == math.inf


def test_list_is_read_again_after_thirty_seconds(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    assert brake.next_reading == clock.time + 30.0
    clock.time += 30.0
    assert brake.is_due()
    assert brake.next_reading == math.inf


def test_list_is_read_again_though_its_time_was_missed(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    clock.time += 2 * HOLD
    assert brake.is_due()


def test_removals_that_are_held_are_counted_with_their_reason(
    brake: Brake, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert (brake.holds, brake.holds_total, brake.reason) == (False, 0, "")
    reason = "12 of 20 peers are gone from the list of leases"
    for _ in range(2):
        brake.pass_on(snapshot(8), keys(20))
        assert (brake.holds, brake.holds_total, brake.reason) == (True, 1, reason)
    clock.time += HOLD
    brake.pass_on(snapshot(8), keys(20))
    assert not brake.holds
    assert brake.holds_sweep(stale=11, kept=3)
    reason = "11 of 14 routes lead to peers that are not in the list of leases"
    assert (brake.holds, brake.holds_total, brake.reason) == (True, 2, reason)
    assert len(caplog.messages) == 3
    assert caplog.messages[1] == "The list of leases was read again: acting on it now"
    assert caplog.messages[2] == f"{reason}: leaving all as it is, and reading the list again in 30 s"


def test_list_that_lacks_nothing_is_not_worth_a_word(brake: Brake, caplog: pytest.LogCaptureFixture) -> None:
    brake.pass_on(snapshot(20), keys(20))
    assert caplog.messages == []


def test_return_of_the_last_peer_is_logged_and_ends_no_wait_for_a_sweep(
    brake: Brake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    said = "All peers that were gone from the list of leases are accounted for"
    for sweep_is_held in (False, True):
        brake.pass_on(snapshot(0), keys(20))
        assert brake.holds_sweep(stale=11 * sweep_is_held, kept=3) is sweep_is_held
        for key in keys(20):
            brake.heard_of(key)
        assert brake.holds is sweep_is_held
    assert caplog.messages.count(said) == 1


def test_sweep_that_was_released_once_is_never_held_again(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    clock.time += HOLD
    brake.pass_on(snapshot(0), keys(20))
    assert brake.holds_sweep(stale=11, kept=3), "the release of removals is none of the sweep"
    for _ in range(2):
        clock.time += HOLD
        brake.pass_on(snapshot(0), keys(20))
        clock.time += HOLD
        brake.pass_on(snapshot(0), keys(20))
        assert not brake.holds_sweep(stale=500, kept=0)


def test_the_list_is_read_again_once_after_the_wait(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    assert not brake.is_due()
    clock.time += HOLD
    assert brake.is_due()
    assert not brake.is_due()


def test_what_still_holds_then_is_believed(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    clock.time += HOLD
    assert brake.pass_on(snapshot(3), keys(20)) == snapshot(3)
    assert brake.pass_on(snapshot(1), keys(20)) != snapshot(1), "and the next one is held anew"


def test_what_is_said_again_too_early_is_held_no_longer_than_at_first(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    clock.time += HOLD - 1
    assert brake.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += 1
    assert brake.is_due()


def test_peers_that_are_back_end_the_wait(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    brake.pass_on(snapshot(20), keys(20))
    clock.time += HOLD
    assert not brake.is_due()
    assert brake.pass_on(snapshot(0), keys(20)).unreadable


def test_peers_that_are_back_one_by_one_end_the_wait(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    for key in keys(20):
        assert brake.holds
        brake.heard_of(key)
    assert not brake.holds
    clock.time += HOLD - 1
    assert brake.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += HOLD - 1
    assert brake.pass_on(snapshot(0), keys(20)).unreadable, "a loss of its own is held as long as any"


def test_another_loss_is_held_as_long_as_the_first(brake: Brake, clock: Clock) -> None:
    brake.pass_on(snapshot(0), keys(20))
    for key in keys(19):
        brake.heard_of(key)
    clock.time += HOLD
    assert brake.is_due()
    assert brake.pass_on(snapshot(0), keys(20)).unreadable == frozenset(keys(20))
    clock.time += HOLD - 1
    assert brake.pass_on(snapshot(0), keys(20)).unreadable
    clock.time += 1
    assert brake.is_due()
    assert brake.pass_on(snapshot(0), keys(20)) == snapshot(0)


def test_a_sweep_is_held_until_the_list_was_read_again(brake: Brake, clock: Clock) -> None:
    assert brake.holds_sweep(stale=11, kept=3)
    assert brake.pass_on(snapshot(3), keys(3)) == snapshot(3)
    assert brake.holds_sweep(stale=11, kept=3), "that was too early"
    clock.time += HOLD
    assert brake.holds_sweep(stale=11, kept=3)
    brake.pass_on(snapshot(3), keys(3))
    assert not brake.holds_sweep(stale=11, kept=3)


@pytest.mark.parametrize(("stale", "kept"), [(5, 5), (10, 0), (50, 50)])
def test_a_smaller_sweep_is_not_held(brake: Brake, stale: int, kept: int) -> None:
    assert not brake.holds_sweep(stale, kept)


def test_a_brake_that_is_off_holds_nothing(clock: Clock) -> None:
    brake = Brake(is_on=False, now=clock)
    assert brake.pass_on(snapshot(0), keys(500)) == snapshot(0)
    assert not brake.holds_sweep(stale=500, kept=0)
