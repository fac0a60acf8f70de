"""Namespaces of this host, and its view through a stand-in for the netlink socket."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from flanneld.compat.glog import V
from flanneld.network import host
from flanneld.network.host import HostView, named_namespaces
from flanneld.network.routing import RTM_GETRULE, LookupResult, RoutedPacket, SeenHostRoute
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import DumpInterrupted, attribute, u32
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL
from tests.unit.network.stand_ins import BLACKHOLE, INDEXES, FakeSocket, address, route


def test_a_namespace_with_two_names_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of Docker that an operator has linked into /run/netns."""
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("/proc/thread-self/ns/net")
    (tmp_path / "d").symlink_to("nowhere")
    monkeypatch.setattr(host, "_PLACES", (str(tmp_path),))
    assert list(named_namespaces()) == [tmp_path / "a"]


class Socket(FakeSocket):
    """It also answers one question, or refuses; its dumps may be interrupted, or refused."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = b""
        self.refusal = 0
        self.interruptions = 0
        self.opened = self.closed = 0

    def __call__(self) -> Socket:
        self.opened += 1
        return self

    def close(self) -> None:
        self.closed += 1

    def _refuse(self) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        assert kind == rtnl.RTM_GETROUTE
        assert body
        self._refuse()
        return b"head" + self.answer, 4, 4 + len(self.answer)

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        self._refuse()
        yield from super().dump(kind, body)
        if self.interruptions:
            self.interruptions -= 1
            raise DumpInterrupted(errno.EINTR, "interrupted")


@pytest.fixture
def netlink(monkeypatch: pytest.MonkeyPatch) -> Socket:
    found = Socket()
    monkeypatch.setattr(host, "NetlinkSocket", found)
    return found


AWAY, ROUTER = ip_address("203.0.113.1"), ip_address("192.0.2.254")


def test_way_of_a_packet_is_looked_up_and_none_is_no_error(netlink: Socket) -> None:
    view = HostView()
    netlink.answer = route("203.0.113.1/32", "eth0", str(ROUTER)) + attribute(
        7, ip_address("192.0.2.1").packed
    )
    found = LookupResult(INDEXES["eth0"], ip_address("192.0.2.1"), ROUTER, 1)
    assert view.look_up_route(AWAY) == view.lookup(RoutedPacket(AWAY)) == found
    assert view.matching_route(AWAY) == SeenHostRoute(
        ip_network("203.0.113.1/32"), PROTO_BOOT, ((INDEXES["eth0"], ROUTER),)
    )
    netlink.refusal = errno.ENETUNREACH
    assert view.look_up_route(AWAY) is None
    assert view.matching_route(AWAY) is None
    with pytest.raises(OSError, match="unreachable"):
        view.lookup(RoutedPacket(AWAY))


def test_missing_way_is_told_to_those_who_want_to_know(
    netlink: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    netlink.refusal = errno.ENETUNREACH
    for level, count in ((logging.INFO, 0), (V(4), 2)):
        caplog.set_level(level)
        HostView().look_up_route(AWAY)
        HostView().matching_route(AWAY)
        assert len(caplog.records) == count
    assert "No route to 203.0.113.1: " in caplog.text


def test_routes_of_the_main_table_are_told_by_what_they_are_for(netlink: Socket) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [
        route("0.0.0.0/0", "eth1", "192.0.2.254", metric=100),
        route("0.0.0.0/0", "eth0", "192.0.2.254"),
        route("10.1.6.0/24", "flannel.1", "10.1.6.0", onlink=True),
        route("10.1.7.0/24", "eth0", "192.0.2.7", PROTO_FLANNEL),
        route("10.1.8.0/24", "", None, kind=BLACKHOLE),
        route("192.0.2.0/24", "eth0", None, 2, metric=100),
    ]
    view = HostView()
    assert view.default_routes(4) == [INDEXES["eth1"], INDEXES["eth0"]]
    assert list(view.destinations(4)) == [
        ("10.1.6.0/24", INDEXES["flannel.1"], 1),
        ("10.1.7.0/24", INDEXES["eth0"], 1),
        ("10.1.8.0/24", 0, BLACKHOLE),
        ("192.0.2.0/24", INDEXES["eth0"], 1),
    ]
    nets = [each.destination for each in view.ways(4)]
    assert nets == [None, None, ip_network("10.1.6.0/24"), ip_network("192.0.2.0/24")]
    nets = [each.destination for each in view.ways(4, [INDEXES["flannel.1"], INDEXES["eth1"]])]
    assert nets == [None, ip_network("192.0.2.0/24")]
    assert (list(view.ways(6)), view.default_routes(6)) == ([], [])


def test_addresses_are_those_of_the_family_and_the_interface(netlink: Socket) -> None:
    netlink.objects[rtnl.RTM_GETADDR, 2] = [
        address("eth0", "192.0.2.1", 24),
        address("flannel.1", "10.1.5.0", 32),
    ]
    netlink.objects[rtnl.RTM_GETADDR, 10] = [address("eth0", "192.0.2.1", 24), address("eth0", "fd00::1", 64)]
    view = HostView()
    assert [str(each.address) for each in view.addresses(4)] == ["192.0.2.1", "10.1.5.0"]
    assert [str(each.address) for each in view.addresses(4, INDEXES["flannel.1"])] == ["10.1.5.0"]
    assert [str(each.address) for each in view.addresses(6)] == ["fd00::1"]


@pytest.mark.parametrize(("interruptions", "is_read"), [(4, True), (5, False)])
def test_table_that_changes_meanwhile_is_read_again(
    interruptions: int, is_read: bool, netlink: Socket
) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [route("0.0.0.0/0", "eth0", "192.0.2.254")]
    netlink.interruptions = interruptions
    if is_read:
        assert HostView().default_routes(4) == [INDEXES["eth0"]]
    else:
        with pytest.raises(DumpInterrupted, match="does not hold still"):
            HostView().default_routes(4)


@pytest.mark.parametrize(
    ("kind", "code", "is_nothing"),
    [
        (rtnl.RTM_GETROUTE, errno.ENOENT, True),
        (RTM_GETRULE, errno.EAFNOSUPPORT, True),
        (rtnl.RTM_GETROUTE, errno.EAFNOSUPPORT, False),
        (RTM_GETRULE, errno.ENOENT, False),
        (rtnl.RTM_GETADDR, errno.ENOENT, False),
    ],
)
def test_table_that_is_not_there_is_empty_and_other_failures_are_told(
    kind: int, code: int, is_nothing: bool, netlink: Socket
) -> None:
    netlink.refusal = code
    if is_nothing:
        assert HostView().dump(kind, b"\2") == []
    else:
        with pytest.raises(OSError, match=r".") as failure:
            HostView().dump(kind, b"\2")
        assert failure.value.errno == code


def test_stream_has_a_socket_of_its_own_and_no_routes_are_no_error(netlink: Socket) -> None:
    view = HostView()
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [route("0.0.0.0/0", "eth0", "192.0.2.254")]
    assert len(list(view.stream(rtnl.RTM_GETROUTE, b"\2"))) == 1
    assert (netlink.opened, netlink.closed) == (2, 1)
    netlink.refusal = errno.ENOENT
    assert list(view.stream(rtnl.RTM_GETROUTE, b"\2")) == []
    with pytest.raises(FileNotFoundError):
        list(view.stream(rtnl.RTM_GETNEIGH, b"\2"))
    assert netlink.closed == 3


def local(kind: int, net: str, device: str, table: int = 255) -> bytes:
    network = ip_network(net)
    head = rtnl.RTMSG.pack(2, network.prefixlen, 0, 0, table, 2, 0, kind, 0)
    return head + u32(15, table) + attribute(1, network.network_address.packed) + u32(4, INDEXES[device])


LOCAL, BROADCAST, ANYCAST, MULTICAST = 2, 3, 4, 5


def test_what_is_delivered_here_is_in_the_local_table(netlink: Socket) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [
        local(LOCAL, "192.0.2.1/32", "eth0"),
        local(BROADCAST, "192.0.2.255/32", "eth0"),
        local(ANYCAST, "192.0.2.0/32", "eth1"),
        local(MULTICAST, "224.0.0.0/4", "eth0"),
        local(LOCAL, "192.0.2.2/32", "eth0", 254),
    ]
    assert list(HostView().local(4)) == [
        (LOCAL, ip_network("192.0.2.1/32"), INDEXES["eth0"]),
        (BROADCAST, ip_network("192.0.2.255/32"), INDEXES["eth0"]),
        (ANYCAST, ip_network("192.0.2.0/32"), INDEXES["eth1"]),
    ]
