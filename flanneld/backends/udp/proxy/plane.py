"""Data planes: their interface, the choice of one, and the one in Python, with batched system calls.

As in upstream's proxy, each side decrements the TTL and updates the checksum (RFC 1624). A packet without a
peer is answered with net-unreachable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import Protocol

from msgspec import Struct

from flanneld.network import interfaces


class Plane(Protocol):
    """Data plane: carries packets between a TUN and a UDP socket, in its own threads or loop."""

    name: str

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Add or replace a peer, also while traffic flows."""
        ...

    def drop_peer(self, subnet: IPv4Network) -> None:
        """Remove a peer. A missing one is no error."""
        ...

    def run(self) -> None:
        """Carry packets until ``stop``. Raises ``OSError`` if the TUN is gone."""
        ...

    def stop(self) -> None:
        """Make ``run`` return soon. May be called from any thread or a signal handler."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the counters of carried packets, and of dropped ones by reason."""
        ...


class Wire(Struct, frozen=True, gc=False):
    """Endpoints of a data plane.

    - ``socket`` is the descriptor of a bound UDP socket without any options set.
    - ``address`` is the TUN's, ``port`` the peers' UDP port.
    - ``accept_any`` accepts datagrams from any source, otherwise only from the public IPs of known peers.
    """

    tun: str
    socket: int
    address: IPv4Address
    mtu: int
    port: int
    accept_any: bool


#: A data plane's constructor, and the reason for choosing it.
Offer = tuple[Callable[[Wire], Plane], str]


def offers(data_plane: str) -> list[Offer]:
    """Return the data planes to try, best first. Raises ``OSError`` if the requested one is missing."""
    from flanneld.backends.udp.proxy import native  # both import this module

    if data_plane == "python":
        return [(PythonPlane, "as DataPlane says")]
    missing = native.available()
    if data_plane == "native":
        if missing is not None:
            raise OSError(errno.ENOSYS, f"no native data plane: {missing}")
        return [(native.NativePlane, "as DataPlane says")]
    if missing is not None:
        return [(PythonPlane, f"no native one: {missing}")]
    return [(native.NativePlane, "the faster one"), (PythonPlane, "nothing else works")]


def build(candidates: list[Offer], ends: Wire) -> tuple[Plane, str]:
    """Return the first data plane that works on this kernel. Raises ``OSError`` if none does."""
    (make, why), *others = candidates
    try:
        return make(ends), why
    except OSError as failure:
        if failure.errno == errno.EBUSY or not others:
            raise
        reason = f"the better one fails: {failure.strerror or failure}"
    return build([(make, reason) for make, _ in others], ends)


HEADER = 20
_LONGEST_HEADER = 60
_ICMP, _NET_UNREACHABLE, _TTL = 1, 3, 8
_IP = struct.Struct(">BBHHHBBH4s4s")
_UNREACHABLE = struct.Struct(">BBHI")
_OFFSET = 0x1FFF
#: Cached destinations. A scan of the network must not fill the memory.
_REMEMBERED = 1 << 16
_SOCKADDR_IN = struct.Struct("=HH4s8x")
_SOCKADDR = 16
#: Bytes of receive buffer. The kernel's default of about 200 KiB overflows in a short burst.
RECEIVE_BUFFER = 4 << 20
_SO_RCVBUFFORCE, _UDP_GRO = 33, 104  # asm-generic/socket.h, linux/udp.h
_BATCH = 64
COUNTERS = (
    "sent_packets", "sent_bytes", "no_route", "ttl", "malformed", "send_failed",
    "received_packets", "received_bytes", "not_a_peer", "write_failed",
)  # fmt: skip
_LONGEST = 65535
_number = struct.Struct(">I").unpack_from
_libc = ctypes.CDLL(None, use_errno=True)


def is_ipv4(packet: bytearray, size: int) -> bool:
    return size >= HEADER and packet[0] >> 4 == 4


def spend_ttl(packet: bytearray) -> bool:
    """Decrement the TTL. Return False if it reached 0: the packet must be dropped."""
    left = packet[8] - 1
    packet[8] = left & 0xFF
    checksum = (packet[10] << 8 | packet[11]) + 0x100
    checksum = (checksum & 0xFFFF) + (checksum >> 16)
    packet[10], packet[11] = checksum >> 8, checksum & 0xFF
    return left != 0


def net_unreachable(packet: bytes | bytearray, source: bytes) -> bytes | None:
    """Return the ICMP error for a packet without a peer; None if none may be sent.

    ICMP and later fragments must not be answered (RFC 1122, 3.2.2).
    """
    header = 4 * (packet[0] & 15)
    offset = int.from_bytes(packet[6:8], "big") & _OFFSET
    if not HEADER <= header < _LONGEST_HEADER or packet[9] == _ICMP or offset:
        return None
    quoted = bytes(packet[: header + 8])
    message = _UNREACHABLE.pack(_NET_UNREACHABLE, 0, 0, 0) + quoted
    message = _with_checksum(message, 2, message)
    head = _IP.pack(0x45, 0, HEADER + len(message), 0, 0, _TTL, _ICMP, 0, source, bytes(packet[12:16]))
    return _with_checksum(head, 10, head) + message


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of an even or odd number of bytes."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _with_checksum(data: bytes, place: int, over: bytes) -> bytes:
    return data[:place] + checksum(over).to_bytes(2, "big") + data[place + 2 :]


class PeerLookup:
    """Peers by subnet, with longest prefix match. One thread may look up while another changes them."""

    def __init__(self, port: int) -> None:
        self._port = socket.htons(port)
        self._endpoints: dict[IPv4Network, IPv4Address] = {}
        #: Per prefix length, longest first: the mask, and the peers' sockaddr_in by network.
        self._tables: tuple[tuple[int, dict[int, bytes]], ...] = ()
        self._remembered: dict[int, bytes | None] = {}
        #: Public IPs of peers as numbers, each with its count of peers.
        self.sources: dict[int, int] = {}

    def set(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        self._forget_source(subnet)
        self._endpoints[subnet] = endpoint
        self.sources[int(endpoint)] = self.sources.get(int(endpoint), 0) + 1
        target = _SOCKADDR_IN.pack(socket.AF_INET, self._port, endpoint.packed)
        self._table(subnet)[int(subnet.network_address)] = target
        # A concurrent lookup stores into the old dict, so its stale result is dropped with it.
        self._remembered = {}

    def drop(self, subnet: IPv4Network) -> None:
        if subnet in self._endpoints:
            self._forget_source(subnet)
            del self._endpoints[subnet]
            del self._table(subnet)[int(subnet.network_address)]
            self._remembered = {}

    def find(self, destination: int) -> bytes | None:
        """Return the sockaddr_in of the peer for a destination, None if there is none."""
        remembered = self._remembered
        if destination in remembered:
            return remembered[destination]
        if len(remembered) >= _REMEMBERED:
            remembered = self._remembered = {}
        found = None
        for mask, table in self._tables:
            found = table.get(destination & mask)
            if found is not None:
                break
        remembered[destination] = found
        return found

    def _table(self, subnet: IPv4Network) -> dict[int, bytes]:
        mask = int(subnet.netmask)
        tables = dict(self._tables)
        if mask not in tables:
            tables[mask] = {}
            self._tables = tuple(sorted(tables.items(), reverse=True))
        return tables[mask]

    def _forget_source(self, subnet: IPv4Network) -> None:
        endpoint = self._endpoints.get(subnet)
        if endpoint is None:
            return
        left = self.sources[int(endpoint)] - 1
        if left:
            self.sources[int(endpoint)] = left
        else:
            del self.sources[int(endpoint)]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("vector", ctypes.c_void_p),
        ("vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


class Messages:
    """Preallocated datagram slots. Slot ``i`` has ``buffers[i]``, and its address at ``names[16 * i:]``.

    The kernel accesses this memory directly: nothing is copied or allocated during use.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.buffers = [bytearray(size) for _ in range(slots)]
        self.views = [memoryview(buffer) for buffer in self.buffers]
        #: Argument for ``os.readv``.
        self.vectors = [[buffer] for buffer in self.buffers]
        self.names = bytearray(_SOCKADDR * slots)
        self._iovecs = bytearray(ctypes.sizeof(_Iovec) * slots)
        self._messages = bytearray(ctypes.sizeof(_Message) * slots)
        #: Item ``2 * i + 1`` is the number of bytes to send from slot ``i``.
        self.to_send = memoryview(self._iovecs).cast("L")
        lengths = memoryview(self._messages).cast("I")
        #: Item ``i`` is the number of bytes received in slot ``i``.
        self.received = lengths[_Message.length.offset // 4 :: ctypes.sizeof(_Message) // 4]
        self._connect(size)

    def _connect(self, size: int) -> None:
        """Point each message to its buffer and its address."""
        iovecs = (_Iovec * self.slots).from_buffer(self._iovecs)
        messages = (_Message * self.slots).from_buffer(self._messages)
        names = _address(self.names)
        for slot, buffer in enumerate(self.buffers):
            iovecs[slot].base, iovecs[slot].length = _address(buffer), size
            header = messages[slot].header
            header.name, header.name_length = names + _SOCKADDR * slot, _SOCKADDR
            header.vector, header.vectors = ctypes.addressof(iovecs[slot]), 1
        self._start = ctypes.addressof(messages)

    def receive(self, fd: int) -> int:
        """Receive pending datagrams, at most ``slots``. Return their number."""
        number: int = _libc.recvmmsg(fd, ctypes.c_void_p(self._start), self.slots, socket.MSG_DONTWAIT, None)
        return max(0, number)

    def send(self, fd: int, number: int) -> list[int]:
        """Send the first ``number`` slots. Return those the kernel refused: too long, or firewalled."""
        refused: list[int] = []
        sent = 0
        while sent < number:
            first = ctypes.c_void_p(self._start + ctypes.sizeof(_Message) * sent)
            done = _libc.sendmmsg(fd, first, number - sent, 0)
            if done <= 0:
                refused.append(sent)
            sent += max(1, done)
        return refused


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class PythonPlane:
    """Data plane with a loop in one thread. Raises ``OSError`` if the TUN is not available."""

    name = "python"

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._peers = PeerLookup(wire.port)
        self._tun = interfaces.attach(wire.tun)
        tune(wire.socket)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._out, self._in = Messages(_BATCH, wire.mtu), Messages(_BATCH, _LONGEST)
        self._counts = dict.fromkeys(COUNTERS, 0)

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        self._peers.set(subnet, endpoint)

    def drop_peer(self, subnet: IPv4Network) -> None:
        self._peers.drop(subnet)

    def counters(self) -> dict[str, int]:
        return self._counts.copy()

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._stop, 1)

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._tun, self._wire.socket, self._stop):
            poll.register(fd, select.POLLIN)
        try:
            while not self._stopping:
                poll.poll()
                busy = True
                while busy and not self._stopping:
                    busy = self._outward()
                    busy |= self._inward()
        finally:
            os.close(self._tun)

    # ---- from the TUN to the peers -----------------------------------------------------------

    def _outward(self) -> bool:
        """Send the packets waiting in the TUN. Return True if there were any."""
        room = self._out
        read = ready = 0
        while read < _BATCH:
            try:
                size = os.readv(self._tun, room.vectors[ready])
            except BlockingIOError:
                break
            read += 1
            target = self._way_of(room.buffers[ready], size)
            if target is not None:
                room.names[16 * ready : 16 * ready + 16] = target
                room.to_send[2 * ready + 1] = size
                ready += 1
        if ready:
            self._send(ready)
        return read > 0

    def _send(self, number: int) -> None:
        room, counts = self._out, self._counts
        refused = room.send(self._wire.socket, number)
        counts["send_failed"] += len(refused)
        counts["sent_packets"] += number - len(refused)
        counts["sent_bytes"] += sum(room.to_send[1 : 2 * number : 2])
        counts["sent_bytes"] -= sum(room.to_send[2 * slot + 1] for slot in refused)

    def _way_of(self, packet: bytearray, size: int) -> bytes | None:
        """Prepare a packet and return its destination, None if it ends here."""
        if not is_ipv4(packet, size):
            # The kernel sends IPv6 on every device.
            self._counts["malformed"] += 1
            return None
        target = self._peers.find(_number(packet, 16)[0])
        if target is None:
            self._counts["no_route"] += 1
            answer = net_unreachable(packet[:size], self._wire.address.packed)
            if answer is not None:
                self._deliver(answer)
        elif not spend_ttl(packet):
            self._counts["ttl"] += 1
            return None
        return target

    # ---- from the peers to the TUN -----------------------------------------------------------

    def _inward(self) -> bool:
        """Deliver the waiting datagrams. Return True if there were any."""
        room, sources = self._in, self._peers.sources
        count = room.receive(self._wire.socket)
        for slot in range(count):
            packet, size = room.buffers[slot], room.received[slot]
            if not self._wire.accept_any and _number(room.names, 16 * slot + 4)[0] not in sources:
                self._counts["not_a_peer"] += 1
            elif not is_ipv4(packet, size):
                self._counts["malformed"] += 1
            elif not spend_ttl(packet):
                self._counts["ttl"] += 1
            elif self._deliver(room.views[slot][:size]):
                self._counts["received_packets"] += 1
                self._counts["received_bytes"] += size
        return count > 0

    def _deliver(self, packet: bytes | memoryview) -> bool:
        try:
            os.write(self._tun, packet)
        except OSError as failure:
            if failure.errno == errno.EBADFD:
                raise  # the device is gone
            self._counts["write_failed"] += 1
            return False
        return True


def tune(fd: int) -> None:
    """Set a large receive buffer, if permitted beyond the system's limit, and turn UDP GRO off."""
    with socket.socket(fileno=os.dup(fd)) as wire:
        with suppress(OSError):  # an old kernel without GRO
            wire.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 0)
        try:
            wire.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER)
        except PermissionError:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
