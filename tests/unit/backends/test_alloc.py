"""The alloc backend's decisions."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Any

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import Host
from flanneld.backends.host_gw import Alloc, HostGw
from flanneld.config import parse
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.subnet.codec import format_attrs

OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
PEER = Lease(LeaseAttrs(IPv4Address("192.168.0.6"), backend_type="vxlan"), IPv4Network("10.1.6.0/24"))
CONFIG = parse('{"Network": "10.1.0.0/16", "Backend": {"Type": "alloc"}}')


def nothing(_: Any) -> None:
    return None


def made(**addresses: Any) -> Alloc:
    known = {"address": IPv4Address("192.168.0.5"), "public_ip": IPv4Address("203.0.113.5"), **addresses}
    backend = registry.load("alloc")(
        CONFIG, Host(Uplink("eth0", 2, 1400, **known), None, nothing, nothing, bytes)
    )
    assert isinstance(backend, Alloc)
    return backend


def test_a_lease_has_the_public_ip_and_no_more() -> None:
    assert format_attrs(made().attributes(), with_ipv6=False) == '{"PublicIP":"203.0.113.5"}'


def test_a_network_with_ipv6_has_both_public_ips() -> None:
    attrs = made(public_ipv6=IPv6Address("fd77::5")).attributes()
    assert format_attrs(attrs, with_ipv6=True) == '{"PublicIP":"203.0.113.5","PublicIPv6":"fd77::5"}'


def test_containers_have_the_mtu_of_the_uplink() -> None:
    assert made().mtu == 1400


def test_nothing_leads_to_a_peer() -> None:
    assert list(made().local(OWN)) == []
    assert list(made().peer(OWN, PEER)) == []


@pytest.mark.parametrize("name", ["alloc", "Alloc", "ALLOC"])
def test_the_type_is_known_in_any_case(name: str) -> None:
    assert registry.load(name) is Alloc


def test_only_alloc_has_no_peers() -> None:
    address = IPv4Address("192.168.0.5")
    host = Host(Uplink("eth0", 2, 1500, address, address), None, nothing, nothing, bytes)
    assert not made().has_peers
    assert HostGw(CONFIG, host).has_peers
