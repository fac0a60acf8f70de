"""What the doctor says about containers and the bridge that they are on."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks import Facts
from flanneld.ctl.doctor import examine
from flanneld.ctl.inside import Container
from flanneld.findings import Finding, Severity
from flanneld.network.routing import PolicyRule
from tests.unit.ctl.test_checks import (
    CONTAINER,
    FORMER,
    WELL,
    bridge,
    container,
    flannel,
    link,
    path,
    peer,
    told,
)

NO_CNI0 = (link("eth0"), flannel())
HOST = WELL.addresses[:2]
FORMER_IP = ip_address("10.5.2.1")


def found(name: str, facts: Facts) -> list[Finding]:
    return [finding for check, finding in examine(facts) if check.name == name]


def steps(finding: Finding) -> list[str]:
    assert isinstance(finding.remedy, tuple)
    return [" ".join(each) for each in finding.remedy]


def cut_off(*containers: Container, **changes: Any) -> Facts:
    """A node without the bridge cni0, whose packets for these containers leave by the uplink."""
    away = tuple(replace(each, reached_by="eth0") for each in containers)
    return replace(replace(WELL, links=NO_CNI0, addresses=HOST, containers=away), **changes)


LOOSE = replace(CONTAINER, port="veth1", attached_to="veth1")
OTHER = replace(LOOSE, path="/run/netns/b", address=LOOSE.address + 1, port="veth2", attached_to="veth2")


@pytest.mark.parametrize(
    ("facts", "commands"),
    [
        (
            cut_off(LOOSE, OTHER),
            {
                "cni0": [
                    "ip link add cni0 up type bridge",
                    "ip link set dev veth1 master cni0",
                    "ip link set dev veth2 master cni0",
                    "ip address add 10.5.1.1/24 dev cni0",
                ]
            },
        ),
        (
            cut_off(LOOSE, links=(*NO_CNI0, bridge("docker0")), addresses=()),
            {
                "cni0": [
                    "ip link add cni0 up type bridge",
                    "ip link set dev veth1 master cni0",
                    "ip address add 10.5.1.1/24 dev cni0",
                ]
            },
        ),
        (
            cut_off(LOOSE, links=(*NO_CNI0, bridge("cni0"))),
            {"veth1": ["ip address add 10.5.1.1/24 dev veth1"]},
        ),
        (
            cut_off(LOOSE, addresses=(*HOST, ("br9", CONTAINER.address - 1))),
            {"veth1": ["ip address add 10.5.1.1/24 dev veth1"]},
        ),
        (
            cut_off(replace(LOOSE, attached_to="br9"), replace(OTHER, attached_to="zz9")),
            {"br9": ["ip address add 10.5.1.1/24 dev br9"], "zz9": ["ip address add 10.5.1.1/24 dev zz9"]},
        ),
        (
            cut_off(replace(LOOSE, attached_to="br9"), addresses=(("br9", CONTAINER.address - 1),)),
            {"br9": ["ip route replace 10.5.1.0/24 dev br9"]},
        ),
        (
            cut_off(
                replace(LOOSE, attached_to="br9"),
                addresses=(("br9", CONTAINER.address + 256), ("br8", CONTAINER.address - 1)),
            ),
            {"br9": ["ip address add 10.5.1.1/24 dev br9"]},
        ),
    ],
    ids=[
        "the bridge is gone",
        "another bridge is no use",
        "the bridge is there",
        "another bridge leads to the subnet",
        "ports have bridges",
        "the route is gone",
        "the address is outside the subnet",
    ],
)
def test_bridge_that_leads_to_containers_is_made_or_mended(
    facts: Facts, commands: dict[str, list[str]]
) -> None:
    seen = found("bridge address", facts)
    assert {each.about: steps(each) for each in seen} == commands
    for each in seen:
        assert ("there is no cni0" in each.evidence) == (each.about == "cni0")


@pytest.mark.parametrize(
    ("changes", "leaves_by", "cure"),
    [
        ({"reached_by": ""}, "no interface", "ip link add cni0 up type bridge; "),
        ({"reached_by": "eth0"}, "eth0", "ip link add cni0 up type bridge; "),
        (
            {"reached_by": "eth0", "detour": "10.5.1.2/32 dev eth0"},
            "eth0",
            "remove the other route, if it is not needed: ip route del 10.5.1.2/32 dev eth0",
        ),
    ],
    ids=["no route", "the uplink", "another route"],
)
def test_way_that_packets_take_instead_of_the_bridge_is_told(
    changes: dict[str, str], leaves_by: str, cure: str
) -> None:
    (finding,) = found("bridge address", replace(cut_off(), containers=(replace(LOOSE, **changes),)))
    assert finding.evidence == f"10.5.1.2 in /run/netns/a: packets leave by {leaves_by}; there is no cni0"
    assert finding.cure.startswith(cure)


@pytest.mark.parametrize(
    "facts",
    [
        container(reached_by="eth0", address=CONTAINER.address - 1),  # that of the host itself
        container(reached_by="cni0"),
        container(reached_by="eth1"),
        container(reached_by="eth0", address=CONTAINER.address + 256),
    ],
    ids=["the host's own address", "by its bridge", "by another interface", "outside our subnet"],
)
def test_container_that_is_not_cut_off_asks_for_no_bridge(facts: Facts) -> None:
    assert not found("bridge address", facts)


ON_BOTH = replace(
    FORMER,
    addresses=(*FORMER.addresses, ("br0", FORMER_IP), ("cni0", FORMER_IP - 256), ("cni0", FORMER_IP + 1)),
)


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (FORMER, "correct -public-ip if it is wrong; if this node was at 192.0.2.2 before: ip address flush"),
        (ON_BOTH, "cni0 has one of our subnet, too, so remove that: ip address del 10.5.2.1/24 dev cni0"),
    ],
    ids=["the former address alone", "an address of each subnet"],
)
def test_address_of_a_former_subnet_is_removed_only_beside_one_of_ours(facts: Facts, advice: str) -> None:
    (finding,) = found("former subnet", facts)
    assert finding.problem == "cni0 is on 10.5.2.0/24, and this node's subnet is 10.5.1.0/24"
    assert finding.about == "10.5.2.0/24"
    assert finding.cure.startswith(advice)


@pytest.mark.parametrize(
    "facts",
    [
        replace(FORMER, status=peer(state="refused").status),
        replace(
            FORMER, status=told(lambda d: (d.update(lease=None), d["peers"][0].update(state="unsafe"))).status
        ),
        replace(FORMER, links=(*NO_CNI0, bridge("cni0"))),
        replace(FORMER, links=(*NO_CNI0, link("cni0"))),
        replace(FORMER, addresses=(*HOST, ("cni0", FORMER_IP + 256))),
    ],
    ids=["the lease does no harm", "no lease", "no ports", "no bridge", "no node's subnet"],
)
def test_bridge_is_on_a_former_subnet_only_if_a_lease_takes_it_from_containers(facts: Facts) -> None:
    assert not found("former subnet", facts)


INSIDE = "nsenter --net=/run/netns/a ip"
V6 = replace(CONTAINER, address=ip_address("fc00:5::2"))


@pytest.mark.parametrize(
    ("lost", "addresses", "commands"),
    [
        ({}, WELL.addresses, [f"{INSIDE} route replace default via 10.5.1.1 dev eth0"]),
        (
            {"is_up": False},
            (*WELL.addresses, ("cni1", ip_address("10.5.1.9"))),
            [
                "nsenter --net=/run/netns/a ip link set dev eth0 up",
                f"{INSIDE} route replace default via 10.5.1.1 dev eth0",
            ],
        ),
        ({"astray": "10.5.0.0/16 dev eth1"}, WELL.addresses, [f"{INSIDE} route del 10.5.0.0/16 dev eth1"]),
    ],
)
def test_container_without_a_route_gets_the_bridges_address_as_its_gateway(
    lost: dict[str, Any], addresses: Any, commands: list[str]
) -> None:
    facts = replace(container(is_routed=False, **lost), addresses=addresses)
    (finding,) = found("container routes", facts)
    assert steps(finding) == commands
    astray = f": {lost['astray']}" if "astray" in lost else ""
    assert finding.evidence == f"10.5.1.2 in /run/netns/a{astray}"


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (
            container(is_routed=False, rule=PolicyRule(4, 5, "from all lookup 77")),
            "see its policy rules, the first of which is 5: from all lookup 77; to remove it:"
            " nsenter --net=/run/netns/a ip rule del priority 5",
        ),
        (
            replace(WELL, containers=tuple(replace(each, is_routed=False) for each in (CONTAINER, V6))),
            "restart the containers: the CNI plug-in makes the route",
        ),
    ],
    ids=["a policy rule", "no gateway of its family"],
)
def test_container_without_a_route_gets_advice_where_no_command_is_certain(facts: Facts, advice: str) -> None:
    assert found("container routes", facts)[0].remedy == advice


@pytest.mark.parametrize(
    "facts",
    [
        container(),
        container(is_routed=False, reached_by="eth0"),
        replace(FORMER, containers=(replace(CONTAINER, is_routed=False),)),
        container(length=24),
        container(length=25),
        container(length=0),
        container(length=16, address=CONTAINER.address + 256),
    ],
    ids=[
        "it has one",
        "this host does not reach it",
        "its bridge is on a former subnet",
        "our prefix",
        "a longer prefix",
        "an unknown prefix",
        "outside our subnet",
    ],
)
def test_route_or_prefix_of_a_container_is_no_finding_of_its_own(facts: Facts) -> None:
    assert not found("container routes", facts)


@pytest.mark.parametrize(
    ("port", "bridge_name", "number"),
    [("veth1", "cni0", 1), ("veth1", "eth0", 0), ("cni0", "cni0", 0), ("gone", "cni0", 0)],
    ids=["a port of none", "reached by no bridge", "on the bridge", "no interface"],
)
def test_container_off_the_bridge_is_attached_again(port: str, bridge_name: str, number: int) -> None:
    off = replace(CONTAINER, attached_to=port, reached_by=bridge_name)
    facts = replace(WELL, links=(*WELL.links, link("veth1")), containers=(off, off))
    seen = found("attachment", facts)
    assert [steps(each) for each in seen] == [["ip link set dev veth1 master cni0"]] * number
    for each in seen:
        assert each.problem == "2 containers off the bridge"
        assert each.evidence == "; ".join(["10.5.1.2 in /run/netns/a: veth1 is no port of cni0"] * 2)


def ports(*containers: Container, down: str = "") -> Facts:
    names = dict.fromkeys(each.port for each in containers)
    links = (link("eth0"), flannel(), bridge("cni0", 1450), *map(link, names))
    return replace(
        WELL, containers=containers, links=tuple(replace(each, up=each.name != down) for each in links)
    )


STOPPED, FLOODS = (
    "no packet gets to the container behind it or from it",
    "packets to a MAC address whose port",
)
NO_PACKETS = "the bridge passes no packets to veth1, a container's port"


@pytest.mark.parametrize(
    ("off", "is_learnt", "down", "severity", "words", "commands"),
    [
        (
            ("state",),
            True,
            "",
            Severity.PROBLEM,
            (NO_PACKETS, "its state is disabled or blocking", STOPPED),
            "bridge link set dev veth1 state 3",
        ),
        (
            ("state", "flood"),
            True,
            "veth1",
            Severity.PROBLEM,
            (NO_PACKETS, "veth1 is down", STOPPED),
            "ip link set dev veth1 up",
        ),
        (
            ("flood",),
            False,
            "",
            Severity.PROBLEM,
            (NO_PACKETS, "bridge -d link show dev veth1: flood off", FLOODS),
            "bridge link set dev veth1 flood on",
        ),
        (
            ("flood",),
            True,
            "",
            Severity.HINT,
            ("veth1, a container's port, has flood off", "bridge -d link show dev veth1: flood off", FLOODS),
            "bridge link set dev veth1 flood on",
        ),
        (
            ("bcast_flood",),
            False,
            "",
            Severity.HINT,
            (
                "veth1, a container's port, has bcast_flood off",
                "bridge -d",
                "ARP requests of other containers",
            ),
            "bridge link set dev veth1 bcast_flood on",
        ),
        (
            ("learning", "bcast_flood"),
            True,
            "",
            Severity.HINT,
            (
                "veth1, a container's port, has learning and bcast_flood off",
                "bridge -d link show dev veth1: learning off, bcast_flood off",
                FLOODS,
            ),
            "bridge link set dev veth1 learning on bcast_flood on",
        ),
    ],
)
def test_port_whose_bridge_holds_packets_back_is_named_with_what_is_lost(
    off: tuple[str, ...],
    is_learnt: bool,
    down: str,
    severity: Severity,
    words: tuple[str, str, str],
    commands: str,
) -> None:
    at = replace(CONTAINER, port="veth1", off=off, is_learnt=is_learnt)
    (finding,) = found("bridge port", ports(at, replace(at, address=at.address + 1), down=down))
    said = (finding.problem, finding.evidence, finding.why)
    assert [text.startswith(word) for text, word in zip(said, words, strict=True)] == [True] * 3
    assert (finding.cure, finding.severity, finding.about) == (commands, severity, "veth1")


def test_ports_are_named_in_the_order_of_their_names() -> None:
    off = [replace(CONTAINER, port=name, off=("state",)) for name in ("veth2", "veth1")]
    assert [each.about for each in found("bridge port", ports(*off))] == ["veth1", "veth2"]


@pytest.mark.parametrize("changes", [{"off": ()}, {"is_up": False}, {"attached_to": "cni9"}], ids=str)
def test_port_is_no_finding_if_nothing_is_off_or_something_else_is_down(changes: dict[str, Any]) -> None:
    at = replace(CONTAINER, port="veth1", off=("state",))
    assert not found("bridge port", ports(replace(at, **changes)))


RULES = "its own rules: nsenter --net=/run/netns/a nft list ruleset; nsenter --net=/run/netns/a iptables-save"


@pytest.mark.parametrize(
    ("changes", "problem", "evidence", "advice"),
    [
        (
            {"is_heard": False, "unanswered": "all"},
            "packets between 10.5.1.2 and this host get lost",
            "from /run/netns/a cni0 answers neither ICMP nor TCP",
            f"see {RULES}; and what is between: nft list ruleset; tc -s qdisc show dev veth1;"
            " tc -s filter show dev veth1 ingress; bridge -d link show dev veth1; bridge fdb show br cni0",
        ),
        (
            {"unanswered": "2 of 10 echoes to 10.5.2.0"},
            "packets between 10.5.1.2 and other nodes get lost",
            "from /run/netns/a no answer comes to 2 of 10 echoes to 10.5.2.0; to those of this host all come",
            "see the rules for packets that are passed on, with what they count: nft list ruleset;"
            f" iptables-save -c. Then see {RULES}",
        ),
        (
            {"unanswered": "2 of 10 echoes to 10.5.2.0", "dropped_by": ("chain c: one", "chain d: two")},
            "packets between 10.5.1.2 and other nodes get lost",
            "from /run/netns/a no answer comes to 2 of 10 echoes to 10.5.2.0; to those of this host all come"
            "; dropped by chain c: one; chain d: two",
            "remove it, unless a NetworkPolicy means it: kubectl get networkpolicy --all-namespaces",
        ),
    ],
    ids=["this host does not answer", "another node does not answer", "a rule of this host drops them"],
)
def test_lost_echoes_of_a_container_are_told_with_where_to_look(
    changes: dict[str, Any], problem: str, evidence: str, advice: str
) -> None:
    at = replace(CONTAINER, port="veth1")
    (finding,) = found("container echoes", replace(WELL, containers=(at, replace(at, **changes))))
    assert (finding.problem, finding.evidence, finding.remedy) == (problem, evidence, advice)
    assert finding.about == "10.5.1.2"


@pytest.mark.parametrize(
    ("changes", "source", "is_told"),
    [
        ({"unanswered": "all"}, "10.5.1.1", False),
        ({"unanswered": "all"}, "fc00:5::1", True),
        ({"is_heard": False, "unanswered": "all"}, "10.5.1.1", True),
        ({}, "fc00:5::1", False),
    ],
    ids=["the same loss", "of the other family", "not even this host answers", "nothing gets lost"],
)
def test_lost_echoes_of_a_container_are_not_told_where_those_of_this_host_get_lost_too(
    changes: dict[str, Any], source: str, is_told: bool
) -> None:
    facts = replace(container(**changes), turned_away=(("10.5.2.0/24", ip_address(source), True),))
    assert bool(found("container echoes", facts)) is is_told


def beyond(carried: int | None, through: int = 1450) -> Facts:
    """A node whose peer has a container; their paths carry so much."""
    far = replace(path("container", carried, "10.5.2.9"), required=1450)
    return replace(WELL, beyond=(far,), paths=(path("tunnel", through),))


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (beyond(None), ["no answer from containers of 1 peer, whose nodes answer"]),
        (beyond(576), ["10.5.2.9 answers packets of 576 bytes, and none of 1450"]),
        (beyond(576, 576), []),
        (beyond(1450), []),
        (replace(beyond(None), containers=(replace(CONTAINER, is_routed=False),)), []),
    ],
    ids=["silent", "small MTU", "small path", "well", "a cause is known"],
)
def test_containers_of_peers_are_blamed_for_what_their_nodes_do_not_explain(
    facts: Facts, problem: list[str]
) -> None:
    assert [each.problem for each in found("peers' containers", facts)] == problem


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (
            container(is_led_out=False),
            ["start flanneld with -ip-masq, if the containers are to reach hosts outside"],
        ),
        (container(), []),
        (replace(container(is_led_out=False), exempting=(("chain c", "-j ACCEPT", ("ip", "x")),)), []),
    ],
    ids=["no way out", "a way out", "a rule is known"],
)
def test_missing_way_out_is_told_unless_a_rule_is_known(facts: Facts, advice: list[str]) -> None:
    assert [each.remedy for each in found("way out", facts)] == advice


def test_container_whose_tcp_is_refused_inside_is_a_hint() -> None:
    (hint,) = found("container echoes", container(is_refused=True))
    assert (hint.severity, hint.about) == (Severity.HINT, "10.5.1.2")
    assert hint.problem == "TCP of 10.5.1.2 for other nodes is refused before it leaves the container"


MAC_A = "02:00:00:00:00:0a"


@pytest.mark.parametrize(
    ("facts", "problem", "advice"),
    [
        (
            container(address=CONTAINER.address + 256),
            "1 container with an address outside our subnet",
            "recreate these containers: they have kept the addresses of an earlier subnet",
        ),
        (
            replace(WELL, containers=(CONTAINER, replace(CONTAINER, path="/run/netns/b"))),
            "2 containers with the address 10.5.1.2",
            "recreate all of them but one, with no MAC address fixed",
        ),
        (
            container(address=ip_address("10.5.1.1")),
            "1 container with the address 10.5.1.1 of this host",
            "recreate all of them, with no MAC address fixed",
        ),
        (
            replace(
                WELL,
                containers=(
                    replace(CONTAINER, mac=MAC_A),
                    replace(OTHER, mac=MAC_A, attached_to="cni0"),
                    replace(OTHER, mac=MAC_A, path="/run/netns/c", address=CONTAINER.address + 2),
                ),
            ),
            f"2 containers with the MAC address {MAC_A} on cni0",
            "recreate all of them but one",
        ),
    ],
    ids=["of another subnet", "of two containers", "of the host and a container", "one MAC on one bridge"],
)
def test_address_that_is_not_a_containers_own_is_named_with_who_has_it(
    facts: Facts, problem: str, advice: str
) -> None:
    (finding,) = found("container addresses", facts)
    assert finding.problem == problem
    assert finding.cure.startswith(advice)


DUAL = replace(
    told(lambda d: d["lease"].update(subnets=["10.5.1.0/24", "fc00:5::/64"])),
    addresses=(*WELL.addresses, ("cni0", ip_address("fc00:5::1"))),
)


@pytest.mark.parametrize(
    ("facts", "places"),
    [
        (replace(DUAL, containers=(CONTAINER, V6)), []),
        (replace(DUAL, containers=(CONTAINER,)), ["/run/netns/a"]),
        (
            replace(DUAL, containers=(CONTAINER, replace(CONTAINER, address=CONTAINER.address + 1))),
            ["/run/netns/a"],
        ),
        (replace(DUAL, containers=(replace(CONTAINER, attached_to="docker0"),)), []),
        (
            replace(
                DUAL,
                containers=tuple(
                    replace(CONTAINER, path=f"/run/netns/{each}", address=CONTAINER.address + each)
                    for each in range(4)
                ),
            ),
            ["/run/netns/0", "/run/netns/1", "/run/netns/2"],
        ),
        (replace(WELL, containers=(), status=told(lambda d: d.update(lease=None)).status), []),
    ],
    ids=["of both families", "of one", "two of one", "on another bridge", "many", "no subnet is known"],
)
def test_a_few_containers_without_an_address_of_their_bridges_family_are_hints(
    facts: Facts, places: list[str]
) -> None:
    seen = found("container addresses", facts)
    assert [each.about for each in seen] == places
    for each in seen:
        assert each.severity is Severity.HINT
        assert each.problem == "a container has no IPv6 address, and its bridge has"
        assert each.evidence.endswith("only, cni0 has fc00:5::1")
        assert each.cure.endswith(
            f"nsenter --net={each.about} sysctl net.ipv6.conf.eth0.disable_ipv6 must be 0"
        )


BOTH = replace(
    told(
        lambda d: (
            d["network"]["ranges"].append({"network": "fc00:5::/56", "subnet_len": 64}),
            d["lease"].update(subnets=["10.5.1.0/24", "fc00:5::/64"]),
        )
    ),
    links=(*WELL.links, bridge("docker0"), link("veth1")),
    addresses=(*WELL.addresses, ("veth1", ip_address("10.5.1.9"))),
)
ALONE = replace(BOTH, status=WELL.status)


@pytest.mark.parametrize(
    ("facts", "name", "address", "is_told"),
    [
        (ALONE, "cni0", "172.17.0.1", True),
        (BOTH, "cni0", "2001:db8::7", True),
        (ALONE, "cni0", "2001:db8::7", False),
        (ALONE, "cni0", "169.254.1.1", False),
        (BOTH, "cni0", "fe80::1", False),
        (ALONE, "cni0", "10.5.1.7", False),
        (BOTH, "cni0", "fc00:5::1", False),
        (ALONE, "docker0", "172.17.0.1", False),
        (ALONE, "veth1", "172.17.0.1", False),
        (replace(BOTH, status=told(lambda d: d.update(lease=None)).status), "cni0", "172.17.0.1", False),
    ],
    ids=[
        "outside",
        "outside, IPv6",
        "no IPv6 in the network",
        "link-local",
        "link-local, IPv6",
        "inside",
        "inside, IPv6",
        "a bridge of others",
        "no bridge",
        "no lease",
    ],
)
def test_address_outside_the_network_on_the_bridge_of_our_containers_is_a_hint(
    facts: Facts, name: str, address: str, is_told: bool
) -> None:
    seen = found("bridge subnet", replace(facts, addresses=(*facts.addresses, (name, ip_address(address)))))
    subnets = ", ".join(map(str, facts.status.own_subnets))
    assert [(each.severity, each.problem, each.evidence, each.about) for each in seen] == [
        (
            Severity.HINT,
            f"cni0 has {address}, too, which is outside the cluster network",
            f"our subnet is {subnets}",
            "cni0",
        )
    ] * is_told
    for each in seen:
        assert each.cure.startswith(
            "if another CNI config made it, remove that from /etc/cni/net.d, recreate"
        )
        assert each.cure.endswith("and take the address from cni0")
