"""The rules for the network config, the same for both families."""

from __future__ import annotations

import json
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.config import Config, ConfigError, SubnetRange, parse, say_the_same, unread_keys
from flanneld.model import Family

FAMILY_KEYS = ["Network", "SubnetLen", "SubnetMin", "SubnetMax", "Networks"]
KEYS = ["Backend", "EnableIPv4", "EnableIPv6", "EnableNFTables", "MasqueradeExceptions", *FAMILY_KEYS]
KEYS += [f"IPv6{key}" for key in FAMILY_KEYS]


def config(**keys: object) -> Config:
    return parse(json.dumps(keys))


def v4(**keys: object) -> SubnetRange:
    found = config(**keys).range(4)
    assert found
    return found


def v6(**keys: object) -> SubnetRange:
    found = config(EnableIPv4=False, EnableIPv6=True, **keys).range(6)
    assert found
    return found


def bounds(found: SubnetRange) -> tuple[int, str, str]:
    return found.subnet_len, str(found.subnet_min), str(found.subnet_max)


# --- what is derived


@pytest.mark.parametrize(
    ("network", "derived"),
    [
        ("10.3.0.0/16", (24, "10.3.1.0", "10.3.255.0")),
        ("10.3.7.9/16", (24, "10.3.1.0", "10.3.255.0")),
        ("10.3.4.0/22", (24, "10.3.5.0", "10.3.7.0")),
        ("10.3.4.0/23", (25, "10.3.4.128", "10.3.5.128")),
        ("10.3.4.0/24", (26, "10.3.4.64", "10.3.4.192")),
        ("10.3.4.0/28", (30, "10.3.4.4", "10.3.4.12")),
        ("255.255.0.0/16", (24, "255.255.1.0", "255.255.255.0")),
    ],
)
def test_the_rest_is_derived_from_an_ipv4_network(network: str, derived: tuple[int, str, str]) -> None:
    assert bounds(v4(Network=network)) == derived


@pytest.mark.parametrize(
    ("network", "derived"),
    [
        ("fc00::/48", (64, "fc00:0:0:1::", "fc00:0:0:ffff::")),
        ("fc00::/62", (64, "fc00:0:0:1::", "fc00:0:0:3::")),
        ("fc00::/63", (65, "fc00::8000:0:0:0", "fc00:0:0:1:8000::")),
        ("fc00::/124", (126, "fc00::4", "fc00::c")),
        ("ff00::/8", (64, "ff00:0:0:1::", "ffff:ffff:ffff:ffff::")),
    ],
)
def test_the_rest_is_derived_from_an_ipv6_network(network: str, derived: tuple[int, str, str]) -> None:
    assert bounds(v6(IPv6Network=network)) == derived


@pytest.mark.parametrize("family", [4, 6])
@given(data=st.data())
def test_derived_range_lies_in_the_network(family: Family, data: st.DataObject) -> None:
    bits, prefix, usual = (32, "", 24) if family == 4 else (128, "IPv6", 64)
    base = ip_address(data.draw(st.binary(min_size=bits // 8, max_size=bits // 8)))
    length = data.draw(st.integers(1, bits))
    wanted = data.draw(st.just(0) | st.integers(max(length - 1, 0), bits + 1))
    keys = {f"{prefix}Network": f"{base}/{length}", f"{prefix}SubnetLen": wanted}
    fits = length <= bits - 4 and (wanted == 0 or length + 2 <= wanted <= bits - 2)
    read = v4 if family == 4 else v6
    if not fits:
        with pytest.raises(ConfigError):
            read(**keys)
        return
    found = read(**keys)
    first, last = (ip_network((low, found.subnet_len)) for low in (found.subnet_min, found.subnet_max))
    assert found.network == ip_network((base, length), strict=False)
    assert found.subnet_len == (wanted or max(length + 2, usual))
    assert int(first.network_address) == int(found.network.network_address) + first.num_addresses
    assert last.broadcast_address == found.network.broadcast_address
    assert found.contains(first)
    assert found.contains(last)


def test_explicit_values_are_kept() -> None:
    found = v4(Network="10.3.0.0/16", SubnetMin="10.3.5.0", SubnetMax="10.3.8.0", SubnetLen=28)
    assert bounds(found) == (28, "10.3.5.0", "10.3.8.0")


def test_explicit_ipv6_values_are_kept() -> None:
    keys = {"IPv6SubnetMin": "fc00:0:0:5::", "IPv6SubnetMax": "fc00:0:0:8::", "IPv6SubnetLen": 80}
    assert bounds(v6(IPv6Network="fc00::/48", **keys)) == (80, "fc00:0:0:5::", "fc00:0:0:8::")


def test_an_explicit_minimum_may_be_the_first_subnet() -> None:
    assert str(v4(Network="10.3.0.0/16", SubnetMin="10.3.0.0").subnet_min) == "10.3.0.0"


def test_zero_counts_as_absent() -> None:
    zeros = v4(Network="10.3.0.0/16", SubnetLen=0, SubnetMin="0.0.0.0", SubnetMax="0.0.0.0")
    assert zeros == v4(Network="10.3.0.0/16")
    zeros = v6(IPv6Network="fc00::/48", IPv6SubnetLen=0, IPv6SubnetMin="::", IPv6SubnetMax=None)
    assert zeros == v6(IPv6Network="fc00::/48")


def test_keys_match_in_any_case() -> None:
    found = parse('{"enableIPv6": true, "network": "10.3.0.0/16", "ipv6Network": "fc00::/48"}')
    assert found.families == (4, 6)
    assert [str(each.network) for each in found.ranges] == ["10.3.0.0/16", "fc00::/48"]
    assert found.warnings == ()


def test_a_family_that_is_off_has_no_range() -> None:
    assert config(Network="10.3.0.0/16").range(6) is None
    only6 = config(EnableIPv4=False, EnableIPv6=True, IPv6Network="fc00::/48")
    assert (only6.families, only6.range(4)) == ((6,), None)


def test_a_range_contains_its_subnets_only() -> None:
    found = v4(Network="10.3.0.0/16", SubnetMin="10.3.5.0", SubnetMax="10.3.8.0")
    inside = ["10.3.5.0/24", "10.3.8.0/24"]
    outside = ["10.3.4.0/24", "10.3.9.0/24", "10.3.5.0/25", "10.3.4.0/23", "10.4.5.0/24"]
    assert all(found.contains(IPv4Network(net)) for net in inside)
    assert not any(found.contains(IPv4Network(net)) for net in outside)
    low6 = SubnetRange(IPv6Network("::/16"), 24, IPv6Address("::"), IPv6Address("0:ff00::"))
    assert low6.contains(IPv6Network("::/24"))
    assert not low6.contains(IPv4Network("0.0.0.0/24"))


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "has no Network; set it, or set EnableIPv4 to false"),
        ({"Network": "0.0.0.0/0"}, "has no Network"),
        ({"Network": None}, "Network must be an IPv4 network such as 10.244.0.0/16, found null"),
        ({"Network": "10.3.0.0"}, 'Network must be an IPv4 network such as .*, found "10.3.0.0"'),
        ({"Network": "fc00::/48"}, "Network must be an IPv4 network"),
        ({"Network": "10.3.0.0/29"}, "Network 10.3.0.0/29 is too small; use a /28"),
        ({"SubnetLen": 17}, "SubnetLen 17 does not fit Network 10.3.0.0/16; use 18 to 30"),
        ({"SubnetLen": 31}, "SubnetLen 31 does not fit"),
        ({"SubnetLen": -1}, "SubnetLen must be a whole number .* found -1"),
        ({"SubnetLen": 24.0}, "SubnetLen must be a whole number .* found 24.0"),
        ({"SubnetLen": "24"}, "SubnetLen must be a whole number .* found a string"),
        ({"SubnetMin": None}, "SubnetMin must be an IPv4 address, found null"),
        ({"SubnetMin": "10.4.1.0"}, "SubnetMin 10.4.1.0 is outside Network 10.3.0.0/16"),
        ({"SubnetMax": "10.2.1.0"}, "SubnetMax 10.2.1.0 is outside Network 10.3.0.0/16"),
        ({"SubnetMin": "10.3.1.7"}, "SubnetMin 10.3.1.7 is not the start of a /24 subnet; use 10.3.1.0"),
        ({"SubnetMax": "10.3.9.128"}, "SubnetMax 10.3.9.128 is not the start of a /24 subnet; use 10.3.9.0"),
        ({"SubnetMin": "10.3.9.0", "SubnetMax": "10.3.8.0"}, "10.3.9.0 is above SubnetMax 10.3.8.0"),
        ({"EnableIPv4": False}, "disables both IPv4 and IPv6; set EnableIPv4 or EnableIPv6 to true"),
        ({"EnableIPv4": "no"}, "EnableIPv4 must be true or false, found a string"),
        ({"EnableNFTables": 1}, "EnableNFTables must be true or false, found a number"),
        ({"MasqueradeExceptions": "nodes"}, "MasqueradeExceptions must be an array of strings, found"),
        ({"MasqueradeExceptions": ["192.0.2.0/24", 7]}, "MasqueradeExceptions must be an array of strings"),
        ({"MasqueradeExceptions": ["node"]}, 'MasqueradeExceptions has "node", no network and not "nodes"'),
        ({"EnableIPv6": True}, "has no IPv6Network; set it, or set EnableIPv6 to false"),
        ({"Backend": "vxlan"}, "Backend must be an object, found a string"),
        ({"Backend": []}, "Backend must be an object, found an array"),
        ({"Backend": {"Type": 1}}, "Backend.Type must be a string, found a number"),
    ],
)
def test_a_wrong_config_is_refused_with_a_remedy(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(**({"Network": "10.3.0.0/16"} if keys and "Network" not in keys else {}) | keys)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"IPv6Network": "::/0"}, "has no IPv6Network"),
        ({"IPv6Network": None}, "IPv6Network must be an IPv6 network"),
        ({"IPv6Network": "10.3.0.0/16"}, "IPv6Network must be an IPv6 network"),
        ({"IPv6Network": "fc00::/125"}, "IPv6Network fc00::/125 is too small; use a /124"),
        ({"IPv6SubnetLen": 49}, "IPv6SubnetLen 49 does not fit"),
        ({"IPv6SubnetLen": 127}, "IPv6SubnetLen 127 does not fit"),
        ({"IPv6SubnetMin": "fd00::"}, "IPv6SubnetMin fd00:: is outside IPv6Network fc00::/48"),
        ({"IPv6SubnetMax": "fc00::1"}, "IPv6SubnetMax fc00::1 is not the start of a /64 subnet; use fc00::"),
        ({"IPv6SubnetMin": "fc00:0:0:2::", "IPv6SubnetMax": "fc00:0:0:1::"}, "is above IPv6SubnetMax"),
    ],
)
def test_ipv6_keys_are_checked_in_the_same_way(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        v6(**{"IPv6Network": "fc00::/48"} | keys)


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "1", '"x"', "null", '{"Network": "10.3.0.0/16"} x', "[" * 5000]
)
def test_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


values: st.SearchStrategy[object] = st.sampled_from(
    [None, True, False, 0, 1, 24, 30, 31, 64, -1, 2**64, 1.0, "", "x", "10.3.0.0/16", "10.3.5.0",
     "0.0.0.0", "fc00::",
     "fc00::/48", "::/0", "fc00:0:0:5::", [], {}, {"Type": "vxlan"}, {"Type": None}, {"Type": 1}]
)  # fmt: skip
plausible = {"Network": st.just("10.3.0.0/16"), "IPv6Network": st.just("fc00::/48")}


@given(
    st.dictionaries(st.sampled_from(KEYS) | st.text(), values), st.fixed_dictionaries({}, optional=plausible)
)
def test_any_object_is_a_config_or_refused(odd: dict[str, object], good: dict[str, object]) -> None:
    with suppress(ConfigError):
        found = config(**odd | good)
        assert found.families
        assert all("\n" not in warning for warning in found.warnings)


@given(st.text())
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):  # no text found at random names a network
        parse(text)


# --- the backend and the rest


@pytest.mark.parametrize(
    ("text", "backend_type"),
    [
        ('{"Network": "10.3.0.0/16"}', "udp"),
        ('{"Network": "10.3.0.0/16", "Backend": {}}', ""),
        ('{"Network": "10.3.0.0/16", "Backend": null}', ""),
        ('{"Network": "10.3.0.0/16", "Backend": {"Type": null}}', ""),
        ('{"Network": "10.3.0.0/16", "backend": {"type": "VXLAN"}}', "vxlan"),
        ('{"Network": "10.3.0.0/16", "Backend": {"Type": "udp"}, "Backend": {"Type": "host-gw"}}', "host-gw"),
    ],
)
def test_the_backend_is_udp_unless_something_else_is_said(text: str, backend_type: str) -> None:
    assert parse(text).backend_type == backend_type


def test_the_backend_reads_its_own_options() -> None:
    backend = config(Network="10.3.0.0/16", Backend={"Type": "vxlan", "VNI": 5, "Prot": 1}).backend
    assert backend.uint("vni", 1) == 5
    assert backend.uint("Port", 0) == 0
    assert backend.unread() == [("Prot", "Port")]


def test_masquerade_exceptions_are_networks_of_both_families_and_nodes() -> None:
    found = config(Network="10.3.0.0/16", MasqueradeExceptions=["192.0.2.7/24", "nodes", "2001:db8::7"])
    assert found.spared == (ip_network("192.0.2.0/24"), ip_network("2001:db8::7"))
    assert found.spares_nodes
    without = config(Network="10.3.0.0/16", MasqueradeExceptions=None)
    assert (without.spared, without.spares_nodes) == ((), False)


def test_nftables_is_off_by_default() -> None:
    assert config(Network="10.3.0.0/16").enable_nftables is False
    assert config(Network="10.3.0.0/16", EnableNFTables=True).enable_nftables is True


def test_configs_are_equal_if_their_text_is() -> None:
    vxlan = '{"Network": "10.3.0.0/16", "Backend": {"Type": "vxlan", "VNI": 1}}'
    assert parse(vxlan) == parse(vxlan)
    assert parse(vxlan) != parse(vxlan.replace('"VNI": 1', '"VNI": 2'))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],\n"a":1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        ("1", "2", False),
        ("2", "1", False),
        ("{", "{", False),
    ],
)
def test_two_texts_are_one_config_if_their_values_are_equal(one: str, other: str, same: bool) -> None:
    assert say_the_same(one, other) is same


def test_a_config_does_not_show_the_keys_of_its_backend() -> None:
    assert "hunter2" not in repr(config(Network="10.3.0.0/16", Backend={"Type": "ipsec", "PSK": "hunter2"}))


# --- warnings


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ({"SubnetLength": 24}, 'unknown key "SubnetLength" in the network config, did you mean "SubnetLen"?'),
        ({"zzzz\n": 1}, r'unknown key "zzzz\n" in the network config'),
        (
            {"ipv6network": "fc00::/48"},
            '"IPv6Network" in the network config has no effect unless "EnableIPv6" is true',
        ),
        (
            {"Networks": ["10.3.0.0/16"]},
            '"Networks" in the network config is not supported; only "Network" has an effect',
        ),
    ],
)
def test_key_without_effect_is_warned_about(keys: dict[str, object], warning: str) -> None:
    assert config(Network="10.3.0.0/16", **keys).warnings == (warning,)


def test_a_config_with_every_key_gives_no_warning() -> None:
    found = config(
        EnableIPv4=True, Network="10.3.0.0/16", SubnetLen=24, SubnetMin="10.3.5.0", SubnetMax="10.3.8.0",
        EnableIPv6=True, IPv6Network="fc00::/48", IPv6SubnetLen=64, IPv6SubnetMin="fc00:0:0:5::",
        IPv6SubnetMax="fc00:0:0:8::", EnableNFTables=False, MasqueradeExceptions=["nodes"],
        Backend={"Type": "vxlan", "Whatever": 1},
    )  # fmt: skip
    assert found.warnings == ()


def test_backend_beside_the_first_needs_a_type() -> None:
    beside = {"Type": "vxlan", "Also": {"Type": "WireGuard"}}
    found = parse(json.dumps({"Network": "10.3.0.0/16", "Backend": beside}))
    assert found.also is not None
    assert found.also.backend_type == "wireguard"
    with pytest.raises(ConfigError, match="Also has no Type"):
        parse(json.dumps({"Network": "10.3.0.0/16", "Backend": {**beside, "Also": {"VNI": 3}}}))


def test_configs_are_equal_if_their_texts_are() -> None:
    one, other = parse('{"Network": "10.3.0.0/16"}'), parse('{"Network": "10.4.0.0/16"}')
    assert one != other
    assert one != '{"Network": "10.3.0.0/16"}'


def test_unread_key_of_a_backend_is_bounded_and_escaped() -> None:
    (sentence,) = unread_keys(config(Network="10.5.0.0/16", Backend={"\u202e" + "x" * 100_000: 1}))
    assert sentence == f"Unknown key \\u202e{'x' * 199}... and 99801 more in Backend of the network config"
