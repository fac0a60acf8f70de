"""The table of XFRM policies over a stand-in for its sockets, and policies as chains that packets pass."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.network import xfrm_table
from flanneld.network.firewall.fate import ACCEPT, DROP, Fate, Packet, Rule, Test
from flanneld.network.rtnetlink.netlink import HEADER, attribute, message
from flanneld.network.xfrm import (
    ALLOW_PRIORITY,
    Action,
    Direction,
    Tunnel,
    XfrmPolicy,
    guards,
    tunnel_policies,
)
from flanneld.network.xfrm_table import Associations, XfrmPolicyTable, chains, read_chains, stale_tables
from flanneld.state.resources import Resource
from flanneld.state.table import Bypass, Changes, Claim, Failure, Put, Scope, Seen

NEW, DELETE, GET, UPDATE, GET_SA, FLUSH_SA, GET_DEFAULT = 0x13, 0x14, 0x15, 0x19, 0x12, 0x1C, 0x28
NETWORK, OWN, PEER = IPv4Network("10.5.0.0/16"), IPv4Network("10.5.1.0/24"), IPv4Network("10.5.2.0/24")
TUNNELS = tunnel_policies(OWN, PEER, IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2"))
GUARDS = guards(NETWORK, OWN)
OUT = TUNNELS[0]
FOREIGN = XfrmPolicy(Direction.OUT, OWN, PEER, 0, Tunnel(OUT.source[1], OUT.destination[1], 12))
BYPASS = XfrmPolicy(Direction.OUT, OWN, PEER, 100)


class FakeSocket:
    """Stands in for a socket of NETLINK_XFRM: policies, SAs, what is written and what others have changed."""

    port = 77

    def __init__(self) -> None:
        self.dumps: dict[int, list[bytes]] = {}
        self.defaults: bytes | None = None
        self.written: list[tuple[int, bytes]] = []
        self.refused: dict[int, int] = {}
        self.news: list[bytes | OSError] = []
        self.opened: list[tuple[int, ...]] = []
        self.closed = 0
        self.failure = 0

    def __call__(self, groups: Iterable[int], room: int, *, protocol: int) -> FakeSocket:
        assert protocol == 6  # NETLINK_XFRM
        assert room >= 1 << 18  # for a datagram of any dump
        if self.failure:
            raise OSError(self.failure, "Protocol not supported")
        self.opened.append(tuple(groups))
        return self

    def fileno(self) -> int:
        return 99

    def close(self) -> None:
        self.closed += 1

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        assert body == b""
        for each in self.dumps.get(kind, []):
            yield b"headers." + each, 8, 8 + len(each)

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        assert (kind, body) == (GET_DEFAULT, bytes(3))
        if self.defaults is None:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self.defaults, 0, len(self.defaults)

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        failed = []
        for item in batch:
            _, kind, _, number, _ = HEADER.unpack_from(item)
            self.written.append((kind, item[HEADER.size :]))
            failed += [(number, self.refused[number])] if number in self.refused else []
        yield failed

    def receive(self) -> bytes:
        if not self.news:
            raise BlockingIOError
        if isinstance(first := self.news.pop(0), OSError):
            raise first
        return first


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    found = FakeSocket()
    monkeypatch.setattr(xfrm_table, "NetlinkSocket", found)
    return found


def scope(*desired: Resource) -> Scope:
    return Scope({each.key: each for each in desired})


def packed(*found: XfrmPolicy) -> list[bytes]:
    return [xfrm_table.pack_policy(each) for each in found]


def test_policy_with_a_mark_stands_beside_ours(kernel: FakeSocket) -> None:
    marked = packed(OUT)[0] + attribute(21, struct.pack("=II", 1, 0xFF))  # XFRMA_MARK
    kernel.dumps[GET] = [marked]
    assert list(XfrmPolicyTable(NETWORK).read(scope(OUT))) == []


def test_policies_of_flannel_are_read_and_those_in_their_places(kernel: FakeSocket) -> None:
    elsewhere = XfrmPolicy(Direction.OUT, IPv4Network("10.9.0.0/16"), PEER, 5, Tunnel(OWN[1], OWN[2], 12))
    kernel.dumps[GET] = packed(*TUNNELS, *GUARDS, elsewhere)
    table = XfrmPolicyTable(NETWORK)
    assert [each.resource for each in table.read(scope(*TUNNELS))] == [*TUNNELS, *GUARDS]
    kernel.dumps[GET] = packed(FOREIGN, elsewhere)
    assert list(table.read(scope(*TUNNELS))) == [Seen(FOREIGN, Claim.FOREIGN)]
    assert list(table.read(scope())) == []
    assert kernel.opened == [(4,), ()]  # XFRMNLGRP_POLICY, before the first read


def test_policies_that_let_packets_pass_unencrypted_are_told(kernel: FakeSocket) -> None:
    for_tcp = bytearray(packed(BYPASS)[0])
    for_tcp[44], for_tcp[156] = 6, 9  # the protocol of the selector, and the index
    kernel.dumps[GET] = [*packed(BYPASS, *TUNNELS), bytes(for_tcp)]
    table = XfrmPolicyTable(NETWORK)
    assert table.bypasses() == ()
    list(table.read(scope()))
    what, of_tcp = (each for each in table.bypasses())
    delete = "ip xfrm policy delete"
    assert what == Bypass(str(BYPASS), f"{delete} src 10.5.1.0/24 dst 10.5.2.0/24 dir out")
    assert of_tcp.removal == f"{delete} index 9 dir out"
    kernel.dumps[GET] = packed(*TUNNELS)
    list(table.read(scope()))
    assert table.bypasses() == ()


def test_policies_are_made_or_replaced_and_others_stand_in_the_way(kernel: FakeSocket) -> None:
    new, changed, blocked = TUNNELS
    was, theirs = replace(changed, priority=9), replace(blocked, priority=7)
    table = XfrmPolicyTable(NETWORK)
    report = table.put([Put(blocked, theirs, Claim.FOREIGN), Put(new), Put(changed, was, Claim.OURS)])
    assert kernel.written == list(zip((NEW, UPDATE), packed(new, changed), strict=True))
    assert report.made == [new, changed]
    remedy = (
        "stop the program that made it, and ip xfrm policy delete src 10.5.2.0/24 dst 10.5.1.0/24 dir fwd"
    )
    assert report.failed == [Failure(blocked, f"another program's {theirs} stands there", remedy)]


@pytest.mark.parametrize(
    ("code", "remedy", "is_taken"),
    [
        (errno.EEXIST, "", True),
        (errno.EPERM, "", False),
        (errno.EPROTONOSUPPORT, "load what is missing: modprobe -a xfrm_user esp4", False),
    ],
)
def test_policy_that_the_kernel_refuses_is_told(
    code: int, remedy: str, is_taken: bool, kernel: FakeSocket
) -> None:
    kernel.refused = {1: code}
    report = XfrmPolicyTable(NETWORK).put([Put(each) for each in TUNNELS])
    assert report.made == [TUNNELS[0], TUNNELS[2]]
    (failure,) = report.failed
    assert (failure.resource, failure.remedy, failure.is_taken) == (TUNNELS[1], remedy, is_taken)


def test_policies_are_removed_and_missing_ones_are_gone(kernel: FakeSocket) -> None:
    kernel.refused = {0: errno.ENOENT, 1: errno.EPERM}
    report = XfrmPolicyTable(NETWORK).drop(TUNNELS)
    assert kernel.written == [(DELETE, xfrm_table.pack_policy_id(each)) for each in TUNNELS]
    assert report.removed == [TUNNELS[0], TUNNELS[2]]
    assert report.failed == [Failure(TUNNELS[1], "Operation not permitted")]


@pytest.mark.parametrize(
    ("news", "is_changed"),
    [
        ([], False),
        ([message(NEW, 0, b"", 1)], True),
        ([HEADER.pack(HEADER.size, NEW, 0, 1, 77)], False),
        ([HEADER.pack(HEADER.size, NEW, 0, 1, 77), HEADER.pack(HEADER.size, NEW, 0, 1, 78)], True),
        ([OSError(errno.ENOBUFS, "lost")], True),
    ],
    ids=["none", "the kernel's", "ours", "ours and others'", "lost"],
)
def test_changes_by_others_are_told_once(
    news: list[bytes | OSError], is_changed: bool, kernel: FakeSocket
) -> None:
    table = XfrmPolicyTable(NETWORK)
    assert (table.fileno(), table.changes()) == (-1, [])
    list(table.read(scope()))
    kernel.news = news
    assert table.fileno() == 99
    assert table.changes() == ([Changes()] if is_changed else [])
    assert table.changes() == []


def test_table_is_closed_and_may_be_read_again(kernel: FakeSocket) -> None:
    table = XfrmPolicyTable(NETWORK)
    list(table.read(scope()))
    table.close(remove=True)
    assert (kernel.closed, table.fileno(), kernel.written) == (2, -1, [])
    list(table.read(scope()))
    assert len(kernel.opened) == 4


def test_other_failures_to_hear_are_told(kernel: FakeSocket) -> None:
    table = XfrmPolicyTable(NETWORK)
    list(table.read(scope()))
    kernel.news = [OSError(errno.EBADF, "Bad file descriptor")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        table.changes()


@pytest.mark.parametrize(
    ("code", "text"),
    [(errno.EPROTONOSUPPORT, "; load it: modprobe -a xfrm_user esp4"), (errno.EMFILE, "not supported")],
)
def test_kernel_without_xfrm_is_told_with_a_remedy(code: int, text: str, kernel: FakeSocket) -> None:
    kernel.failure = code
    with pytest.raises(OSError, match=text) as refusal:
        list(XfrmPolicyTable(NETWORK).read(scope()))
    assert refusal.value.errno == code
    assert ("modprobe" in str(refusal.value)) == (code == errno.EPROTONOSUPPORT)


# ---- policies of an earlier run ------------------------------------------------------------------

INSIDE, OTHER = IPv4Network("10.5.0.0/20"), IPv4Network("10.9.0.0/16")


def test_networks_with_policies_of_an_earlier_run_are_swept_once(
    kernel: FakeSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = True
    monkeypatch.setattr(xfrm_table, "has_xfrm_policies", lambda: there)
    kernel.dumps[GET] = packed(*guards(INSIDE, OWN), *guards(IPv4Network("10.5.128.0/17"), None), FOREIGN)
    networks = [ip_network("fc00::/48"), OTHER, INSIDE, NETWORK]
    first, second = stale_tables(networks)
    assert (first.name, second.name) == (f"xfrm-policies of {INSIDE}", f"xfrm-policies of {NETWORK}")
    assert (first.has(GUARDS[0]), second.has(GUARDS[0])) == (True, False)
    (only,) = stale_tables([NETWORK, INSIDE])
    assert only.name == "xfrm-policies"
    assert list(stale_tables([OTHER])) == []
    kernel.failure = errno.EPERM
    assert list(stale_tables(networks)) == []
    kernel.failure = there = False
    opened = len(kernel.opened)
    assert list(stale_tables(networks)) == []
    assert len(kernel.opened) == opened


# ---- policies as chains --------------------------------------------------------------------------

PACKET = Packet(None, None, ip_address("10.5.1.2"), ip_address("10.5.2.2"), "tcp", 80, 1024)
BLOCKED = replace(BYPASS, action=Action.BLOCK)


def fates(packet: Packet = PACKET, *, is_ipsec: bool = False) -> dict[str, Fate]:
    return {each.hook: each.fate(packet) for each in read_chains(is_ipsec=is_ipsec) if each.family == 4}


def test_policy_with_the_lowest_priority_decides(kernel: FakeSocket) -> None:
    kernel.dumps[GET] = packed(replace(BLOCKED, priority=7), replace(BYPASS, priority=3), TUNNELS[1])
    assert {hook: each.act for hook, each in fates().items()} == {"postrouting": ACCEPT, "input": ""}
    kernel.dumps[GET] = packed(replace(BLOCKED, priority=2), replace(BYPASS, priority=3))
    (decided,) = fates().values()
    assert (decided.act, decided.by) == (DROP, "src 10.5.1.0/24 dst 10.5.2.0/24 action block index 0 dir out")
    assert kernel.closed == 2


def test_guards_of_ipsec_are_no_fault_and_charons_packets_pass(kernel: FakeSocket) -> None:
    kernel.dumps[GET] = packed(
        *(replace(BLOCKED, direction=each, priority=ALLOW_PRIORITY) for each in Direction),
        replace(BLOCKED, direction=Direction.FWD, priority=ALLOW_PRIORITY - 1),
    )
    assert [each.act for each in fates().values()] == [DROP] * 3
    of_ipsec = fates(is_ipsec=True)
    assert {hook: each.act for hook, each in of_ipsec.items()} == {"forward": DROP}
    for packet in (
        replace(PACKET, protocol="esp", dport=None, sport=None),
        replace(PACKET, protocol="udp", dport=500, sport=500),
        replace(PACKET, protocol="udp", dport=4500, sport=4500),
    ):
        assert fates(packet, is_ipsec=True)["forward"].act == ACCEPT
        assert fates(packet)["forward"].act == DROP
    for port in (499, 4501):
        other = replace(PACKET, protocol="udp", dport=port, sport=port)
        assert fates(other, is_ipsec=True)["forward"].act == DROP


@pytest.mark.parametrize(
    ("defaults", "hooks"),
    [
        (b"\2\2\2", []),
        (b"\1\2\2", ["input"]),
        (b"\2\1\2", ["forward"]),
        (b"\2\2\1", ["postrouting"]),
        (b"\1\1\1", ["input", "forward", "postrouting"]),
        (None, []),
    ],
)
@pytest.mark.parametrize("is_ipsec", [True, False])
def test_kernel_may_drop_packets_without_a_policy(
    defaults: bytes | None, hooks: list[str], is_ipsec: bool, kernel: FakeSocket
) -> None:
    kernel.defaults = defaults
    found = read_chains(is_ipsec=is_ipsec)
    assert [(each.family, each.hook) for each in found] == [
        (family, hook) for family in (4, 6) for hook in hooks
    ]
    assert all(each.drops for each in found)
    assert [each.act for each in fates(is_ipsec=is_ipsec).values()] == [DROP] * len(hooks)


def test_policies_of_a_direction_that_is_blocked_come_before_the_drop() -> None:
    rule = Rule(ACCEPT, (Test("protocol", ("tcp",)),))
    (four, six) = chains([(4, Direction.OUT, 0, rule)], is_ipsec=False, blocked=[Direction.OUT])
    assert (four.fate(PACKET).act, four.fate(replace(PACKET, protocol="udp")).act) == (ACCEPT, DROP)
    assert (six.family, six.fate(PACKET).act) == (6, DROP)
    (open_,) = chains([(4, Direction.OUT, 0, rule)], is_ipsec=False)
    assert open_.fate(replace(PACKET, protocol="udp")).act == ""


# ---- SAs -----------------------------------------------------------------------------------------


def association(spi: str) -> bytes:
    return bytes(72) + bytes.fromhex(spi) + bytes(144)


def test_associations_are_told_by_their_spis_and_a_flush_is_heard(kernel: FakeSocket) -> None:
    kernel.dumps[GET_SA] = [association("c00a0b01"), association("00000002")]
    found = Associations()
    assert (found.fileno(), found.were_flushed()) == (-1, False)
    assert found.spis() == {"c00a0b01", "00000002"}
    assert kernel.opened == [(3,), ()]  # XFRMNLGRP_SA
    news: list[tuple[Any, bool]] = [
        (message(0x11, 0, b"", 1), False),  # XFRM_MSG_DELSA
        (message(FLUSH_SA, 0, struct.pack("B", 50), 1), True),
        (OSError(errno.ENOBUFS, "lost"), True),
    ]
    for each, is_flush in news:
        kernel.news = [each]
        assert found.were_flushed() is is_flush
    assert found.fileno() == 99
    found.close()
    assert (kernel.closed, found.fileno()) == (2, -1)
