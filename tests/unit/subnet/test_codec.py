"""The wire formats of leases in etcd."""

from __future__ import annotations

import json
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Refused
from flanneld.model import LeaseAttrs, LeaseKey, name_of
from flanneld.subnet import codec
from flanneld.subnet.codec import format_attrs, format_key, parse_attrs, parse_key, parse_mac

V4 = IPv4Network("10.12.13.0/24")
V6 = IPv6Network("fd00:12:13::/56")

subnets4 = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 31)).map(lambda net: IPv4Network(net, False))
subnets6 = st.tuples(st.integers(0, 2**128 - 1), st.integers(1, 127)).map(lambda net: IPv6Network(net, False))
addresses4 = st.builds(IPv4Address, st.integers(1, 2**32 - 1))
addresses6 = st.builds(IPv6Address, st.integers(1, 2**128 - 1))
json_values = st.recursive(
    st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(st.none() | inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)

# --- keys


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("10.12.13.0-24", (V4, None)),
        ("10.12.13.0-24&fd00:12:13::-56", (V4, V6)),
        ("0.0.0.0-0&fd00:12:13::-56", (None, V6)),
        ("10.12.13.0-24&::-0", (V4, None)),
        ("/coreos.com/network/subnets/10.12.13.0-24", (V4, None)),
        ("/coreos.com/network/subnets/10.12.13.0-24&fd00:12:13::-56", (V4, V6)),
        ("10.12.13.0-24&FD00:12:13::-56", (V4, V6)),
        ("10.12.13.4-31", (IPv4Network("10.12.13.4/31"), None)),
        ("128.0.0.0-1", (IPv4Network("128.0.0.0/1"), None)),
        ("10.12.13.0-24&fd00::2-127", (V4, IPv6Network("fd00::2/127"))),
    ],
)
def test_a_key_names_the_subnets_of_a_lease(text: str, key: LeaseKey) -> None:
    assert parse_key(text) == key


@pytest.mark.parametrize(
    "text",
    ["", "/", "10.12.13.0", "10.12.13.0-", "10.12.13-24", "10.12.13.0.0-24", "10.12.13.256-24",
     "10x12x13x0-24", "10.12.13.77-24", "10.12.13.0-24&fd00:12:13::77-56",
     "10.12.13.0-32", "10.12.13.0-33", "10.12.13.0-024", "10.12.13.0-24x", "x10.12.13.0-24",
     "10.12.13.0-24\n",
     " 10.12.13.0-24", "10.12.13.0-24/config", "10.12.13.0-24&", "10.12.13.0-24&fd00::", "10.12.13.0-24&-56",
     "10.12.13.0-24&fd00::-128", "10.12.13.0-24&fd00::-200", "10.12.13.0-24&fd00:::-56",
     "10.12.13.0-24&fd00::g-56",
     "10.12.13.0-24&fd00::-56x", "10.12.13.0-24&fd00::-56&fd00::-56", "fd00::-56", "&fd00::-56", "0.0.0.0-0",
     "0.0.0.0-0&::-0", "1.2.3.4-0", "10.12.13.0-24&1.2.3.4-24", "\u0661.2.3.4-24", "10.12.13.01-24",
     "-10.12.13.0-24"],
)  # fmt: skip
def test_invalid_lease_key_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not the key of a lease"):
        parse_key(text)


def test_long_name_is_truncated_in_messages() -> None:
    with pytest.raises(Refused) as caught:
        parse_key("x" * 10_000)
    assert str(caught.value) == f'"{"x" * 60}" is not the key of a lease; remove it from the store'


@given(st.none() | subnets4, st.none() | subnets6, st.sampled_from(["", "/a/subnets/"]))
def test_a_key_that_was_written_reads_the_same(
    v4: IPv4Network | None, v6: IPv6Network | None, path: str
) -> None:
    if v4 is None and v6 is None:
        with pytest.raises(ValueError, match="without a subnet"):
            format_key((v4, v6))
    else:
        assert parse_key(path + format_key((v4, v6))) == (v4, v6)


@pytest.mark.parametrize(
    "text", ["10.12.13.0-24", "10.12.13.0-24&fd00:12:13::-56", "0.0.0.0-0&fd00:12:13::-56"]
)
def test_a_key_is_written_as_other_nodes_write_it(text: str) -> None:
    assert format_key(parse_key(text)) == text


@given(st.text() | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){3}-[0-9]{1,3}(&[0-9a-f:]{0,20}-[0-9]{1,3})?"))
def test_any_text_is_a_key_or_refused_in_a_line(text: str) -> None:
    try:
        problem = name_of(parse_key(text))
    except Refused as error:
        problem = str(error)
    assert "\n" not in problem
    assert 0 < len(problem) < 500


# --- attributes

MAC = {"VtepMAC": "de:ad:be:ef:00:01"}


@pytest.mark.parametrize(
    ("text", "attrs"),
    [
        ('{"PublicIP":"1.2.3.4"}', LeaseAttrs(IPv4Address("1.2.3.4"))),
        ('{"PublicIP":"1.2.3.4","PublicIPv6":null}', LeaseAttrs(IPv4Address("1.2.3.4"))),
        (
            '{"PublicIP":"1.2.3.4","BackendType":"vxlan","BackendData":{"VtepMAC":"de:ad:be:ef:00:01"}}',
            LeaseAttrs(IPv4Address("1.2.3.4"), backend_type="vxlan", backend_data=MAC),
        ),
        (
            '{"publicip":"0.0.0.0","PublicIPv6":"fd00::1","backendTYPE":"vxlan","BackendV6Data":[1]}',
            LeaseAttrs(None, IPv6Address("fd00::1"), "vxlan", None, [1]),
        ),
        (
            '{"PublicIP":"1.2.3.4","BackendType":"extension","BackendData":"some text","Node":"n1"}',
            LeaseAttrs(IPv4Address("1.2.3.4"), backend_type="extension", backend_data="some text"),
        ),
        (
            '{"PublicIP":"1.2.3.4","BackendType":null,"BackendData":null}',
            LeaseAttrs(IPv4Address("1.2.3.4")),
        ),
    ],
)
def test_the_attributes_of_every_flannel_are_read(text: str, attrs: LeaseAttrs) -> None:
    assert parse_attrs(text) == attrs
    assert parse_attrs(text.encode()) == attrs


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ('{"PublicIP":"1.2.3.4"}x', "no JSON"),
        ("[]", "must be an object"),
        ('"1.2.3.4"', "must be an object"),
        ("null", "names no public IP"),
        ("{}", "names no public IP"),
        ('{"PublicIP":"0.0.0.0","PublicIPv6":null}', "names no public IP"),
        ('{"PublicIP":null}', "PublicIP must be an IPv4 address, found null"),
        ('{"PublicIP":16909060}', "PublicIP must be an IPv4 address, found 16909060"),
        ('{"PublicIP":"fd00::1"}', 'PublicIP must be an IPv4 address, found "fd00::1"'),
        ('{"PublicIP":"1.2.3.4","PublicIPv6":"fe80::1%eth0"}', "PublicIPv6 must be an IPv6 address"),
        ('{"PublicIP":"1.2.3.4","PublicIPv6":"1.2.3.4"}', "PublicIPv6 must be an IPv6 address"),
        ('{"PublicIP":"1.2.3.4","BackendType":1}', "BackendType must be a string, found a number"),
    ],
)
def test_wrong_attributes_are_refused_with_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as caught:
        parse_attrs(text)
    assert caught.value.remedy


DUAL = LeaseAttrs(IPv4Address("1.2.3.4"), IPv6Address("fd00::1"), "vxlan", {"VNI": 1, **MAC}, MAC)


@pytest.mark.parametrize(
    ("attrs", "with_ipv6", "text"),
    [
        (LeaseAttrs(IPv4Address("1.2.3.4")), False, '{"PublicIP":"1.2.3.4"}'),
        (LeaseAttrs(IPv4Address("1.2.3.4")), True, '{"PublicIP":"1.2.3.4","PublicIPv6":null}'),
        (LeaseAttrs(None, IPv6Address("fd00::1")), True, '{"PublicIP":"0.0.0.0","PublicIPv6":"fd00::1"}'),
        (
            DUAL,
            False,
            '{"PublicIP":"1.2.3.4","BackendType":"vxlan",'
            '"BackendData":{"VNI":1,"VtepMAC":"de:ad:be:ef:00:01"}}',
        ),
        (
            DUAL,
            True,
            '{"PublicIP":"1.2.3.4","PublicIPv6":"fd00::1","BackendType":"vxlan",'
            '"BackendData":{"VNI":1,"VtepMAC":"de:ad:be:ef:00:01"},'
            '"BackendV6Data":{"VtepMAC":"de:ad:be:ef:00:01"}}',
        ),
        (
            LeaseAttrs(IPv4Address("1.2.3.4"), backend_type="extension", backend_data="a && b"),
            False,
            r'{"PublicIP":"1.2.3.4","BackendType":"extension","BackendData":"a \u0026\u0026 b"}',
        ),
    ],
)
def test_attributes_are_written_as_others_write_them(attrs: LeaseAttrs, with_ipv6: bool, text: str) -> None:
    assert format_attrs(attrs, with_ipv6=with_ipv6) == text


@given(
    st.builds(
        LeaseAttrs,
        public_ip=addresses4,
        public_ipv6=st.none() | addresses6,
        backend_type=st.text(),
        backend_data=st.none() | json_values,
        backend_v6_data=st.none() | json_values,
    )
)
def test_attributes_that_were_written_read_the_same(attrs: LeaseAttrs) -> None:
    assert parse_attrs(format_attrs(attrs, with_ipv6=True)) == attrs
    v12 = parse_attrs(format_attrs(attrs, with_ipv6=False))
    assert v12 == LeaseAttrs(attrs.public_ip, None, attrs.backend_type, attrs.backend_data)


@given(st.builds(LeaseAttrs, public_ipv6=addresses6, backend_v6_data=st.none() | json_values))
def test_attributes_without_ipv4_read_the_same(attrs: LeaseAttrs) -> None:
    assert parse_attrs(format_attrs(attrs, with_ipv6=True)) == attrs


NAMES = ["PublicIP", "publicip", "PublicIPv6", "BackendType", "BackendData", "BackendV6Data"]


@given(
    st.text()
    | st.binary()
    | st.dictionaries(st.sampled_from(NAMES), st.none() | st.just("1.2.3.4") | json_values).map(json.dumps)
)
def test_any_value_is_attributes_or_refused(text: str | bytes) -> None:
    with suppress(Refused):
        assert isinstance(parse_attrs(text), LeaseAttrs)


def objects(names: list[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON objects whose names may be repeated."""
    pairs = st.lists(st.tuples(st.sampled_from(names), values), max_size=5)
    return pairs.map(lambda found: "{" + ",".join(f'"{name}":{value}' for name, value in found) + "}")


TEXTS = ["null", '"1.2.3.4"', '"fd00::1"', '"0.0.0.0"', '""', '"vxlan"', '"02:00:00:00:00:01"', "1", "1.0"]
#: JSON that Go reads in its own way: lone surrogates, numbers of any size, deep nesting, no UTF-8.
ODD = ['"\\ud800"', "1e999", "1" * 30, "[" * 200 + "]" * 200, "NaN", '"\udc80"', "tru"]
plain_values = st.sampled_from(TEXTS + ODD)
data_values = objects(["VtepMAC", "vtepmac", "VNI", "x"], plain_values)


@given(objects(NAMES, plain_values | data_values))
def test_the_common_form_is_read_as_any_other(text: str) -> None:
    """The short way must not accept or understand anything else than Go's rules."""
    common = codec._common_attrs(text)
    if common is not None:
        assert common == codec._any_attrs(text)


@pytest.mark.parametrize("with_ipv6", [False, True])
def test_what_vxlan_daemons_write_is_in_the_common_form(with_ipv6: bool) -> None:
    data = {"VNI": 1, **MAC}
    attrs = LeaseAttrs(IPv4Address("1.2.3.4"), IPv6Address("fd00::1"), "vxlan", data, MAC)
    expected = attrs if with_ipv6 else LeaseAttrs(IPv4Address("1.2.3.4"), None, "vxlan", data)
    assert codec._common_attrs(format_attrs(expected, with_ipv6=with_ipv6)) == expected


# --- MAC addresses


@pytest.mark.parametrize(
    "text",
    ["0a:1b:2c:3d:4e:5f", "0A:1B:2C:3D:4E:5F", "0A-1B-2C-3D-4E-5F", "0a1b.2c3d.4e5f", "0A1b.2C3d.4E5f"],
)
def test_a_mac_address_may_be_written_in_three_ways(text: str) -> None:
    assert parse_mac(text) == "0a:1b:2c:3d:4e:5f"


@pytest.mark.parametrize(
    "text",
    ["", "0a1b2c3d4e5f", "0a:1b:2c:3d:4e", "0a:1b:2c:3d:4e:5f:60:71", "0a:1b-2c:3d:4e:5f", "a:1b:2c:3d:4e:5f",
     "0a:1b:2c:3d:4e:5g", "0a:1b:2c:3d:4e:5f\n", "0a1b:2c3d:4e5f", "00:00:00:00:00:00", "01:1b:2c:3d:4e:5f",
     "ff:ff:ff:ff:ff:ff", "\u0660a:1b:2c:3d:4e:5f"],
)  # fmt: skip
def test_impossible_mac_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="MAC address"):
        parse_mac(text)


@given(st.text() | st.binary(min_size=6, max_size=6).map(lambda octets: octets.hex(":")))
def test_any_text_is_a_mac_address_or_refused(text: str) -> None:
    try:
        mac = parse_mac(text)
    except Refused:
        return
    octets = bytes.fromhex(mac.replace(":", ""))
    assert mac == octets.hex(":")
    assert any(octets)
    assert octets[0] & 1 == 0
