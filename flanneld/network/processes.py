"""Other programs of this host, found in /proc: who has a UDP port, who caused a change, and traces of ipsec.

A quick look for what an ipsec backend may have left: most hosts have nothing, and load none of its modules.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path

from flanneld.errors import printable
from flanneld.model import IPAddress
from flanneld.network.rtnetlink.netlink import NetlinkSocket

_PROC = Path("/proc")
#: Columns of /proc/net/udp and udp6: local address with port, and inode of each socket.
_UDP_LOCAL, _UDP_INODE = 1, 9


def owner_of(port: int, address: IPAddress | None = None, devices: Sequence[str] = ()) -> str:
    """Return the owner of a UDP port that is in use, as ``find``, or a command that names it."""
    unknown = f"another process or device (see `ss -anup sport = {port}` and `ip -d link show type vxlan`)"
    return find_owner(port, address, devices) or unknown


def find_owner(port: int, address: IPAddress | None = None, devices: Sequence[str] = ()) -> str:
    """Return the owner of a UDP port, ``process 123 (flanneld)`` or ``the device vxlan9``; empty if unknown.

    Without ``address`` the port is wanted at all addresses. ``devices`` are those that may have it: a socket
    of the kernel belongs to no process.
    """
    links = {f"socket:[{inode}]" for inode in _sockets(port, address)}
    for process in _PROC.glob("[0-9]*") if links else ():
        with suppress(OSError):
            if any(str(fd.readlink()) in links for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({_name_of(process)})"
    return f"the device {', '.join(devices)}" if devices else ""


def _sockets(port: int, address: IPAddress | None) -> Iterator[str]:
    """Yield the inodes of the sockets that bar others from a port at an address."""
    for name in ("udp", "udp6"):
        with suppress(OSError):  # a kernel without IPv6
            for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
                row = line.split()
                text, _, number = row[_UDP_LOCAL].partition(":")
                if int(number, 16) == port and _bars(_decoded(text), address):
                    yield row[_UDP_INODE]


def _bars(bound: IPAddress, address: IPAddress | None) -> bool:
    return address is None or bound.is_unspecified or address in (bound, getattr(bound, "ipv4_mapped", None))


def _decoded(text: str) -> IPAddress:
    """Return an address of /proc/net, which has words of 32 bits in this host's order."""
    raw = bytes.fromhex(text)
    words = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4))
    return ip_address(b"".join(socket.htonl(word).to_bytes(4, "big") for word in words))


def _name_of(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if "flanneld.backends.udp.proxy" in words:
        return f"the udp proxy of {words[words.index('flanneld.backends.udp.proxy') + 2]}"
    return (process / "comm").read_text(errors="replace").strip()


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
    text = printable(" ".join(words).strip())
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


#: linux/netlink.h
NETLINK_XFRM = 6
#: linux/xfrm.h, XFRM_MSG_GETPOLICY
GET_POLICY = 0x15
#: charon refuses to start while a process with the pid in this file lives, of any program. The path is fixed.
CHARON_PID_FILE = Path("/var/run/charon.pid")


def has_xfrm_policies() -> bool:
    """Return False if the kernel has no XFRM policy of anybody; True also if it cannot be asked."""
    if not _has_xfrm():
        return False
    try:
        with closing(NetlinkSocket(protocol=NETLINK_XFRM)) as kernel:
            return any(True for _ in kernel.dump(GET_POLICY, b""))
    except OSError:
        return True


def _has_xfrm() -> bool:
    """Return True if the kernel's own socket exists: opening another one would load the module."""
    with suppress(OSError):
        rows = Path("/proc/net/netlink").read_text().splitlines()[1:]
        return any(row.split()[1] == str(NETLINK_XFRM) for row in rows)
    return False
