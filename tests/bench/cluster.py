"""The peers of a node under measurement: leases in etcd with no machine behind them."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Protocol
from urllib.parse import urlencode

from tests.lab import Etcd, EtcdError
from tests.lab.etcd import PORT, PREFIX, TTL
from tests.lab.etcd_v3 import coded
from tests.lab.kube_api.control import Control

OVERLAY = "10.0.0.0/8"
IPV6_OVERLAY = "fd00:10::/32"
#: Wide enough that every peer's public IP is on-link, which host-gw demands.
UNDERLAY_PREFIX = 15
#: Above the nodes of the laboratory, which begin at 198.18.0.1.
FIRST_PUBLIC_IP = "198.18.16.0"
#: That of 10.64.0.0/24, well above the subnets that daemons pick for themselves. After the last subnet of the
#: network, 10.255.255.0/24, come those from 10.0.0.0/24 on.
_FIRST_INDEX = 64 << 8
#: The same in IPv6, fd00:10:10::/64, and what the IPv6 addresses of the peers' nodes begin with.
_FIRST_IPV6_INDEX, _IPV6_UNDERLAY = 16 << 16, int(IPv6Address("fd00:ffff::"))
#: The first free subnets, of which a node gets one.
OF_NODES = 102
#: All other subnets.
MOST_PEERS = (1 << 16) - OF_NODES


@dataclass(frozen=True, slots=True)
class Peer:
    """One lease of somebody else, by its number."""

    number: int

    @property
    def subnet(self) -> IPv4Network:
        index = (_FIRST_INDEX + self.number) % (1 << 16)
        return IPv4Network(((10 << 24) + (index << 8), 24))

    @property
    def ipv6_subnet(self) -> IPv6Network:
        first = int(IPv6Network(IPV6_OVERLAY).network_address)
        return IPv6Network((first + (_FIRST_IPV6_INDEX + self.number << 64), 64))

    @property
    def mac(self) -> bytes:
        return b"\x02\xbe" + struct.pack("!I", self.number)

    @property
    def public_key(self) -> str:
        """A key of WireGuard: any 32 bytes are one."""
        return b64encode(sha256(self.mac).digest()).decode()

    def dual_value(self, backend: str) -> str:
        """The lease's value in v3 of etcd with both families."""
        both: dict[str, object] = {"PublicIPv6": str(IPv6Address(_IPV6_UNDERLAY + self.number))}
        if backend == "vxlan":
            both |= {"BackendV6Data": {"VNI": 1, "VtepMAC": self.mac.hex(":")}}
        return json.dumps(json.loads(self.value(backend)) | both, separators=(",", ":"))

    def value(self, backend: str) -> str:
        """The lease's value in v2 of etcd, byte for byte as the Go daemon writes it."""
        attributes = {"PublicIP": str(IPv4Address(FIRST_PUBLIC_IP) + self.number), "BackendType": backend}
        data = {"vxlan": {"VtepMAC": self.mac.hex(":")}, "wireguard": {"PublicKey": self.public_key}}
        more = {"BackendData": data[backend]} if backend in data else {}
        return json.dumps(attributes | more, separators=(",", ":"))


class Writer(Protocol):
    """Has peers come and go. Requests are made apart from being sent: making them is not measured."""

    def addition(self, peer: Peer) -> Any:
        """The request that writes what a peer announces."""

    def removal(self, peer: Peer) -> Any:
        """The request that deletes it."""

    def send(self, request: Any) -> None:
        """Send a request; its answer waits for ``finish``."""

    def finish(self) -> None:
        """Wait for the answer to what was sent last."""


class Leases:
    """Writes and removes peers' leases over one connection that is kept open."""

    def __init__(self, connection: socket.socket, backend: str) -> None:
        self._connection = connection
        self._backend = backend

    def load(self, number: int, first: int = 0) -> None:
        """Write the leases of the peers ``first`` to ``number`` - 1."""
        for each in range(first, number):
            self.send(self.addition(Peer(each)))
            self.finish()

    def addition(self, peer: Peer) -> bytes:
        """The request that writes a peer's lease."""
        form = urlencode({"value": peer.value(self._backend), "ttl": TTL})
        return _request("PUT", f"/v2/keys{_key(peer)}", form)

    def removal(self, peer: Peer) -> bytes:
        """The request that deletes it."""
        return _request("DELETE", f"/v2/keys{_key(peer)}")

    def send(self, request: bytes) -> None:
        """Send a request; its answer waits for ``finish``."""
        self._connection.sendall(request)

    def finish(self) -> None:
        """Read the answer to what was sent last. Raises ``EtcdError`` when etcd refused."""
        response = http.client.HTTPResponse(self._connection)
        response.begin()
        body = response.read()
        if response.status >= 400:
            raise EtcdError(json.loads(body))


class V3Leases(Leases):
    """The same through the v3 API; what is loaded has a lease of etcd's for each key, as daemons have it."""

    def load(self, number: int, first: int = 0) -> None:
        for each in range(first, number):
            self.send(_post("/lease/grant", {"TTL": str(TTL), "ID": _lease_id(Peer(each))}))
            self.finish()
            self.send(self._put(Peer(each), _lease_id(Peer(each))))
            self.finish()

    def put_back(self, number: int) -> None:
        """Write the leases of the first ``number`` peers again: etcd's own leases outlive their keys."""
        for each in range(number):
            self.send(self._put(Peer(each), _lease_id(Peer(each))))
            self.finish()

    def addition(self, peer: Peer) -> bytes:
        """Without a lease, as it has to be one request."""
        return self._put(peer, "0")

    def removal(self, peer: Peer) -> bytes:
        return _post("/kv/deleterange", {"key": coded(_key(peer))})

    def removal_of_all(self, number: int) -> bytes:
        """The request that deletes the first ``number`` peers in one transaction."""
        seconds = sorted({Peer(each).subnet.network_address.packed[1] for each in range(number)})
        prefixes = (f"{PREFIX}/subnets/10.{second}" for second in seconds)
        # "/" follows ".", so this is the end of all keys that begin with the prefix and a dot.
        ranges = ({"key": coded(f"{each}."), "range_end": coded(f"{each}/")} for each in prefixes)
        return _request(
            "POST", "/v3/kv/txn", json.dumps({"success": [{"requestDeleteRange": each} for each in ranges]})
        )

    def _put(self, peer: Peer, lease: str) -> bytes:
        value = peer.value(self._backend).replace(',"BackendType"', ',"PublicIPv6":null,"BackendType"')
        return _post("/kv/put", {"key": coded(_key(peer)), "value": coded(value), "lease": lease})


class DualLeases(V3Leases):
    """The same with a subnet of either family."""

    def removal(self, peer: Peer) -> bytes:
        return _post("/kv/deleterange", {"key": coded(_dual_key(peer))})

    def _put(self, peer: Peer, lease: str) -> bytes:
        value = coded(peer.dual_value(self._backend))
        return _post("/kv/put", {"key": coded(_dual_key(peer)), "value": value, "lease": lease})


class Nodes:
    """The peers as nodes of Kubernetes."""

    def __init__(self, control: Control, backend: str) -> None:
        self._control = control
        self._backend = backend

    def addition(self, peer: Peer) -> Callable[[], object]:
        address = str(IPv4Address(FIRST_PUBLIC_IP) + peer.number)
        data = {"VNI": 1, "VtepMAC": peer.mac.hex(":")} if self._backend == "vxlan" else None
        return partial(self._control.put_peer, _name(peer), str(peer.subnet), address, self._backend, data)

    def removal(self, peer: Peer) -> Callable[[], object]:
        return partial(self._control.delete_node, _name(peer))

    def send(self, request: Callable[[], object]) -> None:
        request()

    def finish(self) -> None:
        """Nothing is left to wait for."""


@contextmanager
def open_leases(etcd: Etcd, backend: str, *, dual: bool = False) -> Iterator[Leases]:
    """A connection to etcd from inside its own namespace."""
    with etcd.namespace.entered():
        connection = socket.create_connection((etcd.address, PORT), timeout=10)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = DualLeases if dual else V3Leases if etcd.api == "v3" else Leases
        yield kind(connection, backend)


def _name(peer: Peer) -> str:
    return f"peer-{peer.number}"


def _key(peer: Peer) -> str:
    return f"{PREFIX}/subnets/{str(peer.subnet).replace('/', '-')}"


def _dual_key(peer: Peer) -> str:
    return f"{_key(peer)}&{str(peer.ipv6_subnet).replace('/', '-')}"


def _lease_id(peer: Peer) -> str:
    return str(peer.number + 1)


def _post(path: str, body: Mapping[str, str]) -> bytes:
    return _request("POST", f"/v3{path}", json.dumps(body))


def _request(method: str, target: str, form: str = "") -> bytes:
    lines = [
        f"{method} {target} HTTP/1.1",
        "Host: etcd",
        "Content-Type: application/x-www-form-urlencoded",
        f"Content-Length: {len(form)}",
    ]
    return "\r\n".join([*lines, "", form]).encode()
