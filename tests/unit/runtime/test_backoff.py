"""Pauses between attempts."""

from __future__ import annotations

from flanneld.runtime.waits import Backoff


def test_pauses_grow_to_a_limit_and_chance_at_most_doubles_them() -> None:
    short, long = Backoff(1.0, 8.0, chance=lambda: 0.0), Backoff(1.0, 8.0, chance=lambda: 1.0)
    assert [short.pause() for _ in range(5)] == [1, 2, 4, 8, 8]
    assert [long.pause() for _ in range(5)] == [2, 4, 8, 16, 16]
    short.reset()
    assert short.pause() == 1
