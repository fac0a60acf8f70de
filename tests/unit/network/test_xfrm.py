"""XFRM policies: packed, read back, told from those of others; no tampered dump does harm."""

from __future__ import annotations

import errno
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.network import xfrm_table
from flanneld.network.firewall.fate import DROP
from flanneld.network.rtnetlink.netlink import MalformedNetlink, NetlinkSocket, attribute
from flanneld.network.xfrm import (
    ALLOW_PRIORITY,
    BLOCK_PRIORITY,
    Action,
    Direction,
    Tunnel,
    XfrmPolicy,
    guards,
    is_flannels,
    passes_by,
    tunnel_policies,
)
from tests.unit.mutations import tampered_bytes

NETWORK, OWN, PEER = IPv4Network("10.5.0.0/16"), IPv4Network("10.5.1.0/24"), IPv4Network("10.5.2.0/24")
HERE, THERE = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
TUNNELS = tunnel_policies(OWN, PEER, HERE, THERE)
GUARDS = guards(NETWORK, OWN)
GOLDEN = Path(__file__).parents[1] / "golden"
#: Dump of Linux 6.12 with policies of `ip xfrm policy`.
RECORDED = [*map(bytes.fromhex, (GOLDEN / "xfrm-policies.hex").read_text().split())]
PACKED = [xfrm_table.pack_policy(each) for each in (*TUNNELS, *GUARDS)]

addresses = st.integers(0, 2**32 - 1).map(IPv4Address)
networks = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)).map(
    lambda pair: IPv4Network(pair, strict=False)
)
policies = st.builds(
    XfrmPolicy,
    st.sampled_from(Direction),
    networks,
    networks,
    st.integers(0, 2**32 - 1),
    st.none() | st.builds(Tunnel, addresses, addresses, st.integers(0, 2**32 - 1), st.booleans()),
    st.sampled_from(Action),
)


def decode(data: bytes) -> XfrmPolicy | None:
    return xfrm_table.decode_policy(data, 0, len(data))


@given(policies)
def test_packed_value_is_read_back(policy: XfrmPolicy) -> None:
    assert decode(xfrm_table.pack_policy(policy)) == policy


def test_policies_of_all_programs_are_read_as_rules() -> None:
    found = filter(None, (xfrm_table.decode_rule(each, 0, len(each)) for each in RECORDED))
    assert [(family, priority, rule.text) for family, _, priority, rule in found] == [
        (4, 0, "src 10.5.0.0/16 dst 10.7.0.0/16 proto tcp sport 80 action block index 41 dir out"),
        (4, 0, "src 10.5.0.0/16 dst 10.6.0.0/16 action block index 33 dir out"),
        (6, 0, "src fc00:5::/48 dst fc00:5::/48 action block index 25 dir out"),
        (4, 8, "src 198.18.0.2/32 dst 0.0.0.0/0 proto udp action allow index 16 dir in"),
        (4, 7, "src 198.18.0.2/32 dst 0.0.0.0/0 proto udp dport 8472 action block index 8 dir in"),
        (4, 0, "src 10.5.0.0/16 dst 10.6.0.0/16 action block index 2 dir fwd"),
    ]


OPTIONAL = replace(TUNNELS[0], tunnel=Tunnel(HERE, THERE, 11, optional=True))
ANYWHERE = replace(TUNNELS[0], tunnel=Tunnel(HERE, IPv4Address(0)))


@pytest.mark.parametrize(
    ("policy", "ends", "is_dropped"),
    [
        (TUNNELS[0], [], True),
        (TUNNELS[0], [HERE], True),
        (TUNNELS[0], [HERE, THERE], False),
        (TUNNELS[0], None, False),
        (OPTIONAL, [], False),
        (ANYWHERE, [], False),
    ],
    ids=[
        "no SA",
        "an SA to another",
        "an SA",
        "SAs are not looked at",
        "optional",
        "by the packet's address",
    ],
)
def test_policy_that_wants_packets_encrypted_drops_them_without_an_sa(
    policy: XfrmPolicy, ends: list[IPv4Address] | None, is_dropped: bool
) -> None:
    data = xfrm_table.pack_policy(policy)
    packed = None if ends is None else [each.packed for each in ends]
    found = xfrm_table.decode_rule(data, 0, len(data), packed)
    assert found is not None
    assert (found[3].verdict == DROP) is is_dropped
    assert (" tmpl dst 192.0.2.2 proto esp without state action allow index " in found[3].text) is is_dropped


@pytest.mark.parametrize("policy", GUARDS)
def test_removal_names_a_policy_by_its_selector(policy: XfrmPolicy) -> None:
    """In struct xfrm_userpolicy_id an index that is not 0 precedes the selector."""
    selector, index, direction = struct.unpack("=56sIB3x", xfrm_table.pack_policy_id(policy))
    assert (selector, index, direction) == (xfrm_table.pack_policy(policy)[:56], 0, policy.direction)


def test_sizes_are_the_kernels() -> None:
    """struct xfrm_userpolicy_info, xfrm_userpolicy_id and xfrm_user_tmpl of linux/xfrm.h."""
    assert len(xfrm_table.pack_policy(GUARDS[0])) == 168
    assert len(xfrm_table.pack_policy_id(GUARDS[0])) == 64
    assert len(xfrm_table.pack_policy(TUNNELS[0])) == 168 + 4 + 64


@given(tampered_bytes([*PACKED, *RECORDED]))
def test_no_tampered_dump_is_more_than_malformed(data: bytes) -> None:
    with suppress(MalformedNetlink):
        policy = decode(data)
        assert policy is None or policy.source.version == 4
    with suppress(MalformedNetlink):
        xfrm_table.decode_rule(data, 0, len(data))


@pytest.mark.parametrize("kind", [16, 21, 31], ids=["type", "mark", "interface"])
def test_policies_that_stand_beside_ours_are_not_read(kind: int) -> None:
    assert decode(PACKED[0] + attribute(kind, bytes(8))) == TUNNELS[0]
    assert decode(PACKED[0] + attribute(kind, b"\1" + bytes(7))) is None


def test_spi_of_an_sa_is_read_as_charon_writes_it() -> None:
    """struct xfrm_usersa_info: a selector of 56 bytes, the destination, and the SPI."""
    data = bytes(56) + HERE.packed + bytes(12) + bytes.fromhex("c00a0b01") + b"\x32" + bytes(143)
    assert xfrm_table.decode_spi(data, 0, len(data)) == "c00a0b01"
    with pytest.raises(MalformedNetlink):
        xfrm_table.decode_spi(data, 0, 75)


def test_a_socket_policy_is_not_read() -> None:
    """Their directions are 3 and 4, and they have no addresses."""
    data = bytearray(PACKED[0])
    data[160] = 3
    assert decode(bytes(data)) is None


def test_other_templates_differ_from_ours() -> None:
    template = PACKED[0][168:]
    twice = decode(PACKED[0][:168] + attribute(5, template[4:] * 2))
    transport = bytearray(PACKED[0])
    transport[168 + 4 + 24 + 4 + 16 + 4] = 0
    for found in (twice, decode(bytes(transport))):
        assert found is not None
        assert found.key == TUNNELS[0].key
        assert found != TUNNELS[0]


def test_template_that_is_cut_off_is_malformed() -> None:
    with pytest.raises(MalformedNetlink):
        decode(PACKED[0][:168] + attribute(5, bytes(63)))


def test_host_bits_of_another_programs_selector_do_not_matter() -> None:
    data = bytearray(PACKED[0])
    data[3], data[19] = 9, 8  # the last bytes of destination and source
    assert decode(bytes(data)) == TUNNELS[0]


def test_tunnels_are_upstreams() -> None:
    assert [str(each) for each in TUNNELS] == [
        "policy src 10.5.1.0/24 dst 10.5.2.0/24 dir out priority 0"
        " tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 11 mode tunnel",
        "policy src 10.5.2.0/24 dst 10.5.1.0/24 dir in priority 0"
        " tmpl src 192.0.2.2 dst 192.0.2.1 proto esp reqid 11 mode tunnel",
        "policy src 10.5.2.0/24 dst 10.5.1.0/24 dir fwd priority 0"
        " tmpl src 192.0.2.2 dst 192.0.2.1 proto esp reqid 11 mode tunnel",
    ]
    assert {each.subnet for each in TUNNELS} == {PEER}


def fate(direction: Direction, source: str, destination: str) -> XfrmPolicy | None:
    """Return the policy that the kernel finds: the lowest priority, whatever the lengths are."""
    found = [
        each
        for each in (*TUNNELS, *GUARDS)
        if each.direction is direction
        and IPv4Address(source) in each.source
        and IPv4Address(destination) in each.destination
    ]
    return min(found, key=lambda each: each.priority, default=None)


@pytest.mark.parametrize(
    ("direction", "source", "destination", "expected"),
    [
        (Direction.OUT, "10.5.1.9", "10.5.2.9", "tunnel"),
        (Direction.FWD, "10.5.1.9", "10.5.2.9", "allow"),  # before it is encrypted
        (Direction.FWD, "10.5.2.9", "10.5.1.9", "tunnel"),
        (Direction.OUT, "10.5.2.9", "10.5.1.9", "allow"),  # to a container, decrypted
        (Direction.IN, "10.5.2.9", "10.5.1.1", "tunnel"),
        (Direction.IN, "10.5.1.9", "10.5.1.1", "allow"),
        (Direction.OUT, "10.5.1.1", "10.5.1.9", "allow"),
        (Direction.FWD, "10.5.1.8", "10.5.1.9", "allow"),
        (Direction.OUT, "10.5.1.9", "10.5.3.9", "block"),
        (Direction.IN, "10.5.3.9", "10.5.1.1", "block"),
        (Direction.FWD, "10.5.3.9", "10.5.1.9", "block"),
        (Direction.OUT, "10.5.1.9", "192.0.2.9", "none"),
    ],
)
def test_each_packet_meets_the_right_policy(
    direction: Direction, source: str, destination: str, expected: str
) -> None:
    policy = fate(direction, source, destination)
    if policy is None:
        assert expected == "none"
    else:
        assert expected == ("tunnel" if policy.tunnel else policy.action.name.lower())


def test_ours_are_told_from_those_of_others() -> None:
    assert all(is_flannels(each, NETWORK) for each in (*TUNNELS, *GUARDS))
    elsewhere = IPv4Network("10.9.0.0/16")
    assert not any(is_flannels(each, elsewhere) for each in (*TUNNELS, *GUARDS))
    other_reqid = tunnel_policies(OWN, PEER, HERE, THERE)[0]
    assert other_reqid.tunnel is not None
    foreign = XfrmPolicy(Direction.OUT, OWN, PEER, 0, Tunnel(HERE, THERE, 12))
    assert not is_flannels(foreign, NETWORK)
    charons = XfrmPolicy(Direction.OUT, OWN, PEER, 371_327, Tunnel(HERE, THERE))
    assert not is_flannels(charons, NETWORK)
    bypass = XfrmPolicy(Direction.OUT, OWN, PEER, 100)
    assert not is_flannels(bypass, NETWORK)
    assert passes_by(bypass, NETWORK)
    assert not any(passes_by(each, NETWORK) for each in (*TUNNELS, *GUARDS, foreign))


def test_a_policy_to_own_containers_is_no_bypass() -> None:
    """charon's plug-in bypass-lan makes one for each network of a bridge."""
    own, around = (XfrmPolicy(Direction.OUT, net, net, 100) for net in (OWN, NETWORK))
    assert not passes_by(own, NETWORK, GUARDS)
    assert passes_by(around, NETWORK, GUARDS)
    assert passes_by(own, NETWORK, guards(NETWORK, None))


def test_a_policy_for_one_protocol_stands_beside_ours_and_may_be_a_bypass() -> None:
    bypass = XfrmPolicy(Direction.OUT, OWN, PEER, 100)
    for whole in (bypass, TUNNELS[0], GUARDS[1]):
        data = bytearray(xfrm_table.pack_policy(whole))
        data[44], data[156] = 1, 9  # the protocol of the selector, and the index
        found = decode(bytes(data))
        assert found is not None
        assert found.index == 9
        assert found.key != whole.key
        assert not is_flannels(found, NETWORK)
        assert passes_by(found, NETWORK) == (whole.tunnel is None)
        assert "index 9 dir out" in str(found)


@pytest.mark.parametrize(
    ("direction", "source", "destination"),
    [
        (Direction.IN, PEER, OWN),
        (Direction.FWD, PEER, OWN),
        (Direction.OUT, OWN, IPv4Network("192.0.2.0/24")),
        (Direction.OUT, IPv4Network("192.0.2.0/24"), PEER),
    ],
)
def test_a_policy_for_what_arrives_or_stays_outside_is_no_bypass(
    direction: Direction, source: IPv4Network, destination: IPv4Network
) -> None:
    assert not passes_by(XfrmPolicy(direction, source, destination, 100), NETWORK)


def test_guards_come_last_and_without_a_lease_block_all() -> None:
    assert {each.priority for each in GUARDS} == {ALLOW_PRIORITY, BLOCK_PRIORITY}
    assert {each.action for each in guards(NETWORK, None)} == {Action.BLOCK}


def test_notifications_that_got_lost_are_told() -> None:
    class News(NetlinkSocket):
        def __init__(self) -> None:
            self._left = [OSError(errno.ENOBUFS, "lost"), BlockingIOError()]

        def receive(self) -> bytes:
            raise self._left.pop(0)

    assert list(xfrm_table.notifications(News())) == [(xfrm_table.LOST, xfrm_table.LOST)]
