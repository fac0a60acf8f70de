"""Two backends on one node: who is reached by which, and what both announce."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import (
    Backend,
    ExitPolicy,
    Host,
    OtherBackend,
    announced,
    require_type,
    with_also,
)
from flanneld.backends.host_gw import HostGw
from flanneld.backends.ipsec.tables import StaleCharonTable
from flanneld.backends.switching import Switching, refuse_pair
from flanneld.backends.vxlan import vtep_mac
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.backend import peer_data
from flanneld.compat.json import Fields
from flanneld.config import Config, ConfigError, parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.reconcile.host_watch import leaks
from flanneld.state.resources import Blackhole, FdbEntry, Kind, Link, Neighbor, Resource, Route
from flanneld.state.table import Table
from flanneld.subnet.codec import format_attrs, parse_attrs
from flanneld.subnet.kube.nodes import KubeNode, wanted_notes
from flanneld.subnet.kube.nodes import announced as read_annotations

OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
SUBNET = IPv4Network("10.1.6.0/24")
PUBLIC = IPv4Address("192.0.2.6")
PRIVATE = keys.private_key(bytes(range(32)))
THEIRS = keys.text_of(keys.public_key(keys.private_key(bytes(range(1, 33)))))

VXLAN = LeaseAttrs(PUBLIC, None, "vxlan", {"VNI": 1, "VtepMAC": "0a:00:00:00:00:06"})
WIREGUARD = LeaseAttrs(PUBLIC, None, "wireguard", {"PublicKey": THEIRS, "Port": 51820})
HOST_GW = LeaseAttrs(PUBLIC, None, "host-gw")


def made(first: str, second: str, stored: LeaseAttrs | None = None, **options: Any) -> Backend:
    backend = {"Type": first, "Also": {"Type": second, **options}}
    config = parse(json.dumps({"Network": "10.1.0.0/16", "Backend": backend}))
    address = IPv4Address("192.0.2.5")
    uplink = Uplink("eth0", 2, 1500, address, address)
    identity = tuple(
        {"wireguard": PRIVATE, "vxlan": {4: "0a:00:00:00:00:05"}}.get(name) for name in (first, second)
    )
    host = Host(uplink, stored, lambda _: None, lambda _: None, bytes, identity=identity)
    return registry.factory_for(config)(config, host)


def leads(backend: Backend, attrs: LeaseAttrs) -> list[Resource]:
    return list(backend.peer(OWN, Lease(attrs, SUBNET)))


def ways(backend: Backend, attrs: LeaseAttrs) -> list[str]:
    return [each.device for each in leads(backend, attrs) if isinstance(each, Route)]


# ---- what is announced ----------------------------------------------------------------------------


def test_the_second_backend_is_in_a_key_of_the_first_ones_data() -> None:
    attrs = made("vxlan", "wireguard").attributes()
    assert attrs.backend_type == "vxlan"
    assert list(attrs.backend_data) == ["VNI", "VtepMAC", "Also"]
    assert attrs.backend_data["Also"] == {
        "Type": "wireguard",
        "Data": {"PublicKey": keys.text_of(keys.public_key(PRIVATE)), "Port": 51820},
    }


@pytest.mark.parametrize(("first", "second"), [(VXLAN, WIREGUARD), (WIREGUARD, VXLAN), (HOST_GW, VXLAN)])
def test_go_reads_the_first_ones_data_as_if_they_were_alone(first: LeaseAttrs, second: LeaseAttrs) -> None:
    """Go fills a struct by names in any case, and ignores keys for which it has no field."""
    stored = parse_attrs(format_attrs(with_also(first, second), with_ipv6=False))
    names = {"vxlan": ("VNI", "VtepMAC", "GBP"), "wireguard": ("PublicKey", "Port"), "host-gw": ()}
    both = Fields(stored.backend_data)
    for name in names[first.backend_type]:
        assert both.raw(name) == Fields(first.backend_data).raw(name)
    assert [key for key, _ in both.unread()] == ["Also"]


@pytest.mark.parametrize(("first", "second"), [(VXLAN, WIREGUARD), (WIREGUARD, VXLAN), (VXLAN, HOST_GW)])
def test_both_announcements_are_read_back_from_the_lease(first: LeaseAttrs, second: LeaseAttrs) -> None:
    stored = parse_attrs(format_attrs(with_also(first, second), with_ipv6=True))
    assert announced(stored, second.backend_type) == second
    read = announced(stored, first.backend_type)
    assert read is stored
    assert announced(stored, "ipip") is None
    if first is VXLAN:
        assert vtep_mac(stored.backend_data) == vtep_mac(VXLAN.backend_data)
    if first is WIREGUARD:
        assert peer_data(stored.backend_data) == peer_data(WIREGUARD.backend_data)


@pytest.mark.parametrize(("first", "second"), [(VXLAN, WIREGUARD), (HOST_GW, VXLAN)])
def test_annotations_of_kubernetes_have_both(first: LeaseAttrs, second: LeaseAttrs) -> None:
    both = with_also(first, second)
    node = KubeNode("n1", "some-uid", ("10.1.6.0/24",), {})
    told = KubeNode("n1", "some-uid", ("10.1.6.0/24",), wanted_notes(both, node))
    config = parse('{"Network": "10.1.0.0/16", "Backend": {"Type": "vxlan"}}')
    assert read_annotations(told, config) == both


def test_both_families_of_both_are_announced() -> None:
    public = IPv6Address("fd77::6")
    vxlan = replace(VXLAN, public_ipv6=public, backend_v6_data={"VNI": 1, "VtepMAC": "0a:00:00:00:06:06"})
    wireguard = replace(WIREGUARD, public_ipv6=public, backend_v6_data={"PublicKey": THEIRS, "Port": 51821})
    both = parse_attrs(format_attrs(with_also(vxlan, wireguard), with_ipv6=True))
    assert both.backend_v6_data == vxlan.backend_v6_data
    assert announced(both, "wireguard") == wireguard


@pytest.mark.parametrize(
    ("backend_type", "data"), [("vxlan", {"VNI": 1, "VtepMAC": "0a:00:00:00:00:06"}), ("host-gw", None)]
)
def test_without_ipv4_the_data_of_ipv6_have_the_key(backend_type: str, data: dict[str, Any] | None) -> None:
    public = IPv6Address("fd77::6")
    first = LeaseAttrs(None, public, backend_type, None, data)
    wireguard = LeaseAttrs(None, public, "wireguard", None, {"PublicKey": THEIRS, "Port": 51821})
    both = with_also(first, wireguard)
    assert both.backend_data is None
    assert {**both.backend_v6_data, "Also": None} == {**(data or {}), "Also": None}
    assert announced(both, "wireguard") == wireguard


@pytest.mark.parametrize("also", [None, "wireguard", [], {}, {"Type": 7}, {"Type": None, "Data": 1}])
def test_an_announcement_that_makes_no_sense_is_none(also: Any) -> None:
    attrs = LeaseAttrs(PUBLIC, None, "vxlan", {"VtepMAC": "0a:00:00:00:00:06", "Also": also})
    assert announced(attrs, "wireguard") is None


def test_data_of_the_second_that_make_no_sense_are_refused() -> None:
    attrs = with_also(VXLAN, LeaseAttrs(PUBLIC, None, "wireguard", {"PublicKey": "short"}))
    with pytest.raises(Refused):
        leads(made("wireguard", "vxlan"), attrs)


# ---- who is reached by which ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attrs", "way"),
    [
        (VXLAN, "flannel.1"),
        (WIREGUARD, "flannel-wg"),
        (with_also(VXLAN, WIREGUARD), "flannel.1"),
        (with_also(WIREGUARD, VXLAN), "flannel.1"),
    ],
    ids=["phase 0", "phase 3", "phase 1", "phase 2"],
)
def test_in_phase_1_the_former_backend_leads_to_all_that_announce_it(attrs: LeaseAttrs, way: str) -> None:
    assert ways(made("vxlan", "wireguard"), attrs) == [way]


@pytest.mark.parametrize(
    "attrs",
    [WIREGUARD, with_also(VXLAN, WIREGUARD), with_also(WIREGUARD, VXLAN)],
    ids=["phase 3", "phase 1", "phase 2"],
)
def test_in_phase_2_the_new_backend_leads_to_all_that_announce_it(attrs: LeaseAttrs) -> None:
    assert ways(made("wireguard", "vxlan"), attrs) == ["flannel-wg"]


def test_an_encrypted_network_refuses_peers_that_are_reached_in_the_clear_only() -> None:
    with pytest.raises(OtherBackend, match=r"would be reached unencrypted; .*AllowUnencryptedPeers"):
        leads(made("wireguard", "vxlan"), VXLAN)
    assert ways(made("wireguard", "vxlan", AllowUnencryptedPeers=True), VXLAN) == ["flannel.1"]
    assert ways(made("vxlan", "host-gw"), HOST_GW) == ["eth0"]


def test_a_peer_that_announces_neither_is_not_reached() -> None:
    with pytest.raises(OtherBackend):
        leads(made("wireguard", "vxlan", AllowUnencryptedPeers=True), HOST_GW)


def test_entries_of_the_way_that_is_not_taken_are_there() -> None:
    found = leads(made("wireguard", "vxlan"), with_also(VXLAN, WIREGUARD))
    assert {type(each).__name__ for each in found} == {"WgPeer", "AllowedIp", "Route", "Neighbor", "FdbEntry"}
    assert [each for each in found if isinstance(each, Neighbor | FdbEntry)] == [
        each for each in leads(made("vxlan", "host-gw"), VXLAN) if each.kind is not Kind.ROUTE
    ]


def test_a_node_with_one_backend_reads_what_is_announced_beside_another() -> None:
    both = Lease(with_also(VXLAN, WIREGUARD), SUBNET)
    assert require_type(both, "wireguard").attrs == WIREGUARD
    assert require_type(both, "vxlan") is both


# ---- this node ------------------------------------------------------------------------------------


def test_both_devices_are_made_and_the_guard_is_the_first_ones() -> None:
    local = list(made("wireguard", "vxlan").local(OWN))
    assert [each.name for each in local if isinstance(each, Link)] == ["flannel-wg", "flannel.1"]
    assert [str(each) for each in local if isinstance(each, Blackhole)] == ["unreachable 10.1.0.0/16"]
    assert not any(isinstance(each, Blackhole) for each in made("vxlan", "wireguard").local(OWN))


def test_a_packet_fits_either_way() -> None:
    assert made("vxlan", "wireguard").mtu == made("wireguard", "vxlan").mtu == 1420
    assert made("host-gw", "vxlan").mtu == 1450


def test_the_network_is_encrypted_if_the_first_one_encrypts() -> None:
    assert made("wireguard", "vxlan").encrypts
    assert not made("vxlan", "wireguard").encrypts


@pytest.mark.parametrize(("first", "second"), [("vxlan", "wireguard"), ("wireguard", "vxlan")])
def test_a_node_knows_itself_by_its_key(first: str, second: str) -> None:
    backend: Any = made(first, second)
    assert backend.is_self(backend.attributes())
    assert backend.is_self(replace(backend.attributes(), public_ip=PUBLIC))
    assert backend.is_self(LeaseAttrs(IPv4Address("192.0.2.5"), None, "vxlan"))
    assert not backend.is_self(with_also(VXLAN, WIREGUARD))


def test_the_former_mac_is_read_from_where_it_was_announced() -> None:
    stored = with_also(WIREGUARD, VXLAN)
    backend = parse('{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","Also":{"Type":"host-gw"}}}')
    address = IPv4Address("192.0.2.5")
    host = Host(Uplink("eth0", 2, 1500, address, address), stored, lambda _: None, lambda _: None, bytes)
    made_backend = registry.factory_for(backend)(backend, host)
    assert made_backend.attributes().backend_data["VtepMAC"] == "0a:00:00:00:00:06"


def test_identities_of_both_are_decided_once() -> None:
    backend: Any = made("host-gw", "vxlan")
    assert backend.identity() == (None, {4: "0a:00:00:00:00:05"})


def test_a_node_has_what_both_need_of_the_host() -> None:
    backend = made("vxlan", "wireguard")
    assert [*backend.claims()] == [*made("vxlan", "host-gw").claims(), *made("host-gw", "wireguard").claims()]
    assert [each.name for each in backend.tables()] == ["wireguard"]
    assert [each.name for each in made("wireguard", "host-gw").tables()] == ["wireguard"]
    assert made("vxlan", "host-gw").tables() == ()


def test_only_the_unencrypted_device_of_an_encrypted_network_is_clear() -> None:
    assert made("wireguard", "vxlan").clear_devices(OWN) == {"flannel.1"}
    assert made("wireguard", "host-gw").clear_devices(OWN) == frozenset()
    assert made("vxlan", "wireguard").clear_devices(OWN) == frozenset()


class Kept(HostGw):
    """A backend with a table whose objects stay when the daemon ends."""

    def tables(self) -> tuple[Table, ...]:
        return (StaleCharonTable(),)


class Removed(Kept):
    exit_policy = ExitPolicy.REMOVE


class Bare(HostGw):
    """A backend without tables: nothing is there to be removed."""

    exit_policy = ExitPolicy.REMOVE


def config_of(backend_type: str) -> Config:
    return parse(json.dumps({"Network": "10.1.0.0/16", "Backend": {"Type": backend_type}}))


def test_two_backends_must_agree_on_what_is_removed_at_the_end() -> None:
    def refuse(one: type[Backend], other: type[Backend]) -> None:
        refuse_pair((config_of("one"), one), (config_of("other"), other))

    with pytest.raises(Fatal, match="one and other differ in what is removed when the daemon ends"):
        refuse(Kept, Removed)
    refuse(Kept, Kept)
    refuse(Kept, Bare)


@pytest.mark.parametrize(
    ("one", "other", "policy"),
    [
        (Kept, Bare, ExitPolicy.KEEP),
        (Bare, Kept, ExitPolicy.KEEP),
        (Removed, HostGw, ExitPolicy.REMOVE),
        (HostGw, Removed, ExitPolicy.REMOVE),
    ],
)
def test_the_end_is_that_of_the_backend_with_tables(
    one: type[HostGw], other: type[HostGw], policy: ExitPolicy
) -> None:
    host_gw = config_of("host-gw")
    address = IPv4Address("192.0.2.5")
    host = Host(Uplink("eth0", 2, 1500, address, address), None, lambda _: None, lambda _: None, bytes)
    pair = Switching("host-gw", one(host_gw, host), other(host_gw, host), allows_clear=False)
    assert pair.exit_policy is policy


# ---- refused configs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("vxlan", "udp", "udp cannot run beside another one"),
        ("udp", "vxlan", "udp cannot run beside another one"),
        ("vxlan", "extension", "extension cannot run beside another one"),
        ("alloc", "vxlan", "alloc cannot run beside another one"),
        ("vxlan", "VXLAN", "are both vxlan"),
        ("vxlan", "pigeon", "unknown backend type"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(first: str, second: str, problem: str) -> None:
    with pytest.raises(Fatal, match=problem):
        made(first, second)


def test_a_pair_at_one_port_is_refused() -> None:
    with pytest.raises(Fatal, match="vxlan and wireguard both use UDP port 8472; choose another"):
        made("vxlan", "wireguard", ListenPort=8472)
    made("vxlan", "wireguard", ListenPortV6=8472)  # of a family that the network has not


@pytest.mark.parametrize("also", ["{}", '{"VNI": 2}', '"wireguard"', "[]"])
def test_also_without_a_type_is_refused(also: str) -> None:
    with pytest.raises(ConfigError, match=r"Backend\.Also"):
        parse(f'{{"Network":"10.1.0.0/16","Backend":{{"Type":"vxlan","Also":{also}}}}}')


def test_a_wrong_permission_is_refused() -> None:
    with pytest.raises(Fatal, match="AllowUnencryptedPeers must be true or false"):
        made("wireguard", "vxlan", AllowUnencryptedPeers=1)


# ---- what must not stay ---------------------------------------------------------------------------

PAST = Route(SUBNET, "eth0", PUBLIC)
FORMER = Route(SUBNET, "flannel.1", SUBNET.network_address, onlink=True)
THROUGH = Route(SUBNET, "flannel-wg")
LINKS = frozenset({"flannel.1", "flannel-wg"})


@pytest.mark.parametrize("route", [PAST, FORMER])
def test_routes_of_the_former_backend_serve_until_all_peers_are_known(route: Route) -> None:
    backend = made("wireguard", "vxlan")
    assert backend.switches
    assert not leaks(route, backend, OWN, LINKS, synced=False)
    assert leaks(route, backend, OWN, LINKS, synced=True)
    assert not leaks(THROUGH, backend, OWN, LINKS, synced=True)


def test_nothing_leaks_where_nothing_is_encrypted() -> None:
    assert not any(
        leaks(route, made("vxlan", "wireguard"), OWN, LINKS, synced=True) for route in (PAST, FORMER, THROUGH)
    )
