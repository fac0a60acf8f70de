"""Questions to nf_tables, and what is made of a kernel's answers."""

from __future__ import annotations

import errno
import os
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.model import Family
from flanneld.network.firewall import netlink
from flanneld.network.firewall.netlink import Hooked, Netfilter, NoNetfilter, Removal, Removals, has_guard
from flanneld.network.rtnetlink.netlink import DumpInterrupted, message
from tests.unit.network.firewall.stand_ins import (
    GETCHAIN,
    GETRULE,
    GETTABLE,
    HOOKS,
    INET,
    IPV4,
    IPV6,
    NETDEV,
    NF_TABLES,
    FakeKernel,
    base_chain,
    text,
)


def test_base_chains_that_packets_of_a_family_pass_are_told_with_nfts_names(kernel: FakeKernel) -> None:
    kernel.objects = {
        (GETCHAIN, IPV4): [
            base_chain("filter", "FORWARD", 2, -1, policy=0),
            text(1, "filter") + text(3, "own"),
        ],
        (GETCHAIN, IPV6): [base_chain("filter", "FORWARD", 2)],
        (GETCHAIN, INET): [base_chain("wall", hook, place) for place, hook in enumerate([*HOOKS, "unknown"])],
        (GETCHAIN, NETDEV): [
            base_chain("early", "arrivals", 0, device="eth0"),
            base_chain("early", "departures", 1, device="eth0"),
            base_chain("early", "unknown", 2, device="eth0"),
        ],
    }
    with Netfilter() as netfilter:
        found = {family: list(netfilter.hooked(family)) for family in (4, 6)}
    assert kernel.closed == 1
    both = [Hooked("inet wall", hook, hook, "filter", False) for hook in HOOKS]
    for chain, hook in (("arrivals", "ingress"), ("departures", "egress")):
        both.append(Hooked("netdev early", chain, hook, "filter", False, device="eth0"))
    assert found[4] == [Hooked("ip filter", "FORWARD", "forward", "filter", True, -1), *both]
    assert found[6] == [Hooked("ip6 filter", "FORWARD", "forward", "filter", False), *both]


@pytest.mark.parametrize(("interruptions", "is_told"), [(4, True), (5, False)])
def test_list_that_changed_meanwhile_is_read_again_four_times(
    kernel: FakeKernel, interruptions: int, is_told: bool
) -> None:
    kernel.objects = {(GETCHAIN, IPV4): [base_chain("filter", "FORWARD", 2)]}
    kernel.interruptions = interruptions
    with Netfilter() as netfilter:
        if is_told:
            assert len(list(netfilter.hooked(4))) == 1
        else:
            with pytest.raises(DumpInterrupted):
                list(netfilter.hooked(4))


@pytest.mark.parametrize(("family", "protocol"), [(4, IPV4), (6, IPV6)])
def test_one_table_or_chain_is_asked_for_by_name(kernel: FakeKernel, family: Family, protocol: int) -> None:
    header = struct.pack(">BBH", protocol, 0, 0)
    with Netfilter() as netfilter:
        assert netfilter.has_table(family, "nat")
        assert netfilter.has_chain(family, ("nat", "FLANNEL-POSTRTG"))
        assert kernel.asked == [
            (NF_TABLES | GETTABLE, header + text(1, "nat")),
            (NF_TABLES | GETCHAIN, header + text(1, "nat") + text(3, "FLANNEL-POSTRTG")),
        ]
        kernel.refusal = errno.ENOENT
        assert not netfilter.has_table(family, "nat")
        kernel.refusal = errno.EPERM
        with pytest.raises(PermissionError):
            netfilter.has_table(family, "nat")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_kernel_without_nf_tables_is_told_from_one_without_the_table(kernel: FakeKernel, code: int) -> None:
    kernel.refusal = code
    with Netfilter() as netfilter:
        with pytest.raises(NoNetfilter, match="no nf_tables"):
            netfilter.has_table(4, "nat")
        with pytest.raises(NoNetfilter, match="no nf_tables"):
            list(netfilter.hooked(4))
    assert not has_guard(4)


def test_rules_of_others_are_counted_without_ours_and_our_jumps(kernel: FakeKernel) -> None:
    def rules(*chains: tuple[str, str]) -> list[bytes]:
        return [text(1, table) + text(2, chain) for table, chain in chains]

    forward, ours = ("filter", "FORWARD"), ("filter", "FLANNEL-FWD")
    kernel.objects = {
        (GETRULE, IPV4): rules(forward, forward, ours, ours, ("nat", "POSTROUTING"), ("nat", "DOCKER")),
        (GETRULE, IPV6): rules(("filter", "INPUT")),
    }
    kernel.interruptions = 1
    with Netfilter() as netfilter:
        # Two rules in FORWARD, of which one is the jump to ours, as the chain of ours shows.
        assert netfilter.count_rules() == 4
        kernel.objects = {(GETRULE, IPV4): rules(ours)}
        assert netfilter.count_rules() == 0


def test_guard_is_looked_for_by_its_name(kernel: FakeKernel) -> None:
    assert has_guard(6)
    assert kernel.asked == [
        (NF_TABLES | GETTABLE, struct.pack(">BBH", IPV6, 0, 0) + text(1, "flannel-guard"))
    ]
    kernel.refusal = errno.ENOENT
    assert not has_guard(6)


# ---- removals ------------------------------------------------------------------------------------

DELTABLE, DELCHAIN, DELRULE, NEWGEN = 2, 5, 8, 15


def gone(kind: int, family: int, *names: bytes) -> bytes:
    return message(NF_TABLES | kind, 0, bytes((family, 0, 0, 0)) + b"".join(names))


RULE_GONE = gone(DELRULE, IPV4, text(1, "nat"), text(2, "POSTROUTING"))
CHAIN_GONE = gone(DELCHAIN, IPV6, text(1, "filter"), text(3, "FLANNEL-FWD"))
BY_NFT = message(NF_TABLES | NEWGEN, 0, bytes(4) + text(3, "nft"))


class News:
    """Stands in for the netlink socket: what is received in turn, and what shows that more follows."""

    def __init__(self, told: list[bytes | OSError], fd: int) -> None:
        self._told = told
        self._fd = fd
        self.closed = False

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        self.closed = True

    def receive(self) -> bytes:
        if not self._told:
            raise BlockingIOError
        if isinstance(first := self._told.pop(0), OSError):
            raise first
        return first


LOST = OSError(errno.ENOBUFS, "lost")
NOTHING_YET = BlockingIOError()
NAT, FILTER = Removal(4, "nat", "POSTROUTING"), Removal(6, "filter", "FLANNEL-FWD")


@pytest.mark.parametrize(
    ("told", "goes_on", "found"),
    [
        ([], True, set()),
        ([RULE_GONE + CHAIN_GONE + BY_NFT], False, {replace(NAT, by="nft"), replace(FILTER, by="nft")}),
        (
            [RULE_GONE, NOTHING_YET, CHAIN_GONE + BY_NFT],
            True,
            {replace(NAT, by="nft"), replace(FILTER, by="nft")},
        ),
        ([RULE_GONE, NOTHING_YET, CHAIN_GONE + BY_NFT], False, {NAT}),
        ([RULE_GONE + BY_NFT, NOTHING_YET, CHAIN_GONE], True, {replace(NAT, by="nft")}),
        ([RULE_GONE + BY_NFT, CHAIN_GONE], False, {replace(NAT, by="nft"), FILTER}),
        ([LOST, CHAIN_GONE + BY_NFT], False, {Removal(by="nft"), replace(FILTER, by="nft")}),
        ([gone(DELTABLE, IPV4, text(1, "nat")), BY_NFT], False, {Removal(4, "nat", by="nft")}),
        ([gone(DELRULE, INET, text(1, "wall"), text(2, "input")), BY_NFT], False, set()),
    ],
)
def test_removals_are_told_with_the_program_that_made_them(
    told: list[bytes | OSError], goes_on: bool, found: set[Removal]
) -> None:
    reader, writer = os.pipe()
    try:
        if goes_on:
            os.write(writer, b"x")
        news: Any = News(list(told), reader)
        removals = Removals(news)
        assert removals.fileno() == reader
        assert removals.read() == found
        removals.close()
        assert news.closed
    finally:
        os.close(reader)
        os.close(writer)


def test_failure_to_hear_of_removals_is_an_error() -> None:
    news: Any = News([OSError(errno.EBADF, "Bad file descriptor")], -1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Removals(news).read()


def test_kernel_without_netlink_for_netfilter_is_told_from_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(code: int) -> None:
        raise OSError(code, os.strerror(code))

    for code, kind in ((errno.EPROTONOSUPPORT, NoNetfilter), (errno.EMFILE, OSError)):
        monkeypatch.setattr(netlink, "NetlinkSocket", lambda code=code, **_: refuse(code))
        with pytest.raises(kind) as refusal:
            Netfilter()
        assert isinstance(refusal.value, NoNetfilter) == (kind is NoNetfilter)
        assert not has_guard(4)
