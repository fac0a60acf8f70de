"""Removal of the routes that this node has made in a cloud, based on their record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address

from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.call_backoff import absence_is_fine, understood
from flanneld.backends.cloud.contract import Cloud, CloudTableEntry
from flanneld.backends.cloud.record import Record, Recorded
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.errors import Fatal, FlannelError, cause_of
from flanneld.runtime.sockets.http_client import HttpClient
from flanneld.runtime.waits import DetachedCalls

log = logging.getLogger(__name__)


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
        yield str(record.path), lambda: not record.read().routes and _unlinked(record)


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


def _unlinked(record: Record) -> bool:
    try:
        record.path.unlink()
    except OSError:
        return False
    return True
