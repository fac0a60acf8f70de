"""Reads and writes of the kernel's objects over rtnetlink."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from flanneld.model import FAMILIES, IPNetwork
from flanneld.network.host import HostView
from flanneld.network.interfaces import name_of
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import NOTHING, Domain
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import CreateMode
from flanneld.network.rtnetlink.monitor import Monitor
from flanneld.network.rtnetlink.netlink import message
from flanneld.network.rtnetlink.routes import ON_OUR_DEVICES, protocol_for
from flanneld.state.resources import PROTO_FLANNEL, Resource

#: Writes per call from which on the tables are read back, instead of processing the notifications.
_BULK = 500
#: Protocols of routes that any flanneld writes.
_FLANNELS = ON_OUR_DEVICES | {PROTO_FLANNEL}


class Kernel(HostView):
    """View of this network namespace, for reading and writing. Used by one thread.

    ``domain`` tells which objects are ours.
    """

    def __init__(self, domain: Domain = NOTHING) -> None:
        super().__init__()
        self.domain = domain
        self.monitor: Monitor | None = None

    def listen(self) -> Monitor:
        """Start and return the monitor of changes by others. It reports bulk writes as a gap."""
        self.monitor = Monitor(self.port)
        return self.monitor

    def left_behind(self, domain: Domain) -> list[Resource]:
        """Return the routes of any flanneld: all marked ones, and unmarked ones that ``domain`` claims."""
        found: list[Resource] = []
        for family in FAMILIES:
            items = self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family), _may_be_flannels)
            marked = [item for item in items if rtnl.protocol_of(*item) == PROTO_FLANNEL]
            unmarked = [item for item in items if rtnl.protocol_of(*item) != PROTO_FLANNEL]
            found += filter(None, (rtnl.decode_blackhole(*item) for item in marked))
            found += [seen.route for seen in _decoded(marked)]
            found += [seen.route for seen in _decoded(unmarked) if domain.owns_route(seen, adopt=True)]
        return found

    def write(
        self,
        resources: Sequence[Resource],
        *,
        drop: bool = False,
        mode: CreateMode = CreateMode.REPLACE,
        spread: bool = False,
    ) -> dict[int, int]:
        """Write resources in batches. Return the errno of each refused one, by its position.

        With ``spread`` the protocol numbers of routes on our devices vary.
        """
        if len(resources) <= _BULK or self.monitor is None:
            return self._write(resources, drop=drop, mode=mode, spread=spread)
        with self.monitor.paused():
            refused = self._write(resources, drop=drop, mode=mode, spread=spread)
        if len(refused) < len(resources):
            self.monitor.missed = True
        return refused

    def take_back(self, namespace: int, index: int, is_ours: Callable[[SeenLink], bool]) -> bool:
        """Remove an interface of another network namespace if it is ours. Return True then."""
        body = links.in_namespace(namespace, index)
        if not is_ours(links.decode(*self.ask(rtnl.RTM_GETLINK, body))):
            return False
        for failed in self._socket.write([message(rtnl.RTM_DELLINK, 0, body)]):
            for _, code in failed:
                raise OSError(code, os.strerror(code))
        return True

    def clear_routes(self, destinations: Iterable[IPNetwork]) -> None:
        """Remove the first route to each destination, of any kind. A missing one is no error."""
        for _ in self._socket.write(rtnl.clear_route(each, seq) for seq, each in enumerate(destinations)):
            pass

    def _write(
        self, resources: Sequence[Resource], *, drop: bool, mode: CreateMode, spread: bool
    ) -> dict[int, int]:
        indexes: dict[str, int] = {}

        def index_of(name: str) -> int:
            index = indexes.get(name)
            if index is None:
                index = indexes[name] = self._socket.index_of(name)
            return index

        def batch() -> Iterator[bytes]:
            for seq, resource in enumerate(resources):
                protocol = protocol_for(resource, self.domain.links, spread=spread)
                try:
                    yield rtnl.encode(resource, index_of, protocol, seq, drop=drop, mode=mode)
                except OSError as failure:
                    if failure.errno != errno.ENODEV:
                        raise
                    refused[seq] = errno.ENODEV

        refused: dict[int, int] = {}
        for failed in self._socket.write(batch()):
            refused.update(failed)
        return refused


def _may_be_flannels(data: bytes, offset: int, end: int) -> bool:
    return rtnl.protocol_of(data, offset, end) in _FLANNELS


def _decoded(items: Iterable[tuple[bytes, int, int]]) -> Iterator[rtnl.SeenRoute]:
    named = cache(name_of)
    return filter(None, (rtnl.decode_route(*item, named) for item in items))
