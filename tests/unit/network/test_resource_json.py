"""Resources as JSON values: what is read back is what was written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, ClassVar

import pytest

from flanneld.network.resource_json import decode, encode, parse_address, parse_network
from flanneld.state.resources import (
    Address,
    Blackhole,
    FdbEntry,
    Ipip,
    Key,
    Kind,
    Neighbor,
    Resource,
    Route,
    Tun,
    Vxlan,
)

MAC = "02:00:00:00:00:01"
V4, V6 = IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")


@pytest.mark.parametrize(
    "resource",
    [
        Vxlan("flannel.1", 1, 2, V4, 8472, MAC, 1450),
        Vxlan(
            "flannel-v6.1", 1, 2, V6, 8472, MAC, 1430, learning=True, gbp=True, up=False, cpu_checksums=True
        ),
        Ipip("flannel.ipip", V4, 1480),
        Ipip("flannel.ipip", None, 1480, remote=V4, up=False),
        Tun("flannel0", 1472),
        Address("flannel.1", V6),
        Neighbor("flannel.1", V4, MAC),
        FdbEntry("flannel.1", MAC, V4, has_overrides=True),
        Route(IPv4Network("10.5.1.0/24"), "flannel.1", V4, onlink=True),
        Route(IPv6Network("fc00:1::/64"), "flannel.1"),
        Blackhole(IPv4Network("10.5.1.0/24")),
        Blackhole(IPv4Network("10.5.0.0/16"), unreachable=True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_resource_is_read_back_as_it_was(resource: Resource) -> None:
    assert decode(json.loads(json.dumps(encode(resource)))) == resource


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "192.0.2.1", "::", "2001:db8::1", "::ffff:192.0.2.1", "fe80::1%eth0"]
)
def test_an_address_is_parsed_as_by_the_standard_library(text: str) -> None:
    assert parse_address(text) == ip_address(text)


@pytest.mark.parametrize("text", ["10.5.1.0/24", "0.0.0.0/0", "192.0.2.1", "fc00:1::/64", "::/0", "::1"])
def test_a_network_is_parsed_as_by_the_standard_library(text: str) -> None:
    assert parse_network(text) == ip_network(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "10.5.1.0/x",
        "10.5.1.0/33",
        "10.5.1.1/24",
        "::1/129",
        "1.2.3.4\0",
        "1.2.3",
        "01.2.3.4",
        "1.2.3.+4",
    ],
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its text is the standard library's
        parse_network(text)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A resource of a backend's own driver."""

    kind: ClassVar[Kind] = Kind.REMOTE
    key: Key = (Kind.REMOTE, "announcement")


def test_a_resource_of_a_driver_has_no_value() -> None:
    assert encode(Announcement()) is None


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "Nonsense"},
        {"type": "Tun", "name": "flannel0"},
        {"type": "Address", "device": "flannel.1", "address": "nonsense"},
        {"type": "Address", "device": "flannel.1", "address": []},
        {"type": "Address", "device": "flannel.1", "address": 5},
    ],
)
def test_any_other_value_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        decode(value)
