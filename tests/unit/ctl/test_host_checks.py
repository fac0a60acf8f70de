"""What the doctor says about this host: its firewall, files, bridges and queues."""

from __future__ import annotations

from ipaddress import IPv4Network, ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks import Facts
from flanneld.ctl.checks.host import CniFile, LeftRules
from flanneld.ctl.doctor import examine
from flanneld.ctl.drops import MASQUERADES, REDIRECTS, Drop
from flanneld.ctl.paths import DISCOVERY, FROM_CONTAINERS, PathToPeer
from flanneld.findings import Severity
from flanneld.subnet.subnet_file import Previous
from tests.unit.ctl.findings import HINT, PROBLEM, backend, document, evidence, said
from tests.unit.ctl.test_checks import (
    ACCEPT,
    CALICO,
    CONTAINER,
    FLANNEL,
    WELL,
    bridge,
    flannel,
    link,
    path,
    peer,
    port_of,
)


def test_families_whose_rules_are_missing_are_told_with_their_place() -> None:
    facts = document(firewall={"place": "iptables-nft", "not_in_place": ["IPv4", "IPv6"]})
    assert [problem for _, problem, _ in said("rules", facts)] == [
        "the rules for IPv4 are not in place",
        "the rules for IPv6 are not in place",
    ]
    assert set(evidence("rules", facts)) == {"they belong in iptables-nft"}


@pytest.mark.parametrize(
    ("facts", "packets"),
    [
        (WELL, "UDP port 8472"),
        (backend("vxlan", port=4789), "UDP port 4789"),
        (backend("ipip"), "IP protocol 4"),
        (backend("host-gw"), ""),
        (backend("wireguard"), ""),
        (backend("ipsec"), ""),
        (replace(WELL, is_guarded=True), ""),
    ],
    ids=["vxlan", "another port", "ipip", "no packets of its own", "wireguard", "ipsec", "guarded"],
)
def test_public_address_opens_a_tunnel_that_does_not_encrypt(facts: Facts, packets: str) -> None:
    problem = f"any host that reaches 8.8.4.4, 2600::1 by {packets} can send packets to containers"
    public = [("eth0", ip_address(each)) for each in ("8.8.4.4", "10.0.0.1", "2600::1")]
    elsewhere = ("eth1", ip_address("8.8.8.8"))
    found = said("open tunnel", replace(facts, addresses=(*WELL.addresses, *public, elsewhere)))
    assert [each[:2] for each in found] == [(HINT, problem)] * bool(packets)
    assert not said("open tunnel", replace(facts, addresses=(*WELL.addresses, elsewhere)))


@pytest.mark.parametrize(
    ("facts", "program", "advice"),
    [
        (WELL, "ufw", "let it forward the network and let in UDP port 8472, in ufw's own configuration"),
        (
            backend("host-gw"),
            "ufw",
            "let it forward the network and let in the packets of its peers, in ufw's",
        ),
        (
            backend("ipip", "10.5.0.0/16", "fc00::/48"),
            "firewalld",
            "firewall-cmd --permanent --zone=trusted --add-source=10.5.0.0/16;"
            " firewall-cmd --permanent --zone=trusted --add-source=fc00::/48;"
            " firewall-cmd --permanent --add-protocol=ipencap; firewall-cmd --reload",
        ),
    ],
)
def test_firewalls_are_told_what_to_let_in(facts: Facts, program: str, advice: str) -> None:
    ((severity, problem, cure),) = said("keepers", replace(facts, firewalls=(program,)))
    assert (severity, problem) == (HINT, f"{program} is at work here")
    assert cure.startswith(advice)


FILE = "/run/flannel/subnet.env"
OTHER_SUBNET = replace(WELL.previous, subnets=(IPv4Network("10.5.7.0/24"), None))


@pytest.mark.parametrize(
    ("facts", "problems", "cure"),
    [
        (replace(WELL, has_subnet_file=False), [f"there is no {FILE}"], "start the daemon: it writes"),
        (replace(document(health={"missing": ["x"]}), has_subnet_file=False), [], ""),
        (
            replace(document(health={"missing": ["x"]}), previous=Previous()),
            [f"{FILE} names no subnet"],
            "restart the daemon: it writes",
        ),
        (
            replace(WELL, previous=OTHER_SUBNET),
            [f"{FILE} has another subnet than the lease"],
            "restart the daemon: it writes",
        ),
        (replace(WELL, previous=OTHER_SUBNET, origin="host"), [], ""),
        (replace(WELL, previous=OTHER_SUBNET, status=document(lease=None).status), [], ""),
        (
            replace(WELL, previous=replace(WELL.previous, mtu=1400)),
            [f"{FILE} has the MTU 1400, wanted is 1450"],
            "restart the daemon, then the containers",
        ),
        (replace(WELL, previous=replace(WELL.previous, mtu=None)), [], ""),
        (replace(WELL, previous=replace(WELL.previous, mtu=1400), status=document(mtu=0).status), [], ""),
        (
            replace(WELL, previous=replace(OTHER_SUBNET, mtu=1500)),
            [f"{FILE} has another subnet than the lease", f"{FILE} has the MTU 1500, wanted is 1450"],
            "",
        ),
    ],
    ids=[
        "not there",
        "the daemon waits",
        "no subnet in it",
        "another subnet",
        "no lease is known",
        "no lease",
        "another MTU",
        "no MTU in it",
        "no MTU wanted",
        "both",
    ],
)
def test_subnet_file_is_compared_with_the_lease(facts: Facts, problems: list[str], cure: str) -> None:
    found = said("subnet file", facts)
    assert [problem for _, problem, _ in found] == problems
    assert all(each.startswith(cure) for *_, each in found)


def test_subnets_of_file_and_lease_are_told() -> None:
    found = evidence("subnet file", replace(WELL, previous=OTHER_SUBNET))
    assert found == ["10.5.7.0/24 there, 10.5.1.0/24 in the lease"]


DOCKER = (link("eth0"), flannel(), bridge("docker0"), port_of("docker0"))


@pytest.mark.parametrize(
    ("address", "facts", "found"),
    [
        ("10.5.7.1", WELL, [(PROBLEM, "docker0 has 10.5.7.1, which is not in our subnet")]),
        ("10.5.1.7", WELL, []),
        ("10.6.7.1", WELL, []),
        ("10.5.7.1", document(lease=None), []),
        ("10.5.7.1", document(devices=["flannel.1", "docker0"]), []),
        ("10.5.2.1", peer(state="unsafe"), []),
        ("10.5.2.1", peer(state="refused"), [(PROBLEM, "docker0 has 10.5.2.1, which is not in our subnet")]),
    ],
    ids=["of another node", "ours", "outside", "no lease", "flannel's", "a former subnet", "a refused lease"],
)
def test_bridge_of_containers_must_be_in_our_subnet(
    address: str, facts: Facts, found: list[tuple[Severity, str]]
) -> None:
    facts = replace(facts, links=DOCKER, addresses=(*WELL.addresses, ("docker0", ip_address(address))))
    assert [each[:2] for each in said("bridge subnet", facts)] == found
    for links in (DOCKER[:3], DOCKER[:2]):
        assert PROBLEM not in [each[0] for each in said("bridge subnet", replace(facts, links=links))]


# ---- packets that do not come ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rtt", "passing", "found"), [(None, (), 1), (0.1, (), 0), (None, (("10.5.2.0/24", 4),), 0)]
)
def test_peer_that_passes_packets_on_need_not_answer_a_probe(
    rtt: float | None, passing: tuple[tuple[str, Any], ...], found: int
) -> None:
    facts = peer(probe={"target": "10.5.2.0", "time": 1.0, "rtt": rtt})
    told_of = said("probes", replace(facts, passing=frozenset(passing)))
    assert [problem for _, problem, _ in told_of] == ["1 peer did not answer the last ICMP echo"] * found


@pytest.mark.parametrize(
    ("facts", "device", "traffic", "advice"),
    [
        (WELL, "flannel.1", (0, 20), "let in UDP port 8472 on all nodes"),
        (WELL, "flannel.1", (0, 19), ""),
        (WELL, "flannel.1", (1, 20), ""),
        (document(peers=[]), "flannel.1", (0, 20), ""),
        (backend("ipip"), "flannel.ipip", (0, 20), "let in IP protocol 4 on all nodes"),
        (backend("wireguard"), "flannel-wg", (0, 20), "let in the UDP port of Backend.ListenPort (51820) on"),
        (backend("wireguard"), "flannel-wg-v6", (0, 20), "let in the UDP port of Backend.ListenPortV6 ("),
        (backend("host-gw"), "flannel.1", (0, 20), "let in the packets of flannel.1 on all nodes"),
    ],
)
def test_device_that_only_sends_is_told_with_what_to_let_in(
    facts: Facts, device: str, traffic: tuple[int, int], advice: str
) -> None:
    found = said("port", replace(facts, traffic={device: traffic}))
    assert [problem for _, problem, _ in found] == [f"nothing ever came in through {device}"] * bool(advice)
    assert all(cure.startswith(advice) for *_, cure in found)


LOSSY = (path("underlay", None),)
OWN_CHAIN = Drop("chain c of table ip t", "UDP 8472", "udp drop", ACCEPT)
SPARE = "iptables -I FORWARD -s 10.5.0.0/16 -j ACCEPT"


@pytest.mark.parametrize(
    ("changes", "paths", "severity", "problem", "cure"),
    [
        ({}, (), PROBLEM, "this node drops UDP 8472", SPARE),
        ({"doubt": "limit"}, (), None, "", ""),
        ({"doubt": "limit"}, LOSSY, HINT, "this node may drop UDP 8472", SPARE),
        ({"doubt": "limit", "drops_the_rest": True}, (), HINT, "this node may drop UDP 8472", SPARE),
        ({"flow": DISCOVERY}, (), None, "", ""),
        ({"flow": FROM_CONTAINERS}, (), PROBLEM, f"this node drops {FROM_CONTAINERS}", SPARE),
        ({"flow": DISCOVERY}, LOSSY, PROBLEM, f"this node drops {DISCOVERY}", SPARE),
        ({"needs_decision": True}, (), PROBLEM, "this node drops UDP 8472", SPARE),
        (
            {"rule": "-A KUBE-POD-FW-1 -j DROP"},
            (),
            HINT,
            "this node drops UDP 8472",
            "if that is not meant: kubectl get networkpolicy",
        ),
        ({"rule": "-A X -j KUBE-POD-FW-1"}, (), PROBLEM, "this node drops UDP 8472", SPARE),
        (
            {"verb": MASQUERADES},
            (),
            HINT,
            "this node masquerades UDP 8472",
            f"have that program spare the network, as this does: {SPARE}",
        ),
        ({"verb": REDIRECTS}, (), PROBLEM, "this node redirects UDP 8472", SPARE),
    ],
)
def test_rule_is_a_problem_a_hint_or_nothing(
    changes: dict[str, Any], paths: tuple[PathToPeer, ...], severity: Severity | None, problem: str, cure: str
) -> None:
    found = said("filters", replace(WELL, filtered=(replace(OWN_CHAIN, **changes),), paths=paths))
    assert [each[0] for each in found] == ([severity] if severity else [])
    for _, what, how in found:
        assert what == f"{problem}: chain c of table ip t"
        assert how.startswith(cure)


def test_rule_that_exempts_from_masquerading_is_a_problem_and_explains_no_lost_echo() -> None:
    rule = "-A POSTROUTING -j ACCEPT"
    facts = replace(WELL, exempting=(("chain c", rule, ("iptables", "-D", "c")),))
    assert said("masquerade", facts) == [
        (
            PROBLEM,
            "packets of containers to other networks are not masqueraded: chain c",
            "if it is for some receivers only, have it name these (-d); to remove it: iptables -D c",
        )
    ]
    assert evidence("masquerade", facts) == [f"{rule}: it is before the daemon's rules"]
    lonely = replace(facts, containers=(replace(CONTAINER, is_heard=False),))
    assert {check.name for check, _ in examine(lonely)} == {"masquerade", "container echoes"}


@pytest.mark.parametrize(
    ("verb", "harm"),
    [
        ("drops", "no packet of a container gets to or from other nodes that way"),
        (MASQUERADES, "containers there see an address of this node as the sender"),
        (REDIRECTS, "they get to another receiver"),
    ],
)
def test_harm_of_a_rule_is_that_of_what_it_does(verb: str, harm: str) -> None:
    facts = replace(WELL, filtered=(replace(OWN_CHAIN, verb=verb),))
    assert [each.why.startswith(harm) for check, each in examine(facts) if check.name == "filters"] == [True]


@pytest.mark.parametrize(
    ("rule", "doubt", "words"),
    [
        ("udp drop", "", "udp drop"),
        ("", "", "no rule accepts them, and the chain's policy is to drop"),
        ("udp drop", "udp drop", "udp drop; whether this rule is about them cannot be told"),
        ("udp drop", "limit", "udp drop; whether this rule is about them cannot be told: limit"),
    ],
)
def test_rule_that_drops_is_the_evidence(rule: str, doubt: str, words: str) -> None:
    drop = replace(OWN_CHAIN, rule=rule, doubt=doubt, drops_the_rest=True)
    assert evidence("filters", replace(WELL, filtered=(drop,))) == [words]


@pytest.mark.parametrize(
    ("kind", "filters", "paths", "severity", "cure"),
    [
        ("tbf", (), (), HINT, "tc -s qdisc show dev eth0; tc qdisc del dev eth0 root"),
        ("tbf", (), LOSSY, PROBLEM, "tc -s qdisc show dev eth0; tc qdisc del dev eth0 root"),
        ("fq", (), (path("tunnel", 1450),), None, ""),
        ("fq", (), (path("tunnel", 1450), *LOSSY), HINT, "tc -s qdisc show dev eth0; tc qdisc del"),
        (
            "clsact",
            (
                ("eth0", "ingress pref 1 flower"),
                ("eth", "egress pref 7 bpf"),
                ("eth1", "egress pref 7 bpf"),
                ("eth0", "ingress pref 2 bpf"),
            ),
            LOSSY,
            PROBLEM,
            "tc -s filter show dev eth0 ingress; tc filter del dev eth0 ingress pref 1 flower;"
            " tc filter del dev eth0 ingress pref 2 bpf",
        ),
        ("tbf", (("eth0", "ingress pref 1 flower"),), (), HINT, "tc -s qdisc show dev eth0; tc qdisc del"),
    ],
)
def test_queue_or_filter_that_drops_packets_is_told_with_what_removes_it(
    kind: str,
    filters: tuple[tuple[str, str], ...],
    paths: tuple[PathToPeer, ...],
    severity: Severity | None,
    cure: str,
) -> None:
    found = said(
        "traffic control", replace(WELL, queued={("eth0", kind): 3}, tc_filters=filters, paths=paths)
    )
    assert [each[0] for each in found] == ([severity] if severity else [])
    prefix = "raise the limit, or remove it if it is not needed: "
    assert all(how.startswith(prefix + cure) for *_, how in found)


def test_lost_packets_of_a_container_make_a_queue_a_problem() -> None:
    silent = replace(CONTAINER, unanswered="9 of 10 echoes to 10.5.2.0")
    facts = replace(WELL, queued={("eth0", "tbf"): 3}, containers=(silent,))
    assert [each[0] for each in said("traffic control", facts)] == [PROBLEM]
    assert evidence("traffic control", facts) == ["3 packets while peers and containers were probed"]


def test_few_of_many_left_rules_are_shown_and_all_are_removed() -> None:
    commands = tuple(("iptables", "-D", str(each)) for each in range(5))
    left = LeftRules(tuple(f"rule {each}" for each in range(5)), commands)
    facts = replace(WELL, left_rules=(left,))
    assert evidence("left rules", facts) == ["rule 0; rule 1; rule 2; and 2 more"]
    assert said("left rules", facts)[0][2].count("iptables -D") == 5


ODD = CniFile("/etc/cni/net.d/05 odd.conf", ("bridge", "tuning"))


@pytest.mark.parametrize(
    ("confs", "changes", "found"),
    [
        (
            (ODD, FLANNEL, replace(FLANNEL, path="/etc/cni/net.d/20-flannel.conflist")),
            {},
            (HINT, "if that plug-in is no longer used: rm '/etc/cni/net.d/05 odd.conf', and restart the"),
        ),
        ((FLANNEL, CALICO), {}, None),
        (
            (FLANNEL, CALICO),
            {"origin": "host"},
            (PROBLEM, f"start the daemon; if flannel is no longer used here: rm {FLANNEL.path}"),
        ),
        ((FLANNEL,), {"origin": "store"}, None),
        (
            (FLANNEL,),
            {"origin": "store", "has_subnet_file": False},
            (PROBLEM, f"start the daemon; if flannel is no longer used here: rm {FLANNEL.path}"),
        ),
        ((FLANNEL,), {"has_subnet_file": False}, None),
    ],
)
def test_first_cni_config_decides(
    confs: tuple[CniFile, ...], changes: dict[str, Any], found: tuple[Severity, str] | None
) -> None:
    facts = replace(replace(WELL, cni=confs), **changes)
    told_of = said("cni", facts)
    assert [each[0] for each in told_of] == ([found[0]] if found else [])
    assert found is None or told_of[0][2].startswith(found[1])
    if confs[0] is ODD:
        before = f"{ODD.path} names bridge, tuning, and comes before {FLANNEL.path}"
        assert evidence("cni", facts) == [before]
