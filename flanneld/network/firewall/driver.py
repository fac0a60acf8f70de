"""Interface of the packet filter drivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from flanneld.errors import Retryable
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.rules import Rules


class Rejected(Retryable):
    """Error for a change that was refused as a whole."""


class Unavailable(Retryable):
    """Error for a driver whose commands or libraries are not installed."""


class Driver(Protocol):
    """Driver for one family's rules in one place, for one thread."""

    @property
    def name(self) -> str:
        """Name for the log."""

    def read(self) -> Rules:
        """Return the rules in all chains that may contain ours. Raises ``Retryable``."""

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply edits planned from the last ``read``, with one transaction per table.

        Raises ``Rejected`` if they are impossible, for example after a concurrent change, and ``Retryable``
        on a timeout.
        """

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        """Yield the lines of a shell script that does the same as ``apply``."""


def carry_out(driver: Driver, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Apply a plan.

    Return the edits of chains that could only be flushed, because foreign rules refer to them.

    Raises as ``Driver.apply`` does.
    """
    changes = [edit for edit in edits if not edit.drop]
    drops = [edit for edit in edits if edit.drop]
    if changes:
        driver.apply(changes)
    if not drops:
        return ()
    try:
        driver.apply(drops)
    except Rejected:
        there = driver.read()
        return tuple(edit for edit in drops if edit.chain in there and not _dropped(driver, edit))
    return ()


def _dropped(driver: Driver, edit: Edit) -> bool:
    try:
        driver.apply([edit])
    except Rejected:
        driver.apply([Edit(edit.chain, flush=True)])
        return False
    return True
