"""A daemon whose peers come and go all the time keeps its size."""

from __future__ import annotations

import pytest

from tests.bench.soak import soak

SECONDS, PEERS = 600, 500
#: Resident MiB: the pages that a heap needs for other reasons, far less than an object for each event.
NOISE = 0.5


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_events() -> None:
    found = soak(SECONDS, PEERS, rate=0)
    assert found.events > 100 * PEERS
    assert found.sizes[-1] - found.sizes[0] < NOISE, found.sizes
