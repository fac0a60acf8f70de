"""Stand-in for the netlink socket of rtnetlink, and objects as the kernel tells them."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Iterator
from ipaddress import ip_address, ip_network

from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import HEADER, attribute, u32
from flanneld.state.resources import PROTO_BOOT

INDEXES = {"eth0": 2, "eth1": 3, "flannel.1": 7, "flannel.9": 9, "cni0": 11}
UNICAST, BLACKHOLE, UNREACHABLE = 1, 6, 7


class FakeSocket:
    """Stands in for the netlink socket: objects by question and family, what was written, and refusals."""

    def __init__(self) -> None:
        self.objects: dict[tuple[int, int], list[bytes]] = {}
        self.written: list[str] = []
        self.protocols: list[int] = []
        #: For each call that writes: the errors by the positions of its messages.
        self.refusals: list[dict[int, int]] = []

    def __call__(self) -> FakeSocket:
        return self

    def close(self) -> None:
        pass

    def index_of(self, name: str) -> int:
        try:
            return INDEXES[name]
        except KeyError:
            raise OSError(errno.ENODEV, "No such device") from None

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        for each in self.objects.get((kind, body[0]), []):
            yield b"head" + each, 4, 4 + len(each)

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        refused = self.refusals.pop(0) if self.refusals else {}
        for item in batch:
            _, kind, flags, number, _ = HEADER.unpack_from(item)
            self.written.append(f"{verb(kind, flags)} {described(kind, item)}")
            if kind in (rtnl.RTM_NEWROUTE, rtnl.RTM_DELROUTE):
                self.protocols.append(rtnl.protocol_of(item, HEADER.size, len(item)))
            if number in refused:
                yield [(number, refused[number])]


class FakeEthtool:
    """Stands in for ioctl(2) with a device's offloads and queues (linux/ethtool.h)."""

    def __init__(self, *features: str) -> None:
        self.device = "eth0"
        self.checksums = 1
        self.features = features
        #: By feature: whether it can be changed, is requested, is active.
        self.states: dict[str, tuple[bool, bool, bool]] = {}
        self.queues = (8, 4)  # at most, and in use

    def __call__(self, _: object, request: int, given: bytes) -> int:
        assert request == 0x8946  # SIOCETHTOOL
        name, place = struct.unpack_from("16sP", given)
        if name.rstrip(b"\0").decode() != self.device:
            raise OSError(errno.ENODEV, "No such device")
        (command,) = struct.unpack("I", ctypes.string_at(place, 4))
        words = self._answer(command, place)
        ctypes.memmove(place + 4, words, len(words))
        return 0

    def _answer(self, command: int, place: int) -> bytes:
        match command:
            case 0x16:  # ETHTOOL_GTXCSUM
                return struct.pack("I", self.checksums)
            case 0x17:  # ETHTOOL_STXCSUM
                (self.checksums,) = struct.unpack("I", ctypes.string_at(place + 4, 4))
            case 0x37:  # ETHTOOL_GSSET_INFO: of the features
                assert struct.unpack("=IQ", ctypes.string_at(place + 4, 12)) == (0, 1 << 4)
                return struct.pack("=IQI", 0, 1 << 4, len(self.features))
            case 0x1B:  # ETHTOOL_GSTRINGS: those of the features
                names = b"".join(struct.pack("32s", each.encode()) for each in self.features)
                assert struct.unpack("II", ctypes.string_at(place + 4, 8)) == (4, len(self.features))
                return struct.pack("II", 4, len(self.features)) + names
            case 0x3A:  # ETHTOOL_GFEATURES
                return self._blocks(struct.unpack("I", ctypes.string_at(place + 4, 4))[0])
            case 0x3C:  # ETHTOOL_GCHANNELS: of four kinds, the last are combined ones
                return struct.pack("8I", 0, 0, 0, self.queues[0], 0, 0, 0, self.queues[1])
        return b""

    def _blocks(self, blocks: int) -> bytes:
        words = [[0, 0, 0, 0] for _ in range(blocks)]
        for number, feature in enumerate(self.features):
            for place, is_set in enumerate(self.states.get(feature, ())):
                words[number // 32][place] |= is_set << number % 32
        return struct.pack(f"I{4 * blocks}I", blocks, *(word for block in words for word in block))


def verb(kind: int, flags: int) -> str:
    names = {0x101 | 0x400: "replace", 0x201 | 0x400: "add", 0x401: "put in front", 0x1: "remove"}
    assert (kind % 2 == 1) == (flags == 0x1)
    return names[flags]


def described(kind: int, item: bytes) -> str:
    place = HEADER.size, len(item)
    if kind in (rtnl.RTM_NEWROUTE, rtnl.RTM_DELROUTE):
        data = item + u32(15, 254)
        of_ipv6 = item[HEADER.size] == 10 and kind == rtnl.RTM_NEWROUTE
        data += u32(6, 1024) if of_ipv6 else b""
        found = rtnl.decode_route(data, HEADER.size, len(data), lambda index: name_of(index) or "any")
        return str(found.route) if found else "route"
    if kind in (rtnl.RTM_NEWNEIGH, rtnl.RTM_DELNEIGH):
        return str(rtnl.decode_neighbor(item, *place, name_of))
    seen = rtnl.decode_address(item, *place)
    return f"address {seen.address if seen else None}"


def name_of(index: int) -> str | None:
    return next((name for name, each in INDEXES.items() if each == index), None)


def route(
    destination: str,
    device: str,
    gateway: str | None = None,
    protocol: int = PROTO_BOOT,
    *,
    onlink: bool = False,
    kind: int = UNICAST,
    metric: int = 0,
) -> bytes:
    """A route of the main table as the kernel tells it."""
    net = ip_network(destination)
    metric = metric or (1024 if net.version == 6 else 0)
    return b"".join(
        (
            rtnl.RTMSG.pack(
                rtnl.AF[net.version], net.prefixlen, 0, 0, 254, protocol, 0, kind, 4 if onlink else 0
            ),
            u32(15, 254),
            attribute(1, net.network_address.packed) if net.prefixlen else b"",
            u32(6, metric) if metric else b"",
            attribute(5, ip_address(gateway).packed) if gateway else b"",
            u32(4, INDEXES[device]) if device else b"",
        )
    )


def neighbor(device: str, address: str, mac: str, *, state: int = 0x80, family: int = 0) -> bytes:
    """An entry as the kernel tells it; of a bridge's family a forwarding entry."""
    ip = ip_address(address)
    head = struct.pack("=BxxxiHBB", family or rtnl.AF[ip.version], INDEXES[device], state, 2, 0)
    parts = [attribute(1, ip.packed), attribute(2, rtnl.mac_bytes(mac))]
    if family:
        return head + parts[1] + parts[0] + attribute(3, bytes(16))
    return head + parts[0] + parts[1] + attribute(3, bytes(16))


def address(device: str, text: str, length: int) -> bytes:
    ip = ip_address(text)
    head = struct.pack("=BBBBi", rtnl.AF[ip.version], length, 0, 0, INDEXES[device])
    return head + attribute(2 if ip.version == 4 else 1, ip.packed)
