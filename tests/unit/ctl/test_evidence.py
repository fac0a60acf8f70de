"""What the doctor looks up and sends on a node, however many peers it has."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from ipaddress import IPv4Network, ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.backends.ipsec.resources import ConnectionSas
from flanneld.ctl import losses, neighbors, paths
from flanneld.ctl.checks import encryption
from flanneld.ctl.checks.encryption import sessions_of, with_associations
from flanneld.ctl.compare import ActualState, RouteTaken
from flanneld.ctl.doctor import lacking_features
from flanneld.ctl.drops import dropped, has_policies
from flanneld.ctl.losses import Lost, Question, _before, _Host, by_cause, questions
from flanneld.ctl.paths import chosen_of, sample
from flanneld.diagnostics.status import PeerStatus, Status, known
from flanneld.model import FAMILIES, IPAddress
from flanneld.network import interfaces, survey
from flanneld.network.firewall.fate import DROP, MASQUERADE, Packet, Rule, Test
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.genetlink import SeenDevice, SeenPeer
from flanneld.network.routing import ICMP, ICMPV6, TCP, UDP, LookupResult, PolicyRule
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import IFA_F_DADFAILED, RTN_UNICAST, SeenAddress
from flanneld.network.survey import Reply
from flanneld.network.xfrm import Action, Direction, XfrmPolicy, guards
from flanneld.network.xfrm_table import chains, decode_rule, pack_policy
from flanneld.state.resources import Address, Blackhole, ForeignLink, Route, Vxlan
from tests.unit.ctl.documents import object_of, status_of

MAC = "02:00:00:00:00:01"
VXLAN = Vxlan("flannel.1", 1, 2, ip_address("192.0.2.1"), 8472, MAC, 1450)


def peer(number: int) -> dict[str, Any]:
    subnet = ip_network(f"10.{number // 250 + 6}.{number % 250}.0/24")
    route = Route(subnet, "flannel.1", subnet[0], onlink=True)
    return {
        "subnets": [str(subnet)],
        "public_ips": [f"198.18.{number // 250}.{number % 250 + 1}"],
        "state": "in the kernel",
        "objects": [object_of(route)],
    }


def document(peers: int) -> dict[str, Any]:
    return {
        "network": {"ranges": [{"network": "10.0.0.0/8", "subnet_len": 24}], "backend": "vxlan"},
        "lease": {"subnets": ["10.5.1.0/24"]},
        "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": ["192.0.2.1"]},
        "mtu": 1450,
        "local": [object_of(each) for each in (VXLAN, Address("flannel.1", ip_address("10.5.1.0")))],
        "peers": [peer(number) for number in range(peers)],
    }


#: Dump of policies of XFRM.
RECORDED = [
    bytes.fromhex(each)
    for each in (Path(__file__).parents[1] / "golden/xfrm-policies.hex").read_text().split()
]
LARGE = status_of(document(5000))


@pytest.mark.parametrize("device", ["flannel.1", "eth0"])
def test_router_that_is_asked_for_want_of_the_route_is_no_peer(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hop reports a packet with no hop left, whoever that is."""
    told = status_of(document(1))
    silent = sample(told, lambda targets: [None] * len(targets))
    monkeypatch.setattr(paths, "route_lookup", lambda: lambda _: RouteTaken(device, ip_address("10.6.0.0")))
    monkeypatch.setattr(survey, "reached", lambda *_: set())
    monkeypatch.setattr(survey, "passing", lambda targets, *_: set(targets))
    assert set(paths.passing(told, silent)) == ({("10.6.0.0/24", 4)} if device == "flannel.1" else set())


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (0, {("10.6.0.0/24", True)}),  # a filter, or a blackhole route
        (errno.ETIME, set()),
        (errno.EHOSTUNREACH, set()),  # an idle node without a route to its subnet
        (errno.ENETUNREACH, set()),
    ],
)
def test_node_that_reports_packets_of_containers_turns_none_away(
    error: int, found: set[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ours, node = status_of(document(1)), ip_address("10.5.1.1"), ip_address("198.18.0.1")
    answered = sample(told, lambda targets: [size for _, size in targets])
    there = [(ip_address("10.6.0.2"), "10.6.0.0/24", told.uplink_name)]
    monkeypatch.setattr(paths, "_behind", lambda *_: there)
    replies = {node: Reply(0.1)}
    monkeypatch.setattr(
        survey,
        "_per_family",
        lambda targets, *_: {each: replies.get(each, Reply(error=error)) for each in targets},
    )
    assert set(paths.turned_away(told, answered, {4: ours})) == {
        (peer, ours, is_heard) for peer, is_heard in found
    }


ROUTER, ETH0 = ip_address("192.0.2.254"), 2
ON_LINK = LookupResult(ETH0, None, None, RTN_UNICAST)


@pytest.mark.parametrize(
    ("default", "router"),
    [
        (None, []),
        (LookupResult(ETH0, None, ROUTER, RTN_UNICAST), ["192.0.2.254"]),
        (LookupResult(ETH0 + 1, None, ROUTER, RTN_UNICAST), []),
        (ON_LINK, []),
    ],
    ids=["no default route", "a router", "a router elsewhere", "no router"],
)
def test_only_hosts_on_the_link_are_asked_by_arp_and_only_our_duplicates_are_told(
    default: LookupResult | None, router: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, index = ip_address("192.0.2.253"), ETH0
    ways = {
        "203.0.113.1": default,
        "198.18.0.1": LookupResult(index, None, None, RTN_UNICAST),
        "198.18.0.2": LookupResult(index, None, gateway, RTN_UNICAST),
        "198.18.0.3": LookupResult(index + 1, None, None, RTN_UNICAST),
        "10.6.0.0": LookupResult(index, None, None, RTN_UNICAST),  # the end of a tunnel
    }
    failed = [SeenAddress(index, ip_address(text), 64, IFA_F_DADFAILED) for text in ("fe80::1", "fd05:1::1")]

    class View:
        def look_up_route(self, target: IPAddress) -> LookupResult | None:
            return ways.get(str(target))

        def addresses(self, _family: int) -> list[SeenAddress]:
            return failed

        def link(self, _name: str) -> None:
            return None

    asked: list[str] = []

    def holders(_name: str, targets: Iterable[IPAddress], _within: float) -> dict[IPAddress, set[str]]:
        asked.extend(map(str, targets))
        return {}

    monkeypatch.setattr(neighbors, "HostView", View)
    monkeypatch.setattr(interfaces, "index_of", {"eth0": index}.get)
    monkeypatch.setattr(interfaces, "holders", holders)
    told = document(4)
    told["lease"]["subnets"].append("fd05:1::/64")
    silent = sample(status_of(told), lambda targets: [None] * len(targets))
    found = list(neighbors.claims(status_of(told), silent, ()))
    assert asked == ["192.0.2.1", "198.18.0.1", *router]
    assert found == [neighbors.Claim(ip_address("fd05:1::1"), length=64)]


@pytest.mark.parametrize("lost", ["198.18.0.1", "10.6.0.0"], ids=["the node", "behind its tunnel"])
def test_claims_of_nodes_that_answer_and_of_the_router_are_told_from_the_others(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class View:
        def look_up_route(self, target: IPAddress) -> LookupResult:
            return replace(ON_LINK, gateway=ROUTER) if target == ip_address("203.0.113.1") else ON_LINK

        def addresses(self, _family: int) -> list[SeenAddress]:
            return []

        def link(self, _name: str) -> None:
            return None

    monkeypatch.setattr(neighbors, "HostView", View)
    monkeypatch.setattr(interfaces, "index_of", {"eth0": ETH0}.get)
    monkeypatch.setattr(interfaces, "holders", lambda _name, targets, _within: {at: {MAC} for at in targets})
    told = status_of(document(2))
    found = sample(told, lambda asked: [None if str(at) == lost else size for at, size in asked])
    assert list(neighbors.claims(told, found, ())) == [
        neighbors.Claim(ip_address(address), frozenset({MAC}), answers=answers)
        for address, answers in (
            ("192.0.2.1", False),
            ("198.18.0.1", False),
            ("198.18.0.2", True),
            ("192.0.2.254", True),
        )
    ]


def test_with_5000_peers_few_routes_are_looked_up_and_few_packets_sent() -> None:
    assert len(list(questions(LARGE, chosen_of(LARGE), {4: "cni0"}))) == 4 * 64
    assert len(sample(LARGE, lambda targets: [None] * len(targets))) == 2 * 8
    assert len(paths.some(paths.reached_peers(LARGE))) == 4


def test_lookups_are_spread_over_all_peers() -> None:
    subnets = [each.subnets[0] for each in chosen_of(LARGE)]
    assert len(subnets) == 64
    assert str(subnets[-1]) >= "10.25"


def test_rule_about_one_peer_of_5000_is_found() -> None:
    steps = (
        Rule(DROP, (Test("destination", (ip_network("10.20.7.0/24"),)),), text="no packets to 10.20.7.0/24"),
    )
    base = BaseChain("native", 4, "inet wall", "c", "forward", False, {"c": steps})
    chosen = paths.some(paths.reached_peers(LARGE), [ip_network("10.20.7.0/24")])
    found = list(dropped([base], list(paths.flows(LARGE, chosen, {4: "cni0"}))))
    assert [(flow.name, decided.by) for _, flow, decided, _ in found] == [
        ("packets of its containers to other nodes", "no packets to 10.20.7.0/24")
    ]


def test_rule_that_masquerades_counts_for_packets_of_containers_to_other_nodes_only() -> None:
    told = status_of(document(1))
    base = BaseChain("native", 4, "ip x", "c", "postrouting", False, {"c": (Rule(MASQUERADE, text="7"),)})
    found = dropped([base], list(paths.flows(told, chosen_of(told), {4: "cni0"})))
    assert [(flow.name, decided.act) for _, flow, decided, _ in found] == [
        (paths.FROM_CONTAINERS, MASQUERADE)
    ]


def test_rule_for_both_families_is_one_drop_of_both() -> None:
    chains = {"c": (Rule(DROP, (), text="drop"),)}
    bases = [BaseChain("native", family, "inet wall", "c", "input", False, chains) for family in FAMILIES]
    packets = [
        paths.Flow("UDP 8472", Packet("eth0", "", ip_address(there), ip_address(here)), paths.INWARDS, ())
        for there, here in (("192.0.2.2", "192.0.2.1"), ("2001:db8::2", "2001:db8::1"))
    ]
    assert [families for *_, families in dropped(bases, packets)] == [frozenset(FAMILIES)]


def test_cause_in_both_families_is_one_loss_of_both() -> None:
    asked = [
        Question(paths.TO_NODES, ip_address(text), None, "", lambda _: False)
        for text in ("192.0.2.2", "2001:db8::2", "192.0.2.3")
    ]
    by_eth1 = Lost(paths.TO_NODES, "uplink", "eth1", "the route is dev eth1")
    (found,) = by_cause(asked, [(each, by_eth1) for each in asked[:2]])
    assert (found.number, found.asked, found.families) == (2, 3, frozenset(FAMILIES))


def test_command_that_spares_some_of_the_lost_packets_is_no_remedy() -> None:
    asked = [
        Question(packets, ip_address("10.5.2.2"), None, "", lambda _: False)
        for packets in (paths.FROM_CONTAINERS, paths.TO_NODES)
    ]
    lost = [
        Lost(paths.FROM_CONTAINERS, "rule", "50", "dropped", (("true",),)),
        Lost(paths.TO_NODES, "rule", "50", ""),
    ]
    (found,) = by_cause(asked, zip(asked, lost, strict=True))
    assert found.commands == ()


def test_marks_of_containers_packets_stay_on_those_of_vxlan_around_them() -> None:
    there, node = ip_address("10.6.0.2"), ip_address("192.0.2.1")
    inner = Question(paths.FROM_CONTAINERS, there, None, "cni0", lambda _: True, mark=5)
    outer = Question(paths.TO_NODES, node, None, "", lambda _: True)
    (found,) = losses._tunnelled([inner, outer], status_of(document(1)))
    assert (found.packets, found.target, found.mark) == (paths.TO_NODES, node, 5)
    assert losses._tunnelled([inner, outer], status_of({"network": {"backend": "host-gw"}})) == []


@pytest.mark.parametrize(
    ("protocols", "between_nodes", "between_containers"),
    [
        (set(), [(0, 0)], [(0, 0)]),
        ({UDP}, [(UDP, 8472)], [(0, 0), (UDP, 0)]),
        ({ICMP, ICMPV6}, [(UDP, 8472)], [(0, 0), (ICMP, 0)]),
    ],
)
def test_routes_are_asked_for_the_protocols_of_policy_rules(
    protocols: set[int], between_nodes: list[tuple[int, int]], between_containers: list[tuple[int, int]]
) -> None:
    told = status_of(document(1))
    for packets, kinds in ((paths.TO_NODES, between_nodes), (paths.TO_CONTAINERS, between_containers)):
        one = Question(packets, ip_address("192.0.2.2"), None, "", lambda _: True)
        assert [(each.protocol, each.port) for each in losses._of_kinds([one], protocols, told)] == kinds


def test_chains_of_network_policies_are_known_by_their_names() -> None:
    def base(name: str, *chains: str) -> BaseChain:
        return BaseChain("native", 4, name, "c", "forward", False, dict.fromkeys(chains, ()))

    assert not has_policies([base("ip filter", "FORWARD", "DOCKER-USER")])
    assert has_policies([base("ip filter", "FORWARD", "KUBE-POD-FW-4QXA")])
    assert has_policies([base("inet kube-network-policies", "postrouting")])


def test_flows_are_those_between_nodes_and_between_containers() -> None:
    small = status_of(document(1))
    found = {
        flow.name: flow.packet
        for flow in paths.flows(small, paths.some(paths.reached_peers(small)), {4: "cni0"})
    }
    assert [(each.iif, each.oif, str(each.source), each.dport) for each in found.values()] == [
        ("eth0", "", "198.18.0.1", 8472),
        ("", "eth0", "192.0.2.1", 8472),
        ("cni0", "flannel.1", "10.5.1.2", None),
        ("flannel.1", "cni0", "10.6.0.2", None),
    ]


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (PolicyRule(4, 100, "from all"), True),
        (PolicyRule(4, 100, "from", source=ip_network("10.5.1.0/24")), True),
        (PolicyRule(4, 100, "from", source=ip_network("10.5.2.0/24")), False),
        (PolicyRule(4, 100, "to", destination=ip_network("10.6.0.0/16")), True),
        (PolicyRule(4, 100, "iif", iif="cni0"), True),
        (PolicyRule(4, 100, "iif", iif="eth0"), False),
        (PolicyRule(4, 100, "tos", is_narrow=True), False),
        (PolicyRule(4, 100, "fwmark", mark=(0x700, 0xFF00)), False),
        (PolicyRule(4, 100, "fwmark", mark=(0x400, 0xFF00)), True),
        (PolicyRule(4, 100, "not fwmark", mark=(0x700, 0xFF00), is_inverted=True), True),
        (PolicyRule(4, 100, "not fwmark", mark=(0x400, 0xFF00), is_inverted=True), False),
        (PolicyRule(4, 100, "not oif", iif="eth0", is_narrow=True, is_inverted=True), True),
        (PolicyRule(4, 100, "not oif", iif="cni0", is_narrow=True, is_inverted=True), False),
        (PolicyRule(6, 100, "not from", source=ip_network("fd00::/8"), is_inverted=True), False),
        (PolicyRule(6, 100, "from all"), False),
        (PolicyRule(4, 100, "ipproto", protocol=UDP), True),
        (PolicyRule(4, 100, "ipproto", protocol=TCP), False),
        (PolicyRule(4, 100, "not ipproto", protocol=TCP, is_inverted=True), True),
        (PolicyRule(4, 100, "dport", ports=(8472, 8472)), True),
        (PolicyRule(4, 100, "dport", ports=(1, 8471)), False),
        (PolicyRule(4, 100, "dport", ports=(8473, 9000)), False),
    ],
)
def test_policy_rule_matches_by_addresses_interface_and_kind(rule: PolicyRule, matches: bool) -> None:
    packet = ip_address("10.6.0.2"), ip_address("10.5.1.2"), "cni0", 0x401, UDP, 8472
    assert rule.may_match(*packet) == matches
    assert not rule.is_default


def dropped_by_policies(told: Status, *recorded: bytes) -> set[tuple[str, str, str]]:
    """Return chain, packets and rule of each drop by policies that the kernel dumped."""
    rules = filter(None, (decode_rule(each, 0, len(each)) for each in recorded))
    bases = chains(rules, is_ipsec="ipsec" in told.backends)
    found = dropped(bases, list(paths.flows(told, chosen_of(told), {4: "cni0"})))
    return {(str(base), flow.name, decided.by or decided.doubt) for base, flow, decided, _ in found}


def test_kernel_without_policies_drops_what_it_blocks_by_default() -> None:
    bases = chains((), is_ipsec=False, blocked=(Direction.FWD,))
    told = status_of(document(2))
    found = dropped(bases, list(paths.flows(told, chosen_of(told), {})))
    assert {(str(base), decided.act) for base, _, decided, _ in found} == {
        ("the XFRM policies for forward", DROP)
    }


def test_policies_of_xfrm_drop_what_no_policy_before_them_is_about() -> None:
    """Those about another protocol or port drop nothing, one about a mark may; priority 7 precedes 8."""
    assert dropped_by_policies(status_of(document(2)), *RECORDED) == {
        (
            "the XFRM policies for forward",
            paths.FROM_CONTAINERS,
            "src 10.5.0.0/16 dst 10.6.0.0/16 action block index 2 dir fwd",
        ),
        (
            "the XFRM policies for postrouting",
            paths.FROM_CONTAINERS,
            "src 10.5.0.0/16 dst 10.6.0.0/16 action block index 33 dir out",
        ),
        (
            "the XFRM policies for input",
            "UDP 8472 from its peers",
            "src 198.18.0.2/32 dst 0.0.0.0/0 proto udp dport 8472 action block index 8 dir in",
        ),
    }


@pytest.mark.parametrize(
    ("backend", "packets"), [("ipsec", set()), ("vxlan", {"UDP 8472 from its peers", paths.FROM_CONTAINERS})]
)
def test_guards_of_ipsec_and_policies_for_its_own_packets_are_no_fault(
    backend: str, packets: set[str]
) -> None:
    network, everything = IPv4Network("10.0.0.0/8"), IPv4Network("0.0.0.0/0")
    block = XfrmPolicy(Direction.IN, everything, IPv4Network("192.0.2.1/32"), 0, action=Action.BLOCK)
    recorded = map(pack_policy, (*guards(network, None), block))
    found = dropped_by_policies(encrypted(backend, session()), *recorded)
    assert {name for _, name, _ in found} == packets


# ---- encrypted networks --------------------------------------------------------------------------

KEY = bytes(32)


def encrypted(backend: str, *sessions: dict[str, Any]) -> Status:
    told = document(1)
    told["network"] = {**told.get("network", {}), "backend": backend}
    told["local"] = []
    told["peers"][0] |= {"backend": backend, "sessions": list(sessions)}
    return status_of(told)


def session(**changes: Any) -> dict[str, Any]:
    return {"subnet": "10.6.0.0/24", "state": "established", "endpoint": "198.18.0.1:4500"} | changes


@pytest.mark.parametrize(
    ("told", "carriers"),
    [
        (encrypted("wireguard", session(endpoint="198.18.0.1:51821", port=51820)), [("udp", 51820, 51821)]),
        (encrypted("wireguard", session(endpoint="[fc00::1]:51820", port=51820)), [("udp", 51820, 51820)]),
        (encrypted("wireguard", session(endpoint="", port=51820)), []),
        (encrypted("ipsec"), [("udp", 500, 500), ("udp", 4500, 4500)]),
        (encrypted("ipsec", session()), [("udp", 500, 500), ("udp", 4500, 4500), ("esp", None, None)]),
        (encrypted("ipsec", session(encapsulated=True)), [("udp", 500, 500), ("udp", 4500, 4500)]),
        (encrypted("ipsec", session(state="silent")), [("udp", 500, 500), ("udp", 4500, 4500)]),
    ],
)
def test_carriers_are_the_packets_that_encrypting_backends_send(
    told: Status, carriers: list[tuple[str, int | None, int | None]]
) -> None:
    found = paths.carriers(told, told.each_peer[0])
    assert [(each.protocol, each.port, each.peer_port) for each in found] == carriers


OF_VXLAN, OF_IPIP = paths.TunnelPackets(4, "udp", 8472, 8472), paths.TunnelPackets(4, "ipencap")


@pytest.mark.parametrize(
    ("network", "of_peer", "carriers"),
    [
        ({"backend": "udp"}, "", [paths.TunnelPackets(4, "udp", 8285, 8285)]),
        ({"backend": "udp", "port": 8286}, "", [paths.TunnelPackets(4, "udp", 8286, 8286)]),
        ({"backend": "ipip", "also": "vxlan"}, "ipip", [OF_IPIP]),
        ({"backend": "ipip", "also": "vxlan"}, "vxlan", [OF_VXLAN]),
        ({"backend": "vxlan"}, "vxlan", [OF_VXLAN]),
        ({"backend": "host-gw"}, "host-gw", []),
        ({"backend": "a plug-in's"}, "a plug-in's", []),
        ({"backend": None}, "vxlan", []),
    ],
)
def test_carriers_are_the_packets_that_the_backend_names(
    network: dict[str, Any], of_peer: str, carriers: list[paths.TunnelPackets]
) -> None:
    told = status_of({"network": network})
    assert list(paths.carriers(told, PeerStatus((), backend=of_peer))) == carriers


def test_netlink_protocol_of_a_backend_is_asked_of_the_kernel() -> None:
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 6).close()  # NETLINK_XFRM
        lacking = []
    except OSError:
        lacking = ["XFRM"]
    told = status_of({"network": {"backend": "vxlan", "also": "ipsec"}})
    assert [each.name for each in lacking_features(told, ActualState({}, ()))] == lacking


def test_carriers_of_dual_stack_are_of_the_families_that_the_backend_carries() -> None:
    ranges = [{"network": "10.5.0.0/16", "subnet_len": 24}, {"network": "fc00::/48", "subnet_len": 64}]
    for backend, families in (("vxlan", [4, 6]), ("ipip", [4])):
        told = status_of({"network": {"ranges": ranges, "backend": backend}})
        assert [each.family for each in paths.carriers(told, PeerStatus((), backend=backend))] == families


def test_packets_from_a_peer_go_to_our_port_and_those_to_it_to_its_port() -> None:
    told = encrypted("wireguard", session(endpoint="198.18.0.1:51821", port=51820))
    found = list(paths.flows(told, paths.some(paths.reached_peers(told)), {}))
    assert [(each.name, each.packet.dport) for each in found[:2]] == [
        ("UDP 51820 from its peers", 51820),
        ("UDP 51821 to its peers", 51821),
    ]


def seen(*, handshake: float, subnet: str = "10.6.0.0/24") -> SeenDevice:
    peer = SeenPeer(
        KEY,
        endpoint=(ip_address("198.18.0.1"), 51821),
        last_handshake=handshake,
        tx_bytes=148,
        allowed_ips=(ip_network(subnet),),
    )
    return SeenDevice(7, "flannel-wg", 51820, 0, None, KEY, (peer,))


@pytest.mark.parametrize(
    ("handshake", "silent", "former", "state"),
    [
        (990.0, ["10.6.0.0/24"], "idle", "established"),
        (0.0, ["10.6.0.0/24"], "idle", "silent"),
        (500.0, ["10.6.0.0/24"], "established", "silent"),
        (0.0, [], "silent", "silent"),
        (990.0, [], "silent", "established"),
        (0.0, [], "idle", "idle"),
    ],
)
def test_a_session_is_as_the_device_has_it_now(
    handshake: float, silent: list[str], former: str, state: str
) -> None:
    told = encrypted("wireguard", session(state=former))
    (found,) = sessions_of(told, [seen(handshake=handshake)], silent, 1000.0)
    (one,) = known(found.sessions) or ()
    assert (one.state, one.endpoint, one.port) == (state, "198.18.0.1:51821", 51820)


@pytest.mark.parametrize("backend", ["wireguard", "ipsec"])
def test_peers_that_another_version_does_not_tell_stay_unknown(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "_devices", lambda _names: [])
    monkeypatch.setattr(encryption, "_associations", dict)
    told = encryption.with_sessions(status_of({"network": {"backend": backend}, "local": []}), (), 1000.0)
    assert not told.knows_peers


@pytest.mark.parametrize("encap", ["yes", "no"])
def test_a_session_is_as_charon_has_it_now(encap: str) -> None:
    told = encrypted("ipsec", session(state="silent", problem="AUTHENTICATION_FAILED"))
    sas = ConnectionSas(children=[{"encap": encap.encode()}], endpoint="198.18.0.1:4500")
    ((found,), (same,)) = [
        list(with_associations(told, sas_now))
        for sas_now in ({"10.6.0.0/24": sas}, {"10.6.0.0/24": ConnectionSas()})
    ]
    (one,) = known(found.sessions) or ()
    assert (one.state, one.encapsulated) == ("established", encap == "yes")
    assert same == told.each_peer[0]


def test_a_silent_peer_that_the_device_lacks_is_named() -> None:
    told = encrypted("wireguard")
    (found,) = sessions_of(told, [seen(handshake=0, subnet="10.9.0.0/24")], ["10.6.0.0/24"], 1000.0)
    (one,) = known(found.sessions) or ()
    assert one.problem.startswith("flannel-wg has no peer with this subnet")
    assert list(sessions_of(told, [], ["10.6.0.0/24"], 1000.0)) == list(told.each_peer)


@pytest.mark.parametrize(
    ("rules", "cause"),
    [
        ([PolicyRule(4, 32766, "from all lookup main")], "no route"),
        ([PolicyRule(4, 5000, "from all lookup main")], "no route"),
        ([PolicyRule(4, 32766, "from 192.0.2.0/24 lookup main", ip_network("192.0.2.0/24"))], "no rule"),
        ([], "no rule"),
    ],
)
def test_main_table_may_be_led_to_by_a_rule_of_any_priority(rules: list[PolicyRule], cause: str) -> None:
    class View:
        def rules(self, family: int) -> list[PolicyRule]:
            if family == 6:
                raise OSError(errno.EAFNOSUPPORT, "the kernel has no IPv6")
            return rules

        def destinations(self, _family: int) -> list[Any]:
            return []

    question = Question(paths.TO_NODES, ip_address("192.0.2.2"), None, "", lambda _: True)
    found = _Host(View(), {}).explain(question, OSError(errno.ENETUNREACH, "unreachable"), status_of({}))  # type: ignore[arg-type]
    assert found.cause == cause


@pytest.mark.parametrize(
    ("flags", "hardware", "kind", "is_lost"),
    [
        ("0x10c3", "1", "", True),
        ("0x10c3", "1", "veth", True),
        ("0x1003", "1", "", False),
        ("0xc3", "1", "dummy", False),
        ("0xc3", "1", "ipvlan", False),
        ("0xc1", "65534", "xfrm", False),
        ("0xd1", "1", "", False),
    ],
)
def test_interface_that_needs_no_arp_loses_nothing(
    flags: str, hardware: str, kind: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class View:
        def link(self, name: str) -> SeenLink:
            return SeenLink(5, name, "", 1500, True, ForeignLink(name, "an interface", kind))

    read = {"flags": flags, "type": hardware}
    monkeypatch.setattr("flanneld.ctl.losses.files.text", lambda path: read.get(path.name, ""))
    monkeypatch.setattr(losses, "_setting", lambda _path: 0)
    assert [each.cause for each in losses._mute(View(), ["eth9"])] == ["arp"] * is_lost  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("routes", "removal"),
    [
        ([("10.5.0.0/16", 0, 7)], ""),
        ([("10.5.0.0/16", 0, 7), ("10.5.1.0/25", 0, 7)], "unreachable 10.5.1.0/25"),
        ([("10.5.0.0/16", 0, 6)], "blackhole 10.5.0.0/16"),
    ],
)
def test_guard_route_of_the_daemon_is_not_removed(routes: list[tuple[str, int, int]], removal: str) -> None:
    class View:
        def rules(self, _family: int) -> list[PolicyRule]:
            return [PolicyRule(4, 32766, "from all lookup main")]

        def destinations(self, _family: int) -> list[tuple[str, int, int]]:
            return routes

    told = status_of({"local": [object_of(Blackhole(IPv4Network("10.5.0.0/16"), unreachable=True))]})
    question = Question(paths.TO_CONTAINERS, ip_address("10.5.1.2"), None, "", lambda _: True)
    found = _Host(View(), {}).explain(question, OSError(errno.ENETUNREACH, "unreachable"), told)  # type: ignore[arg-type]
    assert found.removal == removal


@pytest.mark.parametrize(
    ("target", "rule", "commands"),
    [
        ("10.5.2.1", PolicyRule(4, 100, ""), ["ip rule add to 10.5.0.0/16 lookup main priority 99"]),
        ("fd05:2::1", PolicyRule(6, 100, ""), ["ip -6 rule add to fd05::/16 lookup main priority 99"]),
        ("10.5.2.1", PolicyRule(4, 0, ""), []),
        ("10.6.2.1", PolicyRule(4, 100, ""), []),
    ],
)
def test_rule_for_the_cluster_network_comes_just_before_a_foreign_one(
    target: str, rule: PolicyRule, commands: list[str]
) -> None:
    ranges = [{"network": "10.5.0.0/16", "subnet_len": 24}, {"network": "fd05::/16", "subnet_len": 64}]
    question = Question("packets to pods", ip_address(target), None, "", lambda _: True)
    found = _before(rule, question, status_of({"network": {"ranges": ranges}}))
    assert [" ".join(each) for each in found] == commands
