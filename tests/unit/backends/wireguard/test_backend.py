"""The WireGuard backend's decisions."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends import registry
from flanneld.backends.contract import Host, OtherBackend
from flanneld.backends.wireguard import backend, keys
from flanneld.backends.wireguard.backend import WireGuardBackend
from flanneld.backends.wireguard.keys import AllowedIp, DeviceKey, WgPeer
from flanneld.config import parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs, Secret, Uplink
from flanneld.state.resources import Address, Blackhole, Resource, Route, WireGuard
from flanneld.subnet.codec import format_attrs, parse_attrs
from tests.unit.mutations import JSON

V4, V6, DUAL = (True, False), (False, True), (True, True)
Families = tuple[bool, bool]

PRIVATE = keys.private_key(bytes(range(32)))
PUBLIC = keys.public_key(PRIVATE)
THEIRS = keys.public_key(keys.private_key(bytes(range(1, 33))))
OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"), IPv6Network("fd00:0:0:5::/64"))
SUBNET, SUBNET_V6 = IPv4Network("10.1.6.0/24"), IPv6Network("fd00:0:0:6::/64")
NETWORK, NETWORK_V6 = IPv4Network("10.1.0.0/16"), IPv6Network("fd00::/48")
PSK = bytes(range(100, 132))


def made(families: Families = V4, uplink: dict[str, Any] | None = None, **options: Any) -> WireGuardBackend:
    network = {"EnableIPv4": families[0], "EnableIPv6": families[1], "Network": str(NETWORK)}
    config = parse(
        json.dumps({**network, "IPv6Network": str(NETWORK_V6), "Backend": {"Type": "wireguard", **options}})
    )
    known: dict[str, Any] = {}
    if families[0]:
        known |= {"address": IPv4Address("192.0.2.5"), "public_ip": IPv4Address("192.0.2.5")}
    if families[1]:
        known |= {"ipv6_address": IPv6Address("fd77::5"), "public_ipv6": IPv6Address("fd77::5")}
    return WireGuardBackend(config, host(Uplink("eth0", 2, 1500, **(known | (uplink or {}))), PRIVATE))


def host(uplink: Uplink, identity: Secret | None, **services: Any) -> Host:
    return Host(uplink, None, lambda _: None, lambda _: None, bytes, identity=identity, **services)


def data(port: int | None = 51820, key: bytes = THEIRS) -> dict[str, Any]:
    return {"PublicKey": keys.text_of(key)} | ({} if port is None else {"Port": port})


def peer(families: Families = V4, **attrs: Any) -> Lease:
    known: dict[str, Any] = {"backend_type": "wireguard"}
    if families[0]:
        known |= {"public_ip": IPv4Address("192.0.2.6"), "backend_data": data()}
    if families[1]:
        known |= {"public_ipv6": IPv6Address("fd77::6"), "backend_v6_data": data(51821)}
    return Lease(
        LeaseAttrs(**(known | attrs)), SUBNET if families[0] else None, SUBNET_V6 if families[1] else None
    )


def leads(made_backend: WireGuardBackend, lease: Lease) -> list[Resource]:
    return list(made_backend.peer(OWN, lease))


def called_at(made_backend: WireGuardBackend, lease: Lease) -> list[tuple[str, str, int]]:
    """Return device, address and port of each peer that a lease leads to."""
    return [
        (each.device, str(each.endpoint), each.port)
        for each in leads(made_backend, lease)
        if isinstance(each, WgPeer)
    ]


# ---- the lease ------------------------------------------------------------------------------------


def test_the_lease_is_byte_for_byte_that_of_go() -> None:
    text = format_attrs(made().attributes(), with_ipv6=False)
    key = keys.text_of(PUBLIC)
    assert text == (
        '{"PublicIP":"192.0.2.5","BackendType":"wireguard",'
        f'"BackendData":{{"PublicKey":"{key}","Port":51820}}}}'
    )
    text = format_attrs(made(DUAL).attributes(), with_ipv6=True)
    assert text == (
        '{"PublicIP":"192.0.2.5","PublicIPv6":"fd77::5","BackendType":"wireguard",'
        f'"BackendData":{{"PublicKey":"{key}","Port":51820}},'
        f'"BackendV6Data":{{"PublicKey":"{key}","Port":51821}}}}'
    )


@pytest.mark.parametrize("mode", ["separate", "auto", "ipv4", "ipv6"])
def test_each_mode_announces_the_ports_of_the_config(mode: str) -> None:
    attrs = made(DUAL, Mode=mode, ListenPort=1000, ListenPortV6=2000).attributes()
    assert (attrs.backend_data["Port"], attrs.backend_v6_data["Port"]) == (1000, 2000)


def test_a_family_that_is_disabled_is_not_announced() -> None:
    assert made(V6).attributes().backend_data is None
    assert made(V4).attributes().backend_v6_data is None


@pytest.mark.parametrize("fields", [{}, {"Port": 0}, {"port": 0}], ids=["no port", "port 0", "another case"])
def test_a_peer_that_names_no_port_has_ours(fields: dict[str, int]) -> None:
    lease = peer(backend_data={"publickey": keys.text_of(THEIRS), **fields})
    assert called_at(made(ListenPort=1234), lease) == [("flannel-wg", "192.0.2.6", 1234)]


# ---- devices and guards ---------------------------------------------------------------------------


def test_guard_route_makes_unknown_destinations_unreachable() -> None:
    guards = [each for each in made(DUAL).local(OWN) if isinstance(each, Blackhole)]
    assert [str(each) for each in guards] == [f"unreachable {NETWORK}", f"unreachable {NETWORK_V6}"]


def test_either_family_has_a_device_in_mode_separate() -> None:
    found = list(made(DUAL).local(OWN))[2:]
    desired: list[Resource] = [
        WireGuard("flannel-wg", 1420),
        DeviceKey("flannel-wg", PRIVATE, PUBLIC, 51820),
        WireGuard("flannel-wg-v6", 1420),
        DeviceKey("flannel-wg-v6", PRIVATE, PUBLIC, 51821),
        Address("flannel-wg", IPv4Address("10.1.5.0")),
        Address("flannel-wg-v6", IPv6Address("fd00:0:0:5::")),
    ]
    assert found == desired


@pytest.mark.parametrize("mode", ["auto", "ipv4", "ipv6"])
def test_both_families_share_a_device_in_any_other_mode(mode: str) -> None:
    found = list(made(DUAL, Mode=mode).local(OWN))[2:]
    desired: list[Resource] = [
        WireGuard("flannel-wg", 1420),
        DeviceKey("flannel-wg", PRIVATE, PUBLIC, 51820),
        Address("flannel-wg", IPv4Address("10.1.5.0")),
        Address("flannel-wg", IPv6Address("fd00:0:0:5::")),
    ]
    assert found == desired


@pytest.mark.parametrize(("options", "mtu"), [({}, 1420), ({"MTU": 9000}, 8920), ({"MTU": 0}, 1420)])
def test_80_bytes_of_the_mtu_are_taken(options: dict[str, Any], mtu: int) -> None:
    assert made(**options).mtu == mtu


# ---- peers ----------------------------------------------------------------------------------------


def test_a_peer_has_an_allowed_ip_and_a_route() -> None:
    text = keys.text_of(PSK)
    desired: list[Resource] = [
        WgPeer("flannel-wg", THEIRS, IPv4Address("192.0.2.6"), 51820, 25, Secret(PSK)),
        AllowedIp("flannel-wg", SUBNET, THEIRS),
        Route(SUBNET, "flannel-wg"),
    ]
    assert leads(made(PSK=text, PersistentKeepaliveInterval=25), peer()) == desired


def test_the_families_are_separate_peers_in_mode_separate() -> None:
    desired: list[Resource] = [
        WgPeer("flannel-wg", THEIRS, IPv4Address("192.0.2.6"), 51820),
        AllowedIp("flannel-wg", SUBNET, THEIRS),
        Route(SUBNET, "flannel-wg"),
        WgPeer("flannel-wg-v6", THEIRS, IPv6Address("fd77::6"), 51821),
        AllowedIp("flannel-wg-v6", SUBNET_V6, THEIRS),
        Route(SUBNET_V6, "flannel-wg-v6"),
    ]
    assert leads(made(DUAL), peer(DUAL)) == desired


def test_the_families_are_one_peer_in_mode_ipv4() -> None:
    desired: list[Resource] = [
        WgPeer("flannel-wg", THEIRS, IPv4Address("192.0.2.6"), 51820),
        AllowedIp("flannel-wg", SUBNET, THEIRS),
        AllowedIp("flannel-wg", SUBNET_V6, THEIRS),
        Route(SUBNET, "flannel-wg"),
        Route(SUBNET_V6, "flannel-wg"),
    ]
    assert leads(made(DUAL, Mode="ipv4"), peer(DUAL)) == desired


@pytest.mark.parametrize("mode", ["ipv4", "ipv6", "auto"])
def test_one_peer_for_both_families_has_the_key_of_the_ipv6_data_as_in_go(mode: str) -> None:
    (known,) = (
        each
        for each in leads(made(DUAL, Mode=mode), peer(DUAL, backend_data=data(key=bytes(31) + b"\1")))
        if isinstance(each, WgPeer)
    )
    assert known.public_key == THEIRS


PUBLIC_V4, PUBLIC_V6 = IPv4Address("198.51.100.6"), IPv6Address("2001:db8::6")
OURS_V6 = {"public_ipv6": IPv6Address("2001:db8::5")}


@pytest.mark.parametrize(
    ("mode", "uplink", "attrs", "address"),
    [
        ("ipv4", {}, {}, "192.168.0.6"),
        ("ipv6", {}, {}, "fd77::6"),
        ("auto", {}, {}, "192.168.0.6"),
        ("auto", {}, {"public_ip": PUBLIC_V4}, "198.51.100.6"),
        ("auto", OURS_V6, {"public_ip": PUBLIC_V4, "public_ipv6": PUBLIC_V6}, "198.51.100.6"),
        ("auto", OURS_V6, {"public_ipv6": PUBLIC_V6}, "2001:db8::6"),
        ("auto", OURS_V6, {}, "192.168.0.6"),
        ("auto", {}, {"public_ipv6": PUBLIC_V6}, "192.168.0.6"),
        ("auto", OURS_V6, {"public_ipv6": None}, "192.168.0.6"),
        ("auto", OURS_V6, {"public_ip": None}, "fd77::6"),
    ],
    ids=[
        "ipv4", "ipv6", "all private", "their IPv4 public", "all but IPv4 of ours public", "IPv6 public",
        "their IPv6 private", "our IPv6 private", "they have no IPv6", "they have no IPv4",
    ],
)  # fmt: skip
def test_the_endpoint_is_chosen_as_in_go(
    mode: str, uplink: dict[str, Any], attrs: dict[str, Any], address: str
) -> None:
    lease = peer(DUAL, **({"public_ip": IPv4Address("192.168.0.6")} | attrs))
    # The one device listens at ListenPort, for either family.
    assert called_at(made(DUAL, uplink, Mode=mode), lease) == [("flannel-wg", address, 51820)]


def test_a_network_with_ipv6_only_works_in_mode_ipv6() -> None:
    desired: list[Resource] = [
        WgPeer("flannel-wg", THEIRS, IPv6Address("fd77::6"), 51820),
        AllowedIp("flannel-wg", SUBNET_V6, THEIRS),
        Route(SUBNET_V6, "flannel-wg"),
    ]
    assert leads(made(V6, Mode="ipv6"), peer(V6)) == desired


def test_a_family_that_the_peer_lacks_is_left_out() -> None:
    assert called_at(made(DUAL), peer(V4)) == [("flannel-wg", "192.0.2.6", 51820)]
    assert called_at(made(V4), peer(DUAL)) == [("flannel-wg", "192.0.2.6", 51820)]


def test_a_peer_without_any_address_lacks_that_of_ipv6_in_mode_auto() -> None:
    with pytest.raises(Refused, match="announces no public IPv6 address"):
        leads(made(DUAL, Mode="auto"), peer(DUAL, public_ip=None, public_ipv6=None))


def test_the_lease_of_another_backend_leads_nowhere() -> None:
    with pytest.raises(OtherBackend):
        leads(made(), peer(backend_type="vxlan"))


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"backend_data": None}, "the key has 0 bytes"),
        ({"backend_data": "key"}, "must be an object"),
        ({"backend_data": {"PublicKey": 5}}, "must be a string"),
        ({"backend_data": {"PublicKey": "AAAA"}}, "the key has 3 bytes"),
        ({"backend_data": data(70000)}, "port 70000"),
        ({"backend_data": {**data(), "Port": "1"}}, "must be a whole number"),
        ({"backend_data": data(key=PUBLIC)}, "our own public key; .* remove the key file"),
        ({"public_ip": None}, "no public IPv4"),
        ({"public_ip": IPv4Address("127.0.0.1")}, "no host's"),
        ({"public_ip": IPv4Address("192.0.2.5")}, "our own public IP"),
    ],
)
def test_a_lease_that_makes_no_sense_is_refused(attrs: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        leads(made(), peer(**attrs))


@given(JSON, JSON)
def test_no_lease_data_are_more_than_refused(v4: Any, v6: Any) -> None:
    lease = peer(DUAL, backend_data=v4, backend_v6_data=v6)
    for mode in ("separate", "auto"):
        try:
            leads(made(DUAL, Mode=mode), lease)
        except Refused:
            continue
    made().is_self(lease.attrs)


# ---- a port of this node alone ---------------------------------------------------------------------


def with_port(port: int, families: Families = V4, **options: Any) -> WireGuardBackend:
    network = {"EnableIPv4": families[0], "EnableIPv6": families[1], "Network": str(NETWORK)}
    backend = {"Type": "wireguard", **options}
    config = parse(json.dumps({**network, "IPv6Network": str(NETWORK_V6), "Backend": backend}))
    v4 = (IPv4Address("10.9.9.5"), IPv4Address("203.0.113.1")) if families[0] else (None, None)
    v6 = (IPv6Address("fd77::5"), IPv6Address("fd77::5")) if families[1] else (None, None)
    uplink = Uplink("eth0", 2, 1500, *v4, *v6)
    return WireGuardBackend(config, host(uplink, PRIVATE, listen_port=port))


def test_a_port_of_its_own_is_listened_at_and_announced() -> None:
    made_backend = with_port(1000, DUAL)
    attrs = made_backend.attributes()
    assert (attrs.backend_data["Port"], attrs.backend_v6_data["Port"]) == (1000, 51821)
    ports = {each.device: each.listen_port for each in made_backend.local(OWN) if isinstance(each, DeviceKey)}
    assert ports == {"flannel-wg": 1000, "flannel-wg-v6": 51821}


def test_a_peer_that_names_no_port_has_the_cluster_s_not_ours() -> None:
    assert called_at(with_port(1000), peer(backend_data=data(None))) == [("flannel-wg", "192.0.2.6", 51820)]


def test_a_neighbour_behind_our_nat_is_reached_at_the_cluster_s_port() -> None:
    lease = peer(public_ip=IPv4Address("203.0.113.1"))
    assert called_at(with_port(1000), lease) == [("flannel-wg", "203.0.113.1", 51820)]
    with pytest.raises(Refused, match="our own port 1000"):
        leads(with_port(1000), peer(public_ip=IPv4Address("203.0.113.1"), backend_data=data(1000)))


@pytest.mark.parametrize(("port", "families"), [(51821, DUAL), (1000, V6)])
def test_a_port_that_peers_would_not_learn_of_is_refused(port: int, families: Families) -> None:
    with pytest.raises(Fatal, match="-wireguard-port"):
        with_port(port, families)


# ---- several nodes behind one public IP ------------------------------------------------------------

BEHIND_NAT = {"address": IPv4Address("10.9.9.5"), "public_ip": IPv4Address("203.0.113.1")}


@pytest.mark.parametrize("public", ["203.0.113.1", "5.6.7.8"])
def test_nodes_behind_one_public_ip_are_told_apart_by_their_ports(public: str) -> None:
    nat, near = BEHIND_NAT | {"public_ip": IPv4Address(public)}, peer(public_ip=IPv4Address(public))
    other_port = peer(public_ip=IPv4Address(public), backend_data=data(1000))
    assert called_at(made(uplink=nat), other_port) == [("flannel-wg", public, 1000)]
    with pytest.raises(
        Refused, match=rf"our own public IP {public} and our own port 51820; .* -wireguard-port"
    ):
        leads(made(uplink=nat), near)


@pytest.mark.parametrize(
    ("uplink", "attrs", "ours"),
    [
        ({}, {"public_ip": IPv4Address("192.0.2.5"), "backend_data": data()}, True),
        ({}, {"public_ip": IPv4Address("192.0.2.6"), "backend_data": data(key=PUBLIC)}, True),
        ({}, {"public_ip": IPv4Address("192.0.2.6"), "backend_data": data()}, False),
        ({}, {"public_ip": IPv4Address("192.0.2.5"), "backend_type": "vxlan"}, True),
        (BEHIND_NAT, {"public_ip": IPv4Address("203.0.113.1"), "backend_data": data()}, False),
        (BEHIND_NAT, {"public_ip": IPv4Address("203.0.113.9"), "backend_data": data(key=PUBLIC)}, True),
        (BEHIND_NAT, {"public_ip": IPv4Address("203.0.113.1"), "backend_type": "vxlan"}, False),
        ({}, {"public_ip": IPv4Address("192.0.2.6"), "backend_data": "nonsense"}, False),
    ],
    ids=[
        "our address, another key", "our key elsewhere", "a stranger", "our address, another backend",
        "another node behind our NAT", "our key behind another NAT", "no key behind our NAT", "no key",
    ],
)  # fmt: skip
def test_our_lease_is_known_by_its_key(uplink: dict[str, Any], attrs: dict[str, Any], ours: bool) -> None:
    known = LeaseAttrs(**({"backend_type": "wireguard"} | attrs))
    assert made(uplink=uplink).is_self(known) is ours


def test_our_lease_is_known_by_its_key_of_either_family() -> None:
    nonsense = {"backend_data": "nonsense", "backend_v6_data": data(key=PUBLIC)}
    elsewhere = LeaseAttrs(IPv4Address("192.0.2.6"), IPv6Address("fd77::6"), "wireguard", **nonsense)
    assert with_port(0, DUAL).is_self(elsewhere)


# ---- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ListenPort": 0}, "Backend.ListenPort is 0; set it to a number from 1 to 65535"),
        ({"ListenPort": 65536}, "Backend.ListenPort is 65536"),
        ({"ListenPortV6": -1}, "Backend.ListenPortV6 is -1"),
        ({"MTU": 100}, "an uplink MTU of 100 leaves 20 bytes"),
        ({"PersistentKeepaliveInterval": "25"}, "must be a whole number"),
        ({"PersistentKeepaliveInterval": 70000}, "PersistentKeepaliveInterval is 70000"),
        ({"PSK": "short"}, "could not parse psk: the key is no base64; make one with `wg genpsk`"),
        ({"PSK": 5}, "must be a string"),
        ({"Mode": "Auto"}, 'Backend.Mode is "Auto", no valid Mode; set it to one of: separate, auto'),
        ({"Mode": ""}, "no valid Mode"),
        ({"Mode": "ipv6"}, "eth0 has no IPv6 address for Backend.Mode ipv6"),
    ],
)
def test_a_config_that_cannot_work_ends_the_daemon(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Fatal, match=re.escape(reason)):
        made(**options)


@pytest.mark.parametrize("numbers", [(1, 65535, 0, 0), (65535, 1, 65535, 65535)])
def test_the_smallest_and_the_largest_numbers_are_taken(numbers: tuple[int, ...]) -> None:
    names = ("ListenPort", "ListenPortV6", "MTU", "PersistentKeepaliveInterval")
    options: dict[str, Any] = dict(zip(names, numbers, strict=True))
    made(DUAL, **options)


def test_two_devices_need_two_ports() -> None:
    with pytest.raises(Fatal, match="are both 5000"):
        made(DUAL, ListenPort=5000, ListenPortV6=5000)
    made(DUAL, ListenPort=5000, ListenPortV6=5000, Mode="auto")
    made(V4, ListenPort=5000, ListenPortV6=5000)


def test_ipv6_needs_room_for_1280_bytes() -> None:
    made(V4, MTU=1300)
    with pytest.raises(Fatal, match="leaves 1220 bytes"):
        made(DUAL, MTU=1300)


def test_no_key_is_shown() -> None:
    text = keys.text_of(PSK)
    shown = [*made(PSK=text).local(OWN), *leads(made(PSK=text), peer())]
    told = "".join(f"{each}{each!r}{each.key}" for each in shown)
    assert text not in told
    assert keys.text_of(PRIVATE.value) not in told
    assert repr(PRIVATE.value)[2:-1] not in told
    assert repr(PSK)[2:-1] not in told


# ---- the key file ---------------------------------------------------------------------------------


def identity(content: bytes | None) -> Secret:
    """Return the identity of a node that has a key file, or none."""
    asked = []

    def secret(name: str, make: Any, *, variable: str) -> bytes:
        asked.append((name, variable))
        written: bytes = make() if content is None else content
        return written

    config = parse(json.dumps({"Network": str(NETWORK), "Backend": {"Type": "wireguard"}}))
    address = IPv4Address("192.0.2.5")
    made_backend = registry.load("WireGuard")(
        config, host(Uplink("eth0", 2, 1500, address, address), None, secret=secret)
    )
    found = made_backend.identity()
    assert asked == [("wgkey", "WIREGUARD_KEY_FILE")]
    assert isinstance(found, Secret)
    return found


def test_the_key_of_an_earlier_run_is_used() -> None:
    assert identity(keys.text_of(PRIVATE.value).encode()) == PRIVATE
    assert identity(keys.text_of(PRIVATE.value).encode() + b"\n") == PRIVATE


def test_a_new_key_is_made_of_random_bytes() -> None:
    assert identity(None) == keys.private_key(bytes(32))


@pytest.mark.parametrize("content", [b"nonsense", b"\xff\xfe", b"AAAA"])
def test_a_key_file_that_makes_no_sense_ends_the_daemon(content: bytes) -> None:
    with pytest.raises(Fatal, match=r"could not parse private key from file: .*; put 32 bytes") as failed:
        identity(content)
    assert content.decode(errors="replace") not in str(failed.value)


@given(st.binary(max_size=80) | st.binary(min_size=31, max_size=33).map(b64encode))
def test_no_key_file_is_more_than_refused_and_none_is_shown(content: bytes) -> None:
    said = ""
    try:
        assert len(identity(content).value) == 32
    except Fatal as failed:
        said = str(failed)
    assert len(content) < 20 or content.decode(errors="replace") not in said


@given(st.text(max_size=80) | st.binary(min_size=31, max_size=33).map(lambda raw: b64encode(raw).decode()))
def test_no_psk_of_the_config_is_more_than_refused_and_none_is_shown(text: str) -> None:
    said = ""
    try:
        made(PSK=text)
    except Fatal as failed:
        said = str(failed)
    assert len(text) < 20 or text not in said


def test_a_lease_is_read_as_it_is_written() -> None:
    attrs = made(DUAL).attributes()
    assert parse_attrs(format_attrs(attrs, with_ipv6=True)) == attrs
    assert backend.peer_data(attrs.backend_data) == (PUBLIC, 51820)


# ---- a mesh -------------------------------------------------------------------------------------


def test_peer_of_a_mesh_at_our_own_private_address_is_searched_for() -> None:
    """Two sites may use one private network."""
    here = IPv4Address("192.168.1.5")
    uplink = {"address": here, "public_ip": here}
    lease = peer(public_ip=here)
    with pytest.raises(Refused, match="announces our own public IP"):
        leads(made(uplink=uplink), lease)
    mesh = made(uplink=uplink, Mesh=True)
    (found,) = (each for each in leads(mesh, lease) if isinstance(each, WgPeer))
    assert (found.endpoint, found.port) == (None, 51820)
    assert [(device, port) for device, _, port in called_at(mesh, peer())] == [("flannel-wg", 51820)]


@pytest.mark.parametrize(("address", "is_ours"), [("192.168.1.5", False), ("203.0.113.5", True)])
def test_in_a_mesh_a_private_address_does_not_tell_our_own_lease(address: str, is_ours: bool) -> None:
    here = IPv4Address(address)
    uplink, lease = {"address": here, "public_ip": here}, peer(public_ip=here)
    assert made(uplink=uplink).is_self(lease.attrs)
    assert made(uplink=uplink, Mesh=True).is_self(lease.attrs) is is_ours
    own = peer(public_ip=here, backend_data=data(key=PUBLIC))
    assert made(uplink=uplink, Mesh=True).is_self(own.attrs)


def test_table_has_a_mesh_only_when_it_is_switched_on() -> None:
    (table,) = made().tables()
    assert getattr(table, "mesh", None) is None
    (table,) = made(Mesh=True, ListenPort=5000).tables()
    assert getattr(table, "mesh").ports[4] == 5000  # noqa: B009
