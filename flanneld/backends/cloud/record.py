"""Record of the routes that this node has made in a cloud's table, in a file that outlives the daemon.

``-cleanup`` has no network config: the file also says which cloud it is, and the options without secrets.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from flanneld.backends.cloud.contract import Entry
from flanneld.compat.glog import Once
from flanneld.errors import cause_of
from flanneld.runtime import atomic_file

log = logging.getLogger(__name__)

#: The file is ``flanneld.cloud``, beside subnet.env.
SUFFIX = "cloud"
_MAX_SIZE = 1 << 20


class Recorded(Struct, frozen=True):
    """Contents of the record: the backend's type and its options, and the routes."""

    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    routes: tuple[Entry, ...] = ()


class Record:
    """The file at ``path``. One that makes no sense counts as empty; each problem is logged once."""

    def __init__(self, path: Path, kind: str = "", options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._kind = kind
        self._options = dict(options or {})
        self._routes: dict[tuple[str, IPv4Network], Entry] | None = None
        self._once = Once()

    def read(self) -> Recorded:
        """Return what the file says. Raises ``OSError`` if it is there and cannot be read."""
        try:
            value = json.loads(atomic_file.read(self.path, _MAX_SIZE))
            return Recorded(str(value["type"]), dict(value["options"]), tuple(map(_entry, value["routes"])))
        except FileNotFoundError:
            return Recorded()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._once.warn(log, "content", f"Ignoring {self.path}, which makes no sense")
            return Recorded()

    def has(self, entry: Entry) -> bool:
        """Return True if this node has made a route to this destination in this table."""
        return (entry.table, entry.destination) in self._known()

    def add(self, entry: Entry) -> None:
        """Note a route. On disk before the cloud is asked, so that a kill in between loses none."""
        known = self._known()
        if known.get((entry.table, entry.destination)) != entry:
            known[entry.table, entry.destination] = entry
            self._write()

    def remove(self, entry: Entry) -> None:
        if self._known().pop((entry.table, entry.destination), None):
            self._write()

    def _known(self) -> dict[tuple[str, IPv4Network], Entry]:
        if self._routes is None:
            try:
                recorded = self.read()
            except OSError as error:
                self._once.warn(log, "read", f"Cannot read {self.path}: {cause_of(error)}")
                recorded = Recorded()
            routes = recorded.routes if recorded.kind in ("", self._kind) else ()
            self._routes = {(each.table, each.destination): each for each in routes}
        return self._routes

    def _write(self) -> None:
        routes = [
            {"table": each.table, "destination": str(each.destination), "hop": each.hop, "name": each.name}
            for each in self._known().values()
        ]
        content = {"type": self._kind, "options": self._options, "routes": routes}
        try:
            self.path.parent.mkdir(0o755, parents=True, exist_ok=True)
            atomic_file.replace(self.path, json.dumps(content).encode(), 0o600)
            self._once.clear("write")
        except OSError as error:
            problem = f"Cannot write {self.path}: {cause_of(error)}; make its directory writable"
            self._once.warn(log, "write", f"{problem}, or -cleanup leaves routes in the cloud")


def _entry(value: Mapping[str, Any]) -> Entry:
    return Entry(
        str(value["table"]),
        IPv4Network(value["destination"]),
        str(value["hop"]),
        name=str(value.get("name", "")),
    )
