"""Record of the routes that this node has made in a cloud's table, and their removal by it.

The file outlives the daemon. ``-cleanup`` has no network config, so it also holds the backend type and the
options without secrets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.cloud.calls import absence_is_fine, understood
from flanneld.backends.cloud.contract import Cloud, CloudTableEntry
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.errors import Fatal, FlannelError, cause_of
from flanneld.runtime import files
from flanneld.runtime.logs import Once
from flanneld.runtime.waits import DetachedCalls

log = logging.getLogger(__name__)

#: Suffix of the file: ``flanneld.cloud``, beside subnet.env.
SUFFIX = "cloud"
_MAX_SIZE = 1 << 20


class Recorded(Struct, frozen=True):
    """Contents of the record: the backend's type and options, this node's address, and the routes."""

    kind: str = field(default="", name="type")
    options: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    routes: tuple[CloudTableEntry, ...] = ()


class Record:
    """Record in the file at ``path``, for a daemon with backend type ``kind`` and ``options``.

    An invalid file counts as empty. Each problem is logged once.
    """

    def __init__(self, path: Path, kind: str = "", options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._kind = kind
        self._options = dict(options or {})
        self._content: Recorded | None = None
        self._once = Once()

    def read(self) -> Recorded:
        """Return the contents of the file. Raises ``OSError`` if it exists and cannot be read."""
        try:
            return files.decode(files.read(self.path, _MAX_SIZE), Recorded)
        except FileNotFoundError:
            return Recorded()
        except ValueError:
            self._once.warn(log, "content", f"Ignoring {self.path}: its content is malformed")
            return Recorded()

    def has(self, entry: CloudTableEntry) -> bool:
        """Return True if this node has made a route to this destination in this table."""
        return any(_place(each) == _place(entry) for each in self._known().routes)

    def add(self, entry: CloudTableEntry, address: str) -> None:
        """Record a route to this node with its address. Call it before the cloud: a kill then loses none."""
        known = self._known()
        if entry not in known.routes or known.address != address:
            routes = (*_without(known.routes, entry), entry)
            self._write(replace(known, address=address, routes=routes))

    def remove(self, entry: CloudTableEntry) -> None:
        known = self._known()
        routes = _without(known.routes, entry)
        if len(routes) < len(known.routes):
            self._write(replace(known, routes=routes))

    def _known(self) -> Recorded:
        if self._content is None:
            try:
                found = self.read()
            except OSError as error:
                self._once.warn(log, "read", f"Cannot read {self.path}: {cause_of(error)}")
                found = Recorded()
            if self._kind:
                routes = found.routes if found.kind == self._kind else ()
                found = Recorded(self._kind, self._options, found.address, routes)
            self._content = found
        return self._content

    def _write(self, content: Recorded) -> None:
        self._content = content
        try:
            self.path.parent.mkdir(0o755, parents=True, exist_ok=True)
            files.replace(self.path, files.encode(content).encode(), 0o600)
            self._once.clear("write")
        except OSError as error:
            problem = f"Cannot write {self.path}: {cause_of(error)}; make its directory writable"
            self._once.warn(log, "write", f"{problem}, or -cleanup leaves routes in the cloud")


def _place(entry: CloudTableEntry) -> tuple[str, IPv4Network]:
    return entry.table, entry.destination


def _without(routes: tuple[CloudTableEntry, ...], entry: CloudTableEntry) -> tuple[CloudTableEntry, ...]:
    return tuple(each for each in routes if _place(each) != _place(entry))


def routes_in(record: Record) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield each recorded route with the function that removes it, then the record itself."""
    try:
        recorded = record.read()
    except OSError as failure:
        yield f"what {record.path} names: {cause_of(failure)}", lambda: False
        return
    for entry in recorded.routes:
        what = f"cloud route {entry.destination} via {entry.hop} in {entry.table}"
        yield what, partial(_removed, record, recorded, entry)
    if record.path.exists():
        yield str(record.path), lambda: not record.read().routes and files.remove(record.path)


def _removed(record: Record, recorded: Recorded, entry: CloudTableEntry) -> bool:
    """Return True once the route is gone, or leads to another instance and belongs to that one."""
    try:
        cloud = connect(recorded)
        with understood():
            there = _there(cloud, recorded.address, entry)
            for call in cloud.drop_calls(there) if there else ():
                with absence_is_fine():
                    cloud.ask(call)
    except FlannelError as failure:
        log.warning("%s", failure)
        return False
    record.remove(entry)
    return True


def connect(recorded: Recorded) -> Cloud:
    """Return a client of the cloud that a record names. Raises ``FlannelError``."""
    from flanneld.backends.cloud.backend import CloudFactory  # it imports this module
    from flanneld.runtime.sockets.http_client import HttpClient

    stop = threading.Event()
    services = HostServices(http=HttpClient(stop).ask, call=DetachedCalls(stop).run)
    factory = registry.load(recorded.kind)
    if not isinstance(factory, CloudFactory):
        raise Fatal(f"the record names {recorded.kind}, which is no cloud", "remove the file by hand")
    return factory.connect(Fields(dict(recorded.options), "Backend"), services)


def _there(cloud: Cloud, address: str, entry: CloudTableEntry) -> CloudTableEntry | None:
    """Return the cloud's current route; None without one, or if it belongs to another node."""
    place = cloud.place(IPv4Address(address))
    found = cloud.entries(replace(place, tables=(entry.table,)))
    key = (entry.table, entry.destination, entry.hop)
    return next((each for each in found if (each.table, each.destination, each.hop) == key), None)
