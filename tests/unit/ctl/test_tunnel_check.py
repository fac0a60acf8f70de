"""What the doctor says about peers that do not answer: which loss is told, and what is to be done."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks import Facts, see_first
from flanneld.ctl.doctor import examine
from flanneld.ctl.drops import MASQUERADES, Drop
from flanneld.ctl.losses import Lost
from flanneld.ctl.paths import TO_NODES, PathToPeer
from flanneld.diagnostics.status import Status
from flanneld.findings import Finding, Severity
from flanneld.state.resources import Route
from tests.unit.ctl.documents import object_of
from tests.unit.ctl.test_checks import DOCUMENT, OFF_LINK, WELL, link, path, told

PEER = "10.5.2.0/24"
DROP = Drop("chain INPUT of table ip filter", "UDP 8472", "-j DROP", (), families=frozenset({4}))
#: The IPv4 tunnel is silent, that of IPv6 too; the nodes reach each other over both.
UNDERLAY = (path("underlay", 1500), path("underlay", 1500, "fd00::2"))
TUNNEL4, TUNNEL6 = path("tunnel", None), path("tunnel", None, "fc00:5::")


def with_backend(name: str, **facts: Any) -> Facts:
    return replace(told(lambda d: d["network"].update(backend=name)), **facts)


def tunnels(facts: Facts) -> list[Finding]:
    return [finding for check, finding in examine(facts) if check.name == "tunnel"]


@pytest.mark.parametrize(
    ("cause", "number"),
    [
        ({}, 2),
        ({"filtered": (DROP,)}, 1),
        ({"filtered": (replace(DROP, doubt="limit"),)}, 2),
        ({"filtered": (replace(DROP, families=frozenset()),)}, 2),
        ({"filtered": (replace(DROP, families=frozenset({4, 6})),)}, 0),
        ({"lost": (Lost(TO_NODES, "rule", "5", "it blackholes", families=frozenset({4})),)}, 1),
        ({"lost": (Lost(TO_NODES, "rule", "5", "it blackholes", families=frozenset()),)}, 2),
    ],
    ids=["none", "a drop", "a doubtful drop", "a drop of none", "a drop of both", "a loss", "a loss of none"],
)
@pytest.mark.parametrize("backend", ["vxlan", "wireguard", "xfrm-mesh"])
def test_silence_is_explained_by_a_known_cause_of_its_family(
    backend: str, cause: dict[str, Any], number: int
) -> None:
    """One tunnel of WireGuard may carry both families."""
    facts = with_backend(backend, paths=(*UNDERLAY, TUNNEL4, TUNNEL6), **cause)
    assert len(tunnels(facts)) == (0 if backend == "wireguard" and number < 2 else number)


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("vxlan", "no answer from 1 peer over IPv6, neither from the node nor through the tunnel"),
        ("wireguard", "no packet comes back through the tunnel to 192.0.2.2"),
        ("xfrm-mesh", "no answer from 1 peer over IPv6, neither from the node nor through the tunnel"),
    ],
)
def test_tunnel_of_one_family_goes_over_the_other_with_wireguard_only(backend: str, problem: str) -> None:
    (finding,) = tunnels(with_backend(backend, paths=(UNDERLAY[0], TUNNEL6)))
    assert finding.problem == problem


@pytest.mark.parametrize(
    ("paths", "public"),
    [
        ((*UNDERLAY, TUNNEL4), "192.0.2.2"),
        ((*UNDERLAY, TUNNEL6), "fd00::2"),
        ((UNDERLAY[1], UNDERLAY[0], TUNNEL4), "192.0.2.2"),
    ],
)
def test_silent_tunnel_is_told_with_the_public_ip_of_its_family(
    paths: tuple[PathToPeer, ...], public: str
) -> None:
    inner = paths[-1].target
    (finding,) = tunnels(replace(WELL, paths=paths))
    assert finding.problem == f"no packet comes back through the tunnel to {public}"
    assert finding.evidence == f"{public} answers ICMP echoes, {inner} behind the tunnel does not"
    assert finding.about == PEER
    (refused,) = tunnels(replace(WELL, paths=paths, refusing=frozenset({public})))
    assert refused.evidence.endswith("; the node refuses our UDP port")
    assert refused.cure.startswith("see that flannel runs there with the same Backend.Port")


def test_silent_tunnel_of_wireguard_may_go_to_the_public_ip_of_another_family() -> None:
    paths = (path("tunnel", 1450, "fc00:5::"), UNDERLAY[1], TUNNEL4)
    (finding,) = tunnels(with_backend("wireguard", paths=paths))
    assert finding.problem == "no packet comes back through the tunnel to fd00::2"


def many(number: int) -> tuple[Facts, list[str]]:
    names = [f"10.5.{each}.0/24" for each in range(2, 2 + number)]
    peers = [
        {**DOCUMENT["peers"][0], "subnets": [name], "public_ips": [f"192.0.2.{each}"]}
        for each, name in enumerate(names, 2)
    ]
    return told(lambda d: d.update(peers=peers)), names


def test_a_few_of_many_silent_tunnels_are_told() -> None:
    facts, names = many(5)
    paths = [
        PathToPeer(kind, ip_address(f"{net}.{number}.{host}"), 1450, carried, name)
        for number, name in enumerate(names, 2)
        for kind, net, host, carried in (("underlay", "198.18", 1, 1450), ("tunnel", "10.5", 0, None))
    ]
    assert [each.about for each in tunnels(replace(facts, paths=tuple(paths)))] == names[:3]


def test_silent_nodes_are_one_finding_that_names_a_few() -> None:
    facts, names = many(5)
    paths = [
        PathToPeer("tunnel", ip_address(f"10.5.{number}.0"), 1450, None, name)
        for number, name in enumerate(names, 2)
    ]
    (finding,) = tunnels(replace(facts, paths=tuple(paths)))
    assert finding.problem == "no answer from 5 peers, neither from the node nor through the tunnel"
    shown = ", ".join(f"{name} (192.0.2.{each})" for each, name in enumerate(names[:3], 2))
    assert finding.evidence == f"{shown}, and 2 more"
    assert finding.why.startswith("neither ICMP nor TCP comes back: the nodes are off, or a firewall")
    assert "flannelctl lease delete SUBNET" in finding.cure


TURNED_AWAY = ((PEER, ip_address("10.5.1.1"), False), ("10.5.3.0/24", ip_address("10.5.1.2"), True))


@pytest.mark.parametrize(
    ("changes", "certainty", "severity", "evidence"),
    [
        ({}, "", Severity.PROBLEM, "10.5.2.0/24 (192.0.2.2), from 10.5.1.1"),
        ({"turned_away": TURNED_AWAY[1:]}, "may ", Severity.HINT, "10.5.3.0/24 (192.0.2.3), from 10.5.1.2"),
        (
            {"filtered": (replace(DROP, doubt="limit"), replace(DROP, verb=MASQUERADES))},
            "",
            Severity.PROBLEM,
            "10.5.2.0/24 (192.0.2.2), from 10.5.1.1",
        ),
    ],
    ids=["sure", "unsure", "doubtful or other causes"],
)
def test_containers_that_lose_packets_without_a_tunnel_are_told_to_whom(
    changes: dict[str, Any], certainty: str, severity: Severity, evidence: str
) -> None:
    facts, _ = many(2)
    (finding,) = tunnels(replace(replace(facts, turned_away=TURNED_AWAY), **changes))
    assert (
        finding.problem == f"packets of containers to 1 peer {certainty}get lost, and those of nodes do not"
    )
    assert (finding.severity, finding.evidence) == (severity, evidence)
    assert ("set Backend.Type to vxlan" in finding.cure) is (severity is Severity.PROBLEM)


@pytest.mark.parametrize(
    "cause",
    [{"filtered": (DROP,)}, {"lost": (Lost(TO_NODES, "rule", "5", "", families=frozenset({4})),)}],
    ids=["a drop", "a loss"],
)
def test_containers_that_lose_packets_for_a_known_cause_are_not_told_again(cause: dict[str, Any]) -> None:
    assert not tunnels(replace(WELL, turned_away=TURNED_AWAY, **cause))


@pytest.mark.parametrize(
    ("routes", "paths", "passing", "number"),
    [
        ((OFF_LINK,), (path("underlay", None),), (), 1),
        ((), (path("underlay", None),), (), 0),
        ((replace(OFF_LINK, gateway=ip_address("192.0.2.3")),), (path("underlay", None),), (), 0),
        ((OFF_LINK,), (path("underlay", None),), ((PEER, 4),), 0),
        ((OFF_LINK,), (path("underlay", None),), ((PEER, 6),), 1),
        ((OFF_LINK,), (path("underlay", None), path("tunnel", 1450)), (), 0),
        ((OFF_LINK,), (path("underlay", None), path("tunnel", 1450, "fc00:5::")), (), 1),
    ],
    ids=[
        "a gateway",
        "a cloud's node",
        "another gateway",
        "it passes packets on",
        "it passes those of IPv6 on",
        "its tunnel answers",
        "its tunnel of IPv6 answers",
    ],
)
def test_public_ip_need_answer_only_as_a_gateway_without_a_tunnel(
    routes: tuple[Route, ...],
    paths: tuple[PathToPeer, ...],
    passing: tuple[tuple[str, Any], ...],
    number: int,
) -> None:
    facts = told(lambda d: d["peers"][0].update(objects=[object_of(each) for each in routes]))
    assert len(tunnels(replace(facts, paths=paths, passing=frozenset(passing)))) == number


XDP = (replace(link("eth0"), xdp="xdpgeneric"), *WELL.links[1:])
DOUBT = replace(DROP, doubt="limit rate")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (WELL, ""),
        (replace(WELL, filtered=(DROP,)), ""),
        (replace(WELL, filtered=(DOUBT, DOUBT)), "see first whether this rule drops them: -j DROP; else "),
        (
            replace(WELL, filtered=(replace(DOUBT, rule=""), replace(DOUBT, rule="-p udp"))),
            f"see first whether this rule drops them: policy of {DROP.chain}; -p udp; else ",
        ),
        (
            replace(WELL, links=XDP),
            "see first whether the XDP program of eth0 does: ip link set dev eth0 xdpgeneric off; else ",
        ),
        (
            replace(WELL, links=XDP, filtered=(DOUBT,)),
            "see first whether this rule drops them: -j DROP or the XDP program of eth0 does:"
            " ip link set dev eth0 xdpgeneric off; else ",
        ),
        (replace(WELL, status=Status()), ""),
    ],
    ids=["nothing", "a sure rule", "a doubtful rule", "a policy", "a program", "both", "no uplink"],
)
def test_doubtful_causes_on_this_host_are_looked_at_before_the_network(facts: Facts, words: str) -> None:
    assert see_first(facts) == words
