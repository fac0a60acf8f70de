"""Control protocol between daemon and proxy, over an abstract SOCK_SEQPACKET socket.

A message is a verb of one byte and a body. The proxy answers each message with one of the same verb. ``LIST``
is answered by several, and the last is not full.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from itertools import islice

#: The proxy answers with its settings, pid, data plane and the reason for its choice.
HELLO = b"h"
PUT, DROP, LIST, COUNTERS = b"p", b"d", b"l", b"c"
#: End the proxy; the device stays, or is removed.
LEAVE, LEAVE_NOTHING = b"q", b"Q"
#: Sent by the proxy unasked when it ends, with the reason.
END_REASON = b"!"

LONGEST = 1 << 16
#: Entries per message. A socket's buffer holds several messages.
CHUNK = 4000
_ENTRY = struct.Struct(">IBI")  # subnet, prefix length, endpoint
_UCRED = struct.Struct("=iII")  # linux/socket.h: pid, uid, gid
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds
# linux/capability.h
_CAPABILITY_VERSION, _CAP_NET_ADMIN = 0x20080522, 1 << 12
_HEADER = struct.Struct("=Ii")  # version, pid
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; then the same for capabilities from 32 on

PeerEntry = tuple[IPv4Network, IPv4Address]


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def connect(connection: socket.socket, address: str, timeout: float) -> None:
    """Connect to a proxy. Block for at most ``timeout`` seconds. Raises ``OSError``."""
    # Others may fill the queue. With Python's timeout the socket would not wait for its turn, so the kernel's
    # is set.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(timeout), 0))
    connection.connect(address)
    connection.settimeout(timeout)


def other_end(connection: socket.socket) -> tuple[int, bool]:
    """Return the pid of the peer, 0 if it is in another PID namespace, and True if it can be trusted.

    Any process in the network namespace can connect to or bind an abstract address. That includes root in a
    container with the host's network but without CAP_NET_ADMIN.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    may = pid != 0 and _may_configure(os.getpid()) <= _may_configure(pid)
    return pid, may and uid in (0, os.geteuid())


def _may_configure(pid: int) -> bool:
    """Return True if a process has CAP_NET_ADMIN. Uses capget(2), because /proc may hide processes."""
    sets = ctypes.create_string_buffer(_SETS.size)
    failed = ctypes.CDLL(None).capget(_HEADER.pack(_CAPABILITY_VERSION, pid), sets)
    effective, *_ = _SETS.unpack(sets.raw)
    return not failed and bool(effective & _CAP_NET_ADMIN)


def pack(entries: Iterable[PeerEntry]) -> Iterator[bytes]:
    """Yield the bodies that contain these entries. The last is not full, and may be empty."""
    rest = iter(entries)
    while True:
        part = list(islice(rest, CHUNK))
        yield b"".join(
            _ENTRY.pack(int(subnet.network_address), subnet.prefixlen, int(endpoint))
            for subnet, endpoint in part
        )
        if len(part) < CHUNK:
            return


def unpack(body: bytes) -> list[PeerEntry]:
    """Return the entries in a body. Raises ``ValueError`` for an invalid body."""
    try:
        found = list(_ENTRY.iter_unpack(body))
    except struct.error as wrong:
        raise ValueError(str(wrong)) from None
    return [(IPv4Network((net, length)), IPv4Address(endpoint)) for net, length, endpoint in found]


def is_full(body: bytes) -> bool:
    return len(body) == CHUNK * _ENTRY.size
