"""Data plane in Python, with batched system calls."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network

from flanneld.backends.udp.proxy.mmsg import Messages
from flanneld.backends.udp.proxy.packet import is_ipv4, net_unreachable, spend_ttl
from flanneld.backends.udp.proxy.peer_lookup import PeerLookup
from flanneld.backends.udp.proxy.plane import Wire
from flanneld.network import tun

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


class PythonPlane:
    """Data plane with a loop in one thread. Raises ``OSError`` if the TUN is not available."""

    name = "python"

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._peers = PeerLookup(wire.port)
        self._tun = tun.attach(wire.tun)
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
