"""What is found of containers: the devices to them, their routes, and the options of their ports."""

from __future__ import annotations

import pytest

from flanneld.ctl.inside import lost_echoes


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "echoes of 1450 bytes"), (2, "2 of 10 echoes"), (10, "10 of 10 echoes")],
)
def test_a_single_lost_echo_is_the_largest(number: int, words: str) -> None:
    assert lost_echoes(number, 1450) == words
