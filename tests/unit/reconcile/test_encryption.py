"""Routes of other programs that take packets past the encryption."""

from __future__ import annotations

import logging
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from flanneld.model import IPAddress, IPNetwork
from flanneld.network.obstacles import HostRoute, host_networks
from flanneld.reconcile.host_watch import EncryptionWatch, bypasses
from flanneld.state.resources import Route
from flanneld.state.table import Bypass

NETWORKS = (IPv4Network("10.5.0.0/16"), IPv6Network("fc00:5::/48"))
OWN = (IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5:0:1::/64"))
GATEWAY = IPv4Address("192.0.2.1")
KERNEL, STATIC = 2, 4
PAST = HostRoute(IPv4Network("10.5.7.0/25"), STATIC, (("eth0", GATEWAY),))


def detours(*routes: HostRoute) -> frozenset[HostRoute]:
    return host_networks(routes, (), (), networks=NETWORKS, own=OWN).detours


@pytest.mark.parametrize(
    ("destination", "gateway"),
    [
        (IPv4Network("10.5.7.0/25"), GATEWAY),
        (IPv4Network("10.5.7.0/24"), GATEWAY),
        (IPv4Network("10.5.0.0/16"), GATEWAY),
        (IPv4Network("10.5.128.0/17"), None),
        (IPv6Network("fc00:5:0:7::/64"), IPv6Address("fe80::1")),
    ],
)
def test_a_route_of_others_into_the_network_is_a_detour(
    destination: IPNetwork, gateway: IPAddress | None
) -> None:
    route = HostRoute(destination, STATIC, (("eth0", gateway),))
    assert detours(route) == {route}


@pytest.mark.parametrize(
    "route",
    [
        HostRoute(None, STATIC, (("eth0", GATEWAY),)),
        HostRoute(IPv4Network("10.0.0.0/8"), STATIC, (("eth0", GATEWAY),)),
        HostRoute(IPv4Network("192.0.2.0/24"), STATIC, (("eth0", GATEWAY),)),
        HostRoute(IPv4Network("10.5.1.0/24"), KERNEL, (("cni0", None),)),
        HostRoute(IPv4Network("10.5.1.7/32"), STATIC, (("veth7", None),)),
        HostRoute(IPv4Network("10.5.9.0/24"), KERNEL, (("docker0", None),)),
        HostRoute(IPv4Network("10.5.9.0/24"), STATIC, ()),
    ],
    ids=["default", "around", "elsewhere", "our containers", "one of them", "on a link", "through ours"],
)
def test_route_without_a_peers_packets_is_no_bypass(route: HostRoute) -> None:
    assert not detours(route)


def test_a_route_that_is_wanted_is_no_bypass() -> None:
    """It was made by another program just so, and leads to a peer that may be reached in the clear."""
    subnet = IPv4Network("10.5.7.0/24")
    found = HostRoute(subnet, STATIC, (("eth0", GATEWAY),))
    desired = Route(subnet, "eth0", GATEWAY)
    assert bypasses([found, PAST], {desired.key: desired}) == [PAST]
    other = Route(subnet, "flannel-wg")
    assert bypasses([found], {other.key: other}) == [found]


def test_a_bypass_is_named_once_with_the_remedy_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch = EncryptionWatch()
    watch.look([PAST], {})
    watch.look([PAST], {})
    assert "ip route delete 10.5.7.0/25 via 192.0.2.1 dev eth0" in watch.problem
    watch.look([], {})
    assert watch.problem == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_policy_is_named_as_a_route_is() -> None:
    watch = EncryptionWatch()
    watch.look([], {}, [Bypass("policy src here", "ip xfrm policy delete src here")])
    assert watch.problem == (
        "packets may leave unencrypted by another program's policy src here;"
        " remove it: ip xfrm policy delete src here"
    )
    watch.look([PAST], {}, [Bypass("policy src here", "")])
    assert "route 10.5.7.0/25 via 192.0.2.1 dev eth0, and 1 more" in watch.problem


def test_first_of_many_bypasses_is_named() -> None:
    watch = EncryptionWatch()
    others = [HostRoute(IPv4Network(f"10.5.{net}.0/24"), STATIC, (("eth1", None),)) for net in (8, 9)]
    watch.look([PAST, *others], {})
    assert f"route {PAST}, and 2 more; remove it: ip route delete {PAST}" in watch.problem
