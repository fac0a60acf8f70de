"""Resources as commands of iproute2."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from msgspec.structs import replace

from flanneld.findings import Command
from flanneld.network import iproute2_commands
from flanneld.state.resources import (
    Address,
    Blackhole,
    FdbEntry,
    ForeignLink,
    Ipip,
    Neighbor,
    Resource,
    Route,
    Tun,
    Vxlan,
)

MAC = "02:00:00:00:00:01"
DEVICE = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, MAC, 1450)
ADD = (
    f"ip link add flannel.1 address {MAC} mtu 1450 txqueuelen 0 type vxlan id 1 dev eth0 local 192.0.2.1"
    " dstport 8472 nolearning"
)
UP = "ip link set flannel.1 up"


def lines(made: Iterator[Command]) -> Iterator[str]:
    return map(shlex.join, made)


@pytest.mark.parametrize(
    ("resource", "put", "drop"),
    [
        (
            Route(IPv4Network("10.5.1.0/24"), "flannel.1", IPv4Address("10.5.1.0"), onlink=True),
            "ip route replace 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink",
            "ip route del 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink",
        ),
        (
            Route(IPv4Network("10.5.0.0/16"), "flannel.1"),
            "ip route replace 10.5.0.0/16 dev flannel.1 scope global",
            "ip route del 10.5.0.0/16 dev flannel.1",
        ),
        (
            Route(IPv6Network("fc00::/64"), "eth0", IPv6Address("fd00::2")),
            "ip -6 route replace fc00::/64 via fd00::2 dev eth0 proto 70",
            "ip -6 route del fc00::/64 via fd00::2 dev eth0 metric 1024",
        ),
        (
            Blackhole(IPv4Network("10.5.1.0/24")),
            "ip route replace blackhole 10.5.1.0/24 proto 70 metric 65535",
            "ip route del blackhole 10.5.1.0/24 proto 70 metric 65535",
        ),
        (
            Blackhole(IPv6Network("fc00::/48"), unreachable=True),
            "ip -6 route replace unreachable fc00::/48 proto 70 metric 65535",
            "ip -6 route del unreachable fc00::/48 proto 70 metric 65535",
        ),
        (
            Address("flannel.1", IPv4Address("10.5.1.0")),
            "ip address replace 10.5.1.0/32 dev flannel.1",
            "ip address del 10.5.1.0/32 dev flannel.1",
        ),
        (
            Neighbor("flannel.1", IPv4Address("10.5.1.0"), MAC),
            f"ip neigh replace 10.5.1.0 lladdr {MAC} dev flannel.1 nud permanent",
            "ip neigh del 10.5.1.0 dev flannel.1",
        ),
        (
            FdbEntry("flannel.1", MAC, IPv4Address("192.0.2.2")),
            f"bridge fdb replace {MAC} dev flannel.1 dst 192.0.2.2 self permanent",
            f"bridge fdb del {MAC} dev flannel.1 dst 192.0.2.2 self",
        ),
    ],
    ids=lambda value: str(value).split()[0] if not isinstance(value, str) else "",
)
def test_each_resource_has_a_command_that_makes_it_and_one_that_removes_it(
    resource: Resource, put: str, drop: str
) -> None:
    assert shlex.join(iproute2_commands.put(resource, {"flannel.1"}) or ()) == put
    assert shlex.join(iproute2_commands.drop(resource) or ()) == drop


def test_the_command_of_one_of_many_routes_names_its_protocol() -> None:
    route = Route(IPv4Network("10.5.1.0/24"), "flannel.1", IPv4Address("10.5.1.0"), onlink=True)
    command = iproute2_commands.put(route, {"flannel.1"}, spread=True) or ()
    assert shlex.join(command) == "ip route replace 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink proto 219"


def test_a_route_is_removed_and_made_again_to_become_the_first() -> None:
    route = Route(IPv4Network("10.5.1.0/24"), "eth0", IPv4Address("192.0.2.2"))
    assert list(lines(iproute2_commands.bring_to_front(route, {"flannel.1"}))) == [
        "ip route del 10.5.1.0/24 via 192.0.2.2 dev eth0",
        "ip route prepend 10.5.1.0/24 via 192.0.2.2 dev eth0 proto 70",
    ]


def test_a_device_is_made_and_brought_up() -> None:
    assert list(lines(iproute2_commands.link(DEVICE, None, "eth0"))) == [ADD, UP]


def test_only_what_differs_is_set() -> None:
    actual = replace(DEVICE, mtu=1400, up=False)
    assert list(lines(iproute2_commands.link(DEVICE, actual, "eth0"))) == [
        "ip link set flannel.1 mtu 1450",
        UP,
    ]


@pytest.mark.parametrize("actual", [replace(DEVICE, vni=2), ForeignLink("flannel.1", "a plain interface")])
def test_a_device_that_cannot_be_changed_is_replaced(actual: Vxlan | ForeignLink) -> None:
    assert list(lines(iproute2_commands.link(DEVICE, actual, "eth0"))) == ["ip link del flannel.1", ADD, UP]


def test_a_tunnel_of_ipip_is_made() -> None:
    tunnel = Ipip("flannel.ipip", IPv4Address("192.0.2.1"), 1480)
    assert list(lines(iproute2_commands.link(tunnel, None, "eth0"))) == [
        "ip link add flannel.ipip mtu 1480 txqueuelen 0 type ipip local 192.0.2.1 remote any"
        " ttl inherit nopmtudisc",
        "ip link set flannel.ipip up",
    ]


def test_a_tun_device_is_made_and_set() -> None:
    tun = Tun("flannel0", 1472)
    assert list(lines(iproute2_commands.link(tun, None, "eth0"))) == [
        "ip tuntap add dev flannel0 mode tun",
        "ip link set flannel0 mtu 1472",
        "ip link set flannel0 up",
    ]
    set_mtu = iproute2_commands.link(tun, replace(tun, mtu=1400), "eth0")
    assert list(lines(set_mtu)) == ["ip link set flannel0 mtu 1472"]
