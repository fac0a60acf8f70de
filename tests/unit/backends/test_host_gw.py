"""The host-gw backend's decisions."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import Host, OtherBackend
from flanneld.backends.host_gw import HostGw
from flanneld.config import parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Route

V4, V6, DUAL = (True, False), (False, True), (True, True)
Families = tuple[bool, bool]

SUBNET, SUBNET_V6 = IPv4Network("10.1.6.0/24"), IPv6Network("fd00:0:0:6::/64")
PUBLIC, PUBLIC_V6 = IPv4Address("192.168.0.6"), IPv6Address("fd77::6")
OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"), IPv6Network("fd00:0:0:5::/64"))
ROUTE, ROUTE_V6 = Route(SUBNET, "eth0", PUBLIC), Route(SUBNET_V6, "eth0", PUBLIC_V6)


def nothing(_: Any) -> None:
    return None


def made(
    families: Families = V4,
    public_ip: str = "192.168.0.5",
    public_ipv6: str = "fd77::5",
    kind: type[HostGw] = HostGw,
) -> HostGw:
    network = {"EnableIPv4": families[0], "EnableIPv6": families[1], "Network": "10.1.0.0/16"}
    config = parse(json.dumps({**network, "IPv6Network": "fd00::/48", "Backend": {"Type": "host-gw"}}))
    addresses = (
        *((IPv4Address("192.168.0.5"), IPv4Address(public_ip)) if families[0] else (None, None)),
        *((IPv6Address("fd77::5"), IPv6Address(public_ipv6)) if families[1] else (None, None)),
    )
    uplink = Uplink("eth0", 2, 1500, *addresses)
    return kind(config, Host(uplink, None, nothing, nothing, bytes))


def peer(families: Families = DUAL, **attrs: Any) -> Lease:
    known: dict[str, Any] = {"public_ip": PUBLIC, "public_ipv6": PUBLIC_V6, "backend_type": "host-gw"}
    subnets = (SUBNET if families[0] else None, SUBNET_V6 if families[1] else None)
    return Lease(LeaseAttrs(**{**known, **attrs}), *subnets)


@pytest.mark.parametrize(
    ("ours", "theirs", "desired"),
    [
        (V4, V4, [ROUTE]),
        (V6, V6, [ROUTE_V6]),
        (DUAL, DUAL, [ROUTE, ROUTE_V6]),
        (DUAL, V6, [ROUTE_V6]),
        (V4, DUAL, [ROUTE]),
        (V4, V6, []),
    ],
    ids=["IPv4", "IPv6", "dual", "we dual", "they dual", "nothing in common"],
)
def test_a_route_through_its_public_ip_leads_to_a_peer(
    ours: Families, theirs: Families, desired: list[Route]
) -> None:
    assert list(made(ours).peer(OWN, peer(theirs))) == desired


@pytest.mark.parametrize("backend_type", ["vxlan", ""])
def test_the_lease_of_another_backend_leads_nowhere(backend_type: str) -> None:
    with pytest.raises(OtherBackend):
        list(made().peer(OWN, peer(backend_type=backend_type)))


def test_a_lease_without_public_ip_is_refused() -> None:
    with pytest.raises(Refused, match="IPv4"):
        list(made().peer(OWN, peer(public_ip=None)))
    with pytest.raises(Refused, match="IPv6"):
        list(made(V6).peer(OWN, peer(public_ipv6=None)))


def test_a_lease_with_our_own_public_ip_is_refused() -> None:
    with pytest.raises(Refused, match="our own public IP"):
        list(made().peer(OWN, peer(public_ip=IPv4Address("192.168.0.5"))))


def test_backend_data_do_not_matter() -> None:
    assert list(made().peer(OWN, peer(V4, backend_data=["whatever"]))) == [ROUTE]


def test_nothing_is_needed_without_peers() -> None:
    assert list(made(DUAL).local(peer())) == []


def test_the_mtu_is_that_of_the_uplink() -> None:
    assert made().mtu == 1500


@pytest.mark.parametrize(
    ("families", "attrs"),
    [
        (V4, LeaseAttrs(IPv4Address("192.168.0.5"), None, "host-gw")),
        (V6, LeaseAttrs(None, IPv6Address("fd77::5"), "host-gw")),
        (DUAL, LeaseAttrs(IPv4Address("192.168.0.5"), IPv6Address("fd77::5"), "host-gw")),
    ],
    ids=["IPv4", "IPv6", "dual"],
)
def test_only_the_public_addresses_are_announced(families: Families, attrs: LeaseAttrs) -> None:
    assert made(families).attributes() == attrs


def test_behind_address_translation_it_cannot_work() -> None:
    with pytest.raises(Fatal, match=r"203\.0\.113\.5"):
        made(V4, public_ip="203.0.113.5")
    with pytest.raises(
        Fatal, match=r"cannot announce 10\.0\.0\.5: eth0 has 192\.168\.0\.5; drop --public-ip"
    ):
        made(V4, public_ip="10.0.0.5")
    with pytest.raises(Fatal, match="fd99::5"):
        made(DUAL, public_ipv6="fd99::5")


@pytest.mark.parametrize("name", ["host-gw", "Host-GW"])
def test_the_backend_is_found_by_name(name: str) -> None:
    assert registry.load(name) is HostGw


def test_an_unknown_backend_is_fatal_and_the_known_ones_are_named() -> None:
    with pytest.raises(Fatal, match=r'"carrier-pigeon".*host-gw.*vxlan'):
        registry.load("carrier-pigeon")
