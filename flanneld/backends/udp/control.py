"""Control channel between daemon and udp proxy: resources, protocol and addresses.

The resources are the proxy with its settings, and its peers. The channel is an abstract SOCK_SEQPACKET
socket. A message is a verb of one byte and a body. The proxy answers each message with one of the same verb.
``LIST`` is answered by several, and the last is not full.

An abstract address belongs to a network namespace, as the TUN does. Any process in the namespace can bind any
address. If the proxy's usual one is taken, it adds a random suffix. The daemon lists the listening addresses
by user with linux/unix_diag.h (sock_diag(7)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from ipaddress import IPv4Address, IPv4Network
from itertools import islice
from typing import ClassVar

from msgspec import Struct

from flanneld import __version__
from flanneld.network.rtnetlink.netlink import NetlinkSocket, attributes
from flanneld.network.rtnetlink.netlink import unpack as unpack_netlink
from flanneld.runtime.clock import random_bytes
from flanneld.state.resources import Key, Kind

#: Names of the tables.
PROXIES, PROXY_PEERS = "udp-pump", "udp-peers"
#: Values of DataPlane: a certain data plane, or the best that works.
DATA_PLANES = ("auto", "native", "python")


class UdpProxy(Struct, frozen=True, gc=False):
    """A udp proxy with its settings. ``local`` and ``port`` are its socket's, ``address`` is the TUN's.

    ``data_plane`` is one of ``DATA_PLANES``. A proxy of another ``version`` is replaced.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    local: IPv4Address
    port: int
    address: IPv4Address
    mtu: int
    accept_any: bool = False
    data_plane: str = "auto"
    version: str = __version__

    @property
    def key(self) -> Key:
        return (PROXIES, self.tun)

    def __str__(self) -> str:
        return f"udp proxy of {self.tun} on {self.local}:{self.port}"

    def words(self) -> list[str]:
        """Return the settings as command line arguments of the proxy."""
        accept = "any" if self.accept_any else "peers"
        numbers = (self.local, self.port, self.address, self.mtu)
        return [self.version, self.tun, *map(str, numbers), accept, self.data_plane]

    @classmethod
    def of(cls, words: Sequence[str]) -> UdpProxy:
        """Parse the settings. Raises ``ValueError`` for those of an incompatible version."""
        version, tun, local, port, address, mtu, accept, data_plane = words
        return cls(
            tun,
            IPv4Address(local),
            int(port),
            IPv4Address(address),
            int(mtu),
            accept == "any",
            data_plane,
            version,
        )


class ProxyPeer(Struct, frozen=True, gc=False):
    """A peer of the proxy of ``tun``: packets to ``subnet`` are sent to ``endpoint``."""

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    subnet: IPv4Network
    endpoint: IPv4Address

    @property
    def key(self) -> Key:
        return (PROXY_PEERS, self.tun, int(self.subnet.network_address), self.subnet.prefixlen)

    def __str__(self) -> str:
        return f"peer {self.subnet} at {self.endpoint} in the proxy of {self.tun}"


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
# linux/sock_diag.h, linux/unix_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
#: Family, protocol, states, inode, attributes to show, cookie.
_REQUEST = struct.Struct("=BBxxIIIII")
_ANSWER = struct.Struct("=BBBxIII")
_LISTENING, _SHOW_NAME, _SHOW_UID = 1 << 10, 0x01, 0x40
_NAME, _UID = 0, 7

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
    may = pid != 0 and may_configure(os.getpid()) <= may_configure(pid)
    return pid, may and uid in (0, os.geteuid())


def may_configure(pid: int) -> bool:
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


def address_of(tun: str) -> str:
    """Return the usual address of a device's proxy."""
    return f"\0flannel-pump/{tun}"


def addresses_of(tun: str, *, of_anybody: bool = False) -> list[str]:
    """Return the possible addresses of a device's proxy, the usual one first.

    Addresses bound by users other than this one and root are left out, as far as the kernel shows users. With
    ``of_anybody`` all are returned.
    """
    usual = address_of(tun)
    try:
        held = dict(_listeners())
    except OSError:
        return [usual]  # a kernel without unix_diag
    believed = (0, os.geteuid(), None)
    others = [
        name for name, uid in held.items() if name.startswith(f"{usual}/") and (of_anybody or uid in believed)
    ]
    return [usual, *others] if of_anybody or held.get(usual) in believed else others


def listen(tun: str) -> socket.socket:
    """Listen at the usual address. Raises ``OSError``."""
    return _listen(address_of(tun))


def listen_elsewhere(tun: str) -> socket.socket:
    """Listen at a random address, because the usual one is taken.

    Raises ``OSError`` if it cannot be found.
    """
    name = f"{address_of(tun)}/{random_bytes(8).hex()}"
    listener = _listen(name)
    if name not in addresses_of(tun):
        reason = f"`ss -xlp` names the process that poses as the proxy of {tun} and has to be stopped"
        raise OSError(errno.EADDRINUSE, reason)
    return listener


def _listen(name: str) -> socket.socket:
    listener = new_socket()
    listener.bind(name)
    listener.listen()
    return listener


def _listeners() -> Iterator[tuple[str, int | None]]:
    """Yield the abstract listening addresses, each with its user, None if the kernel is too old."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, _LISTENING, 0, _SHOW_NAME | _SHOW_UID, 0xFFFFFFFF, 0xFFFFFFFF)
    with closing(NetlinkSocket(protocol=_NETLINK_SOCK_DIAG)) as asker:
        for data, offset, end in asker.dump(_SOCK_DIAG_BY_FAMILY, request):
            unpack_netlink(_ANSWER, data, offset, end)
            found = attributes(data, offset + _ANSWER.size, end)
            uid = found.get(_UID)
            yield os.fsdecode(found.get(_NAME, b"")), None if uid is None else struct.unpack("=I", uid)[0]
