"""What the doctor says about devices, routes, entries and addresses in the kernel."""

from __future__ import annotations

import errno
from ipaddress import IPv4Network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks import Facts, LackingFeature
from flanneld.ctl.compare import Comparison, Difference, ShadowingRoute
from flanneld.ctl.losses import Lost
from flanneld.ctl.paths import FROM_CONTAINERS, FROM_NODES, TO_CONTAINERS, TO_NODES
from flanneld.model import Family
from flanneld.network import host_settings
from flanneld.state.resources import Resource
from tests.unit.ctl.findings import HINT, document, evidence, number, said
from tests.unit.ctl.test_checks import (
    ACCEPT,
    CONTAINER,
    DOCUMENT,
    ROUTE,
    VXLAN,
    WELL,
    bridge,
    link,
)

OTHER = replace(VXLAN, mtu=1400)
RESTART = "start the daemon: it recreates the device"


def compared(*entries: Comparison, **changes: Any) -> Facts:
    return replace(replace(WELL, entries=entries), **changes)


@pytest.mark.parametrize(
    ("entry", "owner", "problem", "cure"),
    [
        (
            Comparison(VXLAN, "missing"),
            "",
            "flannel.1 is not there",
            RESTART,
        ),
        (
            Comparison(VXLAN, "missing"),
            "a socket of pid 7",
            "flannel.1 is not there",
            "stop what has the port, or set another Backend.Port for all nodes; then start the daemon",
        ),
        (
            Comparison(VXLAN, "different", other=OTHER, differences=(Difference("mtu", "1400", "1450"),)),
            "",
            "flannel.1 has mtu 1400, wanted 1450",
            "ip link set flannel.1 mtu 1450",
        ),
        (
            Comparison(
                VXLAN,
                "different",
                other=replace(OTHER, port=1),
                differences=(Difference("mtu", "1400", "1450"), Difference("port", "1", "8472")),
            ),
            "",
            "flannel.1 has mtu 1400, wanted 1450; has port 1, wanted 8472",
            RESTART,
        ),
    ],
)
def test_device_is_mended_by_a_command_only_without_loss(
    entry: Comparison, owner: str, problem: str, cure: str
) -> None:
    facts = compared(entry, port_owners={"flannel.1": owner} if owner else {})
    ((_, what, how),) = said("devices", facts)
    assert what == problem
    assert how.startswith(cure)
    assert evidence("devices", facts) == [f"wanted: {VXLAN}" + f"; {owner} has its UDP port" * bool(owner)]


@pytest.mark.parametrize("state", ["ok", "not wanted", "found"])
def test_device_and_object_that_are_there_are_not_missed(state: str) -> None:
    facts = compared(Comparison(VXLAN, state), Comparison(ROUTE, state))
    assert not said("devices", facts)
    assert not said("missing", facts)


def test_objects_that_the_kernel_lacks_are_one_finding_and_devices_others() -> None:
    nets = [IPv4Network(f"10.5.{each}.0/24") for each in range(5)]
    routes = [Comparison(replace(ROUTE, destination=each), "missing") for each in nets]
    facts = compared(Comparison(VXLAN, "missing"), *routes)
    assert [problem for _, problem, _ in said("missing", facts)] == ["the kernel lacks 5 objects"]
    assert evidence("missing", facts)[0].endswith("; and 2 more")
    lacking = replace(facts, lacking=(LackingFeature("vxlan", "why", "vxlan udp_tunnel"),))
    assert number("missing", lacking) == number("devices", lacking) == 0
    assert said("kernel support", lacking)[0][2].startswith("modprobe -a vxlan udp_tunnel, then start")


@pytest.mark.parametrize(
    ("links", "found"),
    [
        ((link("lo"),), 0),
        ((link("lo", up=False),), 1),
        ((link("lo1", up=False), link("l", up=False)), 0),
    ],
)
def test_loopback_must_be_up(links: tuple[Any, ...], found: int) -> None:
    facts = replace(WELL, links=(*WELL.links, *links))
    assert [each[1:] for each in said("devices", facts)] == [("lo is down", "ip link set dev lo up")] * found


UP = "ip link set dev eth0 up"
OFF = host_settings.findings(host_settings.HostSettings((6,), "eth0", {"net/ipv6/conf/eth0/disable_ipv6": 1}))


IS_OFF = "net.ipv6.conf.eth0.disable_ipv6 is 1"
SWITCH_ON = "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; then give eth0 its addresses back"


def uplink(*addresses: str) -> Facts:
    return document(uplink=DOCUMENT["uplink"] | {"addresses": addresses})


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (replace(WELL, links=()), [("the uplink eth0 is not there", "plug it in, or let the daemon elect")]),
        (replace(WELL, links=(link("eth0", up=False),)), [("the uplink eth0 is down", UP)]),
        (
            replace(uplink("192.0.2.1", "2001:db8::1"), links=(link("eth0", up=False),)),
            [("the uplink eth0 is down", f"{UP}, and give it its IPv6 addresses back")],
        ),
        (
            replace(WELL, links=(replace(link("eth0"), master=6), bridge("br0"))),
            [("eth0 is a port of br0", "ip link set eth0 nomaster; or give br0 the addresses and routes of")],
        ),
        (replace(WELL, links=(replace(link("eth0"), master=6), replace(link("bond0"), index=6))), []),
        (uplink("192.0.2.7", "192.0.2.8"), [("eth0 has lost 192.0.2.7, 192.0.2.8", "give it back; with")]),
        (
            replace(uplink("192.0.2.1", "2001:db8::1"), host=OFF),
            [
                (
                    "net.ipv6.conf.eth0.disable_ipv6 is 1",
                    "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; then give eth0 its",
                )
            ],
        ),
        (
            replace(uplink("192.0.2.7", "2001:db8::1"), host=OFF),
            [
                (
                    "net.ipv6.conf.eth0.disable_ipv6 is 1",
                    "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; then give eth0 its",
                ),
                ("eth0 has lost 192.0.2.7", "give it back"),
            ],
        ),
    ],
    ids=[
        "not there",
        "down",
        "down with IPv6",
        "a port",
        "of a bond",
        "lost addresses",
        "no IPv6",
        "no IPv6 and a lost address",
    ],
)
def test_uplink_is_there_with_its_addresses(facts: Facts, found: list[tuple[str, str]]) -> None:
    seen = said("uplink", facts)
    assert [problem for _, problem, _ in seen] == [problem for problem, _ in found]
    assert all(cure.startswith(start) for (*_, cure), (_, start) in zip(seen, found, strict=True))


def test_addresses_that_are_left_and_those_to_give_back_are_told() -> None:
    assert evidence("uplink", uplink("192.0.2.7")) == ["it has 192.0.2.1"]
    assert evidence("uplink", replace(uplink("192.0.2.7"), addresses=())) == ["it has no address"]
    off = said("uplink", replace(uplink("192.0.2.1", "2001:db8::1"), host=OFF))
    assert off[0][2].endswith("its addresses back: 2001:db8::1")
    assert said("uplink", replace(uplink("192.0.2.1"), host=OFF))[0][2].endswith("addresses back: IPv6")


def detour(number: int, removal: str = "") -> ShadowingRoute:
    return ShadowingRoute(f"10.5.{number}.0/24", f"route {number}", removal)


@pytest.mark.parametrize(
    ("detours", "problem", "found", "cure"),
    [
        (
            [detour(2)],
            "packets for 10.5.2.0/24 do not take the daemon's route",
            "route 2",
            "`ip route get ADDRESS` and `ip rule` show what decides",
        ),
        (
            [
                detour(3, "ip route x"),
                detour(2),
                detour(4, "ip route x"),
                detour(5, "ip route y"),
            ],
            "packets for 10.5.2.0/24 and 3 more do not take the daemon's route",
            "route 3; route 2; route 4",
            "if not needed: ip route x; keep the route to a network",
        ),
        (
            [detour(2), detour(2)],
            "packets for 10.5.2.0/24 do not take the daemon's route",
            "route 2; route 2",
            "`ip route get",
        ),
    ],
)
def test_routes_that_override_the_daemons_are_one_finding(
    detours: list[ShadowingRoute], problem: str, found: str, cure: str
) -> None:
    facts = replace(WELL, detours=tuple(detours))
    ((_, what, how),) = said("detours", facts)
    assert (what, evidence("detours", facts)) == (problem, [found])
    assert how.startswith(cure)
    for cause, shown in (("rule", 0), ("route", 1), ("no rule", 1), ("uplink", 1)):
        lost = (Lost(TO_NODES, cause, "192.0.2.2", ""),)
        assert number("detours", replace(facts, lost=lost)) == shown


def refusal(text: str, **changes: Any) -> dict[str, Any]:
    return {"object": text, "reason": "why"} | changes


IPV6_OFF = refusal("address fc00::/128 dev flannel-v6.1", errno=errno.EACCES)


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        (
            [refusal("route a dev eth0")],
            [("the kernel refuses route a dev eth0", "find the object")],
        ),
        ([refusal("route a", remedy="do it")], [("the kernel refuses route a", "do it")]),
        ([refusal("route a", table="cloud-routes"), refusal("b", table="cloud-forwarding")], []),
        (
            [refusal("route a dev flannel-v6.1 onlink"), IPV6_OFF, refusal("route b dev flannel.1")],
            [
                (
                    "the kernel refuses address fc00::/128 dev flannel-v6.1",
                    "sysctl -w net.ipv6.conf.flannel-v6/1.disable_ipv6=0",
                ),
                ("the kernel refuses route b dev flannel.1", "find the object"),
            ],
        ),
        (
            [refusal("route a dev x", errno=errno.EACCES), refusal("address b dev x", errno=errno.EEXIST)],
            [
                ("the kernel refuses route a dev x", "find the object"),
                ("the kernel refuses address b dev x", "find the object"),
            ],
        ),
        (
            [refusal(f"route {each}") for each in range(4)],
            [(f"the kernel refuses route {each}", "find the object") for each in range(3)],
        ),
    ],
    ids=["a reason", "a remedy", "of a cloud", "IPv6 is off", "other errors", "many"],
)
def test_few_refusals_are_told_and_one_for_a_device_without_ipv6(
    refused: list[dict[str, Any]], found: list[tuple[str, str]]
) -> None:
    seen = said("refused", document(refused=refused))
    assert [problem for _, problem, _ in seen] == [problem for problem, _ in found]
    assert all(cure.startswith(start) for (*_, cure), (_, start) in zip(seen, found, strict=True))


@pytest.mark.parametrize(
    ("peers", "limit", "size"),
    [(8, 10, None), (9, 10, 4096), (9, 0, None), (1025, 1024, 4100), (1, 1, 4096)],
)
def test_neighbour_table_should_be_larger_than_four_fifths_of_the_peers(
    peers: int, limit: int, size: int | None
) -> None:
    one = DOCUMENT["peers"][0]
    found = said("neighbours", replace(document(peers=[one] * peers), gc_thresh=limit))
    cure = f"sysctl -w net.ipv4.neigh.default.gc_thresh3={size}"
    assert found == [(HINT, "the neighbour table may overflow", cure)] * (size is not None)


def test_objects_of_peers_that_are_gone_are_one_finding() -> None:
    gone: list[Resource] = [replace(ROUTE, destination=IPv4Network(f"10.5.{each}.0/24")) for each in range(4)]
    facts = compared(Comparison(ROUTE, "ok"), *(Comparison(each, "not wanted") for each in gone))
    problem = "the kernel holds 4 objects of peers that are gone"
    assert [what for _, what, _ in said("stale", facts)] == [problem]
    assert evidence("stale", facts)[0].endswith("; and 1 more")


FILTERED = host_settings.findings(
    host_settings.HostSettings((4,), "eth0", {"net/ipv4/conf/eth0/rp_filter": 1}, elsewhere="eth1")
)
BEHIND_BRIDGE = "give the containers' bridge the subnet in /run/flannel/subnet.env, as the container runtime"


@pytest.mark.parametrize(
    ("lost", "changes", "problem", "cure"),
    [
        (
            Lost(TO_NODES, "rule", "100: from all", "why"),
            {},
            f"the policy rule 100: from all diverts {TO_NODES}",
            "give the rule conditions that spare the network and the nodes' addresses, or remove it: ip rule"
            " del priority 100",
        ),
        (
            Lost(TO_NODES, "no rule", "the main table", "why", ACCEPT),
            {},
            f"no policy rule leads {TO_NODES} to the main table",
            "iptables -I FORWARD",
        ),
        (
            Lost(TO_NODES, "filter", "eth0", "why", ACCEPT),
            {},
            f"the reverse path filter of eth0 drops {TO_NODES}",
            "iptables",
        ),
        (Lost(TO_NODES, "filter", "eth0", "why", ACCEPT), {"host": FILTERED}, "", ""),
        (Lost(TO_NODES, "arp", "eth0", "why", ACCEPT), {}, "eth0 answers no ARP request", "iptables"),
        (
            Lost(TO_CONTAINERS, "forwarding", "cni0", "why", ACCEPT),
            {},
            f"cni0 does not forward {TO_CONTAINERS}",
            "iptables",
        ),
        (Lost(TO_NODES, "uplink", "eth1", "why"), {}, "", ""),
        (
            Lost(TO_NODES, "no route", "192.0.2.2", "why"),
            {},
            f"this node loses {TO_NODES}",
            "no route leads there; give this host one: ip route add default via ROUTER dev eth0",
        ),
        (
            Lost(TO_NODES, "no route", "2001:db8::2", "why"),
            {},
            f"this node loses {TO_NODES}",
            "no route leads there; give this host one: ip -6 route add default via ROUTER dev eth0",
        ),
        (
            Lost(FROM_CONTAINERS, "route", "10.5.2.2", "why"),
            {},
            f"this node loses {FROM_CONTAINERS}",
            "remove the route that leads astray, if it is not needed: `ip route get 10.5.2.2` shows it",
        ),
        (
            Lost(TO_CONTAINERS, "route", "10.5.1.2", "why", removal="blackhole 10.5.1.0/25"),
            {},
            f"this node loses {TO_CONTAINERS}",
            "remove the route that leads astray, if it is not needed: ip route del blackhole 10.5.1.0/25",
        ),
        (
            Lost(TO_CONTAINERS, "route", "10.5.1.2", "why"),
            {},
            f"this node loses {TO_CONTAINERS}",
            f"{BEHIND_BRIDGE} does: ip route replace 10.5.1.0/24 dev cni0",
        ),
        (
            Lost(TO_CONTAINERS, "route", "10.5.1.2", "why"),
            {"addresses": ()},
            f"this node loses {TO_CONTAINERS}",
            f"{BEHIND_BRIDGE} does: ip address add 10.5.1.1/24 dev cni0",
        ),
        (
            Lost(TO_CONTAINERS, "route", "10.5.1.2", "why"),
            {"addresses": (), "links": (bridge("docker0"),)},
            f"this node loses {TO_CONTAINERS}",
            f"{BEHIND_BRIDGE} does: ip address add 10.5.1.1/24 dev docker0",
        ),
        (
            Lost(TO_CONTAINERS, "route", "10.5.1.2", "why"),
            {"addresses": (), "links": ()},
            f"this node loses {TO_CONTAINERS}",
            f"{BEHIND_BRIDGE} does: ip address add 10.5.1.1/24 dev BRIDGE",
        ),
    ],
)
def test_way_that_packets_do_not_take_is_told_with_what_corrects_it(
    lost: Lost, changes: dict[str, Any], problem: str, cure: str
) -> None:
    found = said("lookups", replace(replace(WELL, lost=(lost,)), **changes))
    assert [what for _, what, _ in found] == [problem] * bool(problem)
    assert all(how.startswith(cure) for *_, how in found)


@pytest.mark.parametrize(
    ("subnets", "steps"),
    [
        (["10.5.1.0/24", "fc00:5::/64"], "ip address add 10.5.1.1/24 dev cni0"),
        (
            ["fc00:5::/64"],
            "sysctl -w net.ipv6.conf.cni0.disable_ipv6=0; ip address add fc00:5::1/64 dev cni0",
        ),
    ],
    ids=["both families", "IPv6"],
)
def test_bridge_gets_the_ipv4_subnet_if_there_is_one(subnets: list[str], steps: str) -> None:
    status = document(lease=DOCUMENT["lease"] | {"subnets": subnets}).status
    lost = Lost(TO_CONTAINERS, "route", "", "why")
    ((*_, cure),) = said("lookups", replace(WELL, status=status, addresses=(), lost=(lost,)))
    assert cure == f"{BEHIND_BRIDGE} does: {steps}"


AWAY = replace(CONTAINER, reached_by="eth0")
TO_PEER = Lost(FROM_CONTAINERS, "route", "10.5.2.2", "why")
OVER_IPV6: frozenset[Family] = frozenset({6})


@pytest.mark.parametrize(
    ("lost", "changes", "found"),
    [
        (Lost(TO_CONTAINERS, "route", "", "why"), {"containers": (AWAY,)}, 0),
        (Lost(TO_CONTAINERS, "route", "", "why", removal="x"), {"containers": (AWAY,)}, 1),
        (Lost(FROM_CONTAINERS, "route", "", "why"), {"containers": (AWAY,)}, 1),
        (Lost(TO_NODES, "route", "", "why", families=OVER_IPV6), {"host": OFF}, 0),
        (Lost(FROM_NODES, "route", "", "why", families=OVER_IPV6), {"host": OFF}, 0),
        (Lost(FROM_CONTAINERS, "route", "", "why", families=OVER_IPV6), {"host": OFF}, 1),
        (Lost(TO_NODES, "route", "", "why", families=OVER_IPV6), {}, 1),
        (Lost(TO_NODES, "route", "", "why", families=frozenset({4, 6})), {"host": OFF}, 1),
        (TO_PEER, {"entries": (Comparison(ROUTE, "missing"),)}, 0),
        (TO_PEER, {"entries": (Comparison(ROUTE, "different"),)}, 0),
        (TO_PEER, {"entries": (Comparison(ROUTE, "not wanted"),)}, 1),
        (Lost(FROM_CONTAINERS, "route", "10.5.3.2", "why"), {"entries": (Comparison(ROUTE, "missing"),)}, 1),
        (TO_PEER, {"entries": (Comparison(VXLAN, "missing"),)}, 1),
    ],
)
def test_loss_with_a_cause_that_is_a_finding_is_not_told_again(
    lost: Lost, changes: dict[str, Any], found: int
) -> None:
    assert number("lookups", replace(replace(WELL, lost=(lost,)), **changes)) == found
