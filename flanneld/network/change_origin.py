"""Origin of changes by others: the processes behind the ports in netlink notifications."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Writers looked up between two repairs, at most.
_MAX_WRITERS = 16
#: Columns of /proc/net/netlink: protocol (linux/netlink.h), port and inode of each socket.
_PROTOCOL, _PORT, _INODE = 1, 2, 9
_NETLINK_ROUTE = "0"
#: Programs whose arguments are shown: they say what was changed. Those of others may hold secrets,
#: and logs are passed on.
_TOOLS = frozenset({"ip", "bridge", "tc", "ifup", "ifdown", "ifreload", "dhclient", "dhcpcd", "networkctl"})
#: Characters of a command line, at most.
_MAX_COMMAND = 80


class ChangeOrigins:
    """Names of the processes that wrote since the last repair, as far as known."""

    def __init__(self, find: Callable[[int], str] | None = None) -> None:
        self._find = find or process_at
        self._names: dict[int, str] = {}

    def of(self, port: int) -> str:
        """Return the process behind a port, like ``NetworkManager (pid 812)``.

        Looked up at once: it may end soon. A network tool has its command line with it.
        """
        if port and port not in self._names and len(self._names) < _MAX_WRITERS:
            self._names[port] = self._find(port)
        return self._names.get(port, "")

    def forget(self) -> None:
        """Forget the names after a repair: the ports may belong to other processes by the next change."""
        self._names.clear()


def process_at(port: int, proc: Path = Path("/proc")) -> str:
    """Return program and pid of the process that writes through an rtnetlink port; empty if unknown.

    By default the port is the pid of the process that opened the socket (netlink(7)). That is the pid in its
    own PID namespace, and ours may have another process with it. So a process is only named if it holds this
    socket.
    """
    inode = _inode_of(port, proc)
    if not inode:
        return ""
    where = proc / str(port)
    with suppress(OSError):
        if any(_target(fd) == f"socket:[{inode}]" for fd in (where / "fd").iterdir()):
            name = (where / "comm").read_text(errors="replace").strip()
            name = _command(where, name) if name in _TOOLS else name
            return f"{name} (pid {port})" if name.isprintable() else f"pid {port}"
    return ""


def _command(where: Path, name: str) -> str:
    """Return a tool's command line in back quotes, cut and printable; its name if there is none."""
    with (where / "cmdline").open("rb") as file:
        words = file.read(4 * _MAX_COMMAND).decode(errors="replace").split("\0")
    text = "".join(char if char.isprintable() else "?" for char in " ".join(words).strip())
    return f"`{text if len(text) <= _MAX_COMMAND else f'{text[: _MAX_COMMAND - 3]}...'}`" if text else name


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
