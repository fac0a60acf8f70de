"""Owner of a UDP port: a process, found in /proc, or a device with a socket of the kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from flanneld.model import IPAddress

_PROC = Path("/proc")
#: Columns of /proc/net/udp and udp6: local address with port, and inode of each socket.
_LOCAL, _INODE = 1, 9


def owner_of(port: int, address: IPAddress | None = None, devices: Sequence[str] = ()) -> str:
    """Return the owner of a UDP port that is in use, as ``find``, or a command that names it."""
    unknown = f"another process or device (see `ss -anup sport = {port}` and `ip -d link show type vxlan`)"
    return find(port, address, devices) or unknown


def find(port: int, address: IPAddress | None = None, devices: Sequence[str] = ()) -> str:
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
                text, _, number = row[_LOCAL].partition(":")
                if int(number, 16) == port and _bars(_decoded(text), address):
                    yield row[_INODE]


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
