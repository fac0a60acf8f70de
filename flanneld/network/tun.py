"""TUN devices, whose packets a process reads and writes (linux/if_tun.h)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from flanneld.network.interfaces import index_of

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOFFLOAD = 0x400454CA, 0x400454CB, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR, _IFF_TUN_EXCL = 0x0001, 0x1000, 0x4000, 0x8000
_IFREQ = struct.Struct("16sH22x")


def attach(name: str, features: int = 0) -> int:
    """Open an existing device without blocking I/O, and return its descriptor.

    ``features`` are the offloads (TUN_F_*) that the process accepts; with any, each packet has a vnet header.
    Raises ``OSError``: EBUSY if another process has it open, EINVAL for unsupported offloads.
    """
    if not index_of(name):
        # The kernel would create it, but without an address or a route.
        raise OSError(errno.ENODEV, f"there is no device {name}")
    fd = _open(name, _IFF_VNET_HDR if features else 0)
    try:
        # Also for 0: the device remembers the offloads of an earlier process.
        fcntl.ioctl(fd, _TUNSETOFFLOAD, features)
        os.set_blocking(fd, False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make(name: str) -> None:
    """Create a persistent device. Raises ``OSError``, with the remedy.

    EBUSY means that it exists: another daemon starting now may have created it.
    """
    with _opened(name, _IFF_TUN_EXCL) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)


def unmake(name: str) -> None:
    """Remove a device that no process has open. A missing one is no error. Raises ``OSError``."""
    with _opened(name) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 0)


def _open(name: str, flags: int = 0) -> int:
    try:
        fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise
        remedy = f"no {_DEVICE}; load the module with `modprobe tun`, or give the container this device"
        raise OSError(failure.errno, remedy) from None
    try:
        fcntl.ioctl(fd, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TUN | _IFF_NO_PI | flags))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _opened(name: str, flags: int = 0) -> Iterator[int]:
    fd = _open(name, flags)
    try:
        yield fd
    finally:
        os.close(fd)
