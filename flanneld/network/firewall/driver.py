"""What the three ways to the kernel's packet filter have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flanneld.errors import Retryable
from flanneld.network.firewall.plan import Edit
from flanneld.network.firewall.rules import Rules


class Rejected(Retryable):
    """The kernel or what leads to it did not take a change, and has made no part of it."""


class Unavailable(Retryable):
    """This way to the packet filter needs something that is not installed."""


class Driver(Protocol):
    """One family's rules of one kind, for one thread."""

    @property
    def name(self) -> str:
        """For the log."""

    def read(self) -> Rules:
        """What is in the chains where rules of ours may be. Raises ``Retryable``."""

    def apply(self, edits: Sequence[Edit]) -> None:
        """Make changes that were planned on what was read last, each table in one step.

        Raises ``Rejected`` if they are not possible, also because others were faster, and ``Retryable``
        when it took too long.
        """


def carry_out(driver: Driver, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Apply a plan. Returns the chains that could only be emptied: some rule of others leads there.

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
