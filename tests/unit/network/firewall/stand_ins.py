"""Stand-ins for nf_tables in the kernel, for libnftables and for the programs of iptables."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from flanneld.network.rtnetlink.netlink import DumpInterrupted, attribute

# linux/netfilter/nfnetlink.h and nf_tables.h
NF_TABLES, GETTABLE, GETCHAIN, GETRULE = 10 << 8, 1, 4, 7
INET, IPV4, NETDEV, IPV6 = 1, 2, 5, 10
#: NF_INET_*
HOOKS = ["prerouting", "input", "forward", "output", "postrouting", "ingress"]


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">i", value))


def base_chain(table: str, name: str, hook: int, priority: int = 0, policy: int = 1, device: str = "",
               kind: str = "filter") -> bytes:  # fmt: skip
    inside = number(1, hook) + number(2, priority) + (text(3, device) if device else b"")
    return text(1, table) + text(3, name) + attribute(4, inside) + number(5, policy) + text(7, kind)


class FakeKernel:
    """Stands in for the netlink socket: objects by question and family, and what is refused."""

    def __init__(self) -> None:
        self.objects: dict[tuple[int, int], list[bytes]] = {}
        self.refusal = 0
        self.interruptions = 0
        self.asked: list[tuple[int, bytes]] = []
        self.closed = 0

    def __call__(self, *_: Any, protocol: int) -> FakeKernel:
        assert protocol == 12  # NETLINK_NETFILTER
        return self

    def close(self) -> None:
        self.closed += 1

    def _refuse(self) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        self._refuse()
        self.asked.append((kind, body))
        return b"", 0, 0

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        self._refuse()
        family, version, resource = struct.unpack(">BBH", body)
        assert (version, resource) == (0, 0)
        for each in self.objects.get((kind - NF_TABLES, family), ()):
            yield b"noise" + bytes(4) + each, len(b"noise"), len(b"noise") + 4 + len(each)
        if self.interruptions:
            self.interruptions -= 1
            raise DumpInterrupted(errno.EINTR, "interrupted")


#: Makes the output of a command. Any other one fails; the file ``asked`` has them all.
Answer = Callable[[str, str], None]


class FakeLibrary:
    """Stands in for libnftables: what it was told, what it lists, and what it refuses."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.lists: list[dict[str, Any]] = []
        self.refusal = ""

    def cmd(self, commands: Any) -> tuple[int, Any, str]:
        self.told.append(commands)
        return (1, "", self.refusal) if self.refusal else (0, {"nftables": self.lists}, "")

    def json_cmd(self, commands: dict[str, Any]) -> tuple[int, Any, str]:
        return self.cmd(commands["nftables"])
