"""Addresses of the control channel: abstract sockets, which belong to a network namespace as the TUN does.

Any process in the namespace can bind any address. If the proxy's usual one is taken, it adds a random suffix.
The daemon lists the listening addresses by user with linux/unix_diag.h (sock_diag(7)).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing

from flanneld.backends.udp import control
from flanneld.network.rtnetlink.netlink import NetlinkSocket, attributes, unpack
from flanneld.runtime.randomness import random_bytes

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
#: Family, protocol, states, inode, attributes to show, cookie.
_REQUEST = struct.Struct("=BBxxIIIII")
_ANSWER = struct.Struct("=BBBxIII")
_LISTENING, _SHOW_NAME, _SHOW_UID = 1 << 10, 0x01, 0x40
_NAME, _UID = 0, 7


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
    listener = control.new_socket()
    listener.bind(name)
    listener.listen()
    return listener


def _listeners() -> Iterator[tuple[str, int | None]]:
    """Yield the abstract listening addresses, each with its user, None if the kernel is too old."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, _LISTENING, 0, _SHOW_NAME | _SHOW_UID, 0xFFFFFFFF, 0xFFFFFFFF)
    with closing(NetlinkSocket(protocol=_NETLINK_SOCK_DIAG)) as asker:
        for data, offset, end in asker.dump(_SOCK_DIAG_BY_FAMILY, request):
            unpack(_ANSWER, data, offset, end)
            found = attributes(data, offset + _ANSWER.size, end)
            uid = found.get(_UID)
            yield os.fsdecode(found.get(_NAME, b"")), None if uid is None else struct.unpack("=I", uid)[0]
