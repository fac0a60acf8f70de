"""WireGuard devices in this network namespace, read and written over generic netlink (linux/wireguard.h).

Parsers raise ``MalformedNetlink`` for bytes that no kernel sends, and never skip any.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import IPAddress, IPNetwork, Secret
from flanneld.network.rtnetlink.messages import AF, FAMILY, address_of, network_of
from flanneld.network.rtnetlink.netlink import (
    NLA_TYPE_MASK,
    NLM_F_REQUEST,
    DumpInterrupted,
    MalformedNetlink,
    NetlinkSocket,
    attribute,
    attributes,
    message,
    text_of,
    unpack,
)

GET_DEVICE, SET_DEVICE = 0, 1
#: Bytes of each kind of key (WG_KEY_LEN).
KEY_LENGTH = 32

_VERSION = 1
_NESTED = 0x8000
_IFINDEX, _IFNAME, _PRIVATE_KEY, _PUBLIC_KEY, _LISTEN_PORT, _FWMARK, _PEERS = 1, 2, 3, 4, 6, 7, 8
_PEER_PUBLIC_KEY, _PEER_PRESHARED_KEY, _PEER_FLAGS, _PEER_ENDPOINT, _PEER_KEEPALIVE = 1, 2, 3, 4, 5
_PEER_LAST_HANDSHAKE, _PEER_RX_BYTES, _PEER_TX_BYTES, _PEER_ALLOWED_IPS = 6, 7, 8, 9
_IP_FAMILY, _IP_ADDRESS, _IP_LENGTH = 1, 2, 3
_F_REMOVE_ME, _F_UPDATE_ONLY = 1, 4

_HEADER = struct.Struct("=BBH")
_ATTR = struct.Struct("=HH")
_U16, _U32, _U64 = struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
_TIME = struct.Struct("=qq")
#: struct sockaddr_in and sockaddr_in6.
_SOCKADDR = {4: struct.Struct("!2xH4s8x"), 6: struct.Struct("!2xHI16sI")}

#: Bytes of peers in one message. The length of an attribute has 16 bits, and a send takes 16 KiB.
_CHUNK = 12 * 1024

Endpoint = tuple[IPAddress, int]
#: Begin and end of a message's body or a nested attribute.
Span = tuple[bytes, int, int]


class SeenPeer(Struct, frozen=True, gc=False):
    """Peer in the kernel. ``last_handshake`` is in seconds of the wall clock, 0.0 for never."""

    public_key: bytes
    preshared_key: Secret = Secret(bytes(KEY_LENGTH))
    endpoint: Endpoint | None = None
    keepalive: int = 0
    last_handshake: float = 0.0
    rx_bytes: int = 0
    tx_bytes: int = 0
    allowed_ips: tuple[IPNetwork, ...] = ()


class SeenDevice(Struct, frozen=True, gc=False):
    """WireGuard device in the kernel. A missing key is None."""

    index: int
    name: str
    listen_port: int
    fwmark: int
    private_key: Secret | None
    public_key: bytes | None
    peers: tuple[SeenPeer, ...]


# ---- writing ---------------------------------------------------------------------------------


def get_device(name: str) -> bytes:
    """Return the body of a request for a device with its peers."""
    return _HEADER.pack(GET_DEVICE, _VERSION, 0) + _name(name)


def set_device(name: str, private_key: Secret, listen_port: int) -> bytes:
    """Return the body that sets a device's key and port, and clears its firewall mark."""
    return b"".join(
        (
            _HEADER.pack(SET_DEVICE, _VERSION, 0),
            _name(name),
            attribute(_PRIVATE_KEY, private_key.value),
            attribute(_LISTEN_PORT, _U16.pack(listen_port)),
            attribute(_FWMARK, _U32.pack(0)),
        )
    )


def set_peers(name: str, peers: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield bodies that set packed peers, each with its number of peers."""
    chunk: list[bytes] = []
    size = 0
    for peer in peers:
        if chunk and size + len(peer) > _CHUNK:
            yield _peers_body(name, chunk), len(chunk)
            chunk, size = [], 0
        chunk.append(peer)
        size += len(peer)
    if chunk:
        yield _peers_body(name, chunk), len(chunk)


def put_peer(
    public_key: bytes,
    preshared_key: Secret,
    keepalive: int,
    allowed_ips: Iterable[IPNetwork],
    endpoint: Endpoint | None,
) -> bytes:
    """Pack a peer to create or change. Without ``endpoint`` its current endpoint stays.

    An allowed IP of another peer moves to this one.
    """
    parts = [
        attribute(_PEER_PUBLIC_KEY, public_key),
        attribute(_PEER_PRESHARED_KEY, preshared_key.value),
        attribute(_PEER_KEEPALIVE, _U16.pack(keepalive)),
    ]
    if endpoint is not None:
        parts.append(attribute(_PEER_ENDPOINT, _sockaddr(endpoint)))
    return _peer(*parts, _allowed_ips(allowed_ips))


def steer_peer(public_key: bytes, keepalive: int, endpoint: Endpoint | None, *, at_once: bool) -> bytes:
    """Pack another keepalive interval of a peer, and another endpoint. A missing peer is not created.

    With ``at_once`` it is sent a packet: the interval goes from 0 to ``keepalive``.
    """
    parts = [
        attribute(_PEER_PUBLIC_KEY, public_key),
        attribute(_PEER_FLAGS, _U32.pack(_F_UPDATE_ONLY)),
        *([attribute(_PEER_ENDPOINT, _sockaddr(endpoint))] if endpoint else []),
    ]
    steps = (0, keepalive) if at_once else (keepalive,)
    return b"".join(_peer(*parts, attribute(_PEER_KEEPALIVE, _U16.pack(step))) for step in steps)


def allow(public_key: bytes, allowed_ips: Iterable[IPNetwork]) -> bytes:
    """Pack more allowed IPs of a peer. A missing peer is not created."""
    flags = attribute(_PEER_FLAGS, _U32.pack(_F_UPDATE_ONLY))
    return _peer(attribute(_PEER_PUBLIC_KEY, public_key), flags, _allowed_ips(allowed_ips))


def drop_peer(public_key: bytes) -> bytes:
    """Pack the removal of a peer. A missing peer is no error."""
    flags = attribute(_PEER_FLAGS, _U32.pack(_F_REMOVE_ME))
    return _peer(attribute(_PEER_PUBLIC_KEY, public_key), flags)


def take_away(allowed_ip: IPNetwork, throwaway: bytes) -> bytes:
    """Pack the removal of one allowed IP from its current peer.

    Before Linux 6.16 there is no flag for a removal. So the allowed IP moves to a peer that the same message
    creates and removes; ``throwaway`` is this peer's public key.
    """
    return _peer(attribute(_PEER_PUBLIC_KEY, throwaway), _allowed_ips((allowed_ip,))) + drop_peer(throwaway)


def _name(name: str) -> bytes:
    return attribute(_IFNAME, name.encode() + b"\0")


def _peers_body(name: str, peers: Sequence[bytes]) -> bytes:
    nest = attribute(_PEERS | _NESTED, b"".join(peers))
    return _HEADER.pack(SET_DEVICE, _VERSION, 0) + _name(name) + nest


def _peer(*parts: bytes) -> bytes:
    return attribute(_NESTED, b"".join(parts))


def _allowed_ips(networks: Iterable[IPNetwork]) -> bytes:
    packed = b"".join(
        attribute(
            _NESTED,
            attribute(_IP_FAMILY, _U16.pack(AF[net.version]))
            + attribute(_IP_ADDRESS, net.network_address.packed)
            + attribute(_IP_LENGTH, bytes((net.prefixlen,))),
        )
        for net in networks
    )
    return attribute(_PEER_ALLOWED_IPS | _NESTED, packed) if packed else b""


def _sockaddr(endpoint: Endpoint) -> bytes:
    address, port = endpoint
    family = _U16.pack(AF[address.version])
    if address.version == 4:
        return family + _SOCKADDR[4].pack(port, address.packed)[2:]
    return family + _SOCKADDR[6].pack(port, 0, address.packed, 0)[2:]


# ---- reading ---------------------------------------------------------------------------------


def decode(messages: Iterable[Span]) -> SeenDevice:
    """Parse the messages of one device's dump. Raises ``MalformedNetlink``.

    A device with many peers takes several messages, and so may a peer with many allowed IPs. The continued
    peer then has only its key and the remaining allowed IPs.
    """
    device: SeenDevice | None = None
    peers: dict[bytes, SeenPeer] = {}
    for data, offset, end in messages:
        unpack(_HEADER, data, offset, end)
        begin = offset + _HEADER.size
        device = device or _device(attributes(data, begin, end))
        for kind, start, stop in _nested(data, begin, end):
            for _, first, last in _nested(data, start, stop) if kind == _PEERS else ():
                _add(peers, _seen_peer(data, first, last))
    if device is None:
        raise MalformedNetlink
    return replace(device, peers=tuple(peers.values()))


def family_id(data: bytes, offset: int, end: int) -> int:
    """Parse the number of a family in the controller's answer. Raises ``MalformedNetlink``."""
    unpack(_HEADER, data, offset, end)
    return _fixed(_U16, attributes(data, offset + _HEADER.size, end).get(1))


def _add(peers: dict[bytes, SeenPeer], peer: SeenPeer) -> None:
    known = peers.get(peer.public_key)
    if known is None:
        peers[peer.public_key] = peer
    else:
        peers[peer.public_key] = replace(known, allowed_ips=known.allowed_ips + peer.allowed_ips)


def _device(found: dict[int, bytes]) -> SeenDevice:
    private_key, public_key = found.get(_PRIVATE_KEY), found.get(_PUBLIC_KEY)
    return SeenDevice(
        index=_fixed(_U32, found.get(_IFINDEX)),
        name=text_of(found, _IFNAME),
        listen_port=_fixed(_U16, found.get(_LISTEN_PORT)),
        fwmark=_fixed(_U32, found.get(_FWMARK)),
        private_key=Secret(_key(private_key)) if private_key is not None else None,
        public_key=_key(public_key) if public_key is not None else None,
        peers=(),
    )


def _seen_peer(data: bytes, offset: int, end: int) -> SeenPeer:
    found: dict[int, bytes] = {}
    allowed_ips: tuple[IPNetwork, ...] = ()
    for kind, start, stop in _nested(data, offset, end):
        if kind == _PEER_ALLOWED_IPS:
            inner = (attributes(data, first, last) for _, first, last in _nested(data, start, stop))
            allowed_ips = tuple(map(_network, inner))
        else:
            found[kind] = data[start:stop]
    public_key = _key(found.get(_PEER_PUBLIC_KEY, b""))
    if _PEER_PRESHARED_KEY not in found:  # continuation of the previous peer
        return SeenPeer(public_key, allowed_ips=allowed_ips)
    seconds, nanoseconds = _fixed_pair(found.get(_PEER_LAST_HANDSHAKE))
    endpoint = found.get(_PEER_ENDPOINT)
    return SeenPeer(
        public_key,
        Secret(_key(found[_PEER_PRESHARED_KEY])),
        _endpoint(endpoint) if endpoint is not None else None,
        _fixed(_U16, found.get(_PEER_KEEPALIVE)),
        seconds + nanoseconds / 1e9,
        _fixed(_U64, found.get(_PEER_RX_BYTES)),
        _fixed(_U64, found.get(_PEER_TX_BYTES)),
        allowed_ips,
    )


def _nested(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, begin, end) of each attribute. Raises ``MalformedNetlink`` for one that does not fit."""
    while offset < end:
        kind, length = 0, 0
        if offset + _ATTR.size <= end:
            length, kind = _ATTR.unpack_from(data, offset)
        if length < _ATTR.size or offset + length > end:
            raise MalformedNetlink
        yield kind & NLA_TYPE_MASK, offset + _ATTR.size, offset + length
        offset += (length + 3) & ~3


def _fixed(form: struct.Struct, raw: bytes | None) -> int:
    if raw is None or len(raw) != form.size:
        raise MalformedNetlink
    number: int = form.unpack(raw)[0]
    return number


def _fixed_pair(raw: bytes | None) -> tuple[int, int]:
    if raw is None or len(raw) != _TIME.size:
        raise MalformedNetlink
    seconds, nanoseconds = _TIME.unpack(raw)
    return seconds, nanoseconds


def _key(raw: bytes) -> bytes:
    if len(raw) != KEY_LENGTH:
        raise MalformedNetlink
    return raw


def _network(found: dict[int, bytes]) -> IPNetwork:
    family = FAMILY.get(_fixed(_U16, found.get(_IP_FAMILY)))
    raw, length = found.get(_IP_ADDRESS, b""), found.get(_IP_LENGTH, b"")
    if family is None or len(length) != 1 or len(raw) != (4 if family == 4 else 16):
        raise MalformedNetlink
    return network_of(raw, length[0])


def _endpoint(raw: bytes) -> Endpoint:
    family = FAMILY.get(int.from_bytes(raw[:2], sys.byteorder))
    if family is None or len(raw) != _SOCKADDR[family].size:
        raise MalformedNetlink
    values = _SOCKADDR[family].unpack(raw)
    return address_of(values[1] if family == 4 else values[2]), values[0]


_NETLINK_GENERIC = 16
# linux/genetlink.h: the controller, which maps names of families to their numbers.
_CONTROLLER, _GET_FAMILY, _FAMILY_NAME = 16, 3, 2
_DUMP_TRIES = 5


class NoWireGuard(OSError):
    """Error for a kernel without WireGuard."""


class WireGuardDevices:
    """Reader and writer of WireGuard devices. Used by one thread; any method may raise ``OSError``."""

    def __init__(self) -> None:
        self._socket = NetlinkSocket(protocol=_NETLINK_GENERIC)
        try:
            self._family = self._find_family()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def read(self, name: str) -> SeenDevice | None:
        """Return a device with its peers; None if it is missing or of another kind."""
        for _ in range(_DUMP_TRIES):
            try:
                found = list(self._socket.dump(self._family, get_device(name)))
            except DumpInterrupted:
                continue
            except OSError as failure:
                if failure.errno in (errno.ENODEV, errno.EOPNOTSUPP):
                    return None
                raise
            return decode(found)
        raise DumpInterrupted(errno.EINTR, f"the peers of {name} keep changing")

    def write(self, bodies: Sequence[bytes]) -> dict[int, int]:
        """Send packed bodies. Return the errno of each refused body by its index."""
        refused: dict[int, int] = {}
        for failed in self._socket.write(
            message(self._family, NLM_F_REQUEST, body, place) for place, body in enumerate(bodies)
        ):
            refused.update(failed)
        return refused

    def _find_family(self) -> int:
        body = _HEADER.pack(_GET_FAMILY, 1, 0) + attribute(_FAMILY_NAME, b"wireguard\0")
        try:
            return family_id(*self._socket.ask(_CONTROLLER, body))
        except OSError as failure:
            if failure.errno == errno.ENOENT:
                raise NoWireGuard(
                    errno.EOPNOTSUPP, f"{os.strerror(errno.EOPNOTSUPP)}; load it: modprobe wireguard"
                ) from None
            raise
