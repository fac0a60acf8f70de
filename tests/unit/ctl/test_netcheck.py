"""Where packets stop, and what spoils them: judgements over measurements."""

from __future__ import annotations

import errno
from ipaddress import IPv4Address, IPv4Network, ip_address

import pytest
from msgspec.structs import replace

from flanneld.ctl.netcheck import (
    PathReport,
    Result,
    Series,
    Stage,
    Verdict,
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
from flanneld.state.resources import Address, Route
from tests.unit.ctl.documents import object_of, status_of

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


def series(
    stage: Stage, sent: int, *rtts: float, to: str = "10.5.2.0", error: int = 0, port: int = 0
) -> Series:
    return Series(stage, to, 84, sent, rtts, error, port=port)


REFUSED = errno.ECONNREFUSED
OK, HINT, BROKEN, UNKNOWN = State.OK, State.HINT, State.PROBLEM, State.UNKNOWN


@pytest.mark.parametrize(
    ("found", "state", "shown", "note"),
    [
        (series(Stage.TUNNEL, 2, 0.002, 0.004), OK, "2 of 2, 2.00/3.00/4.00 ms", ""),
        (series(Stage.TUNNEL, 3, 0.002, 0.004), HINT, "2 of 3, 2.00/3.00/4.00 ms", ""),
        (series(Stage.TUNNEL, 2), BROKEN, "0 of 2", "no answer"),
        (series(Stage.UNDERLAY, 2), UNKNOWN, "0 of 2", "no answer"),
        (series(Stage.CONTAINER, 2, error=REFUSED), BROKEN, "0 of 2", "no answer"),
        (series(Stage.THERE, 2), BROKEN, "0 of 2", "no answer"),
    ],
)
def test_stage_is_told_with_what_arrived_and_its_times(
    found: Series, state: State, shown: str, note: str
) -> None:
    (result,) = judge(PEER, [found], [], status_of({}))
    assert (result.check, result.about, result.state) == (found.stage.value, "10.5.2.0/24", state)
    assert (result.found, result.note) == (f"10.5.2.0, 84 bytes: {shown}", note)
    assert result.plain()["sent"] == found.sent
    assert result.plain()["lost"] == found.sent - len(found.rtts)
    assert "more" not in result.plain()


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ([series(Stage.TUNNEL, 2), series(Stage.UDP, 2, error=REFUSED)], [UNKNOWN, OK]),
        ([series(Stage.TUNNEL, 2), series(Stage.UDP, 2, error=errno.EHOSTUNREACH)], [BROKEN, BROKEN]),
        ([series(Stage.TUNNEL, 2), series(Stage.UDP, 1, 0.1, to="10.5.3.0")], [BROKEN, OK]),
        ([series(Stage.TUNNEL, 2, 0.1), series(Stage.CONTAINER, 2)], [HINT, BROKEN]),
    ],
    ids=["it refuses UDP", "a router refuses", "another answers", "a container is silent"],
)
def test_silence_of_a_node_is_a_problem_unless_it_answers_otherwise(
    found: list[Series], states: list[State]
) -> None:
    results = list(judge(PEER, found, [], status_of({})))
    assert [each.state for each in results] == states


def test_node_whose_daemon_answers_no_queries_is_reached() -> None:
    (result,) = judge(PEER, [series(Stage.UDP, 1, error=REFUSED)], [], status_of({}))
    assert (result.found, result.note) == (
        "10.5.2.0: port closed",
        "UDP arrives; the daemon does not answer queries",
    )


ROUTE = Route(IPv4Network("10.5.2.0/24"), "flannel.1", IPv4Address("10.5.2.0"), onlink=True)


@pytest.mark.parametrize(
    ("device", "echo", "is_open"),
    [
        ("flannel.1", series(Stage.TUNNEL, 2, 0.1), True),
        ("flannel.1", series(Stage.TUNNEL, 2), False),
        ("flannel.1", series(Stage.UDP, 2, 0.1), False),
        ("eth0", series(Stage.TUNNEL, 2, 0.1), False),
    ],
    ids=["through the device", "no answer", "another stage", "past the device"],
)
def test_port_is_open_if_an_echo_comes_through_the_device(device: str, echo: Series, is_open: bool) -> None:
    objects = [object_of(replace(ROUTE, device=device))]
    told = status_of({"devices": ["flannel.1"], "peers": [{"subnets": ["10.5.2.0/24"], "objects": objects}]})
    port = series(Stage.PORT, 1, to="192.0.2.2", port=8472)
    first, *_ = judge(told.each_peer[0], [port, echo], [], told)
    assert first.state == (OK if is_open else UNKNOWN)
    assert first.found == f"UDP port 8472 of 192.0.2.2 {'is open' if is_open else 'gives no answer'}"


@pytest.mark.parametrize(
    ("carried", "state", "shown"),
    [
        (1450, OK, "1450 of 1450 bytes"),
        (1400, BROKEN, "1400 of 1450 bytes"),
        (None, UNKNOWN, "- of 1450 bytes"),
    ],
)
def test_sizes_are_results_of_their_own(carried: int | None, state: State, shown: str) -> None:
    (result,) = judge(PEER, [], [path("tunnel", carried)], status_of({}))
    assert (result.check, result.state, result.found) == ("path MTU, tunnel", state, shown)
    assert result.plain()["carried"] == carried


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (CLOSED, "is closed"),
        (REJECTED, "is rejected (EHOSTUNREACH)"),
        (Reply(error=9999), "is rejected (9999)"),
    ],
)
def test_port_that_is_closed_or_rejected_is_told_by_its_error(reply: Reply, words: str) -> None:
    assert port_state("peer", "UDP port 8472", reply, is_open=True).found == f"UDP port 8472 {words}"


def test_report_is_about_the_first_peer_that_is_not_reached() -> None:
    fine, broken = Verdict(None, "packets pass"), Verdict("tunnel", "lost")
    report = PathReport([], [("a", fine), ("b", broken), ("c", Verdict("udp", "lost"))], [])
    assert (report.worst, report.is_wrong) == (broken, True)
    assert report.plain() == {"checks": [], "stops_at": "tunnel", "reason": "lost"}
    assert [row for table in report.tables() for row in table.rows] == [
        ("a: packets pass",),
        ("b: stops at tunnel; lost",),
        ("c: stops at udp; lost",),
    ]
    well = PathReport([], [("a", fine), ("b", Verdict(None, "x"))], [])
    assert (well.worst, well.is_wrong) == (fine, False)
    assert PathReport([], [], []).worst.reason == "no peer is in the kernel"


@pytest.mark.parametrize(("state", "is_wrong"), [(BROKEN, True), (HINT, False), (UNKNOWN, False)])
def test_report_is_wrong_for_any_problem(state: State, is_wrong: bool) -> None:
    found = Result("port", "a", state, "closed", "look", {"to": "x"})
    report = PathReport([found], [("a", Verdict(None, "packets pass"))], [])
    assert report.is_wrong is is_wrong
    assert report.tables()[0].rows == [("port", "a", state, "closed", "look")]
    assert report.plain()["checks"] == [
        {"check": "port", "about": "a", "state": state, "found": "closed", "note": "look", "to": "x"}
    ]


@pytest.mark.parametrize(
    ("found", "at", "reason"),
    [
        (
            [lost(Stage.UNDERLAY), series(Stage.PORT, 1, to="192.0.2.2", error=REFUSED), lost(Stage.TUNNEL)],
            "port",
            "nothing listens there: flanneld on 192.0.2.2 has no device",
        ),
        (
            [series(Stage.PORT, 1, error=errno.EPERM), lost(Stage.TUNNEL)],
            "port",
            "a firewall rejects it",
        ),
        ([series(Stage.PORT, 1, error=REFUSED)], None, "the node answers; its backend has no address"),
        ([series(Stage.UNDERLAY, 2, to="192.0.2.2"), lost(Stage.TUNNEL)], "underlay", "192.0.2.2 does not"),
        ([good(Stage.UNDERLAY), lost(Stage.TUNNEL)], "tunnel", "10.5.2.0 does not answer, its host does"),
        (
            [series(Stage.CONTAINER, 2, error=errno.ENETUNREACH)],
            "container",
            "its node answers that there is",
        ),
        ([good(Stage.TUNNEL), series(Stage.UDP, 5, 0.1)], "udp", "packets lost: 4 of 5"),
        (
            [good(Stage.TUNNEL), good(Stage.UDP), lost(Stage.THERE)],
            "tunnel",
            "packets of 84 bytes do not get",
        ),
        (
            [good(Stage.TUNNEL), good(Stage.UDP), good(Stage.THERE), lost(Stage.BACK)],
            "tunnel",
            "packets of 84 bytes get there and do not come back",
        ),
        ([good(Stage.TUNNEL), lost(Stage.UDP)], None, "packets get to the node, which answers no UDP"),
    ],
)
def test_verdict_says_what_stops_the_packets(found: list[Series], at: str | None, reason: str) -> None:
    said = verdict(found)
    assert said.at == at
    assert said.reason.startswith(reason)


def test_first_known_cause_beats_a_guess_where_packets_stop() -> None:
    causes = [
        Result("filter", "a", state, name, "why")
        for state, name in ((HINT, "hint"), (BROKEN, "first"), (BROKEN, "second"))
    ]
    assert verdict([lost(Stage.TUNNEL)], causes=causes).reason == "first: why"
    assert verdict([good(Stage.TUNNEL)], causes=causes).reason == "packets pass in both directions"


@pytest.mark.parametrize(
    ("stage", "size", "at"),
    [
        (Stage.BACK, 1450, None),
        (Stage.BACK, 1400, "tunnel"),
        (Stage.THERE, 1450, "tunnel"),
        (Stage.UDP, 1450, "tunnel"),
    ],
)
def test_large_echoes_may_be_filtered_where_large_queries_come_back(
    stage: Stage, size: int, at: str | None
) -> None:
    found = [good(Stage.TUNNEL), Series(stage, "10.5.2.0", size, 2, RTTS)]
    assert verdict(found, [path("tunnel", None)]).at == at


MANY = [
    {"subnets": [f"10.5.{number}.0/24"], "state": state}
    for number, state in enumerate(["contested", "refused", *["in the kernel"] * 9], 1)
]


def test_without_a_name_a_few_peers_that_are_reached_are_chosen() -> None:
    told = status_of({"peers": MANY})
    peers, container = chosen(Wanted(), told)
    assert [each.name for each in peers] == [f"10.5.{number}.0/24" for number in range(3, 3 + len(peers))]
    assert 1 < len(peers) < len(MANY) - 1
    assert container is None


@pytest.mark.parametrize(
    ("name", "local", "container"),
    [
        ("10.5.2.0", [Address("flannel.1", IPv4Address("10.5.1.0"))], None),
        ("10.5.2.0", [], ip_address("10.5.2.0")),
        ("10.5.2.9", [Address("flannel.1", IPv4Address("10.5.1.0"))], ip_address("10.5.2.9")),
        ("192.0.2.2", [], None),
    ],
    ids=["its end of the tunnel", "no tunnel", "a container", "its public IP"],
)
def test_address_of_the_node_itself_is_no_container(
    name: str, local: list[Address], container: IPAddress | None
) -> None:
    told = status_of({"peers": PEERS, "local": [object_of(each) for each in local]})
    assert chosen(Wanted(name), told)[1] == container
