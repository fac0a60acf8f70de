"""The table of charon, before there is one."""

from __future__ import annotations

from flanneld.backends.ipsec.tables import CharonTable
from tests.calls import at_once


def test_charon_that_was_not_found_yet_tells_nothing() -> None:
    told: list[object] = []
    table = CharonTable(told.append, "digest", at_once)
    assert (table.fileno(), table.changes(), told) == (-1, [], [])
    table.close(remove=False)
