"""flanneld with the WireGuard backend's table carried by drivers, until the daemon takes tables themselves.

Run as a program: it is the daemon, with the same flags.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flanneld.backends import registry
from flanneld.backends.contract import Driver
from flanneld.backends.wireguard.backend import WireGuardBackend
from flanneld.backends.wireguard.resources import AllowedIp, DeviceKey, Peer
from flanneld.backends.wireguard.table_peers import WireGuardTable
from flanneld.main import main
from flanneld.model import Lease
from flanneld.state.report import Report
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put, Scope

#: Command that starts it.
COMMAND = [sys.executable, str(Path(__file__).resolve())]


class TableDriver:
    """The part of a table that holds one class of resources."""

    def __init__(self, table: WireGuardTable, handles: type) -> None:
        self.handles = handles
        self._table = table
        self._wanted: dict[Key, Resource] = {}

    def read(self) -> Iterator[Resource]:
        for seen in self._table.read(Scope(self._wanted)):
            if type(seen.resource) is self.handles:
                yield seen.resource

    def put(self, resource: Resource) -> None:
        self.put_all([resource])

    def drop(self, resource: Resource) -> None:
        self.drop_all([resource])

    def put_all(self, resources: Sequence[Resource]) -> None:
        _demand(self._table.put([Put(each, self._wanted.get(each.key)) for each in resources]))
        self._wanted |= {each.key: each for each in resources}

    def drop_all(self, resources: Sequence[Resource]) -> None:
        _demand(self._table.drop(resources))
        for each in resources:
            self._wanted.pop(each.key, None)

    def close(self) -> None:
        self._table.close(remove=False)

    def fileno(self) -> int:
        return -1

    def news(self) -> None:
        """There is none."""

    @property
    def next_look(self) -> float:
        return self._table.next_look

    def look(self) -> bool:
        return self._table.look()


class Driven(WireGuardBackend):
    """The backend with drivers."""

    def drivers(self) -> Iterable[Driver]:
        (table,) = self.tables(Lease(self.attributes()))
        assert isinstance(table, WireGuardTable)
        return [TableDriver(table, each) for each in (DeviceKey, Peer, AllowedIp)]


def _demand(report: Report) -> None:
    for failure in report.failed:
        raise OSError(str(failure))


if __name__ == "__main__":
    registry._OWN["wireguard"] = ("__main__", "Driven")
    sys.argv[0] = "flanneld"
    main()
