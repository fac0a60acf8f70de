"""Reconciler table that ends a charon left by an earlier run, once another backend has taken over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flanneld.backends.ipsec import charon_process
from flanneld.backends.ipsec.resources import CHARON, Charon
from flanneld.state.report import Report
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Scope, Seen, Table


class StaleCharonTable:
    """Table of the charon that an earlier run has started. It only removes."""

    name = CHARON
    what = "the processes of charon"
    needs: frozenset[str] = frozenset()
    worker = "kernel"
    vital = False
    audit: float | None = None

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        if charon_process.running():
            yield Seen(Charon())

    def put(self, puts: Sequence[Put]) -> Report:
        raise NotImplementedError

    def drop(self, found: Sequence[Resource]) -> Report:
        """Send SIGTERM without waiting for the end: charon ends the SAs that it has negotiated."""
        charon_process.end_running(charon_process.running())
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Release nothing: this table holds nothing open."""


def stale_charon() -> Iterator[Table]:
    """Yield a table if an earlier run has left a charon. The ipsec backend's table takes its place."""
    if charon_process.running():
        yield StaleCharonTable()
