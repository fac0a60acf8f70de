"""Rules for the nodes of a cluster: who breaks them."""

from __future__ import annotations

import re
from ipaddress import ip_address
from itertools import cycle
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.backends.registry import BUILT_IN, described
from flanneld.config import parse
from flanneld.ctl import doctor
from flanneld.ctl import nodes as commands
from flanneld.ctl.checks import Facts
from flanneld.ctl.checks.cluster import RULES, ClusterRule, cluster_findings, remarks
from flanneld.ctl.doctor import CHECKS, DoctorReport, with_cluster
from flanneld.ctl.nodes import Cluster, ClusterNode, Told, gather, own_node, told
from flanneld.ctl.output import table_lines
from flanneld.ctl.paths import takes_mtu
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import Status
from flanneld.findings import Finding, Severity
from flanneld.network.survey import SILENCE, Reply
from flanneld.state.resources import Address
from tests.unit.ctl.documents import object_of, status_of

NOW = 1_000_000.0
OWN = "10.5.1.0"
TOLD = Told("1.0", ("10.5.0.0/16 /24",), "vxlan", 1, 8472, 1450, 1500, "etcd v2", seen=OWN)


def node(number: int, **changes: Any) -> ClusterNode:
    sound = ClusterNode(
        subnets=(f"10.5.{number}.0/24",),
        public_ips=(f"198.18.0.{number}",),
        macs=(f"02:00:00:00:00:{number:02x}",),
        backend="vxlan",
        vnis=(1,),
        expires=NOW + 80_000,
        state="in the kernel",
        is_own=number == 1,
        target=ip_address(f"10.5.{number}.0"),
        in_overlay=True,
        query=Reply(0.001, {"version": "1.0"}),
        told=TOLD,
    )
    return replace(sound, **changes)


def cluster(**changes: Any) -> Cluster:
    """Four nodes; the last one differs."""
    nodes = (*(node(number) for number in (1, 2, 3)), node(4, **changes))
    return Cluster(nodes, frozenset({OWN}), NOW)


def broken(of: Cluster) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in remarks(of):
        found.setdefault(each.rule.name, set()).add(each.node.name)
    return found


LAST = "10.5.4.0/24"
MUTE: dict[str, Any] = {"told": None, "query": SILENCE}


@pytest.mark.parametrize(
    ("rule", "changes", "who"),
    [
        ("silent nodes", MUTE, {LAST}),
        ("silent nodes", {"is_own": True, "is_running": False, "target": None}, {LAST}),
        ("silent nodes", {**MUTE, "underlay": Reply(0.001)}, {LAST}),
        ("unusable leases", {"state": "refused", "reason": "no MAC"}, {LAST}),
        ("conditions", {"told": replace(TOLD, conditions=("store",))}, {LAST}),
        ("conditions", {"told": replace(TOLD, ready=False)}, {LAST}),
        ("configs", {"backend": "udp"}, {LAST}),
        ("configs", {"vnis": (2,)}, {LAST}),
        ("configs", {"told": replace(TOLD, port=4789)}, {LAST}),
        ("configs", {"told": replace(TOLD, network=("10.6.0.0/16 /24",))}, {LAST}),
        ("MTUs", {"told": replace(TOLD, mtu=1400)}, {LAST}),
        ("stores", {"told": replace(TOLD, store="etcd v3")}, {LAST}),
        ("versions", {"told": replace(TOLD, version="2.0")}, {LAST}),
        ("shared public IPs", {"public_ips": ("198.18.0.3",)}, {"10.5.3.0/24", LAST}),
        ("shared MACs", {"macs": ("02:00:00:00:00:03",)}, {"10.5.3.0/24", LAST}),
        ("overlaps", {"subnets": ("10.5.3.128/25",)}, {"10.5.3.128/25"}),
        ("ends of leases", {"expires": NOW + 600}, {LAST}),
        ("ends of leases", {"expires": NOW - 1}, {LAST}),
        ("address translation", {"told": replace(TOLD, seen="198.18.0.1")}, {LAST}),
    ],
)
def test_rule_names_the_node_that_breaks_it(rule: str, changes: dict[str, Any], who: set[str]) -> None:
    found = cluster(**changes)
    assert broken(found) == {rule: who}
    ((check, finding),) = cluster_findings(remarks(found))
    assert (check.name, check.theme) == (rule, "N")
    assert any(name in finding.evidence for name in who)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (3000.0, []),
        (2999.0, ["its lease ends in 50 min"]),
        (1.0, ["its lease ends in 0 min"]),
        (0.0, ["its lease has expired"]),
        (-60.0, ["its lease has expired"]),
    ],
)
def test_lease_that_ends_within_50_minutes_was_not_renewed(left: float, said: list[str]) -> None:
    assert [each.text for each in remarks(cluster(expires=NOW + left))] == said


def test_advice_for_another_mtu_names_the_backends_with_an_option_for_it() -> None:
    ((_, finding),) = cluster_findings(remarks(cluster(told=replace(TOLD, mtu=1400))))
    assert isinstance(finding.remedy, str)
    names = sorted(name for name in BUILT_IN if takes_mtu(described(name)))
    assert f"with {' or '.join(names)} set Backend.MTU" in finding.remedy


def test_who_shares_a_value_is_told_with_whom() -> None:
    nodes = (*(node(number, public_ips=("198.18.0.9",)) for number in (1, 2, 3)), node(4))
    found = remarks(Cluster(nodes, frozenset({OWN}), NOW))
    ((_, finding),) = cluster_findings(found)
    assert finding.problem == "3 nodes with a public IP that is used twice"
    several = ", ".join(f"10.5.{number}.0/24 (198.18.0.9)" for number in (1, 2, 3))
    assert finding.evidence == f"{several} share the public IP 198.18.0.9"
    assert [each.text for each in found] == 3 * [finding.evidence]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ('{"Type": "vxlan", "VNI": 2}', "VNI 1, the store has 2"),
        ('{"Type": "vxlan", "Port": 4789}', "port 8472, the store has 4789"),
        ('{"Type": "vxlan", "MTU": 1400}', "MTU 1450, the store has Backend.MTU 1400"),
        ('{"Type": "host-gw"}', "backend vxlan, the store has host-gw"),
        ('{"Type": "host-gw", "Also": {"Type": "vxlan"}}', ""),
    ],
)
def test_store_beats_the_majority(backend: str, said: str) -> None:
    """After a change of the config one node was restarted: it is right, and all others are not."""
    stored = parse(f'{{"Network": "10.5.0.0/16", "Backend": {backend}}}')
    right = {"vni": 2, "port": 4789, "mtu": 1350, "backend": "host-gw"}
    its = {name: value for name, value in right.items() if said.lower().startswith(name)}
    restarted = replace(TOLD, **its)
    found = replace(cluster(told=restarted, backend=restarted.backend, vnis=(restarted.vni,)), stored=stored)
    wrong = {node.name for node in found.nodes} - {LAST} if said else set()
    assert broken(found).get("configs", set()) == wrong
    assert {each.text for each in remarks(found)} == ({said} if said else set())


def test_each_rule_has_a_case() -> None:
    marks = test_rule_names_the_node_that_breaks_it.pytestmark
    assert {case[0] for case in marks[0].args[1]} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Go's daemon answers no queries, and flannel 0.12 announces no VNI.
        {**MUTE, "query": Reply(error=111), "vnis": ()},
        {**MUTE, "echo": Reply(0.001), "vnis": ()},
        {"expires": None},
    ],
)
def test_sound_nodes_break_no_rule(changes: dict[str, Any]) -> None:
    assert remarks(cluster(**changes)) == []


@pytest.mark.parametrize("remotes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["file", "etcd v2", "etcd v3"])
def test_clients_of_a_lease_server_use_its_store_of_any_kind(kind: str, remotes: int) -> None:
    stores = [*(4 - remotes) * [kind], *remotes * ["remote"]]
    nodes = [node(number, told=replace(TOLD, store=store)) for number, store in enumerate(stores, 1)]
    assert remarks(Cluster(tuple(nodes), frozenset({OWN}), NOW)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_problem_of_a_rule_reads_well_after_one_node_and_after_several(rule: ClusterRule) -> None:
    assert re.match(r"(with|without|behind) |cannot be ", rule.problem)


def test_wireguard_nodes_may_share_a_public_ip() -> None:
    nodes = [replace(node(number), backend="wireguard", public_ips=("203.0.113.1",)) for number in (1, 2)]
    assert broken(Cluster(tuple(nodes), frozenset({OWN}), NOW)) == {}


def test_line_of_a_node_says_what_is_wrong_with_it() -> None:
    found = cluster(told=replace(TOLD, mtu=1400, version="2.0"))
    lines = {row[0]: row for row in commands.table(found, remarks(found)).rows}
    assert lines[LAST][2] == "PROBLEM"
    assert lines[LAST][-1] == "MTU 1400, most have 1450; version 2.0, most have 1.0"
    sound = ("ok", "1.0 ms", "vxlan", "1", "8472", "1450", "1.0", "etcd v2", "")
    assert lines["10.5.2.0/24"] == ("10.5.2.0/24", "198.18.0.2", *sound)
    (*_, mute) = commands.table(cluster(**MUTE), []).rows
    assert mute[4:10] == ("vxlan", "1", "-", "-", "-", "-")


@pytest.mark.parametrize(
    ("changes", "said"), [({}, []), (MUTE, []), ({**MUTE, "echo": Reply(0.001)}, ["of 1 node; start"])]
)
def test_nodes_without_answer_port_are_counted_with_the_remedy(
    changes: dict[str, Any], said: list[str]
) -> None:
    lines = commands.unanswered(cluster(**changes), DataSource("daemon", Status(answer_port=8471)))
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert expected in line
        assert "-answer-port=8471" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "what this node tells others; start flanneld here with -answer-port=8470,"),
        ({**MUTE, "echo": Reply(0.001)}, "of 1 node; start flanneld there and here with -answer-port=8470,"),
    ],
)
def test_own_daemon_without_answer_port_is_told_once(changes: dict[str, Any], said: str) -> None:
    (line,) = commands.unanswered(cluster(**changes), DataSource("daemon", Status(answer_port=0)))
    assert said in line


def test_finding_names_few_of_many_nodes() -> None:
    nodes = tuple(node(number, **MUTE) for number in range(2, 102))
    ((_, finding),) = cluster_findings(remarks(Cluster(nodes, frozenset({OWN}), NOW)))
    assert finding.problem == "100 nodes without an answer"
    assert finding.evidence.endswith("; and 97 more")
    assert finding.severity is Severity.PROBLEM


def test_findings_about_a_thousand_nodes_fit_on_one_screen() -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {}, {}, MUTE, {"told": replace(TOLD, mtu=1400, version="2.0")})
    nodes = tuple(
        replace(
            node(1),
            subnets=(f"10.{number // 250}.{number % 250}.0/24",),
            is_own=not number,
            public_ips=(),
            macs=(),
            **kind,
        )
        for number, kind in zip(range(1000), cycle(kinds), strict=False)
    )
    found = with_cluster([], remarks(Cluster(nodes, frozenset({OWN}), NOW)))
    lines = [line for each in DoctorReport(found, ()).tables() for line in table_lines(each)]
    assert [finding.severity for _, finding in found] == [Severity.PROBLEM, Severity.PROBLEM, Severity.HINT]
    assert len(lines) <= 24
    assert max(map(len, lines)) < 200


def test_nodes_are_listed_worst_first_behind_this_one() -> None:
    found = cluster(told=replace(TOLD, version="2.0"))
    found = replace(found, nodes=(*found.nodes, node(5, **MUTE)))
    rows = commands.table(found, remarks(found)).rows
    assert [row[2] for row in rows] == ["ok", "PROBLEM", "hint", "ok", "ok"]
    assert rows[0][3] == "this node"


def silence(about: str) -> Finding:
    return Finding("no packet comes back", "", "", "", about=about)


@pytest.mark.parametrize(("origin", "asked"), [("daemon", 0), ("store", 1)])
def test_doctor_of_the_cluster_asks_the_store_once(
    origin: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a daemon its network config is one of the facts of this host."""
    calls: list[DataSource] = []
    monkeypatch.setattr(doctor, "gather", lambda _: Facts())
    monkeypatch.setattr(commands, "read", lambda _: Cluster())
    monkeypatch.setattr(commands, "stored_config", calls.append)
    DoctorReport.of(DataSource(origin, Status()), is_cluster=True)
    assert len(calls) == asked


def test_doctor_names_a_silent_node_once_and_never_this_one() -> None:
    nodes = (node(1, is_running=False), *(node(number, **MUTE) for number in (2, 3)))
    found = remarks(Cluster(nodes, frozenset({OWN}), NOW))
    checks = {check.name: check for check in CHECKS}
    of_host = [
        (checks["tunnel"], silence("10.5.2.0/24")),
        (checks["tunnel"], silence("")),
        (checks["probes"], silence("")),
    ]
    (first, cause), (last, rest) = with_cluster(of_host, found)
    assert (first.name, cause.about) == ("tunnel", "10.5.2.0/24")
    assert (last.name, rest.evidence) == ("silent nodes", "10.5.3.0/24 (198.18.0.3): no answer")
    assert with_cluster(of_host, []) == of_host


def test_doctor_leaves_to_this_host_what_it_sees_of_all_nodes() -> None:
    nodes = (node(1, told=replace(TOLD, ready=False)), *(node(number, macs=(OWN,)) for number in (2, 3)))
    checks = {check.name: check for check in CHECKS}
    found = remarks(Cluster(nodes, frozenset({OWN}), NOW))
    here = [(checks["contested"], silence(""))]
    assert [check.name for check, _ in with_cluster([], found)] == ["shared MACs"]
    assert with_cluster(here, found) == here


def test_problems_of_the_cluster_come_before_hints_of_this_host() -> None:
    hint = replace(silence("eth0"), severity=Severity.HINT)
    found = with_cluster([(CHECKS[0], hint)], remarks(cluster(told=replace(TOLD, mtu=1400))))
    assert [finding.severity for _, finding in found] == [Severity.PROBLEM, Severity.HINT]


def test_long_texts_of_facts_are_cut() -> None:
    found = told({"version": "x" * 101, "network": ["x" * 101, "y"]})
    assert (found.version, found.network) == ("x" * 100, ("x" * 100, "y"))


@pytest.mark.parametrize("value", [None, 7, [1], {"a": 1}, "x" * 1000])
def test_facts_of_another_type_are_left_out(value: Any) -> None:
    """Whoever can answer in the place of a node can say anything."""
    found = told(dict.fromkeys(TOLD.__struct_fields__, value))
    for text in (found.version, found.backend, found.store, found.seen, *found.network, *found.conditions):
        assert text is None or len(text) <= 100
    for number in (found.vni, found.port, found.mtu, found.uplink_mtu):
        assert number is None or isinstance(number, int)


def test_node_without_a_store_tells_none() -> None:
    assert own_node(Status()).told == Told()


def test_silent_nodes_alone_are_asked_by_icmp_at_both_places() -> None:
    asked: list[tuple[str, list[str]]] = []

    def asking(name: str) -> Any:
        def ask(targets: Any) -> dict[Any, Reply]:
            wanted = list(targets)
            asked.append((name, [str(each) for each in wanted]))
            good = Reply(0.001, {"version": "1"} if name == "query" else {})
            return {
                each: good if str(each) in ("10.5.2.0", "10.5.3.0", "198.18.0.4") else SILENCE
                for each in wanted
            }

        return ask

    local = [object_of(Address("flannel.1", ip_address(OWN)))]
    peers = [
        {
            "subnets": [f"10.5.{number}.0/24"],
            "public_ips": [f"198.18.0.{number}"],
            "backend": "vxlan",
            "state": "in the kernel",
            "reason": "",
            "conflicts": [],
        }
        for number in (2, 4, 5)
    ]
    found = gather(status_of({"peers": peers, "local": local}), asking("query"), asking("echo"), NOW)
    assert asked == [
        ("query", ["10.5.2.0", "10.5.4.0", "10.5.5.0"]),
        ("echo", ["10.5.4.0", "10.5.5.0", "198.18.0.4", "198.18.0.5"]),
    ]
    assert [each.answers for each in found.nodes] == ["daemon", "host", "nothing"]
