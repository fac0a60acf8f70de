"""Resources as netlink messages: what we write, others read as meant, and we read what they write.

pyroute2, which knows the kernel's structures by heart, is the second opinion.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyroute2.netlink import rtnl as kernels
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network import routing
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import SeenRoute
from flanneld.network.rtnetlink.netlink import (
    HEADER,
    MalformedNetlink,
    attribute,
    attributes,
    message,
    messages,
    u32,
)
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    FdbEntry,
    Neighbor,
    Resource,
    Route,
    Vxlan,
)

DEVICE, INDEX = "flannel.1", 7
MAC = "02:00:00:00:00:01"
REQUEST, REPLACE, CREATE = 0x1, 0x100, 0x400
RTA_GATEWAY, RTA_PRIORITY, RTA_MULTIPATH, RTA_TABLE, RTA_VIA = 5, 6, 9, 15, 18
RTMSG_TOS, RTMSG_TABLE, RTMSG_TYPE = 3, 4, 7

Decoder = Callable[[bytes, int, int], object]


def name_of(index: int) -> str | None:
    return DEVICE if index == INDEX else None


def index_of(name: str) -> int:
    return {DEVICE: INDEX}[name]


def encode(resource: Resource, *, protocol: int = PROTO_BOOT, seq: int = 0, drop: bool = False) -> bytes:
    return rtnl.encode(resource, index_of, protocol, seq, drop=drop)


def told(resource: Resource, *, drop: bool = False, extra: bytes = b"") -> tuple[bytes, int, int]:
    """What we write as the kernel would tell it, which names the table and IPv6's metric."""
    data = encode(resource, drop=drop) + extra
    if isinstance(resource, Route):
        data += u32(RTA_TABLE, 254)
        if resource.destination.version == 6:
            data += u32(RTA_PRIORITY, 1024)
    return data, HEADER.size, len(data)


def altered(body: tuple[bytes, int, int], place: int, value: int) -> tuple[bytes, int, int]:
    data, offset, end = body
    return data[: offset + place] + bytes([value]) + data[offset + place + 1 :], offset, end


def read_by_pyroute2(form: Any, data: bytes) -> dict[str, Any]:
    message = form(data)
    message.decode()
    fields = {key: value for key, value in message.items() if key not in ("attrs", "header", "__pad")}
    return {**fields, **dict(message["attrs"])}


def route(destination: str, gateway: str | None = None, *, onlink: bool = False) -> Route:
    return Route(ip_network(destination), DEVICE, ip_address(gateway) if gateway else None, onlink=onlink)


ONE_OF_EACH: dict[str, Resource] = {
    "IPv4 route": route("10.1.6.0/24", "10.1.6.0", onlink=True),
    "IPv6 route": route("fd00:0:0:6::/64", "fd00:0:0:6::", onlink=True),
    "IPv4 neighbour": Neighbor(DEVICE, ip_address("10.1.6.0"), MAC),
    "IPv6 neighbour": Neighbor(DEVICE, ip_address("fd00:0:0:6::"), MAC),
    "IPv4 forwarding": FdbEntry(DEVICE, MAC, ip_address("192.168.0.2")),
    "IPv6 forwarding": FdbEntry(DEVICE, MAC, ip_address("fd77::2")),
    "IPv4 address": Address(DEVICE, ip_address("10.1.5.0")),
    "IPv6 address": Address(DEVICE, ip_address("fd00:0:0:5::")),
}
each = pytest.mark.parametrize("resource", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())


# ---- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "family"),
    [(ONE_OF_EACH["IPv4 route"], 2), (ONE_OF_EACH["IPv6 route"], 10)],
    ids=["IPv4", "IPv6"],
)
def test_a_route_is_written_as_meant(resource: Route, family: int) -> None:
    assert read_by_pyroute2(rtmsg, encode(resource, protocol=PROTO_FLANNEL)) == {
        "family": family,
        "dst_len": resource.destination.prefixlen,
        "src_len": 0,
        "tos": 0,
        "table": 254,
        "proto": 70,
        "scope": 0,
        "type": 1,
        "flags": 4,
        "RTA_DST": str(resource.destination.network_address),
        "RTA_GATEWAY": str(resource.gateway),
        "RTA_OIF": INDEX,
    }


def test_a_route_without_gateway_names_none() -> None:
    fields = read_by_pyroute2(rtmsg, encode(route("10.1.6.0/24")))
    assert ("RTA_GATEWAY" in fields, fields["flags"]) == (False, 0)


@pytest.mark.parametrize(("text", "metric"), [("10.1.6.0", None), ("fd00:0:0:6::", 1024)])
def test_a_route_is_removed_whoever_made_it_and_whatever_its_scope(text: str, metric: int | None) -> None:
    length = 24 if metric is None else 64
    fields = read_by_pyroute2(rtmsg, encode(route(f"{text}/{length}", text), drop=True))
    assert (fields["proto"], fields["scope"], fields.get("RTA_PRIORITY")) == (0, 255, metric)


@pytest.mark.parametrize(("text", "metric"), [("10.1.6.0/24", None), ("fd00:0:0:6::/64", 1024)])
def test_the_way_is_cleared_of_a_route_wherever_it_leads(text: str, metric: int | None) -> None:
    fields = read_by_pyroute2(rtmsg, rtnl.clear_route(ip_network(text), 3))
    assert f"{fields['RTA_DST']}/{fields['dst_len']}" == text
    assert (fields["RTA_OIF"], fields.get("RTA_GATEWAY"), fields["proto"]) == (0, None, 0)
    assert (fields["scope"], fields.get("RTA_PRIORITY")) == (255, metric)


@pytest.mark.parametrize(
    ("resource", "family"),
    [(ONE_OF_EACH["IPv4 neighbour"], 2), (ONE_OF_EACH["IPv6 neighbour"], 10)],
    ids=["IPv4", "IPv6"],
)
def test_a_neighbour_is_written_as_permanent(resource: Neighbor, family: int) -> None:
    assert read_by_pyroute2(ndmsg, encode(resource)) == {
        "family": family,
        "ifindex": INDEX,
        "state": 0x80,
        "flags": 0,
        "ndm_type": 1,
        "NDA_DST": str(resource.address),
        "NDA_LLADDR": MAC,
    }


@pytest.mark.parametrize("name", ["IPv4 forwarding", "IPv6 forwarding"])
def test_a_forwarding_entry_is_written_to_the_device_itself(name: str) -> None:
    resource = ONE_OF_EACH[name]
    assert isinstance(resource, FdbEntry)
    assert read_by_pyroute2(ndmsg, encode(resource)) == {
        "family": 7,
        "ifindex": INDEX,
        "state": 0x80,
        "flags": 0x02,
        "ndm_type": 0,
        "NDA_DST": str(resource.remote),
        "NDA_LLADDR": MAC,
    }


@pytest.mark.parametrize(("name", "family", "length"), [("IPv4 address", 2, 32), ("IPv6 address", 10, 128)])
def test_an_address_is_written_in_full_length(name: str, family: int, length: int) -> None:
    resource = ONE_OF_EACH[name]
    assert isinstance(resource, Address)
    fields = read_by_pyroute2(ifaddrmsg, encode(resource))
    assert (fields["family"], fields["prefixlen"], fields["index"]) == (family, length, INDEX)
    assert fields["IFA_LOCAL"] == fields["IFA_ADDRESS"] == str(resource.address)


@each
def test_a_put_replaces_and_a_drop_removes(resource: Resource) -> None:
    ((put, put_flags, seq, _, _, _),) = messages(encode(resource, seq=5))
    ((drop, drop_flags, _, _, _, _),) = messages(encode(resource, seq=5, drop=True))
    assert (put_flags, drop_flags, seq) == (REQUEST | CREATE | REPLACE, REQUEST, 5)
    assert drop == put + 1


@each
def test_messages_can_be_strung_together(resource: Resource) -> None:
    train = b"".join(encode(resource, seq=seq) for seq in range(3))
    assert [seq for _, _, seq, _, _, _ in messages(train)] == [0, 1, 2]


def test_an_unknown_device_is_the_callers_business() -> None:
    with pytest.raises(KeyError):
        encode(Route(ip_network("10.1.6.0/24"), "nowhere"))


def test_a_device_is_not_made_this_way() -> None:
    with pytest.raises(TypeError):
        encode(Vxlan("flannel.1", 1, 2, ip_address("192.168.0.1"), 8472, MAC, 1450))


# ---- reading what we wrote -----------------------------------------------------------------------

addresses: st.SearchStrategy[IPAddress] = st.ip_addresses()
macs = st.binary(min_size=6, max_size=6).filter(any).map(lambda raw: raw.hex(":"))


ipv4_addresses = st.ip_addresses(v=4)


@st.composite
def networks(draw: st.DrawFn, among: st.SearchStrategy[IPAddress] = addresses) -> IPNetwork:
    address = draw(among)
    length = draw(st.integers(0, address.max_prefixlen))
    network: IPNetwork = ip_network((address, length), strict=False)
    return network


@st.composite
def routes(draw: st.DrawFn) -> Route:
    network = draw(networks())
    gateway = draw(st.none() | st.ip_addresses(v=network.version))
    return Route(network, DEVICE, gateway, onlink=gateway is not None and draw(st.booleans()))


@given(routes())
def test_a_route_is_read_back_as_it_was_written(desired: Route) -> None:
    assert rtnl.decode_route(*told(desired), name_of) == SeenRoute(desired, PROTO_BOOT)


def as_dumped_route(route: Route) -> tuple[bytes, int, int]:
    """An IPv4 route with a gateway as the kernel dumps it: RTA_TABLE, RTA_DST, RTA_GATEWAY, RTA_OIF."""
    data, offset, end = told(route)
    found = attributes(data, offset + rtnl.RTMSG.size, end)
    found.setdefault(1, bytes(4))
    ordered = b"".join(attribute(kind, found[kind]) for kind in (15, 1, 5, 4))
    data = data[: offset + rtnl.RTMSG.size] + ordered
    return data, offset, len(data)


@given(
    st.builds(
        Route, networks(st.ip_addresses(v=4)), st.just(DEVICE), st.ip_addresses(v=4), onlink=st.booleans()
    ),
    st.integers(0, 43),
    st.integers(0, 255),
)
def test_the_short_way_reads_a_route_as_the_long_one_or_not_at_all(
    desired: Route, place: int, value: int
) -> None:
    whole = rtnl.decode_plain_route(*as_dumped_route(desired))
    assert whole == rtnl.PlainRoute(desired.key, PROTO_BOOT, int(desired.gateway or 0), INDEX, desired.onlink)
    body = altered(as_dumped_route(desired), place, value)
    plain = rtnl.decode_plain_route(*body)
    if plain is None or plain.key[3] not in range(33):  # the long way refuses such a length
        return
    seen = rtnl.decode_route(*body, str)
    if seen is not None and plain.key == seen.route.key:
        route = seen.route
        assert (plain.protocol, str(plain.index)) == (seen.protocol, route.device)
        assert (plain.gateway, plain.onlink) == (int(route.gateway or 0), route.onlink)


@given(
    st.builds(Neighbor, st.just(DEVICE), addresses, macs)
    | st.builds(FdbEntry, st.just(DEVICE), macs, addresses)
)
def test_a_neighbour_is_read_back_as_it_was_written(desired: Neighbor | FdbEntry) -> None:
    assert rtnl.decode_neighbor(*told(desired), name_of) == desired
    assert rtnl.decode_gone_neighbor(*told(desired, drop=True), name_of) == desired.key


def as_dumped(entry: Neighbor | FdbEntry) -> tuple[bytes, int, int]:
    """An entry as the kernel dumps it, with NDA_CACHEINFO, and NDA_PROBES of a neighbour."""
    if isinstance(entry, Neighbor):
        return told(entry, extra=u32(4, 0) + attribute(3, bytes(16)))
    data, offset, end = told(entry)
    head, target, mac = data[: offset + 12], data[offset + 12 : offset + 20], data[offset + 20 : end]
    data = head + mac + target + attribute(3, bytes(16))
    return data, offset, len(data)


@given(
    st.builds(Neighbor, st.just(DEVICE), ipv4_addresses, macs)
    | st.builds(FdbEntry, st.just(DEVICE), macs, ipv4_addresses),
    st.integers(0, 43),
    st.integers(0, 255),
)
def test_the_short_way_reads_a_neighbour_as_the_long_one_or_not_at_all(
    desired: Neighbor | FdbEntry, place: int, value: int
) -> None:
    expected = desired.mac if isinstance(desired, Neighbor) else int(desired.remote)
    assert rtnl.decode_plain_neighbor(*as_dumped(desired), name_of) == (desired.key, expected)
    body = altered(as_dumped(desired), place, value)
    key, leads_to = rtnl.decode_plain_neighbor(*body, name_of)
    if not key or not key[1] or key[2] == "00:00:00:00:00:00":  # never desired
        return
    seen = rtnl.decode_neighbor(*body, name_of)
    assert seen is not None
    assert (seen.key, leads_to) == (key, seen.mac if isinstance(seen, Neighbor) else int(seen.remote))
    assert not (isinstance(seen, FdbEntry) and seen.has_overrides)


@given(addresses)
def test_an_address_is_read_back_as_it_was_written(desired: IPAddress) -> None:
    seen = rtnl.decode_address(*told(Address(DEVICE, desired)))
    assert seen == rtnl.SeenAddress(INDEX, desired, desired.max_prefixlen, 0)


@given(networks())
def test_a_network_is_read_from_its_bytes(desired: IPNetwork) -> None:
    assert rtnl.network_of(desired.network_address.packed, desired.prefixlen) == desired


def test_host_bits_of_a_destination_are_masked_off() -> None:
    assert rtnl.network_of(bytes([10, 1, 6, 9]), 24) == IPv4Network("10.1.6.0/24")
    assert rtnl.network_of(ip_address("fd00::9").packed, 64) == IPv6Network("fd00::/64")


# ---- what is not ours to read --------------------------------------------------------------------

OURS = route("10.1.6.0/24", "192.168.0.2")
LOCAL_ROUTE, CLONED = 2, 0x02


@pytest.mark.parametrize(
    "body",
    [
        altered(told(OURS), RTMSG_TYPE, LOCAL_ROUTE),
        altered(told(OURS), RTMSG_TOS, 0x10),
        altered(told(OURS), 9, CLONED),
        altered(told(OURS), 0, 28),
        (*told(OURS, extra=u32(RTA_PRIORITY, 100)),),
        (encode(OURS) + u32(RTA_TABLE, 100), HEADER.size, len(encode(OURS)) + 8),
        (encode(OURS), HEADER.size, len(encode(OURS))),
    ],
    ids=["local", "type of service", "cloned", "MPLS", "metric", "other table", "no table"],
)
def test_a_route_of_another_kind_is_passed_over(body: tuple[bytes, int, int]) -> None:
    assert rtnl.decode_route(*body, name_of) is None


@pytest.mark.parametrize("kind", [6, 7, 8, 9], ids=["blackhole", "unreachable", "prohibit", "throw"])
def test_a_route_that_leads_nowhere_is_known_by_its_destination(kind: int) -> None:
    assert rtnl.outline(*altered(told(OURS), RTMSG_TYPE, kind)) == (OURS.key, INDEX)


def test_an_ipv6_route_with_another_metric_is_passed_over() -> None:
    data = encode(route("fd00::/64")) + u32(RTA_TABLE, 254) + u32(RTA_PRIORITY, 256)
    assert rtnl.decode_route(data, HEADER.size, len(data), name_of) is None


@each
def test_what_is_on_an_unknown_device_is_passed_over(resource: Resource) -> None:
    def unknown(_: int) -> str | None:
        return None

    if isinstance(resource, Route):
        assert rtnl.decode_route(*told(resource), unknown) is None
    elif not isinstance(resource, Address):
        assert rtnl.decode_neighbor(*told(resource), unknown) is None
        assert rtnl.decode_gone_neighbor(*told(resource), unknown) is None


def test_a_neighbour_that_is_not_permanent_is_passed_over() -> None:
    reachable = altered(told(ONE_OF_EACH["IPv4 neighbour"]), 8, 0x02)
    assert rtnl.decode_neighbor(*reachable, name_of) is None


def test_the_entry_for_unknown_destinations_is_passed_over() -> None:
    flood = FdbEntry(DEVICE, "00:00:00:00:00:00", ip_address("192.168.0.2"))
    assert rtnl.decode_neighbor(*told(flood), name_of) is None


# ---- looking up ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "family", "length"), [("192.168.0.2", 2, 32), ("fd77::2", 10, 128)])
def test_a_way_is_asked_for_by_full_address(target: str, family: int, length: int) -> None:
    body = routing.lookup_request(routing.RoutedPacket(ip_address(target)))
    fields = read_by_pyroute2(rtmsg, HEADER.pack(HEADER.size + len(body), 26, 1, 0, 0) + body)
    assert (fields["family"], fields["dst_len"], fields["RTA_DST"]) == (family, length, target)


def test_a_way_is_asked_for_with_all_that_is_known_of_a_packet() -> None:
    packet = routing.RoutedPacket(ip_address("10.1.6.2"), ip_address("10.1.5.2"), INDEX, 0x400, 17, 8472)
    body = routing.lookup_request(packet)
    fields = read_by_pyroute2(rtmsg, HEADER.pack(HEADER.size + len(body), 26, 1, 0, 0) + body)
    names = ("src_len", "dst_len", "RTA_SRC", "RTA_IIF", "RTA_MARK")
    assert [fields[name] for name in names] == [32, 32, "10.1.5.2", INDEX, 0x400]
    # linux/rtnetlink.h, RTA_IP_PROTO and RTA_DPORT, the latter in network order; pyroute2 does not know them.
    found = attributes(body, rtnl.RTMSG.size, len(body))
    assert (found[27], found[29]) == (b"\x11", (8472).to_bytes(2, "big"))


def test_a_way_through_a_gateway_of_the_other_family_has_a_gateway() -> None:
    via = attribute(RTA_VIA, b"\x0a\x00" + ip_address("fe80::1").packed)
    way = routing.decode_lookup(*told(route("10.1.6.0/24"), extra=via))
    assert (way.index, way.gateway) == (INDEX, ip_address("fe80::1"))


def test_a_way_on_the_link_has_no_gateway() -> None:
    assert routing.decode_lookup(*told(route("10.1.6.0/24"))) == routing.LookupResult(INDEX, None, None, 1)


@pytest.mark.parametrize("metric", [0, 100])
def test_seen_way_has_destination_protocol_and_gateway_whatever_its_metric(metric: int) -> None:
    seen = routing.decode_host_route(
        *told(route("10.1.6.0/24", "192.168.0.1"), extra=u32(RTA_PRIORITY, metric))
    )
    gateway = ip_address("192.168.0.1")
    assert seen == routing.SeenHostRoute(ip_network("10.1.6.0/24"), PROTO_BOOT, ((INDEX, gateway),))


def test_seen_way_with_several_next_hops_has_them_all() -> None:
    def hop(index: int, gateway: str) -> bytes:
        attributes = attribute(RTA_GATEWAY, ip_address(gateway).packed)
        return struct.pack("=HBBi", 8 + len(attributes), 0, 0, index) + attributes

    hops = hop(7, "192.168.0.1") + hop(8, "192.168.0.2")
    seen = routing.decode_host_route(*told(route("10.1.6.0/24"), extra=attribute(RTA_MULTIPATH, hops)))
    assert seen
    assert seen.hops == ((7, ip_address("192.168.0.1")), (8, ip_address("192.168.0.2")))


def test_blackhole_and_route_of_another_table_are_no_ways() -> None:
    body = told(route("10.1.6.0/24"))
    assert routing.decode_host_route(*altered(body, RTMSG_TYPE, 6)) is None
    assert routing.decode_host_route(*altered(body, RTMSG_TABLE, 100)) is None


@pytest.mark.parametrize("kind", [2, 3, 4])
def test_local_route_has_its_type_network_and_interface(kind: int) -> None:
    body = altered(altered(told(route("192.168.0.1/32")), RTMSG_TYPE, kind), RTMSG_TABLE, 255)
    assert routing.decode_local(*body) == (kind, ip_network("192.168.0.1/32"), INDEX)
    assert routing.decode_local(*altered(body, RTMSG_TYPE, 1)) is None
    assert routing.decode_local(*altered(body, RTMSG_TABLE, 254)) is None


def test_route_through_an_interface_is_known_by_its_end() -> None:
    data = encode(route("10.1.6.0/24", "192.168.0.1"))
    assert data[-routing.ENDING :] == routing.interface_ending(INDEX)


@pytest.mark.parametrize(
    ("resource", "index"),
    [(route("0.0.0.0/0", "192.168.0.1"), INDEX), (route("::/0", "fe80::1"), INDEX), (OURS, None)],
    ids=["IPv4", "IPv6", "no default"],
)
def test_a_default_route_names_its_interface(resource: Route, index: int | None) -> None:
    assert routing.decode_default_route(*told(resource)) == index


# ---- whatever comes ------------------------------------------------------------------------------

DECODERS: tuple[Decoder, ...] = (
    lambda data, offset, end: rtnl.decode_route(data, offset, end, name_of),
    lambda data, offset, end: rtnl.decode_neighbor(data, offset, end, name_of),
    lambda data, offset, end: rtnl.decode_gone_neighbor(data, offset, end, name_of),
    rtnl.outline,
    rtnl.decode_address,
    routing.decode_default_route,
    routing.decode_lookup,
    routing.decode_host_route,
    routing.decode_local,
)
some_decoder = st.sampled_from(DECODERS)


@given(some_decoder, st.binary(max_size=120), st.integers(0, 20))
@example(routing.decode_lookup, b"", 0)
def test_noise_is_at_worst_malformed(decode: Decoder, noise: bytes, offset: int) -> None:
    with contextlib.suppress(MalformedNetlink):
        decode(noise, offset, len(noise))


@given(some_decoder, st.sampled_from([*ONE_OF_EACH.values()]), st.integers(0, 80), st.integers(0, 255))
def test_one_wrong_byte_is_at_worst_malformed(
    decode: Decoder, resource: Resource, place: int, value: int
) -> None:
    data, offset, end = told(resource)
    with contextlib.suppress(MalformedNetlink):
        decode(*altered((data, offset, end), place % (end - offset), value))


@each
def test_a_message_cut_short_is_at_worst_malformed(resource: Resource) -> None:
    data, offset, end = told(resource)
    for cut in range(offset, end):
        for decode in DECODERS:
            with contextlib.suppress(MalformedNetlink):
                decode(data, offset, cut)


@pytest.mark.parametrize("decode", DECODERS)
def test_less_than_a_header_is_malformed_and_not_nothing(decode: Decoder) -> None:
    data, offset, _ = told(OURS)
    with pytest.raises(MalformedNetlink):
        decode(data, offset, offset + 7)


def test_malformed_counts_as_a_failed_read() -> None:
    with pytest.raises(OSError, match="not understood"):
        rtnl.address_of(b"12345")


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_can_be_walked(body: bytes, noise: bytes) -> None:
    bare = HEADER.pack(HEADER.size + len(body), 24, 0, 7, 0) + body
    whole = bare + bytes(-len(bare) % 4) + noise
    (_, _, _, _, offset, end), *rest = messages(whole)
    assert whole[offset:end] == body
    assert all(HEADER.size <= offset <= end <= len(whole) for _, _, _, _, offset, end in rest)
    assert sum(4 + len(payload) for payload in attributes(noise, 0, len(noise)).values()) <= len(noise)


def test_groups_of_notifications_have_the_kernels_numbers() -> None:
    assert (rtnl.GROUP_LINK, rtnl.GROUP_NEIGH) == (kernels.RTNLGRP_LINK, kernels.RTNLGRP_NEIGH)
    addresses = kernels.RTNLGRP_IPV4_IFADDR, kernels.RTNLGRP_IPV6_IFADDR
    assert addresses == (rtnl.GROUP_IPV4_ADDRESS, rtnl.GROUP_IPV6_ADDRESS)
    routes = kernels.RTNLGRP_IPV4_ROUTE, kernels.RTNLGRP_IPV6_ROUTE
    assert routes == (rtnl.GROUP_IPV4_ROUTE, rtnl.GROUP_IPV6_ROUTE)


@pytest.mark.parametrize(("family", "number"), [(4, 2), (6, 10)])
def test_dump_of_neighbors_asks_for_one_device_and_nothing_else(family: Family, number: int) -> None:
    asked = ndmsg(message(0, 0, rtnl.neighbors_request(family, INDEX)))
    asked.decode()
    fields = {name: asked[name] for name in ("family", "ifindex", "state", "flags", "ndm_type")}
    assert fields == {"family": number, "ifindex": 0, "state": 0, "flags": 0, "ndm_type": 0}
    assert asked.get_attrs("NDA_IFINDEX") == [INDEX]
