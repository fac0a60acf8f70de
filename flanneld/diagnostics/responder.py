"""Responder: answers queries of other nodes (``-answer-port``), for ``flannelctl`` on their hosts.

It tells facts that are in this node's lease, or show on the wire. It never answers more than it was asked, in
bytes, nor more than ``RATE`` times a second, nor a source outside the cluster. docs/security.md has the
reasons.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from msgspec import Struct

from flanneld import __version__
from flanneld.diagnostics import conditions
from flanneld.diagnostics.status import store_kind
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, Lease, family_of
from flanneld.network.bridges import heard_containers
from flanneld.network.query import answer, decode
from flanneld.node import Node
from flanneld.reconcile.controller import Controller
from flanneld.runtime import clock
from flanneld.runtime.logs import Once
from flanneld.state.resources import Address, Resource, Vxlan

log = logging.getLogger(__name__)

Facts = dict[str, Any]


class Place(Struct, frozen=True, gc=False):
    """Local address that answers, and the sources that it answers to.

    The node's address in the overlay answers to the network's addresses only, so no answer leaves the
    network. A backend without such an address answers at the uplink, to the public IPs of peers only.
    """

    address: IPAddress
    in_overlay: bool

    def admits(
        self, source: IPAddress, networks: Iterable[IPNetwork], peers: Callable[[], Iterable[Lease]]
    ) -> bool:
        """Return True if a query from this source gets an answer."""
        if self.in_overlay:
            return any(source in network for network in networks)
        return any(peer.attrs.public(family_of(source)) == source for peer in peers())


def places(node: Node) -> frozenset[Place]:
    """Return the addresses to answer at; none before this node has a lease."""
    controller, keeper = node.controller, node.lease_keeper
    if controller is None or keeper is None:
        return frozenset()
    in_overlay = {each.address for each in controller.peers.local_resources() if isinstance(each, Address)}
    found = set()
    for family in FAMILIES:
        net = keeper.lease.net(family)
        local = controller.uplink_manager.uplink.local(family)
        if net is not None and net.network_address in in_overlay:
            found.add(Place(net.network_address, in_overlay=True))
        elif net is not None and not in_overlay and local is not None:
            found.add(Place(local, in_overlay=False))
    return frozenset(found)


def about(node: Node, asker: tuple[str, int], containers: Iterable[IPAddress]) -> Facts:
    """Return the answer to a node; ``seen`` is the address from which its query came.

    A small answer has no room for all: ``containers``, to which the asker may send echoes, are the last.
    """
    controller, config, keeper = node.controller, node.config, node.lease_keeper
    assert controller is not None
    assert config is not None
    assert keeper is not None
    uplinks, source = controller.uplink_manager, ip_address(asker[0].partition("%")[0])
    return {
        "version": __version__,
        "subnets": [str(net) for net in keeper.lease.key if net is not None],
        "network": [f"{each.network} /{each.subnet_len}" for each in config.ranges],
        "backend": config.backend_type,
        "also": config.also.backend_type if config.also else None,
        **device(controller.peers.local_resources()),
        "mtu": uplinks.mtu,
        "uplink_mtu": uplinks.uplink.mtu,
        "store": store_kind(node.store.name),
        "ready": not node.missing(),
        "conditions": sorted({each.part for each in conditions.unhealthy_parts(node)}),
        "seen": list(asker),
        **_tunnel_end(controller, source),
        "containers": [str(each) for each in containers if each.version == source.version],
    }


def _tunnel_end(controller: Controller, asker: IPAddress) -> Facts:
    """Return the endpoint from which an asker's tunnel comes, if the query came through one of a mesh."""
    if controller.tables.mesh is None:
        return {}
    found = (each.endpoint for each in controller.tables.sessions() if asker in each.subnet)
    return {"endpoint": next(found, None)}


def device(local: Iterable[Resource]) -> Facts:
    """Return VNI and port of this node's VXLAN device, None for each without one."""
    made = next((each for each in local if isinstance(each, Vxlan)), None)
    return {"vni": made.vni if made else None, "port": made.port if made else None}


#: Answers a second, and at once after a pause. A survey asks each node a few times.
RATE = 100.0
#: Datagrams that one step reads, so that a flood does not keep the loop from its other duties.
_AT_ONCE = 64
_LONGEST = 65535
#: Seconds until addresses are compared again: the uplink may have moved.
_LOOK = 10.0
#: Seconds for which it is known which containers there are.
_FRESH = 2.0
#: linux/in.h and linux/in6.h: bind to an address whose device may be made again.
_FREEBIND: dict[Family, tuple[int, int]] = {4: (socket.IPPROTO_IP, 15), 6: (socket.IPPROTO_IPV6, 78)}
_SO_NO_CHECK = 11


class Budget:
    """Budget of answers: ``RATE`` a second, and as many at once."""

    def __init__(self) -> None:
        self._left = RATE
        self._since = clock.now()

    def take(self, now: float) -> bool:
        """Use one answer. Return False if none is left."""
        self._left = min(RATE, self._left + RATE * (now - self._since))
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Responder:
    """Responder of one daemon. ``step`` is called by a loop, whenever ``sources`` are readable."""

    def __init__(self, node: Node, port: int) -> None:
        self._node = node
        self._port = port
        self._sockets: dict[Place, socket.socket] = {}
        self._containers: tuple[float, tuple[IPAddress, ...]] = (-_FRESH, ())
        self._budget = Budget()
        self._once = Once()

    def sources(self) -> Iterable[int]:
        """Return the sockets to wait for."""
        return [each.fileno() for each in self._sockets.values()]

    def step(self, now: float) -> float:
        """Answer what has arrived. Return the time of the next call."""
        self._follow()
        for place, sock in self._sockets.items():
            with suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    self._answer_one(place, sock, now)
        return now + _LOOK

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _follow(self) -> None:
        """Listen at the present addresses of this node."""
        wanted = places(self._node)
        for place in [each for each in self._sockets if each not in wanted]:
            self._sockets.pop(place).close()
        for place in wanted - self._sockets.keys():
            with suppress(OSError):
                self._sockets[place] = self._listen(place)

    def _listen(self, place: Place) -> socket.socket:
        family = family_of(place.address)
        sock = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(*_FREEBIND[family], 1)
            sock.bind((str(place.address), self._port))
        except OSError as failure:
            sock.close()
            problem = f"Cannot answer queries at {place.address}, UDP port {self._port}: {failure.strerror}"
            self._once.warn(log, place, f"{problem}; choose another -answer-port, on all nodes")
            raise
        log.info("Answering queries of other nodes at %s, UDP port %d", place.address, self._port)
        return sock

    def _answer_one(self, place: Place, sock: socket.socket, now: float) -> None:
        """Answer one datagram if it is a query of this cluster. Raises ``BlockingIOError`` without one."""
        try:
            data, (host, port, *_) = sock.recvfrom(_LONGEST)
        except BlockingIOError:
            raise
        except OSError:  # an ICMP error for an earlier answer
            return
        query = decode(data)
        if query is None or not self._admits(place, host) or not self._budget.take(now):
            return
        with suppress(OSError):  # the asker went away, or its packet was larger than our device takes
            sock.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, int(query.unsummed))
            told = about(self._node, (host, port), self._heard(now))
            sock.sendto(answer(query, told), (host, port))

    def _heard(self, now: float) -> tuple[IPAddress, ...]:
        """Return a few of this node's containers."""
        keeper = self._node.lease_keeper
        since, found = self._containers
        if keeper is not None and now - since >= _FRESH:
            found = ()
            with suppress(OSError):
                found = tuple(heard_containers(net for net in keeper.lease.key if net is not None))
            self._containers = now, found
        return found

    def _admits(self, place: Place, host: str) -> bool:
        controller = self._node.controller
        if controller is None:
            return False
        source, networks = ip_address(host.partition("%")[0]), controller.uplink_manager.networks
        return place.admits(source, networks, lambda: controller.peers.view().leases)
