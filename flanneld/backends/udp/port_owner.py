"""Lookup of the process that owns a UDP port, in /proc."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path


def holder_of(address: IPv4Address, port: int) -> str:
    """Return ``process 123 (flanneld)``, or a command that finds the owner of a UDP port."""
    settings = {f"{socket.ntohl(int(each)):08X}:{port:04X}" for each in (address, IPv4Address(0))}
    rows = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
    links = {f"socket:[{row[9]}]" for row in rows if row[1] in settings}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(fd.readlink()) in links for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({_name_of(process)})"
    return f"another process (`ss -anup sport = {port}` names it)"


def _name_of(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if "flanneld.backends.udp.proxy" in words:
        return f"the udp proxy of {words[words.index('flanneld.backends.udp.proxy') + 2]}"
    return (process / "comm").read_text().strip()
