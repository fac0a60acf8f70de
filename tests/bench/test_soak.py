"""A daemon whose peers come and go all the time keeps its size."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from tests.bench.soak import soak

SECONDS, PEERS = 600, 500
#: Resident MiB in a part of the time: the pages that a heap needs for other reasons, far less than an object
#: for each event.
NOISE = 0.1


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_events() -> None:
    found = soak(SECONDS, PEERS, rate=0)
    assert found.events > 100 * PEERS
    assert median(later - before for before, later in pairwise(found.sizes)) < NOISE
