"""Writes to the kernel, what it still has of earlier runs, and what is heard of others' changes."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from ipaddress import IPv4Network, ip_address, ip_network

import pytest
from msgspec.structs import replace

from flanneld.network import host
from flanneld.network.rtnetlink import kernel as rtnetlink
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import SPREAD, Domain
from flanneld.network.rtnetlink.kernel import InterfaceChanged, Kernel, Overrun, ResourceRemoved, Unmonitored
from flanneld.network.rtnetlink.netlink import HEADER, attribute
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Address, Blackhole, Resource, Route
from tests.unit.network.stand_ins import BLACKHOLE, FakeSocket, name_of, route
from tests.unit.network.test_links import description

DOMAIN = Domain("eth0", frozenset({"flannel.1"}), ((ip_network("10.1.0.0/16"), 24),))
STATIC = 4
OURS, THEIRS = 77, 78


class Socket(FakeSocket):
    """It also answers one question, and hears of changes."""

    port = OURS

    def __init__(self) -> None:
        super().__init__()
        self.answer = b""
        self.asked: list[bytes] = []
        self.events: list[str] = []
        self.news: list[bytes | OSError] = []

    def __call__(self, groups: Sequence[int] = (), room: int = 0) -> Socket:
        self.groups, self.room = groups, room
        return self

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        assert kind == rtnl.RTM_GETLINK
        self.asked.append(body)
        return self.answer, HEADER.size, len(self.answer)

    def fileno(self) -> int:
        return 99

    def close(self) -> None:
        self.events.append("close")

    def ignore(self, port: int) -> None:
        self.events.append(f"ignore {port}")

    def listen(self) -> None:
        self.events.append("listen")

    def stop_listening(self) -> None:
        self.events.append("stop listening")

    def receive(self) -> bytes:
        if not self.news:
            raise BlockingIOError
        if isinstance(first := self.news.pop(0), OSError):
            raise first
        return first


@pytest.fixture
def netlink(monkeypatch: pytest.MonkeyPatch) -> Socket:
    found = Socket()
    for user in (host, rtnetlink):
        monkeypatch.setattr(user, "NetlinkSocket", found)
    monkeypatch.setattr("socket.if_indextoname", lambda index: name_of(index) or "")
    return found


# ---- earlier runs --------------------------------------------------------------------------------

MARKED = Route(ip_network("192.168.7.0/24"), "eth1", ip_address("192.0.2.7"))
UNMARKED = Route(ip_network("10.1.7.0/24"), "eth0", ip_address("192.0.2.7"))
SPREADING = Route(ip_network("10.1.8.0/24"), "flannel.9", ip_address("10.1.8.0"))


@pytest.mark.parametrize("unmarked", [True, False])
def test_routes_of_any_flanneld_are_left_behind(unmarked: bool, netlink: Socket) -> None:
    netlink.objects = {
        (rtnl.RTM_GETROUTE, 2): [
            route("10.1.7.0/24", "eth0", "192.0.2.7", PROTO_BOOT),
            route("10.1.8.0/24", "flannel.9", "10.1.8.0", SPREAD[7]),
            route("192.168.7.0/24", "eth1", "192.0.2.7", PROTO_FLANNEL),
            route("10.1.9.0/24", "flannel.9", "10.1.9.0", STATIC),
            route("192.168.8.0/24", "eth1", "192.0.2.7", PROTO_BOOT),
            route("10.1.0.0/16", "", None, PROTO_FLANNEL, kind=BLACKHOLE, metric=65535),
        ],
        (rtnl.RTM_GETROUTE, 10): [route("fc00::/64", "eth1", "fd00::1", PROTO_FLANNEL)],
    }
    found = Kernel().left_behind(replace(DOMAIN, unmarked=unmarked))
    ours: list[Resource] = [UNMARKED, SPREADING] if unmarked else [SPREADING]
    of_ipv6 = Route(ip_network("fc00::/64"), "eth1", ip_address("fd00::1"))
    assert found == [Blackhole(ip_network("10.1.0.0/16")), MARKED, *ours, of_ipv6]


def test_interface_of_another_namespace_is_taken_back_if_it_is_ours(
    netlink: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    netlink.answer = description("moved")
    writes: list[tuple[int, bytes]] = []

    def write(batch: list[bytes]) -> list[list[tuple[int, int]]]:
        writes.extend((HEADER.unpack_from(each)[1], each[HEADER.size :]) for each in batch)
        return [netlink_refusals]

    netlink_refusals: list[tuple[int, int]] = []
    monkeypatch.setattr(netlink, "write", write)
    kernel = Kernel()
    assert kernel.take_back(3, 12, lambda link: link.name != "moved") is False
    assert writes == []
    assert kernel.take_back(3, 12, lambda link: link.name == "moved") is True
    assert writes == [(rtnl.RTM_DELLINK, netlink.asked[0])]
    netlink_refusals.append((0, errno.EPERM))
    with pytest.raises(PermissionError):
        kernel.take_back(3, 12, lambda _: True)


# ---- writes --------------------------------------------------------------------------------------

BULK = 500


def addresses(count: int, device: str = "flannel.1") -> list[Resource]:
    return [Address(device, ip_address((10 << 24) + number)) for number in range(count)]


def test_refused_writes_are_told_by_their_positions(netlink: Socket) -> None:
    one, other = addresses(2)
    netlink.refusals = [{2: errno.EPERM}]
    refused = Kernel().write([one, Address("gone", ip_address("10.1.5.0")), other])
    assert refused == {1: errno.ENODEV, 2: errno.EPERM}
    assert netlink.written == ["replace address 10.0.0.0", "replace address 10.0.0.1"]


@pytest.mark.parametrize(
    ("count", "device", "is_paused", "missed"),
    [
        (BULK, "flannel.1", False, False),
        (BULK + 1, "flannel.1", True, True),
        (BULK + 1, "gone", True, False),
    ],
)
def test_bulk_of_writes_is_read_back_in_place_of_its_notifications(
    count: int, device: str, is_paused: bool, missed: bool, netlink: Socket
) -> None:
    kernel = Kernel()
    kernel.write(addresses(BULK + 1))
    monitor = kernel.listen()
    assert netlink.events == [f"ignore {OURS}"]
    kernel.write(addresses(count, device))
    assert netlink.events[1:] == (["stop listening", "listen"] if is_paused else [])
    assert monitor.missed is missed
    assert monitor.read(name_of) == ([Unmonitored()] if missed else [])
    assert monitor.read(name_of) == []


def test_writes_that_fail_leave_the_monitor_listening(
    netlink: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    kernel.listen()

    def refuse(_: str) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(netlink, "index_of", refuse)
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.write(addresses(BULK + 1))
    assert netlink.events[-1] == "listen"


def test_first_route_to_a_network_is_removed_and_a_missing_one_is_gone(netlink: Socket) -> None:
    netlink.refusals = [{0: errno.ESRCH}]
    Kernel().clear_routes([IPv4Network("10.1.7.0/24"), IPv4Network("10.1.8.0/24")])
    assert netlink.written == ["remove route 10.1.7.0/24 dev any", "remove route 10.1.8.0/24 dev any"]


# ---- notifications -------------------------------------------------------------------------------


def gone(net: str, port: int) -> bytes:
    body = route(net, "flannel.1", "10.1.6.0")
    return HEADER.pack(HEADER.size + len(body), rtnl.RTM_DELROUTE, 0, 0, port) + body


def removed(net: str, port: int) -> ResourceRemoved:
    key = Route(ip_network(net), "flannel.1").key
    return ResourceRemoved(key, port, ip_address("10.1.6.0"))


def test_changes_by_others_are_heard_with_their_author(netlink: Socket) -> None:
    monitor = Kernel().listen()
    both = gone("10.1.6.0/24", OURS) + gone("10.1.7.0/24", THEIRS)
    unknown = HEADER.pack(HEADER.size, 99, 0, 0, THEIRS)
    netlink.news = [both, OSError(errno.ENOBUFS, "lost"), unknown, gone("10.1.8.0/24", 0)]
    heard = monitor.read(name_of)
    assert heard == [removed("10.1.7.0/24", THEIRS), Overrun(), removed("10.1.8.0/24", 0)]
    netlink.news = [HEADER.pack(HEADER.size + 1, rtnl.RTM_DELROUTE, 0, 0, THEIRS) + b"x"]
    assert monitor.read(name_of) == [Overrun()]
    for code in (errno.EBADF, errno.ESHUTDOWN):
        netlink.news = [OSError(code, "closed")]
        with pytest.raises(OSError, match="closed"):
            monitor.read(name_of)


def test_changes_of_thousands_of_routes_have_room(netlink: Socket) -> None:
    monitor = Kernel().listen()
    assert monitor.fileno() == 99
    assert set(netlink.groups) == {1, 3, 5, 7, 9, 11}  # RTNLGRP_*
    assert netlink.room >= 1 << 20
    monitor.close()
    assert netlink.events[-1] == "close"


def test_storm_of_notifications_is_heard_in_parts(netlink: Socket) -> None:
    monitor = Kernel().listen()
    netlink.news = [gone("10.1.6.0/24", THEIRS)] * 1500
    parts = [len(monitor.read(name_of)) for _ in range(3)]
    assert (sum(parts), parts[-1]) == (1500, 0)
    assert parts[0] > parts[1] > 0


@pytest.mark.parametrize(
    ("gateway", "address"), [("192.0.2.1", ip_address("192.0.2.1")), (None, None)], ids=["a gateway", "none"]
)
def test_default_route_is_news_of_its_interface(
    gateway: str | None, address: object, netlink: Socket
) -> None:
    monitor = Kernel().listen()
    body = route("0.0.0.0/0", "eth0", gateway)
    netlink.news = [HEADER.pack(HEADER.size + len(body), rtnl.RTM_NEWROUTE, 0, 0, THEIRS) + body]
    (heard,) = monitor.read(name_of)
    assert isinstance(heard, InterfaceChanged)
    assert (heard.index, heard.name, heard.address, heard.port) == (2, "eth0", address, THEIRS)


def test_default_route_by_several_gateways_is_news_of_the_first(netlink: Socket) -> None:
    monitor = Kernel().listen()
    gateways = [ip_address(f"192.0.2.{number}") for number in (1, 2)]
    hops = b"".join(
        struct.pack("=HBBi", 16, 0, 0, number) + attribute(5, each.packed)
        for number, each in enumerate(gateways, 2)
    )
    body = route("0.0.0.0/0", "", None) + attribute(9, hops)
    netlink.news = [HEADER.pack(HEADER.size + len(body), rtnl.RTM_NEWROUTE, 0, 0, THEIRS) + body]
    assert monitor.read(name_of) == [InterfaceChanged(0, None, THEIRS, gateways[0])]


def test_blackhole_that_comes_or_goes_is_heard(netlink: Socket) -> None:
    monitor = Kernel().listen()
    body = route("10.1.0.0/16", "", None, PROTO_FLANNEL, kind=BLACKHOLE, metric=65535)
    netlink.news = [
        HEADER.pack(HEADER.size + len(body), kind, 0, 0, THEIRS) + body
        for kind in (rtnl.RTM_NEWROUTE, rtnl.RTM_DELROUTE)
    ]
    guard = Blackhole(ip_network("10.1.0.0/16"))
    assert monitor.read(name_of) == [
        rtnetlink.ResourceChanged(guard, THEIRS),
        ResourceRemoved(guard.key, THEIRS),
    ]
