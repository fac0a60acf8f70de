"""The uplink and its backend: whose lease is ours, asked for each lease of a cluster."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import cast

import pytest

from flanneld import config
from flanneld.backends.contract import Backend, Host
from flanneld.backends.host_gw import HostGw
from flanneld.config import Config
from flanneld.model import IPAddress, LeaseAttrs, Uplink, network_around
from flanneld.network.host import HostKernel
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.local_node import UplinkManager, find_uplink
from flanneld.state.resources import Route, Tun, Vxlan
from tests.unit.simulation.kernel import Kernel

OURS = LeaseAttrs(public_ip=IPv4Address("198.18.0.1"), backend_type="host-gw")
THEIRS = LeaseAttrs(public_ip=IPv4Address("198.18.0.2"), backend_type="host-gw")
CONFIG = config.parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}')
UPLINK = Uplink("eth0", 2, 1500, IPv4Address("198.18.0.1"), IPv4Address("198.18.0.1"))


class Recognizing:
    """A backend that recognizes a lease by its backend type."""

    def is_self(self, attrs: LeaseAttrs) -> bool:
        return attrs.backend_type == "host-gw"


class Plain:
    """A backend that does not, and counts how often it is asked for what it does not have."""

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        self.asked += 1
        raise AttributeError(name)


def manager(backend: object) -> UplinkManager:
    kernel = cast("HostKernel", object())  # the backend asks nothing of the host
    return UplinkManager(
        kernel, CONFIG, InterfaceChoice(), lambda _config, _host: cast("Backend", backend), UPLINK, None
    )


def test_backend_that_recognizes_itself_decides() -> None:
    assert manager(Recognizing()).is_self(THEIRS, OURS)


def test_lease_is_ours_by_its_public_ip_without_a_look_at_the_backend_for_each_lease() -> None:
    backend = Plain()
    uplink_manager = manager(backend)
    before = backend.asked
    assert uplink_manager.is_self(OURS, OURS)
    assert not uplink_manager.is_self(THEIRS, OURS)
    assert backend.asked == before


@pytest.mark.parametrize(
    ("here", "neighbour", "gateway"),
    [
        (IPv4Address("198.18.0.1"), IPv4Address("198.18.0.2"), IPv4Address("198.18.0.254")),
        (IPv6Address("fd77::1"), IPv6Address("fd77::2"), IPv6Address("fd77::fe")),
    ],
)
def test_only_a_host_on_a_link_of_ours_is_directly_reachable(
    here: IPAddress, neighbour: IPAddress, gateway: IPAddress
) -> None:
    kernel = Kernel("eth0", (here, 24 if here.version == 4 else 64))
    behind = network_around(type(here)(0x0A090807), here.max_prefixlen)
    kernel.add_route(Route(behind, "eth0", gateway), 3)
    hosts: list[Host] = []

    def build(_config: Config, host: Host) -> Backend:
        hosts.append(host)
        return cast("Backend", Plain())

    uplinks = UplinkManager(kernel, CONFIG, InterfaceChoice(), build, UPLINK, None)
    assert (uplinks.asks_routes, uplinks.is_adrift) == (False, False)
    link_to = hosts[0].link_to
    assert link_to(neighbour) == "eth0"
    assert link_to(behind.network_address) is None
    assert link_to(here) is None
    assert link_to(type(here)(0x01020304)) is None
    assert uplinks.asks_routes


def test_backend_is_told_the_mac_of_a_device_that_is_there() -> None:
    kernel = Kernel("eth0")
    kernel.add_link(Vxlan("flannel.1", 1, 2, IPv4Address("198.18.0.1"), 8472, "02:00:00:00:00:01", 1450))
    kernel.add_link(Tun("flannel0", 1472))
    hosts: list[Host] = []

    def build(_config: Config, host: Host) -> Backend:
        hosts.append(host)
        return cast("Backend", Plain())

    UplinkManager(kernel, CONFIG, InterfaceChoice(), build, UPLINK, None)
    macs = [hosts[0].mac_of(name) for name in ("flannel.1", "flannel0", "flannel.2")]
    assert macs == ["02:00:00:00:00:01", None, None]


def test_uplink_that_keeps_only_a_link_local_address_is_kept_until_the_other_is_back() -> None:
    here, link_local = IPv4Address("198.18.0.1"), IPv4Address("169.254.3.4")
    default = Route(IPv4Network("0.0.0.0/0"), "eth0", IPv4Address("198.18.0.254"))
    kernel = Kernel("eth0", (here, 24))
    kernel.add_address("eth0", link_local, 16)
    kernel.add_route(default, 3)
    uplink = find_uplink(kernel, CONFIG, InterfaceChoice())
    assert uplink.local(4) == here
    uplinks = UplinkManager(kernel, CONFIG, InterfaceChoice(), HostGw, uplink, None)
    kernel.delete_address("eth0", here)
    assert uplinks.follow() is False
    assert uplinks.is_adrift
    kernel.add_address("eth0", here, 32)
    assert uplinks.follow() is False
    assert not uplinks.is_adrift
    assert uplinks.uplink == uplink


def test_backend_is_replaced_where_the_uplink_moves_and_kept_while_no_interface_is_usable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = IPv4Address("198.18.0.1"), IPv4Address("198.18.0.7")
    default = Route(IPv4Network("0.0.0.0/0"), "eth0", IPv4Address("198.18.0.254"))
    kernel = Kernel("eth0", (here, 24))
    kernel.add_route(default, 3)
    uplink = find_uplink(kernel, CONFIG, InterfaceChoice())
    uplinks = UplinkManager(kernel, CONFIG, InterfaceChoice(), HostGw, uplink, None)
    first = uplinks.backend
    assert uplinks.follow() is False
    kernel.delete_address("eth0", here)
    for _ in range(2):
        assert uplinks.follow() is False
        assert uplinks.is_adrift
        assert (uplinks.uplink, uplinks.backend) == (uplink, first)
    kernel.add_address("eth0", there, 24)
    kernel.add_route(default, 3)
    assert uplinks.follow() is True
    assert not uplinks.is_adrift
    assert uplinks.uplink.local(4) == there
    assert uplinks.backend.attributes().public_ip == there
    assert [record.getMessage().split(":")[0].split(" to ")[0] for record in caplog.records] == [
        "The uplink eth0 is unusable",
        "The uplink moved",
    ]
