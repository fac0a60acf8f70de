"""A stream of short flows out of a container, and what an outsider sees of it."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from tests.lab import Namespace, wait_for

PORT = 9999
ETH_P_ALL = 0x0003
ETH_P_IP, ETH_P_IPV6 = 0x0800, 0x86DD

#: Each packet from a port of its own: the kernel decides on each anew whether to masquerade it, but not if it
#: remembers another one from there (nf_conntrack_udp_timeout, 30 s).
SENDER = """
import itertools, socket, sys, time
target, port, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
family = socket.AF_INET6 if ":" in target else socket.AF_INET
for own in itertools.cycle(range(1024, 65536)):
    with socket.socket(family, socket.SOCK_DGRAM) as flow:
        try:
            flow.bind(("", own))
            flow.sendto(b"x", (target, port))
        except OSError:
            pass
    time.sleep(pause)
"""


class Stream:
    """Sends to ``target`` from inside a namespace while in a ``with``."""

    def __init__(self, source: Namespace, target: str, output: Path, pause: float = 0.005) -> None:
        with output.open("wb") as file:
            self._process: subprocess.Popen[bytes] = source.start(
                sys.executable, "-c", SENDER, target, str(PORT), str(pause), output=file
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Sniffer:
    """Every packet of streams that arrives at an interface, whether somebody wants it or not."""

    def __init__(self, namespace: Namespace, interface: str) -> None:
        with namespace.entered():
            # A socket made with a protocol gets the packets of all interfaces until it is bound.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            self._socket.bind((interface, ETH_P_ALL))
        #: The source of each, in order.
        self.packets: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def listen(self, seconds: float) -> list[str]:
        """The sources of what arrives in so many seconds, and what has arrived before; all that so far."""
        end = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(0.0, end - time.monotonic()))
            try:
                data, where = self._socket.recvfrom(2048)
            except (TimeoutError, BlockingIOError):
                return self.packets
            source = _source(data, where[1])
            if source:
                self.packets.append(source)

    def sources(self, seconds: float = 0.3) -> set[str]:
        """The addresses from which something comes in so many seconds, once it comes at all."""
        self.listen(0)
        begin = len(self.packets)
        # The first packet of all waits until the way is known.
        wait_for(lambda: len(self.listen(0.05)) > begin, 5, "anything to arrive")
        return set(self.listen(seconds)[begin:])


def _source(data: bytes, protocol: int) -> str | None:
    """Where a packet of a stream comes from, None for any other packet."""
    if protocol == ETH_P_IP and len(data) >= 28 and data[9] == socket.IPPROTO_UDP:
        header, address = 4 * (data[0] & 15), data[12:16]
    elif protocol == ETH_P_IPV6 and len(data) >= 48 and data[6] == socket.IPPROTO_UDP:
        header, address = 40, data[8:24]
    else:
        return None
    (port,) = struct.unpack_from(">H", data, header + 2)
    return str(ip_address(address)) if port == PORT else None
