"""Facts about a simulated host, and addresses of interfaces as the kernel's flags describe them."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from msgspec.structs import replace

from flanneld.model import FAMILIES, single
from flanneld.network.obstacles import HostRoute, Obstacle
from flanneld.network.routing import SeenHostRoute
from flanneld.network.rtnetlink.domain import NOTHING, RTPROT_KERNEL, Domain
from flanneld.network.rtnetlink.messages import SeenAddress
from flanneld.network.uplink_election import AddressFact, DefaultRoute, LinkFact, RouteFact
from flanneld.network.uplink_facts import (
    Way,
    _fact,
    connected_networks,
    read_host_networks,
    route_to,
    survey,
    tun_for,
    way_to,
)
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Dummy, ForeignLink, Route, Tun, Vxlan
from tests.unit.simulation.kernel import Kernel

#: IFA_F_SECONDARY of IPv4 and IFA_F_TEMPORARY of IPv6 are one bit.
SECONDARY = TEMPORARY = 0x01
DADFAILED, DEPRECATED, TENTATIVE, PERMANENT = 0x08, 0x20, 0x40, 0x80


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (0, set()),
        (TEMPORARY, {"temporary"}),
        (DADFAILED, {"deprecated"}),
        (DEPRECATED, {"deprecated"}),
        (TENTATIVE, {"tentative"}),
        (PERMANENT, {"permanent"}),
        (PERMANENT | SECONDARY, {"permanent", "temporary"}),
        (PERMANENT | TENTATIVE | DEPRECATED, {"permanent", "tentative", "deprecated"}),
    ],
)
def test_each_flag_of_an_address_means_one_thing(flags: int, names: set[str], address: str) -> None:
    known = names - {"temporary"} if address == "192.0.2.1" else names
    fields = {name: name in known for name in ("permanent", "deprecated", "temporary", "tentative")}
    ip = ip_address(address)
    assert _fact(SeenAddress(2, ip, 24, flags)) == AddressFact(index=2, address=ip, **fields)


HERE, HERE6 = ip_address("192.0.2.1"), ip_address("2001:db8::1")
ROUTER = ip_address("192.0.2.254")
NETWORK, SUBNET = ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24")


def tunnel(name: str) -> Vxlan:
    return Vxlan(name, 1, 2, HERE, 8472, "02:00:00:00:00:01", 1450)


@pytest.fixture
def kernel() -> Kernel:
    """A host with an uplink, a tunnel of flannel, one of another flannel, and an interface of an operator."""
    found = Kernel("eth0", (HERE, 24), (HERE6, 64))
    for link in (tunnel("flannel.1"), tunnel("flannel.7"), ForeignLink("flannel9", "a bridge", "bridge")):
        found.add_link(link)
    return found


def test_survey_has_interfaces_addresses_and_the_default_routes_that_are_asked_for(kernel: Kernel) -> None:
    kernel.set_down("flannel9")
    kernel.add_route(Route(ip_network("0.0.0.0/0"), "eth0", ROUTER), PROTO_BOOT)
    facts = survey(kernel, FAMILIES, default_routes=True)
    assert facts.links == (
        LinkFact("eth0", 2, 1500, True),
        LinkFact("flannel.1", 3, 1450, True),
        LinkFact("flannel.7", 4, 1450, True),
        LinkFact("flannel9", 5, 1500, False),
    )
    assert [(each.index, each.address) for each in facts.addresses] == [(2, HERE), (2, HERE6)]
    assert facts.default_routes == (DefaultRoute(4, 2),)
    of_ipv6 = survey(kernel, (6,), default_routes=False)
    assert ([each.address for each in of_ipv6.addresses], of_ipv6.default_routes) == ([HERE6], ())


def test_route_has_interface_source_and_gateway(kernel: Kernel) -> None:
    away = ip_address("203.0.113.1")
    assert route_to(kernel, away) is None
    kernel.add_route(Route(single(away), "eth0", ROUTER), PROTO_BOOT)
    assert route_to(kernel, away) == RouteFact(2, HERE, ROUTER)


def test_networks_of_all_addresses_are_connected(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.add_address("flannel.1", ip_address("10.5.1.0"), 32)
    networks = {ip_network("192.0.2.0/24"), ip_network("10.5.1.0/32")}
    assert set(connected_networks(kernel, (4,))) == networks
    assert set(connected_networks(kernel, FAMILIES)) == {*networks, ip_network("2001:db8::/64")}

    def refuse(_family: int) -> None:
        raise OSError("not now")

    monkeypatch.setattr(kernel, "addresses", refuse)
    assert connected_networks(kernel, (4,)) == ()
    assert "Cannot read this host's addresses: not now" in caplog.text


# ---- the way to an address -----------------------------------------------------------------------

OF_FLANNEL = Domain("eth0", frozenset(), ((NETWORK, 24),))


@pytest.mark.parametrize(
    ("device", "protocol", "domain", "is_ours"),
    [
        ("eth0", PROTO_BOOT, NOTHING, False),
        ("eth0", PROTO_BOOT, OF_FLANNEL, False),
        ("eth0", PROTO_BOOT, replace(OF_FLANNEL, unmarked=True), True),  # Go's
        ("eth0", PROTO_FLANNEL, NOTHING, True),
        ("flannel.1", PROTO_BOOT, NOTHING, True),
        ("flannel9", RTPROT_KERNEL, OF_FLANNEL, False),
        ("flannel9", RTPROT_KERNEL, replace(OF_FLANNEL, links=frozenset({"flannel9"})), True),
    ],
)
def test_way_is_ours_by_its_route_or_its_device(
    device: str, protocol: int, domain: Domain, *, is_ours: bool, kernel: Kernel
) -> None:
    kernel.domain = domain
    gateway = ROUTER if device == "eth0" else None
    kernel.add_route(Route(SUBNET, device, gateway), protocol)
    assert way_to(kernel, SUBNET[9]) == Way(SUBNET, device, is_ours)


def test_default_route_is_a_way_without_a_destination(kernel: Kernel) -> None:
    assert way_to(kernel, SUBNET[9]) is None
    kernel.domain = replace(OF_FLANNEL, unmarked=True)
    kernel.add_route(Route(ip_network("0.0.0.0/0"), "eth0", ROUTER), PROTO_BOOT)
    assert way_to(kernel, SUBNET[9]) == Way(None, "eth0", False)
    assert way_to(kernel, HERE) == Way(ip_network("192.0.2.0/24"), "eth0", False)


def test_way_by_several_next_hops_is_that_of_the_first(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = SeenHostRoute(SUBNET, PROTO_BOOT, ((2, ROUTER), (3, None)))
    monkeypatch.setattr(kernel, "matching_route", lambda _: several)
    assert way_to(kernel, SUBNET[9]) == Way(SUBNET, "eth0", False)


# ---- what a lease must not take over -------------------------------------------------------------


def test_obstacles_are_what_others_have_and_addresses_are_all(kernel: Kernel) -> None:
    for device, address in (("flannel.1", "10.5.1.0"), ("flannel.7", "10.5.2.0"), ("eth0", "10.5.3.1")):
        kernel.add_address(device, ip_address(address), 32)
    kernel.add_address("flannel9", ip_address("10.5.4.1"), 24)
    kernel.add_route(Route(ip_network("10.5.5.0/24"), "flannel9"), PROTO_BOOT)
    kernel.add_route(Route(ip_network("10.5.6.0/24"), "flannel.1"), PROTO_BOOT)
    kernel.add_route(Route(ip_network("10.5.8.0/24"), "flannel.7"), PROTO_BOOT)
    store = Obstacle(ip_network("10.5.9.9/32"), "", "store")
    found = read_host_networks(kernel, [NETWORK], [SUBNET], {"flannel.1"}, [store])
    bridge = ip_network("10.5.4.0/24")
    assert found.obstacles == {
        store,
        Obstacle(ip_network("10.5.3.1/32"), "eth0", "address"),
        Obstacle(ip_network("10.5.4.1/32"), "flannel9", "address"),
        Obstacle(bridge, "flannel9", "network"),
    }
    addresses = ("192.0.2.1", "10.5.1.0", "10.5.2.0", "10.5.3.1", "10.5.4.1")
    assert found.local == {single(ip_address(each)) for each in addresses}
    ends = (bridge, ip_network("192.0.2.0/24"))
    assert found.broadcast == {end for net in ends for end in (net.network_address, net.broadcast_address)}
    assert found.detours == {HostRoute(ip_network("10.5.5.0/24"), PROTO_BOOT, (("flannel9", None),))}


def test_device_of_ours_is_no_obstacle_under_any_name_nor_is_one_that_has_just_gone(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_link(ForeignLink("mine", "an extension's"))
    kernel.add_address("mine", ip_address("10.5.4.1"), 24)
    assert read_host_networks(kernel, [NETWORK], [], set()).obstacles
    assert not read_host_networks(kernel, [NETWORK], [], {"mine"}).obstacles
    monkeypatch.setattr(kernel, "name_of", lambda _: None)
    assert not read_host_networks(kernel, [NETWORK], [], set()).obstacles


def test_networks_of_each_family_of_the_cluster_are_read(kernel: Kernel) -> None:
    of_ipv6 = read_host_networks(kernel, [ip_network("fc00::/48")], [], set())
    assert of_ipv6.local == {single(HERE6)}
    both = read_host_networks(kernel, [NETWORK, ip_network("fc00::/48")], [], set())
    assert both.local == {single(HERE), single(HERE6)}


# ---- the device of udp ---------------------------------------------------------------------------

OTHERS, OURS = ip_address("10.6.0.0"), ip_address("10.5.0.0")


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([], "flannel0"),
        ([(Tun("flannel0", 1472), OTHERS)], "flannel1"),
        ([(Tun("flannel0", 1472), OURS)], "flannel0"),
        ([(Tun("flannel0", 1472), OTHERS), (Tun("flannel3", 1472), OURS)], "flannel3"),
        ([(Tun("flannel0", 1472), OTHERS), (Tun("flannel1", 1472), None)], "flannel1"),
        ([(Tun("flannel99", 1472), OURS)], "flannel99"),
        ([(Tun("tun0", 1472), OURS)], "flannel0"),
        ([(Dummy("flannel0", 1472), OURS)], "flannel1"),
    ],
)
def test_tun_device_of_a_network_is_that_of_an_earlier_run_or_a_new_one(
    devices: list[tuple[Tun | Dummy, object]], name: str
) -> None:
    kernel = Kernel("eth0", (HERE, 24))
    for link, address in devices:
        kernel.add_link(link)
        if address is not None:
            kernel.add_address(link.name, ip_address(str(address)), 32)
    assert tun_for(kernel, [ip_network("10.7.0.0/16"), NETWORK]) == name
