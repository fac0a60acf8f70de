"""Who changed what is ours: the processes behind the ports that netlink notifications name."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flanneld.state.resources import Key, Kind, Resource

#: So many writers are looked for between two repairs; so many objects are remembered with theirs.
_WRITERS, _OBJECTS = 16, 1000
#: /proc/net/netlink: protocol (linux/netlink.h), port and inode of each socket.
_PROTOCOL, _PORT, _INODE = 1, 2, 9
_NETLINK_ROUTE = "0"


class ChangeOrigins:
    """What was changed since the last repair, and by whom as far as that can be told."""

    def __init__(self, find: Callable[[int], str] | None = None) -> None:
        self._find = find or process_at
        self._names: dict[int, str] = {}
        self._by_key: dict[Key, str] = {}

    def note(self, key: Key, port: int) -> None:
        """Whoever wrote through this port has changed what has this key. Looked up at once: it may end."""
        if not port or len(self._by_key) >= _OBJECTS:
            return
        if port not in self._names and len(self._names) < _WRITERS:
            self._names[port] = self._find(port)
        name = self._names.get(port)
        if name:
            self._by_key[key] = name

    def of(self, resource: Resource) -> str:
        """``NetworkManager (pid 812)``, who changed it or its device; empty if nobody knows."""
        device = (Kind.LINK, getattr(resource, "device", ""))
        return self._by_key.get(resource.key) or self._by_key.get(device, "")

    def forget(self) -> None:
        """All of that has been put right."""
        self._names.clear()
        self._by_key.clear()


def process_at(port: int, proc: Path = Path("/proc")) -> str:
    """The name and number of the process that writes through a port of rtnetlink; empty if unknown.

    netlink(7): a port is by default the number of the process that opened the socket. That is the number in
    its own PID namespace, where ours may have another process with it: so only one that holds this very
    socket is named.
    """
    inode = _inode_of(port, proc)
    if not inode:
        return ""
    where = proc / str(port)
    with suppress(OSError):
        if any(_target(fd) == f"socket:[{inode}]" for fd in (where / "fd").iterdir()):
            name = (where / "comm").read_text(errors="replace").strip()
            return f"{name} (pid {port})" if name.isprintable() else f"pid {port}"
    return ""


def _inode_of(port: int, proc: Path) -> str:
    with suppress(OSError):
        for line in (proc / "self/net/netlink").read_text().splitlines():
            fields = line.split()
            if len(fields) > _INODE and (fields[_PROTOCOL], fields[_PORT]) == (_NETLINK_ROUTE, str(port)):
                return fields[_INODE]
    return ""


def _target(link: Path) -> str:
    with suppress(OSError):  # closed meanwhile
        return os.readlink(link)  # noqa: PTH115 - not a path that leads anywhere
    return ""
