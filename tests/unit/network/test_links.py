"""Devices: read from the kernel's description, and what it takes to make one into another."""

from __future__ import annotations

import contextlib
import errno
import struct
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from flanneld.network.rtnetlink.links import (
    LinkStep,
    SeenLink,
    at_port_of,
    by_name,
    decode,
    differences,
    holder,
    in_namespace,
    is_flannels,
    is_not_ours_to_remove,
    remedy,
    renamed,
    step,
)
from flanneld.network.rtnetlink.netlink import HEADER, MalformedNetlink, attribute, attributes, u32
from flanneld.state.resources import Dummy, ForeignLink, Ipip, Link, Tun, Vxlan, WireGuard

MAC = "02:00:00:00:00:01"
WANTED = Vxlan("flannel.1", 1, 3, ip_address("192.168.0.1"), 8472, MAC, 1450)
IPV6 = replace(WANTED, name="flannel-v6.1", local=ip_address("fd77::1"), mtu=1430)
IPIP = Ipip("flannel.ipip", ip_address("192.168.0.1"), 1480)
BRIDGE = ForeignLink("flannel.1", "a device of kind bridge")

DATA: dict[str, dict[str, Any]] = {"ipip": {"IFLA_IPIP_LOCAL": "192.168.0.1", "IFLA_IPIP_REMOTE": "0.0.0.0"}}
DATA["vxlan"] = {
    "IFLA_VXLAN_ID": 1,
    "IFLA_VXLAN_LINK": 3,
    "IFLA_VXLAN_LOCAL": "192.168.0.1",
    "IFLA_VXLAN_PORT": 8472,
    "IFLA_VXLAN_LEARNING": 0,
    "IFLA_VXLAN_L2MISS": 0,
}
DATA["tun"] = {"IFLA_TUN_TYPE": 1, "IFLA_TUN_PERSIST": 1}


def description(
    name: str = "flannel.1", *, kind: str | None = "vxlan", mac: str | None = MAC, mtu: int = 1450,
    up: bool = True, master: int = 0, **data: Any,
) -> bytes:  # fmt: skip
    """A link message as the kernel sends it, put together by pyroute2."""
    message = ifinfmsg()
    message["index"], message["flags"] = 7, int(up)
    attrs: list[tuple[str, Any]] = [("IFLA_IFNAME", name), ("IFLA_MTU", mtu)]
    if mac is not None:
        attrs.append(("IFLA_ADDRESS", mac))
    if kind is not None:
        info: list[tuple[str, Any]] = [("IFLA_INFO_KIND", kind)]
        if kind in DATA:
            parts = {key: value for key, value in {**DATA[kind], **data}.items() if value is not None}
            info.append(("IFLA_INFO_DATA", {"attrs": list(parts.items())}))
        attrs.append(("IFLA_LINKINFO", {"attrs": info}))
    if master:
        attrs.append(("IFLA_MASTER", master))
    message["attrs"] = attrs
    message.encode()
    return bytes(message.data)


def seen(data: bytes) -> SeenLink:
    return decode(data, HEADER.size, len(data))


# ---- reading -------------------------------------------------------------------------------------


def test_a_vxlan_device_is_read_in_full() -> None:
    assert seen(description()) == SeenLink(7, "flannel.1", MAC, 1450, True, WANTED)


def test_a_port_of_a_bridge_knows_its_bridge() -> None:
    assert seen(description("veth1", kind="veth", master=4)).master == 4
    assert seen(description("veth1", kind="veth")).master == 0


def test_a_vxlan_device_over_ipv6_is_read_in_full() -> None:
    data = description("flannel-v6.1", mtu=1430, IFLA_VXLAN_LOCAL=None, IFLA_VXLAN_LOCAL6="fd77::1")
    assert seen(data).make == IPV6


@pytest.mark.parametrize(
    ("data", "make"),
    [
        (description(up=False), replace(WANTED, up=False)),
        (description(IFLA_VXLAN_LEARNING=1), replace(WANTED, learning=True)),
        (description(IFLA_VXLAN_GBP=True), replace(WANTED, gbp=True)),
        (description(IFLA_VXLAN_ID=77), replace(WANTED, vni=77)),
        (description(IFLA_VXLAN_PORT=4789), replace(WANTED, port=4789)),
        (description(IFLA_VXLAN_LINK=None), replace(WANTED, parent=0)),
    ],
    ids=["down", "learning", "gbp", "vni", "port", "no parent"],
)
def test_what_sets_a_vxlan_device_apart_is_seen(data: bytes, make: Vxlan) -> None:
    assert seen(data).make == make


@pytest.mark.parametrize(
    ("data", "word", "kind"),
    [
        (description(kind=None), "plain", ""),
        (description(kind="bridge"), "bridge", "bridge"),
        (description(IFLA_VXLAN_LOCAL=None), "without a local address", "vxlan"),
        (description(IFLA_VXLAN_GROUP="239.1.1.1"), "group", "vxlan"),
        (description(IFLA_VXLAN_GROUP6="ff05::1"), "group", "vxlan"),
        (description(IFLA_VXLAN_L2MISS=1), "l2miss", "vxlan"),
    ],
)
def test_a_device_that_we_would_not_make_is_foreign_and_says_why(data: bytes, word: str, kind: str) -> None:
    make = seen(data).make
    assert isinstance(make, ForeignLink)
    assert (make.name, word in make.description, make.make) == ("flannel.1", True, kind)


def ipip(**data: Any) -> bytes:
    return description("flannel.ipip", kind="ipip", mac=None, mtu=1480, **data)


@pytest.mark.parametrize(
    ("data", "make"),
    [
        (ipip(), IPIP),
        (ipip(IFLA_IPIP_REMOTE=None), IPIP),
        (ipip(up=False), replace(IPIP, up=False)),
        (ipip(IFLA_IPIP_LOCAL="0.0.0.0"), replace(IPIP, local=None)),
        (ipip(IFLA_IPIP_REMOTE="192.168.0.2"), replace(IPIP, remote=ip_address("192.168.0.2"))),
    ],
    ids=["ours", "no remote", "down", "any local", "one remote"],
)
def test_an_ipip_device_is_read_in_full(data: bytes, make: Ipip) -> None:
    assert seen(data) == SeenLink(7, "flannel.ipip", "", 1480, make.up, make)


def test_a_dummy_device_is_known_by_its_name() -> None:
    found = seen(description("flannel-ipsec", kind="dummy", mac=None, mtu=1423))
    assert found.make == Dummy("flannel-ipsec", 1423)
    assert is_flannels(found)
    assert not is_flannels(replace(found, name="dummy0"))


def test_a_wireguard_device_is_read_and_known_by_its_name() -> None:
    found = seen(description("flannel-wg-v6", kind="wireguard", mac=None, mtu=1420))
    assert found.make == WireGuard("flannel-wg-v6", 1420)
    assert is_flannels(found)
    assert not is_flannels(replace(found, name="wg0"))


TUN = Tun("flannel0", 1472)


def tun(**data: Any) -> bytes:
    """Only what is not the default of a persistent TUN differs."""
    return description("flannel0", kind="tun", mac=None, mtu=1472, **data)


def test_a_tun_device_is_read_in_full() -> None:
    assert seen(tun()).make == TUN


@pytest.mark.parametrize(
    ("data", "word"), [(tun(IFLA_TUN_TYPE=2), "tap"), (tun(IFLA_TUN_PERSIST=0), "another process")]
)
def test_a_tun_device_of_somebody_else_is_foreign(data: bytes, word: str) -> None:
    make = seen(data).make
    assert isinstance(make, ForeignLink)
    assert word in make.description


def test_a_tun_device_of_which_an_old_kernel_says_nothing_is_taken_for_ours() -> None:
    assert seen(tun(IFLA_TUN_TYPE=None, IFLA_TUN_PERSIST=None)).make == TUN


def test_a_device_without_mac_has_none() -> None:
    assert seen(description(kind=None, mac=None)).mac == ""


def test_a_device_is_asked_for_by_name() -> None:
    body = by_name("flannel.1")
    message = ifinfmsg(HEADER.pack(HEADER.size + len(body), 18, 1, 0, 0) + body)
    message.decode()
    assert (message["index"], message.get_attr("IFLA_IFNAME")) == (0, "flannel.1")


@given(st.binary(max_size=200))
def test_noise_is_at_worst_malformed(noise: bytes) -> None:
    with contextlib.suppress(MalformedNetlink):
        decode(noise, 0, len(noise))


@given(st.integers(0, 200), st.integers(0, 255))
def test_one_wrong_byte_is_at_worst_malformed(place: int, value: int) -> None:
    data = bytearray(description())
    data[HEADER.size + place % (len(data) - HEADER.size)] = value
    with contextlib.suppress(MalformedNetlink):
        seen(bytes(data))


def test_a_description_cut_short_is_at_worst_malformed() -> None:
    data = description()
    for cut in range(HEADER.size, len(data)):
        with contextlib.suppress(MalformedNetlink):
            decode(data, HEADER.size, cut)


def test_less_than_a_header_is_malformed() -> None:
    with pytest.raises(MalformedNetlink):
        decode(description(), HEADER.size, HEADER.size + 15)


# ---- from one device to another ------------------------------------------------------------------


@pytest.mark.parametrize("desired", [WANTED, IPV6, IPIP], ids=["IPv4", "IPv6", "ipip"])
def test_the_device_that_fits_is_left_alone(desired: Link) -> None:
    assert step(desired, replace(desired)) is LinkStep.NOTHING


@pytest.mark.parametrize(
    "actual",
    [
        replace(WANTED, mac="02:00:00:00:00:02"),
        replace(WANTED, mtu=1400),
        replace(WANTED, learning=True),
        replace(WANTED, up=False),
        replace(WANTED, mac="02:00:00:00:00:02", mtu=1400, learning=True, up=False),
        replace(WANTED, cpu_checksums=True),
    ],
    ids=["mac", "mtu", "learning", "down", "all of these", "checksums"],
)
def test_what_can_be_set_is_set(actual: Vxlan) -> None:
    assert step(WANTED, actual) is LinkStep.SET


@pytest.mark.parametrize(
    "actual",
    [
        replace(WANTED, vni=2),
        replace(WANTED, parent=4),
        replace(WANTED, local=ip_address("192.168.0.2")),
        replace(WANTED, local=ip_address("fd77::1")),
        replace(WANTED, port=4789),
        replace(WANTED, gbp=True),
        replace(WANTED, vni=2, mtu=1400),
        BRIDGE,
        IPIP,
    ],
    ids=["vni", "parent", "local", "family", "port", "gbp", "vni and mtu", "foreign", "ipip"],
)
def test_all_else_takes_a_new_device(actual: Link | ForeignLink) -> None:
    assert step(WANTED, actual) is LinkStep.REPLACE


def test_the_ends_of_an_ipip_device_take_a_new_one_and_all_else_is_set() -> None:
    assert step(IPIP, replace(IPIP, mtu=1400, up=False)) is LinkStep.SET
    for end in ({"local": None}, {"local": ip_address("192.168.0.2")}, {"remote": ip_address("192.168.0.2")}):
        assert step(IPIP, replace(IPIP, **end)) is LinkStep.REPLACE


def test_a_device_of_another_kind_is_its_owners_only_where_ipip_is_wanted() -> None:
    assert is_not_ours_to_remove(IPIP, BRIDGE)
    assert is_not_ours_to_remove(IPIP, WANTED)
    assert not is_not_ours_to_remove(IPIP, replace(IPIP, local=None))
    assert not is_not_ours_to_remove(WANTED, BRIDGE)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.EOPNOTSUPP, "modprobe ipip"),
        (errno.EEXIST, "ip -d link show type ipip"),
        (errno.EACCES, "open /dev/net/tun"),
        (errno.EBUSY, "start again"),
        (errno.EPERM, ""),
        (errno.EADDRINUSE, ""),
    ],
)
def test_a_refusal_whose_reason_is_clear_has_a_remedy(code: int, word: str) -> None:
    assert word in remedy(IPIP, code)
    assert bool(remedy(IPIP, code)) is bool(word)


@pytest.mark.parametrize(
    "actual", [replace(TUN, mtu=1400), replace(TUN, up=False), replace(TUN, mtu=1400, up=False)]
)
def test_what_can_be_set_on_a_tun_is_set(actual: Tun) -> None:
    assert step(TUN, actual) is LinkStep.SET


def test_a_device_of_another_kind_under_the_name_is_replaced() -> None:
    assert step(replace(TUN, name="flannel.1"), WANTED) is LinkStep.REPLACE
    assert "vxlan" in differences(replace(TUN, name="flannel.1"), WANTED)


def test_the_log_names_what_differs_and_nothing_else() -> None:
    text = differences(WANTED, replace(WANTED, mtu=1400, vni=2))
    assert text == "has vni 2, wanted 1, has mtu 1400, wanted 1450"


def test_the_log_says_what_a_foreign_device_is() -> None:
    assert "a device of kind bridge" in differences(WANTED, BRIDGE)
    assert "a device of kind ipip" in differences(WANTED, IPIP)


# ---- other names ---------------------------------------------------------------------------------


def there(make: Link | ForeignLink) -> SeenLink:
    return SeenLink(7, make.name, getattr(make, "mac", ""), 1450, True, make)


def test_our_device_is_known_under_another_name_by_its_mac() -> None:
    other = there(replace(WANTED, name="foo", mtu=1400, up=False))
    assert renamed(WANTED, [there(BRIDGE), other]) == other


@pytest.mark.parametrize(
    "make",
    [
        replace(WANTED, name="foo", mac="02:00:00:00:00:99"),
        replace(WANTED, name="foo", vni=2),
        replace(WANTED, name="foo", port=4789),
        ForeignLink("foo", "a vxlan device with group"),
    ],
)
def test_the_device_of_somebody_else_is_not_taken_for_ours(make: Link | ForeignLink) -> None:
    assert renamed(WANTED, [there(make)]) is None


def test_a_tunnel_without_a_mac_is_nobodys() -> None:
    assert renamed(IPIP, [there(replace(IPIP, name="foo"))]) is None


def test_the_device_that_is_in_the_way_is_named_with_the_remedy() -> None:
    present = [there(BRIDGE), there(replace(WANTED, name="foo", mac="02:00:00:00:00:99"))]
    assert holder(WANTED, present) == "foo"
    assert holder(IPIP, [*present, there(replace(IPIP, name="bar", mtu=1400))]) == "bar"
    assert holder(replace(WANTED, vni=2), present) == ""
    assert holder(Tun("flannel0", 1472), [there(Tun("flannel1", 1472))]) == ""
    assert "let the owner of foo give it up" in remedy(WANTED, errno.EEXIST, "foo")
    assert "stop what has the port" in remedy(WANTED, errno.EADDRINUSE, "foo")


FOR_ALL_VNIS = ForeignLink("foo", "a vxlan device for all VNIs", "vxlan", 8472)


@pytest.mark.parametrize(
    ("other", "is_up", "bars"),
    [
        (FOR_ALL_VNIS, True, True),
        (FOR_ALL_VNIS, False, False),
        (replace(FOR_ALL_VNIS, port=4789), True, False),
        (replace(FOR_ALL_VNIS, name="flannel.1"), True, False),
        (replace(WANTED, name="foo"), True, False),  # they share the socket
        (replace(WANTED, name="foo", gbp=True), True, True),
        (replace(WANTED, name="foo", gbp=True, port=4789), True, False),
        (replace(IPV6, name="foo", gbp=True), True, False),
        (replace(IPIP, name="foo"), True, False),
    ],
)
def test_device_that_keeps_the_port_for_itself_is_named(
    other: Link | ForeignLink, is_up: bool, bars: bool
) -> None:
    assert at_port_of(WANTED, [replace(there(other), up=is_up)]) == (["foo"] if bars else [])
    assert at_port_of(IPIP, [there(other)]) == []


@pytest.mark.parametrize(
    ("name", "make", "is_ours"),
    [
        ("flannel.1", WANTED, True),
        ("flannel-v6.1", IPV6, True),
        ("flannel.1x", WANTED, False),
        ("flannel.1", ForeignLink("flannel.1", "a vxlan device with group", "vxlan"), False),
        ("flannel.ipip", IPIP, True),
        ("flannel-ipip", IPIP, False),
        ("flannel-wg", WireGuard("flannel-wg", 1420), True),
        ("flannel-wg-v6", WireGuard("flannel-wg-v6", 1420), True),
        ("flannel-wg-v4", WireGuard("flannel-wg-v4", 1420), False),
        ("flannel-ipsec", Dummy("flannel-ipsec", 1400), True),
        ("flannel12", Tun("flannel12", 1472), True),
        ("flannel12", ForeignLink("flannel12", "another process's device of kind tun", "tun"), True),
        ("flannel.1", Tun("flannel.1", 1472), False),
        ("flannel.1", BRIDGE, False),
        ("flannel.1", replace(BRIDGE, make="bridge"), False),
    ],
)
def test_devices_of_any_flannel_are_known_by_kind_and_name(
    name: str, make: Link | ForeignLink, is_ours: bool
) -> None:
    assert is_flannels(replace(there(make), name=name)) is is_ours


@pytest.mark.parametrize(
    ("mode", "name"), [(0, ""), (1, "xdpdrv"), (2, "xdpgeneric"), (3, "xdpoffload"), (4, "xdp")]
)
def test_program_of_xdp_is_told_as_ip_link_does(mode: int, name: str) -> None:
    data = description() + attribute(43, attribute(2, bytes((mode,))))  # IFLA_XDP, IFLA_XDP_ATTACHED
    assert seen(data).xdp == name
    assert seen(description()).xdp == ""


def test_other_end_of_a_veth_is_told_with_its_namespace() -> None:
    data = description("veth1", kind="veth") + u32(5, 9)  # IFLA_LINK
    assert (seen(data).link, seen(data).namespace) == (9, -1)
    data += u32(37, 0)  # IFLA_LINK_NETNSID
    assert (seen(data).link, seen(data).namespace) == (9, 0)


def test_device_of_another_namespace_is_asked_for_by_its_number() -> None:
    body = in_namespace(3, 12)
    assert struct.unpack_from("=BxHiII", body) == (0, 0, 12, 0, 0)
    assert attributes(body, 16, len(body)) == {46: struct.pack("=I", 3)}  # IFLA_TARGET_NETNSID
