"""The ipip backend's decisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import Host, OtherBackend
from flanneld.backends.ipip import IpipBackend
from flanneld.config import parse
from flanneld.errors import Fatal, Refused
from flanneld.model import IPAddress, Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Address, Ipip, Resource, Route

LOCAL, PUBLIC = IPv4Address("192.168.0.5"), IPv4Address("203.0.113.5")
OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
SUBNET, PEER = IPv4Network("10.1.6.0/24"), IPv4Address("192.168.0.6")


def nothing(_: Any) -> None:
    return None


def made(
    *,
    mtu: int = 1500,
    local: IPv4Address | None = LOCAL,
    link_to: Callable[[IPAddress], str | None] = nothing,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> IpipBackend:
    network = {"Network": "10.1.0.0/16", "IPv6Network": "fd00::/48", **(config or {})}
    uplink = Uplink("eth0", 2, mtu, local, PUBLIC, IPv6Address("fd77::5"), IPv6Address("fd77::5"))
    host = Host(uplink, None, nothing, link_to, bytes)
    return IpipBackend(parse(json.dumps({**network, "Backend": {"Type": "ipip", **options}})), host)


def peer(**attrs: Any) -> Lease:
    known: dict[str, Any] = {"public_ip": PEER, "backend_type": "ipip"}
    return Lease(LeaseAttrs(**{**known, **attrs}), SUBNET)


def test_a_device_that_sends_from_the_local_address_is_needed_with_the_base_address_of_our_subnet() -> None:
    desired: list[Resource] = [
        Ipip("flannel.ipip", LOCAL, 1480),
        Address("flannel.ipip", IPv4Address("10.1.5.0")),
    ]
    assert list(made().local(OWN)) == desired


def test_the_public_ip_is_all_that_is_announced() -> None:
    assert made().attributes() == LeaseAttrs(PUBLIC, None, "ipip")


def test_an_onlink_route_through_the_device_leads_to_a_peer() -> None:
    assert list(made().peer(OWN, peer())) == [Route(SUBNET, "flannel.ipip", PEER, onlink=True)]


def test_a_peer_on_our_link_is_routed_to_directly() -> None:
    links: dict[IPAddress, str] = {PEER: "eth1"}
    backend = made(DirectRouting=True, link_to=links.get)
    assert list(backend.peer(OWN, peer())) == [Route(SUBNET, "eth1", PEER, onlink=True)]


def test_a_peer_behind_a_gateway_goes_through_the_device_despite_direct_routing() -> None:
    assert list(made(DirectRouting=True).peer(OWN, peer())) == list(made().peer(OWN, peer()))


def test_without_direct_routing_nobody_asks_for_links() -> None:
    def refuse(target: IPAddress) -> str | None:
        raise AssertionError(target)

    assert list(made(link_to=refuse).peer(OWN, peer()))


def test_a_direct_and_a_tunnelled_route_take_each_others_place() -> None:
    links: dict[IPAddress, str] = {}
    backend = made(DirectRouting=True, link_to=links.get)
    (tunnelled,) = backend.peer(OWN, peer())
    links[PEER] = "eth0"
    (direct,) = backend.peer(OWN, peer())
    assert tunnelled != direct
    assert tunnelled.key == direct.key


@pytest.mark.parametrize("backend_type", ["vxlan", ""])
def test_the_lease_of_another_backend_leads_nowhere(backend_type: str) -> None:
    with pytest.raises(OtherBackend):
        list(made().peer(OWN, peer(backend_type=backend_type)))


def test_a_lease_without_public_ip_or_with_ours_is_refused() -> None:
    with pytest.raises(Refused, match="no public IPv4"):
        list(made().peer(OWN, peer(public_ip=None)))
    with pytest.raises(Refused, match="our own public IP"):
        list(made().peer(OWN, peer(public_ip=PUBLIC)))


@pytest.mark.parametrize("public_ip", ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255"])
def test_a_lease_whose_public_ip_is_no_hosts_is_refused(public_ip: str) -> None:
    with pytest.raises(Refused, match=f"{public_ip}, which is no host's"):
        list(made().peer(OWN, peer(public_ip=IPv4Address(public_ip))))


def test_a_lease_without_an_ipv4_subnet_leads_nowhere() -> None:
    lease = Lease(LeaseAttrs(PEER, None, "ipip"), None, IPv6Network("fd00:0:0:6::/64"))
    assert list(made().peer(OWN, lease)) == []


def test_ipv6_alone_is_refused_with_a_remedy() -> None:
    with pytest.raises(Fatal, match="IPv4 only; set EnableIPv4 to true"):
        made(config={"EnableIPv4": False, "EnableIPv6": True})


def test_dual_stack_network_has_the_objects_of_ipv4() -> None:
    dual, own = made(config={"EnableIPv6": True}), Lease(LeaseAttrs(), OWN.subnet, IPv6Network("fd00::/64"))
    other = Lease(peer().attrs, SUBNET, IPv6Network("fd00:0:0:6::/64"))
    assert dual.attributes() == made().attributes()
    assert list(dual.local(own)) == list(made().local(OWN))
    assert list(dual.peer(own, other)) == list(made().peer(OWN, peer()))


def test_the_outer_header_is_taken_off_the_mtu() -> None:
    assert made(mtu=9000).mtu == 8980


@pytest.mark.parametrize("mtu", [19, 20, 87])
def test_an_uplink_too_narrow_for_a_packet_in_a_packet_is_fatal(mtu: int) -> None:
    with pytest.raises(Fatal, match=f"MTU of {mtu} leaves {mtu - 20} bytes"):
        made(mtu=mtu)
    assert made(mtu=88).mtu == 68


def test_an_uplink_without_an_ipv4_address_is_fatal() -> None:
    with pytest.raises(Fatal, match="eth0 has no IPv4 address"):
        made(local=None)


def test_direct_routing_that_is_no_boolean_is_fatal() -> None:
    with pytest.raises(Fatal, match="DirectRouting"):
        made(DirectRouting=1)


def test_the_backend_is_found_by_name() -> None:
    assert registry.load("IPIP") is IpipBackend
