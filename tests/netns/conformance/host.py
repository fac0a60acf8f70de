"""Host of a table under test."""

from __future__ import annotations

from collections.abc import Sequence

from tests.conformance.suite import Subject
from tests.lab.namespace import Namespace


class OnHost(Subject):
    """A table on a host that has an uplink, two VXLAN devices of ours, and one of somebody else's."""

    #: A command that shows what others made.
    shows_foreign: str = "true"
    #: Commands that take away what others put where ours should be.
    clears: Sequence[str] = ()

    def __init__(self, host: Namespace) -> None:
        self.host = host

    def do(self, command: str, *, check: bool = True) -> str:
        return self.host.run("sh", "-c", command, check=check).stdout

    def show_foreign(self) -> str:
        return self.do(self.shows_foreign)

    def clear(self) -> None:
        for command in self.clears:
            self.do(command)
