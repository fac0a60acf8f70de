"""Other network namespaces of this host, entered for a moment to read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flanneld.network.host import HostView
from flanneld.network.rtnetlink.netlink import attributes, u32

#: Directories in which container runtimes and iproute2 keep their namespaces.
_PLACES = ("/run/netns", "/run/docker/netns")
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OURS = "/proc/thread-self/ns/net"
_RTM_GETNSID, _NSID, _FD = 90, 1, 3  # linux/rtnetlink.h, linux/net_namespace.h
_RTGENMSG = bytes(4)


def named() -> Iterator[Path]:
    """Yield the namespaces that have a name on this host, except the one that we are in."""
    try:
        ours = Path(_OURS).stat().st_ino
    except OSError:
        return
    for place in _PLACES:
        try:
            paths = sorted(Path(place).iterdir())
        except OSError:
            continue
        for path in paths:
            try:
                if path.stat().st_ino != ours:
                    yield path
            except OSError:
                continue


def number_of(view: HostView, path: Path) -> int:
    """Return the number by which this namespace knows another one, -1 if it has none. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data, offset, end = view.ask(_RTM_GETNSID, _RTGENMSG + u32(_FD, descriptor))
    finally:
        os.close(descriptor)
    raw = attributes(data, offset + len(_RTGENMSG), end).get(_NSID, b"")
    return int.from_bytes(raw, sys.byteorder, signed=True) if raw else -1


@contextmanager
def entered(path: Path) -> Iterator[None]:
    """Move this thread to a namespace and back; a socket opened meanwhile stays there.

    Raises ``OSError`` without CAP_SYS_ADMIN.
    """
    home = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _set(home)
    finally:
        os.close(home)


def _set(descriptor: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
