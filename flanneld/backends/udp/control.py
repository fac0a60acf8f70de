"""What the daemon and a pump say to each other, over a SOCK_SEQPACKET socket that lives in no file system.

A message is a verb of one byte and its body. The pump answers each with one of the same verb; only of
``LIST`` it sends as many as it takes, the last of which is not full.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from itertools import islice

#: The pump says its settings, its process id, the name of its plane and why it is this one.
HELLO = b"h"
PUT, DROP, LIST, COUNTERS = b"p", b"d", b"l", b"c"
#: The pump ends: the device stays, or goes with it.
LEAVE, LEAVE_NOTHING = b"q", b"Q"
#: Said by the pump without being asked: it ends, and why.
FAREWELL = b"!"

LONGEST = 1 << 16
#: Entries in one message; a socket's buffer holds some times as many.
CHUNK = 4000
_ENTRY = struct.Struct(">IBI")  # subnet, prefix length, endpoint
_UCRED = struct.Struct("=iII")  # linux/socket.h: pid, uid, gid
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds
# linux/capability.h
_CAPABILITY_VERSION, _CAP_NET_ADMIN = 0x20080522, 1 << 12
_HEADER = struct.Struct("=Ii")  # version, pid
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; then those from the 33rd on

Entry = tuple[IPv4Network, IPv4Address]


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def connect(connection: socket.socket, address: str, patience: float) -> None:
    """Connect to a pump. No wait will be longer than so many seconds. Raises ``OSError``."""
    # Strangers may keep the queue full. A socket with a timeout of Python's would not stand in line.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(patience), 0))
    connection.connect(address)
    connection.settimeout(patience)


def other_end(connection: socket.socket) -> tuple[int, bool]:
    """The process at the other end, 0 if it is of another container, and whether it may be trusted.

    Anybody in the network namespace can connect to an abstract name, or take it: also root in a container
    that has the host's network, but not the right to configure it.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    may = pid != 0 and _may_configure(os.getpid()) <= _may_configure(pid)
    return pid, may and uid in (0, os.geteuid())


def _may_configure(pid: int) -> bool:
    """Whether a process has CAP_NET_ADMIN. Asked with capget(2): /proc may hide others from us."""
    sets = ctypes.create_string_buffer(_SETS.size)
    failed = ctypes.CDLL(None).capget(_HEADER.pack(_CAPABILITY_VERSION, pid), sets)
    effective, *_ = _SETS.unpack(sets.raw)
    return not failed and bool(effective & _CAP_NET_ADMIN)


def pack(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The bodies that hold these entries; the last is not full, and may be empty."""
    rest = iter(entries)
    while True:
        part = list(islice(rest, CHUNK))
        yield b"".join(
            _ENTRY.pack(int(subnet.network_address), subnet.prefixlen, int(endpoint))
            for subnet, endpoint in part
        )
        if len(part) < CHUNK:
            return


def unpack(body: bytes) -> list[Entry]:
    """Raises ``ValueError`` for what is not a number of whole and sensible entries."""
    try:
        found = list(_ENTRY.iter_unpack(body))
    except struct.error as wrong:
        raise ValueError(str(wrong)) from None
    return [(IPv4Network((net, length)), IPv4Address(endpoint)) for net, length, endpoint in found]


def is_full(body: bytes) -> bool:
    return len(body) == CHUNK * _ENTRY.size
