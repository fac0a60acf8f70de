"""Capture of the packets between two containers, as an outsider on the link reads them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

from tests.lab import Lab, Node, wait_for
from tests.netns.traffic import ETH_P_ALL

#: linux/if_packet.h: packets seen and dropped since the last question.
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
#: asm-generic/socket.h
_SO_RCVBUFFORCE = 33


class Wire:
    """Counts the packets between two containers that can be read at a node's port of the switch.

    On the node itself a capture also shows what IPsec has decrypted. An encapsulation that does not encrypt
    leaves the inner addresses in sight.
    """

    def __init__(self, lab: Lab, node: Node, peer: Node) -> None:
        pairs = zip(*(each.container().addresses.values() for each in (node, peer)), strict=True)
        packed = [(ip_address(ours).packed, ip_address(theirs).packed) for ours, theirs in pairs]
        self._marks = tuple(mark for one, other in packed for mark in (one + other, other + one))
        with lab.switch.entered():
            # A socket made with a protocol gets the packets of all devices until it is bound.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 32 << 20)
            self._socket.bind((node.name, ETH_P_ALL))
        self._socket.settimeout(0.1)
        self._stop = threading.Event()
        self.seen = self.readable = self._delivered = self._dropped = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See that no packet was missed."""
        self._stop.set()
        self._thread.join()
        with self._socket:
            self._ask()
        assert self._dropped == 0

    def drain(self) -> None:
        """Wait until all packets that have passed before are read."""
        self._ask()
        goal = self._delivered
        wait_for(lambda: self.seen >= goal, what="the packets on the wire to be read")

    def _ask(self) -> None:
        """Ask the kernel for the packets since the last question."""
        told = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, struct.calcsize("II"))
        delivered, dropped = struct.unpack("II", told)
        self._delivered += delivered - dropped
        self._dropped += dropped

    def wait_for_packets(self, more: int = 20) -> None:
        """Wait until ``more`` packets, readable or not, have passed."""
        goal = self.seen + more
        wait_for(lambda: self.seen >= goal, what="packets on the wire")

    def wait_for_readable(self) -> None:
        """Wait until one more packet can be read."""
        goal = self.readable + 1
        wait_for(lambda: self.readable >= goal, what="a readable packet")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                continue
            self.seen += 1
            self.readable += any(mark in data for mark in self._marks)


@contextmanager
def wire(lab: Lab, node: Node, peer: Node) -> Iterator[Wire]:
    """Capture meanwhile."""
    capture = Wire(lab, node, peer)
    try:
        yield capture
    finally:
        capture.close()
