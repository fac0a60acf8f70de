"""Common part of tables whose resources outlive the daemon, and whose place tells nothing of changes."""

from __future__ import annotations

from collections.abc import Sequence

from flanneld.runtime import clock
from flanneld.state.report import Report
from flanneld.state.resources import Resource

#: Seconds between two looks.
LOOK_PERIOD = 1.0


class LastingTable:
    """Table that is looked at each second, and whose resources stay when nobody wants them."""

    worker = "host"
    needs: frozenset[str] = frozenset()
    audit: float | None = None

    def __init__(self) -> None:
        self._looked = clock.now()

    def has_changed(self) -> bool:
        """Return True if another program has changed something since the last reading or write."""
        raise NotImplementedError

    @property
    def next_look(self) -> float:
        """Time of the next look, in seconds on ``clock.now``."""
        return self._looked + LOOK_PERIOD

    def look(self) -> bool:
        """Return True if the table has to be read and repaired now."""
        self._looked = clock.now()
        return self.has_changed()

    def drop(self, found: Sequence[Resource]) -> Report:
        """Leave the resources: containers talk, and may be started, without a daemon."""
        del found
        return Report()

    def close(self, *, remove: bool) -> None:
        """Nothing is open."""
