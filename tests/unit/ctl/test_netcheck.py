"""Where packets stop, and what spoils them: judgements over measurements."""

from __future__ import annotations

import errno
from ipaddress import ip_address

import pytest

from flanneld.ctl.netcheck import (
    Result,
    Series,
    Stage,
    Wanted,
    checksums,
    chosen,
    examine,
    judge,
    masqueraded,
    port_state,
    translated,
    verdict,
)
from flanneld.ctl.output import State
from flanneld.ctl.paths import PathToPeer
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, UplinkStatus
from flanneld.errors import FlannelError
from flanneld.model import IPAddress
from flanneld.network.survey import SILENCE, Reply
from tests.unit.ctl.documents import status_of

RTTS = (0.001, 0.002)
PEER = PeerStatus(("10.5.2.0/24",))
CLOSED, REJECTED = Reply(error=errno.ECONNREFUSED), Reply(error=errno.EHOSTUNREACH)


def good(stage: Stage) -> Series:
    return Series(stage, "10.5.2.0", 84, 2, RTTS)


def lost(stage: Stage, *, error: int = 0) -> Series:
    return Series(stage, "10.5.2.0", 84, 2, (), error)


def path(name: str, carried: int | None, target: str = "10.5.2.0") -> PathToPeer:
    return PathToPeer(name, ip_address(target), 1450, carried)


@pytest.mark.parametrize(
    ("found", "at"),
    [
        ([good(Stage.UNDERLAY), lost(Stage.PORT), good(Stage.TUNNEL), good(Stage.UDP)], None),
        ([good(Stage.TUNNEL), lost(Stage.UDP, error=errno.ECONNREFUSED)], None),
        # Hosts that drop ICMP at their public IP are reached all the same.
        ([lost(Stage.UNDERLAY), lost(Stage.PORT), good(Stage.TUNNEL), good(Stage.UDP)], None),
        ([lost(Stage.UNDERLAY), lost(Stage.PORT), lost(Stage.TUNNEL)], "underlay"),
        ([good(Stage.UNDERLAY), lost(Stage.PORT), lost(Stage.TUNNEL)], "tunnel"),
        ([good(Stage.UNDERLAY), lost(Stage.PORT, error=errno.ECONNREFUSED), lost(Stage.TUNNEL)], "port"),
        ([good(Stage.UNDERLAY), lost(Stage.PORT, error=errno.EHOSTUNREACH), lost(Stage.TUNNEL)], "port"),
        ([good(Stage.TUNNEL), good(Stage.UDP), lost(Stage.THERE)], "tunnel"),
        ([good(Stage.TUNNEL), good(Stage.UDP), lost(Stage.BACK)], "tunnel"),
        # Its firewall keeps this from the node itself, and not from its containers.
        ([good(Stage.TUNNEL), lost(Stage.UDP)], None),
        ([lost(Stage.TUNNEL), good(Stage.UDP)], None),
        ([good(Stage.TUNNEL), lost(Stage.CONTAINER)], "forward"),
        ([good(Stage.TUNNEL), lost(Stage.CONTAINER, error=errno.EHOSTUNREACH)], "container"),
        ([good(Stage.UNDERLAY)], None),
        ([lost(Stage.UNDERLAY)], "underlay"),
        ([Series(Stage.TUNNEL, "10.5.2.0", 84, 5, RTTS)], "tunnel"),
    ],
)
def test_packets_stop_at_the_first_stage_that_explains_the_rest(found: list[Series], at: str | None) -> None:
    assert verdict(found).at == at


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (path("tunnel", 1450), "packets pass in both directions"),
        (path("tunnel", 1400), "stops at tunnel; packets of 1450 bytes are lost, those of 1400 pass"),
        (path("underlay", 1400), "stops at underlay; packets of 1450 bytes are lost, those of 1400 pass"),
        (path("tunnel", None), "stops at tunnel; packets of 1450 bytes are lost, small ones pass"),
        (path("container", None, "10.5.2.7"), "packets pass in both directions"),
        # A host that drops ICMP at its public IP says nothing about sizes.
        (path("underlay", None, "192.0.2.2"), "packets pass in both directions"),
    ],
)
def test_large_packets_stop_where_small_ones_pass(path: PathToPeer, end: str) -> None:
    assert str(verdict([good(Stage.TUNNEL), good(Stage.UDP)], [path])) == end


@pytest.mark.parametrize("echo", [good(Stage.TUNNEL), lost(Stage.TUNNEL)])
def test_filter_of_echoes_loses_no_large_packets(echo: Series) -> None:
    sized = [Series(stage, "10.5.2.0", 1450, 2, RTTS) for stage in (Stage.THERE, Stage.BACK)]
    found = [echo, good(Stage.UDP), *sized]
    assert str(verdict(found, [path("tunnel", None)])) == "packets pass in both directions"


@pytest.mark.parametrize("passes_on", [True, False])
def test_node_that_passes_packets_on_need_not_answer(*, passes_on: bool) -> None:
    found = [lost(Stage.UNDERLAY), lost(Stage.TUNNEL), lost(Stage.UDP)]
    results = judge(PEER, found, [], status_of({}), passes_on=passes_on)
    assert any(each.state == "PROBLEM" for each in results) is not passes_on
    said = verdict(found, passes_on=passes_on)
    assert (said.at is None) is passes_on
    assert ("answers no UDP" in said.reason) is passes_on


@pytest.mark.parametrize("silent", [Stage.TUNNEL, Stage.UDP])
def test_node_that_answers_echoes_or_udp_is_reached(silent: Stage) -> None:
    found = [lost(each) if each is silent else good(each) for each in (Stage.TUNNEL, Stage.UDP)]
    assert {each.state for each in judge(PEER, found, [], status_of({}))} == {"ok", "unknown"}


def test_spoilt_checksums_stop_packets() -> None:
    cause = Result("checksums", "10.5.2.0/24", State.PROBLEM, "UDP arrives without checksums only", "ethtool")
    said = verdict([good(Stage.TUNNEL), lost(Stage.UDP)], causes=[cause])
    assert str(said) == "stops at udp; UDP arrives without checksums only: ethtool"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([good(Stage.UNDERLAY)], "the node answers; its backend has no address in the overlay"),
        ([good(Stage.UNDERLAY), good(Stage.TUNNEL)], "packets pass in both directions"),
        ([good(Stage.UNDERLAY), good(Stage.CONTAINER)], "packets pass in both directions"),
    ],
)
def test_packets_that_pass_prove_no_more_than_where_they_went(found: list[Series], text: str) -> None:
    assert verdict(found).reason.startswith(text)


ANSWER = Reply(0.001)


@pytest.mark.parametrize(
    ("replies", "answers_icmp", "state", "text"),
    [
        ((ANSWER, ANSWER, ANSWER), True, "ok", "arrives"),
        ((CLOSED, CLOSED, CLOSED), True, "ok", "arrives"),
        ((SILENCE, SILENCE, SILENCE), False, "unknown", "does not answer at all"),
        ((SILENCE, SILENCE, SILENCE), True, "hint", "UDP does not"),
        ((SILENCE, ANSWER, ANSWER), True, "PROBLEM", "this node spoils them"),
        ((SILENCE, ANSWER, SILENCE), True, "PROBLEM", "10.5.2.0/24 spoils them"),
        # Without a responder the peer's kernel answers by ICMP, so our own checksums are to blame.
        ((SILENCE, CLOSED, CLOSED), True, "PROBLEM", "this node spoils them"),
    ],
)
def test_checksums_are_blamed_only_if_packets_without_them_arrive(
    replies: tuple[Reply, Reply, Reply], answers_icmp: bool, state: str, text: str
) -> None:
    found = checksums("10.5.2.0/24", *replies, answers_icmp=answers_icmp, device=None)
    assert found.state == state
    assert text in found.found


@pytest.mark.parametrize(
    ("reply", "is_open", "state"),
    [
        (CLOSED, False, "PROBLEM"),
        (REJECTED, False, "PROBLEM"),
        (SILENCE, False, "unknown"),
        (SILENCE, True, "ok"),
    ],
)
def test_silent_port_is_open_only_if_packets_come_through_it(reply: Reply, is_open: bool, state: str) -> None:
    assert port_state("10.5.2.0/24", "UDP port 8472", reply, is_open=is_open).state == state


def test_translation_is_told_where_addresses_differ() -> None:
    uplink = UplinkStatus("eth0", 1500, ("10.0.2.15", "fd00::1"), ("203.0.113.1", "fd00::1"))
    assert [each.state for each in translated(uplink)] == ["hint", "ok"]
    assert masqueraded("peer", "10.5.1.0", frozenset({"10.5.1.0"})).state == "ok"
    assert masqueraded("peer", "198.18.0.1", frozenset({"10.5.1.0"})).state == "hint"


PEERS = [
    {"subnets": [f"10.5.{number}.0/24"], "public_ips": [f"192.0.2.{number}"], "state": "in the kernel"}
    for number in (2, 3)
]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(size=1451), "packets of 1451 bytes do not fit the network's MTU; give at most 1450"),
        (
            Wanted("10.5.2.0/24", "10.5.3.7"),
            "10.5.3.7 is no container of 10.5.2.0/24; it is of 10.5.3.0/24 (192.0.2.3)",
        ),
        (Wanted("10.5.9.0"), "no peer is known at 10.5.9.0; flannelctl peers lists them"),
    ],
)
def test_what_cannot_be_examined_is_refused(wanted: Wanted, text: str) -> None:
    source = DataSource("daemon", status_of({"mtu": 1450, "peers": PEERS}))
    with pytest.raises(FlannelError) as caught:
        examine(source, wanted, lambda _: None)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "container"),
    [("worker-2", None), ("10.5.2.0/24", None), ("192.0.2.2", None), ("10.5.2.7", ip_address("10.5.2.7"))],
)
def test_peer_is_named_by_node_subnet_public_ip_or_container(name: str, container: IPAddress | None) -> None:
    told = status_of({"mtu": 1450, "peers": [PEERS[0] | {"node": "worker-2"}]})
    assert chosen(Wanted(name), told) == (list(told.each_peer), container)
