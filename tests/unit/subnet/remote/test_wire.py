"""Leases, changes and reservations as JSON of the server's API: what is written, read and refused."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest

from flanneld.config import parse
from flanneld.errors import Refused, Retryable
from flanneld.model import LeaseAttrs, LeaseKey
from flanneld.subnet.remote.wire import (
    Acquisition,
    Reservation,
    WireEvent,
    WireLease,
    check_address,
    check_claim,
    check_fits,
    format_acquisition,
    format_config,
    format_events,
    format_lease,
    format_networks,
    format_renewal,
    format_reservations,
    format_snapshot,
    parse_acquisition,
    parse_lease,
    parse_renewal,
    parse_reservation,
    parse_reservations,
    parse_result,
)

ATTRS = LeaseAttrs(IPv4Address("192.0.2.1"), backend_type="vxlan")
DUAL = LeaseAttrs(IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"), "vxlan")
FOUR, SIX = IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5:0:1::/64")
SECOND = 1_000_000_000
GOOD = json.loads(format_lease(WireLease(ATTRS, (FOUR, None))))
RESERVATIONS = [Reservation(FOUR, IPv4Address(f"192.0.2.{number}")) for number in (1, 2)]
NEVER = "0001-01-01T00:00:00Z"
LEASES = [
    pytest.param(WireLease(ATTRS, (FOUR, None)), NEVER, id="reservation"),
    pytest.param(WireLease(ATTRS, (FOUR, None), 86400 * SECOND), "1970-01-02T00:00:00Z", id="whole seconds"),
    pytest.param(WireLease(ATTRS, (FOUR, None), 1), "1970-01-01T00:00:00.000000001Z", id="a nanosecond"),
    pytest.param(WireLease(ATTRS, (FOUR, None), SECOND // 2), "1970-01-01T00:00:00.5Z", id="half a second"),
    pytest.param(WireLease(DUAL, (FOUR, SIX), 0, 7, 3), "1970-01-01T00:00:00Z", id="dual-stack with indexes"),
    pytest.param(WireLease(DUAL, (None, SIX), 0, 0, 3), "1970-01-01T00:00:00Z", id="IPv6 only"),
]


@pytest.mark.parametrize(("lease", "ends"), LEASES)
def test_lease_is_read_as_it_is_written(lease: WireLease, ends: str) -> None:
    written = json.loads(format_lease(lease))
    assert written["Expiration"] == ends
    assert (written.get("Index", 0), written.get("Created", 0)) == (lease.index, lease.created)
    assert parse_lease(written) == lease
    assert ("IPv6Subnet" in written, "PublicIPv6" in written["Attrs"]) == (lease.key[1] is not None,) * 2
    result = parse_result(format_snapshot([lease, lease], 9).encode())
    assert (result.cursor, result.snapshot) == ("9", (lease, lease))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01T00:00:00-00:30", 1800 * SECOND),
        ("1970-01-01T00:00:01.123456789Z", SECOND + 123_456_789),
        (NEVER, None),
    ],
)
def test_time_is_read_in_any_zone(text: str, ends: int | None) -> None:
    assert parse_lease(GOOD | {"Expiration": text}).expires_ns == ends


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", '""'),
        ("1970-13-01T00:00:00Z", "1970-13-01T00:00:00Z"),
        ("1970-01-01T00:00:00.1234567890Z", '"1970-01-01T00:00:00.1234567890Z"'),
        ("x" * 41, f'"{"x" * 40}"'),
    ],
)
def test_text_that_is_no_time_is_refused(text: str, named: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_lease(GOOD | {"Expiration": text})
    assert caught.value.problem == f"a lease is wrong: {named} is no time"


def test_events_are_read_as_they_are_written() -> None:
    added = WireEvent(is_added=True, lease=WireLease(ATTRS, (FOUR, None), 0, 7))
    gone = [WireEvent(is_added=False, key=key) for key in ((FOUR, None), (FOUR, SIX))]
    result = parse_result(format_events([added, *gone], 9).encode())
    assert (result.cursor, result.events, result.snapshot) == ("9", (added, *gone), None)


def test_networks_come_and_go_by_name() -> None:
    assert json.loads(format_networks(["blue", "red"], 9))["snapshot"] == ["blue", "red"]
    for is_added, kind in ((True, "added"), (False, "removed")):
        (event,) = json.loads(format_events([WireEvent(is_added=is_added, network="blue")], 9))["events"]
        assert (event["type"], event["network"], event["lease"]["Subnet"]) == (kind, "blue", "0.0.0.0/0")


BAD = {"Subnet": "10.5.2.0/24", "Attrs": {"PublicIP": "nonsense"}}


def test_unreadable_lease_is_left_out_and_its_subnet_named() -> None:
    found = parse_result(json.dumps({"cursor": "9", "snapshot": [GOOD, BAD, {"Attrs": 5}]}).encode())
    assert [each.key for each in found.snapshot or ()] == [(FOUR, None)]
    assert found.unreadable == {(IPv4Network("10.5.2.0/24"), None)}
    events = [{"type": "added", "lease": each} for each in (BAD, GOOD)]
    told = parse_result(json.dumps({"cursor": "9", "events": events}).encode()).events
    assert [each.lease and each.lease.key for each in told] == [(FOUR, None)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"cursor": 9}, "watch returned non-string cursor"),
        ({"cursor": "9", "events": [{"type": "moved"}]}, 'unknown event type "moved"'),
        ({"cursor": "9", "events": [{"type": "x" * 41}]}, f'unknown event type "{"x" * 40}"'),
        ({"cursor": "9", "events": 5}, "the answer to a watch is wrong: an array is expected"),
        ({"cursor": "9", "snapshot": {}}, "the answer to a watch is wrong: an array is expected"),
    ],
)
def test_answer_to_a_watch_that_is_none_is_refused(answer: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_result(json.dumps(answer).encode())
    assert (caught.value.problem, caught.value.remedy) == (words, "is that a server of flannel?")


@pytest.mark.parametrize(
    "wanted",
    [
        Acquisition(ATTRS),
        Acquisition(DUAL, (FOUR, SIX)),
        Acquisition(ATTRS, (FOUR, None), frozenset({(FOUR, None), (FOUR, SIX)})),
        Acquisition(DUAL, (None, SIX)),
    ],
)
def test_request_for_a_lease_is_read_as_it_is_written(wanted: Acquisition) -> None:
    body = json.loads(format_acquisition(wanted))
    assert parse_acquisition(body) == wanted
    assert ("PreviousSubnet" in body, "Strangers" in body) == (
        wanted.previous[0] is not None,
        bool(wanted.strangers),
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"Strangers": 5}, "an array is expected"),
        ({"PreviousSubnet": 5}, "PreviousSubnet"),
    ],
)
def test_request_for_a_lease_that_is_none_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse_acquisition({"PublicIP": "192.0.2.1"} | body)


@pytest.mark.parametrize(
    ("former", "named"), [(None, None), (ATTRS, None), (DUAL, DUAL), (LeaseAttrs(ATTRS.public_ip),) * 2]
)
def test_renewal_names_the_attributes_that_it_replaces(
    former: LeaseAttrs | None, named: LeaseAttrs | None
) -> None:
    lease = WireLease(ATTRS, (FOUR, None), 86400 * SECOND)
    assert parse_renewal(json.loads(format_renewal(lease, former))) == (lease, named)


def test_reservations_are_read_as_they_are_written() -> None:
    assert parse_reservations(format_reservations(RESERVATIONS).encode()) == RESERVATIONS
    assert parse_reservations(b"null") == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"PublicIP": "192.0.2.1"}, "a reservation needs Subnet and PublicIP"),
        ({"Subnet": "10.5.1.0/24"}, "a reservation needs Subnet and PublicIP"),
        ({"Subnet": None, "PublicIP": "192.0.2.1"}, "Subnet must be an IPv4 network"),
        ({"Subnet": "10.5.1.0/24", "PublicIP": 5}, "PublicIP must be an IPv4 address"),
    ],
)
def test_reservation_without_a_subnet_or_a_node_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse_reservation(body)


def test_answer_without_reservations_is_refused() -> None:
    with pytest.raises(Refused, match="the answer about reservations is wrong: an array is expected"):
        parse_reservations(b"{}")


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (
            {"Network": "10.5.0.0/16", "Backend": {"Type": "udp", "Port": 1}, "EnableNFTables": True},
            {
                "Network": "10.5.0.0/16",
                "SubnetMin": "10.5.1.0",
                "SubnetMax": "10.5.255.0",
                "SubnetLen": 24,
                "EnableNFTables": True,
                "Backend": {"Type": "udp", "Port": 1},
            },
        ),
        (
            {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fc00:5::/48"},
            {
                "EnableIPv4": False,
                "EnableIPv6": True,
                "IPv6Network": "fc00:5::/48",
                "IPv6SubnetMin": "fc00:5:0:1::",
                "IPv6SubnetMax": "fc00:5:0:ffff::",
                "IPv6SubnetLen": 64,
            },
        ),
    ],
)
def test_config_is_written_with_its_defaults(source: dict[str, Any], written: dict[str, Any]) -> None:
    assert json.loads(format_config(parse(json.dumps(source)))) == written


CONFIG = parse('{"EnableIPv6": true, "Network": "10.5.0.0/16", "IPv6Network": "fc00:5::/48"}')
ONLY_IPV4 = parse('{"Network": "10.5.0.0/16"}')


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ((FOUR, SIX), ""),
        ((FOUR, None), ""),
        ((IPv4Network("10.6.1.0/24"), SIX), "the subnet 10.6.1.0/24 is outside the network"),
        ((IPv4Network("10.5.1.0/25"), SIX), "the subnet 10.5.1.0/25 is no /24"),
        ((FOUR, IPv6Network("fc00:6::/64")), "the subnet fc00:6::/64 is outside the network"),
        ((FOUR, IPv6Network("fc00:5::/60")), "the subnet fc00:5::/60 is no /64"),
    ],
)
def test_claim_of_a_subnet_that_no_node_would_follow_is_refused(key: LeaseKey, words: str) -> None:
    if not words:
        check_claim(CONFIG, WireLease(DUAL, key), key)
        return
    with pytest.raises(Refused) as caught:
        check_claim(CONFIG, WireLease(DUAL, key), key)
    assert caught.value.problem == words


def test_claim_must_be_of_the_network_and_of_the_path() -> None:
    with pytest.raises(Refused, match="the subnet fc00:5:0:1::/64 is outside the network"):
        check_claim(ONLY_IPV4, WireLease(DUAL, (FOUR, SIX)), (FOUR, SIX))
    with pytest.raises(Refused, match=r"is of the lease 10\.5\.1\.0/24, the path of none"):
        check_claim(CONFIG, WireLease(ATTRS, (FOUR, None)), (None, None))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "224.0.0.1"])
def test_address_that_no_host_can_have_is_refused(address: str) -> None:
    check_address(DUAL)
    with pytest.raises(Refused, match=f"the public IP {address} is no host's; correct -public-ip"):
        check_address(LeaseAttrs(IPv4Address(address), DUAL.public_ipv6))


@pytest.mark.parametrize(
    ("subnet", "words"),
    [
        ("10.5.1.0/24", ""),
        ("10.5.1.0/25", "reservation subnet has mask incompatible with network config"),
        ("10.6.1.0/24", "reservation subnet is outside of flannel network"),
    ],
)
def test_reservation_must_fit_the_network(subnet: str, words: str) -> None:
    if not words:
        check_fits(ONLY_IPV4, IPv4Network(subnet))
        return
    with pytest.raises(Retryable, match=words):
        check_fits(ONLY_IPV4, IPv4Network(subnet))
