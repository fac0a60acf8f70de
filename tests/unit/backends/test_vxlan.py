"""The vxlan backend's decisions: devices, what is announced, and what leads to a peer."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import Backend, Host, OtherBackend, peers_public_ip, read_options
from flanneld.backends.vxlan import VxlanBackend, VxlanConfig, vtep_mac
from flanneld.config import Config, parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Family, IPAddress, Lease, LeaseAttrs, Uplink, is_a_hosts
from flanneld.state.resources import Address, FdbEntry, Neighbor, Resource, Route, Vxlan
from flanneld.subnet.codec import parse_mac

V4, V6, DUAL = (True, False), (False, True), (True, True)
Families = tuple[bool, bool]

PEER_MAC, PEER_MAC_V6 = "0a:00:00:00:00:06", "0a:00:00:00:06:06"
SUBNET, SUBNET_V6 = IPv4Network("10.1.6.0/24"), IPv6Network("fd00:0:0:6::/64")
PUBLIC, PUBLIC_V6 = IPv4Address("192.168.0.6"), IPv6Address("fd77::6")
OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"), IPv6Network("fd00:0:0:5::/64"))


def config(families: Families = V4, **backend: Any) -> Config:
    return parse(
        json.dumps(
            {
                "EnableIPv4": families[0],
                "EnableIPv6": families[1],
                "Network": "10.1.0.0/16",
                "IPv6Network": "fd00::/48",
                "Backend": {"Type": "vxlan", **backend},
            }
        )
    )


def nothing(_: Any) -> None:
    return None


def host(
    *,
    mtu: int = 1500,
    stored: LeaseAttrs | None = None,
    mac_of: Callable[[str], str | None] = nothing,
    link_to: Callable[[IPAddress], str | None] = nothing,
    random: bytes = bytes(6),
    public_ip: str = "",
    node: int = 5,
) -> Host:
    local, local_v6 = IPv4Address(f"192.168.0.{node}"), IPv6Address(f"fd77::{node}")
    public = IPv4Address(public_ip) if public_ip else local
    uplink = Uplink("eth0", 2, mtu, local, public, local_v6, local_v6)
    return Host(uplink, stored, mac_of, link_to, lambda size: random[:size])


def devices(made: Backend) -> list[Vxlan]:
    return [resource for resource in made.local(OWN) if isinstance(resource, Vxlan)]


def peer(families: Families = DUAL, **attrs: Any) -> Lease:
    known: dict[str, Any] = {
        "public_ip": PUBLIC,
        "public_ipv6": PUBLIC_V6,
        "backend_type": "vxlan",
        "backend_data": {"VtepMAC": PEER_MAC},
        "backend_v6_data": {"VtepMAC": PEER_MAC_V6},
    }
    subnets = (SUBNET if families[0] else None, SUBNET_V6 if families[1] else None)
    return Lease(LeaseAttrs(**{**known, **attrs}), *subnets)


TO_PEER_V4: list[Resource] = [
    Neighbor("flannel.1", SUBNET.network_address, PEER_MAC),
    FdbEntry("flannel.1", PEER_MAC, PUBLIC),
    Route(SUBNET, "flannel.1", SUBNET.network_address, onlink=True),
]
TO_PEER_V6: list[Resource] = [
    Neighbor("flannel-v6.1", SUBNET_V6.network_address, PEER_MAC_V6),
    FdbEntry("flannel-v6.1", PEER_MAC_V6, PUBLIC_V6),
    Route(SUBNET_V6, "flannel-v6.1", SUBNET_V6.network_address, onlink=True),
]


# ---- what leads to a peer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "desired"),
    [
        (V4, V4, TO_PEER_V4),
        (V6, V6, TO_PEER_V6),
        (DUAL, DUAL, TO_PEER_V4 + TO_PEER_V6),
        (DUAL, V4, TO_PEER_V4),
        (DUAL, V6, TO_PEER_V6),
        (V4, DUAL, TO_PEER_V4),
        (V6, DUAL, TO_PEER_V6),
        (V4, V6, []),
    ],
    ids=[
        "IPv4",
        "IPv6",
        "dual",
        "we dual",
        "we dual, they IPv6",
        "they dual",
        "they dual, we IPv6",
        "nothing in common",
    ],
)
def test_neighbour_forwarding_entry_and_onlink_route_lead_to_a_peer(
    ours: Families, theirs: Families, desired: list[Any]
) -> None:
    assert list(VxlanBackend(config(ours), host()).peer(OWN, peer(theirs))) == desired


def test_the_vni_names_the_devices() -> None:
    made = VxlanBackend(config(DUAL, VNI=42), host())
    assert {resource.device for resource in made.peer(OWN, peer())} == {"flannel.42", "flannel-v6.42"}  # type: ignore[attr-defined]


def test_a_peer_on_our_link_is_routed_to_directly() -> None:
    links: dict[IPAddress, str] = {PUBLIC: "eth0", PUBLIC_V6: "eth1"}
    made = VxlanBackend(config(DUAL, DirectRouting=True), host(link_to=links.get))
    assert list(made.peer(OWN, peer())) == [
        Route(SUBNET, "eth0", PUBLIC),
        Route(SUBNET_V6, "eth1", PUBLIC_V6),
    ]


def test_each_family_is_routed_to_directly_by_itself() -> None:
    links: dict[IPAddress, str] = {PUBLIC_V6: "eth1"}
    made = VxlanBackend(config(DUAL, DirectRouting=True), host(link_to=links.get))
    assert list(made.peer(OWN, peer())) == [*TO_PEER_V4, Route(SUBNET_V6, "eth1", PUBLIC_V6)]


def test_without_direct_routing_nobody_asks_for_links() -> None:
    def refuse(target: IPAddress) -> str | None:
        raise AssertionError(f"asked for the link to {target}")

    assert list(VxlanBackend(config(), host(link_to=refuse)).peer(OWN, peer(V4))) == TO_PEER_V4


def test_direct_routing_is_decided_anew_each_time() -> None:
    links: dict[IPAddress, str] = {}
    made = VxlanBackend(config(DirectRouting=True), host(link_to=links.get))
    assert list(made.peer(OWN, peer(V4))) == TO_PEER_V4
    links[PUBLIC] = "eth0"
    assert list(made.peer(OWN, peer(V4))) == [Route(SUBNET, "eth0", PUBLIC)]


@pytest.mark.parametrize("backend_type", ["host-gw", ""])
def test_the_lease_of_another_backend_leads_nowhere(backend_type: str) -> None:
    with pytest.raises(OtherBackend):
        list(VxlanBackend(config(), host()).peer(OWN, peer(backend_type=backend_type)))


@pytest.mark.parametrize(
    "data",
    [
        None,
        "0a:00:00:00:00:06",
        {},
        {"VtepMAC": None},
        {"VtepMAC": 7},
        {"VtepMAC": ""},
        {"VtepMAC": "0a:00:00:00:00"},
        {"VtepMAC": "0a:00:00:00:00:06:07:08"},
        {"VtepMAC": "00:00:00:00:00:00"},
        {"VtepMAC": "01:00:5e:00:00:01"},
        {"VtepMAC": "ff:ff:ff:ff:ff:ff"},
    ],
)
def test_a_lease_without_a_possible_mac_is_refused(data: Any) -> None:
    with pytest.raises(Refused):
        list(VxlanBackend(config(), host()).peer(OWN, peer(V4, backend_data=data)))


@pytest.mark.parametrize(
    "data",
    [
        {"VtepMAC": "0A-00-00-00-00-06"},
        {"vtepmac": "0a00.0000.0006"},
        {"VNI": 1, "VTEPMAC": PEER_MAC},
        {"vtepmac": "0a:00:00:00:00:99", "VtepMAC": PEER_MAC},
    ],
)
def test_a_mac_is_understood_as_go_understands_it(data: dict[str, Any]) -> None:
    assert vtep_mac(data) == PEER_MAC


def test_a_lease_without_public_ip_is_refused() -> None:
    with pytest.raises(Refused, match="IPv4"):
        list(VxlanBackend(config(), host()).peer(OWN, peer(V4, public_ip=None)))
    with pytest.raises(Refused, match="IPv6"):
        list(VxlanBackend(config(V6), host()).peer(OWN, peer(V6, public_ipv6=None)))


def test_a_lease_whose_public_ip_is_no_hosts_is_refused() -> None:
    with pytest.raises(Refused, match="no host's"):
        list(VxlanBackend(config(), host()).peer(OWN, peer(V4, public_ip=IPv4Address("127.0.0.1"))))
    with pytest.raises(Refused, match="no host's"):
        list(VxlanBackend(config(V6), host()).peer(OWN, peer(V6, public_ipv6=IPv6Address("ff02::1"))))


@pytest.mark.parametrize("text", ["0.0.0.5", "::ffff:192.0.2.7"])
def test_a_public_ip_that_no_host_can_have_is_refused(text: str) -> None:
    assert not is_a_hosts(ip_address(text))


@pytest.mark.parametrize(
    ("family", "theirs", "ours"), [(4, "169.254.9.9", "169.254.1.1"), (6, "fe80::9", "fe80::1")]
)
def test_a_link_local_public_ip_is_refused_unless_ours_is_one(family: Family, theirs: str, ours: str) -> None:
    net, name = (V4, "public_ip") if family == 4 else (V6, "public_ipv6")
    lease = peer(net, **{name: ip_address(theirs)})
    with pytest.raises(Refused, match="leads nowhere from here"):
        peers_public_ip(lease, family, host().uplink)
    neighbour = replace(host().uplink, **{name: ip_address(ours)})
    assert peers_public_ip(lease, family, neighbour) == ip_address(theirs)


@pytest.mark.parametrize(("vni", "told"), [(65535, 0), (65536, 1)])
def test_a_vni_that_gos_cannot_read_is_told(caplog: pytest.LogCaptureFixture, vni: int, told: int) -> None:
    VxlanBackend(config(VNI=vni), host())
    assert len([line for line in caplog.messages if "cannot read leases with VNI" in line]) == told


def test_a_lease_with_our_own_public_ip_is_refused() -> None:
    made = VxlanBackend(config(), host(public_ip="203.0.113.5"))
    with pytest.raises(Refused, match="our own public IP"):
        list(made.peer(OWN, peer(V4, public_ip=IPv4Address("203.0.113.5"))))


@given(
    st.none()
    | st.booleans()
    | st.text(max_size=3)
    | st.dictionaries(st.text(max_size=8), st.text(max_size=20))
)
def test_any_announcement_is_parsed_or_refused(data: Any) -> None:
    made = VxlanBackend(config(), host())
    try:
        resources = list(made.peer(OWN, peer(V4, backend_data=data)))
    except Refused:
        return
    assert len(resources) == 3


# ---- this node's devices -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("families", "names"),
    [(V4, ["flannel.1"]), (V6, ["flannel-v6.1"]), (DUAL, ["flannel.1", "flannel-v6.1"])],
    ids=["IPv4", "IPv6", "dual"],
)
def test_there_is_a_device_for_each_family(families: Families, names: list[str]) -> None:
    assert [device.name for device in devices(VxlanBackend(config(families), host()))] == names


def test_a_device_carries_what_the_config_says() -> None:
    made = VxlanBackend(config(VNI=7, Port=4789, GBP=True, Learning=True), host(random=b"\xff" * 6))
    assert devices(made) == [
        Vxlan(
            "flannel.7",
            7,
            2,
            ip_address("192.168.0.5"),
            4789,
            "fe:ff:ff:ff:ff:ff",
            1450,
            learning=True,
            gbp=True,
        )
    ]


def test_a_device_sends_from_the_local_address_and_not_from_the_public_one() -> None:
    assert devices(VxlanBackend(config(), host(public_ip="203.0.113.5")))[0].local == ip_address(
        "192.168.0.5"
    )


def test_a_device_has_the_base_address_of_our_subnet() -> None:
    assert [
        resource
        for resource in VxlanBackend(config(DUAL), host()).local(OWN)
        if isinstance(resource, Address)
    ] == [
        Address("flannel.1", ip_address("10.1.5.0")),
        Address("flannel-v6.1", ip_address("fd00:0:0:5::")),
    ]


def test_without_peers_a_device_and_its_address_are_all() -> None:
    kinds: list[type] = [type(resource) for resource in VxlanBackend(config(), host()).local(OWN)]
    assert kinds == [Vxlan, Address]


def test_an_uplink_without_address_of_a_family_is_fatal() -> None:
    lone = Host(Uplink("eth0", 2, 1500, IPv4Address("192.168.0.5")), None, nothing, nothing, bytes)
    with pytest.raises(Fatal, match="IPv6"):
        VxlanBackend(config(DUAL), lone)


@pytest.mark.parametrize(
    ("families", "mtu", "backend", "inner"),
    [
        (V4, 1500, {}, [1450]),
        (V6, 1500, {}, [1430]),
        (DUAL, 9000, {}, [8950, 8930]),
        (V4, 1500, {"MTU": 1400}, [1350]),
        (V4, 1500, {"MTU": 0}, [1450]),
        (V6, 1350, {}, [1280]),
        (V4, 118, {}, [68]),
    ],
)
def test_the_headers_are_taken_off_the_mtu(
    families: Families, mtu: int, backend: dict[str, int], inner: list[int]
) -> None:
    made = VxlanBackend(config(families, **backend), host(mtu=mtu))
    assert [device.mtu for device in devices(made)] == inner
    assert made.mtu == min(inner)


@pytest.mark.parametrize(("families", "mtu"), [(V4, 117), (V6, 1349), (DUAL, 1349)])
def test_an_uplink_too_narrow_for_the_headers_is_fatal(families: Families, mtu: int) -> None:
    inner = mtu - (50 if families == V4 else 70)
    with pytest.raises(Fatal, match=f"MTU of {mtu} leaves {inner} bytes inside VXLAN; raise the MTU of eth0"):
        VxlanBackend(config(families), host(mtu=mtu))


# ---- the MAC -------------------------------------------------------------------------------------

EXISTING, STORED, RANDOM = "0a:00:00:00:00:01", "0a:00:00:00:00:02", "02:00:00:00:00:00"


def announced(mac: str, mac_v6: str = "", backend_type: str = "vxlan") -> LeaseAttrs:
    data_v6 = {"VtepMAC": mac_v6} if mac_v6 else None
    return LeaseAttrs(backend_type=backend_type, backend_data={"VtepMAC": mac}, backend_v6_data=data_v6)


@pytest.mark.parametrize(
    ("existing", "stored", "mac"),
    [
        (EXISTING, announced(STORED), EXISTING),
        (None, announced(STORED), STORED),
        (None, None, RANDOM),
        (None, announced("00:00:00:00:00:00"), RANDOM),
        (None, announced("rubbish"), RANDOM),
        (None, announced(STORED, backend_type="host-gw"), RANDOM),
        (None, LeaseAttrs(backend_type="vxlan"), RANDOM),
    ],
    ids=["existing", "stored", "random", "zero", "rubbish", "other backend", "no data"],
)
def test_the_mac_is_the_devices_else_the_stored_one_else_random(
    existing: str | None, stored: LeaseAttrs | None, mac: str
) -> None:
    made = VxlanBackend(config(), host(mac_of={"flannel.1": existing}.get, stored=stored))
    assert devices(made)[0].mac == mac


@pytest.mark.parametrize(
    ("others", "mac"),
    [
        ([], EXISTING),
        ([announced(EXISTING)], STORED),
        ([announced("0A-00-00-00-00-01")], STORED),
        ([announced(EXISTING), announced(STORED)], RANDOM),
        ([announced(PEER_MAC, EXISTING), announced("rubbish"), LeaseAttrs()], EXISTING),
        ([announced(EXISTING, backend_type="host-gw")], EXISTING),
    ],
    ids=["none", "the device's", "in other words", "both", "of the other family", "other backend"],
)
def test_mac_of_another_nodes_lease_is_left_to_it(others: list[LeaseAttrs], mac: str) -> None:
    made = replace(
        host(mac_of={"flannel.1": EXISTING}.get, stored=announced(STORED)),
        is_others=lambda announces: any(map(announces, others)),
    )
    assert devices(VxlanBackend(config(), made))[0].mac == mac


def test_each_family_keeps_its_own_mac() -> None:
    made = VxlanBackend(config(DUAL), host(stored=announced(STORED, PEER_MAC_V6)))
    assert [device.mac for device in devices(made)] == [STORED, PEER_MAC_V6]


def test_macs_decided_in_this_run_precede_those_of_devices_and_the_lease() -> None:
    first = VxlanBackend(config(DUAL), host(random=bytes([2, 0, 0, 0, 0, 9])))
    assert first.identity() == {4: "02:00:00:00:00:09", 6: "02:00:00:00:00:09"}
    kept = replace(host(mac_of=lambda _: PEER_MAC, stored=peer().attrs), identity={4: "a", 6: "b"})
    assert [device.mac for device in devices(VxlanBackend(config(DUAL), kept))] == ["a", "b"]


def test_a_family_that_is_new_gets_a_new_mac() -> None:
    made = VxlanBackend(config(DUAL), host(stored=announced(STORED)))
    assert [device.mac for device in devices(made)] == [STORED, RANDOM]


@given(st.binary(min_size=6, max_size=6))
def test_a_random_mac_is_local_and_one_devices_own(random: bytes) -> None:
    (device,) = devices(VxlanBackend(config(), host(random=random)))
    assert parse_mac(device.mac) == device.mac
    assert int(device.mac[:2], 16) & 0b11 == 0b10


def test_rebuilt_backend_announces_the_same() -> None:
    first = VxlanBackend(config(DUAL), host(random=b"\x02abcde"))
    second = VxlanBackend(config(DUAL), host(random=b"\x02fghij", stored=first.attributes()))
    assert second.attributes() == first.attributes()


# ---- what others are told ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("families", "data", "data_v6"),
    [
        (V4, {"VNI": 1, "VtepMAC": RANDOM}, None),
        (V6, None, {"VNI": 1, "VtepMAC": RANDOM}),
        (DUAL, {"VNI": 1, "VtepMAC": RANDOM}, {"VNI": 1, "VtepMAC": RANDOM}),
    ],
    ids=["IPv4", "IPv6", "dual"],
)
def test_the_vteps_are_announced(families: Families, data: Any, data_v6: Any) -> None:
    attrs = VxlanBackend(config(families), host(public_ip="203.0.113.5")).attributes()
    assert (attrs.backend_type, attrs.public_ip) == ("vxlan", IPv4Address("203.0.113.5"))
    assert (attrs.backend_data, attrs.backend_v6_data) == (data, data_v6)


def test_a_node_finds_the_way_to_what_another_announces() -> None:
    attrs = VxlanBackend(config(DUAL), host(random=b"\x0aabcde")).attributes()
    resources = list(VxlanBackend(config(DUAL), host(node=9)).peer(OWN, Lease(attrs, SUBNET, SUBNET_V6)))
    assert FdbEntry("flannel.1", "0a:61:62:63:64:65", IPv4Address("192.168.0.5")) in resources
    assert FdbEntry("flannel-v6.1", "0a:61:62:63:64:65", IPv6Address("fd77::5")) in resources


# ---- the config ----------------------------------------------------------------------------------


DEFAULTS = VxlanConfig(1, 8472, gbp=False, learning=False, direct_routing=False, mtu=0)


def read_config(config: Config) -> VxlanConfig:
    return VxlanConfig(**read_options(config, VxlanBackend.options))


def test_an_empty_config_means_vni_1_and_the_port_of_linux() -> None:
    assert read_config(config()) == DEFAULTS


def test_keys_are_found_in_any_case() -> None:
    read = read_config(config(vni=2, PORT=4789, gbp=True, learning=True, directrouting=True, mtu=1400))
    assert read == VxlanConfig(2, 4789, True, True, True, 1400)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("VNI", -1),
        ("VNI", 1 << 24),
        ("VNI", "1"),
        ("VNI", 1.0),
        ("Port", -1),
        ("Port", 65536),
        ("MTU", -1),
        ("MTU", 65536),
        ("GBP", 1),
        ("Learning", "yes"),
        ("DirectRouting", 0),
    ],
)
def test_a_value_that_no_device_can_have_is_fatal_and_named(key: str, value: Any) -> None:
    with pytest.raises(Fatal, match=key):
        VxlanBackend(config(**{key: value}), host())


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("VNI", 0, replace(DEFAULTS, vni=0)),
        ("VNI", (1 << 24) - 1, replace(DEFAULTS, vni=(1 << 24) - 1)),
        ("Port", 0, replace(DEFAULTS, port=8472)),
        ("Port", 1, replace(DEFAULTS, port=1)),
        ("Port", 65535, replace(DEFAULTS, port=65535)),
        ("MTU", 65535, replace(DEFAULTS, mtu=65535)),
    ],
)
def test_least_and_greatest_value_that_a_device_can_have_are_taken(
    key: str, value: int, read: VxlanConfig
) -> None:
    options: dict[str, Any] = {key: value}
    assert read_config(config(**options)) == read


@pytest.mark.parametrize(
    ("key", "value", "limits"),
    [("VNI", 1 << 24, "0 to 16777215"), ("Port", 65536, "1 to 65535"), ("MTU", -1, "0 to 65535")],
)
def test_error_names_the_value_and_its_range(key: str, value: int, limits: str) -> None:
    options: dict[str, Any] = {key: value}
    with pytest.raises(Fatal) as caught:
        read_config(config(**options))
    assert str(caught.value) == f"Backend.{key} is {value}; set it to a number from {limits}"


@pytest.mark.parametrize(
    ("families", "vni", "fits"),
    [(V4, 9_999_999, True), (V4, 10_000_000, False), (V6, 9_999, True), (V6, 10_000, False)],
)
def test_a_vni_too_long_for_a_devices_name_is_fatal(families: Families, vni: int, fits: bool) -> None:
    if fits:
        assert len(devices(VxlanBackend(config(families, VNI=vni), host()))[0].name) == 15
    else:
        with pytest.raises(Fatal, match="VNI"):
            VxlanBackend(config(families, VNI=vni), host())


@pytest.mark.parametrize("name", ["vxlan", "VXLAN"])
def test_the_backend_is_found_by_name(name: str) -> None:
    assert registry.load(name) is VxlanBackend
