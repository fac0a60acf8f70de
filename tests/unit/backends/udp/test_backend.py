"""The udp backend's decisions: device, pump, what is announced, and what leads to a peer."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import Host
from flanneld.backends.udp.backend import Udp
from flanneld.backends.udp.control import PROXIES, PROXY_PEERS, ProxyPeer, UdpProxy
from flanneld.backends.udp.proxy import native
from flanneld.config import Config, parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Address, Resource, Route, Tun

NETWORK, SUBNET, BASE = IPv4Network("10.1.0.0/16"), IPv4Network("10.1.6.0/24"), IPv4Address("10.1.5.0")
OURS, PUBLIC = IPv4Address("192.168.0.5"), IPv4Address("192.168.0.6")
UPLINK = Uplink("eth0", 2, 1500, OURS, OURS)
OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"), IPv6Network("fd00:0:0:5::/64"))
PUMP = UdpProxy("flannel0", OURS, 8285, BASE, 1472)


def config(backend: dict[str, Any] | None = None, **network: Any) -> Config:
    return parse(
        json.dumps({"Network": str(NETWORK), "Backend": {"Type": "udp", **(backend or {})}, **network})
    )


def made(backend: dict[str, Any] | None = None, uplink: Uplink = UPLINK, tun: str = "flannel0") -> Udp:
    return Udp(config(backend), Host(uplink, None, lambda _: None, lambda _: None, bytes, lambda _: tun))


def peer(**attrs: Any) -> Lease:
    return Lease(LeaseAttrs(**{"public_ip": PUBLIC, **attrs}), SUBNET)


# ---- this node -----------------------------------------------------------------------------------


def test_one_device_leads_to_the_whole_network_and_a_pump_carries_on_from_there() -> None:
    desired: list[Resource] = [
        Tun("flannel0", 1472),
        Address("flannel0", BASE),
        Route(NETWORK, "flannel0"),
        PUMP,
    ]
    assert list(made().local(OWN)) == desired


def test_the_options_reach_the_pump() -> None:
    *_, pump = made({"Port": 9000, "DataPlane": "Python", "AcceptAnySource": True}).local(OWN)
    assert pump == replace(PUMP, port=9000, data_plane="python", accept_any=True)


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_are_ports(port: int) -> None:
    *_, pump = made({"Port": port}).local(OWN)
    assert pump == replace(PUMP, port=port)


def test_the_pump_is_bound_to_the_address_of_the_uplink_and_not_to_the_one_announced() -> None:
    backend = made(uplink=replace(UPLINK, public_ip=IPv4Address("203.0.113.5")))
    *_, pump = backend.local(OWN)
    assert isinstance(pump, UdpProxy)
    assert pump.local == OURS
    assert backend.attributes() == LeaseAttrs(IPv4Address("203.0.113.5"))


def test_all_is_named_after_the_device_that_the_host_has_for_us() -> None:
    backend = made(tun="flannel3")
    names = [
        getattr(item, "name", getattr(item, "device", getattr(item, "tun", "")))
        for item in backend.local(OWN)
    ]
    assert names == ["flannel3"] * 4
    assert list(backend.peer(OWN, peer())) == [ProxyPeer("flannel3", SUBNET, PUBLIC)]


def test_only_the_public_ip_is_announced_and_no_type_as_upstream_does() -> None:
    uplink = replace(UPLINK, ipv6_address=IPv6Address("fd77::5"), public_ipv6=IPv6Address("fd77::5"))
    assert made(uplink=uplink).attributes() == LeaseAttrs(OURS, None, "", None)


@pytest.mark.parametrize(("mtu", "inside"), [(1500, 1472), (9000, 8972), (576, 548), (500, 472), (96, 68)])
def test_the_outer_headers_are_taken_from_the_mtu(mtu: int, inside: int) -> None:
    assert made(uplink=replace(UPLINK, mtu=mtu)).mtu == inside


@pytest.mark.parametrize("mtu", [95, 68, 28, 0])
def test_an_uplink_through_which_nothing_fits_is_fatal(mtu: int) -> None:
    with pytest.raises(Fatal, match=f"uplink MTU of {mtu} leaves {mtu - 28} bytes.*; raise the MTU of eth0"):
        made(uplink=replace(UPLINK, mtu=mtu))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"Port": 0}, "Port is 0; set it to a number from 1 to 65535"),
        ({"Port": 65536}, "Port is 65536"),
        ({"Port": "8285"}, "Port must be"),
        ({"DataPlane": "warp"}, '"warp"; set it to one of: auto, native, python'),
        ({"DataPlane": ""}, "set it to one of"),
        ({"AcceptAnySource": "yes"}, "AcceptAnySource must be"),
    ],
)
def test_an_option_that_cannot_work_is_fatal_and_the_remedy_is_named(
    backend: dict[str, Any], said: str
) -> None:
    with pytest.raises(Fatal, match=said):
        made(backend)


def test_a_network_without_ipv4_is_fatal() -> None:
    only_ipv6 = config(EnableIPv4=False, EnableIPv6=True, IPv6Network="fd00::/48")
    uplink = Uplink("eth0", 2, 1500, None, None, IPv6Address("fd77::5"), IPv6Address("fd77::5"))
    with pytest.raises(Fatal, match="IPv4 only; set EnableIPv4"):
        Udp(only_ipv6, Host(uplink, None, lambda _: None, lambda _: None, bytes))


def test_udp_carries_the_ipv4_part_of_a_dual_stack_network() -> None:
    dual = config(EnableIPv6=True, IPv6Network="fd00::/48")
    backend = Udp(dual, Host(UPLINK, None, lambda _: None, lambda _: None, bytes))
    assert list(backend.local(OWN))[2] == Route(NETWORK, "flannel0")
    assert list(backend.peer(OWN, replace(peer(), ipv6_subnet=IPv6Network("fd00:0:0:6::/64")))) == [
        ProxyPeer("flannel0", SUBNET, PUBLIC)
    ]


def test_an_uplink_without_ipv4_is_fatal() -> None:
    with pytest.raises(Fatal, match="eth0 has no IPv4 address; give it one"):
        made(uplink=replace(UPLINK, address=None))


def test_the_native_data_plane_may_be_insisted_on_where_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, pump = made({"DataPlane": "native"}).local(OWN)
    assert pump == replace(PUMP, data_plane="native")
    native._library.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.raises(
        Fatal, match=r"there is no native data plane: .* was not built; .*; or set Backend\.DataPlane to auto"
    ):
        made({"DataPlane": "native"})
    made({"DataPlane": "auto"})


def test_one_udp_port_is_for_one_network_of_a_host() -> None:
    assert made({"Port": 9000}).claims() == ("UDP port 9000",)


def test_the_pump_is_there_before_its_peers() -> None:
    tables = made().tables()
    assert [each.name for each in tables] == [PROXIES, PROXY_PEERS]
    assert tables[1].needs == {PROXIES}


def test_nodes_without_a_subnet_have_a_device_at_most() -> None:
    assert list(made().local(Lease(LeaseAttrs()))) == [Tun("flannel0", 1472)]
    assert list(made().peer(OWN, Lease(LeaseAttrs(PUBLIC)))) == []


def test_the_backend_is_found_by_name() -> None:
    assert registry.load("udp") is Udp


# ---- peers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend_type", ["", "udp", "vxlan"])
def test_every_lease_leads_somewhere_whatever_its_type_as_upstream_has_it(backend_type: str) -> None:
    assert list(made().peer(OWN, peer(backend_type=backend_type))) == [ProxyPeer("flannel0", SUBNET, PUBLIC)]


def test_a_lease_without_a_public_ipv4_is_refused() -> None:
    with pytest.raises(Refused, match="no public IPv4"):
        list(made().peer(OWN, peer(public_ip=None, public_ipv6=IPv6Address("fd77::6"))))


@pytest.mark.parametrize("public_ip", ["0.0.0.0", "127.0.0.1", "224.0.0.1", "239.1.2.3", "255.255.255.255"])
def test_a_lease_whose_public_ip_is_no_hosts_is_refused(public_ip: str) -> None:
    with pytest.raises(Refused, match=f"{public_ip}, which is no host's"):
        list(made().peer(OWN, peer(public_ip=IPv4Address(public_ip))))


def test_a_public_ip_of_class_e_is_one_as_upstream_has_it() -> None:
    address = IPv4Address("240.0.0.1")
    assert list(made().peer(OWN, peer(public_ip=address))) == [ProxyPeer("flannel0", SUBNET, address)]


def test_a_lease_with_our_own_public_ip_is_refused() -> None:
    with pytest.raises(Refused, match="our own"):
        list(made().peer(OWN, peer(public_ip=OURS)))


# ---- the nouns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pump",
    [
        PUMP,
        replace(PUMP, accept_any=True, data_plane="native", version="9"),
        replace(PUMP, tun="flannel7", mtu=68),
    ],
)
def test_a_pumps_settings_survive_being_told(pump: UdpProxy) -> None:
    assert UdpProxy.of(pump.words()) == pump


@pytest.mark.parametrize("words", [[], ["1"], PUMP.words()[:-1], [*PUMP.words(), "more"], ["x"] * 8])
def test_settings_of_another_version_are_not_understood(words: list[str]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several kinds of wrong
        UdpProxy.of(words)


def test_proxies_with_other_settings_differ_under_one_key() -> None:
    other = replace(PUMP, port=1)
    assert (other.key == PUMP.key, other == PUMP) == (True, False)
    assert (
        ProxyPeer("flannel0", SUBNET, PUBLIC).key
        != ProxyPeer("flannel0", IPv4Network("10.1.6.0/25"), PUBLIC).key
    )
