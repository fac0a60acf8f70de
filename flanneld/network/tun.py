"""TUN devices: virtual interfaces whose packets a process reads and writes (linux/if_tun.h)."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOFFLOAD = 0x400454CA, 0x400454CB, 0x400454D0
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_IFREQ = struct.Struct("16sH22x")


def attach(name: str) -> int:
    """Open a device that is there. Raises ``OSError``: EBUSY if another process has it."""
    socket.if_nametoindex(name)  # What is missing would be made, but without an address or a route.
    return _open(name)


def make(name: str) -> None:
    """Make a device that stays when no process has it open. Raises ``OSError``, with the remedy."""
    with _opened(name) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)


def unmake(name: str) -> None:
    """Remove a device that no process has open; none is fine. Raises ``OSError``."""
    with _opened(name) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 0)


def offload(fd: int, features: int) -> None:
    """Say which unfinished packets (TUN_F_*) the process takes; without IFF_VNET_HDR it must be none."""
    fcntl.ioctl(fd, _TUNSETOFFLOAD, features)


def _open(name: str) -> int:
    try:
        fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise
        remedy = f"no {_DEVICE}; load the module with `modprobe tun`, or give the container this device"
        raise OSError(failure.errno, remedy) from None
    try:
        fcntl.ioctl(fd, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _opened(name: str) -> Iterator[int]:
    fd = _open(name)
    try:
        yield fd
    finally:
        os.close(fd)
