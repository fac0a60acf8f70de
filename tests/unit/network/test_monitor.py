"""What notifications mean for us, told from the bytes in which they come."""

from __future__ import annotations

import struct
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.kernel import (
    HostRouteChanged,
    InterfaceChanged,
    Notification,
    Overrun,
    ResourceChanged,
    ResourceRemoved,
    decode_notification,
)
from flanneld.network.rtnetlink.netlink import HEADER, attribute, message, messages, u32
from flanneld.state.resources import Address, FdbEntry, Neighbor, Resource, Route

DEVICE, INDEX, ELSEWHERE = "flannel.1", 7, 9
MAC = "02:00:00:00:00:01"
RTA_PRIORITY, RTA_TABLE = 6, 15
NEIGHBOR_STATE, ROUTE_TYPE = 8, 7  # where they stand in the body

ROUTE = Route(ip_network("10.1.6.0/24"), DEVICE, ip_address("10.1.6.0"), onlink=True)
NEIGHBOR = Neighbor(DEVICE, ip_address("10.1.6.0"), MAC)
FDB = FdbEntry(DEVICE, MAC, ip_address("192.168.0.2"))
ADDRESS = Address(DEVICE, ip_address("10.1.5.0"))


def notification(resource: Resource, *, index: int = INDEX, gone: bool = False) -> bytearray:
    table = u32(RTA_TABLE, 254) if isinstance(resource, Route) else b""
    return bytearray(rtnl.encode(resource, lambda _: index, 3, 0, drop=gone) + table)


def heard(data: bytes | bytearray) -> Notification | None:
    kind = int.from_bytes(data[4:6], "little")
    return decode_notification(kind, bytes(data), HEADER.size, len(data), {INDEX: DEVICE}.get)


@pytest.mark.parametrize("resource", [ROUTE, NEIGHBOR, FDB], ids=["route", "neighbour", "forwarding"])
def test_what_comes_is_seen_and_what_goes_is_gone(resource: Resource) -> None:
    assert heard(notification(resource)) == ResourceChanged(resource)
    gateway = getattr(resource, "gateway", None)
    assert heard(notification(resource, gone=True)) == ResourceRemoved(resource.key, gateway=gateway)


def test_a_route_through_another_device_may_stand_where_ours_should_be() -> None:
    news = heard(notification(ROUTE, index=ELSEWHERE))
    assert isinstance(news, ResourceChanged)
    assert (news.resource.key == ROUTE.key, news.resource == ROUTE) == (True, False)


def test_a_route_that_leads_nowhere_may_have_taken_the_place_of_ours() -> None:
    data = notification(ROUTE)
    data[HEADER.size + ROUTE_TYPE] = 6
    assert heard(data) == ResourceRemoved(ROUTE.key)


@pytest.mark.parametrize("resource", [NEIGHBOR, FDB], ids=["neighbour", "forwarding"])
def test_an_entry_on_another_device_is_none_of_our_business(resource: Resource) -> None:
    assert heard(notification(resource, index=ELSEWHERE)) is None


@pytest.mark.parametrize("resource", [NEIGHBOR, FDB], ids=["neighbour", "forwarding"])
def test_an_entry_that_is_no_longer_permanent_is_as_good_as_gone(resource: Resource) -> None:
    data = notification(resource)
    data[HEADER.size + NEIGHBOR_STATE] = 0x02
    assert heard(data) == ResourceRemoved(resource.key)


def test_an_address_is_news_of_its_interface() -> None:
    assert heard(notification(ADDRESS)) == InterfaceChanged(INDEX, DEVICE, address=ADDRESS.address)
    gone = heard(notification(ADDRESS, index=ELSEWHERE, gone=True))
    assert gone == InterfaceChanged(ELSEWHERE, None, address=ADDRESS.address)


def test_address_of_an_interface_is_named_unless_it_is_link_local() -> None:
    news = heard(notification(ADDRESS, index=ELSEWHERE))
    assert isinstance(news, InterfaceChanged)
    assert news.address == ip_address("10.1.5.0")
    news = heard(notification(Address(DEVICE, ip_address("fe80::1"))))
    assert isinstance(news, InterfaceChanged)
    assert news.address is None


@pytest.mark.parametrize("gone", [False, True])
def test_route_with_another_metric_is_one_of_the_hosts(gone: bool) -> None:
    data = notification(ROUTE, index=ELSEWHERE, gone=gone) + u32(RTA_PRIORITY, 100)
    assert heard(data) == HostRouteChanged(ROUTE.destination, (ip_address("10.1.6.0"),))


def test_gateway_of_a_route_that_is_gone_is_told() -> None:
    news = heard(notification(ROUTE, index=ELSEWHERE, gone=True))
    assert isinstance(news, ResourceRemoved)
    assert news.gateway == ROUTE.gateway


@given(st.sampled_from([ROUTE, NEIGHBOR, FDB, ADDRESS]), st.integers(0, 11))
def test_what_is_not_understood_means_that_anything_may_have_happened(resource: Resource, cut: int) -> None:
    whole = bytes(notification(resource))
    ((kind, _, _, _, offset, _),) = messages(whole)
    assert decode_notification(kind, whole, offset, offset + min(cut, 7), {INDEX: DEVICE}.get) == Overrun()


def test_interface_that_moved_away_is_told_with_its_new_place() -> None:
    name = attribute(3, b"flannel.1\0")  # IFLA_IFNAME
    gone = message(rtnl.RTM_DELLINK, 0, struct.pack("=BxHiII", 0, 1, INDEX, 0, 0) + name)
    moved = gone + u32(45, 3) + u32(49, 12)  # IFLA_NEW_NETNSID, IFLA_NEW_IFINDEX
    assert heard(gone) == InterfaceChanged(INDEX, DEVICE)
    assert heard(moved) == InterfaceChanged(INDEX, DEVICE, moved=(3, 12))
