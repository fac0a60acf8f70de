"""The ipsec backend's decisions, and what it tells charon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import Host, OtherBackend
from flanneld.backends.ipsec.backend import DEVICE, Ipsec, IpsecConfig
from flanneld.backends.ipsec.resources import (
    CHARON,
    CONNECTIONS,
    Charon,
    ConnectionSas,
    IkeConnection,
    SharedKey,
    by_connection,
    connection_of,
    owner_of,
    session_of,
)
from flanneld.backends.ipsec.tables import ConnectionTable
from flanneld.backends.ipsec.vici import sections
from flanneld.config import parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs, Secret, Uplink
from flanneld.network.xfrm import POLICIES, guards, tunnel_policies
from flanneld.state.resources import Address, Blackhole, Dummy, Resource, Route
from flanneld.state.table import TunnelSession
from flanneld.subnet.codec import format_attrs
from tests.calls import at_once

PSK = "a key of which nothing may be shown. " * 3
NETWORK, SUBNET, THEIRS = IPv4Network("10.1.0.0/16"), IPv4Network("10.1.5.0/24"), IPv4Network("10.1.6.0/24")
HERE, THERE = IPv4Address("192.0.2.5"), IPv4Address("192.0.2.6")
OWN = Lease(LeaseAttrs(HERE, backend_type="ipsec"), SUBNET)
PEER = Lease(LeaseAttrs(THERE, backend_type="ipsec"), THEIRS)
KEY = Secret(PSK.encode())
PROPOSAL = "aes128gcm16-sha256-prfsha256-ecp256"


def made(uplink: Uplink | None = None, network: dict[str, Any] | None = None, **options: Any) -> Ipsec:
    backend = {"Type": "ipsec", "PSK": PSK, **options}
    config = parse(json.dumps({"Network": str(NETWORK), "Backend": backend, **(network or {})}))
    uplink = uplink or Uplink("eth0", 2, 1500, HERE, HERE)
    return Ipsec(config, Host(uplink, None, lambda _: None, lambda _: None, bytes, call=at_once))


def test_ipsec_backend_is_registered_and_encrypts() -> None:
    assert registry.load("IPsec") is Ipsec
    assert made().encrypts


def test_lease_data_are_upstreams() -> None:
    assert (
        format_attrs(made().attributes(), with_ipv6=False) == '{"PublicIP":"192.0.2.5","BackendType":"ipsec"}'
    )


@pytest.mark.parametrize(("encap", "mtu"), [(False, 1423), (True, 1415)])
def test_mtu_is_upstreams(encap: bool, mtu: int) -> None:
    assert made(UDPEncap=encap).mtu == mtu


def test_guards_come_first() -> None:
    desired: list[Resource] = [
        Blackhole(NETWORK, unreachable=True),
        Dummy(DEVICE, 1423),
        Address(DEVICE, IPv4Address("10.1.5.0")),
        *guards(NETWORK, SUBNET),
        Charon(),
        SharedKey(HERE, KEY),
    ]
    assert list(made().local(OWN)) == desired


def test_resources_of_a_peer() -> None:
    desired: list[Resource] = [
        *tunnel_policies(SUBNET, THEIRS, HERE, THERE),
        Route(THEIRS, DEVICE),
        SharedKey(THERE, KEY),
        IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE, PROPOSAL),
    ]
    assert list(made().peer(OWN, PEER)) == desired


def test_nodes_without_a_subnet_have_no_tunnel() -> None:
    backend = made()
    assert list(backend.peer(Lease(OWN.attrs), PEER)) == []
    assert list(backend.peer(OWN, Lease(PEER.attrs))) == []
    assert not any(isinstance(each, Address) for each in backend.local(Lease(OWN.attrs)))


def test_policies_are_there_before_charon_and_charon_before_its_connections() -> None:
    tables = made().tables()
    assert [each.name for each in tables] == [POLICIES, CHARON, CONNECTIONS]
    assert tables[2].needs == {POLICIES, CHARON}


def test_digest_tells_all_that_sas_are_negotiated_with() -> None:
    settings = IpsecConfig(KEY, udp_encap=False, esp_proposal=PROPOSAL)
    others = [
        replace(settings, psk=Secret(KEY.value + b"x")),
        replace(settings, udp_encap=True),
        replace(settings, esp_proposal="aes256"),
    ]
    assert IpsecConfig(Secret(PSK.encode()), False, PROPOSAL).digest == settings.digest
    assert len({each.digest for each in (settings, *others)}) == 4


def test_a_node_behind_nat_sends_from_its_own_address() -> None:
    local = IPv4Address("10.9.9.9")
    backend = made(Uplink("eth0", 2, 1500, local, HERE))
    *_, connection = backend.peer(OWN, PEER)
    assert isinstance(connection, IkeConnection)
    message: Any = connection.message()[connection.name]
    assert (message["local_addrs"], message["local"]["id"]) == (["10.9.9.9"], "192.0.2.5")
    assert {
        each.tunnel.source for each in tunnel_policies(SUBNET, THEIRS, local, THERE)[:1] if each.tunnel
    } == {local}


def test_leases_of_others_and_ours_are_refused() -> None:
    with pytest.raises(OtherBackend):
        list(made().peer(OWN, Lease(LeaseAttrs(THERE, backend_type="vxlan"), THEIRS)))
    with pytest.raises(Refused, match="our own public IP"):
        list(made().peer(OWN, Lease(LeaseAttrs(HERE, backend_type="ipsec"), THEIRS)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"PSK": "x" * 95}, "config error, password should be at least 96 characters long"),
        ({"PSK": ""}, "config error, password should be at least 96 characters long"),
        ({"PSK": 7}, "PSK must be a string"),
        ({"UDPEncap": "yes"}, "UDPEncap must be true or false"),
        ({"ESPProposal": "aes\n"}, "ESPProposal"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Fatal, match=words):
        made(**options)


def test_other_families_and_small_links_are_refused() -> None:
    with pytest.raises(Fatal, match="IPv4 only"):
        made(network={"EnableIPv6": True, "IPv6Network": "fd00::/48"})
    with pytest.raises(Fatal, match="inside ESP"):
        made(Uplink("eth0", 2, 100, HERE, HERE))


@pytest.mark.parametrize("addresses", [(None, HERE), (HERE, None)])
def test_an_uplink_without_ipv4_is_refused(addresses: tuple[IPv4Address | None, IPv4Address | None]) -> None:
    with pytest.raises(Fatal, match="eth0 has no IPv4 address; give it one"):
        made(Uplink("eth0", 2, 1500, *addresses))


def test_a_key_of_96_bytes_is_long_enough() -> None:
    made(PSK="é" * 48)


def test_messages_are_upstreams() -> None:
    connection = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE, PROPOSAL, True)
    ((name, body),) = connection.message().items()
    assert name == "192.0.2.5-10.1.5.0/24-10.1.6.0/24-192.0.2.6"
    assert isinstance(body, dict)
    children: Any = body.pop("children")
    assert body == {
        "version": "2",
        "local_addrs": ["192.0.2.5"],
        "remote_addrs": ["192.0.2.6"],
        "proposals": ["aes256-sha256-modp4096"],
        "keyingtries": "0",
        "dpd_delay": "30s",
        "encap": "yes",
        "local": {"auth": "psk"},
        "remote": {"auth": "psk"},
    }
    assert children == {
        "10.1.5.0/24-10.1.6.0/24": {
            "local_ts": ["10.1.5.0/24"],
            "remote_ts": ["10.1.6.0/24"],
            "esp_proposals": [PROPOSAL],
            "start_action": "start",
            "close_action": "trap",
            "dpd_action": "restart",
            "rekey_time": "1h",
            "mode": "tunnel",
            "reqid": "11",
            "policies": "no",
        }
    }


@given(st.text(max_size=60))
def test_names_that_others_gave_are_not_ours(name: str) -> None:
    found = connection_of(name)
    assert found is None or found.name.count("-") == name.count("-") == 3
    owner_of(name)


#: Names and values of charon's lists, and others.
_WORDS = st.sampled_from(
    [
        *("child-sas", "state", "remote-host", "remote-port", "install-time", "bytes-in", "bytes-out"),
        *("children", "local_addrs", "remote_addrs", "local-ts", "remote-ts", "msg", "ikesa-name"),
        *(IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE).name, f"{SUBNET}-{THEIRS}", "flannel-192.0.2.6"),
    ]
) | st.text(max_size=8)
_VALUES = st.sampled_from([b"ESTABLISHED", b"INSTALLED", b"AUTHENTICATION_FAILED", b"-1", b"9" * 30, b"\xff"])
told = st.dictionaries(
    _WORDS,
    st.recursive(
        _VALUES | st.binary(max_size=8) | st.lists(st.binary(max_size=8), max_size=2),
        lambda inner: st.dictionaries(_WORDS, inner, max_size=3),
        max_leaves=12,
    ),
    max_size=4,
)


@given(st.lists(told, max_size=4), st.lists(_WORDS, max_size=4))
def test_whatever_charon_tells_is_read_as_what_is_ours_or_passed_over(
    events: list[Any], names: list[str]
) -> None:
    table = ConnectionTable(NETWORK, at_once, "/nonexistent")
    for event in events:
        table.note(event)
    connections = list(table._connections(item for event in events for item in sections(event).items()))
    assert all(each.peer.subnet_of(NETWORK) for each in connections if isinstance(each, IkeConnection))
    assert all(isinstance(each, SharedKey) for each in table._keys(names))
    desired = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE)
    found = by_connection(events)
    session = session_of(desired, found.get(desired.name), 1e9)
    assert session.is_established == bool(found.get(desired.name, ConnectionSas()).children)


@given(st.text() | st.text(min_size=96))
def test_no_psk_is_more_than_refused_and_none_is_shown(psk: str) -> None:
    try:
        shown = [str(each) + repr(each) for each in made(PSK=psk).peer(OWN, PEER)]
    except Fatal as failed:
        shown = [str(failed)]
    assert len(psk) < 20 or psk not in "".join(shown)


def test_names_are_read_back() -> None:
    connection = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE)
    assert connection_of(connection.name) == connection
    assert connection.key == (CONNECTIONS, connection.name)
    assert Charon().key == (CHARON, "process")
    assert owner_of(SharedKey(THERE, KEY).name) == THERE


def test_no_secret_is_shown() -> None:
    shown = [*made().local(OWN), *made().peer(OWN, PEER)]
    for each in shown:
        assert PSK.strip() not in f"{each} {each!r}"


# ---- sessions --------------------------------------------------------------------------------------


def listed(state: str, children: Sequence[dict[str, Any]]) -> Any:
    ike = {"state": state.encode(), "remote-host": b"192.0.2.6", "remote-port": b"4500"}
    return {"name": ike | {"child-sas": {f"child-{number}": each for number, each in enumerate(children)}}}


def child(state: str, age: int, size: int) -> dict[str, bytes]:
    found = {"state": state, "install-time": age, "bytes-in": size, "bytes-out": 2 * size}
    return {name: str(value).encode() for name, value in found.items()}


def test_sessions_add_up_the_sas_of_a_peer() -> None:
    connection = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE)
    events = [
        listed("ESTABLISHED", [child("REKEYED", 70, 5), child("INSTALLED", 7, 10)]),
        listed("CONNECTING", []),
    ]
    found = by_connection(events)["name"]
    assert found.is_negotiating
    assert session_of(connection, found, 100.0) == TunnelSession(
        THEIRS, True, 93.0, 15, 30, "192.0.2.6:4500", protocol="ipsec"
    )
    assert session_of(connection, None, 100.0) == TunnelSession(
        THEIRS, is_established=False, protocol="ipsec"
    )


@pytest.mark.parametrize(
    ("state", "peer_spi", "expected"),
    [("CONNECTING", "0" * 16, ["7"]), ("CONNECTING", "0" * 15 + "1", []), ("ESTABLISHED", "0" * 16, [])],
)
def test_a_request_without_an_answer_is_one_whose_peer_has_no_spi(
    state: str, peer_spi: str, expected: list[str]
) -> None:
    event = listed(state, [])
    event["name"] |= {"uniqueid": b"7", "responder-spi": peer_spi.encode()}
    assert by_connection([event])["name"].unanswered == expected


def test_sas_that_the_kernel_lacks_make_no_session() -> None:
    connection = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE)
    both = child("INSTALLED", 7, 10) | {"spi-in": b"c0000001", "spi-out": b"c0000002"}
    events = [listed("ESTABLISHED", [both])]
    for kernel in (set(), {"c0000001"}, {"c0000002"}):
        found = by_connection(events, kernel)["name"]
        assert (found.children, found.lost) == ([], [both])
        assert not session_of(connection, found, 100.0).is_established
    for known in ({"c0000001", "c0000002", "c0000003"}, None):
        found = by_connection(events, known)["name"]
        assert (found.children, found.lost) == ([both], [])


@pytest.mark.parametrize("state", ["REKEYING", "REKEYED"])
def test_sas_that_charon_replaces_are_not_replaced_again(state: str) -> None:
    found = by_connection([listed("ESTABLISHED", [child(state, 7, 10)])], set())["name"]
    assert (found.children, found.lost, found.is_negotiating) == ([], [], True)


def test_a_failed_negotiation_is_told_of_a_peer_without_an_sa_only() -> None:
    connection, problem = IkeConnection(HERE, HERE, SUBNET, THEIRS, THERE), "no proposal chosen"
    without = by_connection([listed("CONNECTING", [])])["name"]
    within = by_connection([listed("ESTABLISHED", [child("INSTALLED", 7, 10)])])["name"]
    told = [session_of(connection, found, 100.0, problem) for found in (None, without, within)]
    assert [each.problem for each in told] == [problem, problem, ""]
    assert [each.is_silent for each in told] == [True, True, False]
    assert told[0].endpoint == "192.0.2.6:500"


@pytest.mark.parametrize(("state", "is_negotiating"), [("DELETING", False), ("INSTALLING", True)])
def test_sas_that_are_not_installed_make_no_session(state: str, is_negotiating: bool) -> None:
    found = by_connection([listed("ESTABLISHED", [child(state, 7, 10)])])["name"]
    assert (found.children, found.is_negotiating) == ([], is_negotiating)
