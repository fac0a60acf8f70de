"""Each check of ``flannelctl doctor`` finds what it is for, and nothing on a node that is well."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from copy import deepcopy
from errno import ENETUNREACH
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import flanneld
from flanneld.config import parse
from flanneld.ctl.beyond import LostWay
from flanneld.ctl.checks import THEMES, Facts, LackingFeature, cluster, see_first
from flanneld.ctl.checks.encryption import CharonState, standing
from flanneld.ctl.checks.host import CniFile, LeftRules
from flanneld.ctl.checks.kernel import NEW_MAC
from flanneld.ctl.checks.store import EtcdHealth, ask_etcd
from flanneld.ctl.compare import Comparison, Difference, Outside, ShadowingRoute
from flanneld.ctl.doctor import CHECKS, DoctorReport, examine
from flanneld.ctl.drops import MASQUERADES, Drop
from flanneld.ctl.inside import Container
from flanneld.ctl.losses import Lost
from flanneld.ctl.neighbors import Claim
from flanneld.ctl.output import table_lines
from flanneld.ctl.paths import DISCOVERY, FROM_CONTAINERS, TO_CONTAINERS, TO_NODES, PathToPeer
from flanneld.ctl.source import SourcePart, Unknown
from flanneld.errors import LEASE_TAKEN
from flanneld.findings import Command, Remedy, Severity
from flanneld.network import host_settings
from flanneld.network.routing import PolicyRule
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.state.resources import ForeignLink, Neighbor, Resource, Route, Vxlan
from flanneld.subnet.subnet_file import Previous
from tests.local_etcd import answering, server
from tests.unit.ctl.documents import object_of, status_of

NOW = 1_000_000.0
MAC, OTHER_MAC = "02:00:00:00:00:01", "02:00:00:00:00:99"
VXLAN = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, MAC, 1450)
ROUTE = Route(IPv4Network("10.5.2.0/24"), "flannel.1", IPv4Address("10.5.2.0"), onlink=True)

DOCUMENT: dict[str, Any] = {
    "store": {"name": "etcd", "answers": True},
    "health": {"ready": True, "missing": [], "late": []},
    "network": {"ranges": [{"network": "10.5.0.0/16", "subnet_len": 24}], "backend": "vxlan"},
    "lease": {"subnets": ["10.5.1.0/24"], "expires": NOW + 80_000, "macs": [MAC], "renewals": {}},
    "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": ["192.0.2.1"]},
    "mtu": 1450,
    "devices": ["flannel.1"],
    "synced": True,
    "refused": [],
    "lost_notifications": 0,
    "removal_guard": {"holds": False},
    "firewall": {"place": "nft", "not_in_place": []},
    "peers": [
        {
            "subnets": ["10.5.2.0/24"],
            "public_ips": ["192.0.2.2"],
            "state": "in the kernel",
            "reason": "",
            "conflicts": [],
            "objects": [],
        }
    ],
}


SILENT = {
    "subnet": "10.5.2.0/24",
    "state": "silent",
    "handshake": None,
    "rx_bytes": 0,
    "tx_bytes": 444,
    "endpoint": "192.0.2.2:51820",
}


def link(name: str, mtu: int = 1500, up: bool = True) -> SeenLink:
    return SeenLink(5, name, MAC, mtu, up, ForeignLink(name, "a plain interface"))


def bridge(name: str, mtu: int = 1500) -> SeenLink:
    return SeenLink(6, name, MAC, mtu, True, ForeignLink(name, "a device of kind bridge", "bridge"))


def port_of(name: str) -> SeenLink:
    return replace(link(f"port of {name}"), master=bridge(name).index)


def flannel(**changes: Any) -> SeenLink:
    made = replace(VXLAN, **changes)
    return SeenLink(3, "flannel.1", made.mac, made.mtu, made.up, made)


WELL = Facts(
    status=status_of(DOCUMENT),
    origin="daemon",
    now=NOW,
    subnet_file="/run/flannel/subnet.env",
    previous=Previous((IPv4Network("10.5.0.0/16"),), (IPv4Network("10.5.1.0/24"), None), 1450),
    links=(link("eth0"), flannel(), bridge("cni0", 1450), port_of("cni0")),
    addresses=(
        ("eth0", ip_address("192.0.2.1")),
        ("flannel.1", ip_address("10.5.1.0")),
        ("cni0", ip_address("10.5.1.1")),
    ),
    traffic={"flannel.1": (1000, 1000)},
    offload={"flannel.1": True},
    kernel=(6, 1),
    gc_thresh=1024,
    clock_is_synchronised=True,
)


def told(change: Callable[[dict[str, Any]], object]) -> Facts:
    """The node that is well, but for what its daemon tells."""
    document = deepcopy(DOCUMENT)
    change(document)
    return replace(WELL, status=status_of(document))


def refused_by(table: str) -> Facts:
    refusal = {"object": "route x", "reason": "no right", "remedy": "allow it", "table": table}
    return told(lambda d: d.update(refused=[refusal]))


def of_host(setting: str, value: int) -> Facts:
    known = host_settings.HostSettings((4,), "eth0", {setting: value}, elsewhere="eth1")
    return replace(WELL, host=host_settings.findings(known))


def entry(value: Resource, state: str) -> Facts:
    return replace(WELL, entries=(Comparison(value, state),))


def drift(**changes: Any) -> Facts:
    actual = replace(VXLAN, **changes)
    differences = (Difference(name, str(value), "as wanted") for name, value in changes.items())
    return replace(
        WELL, entries=(Comparison(VXLAN, "different", other=actual, differences=tuple(differences)),)
    )


def with_links(*links: SeenLink) -> Facts:
    return replace(WELL, links=links)


def with_address(name: str, *links: SeenLink) -> Facts:
    """The node that is well, with an address of another node's subnet."""
    return replace(WELL, links=links, addresses=(*WELL.addresses, (name, ip_address("10.5.77.1"))))


def peer(**changes: Any) -> Facts:
    return told(lambda document: document["peers"][0].update(changes))


def lost(cause: str, about: str, commands: tuple[tuple[str, ...], ...] = ()) -> Facts:
    return replace(WELL, lost=(Lost("packets to other nodes", cause, about, "the route is wrong", commands),))


def path(name: str, carried: int | None, to: str = "") -> PathToPeer:
    target = ip_address(to or ("192.0.2.2" if name == "underlay" else "10.5.2.0"))
    return PathToPeer(name, target, carried or 1450, carried, "10.5.2.0/24")


OFF_LINK = Route(IPv4Network("10.5.2.0/24"), "eth0", IPv4Address("192.0.2.2"))
CONTAINER = Container(
    "/run/netns/a", "eth0", ip_address("10.5.1.2"), True, 1450, reached_by="cni0", attached_to="cni0"
)


def container(**changes: Any) -> Facts:
    return replace(WELL, containers=(replace(CONTAINER, **changes),))


#: A peer that does not answer while received bytes stand, on a device with threaded NAPI.
STUCK = replace(
    WELL,
    standing=("10.5.2.0/24",),
    paths=(PathToPeer("tunnel", ip_address("10.5.2.0"), 1450, None, "10.5.2.0/24"),),
)

#: A node that got another public IP, and with it another lease: all that is left on its former subnet.
FORMER = replace(
    peer(state="unsafe", reason="cni0 is connected to 10.5.2.0/24; renumber that"),
    addresses=(*WELL.addresses[:2], ("cni0", ip_address("10.5.2.1"))),
    containers=(replace(CONTAINER, address=ip_address("10.5.2.2"), is_routed=False),),
)
NO_WIREGUARD = LackingFeature("wireguard", "it cannot make a device of this kind", "wireguard")
ACCEPT = (("iptables", "-I", "FORWARD", "-s", "10.5.0.0/16", "-j", "ACCEPT"),)
FLANNEL = CniFile("/etc/cni/net.d/10-flannel.conflist", ("flannel", "portmap"))
CALICO = CniFile("/etc/cni/net.d/10-calico.conflist", ("calico",))
MULTUS = CniFile("/etc/cni/net.d/00-multus.conf", ("multus",))
OUTSIDE = replace(WELL, addresses=(*WELL.addresses, ("eth0", ip_address("8.8.4.4"))))

#: By the name of a check: what it must find something in.
CASES: dict[str, list[Facts]] = {
    "devices": [
        entry(VXLAN, "missing"),
        drift(port=8473),
        drift(up=False),
        drift(mtu=1400, learning=True),
        with_links(link("lo", up=False)),
    ],
    "uplink": [
        with_links(flannel()),
        with_links(link("eth0", up=False), flannel()),
        with_links(replace(link("eth0"), master=6), bridge("br0"), flannel()),
        replace(WELL, addresses=WELL.addresses[1:]),
    ],
    "missing": [entry(ROUTE, "missing")],
    "detours": [replace(WELL, detours=(ShadowingRoute("10.5.2.0/24", "route 10.5.2.0/25 dev eth0"),))],
    "stale": [entry(ROUTE, "not wanted")],
    "refused": [
        told(lambda d, each=each: d.update(refused=[each]))  # type: ignore[misc]
        for each in (
            {"object": "route x", "reason": "File exists"},
            {"object": "address fc00::/128 dev flannel-v6.1", "reason": "Permission denied", "errno": 13},
        )
    ],
    "cloud routes": [refused_by("cloud-routes")],
    "cloud forwarding": [refused_by("cloud-forwarding")],
    "neighbours": [replace(WELL, gc_thresh=1)],
    "traffic control": [
        replace(WELL, queued={("eth0", kind): 3}, paths=paths)
        for kind, paths in (("tbf", ()), ("clsact", ()), ("fq_codel", (path("tunnel", None),)))
    ],
    "config": [replace(WELL, stored=parse('{"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}}'))],
    "synced": [
        told(lambda d: d.update(synced=False)),
        told(lambda d: d["store"].update(cache="the nodes saved in /x at 2023-11-14T22:13:20Z")),
    ],
    "removal_guard": [told(lambda d: d.update(removal_guard={"holds": True}))],
    "mac": [with_links(link("eth0"), flannel(mac="02:00:00:00:00:99"))],
    "contested": [peer(conflicts=["10.5.3.0/24"], state="contested"), peer(macs=[MAC.upper()])],
    "left devices": [
        replace(
            with_links(link("eth0"), flannel(), replace(flannel(), name="flannel.7")),
            addresses=(*WELL.addresses, ("flannel.7", IPv4Address("10.5.1.0"))),
        )
    ],
    "managers": [
        replace(WELL, managed=(("flannel.1", "NetworkManager"),)),
        replace(WELL, managed=(("flannel.1", "systemd-networkd"),)),
    ],
    "fights": [
        told(lambda d: d.update(fights=True)),
        told(lambda d: d["firewall"].update(fights=True)),
    ],
    "probes": [peer(probe={"target": "10.5.2.0", "time": NOW, "rtt": None})],
    "forwarding": [of_host("net/ipv4/ip_forward", 0)],
    "left rules": [replace(WELL, left_rules=(LeftRules(("iptables-legacy: nat FLANNEL-POSTRTG",), ACCEPT),))],
    "cni": [
        replace(WELL, cni=(CALICO, FLANNEL)),
        replace(WELL, cni=(MULTUS, CALICO, FLANNEL)),
        replace(WELL, cni=(FLANNEL, CALICO), origin="host"),
        replace(WELL, cni=(FLANNEL,), origin="host", has_subnet_file=False),
    ],
    "rules": [told(lambda d: d.update(firewall={"place": "nft", "not_in_place": ["IPv4"]}))],
    "open tunnel": [OUTSIDE],
    "keepers": [replace(WELL, firewalls=("firewalld",)), replace(WELL, firewalls=("ufw",))],
    "subnet file": [
        replace(WELL, previous=Previous()),
        replace(WELL, has_subnet_file=False),
        replace(WELL, previous=Previous((), (IPv4Network("10.5.7.0/24"), None))),
        replace(WELL, previous=replace(WELL.previous, mtu=1400)),
    ],
    "bridges": [of_host("net/bridge/bridge-nf-call-iptables", 0), of_host("net/ipv4/ip_forward", 1)],
    "bridge subnet": [
        with_address("docker0", bridge("docker0"), port_of("docker0")),
        with_address("eth0", link("eth0")),
        replace(WELL, addresses=(*WELL.addresses, ("cni0", ip_address("172.17.0.1")))),
    ],
    "lease": [
        told(
            lambda d: d.update(
                health={"conditions": [{"part": "lease", "problem": f"{LEASE_TAKEN} 10.5.1.0/24; remedy"}]}
            )
        ),
        replace(told(lambda d: d.update(lease=None)), origin="store"),
        told(lambda d: d["lease"].update(expires=NOW - 1)),
        told(lambda d: d["lease"].update(expires=NOW + 60)),
    ],
    "clock": [
        replace(WELL, clock_is_synchronised=False),
        *(replace(WELL, etcd=EtcdHealth("https://etcd:2379", off, True, "")) for off in (7200.0, -7200.0)),
    ],
    "store": [
        replace(
            told(lambda d: d["store"].update(problem="etcd does not answer")),
            etcd=EtcdHealth("http://etcd:2379", 1.0, False, '{"health":"false","reason":"RAFT NO LEADER"}'),
        ),
        told(lambda d: d["store"].update(problem="etcd does not answer", remedy="see that it runs")),
        replace(WELL, unknown=(Unknown(SourcePart.STORE, "etcd does not answer"),)),
    ],
    "ready": [told(lambda d: d["health"].update(missing=["the peers are not known yet"]))],
    "public ip": [
        peer(public_ips=["192.0.2.1"]),
        told(
            lambda d: (d["network"].update(backend="wireguard"), d["peers"].append(deepcopy(d["peers"][0])))
        ),
        told(lambda d: d["peers"].append(deepcopy(d["peers"][0]))),
    ],
    "network": [told(lambda d: d["lease"].update(subnets=["10.6.1.0/24"]))],
    "refusals": [peer(state="refused", reason="no VtepMAC")],
    "unsafe leases": [peer(state="unsafe", reason="br7 is connected to 10.5.2.0/24; renumber that")],
    "reverse path": [of_host("net/ipv4/conf/eth0/rp_filter", 1)],
    "containers": [
        with_links(link("eth0"), flannel(), bridge("cni0", 1500), port_of("cni0")),
        container(mtu=1500),
        container(port="veth1", port_mtu=1400),
    ],
    "device": [with_links(link("eth0", 1450), flannel())],
    "path": [
        replace(WELL, paths=(PathToPeer("underlay", ip_address("192.0.2.2"), 1500, 1280),)),
        replace(WELL, paths=(PathToPeer("tunnel", ip_address("10.5.2.0"), 1450, 576),)),
        replace(WELL, paths=(PathToPeer("tunnel", ip_address("10.5.2.0"), 1450, 1450, lost=2),)),
    ],
    "handshakes": [peer(sessions=[SILENT])],
    "speed": [
        replace(WELL, uplink_lacks_segmentation=True),
        replace(WELL, queues=(1, 4)),
        told(lambda d: d["uplink"].update(mtu=9000)),
    ],
    "receiving": [STUCK],
    "bridge port": [
        replace(container(port="veth1", off=off, is_learnt=False), links=(*WELL.links, link("veth1", up=up)))
        for up, off in ((True, ("state",)), (False, ("state",)), (True, ("flood",)), (True, ("learning",)))
    ],
    "kernel support": [replace(WELL, lacking=(NO_WIREGUARD,))],
    "charon": [
        replace(WELL, charon=CharonState.NOT_RUNNING, origin="host"),
        replace(refused_by("charon"), charon=CharonState.NOT_INSTALLED),
        replace(WELL, charon=CharonState.HANGS),
    ],
    "bypass": [
        told(
            lambda d: d["health"].update(
                conditions=[
                    {"part": "encryption", "problem": "packets leave unencrypted; remove it: ip route del"}
                ]
            )
        )
    ],
    "symmetric NAT": [
        told(
            lambda d: d["health"].update(
                conditions=[{"part": "mesh", "problem": "symmetric NAT; forward UDP port 51820 to it"}]
            )
        )
    ],
    "cloned keys": [peer(state="refused", reason="they have one key; restart there", code="cloned key")],
    "checksums": [replace(WELL, kernel=(4, 19)), replace(WELL, kernel=(5, 6))],
    "port": [replace(WELL, traffic={"flannel.1": (0, 500)})],
    "start": [
        replace(
            WELL,
            origin="host",
            unknown=(Unknown(SourcePart.START, "flanneld cannot start: no PSK", remedy=each),),
        )
        for each in ("set Backend.PSK", "")
    ],
    "daemon": [
        replace(WELL, limits=(7, "")),
        replace(WELL, limits=(0, "CAP_NET_ADMIN")),
        *(
            replace(
                WELL, origin="host", unknown=(Unknown(SourcePart.DAEMON, "no daemon answers", hangs=hangs),)
            )
            for hangs in (False, True)
        ),
    ],
    "filters": [
        *(
            replace(
                WELL, filtered=(Drop("chain INPUT of table ip filter", "UDP 8472", rule, ACCEPT, firewalld),)
            )
            for rule in ("-A INPUT -j DROP", "")
            for firewalld in (False, True)
        ),
        replace(
            WELL, filtered=(Drop("chain FORWARD of table filter", "TCP", "", ACCEPT, drops_the_rest=True),)
        ),
        replace(
            WELL,
            filtered=(
                Drop("chain x of table inet y", "TCP", "drop # handle 3", ACCEPT, drops_the_rest=True),
            ),
        ),
        replace(
            WELL,
            filtered=(
                Drop("chain x of firewalld", "TCP", "", ACCEPT, needs_decision=True, drops_the_rest=True),
            ),
        ),
    ],
    "router": [
        replace(WELL, lost_ways=(LostWay(4, "default dev eth0", "eth0", "192.0.2.254 answers no ARP"),)),
        replace(WELL, lost_ways=(LostWay(6, "8000::/1 dev tun0", "tun0", "nothing ever came in by tun0"),)),
    ],
    "masquerade": [
        replace(WELL, exempting=(("chain POSTROUTING", "-A POSTROUTING -j ACCEPT", ("ip", "x")),))
    ],
    "lookups": [
        lost("rule", "100: from all blackhole", ACCEPT),
        lost("rule", "100: from all blackhole"),
        lost("no rule", "the main table", ACCEPT),
        lost("filter", "eth0", ACCEPT),
        lost("forwarding", "cni0", ACCEPT),
        lost("route", "192.0.2.2"),
        replace(WELL, lost=(Lost(TO_CONTAINERS, "route", "", "no route", removal="blackhole 10.5.1.0/25"),)),
        replace(WELL, lost=(Lost(TO_CONTAINERS, "route", "", "no route"),)),
    ],
    "uplink choice": [lost("uplink", "eth1")],
    "pinned neighbours": [
        replace(WELL, pinned=(Neighbor("eth0", ip_address("192.0.2.2"), MAC),)),
        replace(container(mac=MAC), pinned=(Neighbor("cni0", CONTAINER.address, OTHER_MAC),)),
        container(pinned=(Neighbor("eth0", ip_address("10.5.1.1"), OTHER_MAC),)),
        # That of another of our devices: nothing arrives there.
        replace(
            container(pinned=(Neighbor("eth0", ip_address("10.5.1.1"), OTHER_MAC),)),
            links=(flannel(mac=OTHER_MAC), bridge("cni0", 1450)),
        ),
    ],
    "duplicate addresses": [
        replace(
            told(lambda d: d["peers"].append(d["peers"][0] | {"public_ips": ["192.0.2.3"]})),
            claims=(
                Claim(ip_address("192.0.2.2"), frozenset({OTHER_MAC})),
                Claim(ip_address("192.0.2.3"), frozenset({OTHER_MAC}), answers=True),
            ),
        ),
        *(
            replace(WELL, claims=claims)
            for claims in (
                (Claim(ip_address("192.0.2.1"), frozenset({OTHER_MAC, MAC})),),
                (Claim(ip_address("192.0.2.1"), length=64),),
                (Claim(ip_address("192.0.2.2"), frozenset({OTHER_MAC, "02:00:00:00:00:98"})),),
            )
        ),
    ],
    "container routes": [
        container(is_routed=False),
        container(is_routed=False, is_up=False),
        container(length=16),
        replace(container(is_routed=False), addresses=()),
        container(is_routed=False, astray="10.5.0.0/16 dev eth1"),
        container(is_routed=False, rule=PolicyRule(4, 5, "from all lookup 77")),
    ],
    "container echoes": [
        container(is_heard=False),
        container(unanswered="10 of 10 echoes to 10.5.2.0"),
        container(unanswered="10 of 10 echoes to 10.5.2.0", dropped_by=("chain c: -j DROP",)),
    ],
    "way out": [
        container(is_led_out=False),
        replace(
            told(lambda d: d.update(firewall={"place": "nft", "masquerade": True})),
            containers=(replace(CONTAINER, is_led_out=False),),
        ),
    ],
    "peers' containers": [
        replace(WELL, beyond=(path("container", None, "10.5.2.9"),)),
        replace(
            WELL,
            beyond=(replace(path("container", 576, "10.5.2.9"), required=1450),),
            paths=(path("tunnel", 1450),),
        ),
    ],
    "container addresses": [
        container(address=ip_address("10.5.7.2")),
        replace(WELL, containers=(CONTAINER, replace(CONTAINER, path="/run/netns/b"))),
        replace(
            told(lambda d: d["lease"].update(subnets=["10.5.1.0/24", "fc00:5::/64"])),
            addresses=(*WELL.addresses, ("cni0", ip_address("fc00:5::1"))),
            containers=(CONTAINER,),
        ),
    ],
    "former subnet": [FORMER],
    "attachment": [
        replace(container(attached_to="veth1"), links=(*WELL.links, replace(link("veth1"), index=9)))
    ],
    "bridge address": [
        *(
            replace(container(reached_by=way), addresses=addresses)
            for way, addresses in (("", ()), ("eth0", ()), ("eth0", WELL.addresses))
        ),
        container(reached_by="eth0", detour="10.5.1.2/32 dev eth0"),
    ],
    "bridge down": [with_links(link("eth0"), flannel(), replace(bridge("cni0", 1450), up=False))],
    "other bridge": [replace(WELL, addresses=(*WELL.addresses[:2], ("cni0", ip_address("172.17.0.1"))))],
    "tunnel": [
        replace(WELL, paths=(path("underlay", 1500), path("tunnel", None))),
        replace(
            WELL, paths=(path("underlay", 1500), path("tunnel", None)), refusing=frozenset({"192.0.2.2"})
        ),
        replace(WELL, paths=(path("underlay", None), path("tunnel", None))),
        replace(
            told(lambda d: d["peers"][0].update(objects=[object_of(OFF_LINK)])),
            paths=(path("underlay", None),),
        ),
        *(
            replace(WELL, turned_away=(("10.5.2.0/24", ip_address("10.5.1.1"), heard),))
            for heard in (False, True)
        ),
    ],
    "segment": [
        told(lambda d: (d.update(local=[object_of(VXLAN)]), d["peers"][0].update(vnis=[7]))),
    ],
    "off link": [
        replace(
            told(
                lambda d: d.update(
                    refused=[{"object": str(OFF_LINK), "errno": ENETUNREACH, "reason": "no way"}]
                )
            ),
            entries=(Comparison(OFF_LINK, "missing"),),
        )
    ],
    "late": [told(lambda d: d["health"].update(late=["reconciler has not reported"]))],
    "overruns": [told(lambda d: d.update(lost_notifications=3))],
}


@pytest.mark.parametrize(
    ("name", "facts"),
    [(name, facts) for name, cases in CASES.items() for facts in cases],
    ids=[f"{name}-{number}" for name, cases in CASES.items() for number, _ in enumerate(cases)],
)
def test_a_check_finds_what_it_is_for(name: str, facts: Facts) -> None:
    found = [finding for check, finding in examine(facts) if check.name == name]
    assert found
    for finding in found:
        assert finding.problem
        assert finding.evidence
        assert finding.why
        assert finding.remedy


def test_each_check_has_a_case_above() -> None:
    assert sorted(check.name for check in CHECKS) == sorted(CASES)


def test_each_theme_has_a_check() -> None:
    assert {check.theme for check in (*CHECKS, *cluster.CLUSTER_CHECKS)} == set(THEMES)


def test_a_node_that_is_well_is_told_so() -> None:
    assert examine(WELL) == []
    text = [list(table_lines(table)) for table in DoctorReport([], WELL.unknown).tables()]
    assert text == [["Healthy"], [f"{len(CHECKS)} checks: 0 problems, 0 hints"]]


@pytest.mark.parametrize(
    ("session", "words"),
    [
        ({}, "port is open"),
        ({"rx_bytes": 148}, "PSK is the same on both nodes, and its UDP port"),
        ({"rx_bytes": 148, "handshake": NOW - 900}, "its device has the key of its lease"),
        ({"endpoint": "", "problem": "flannel-wg has no peer with it; start the daemon"}, "start the daemon"),
        ({"protocol": "ipsec"}, "UDP port 500, UDP port 4500 and IP protocol 50"),
        ({"endpoint": "192.0.2.2:4500", "protocol": "wireguard"}, "its UDP port is open"),
        (
            {"protocol": "ipsec", "problem": "AUTHENTICATION_FAILED; give all nodes one PSK"},
            "give all nodes one PSK",
        ),
    ],
    ids=[
        "nothing comes",
        "only handshakes come",
        "it was there once",
        "no peer in the kernel",
        "charon gets no answer",
        "a port of charon's",
        "charon says why",
    ],
)
def test_a_silent_peer_gets_the_advice_that_fits(session: dict[str, Any], words: str) -> None:
    facts = peer(sessions=[{**SILENT, **session}])
    assert_advice(facts, words)


def assert_advice(facts: Facts, words: str) -> None:
    (found,) = [finding for check, finding in examine(facts) if check.name == "handshakes"]
    assert isinstance(found.remedy, str)
    assert words in found.remedy


def test_a_silent_peer_whose_port_is_closed_gets_the_advice_to_look_there() -> None:
    facts = replace(peer(sessions=[SILENT]), refusing=frozenset({"192.0.2.2"}))
    assert_advice(facts, "see that flanneld runs there")


def test_peer_whose_charon_is_missing_gets_the_advice_to_look_for_it() -> None:
    session = {**SILENT, "endpoint": "192.0.2.2:500", "protocol": "ipsec"}
    assert_advice(replace(peer(sessions=[session]), refusing=frozenset({"192.0.2.2"})), "flanneld and charon")
    quiet = replace(
        peer(backend="ipsec"),
        paths=(path("underlay", 1500), path("tunnel", None)),
        refusing=frozenset({"192.0.2.2"}),
    )
    (found,) = [finding for check, finding in examine(quiet) if check.name == "tunnel"]
    assert isinstance(found.remedy, str)
    assert "flanneld and charon run there" in found.remedy


def test_container_that_a_network_policy_may_isolate_is_a_hint() -> None:
    for has_policies, severity in ((False, Severity.PROBLEM), (True, Severity.HINT)):
        facts = replace(container(unanswered="all"), has_policies=has_policies)
        assert [finding.severity for _, finding in examine(facts)] == [severity]


@pytest.mark.parametrize(
    ("rule", "unanswered", "severity"),
    [
        ("-A POSTROUTING -j MASQUERADE", "all", Severity.HINT),
        ("-A POSTROUTING -j SNAT --to-source 203.0.113.7", "all", Severity.PROBLEM),
        ("ip saddr 10.5.1.0/24 snat to 203.0.113.7 # handle 4", "all", Severity.PROBLEM),
        ('-A POSTROUTING -m comment --comment "requiring SNAT" -j MASQUERADE', "all", Severity.HINT),
        ("-A POSTROUTING -j SNAT --to-source 192.0.2.1", "", Severity.HINT),
    ],
)
def test_sender_that_no_answer_reaches_is_a_problem(rule: str, unanswered: str, severity: Severity) -> None:
    drop = Drop("POSTROUTING", FROM_CONTAINERS, rule, ACCEPT, verb=MASQUERADES)
    facts = replace(container(unanswered=unanswered), filtered=(drop,))
    (found,) = [finding for check, finding in examine(facts) if check.name == "filters"]
    assert found.severity == severity


@pytest.mark.parametrize(("public", "words"), [("192.0.2.1", ""), ("198.51.100.7", "198.51.100.7, to which")])
def test_announced_address_that_this_host_lacks_is_looked_at_first(public: str, words: str) -> None:
    uplink = {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": [public]}
    said = see_first(told(lambda document: document.update(uplink=uplink)))
    assert said.startswith(f"see first whether {words}" if words else "")
    assert bool(said) == bool(words)


def test_address_of_another_node_is_taken_from_this_host() -> None:
    claimed = peer(state="unsafe", reason="it announces 192.0.2.2, an address of this host; give it another")
    facts = replace(claimed, addresses=(*WELL.addresses, ("lo", ip_address("192.0.2.2"))))
    (found,) = [finding for check, finding in examine(facts) if check.name == "unsafe leases"]
    assert "ip address del 192.0.2.2 dev lo; else correct -public-ip there" in found.remedy


def test_verdict_names_the_cause_of_a_daemon_that_ended() -> None:
    silent = Unknown(SourcePart.DAEMON, "no daemon answers")
    ended = replace(WELL, origin="host", unknown=(silent,), entries=(Comparison(ROUTE, "missing"),))
    for name, facts in {
        "daemon": ended,
        "charon": replace(ended, charon=CharonState.NOT_INSTALLED),
        "start": replace(ended, unknown=(silent, Unknown(SourcePart.START, "flanneld cannot start: no PSK"))),
    }.items():
        assert examine(facts)[0][0].name == name


@pytest.mark.parametrize(
    ("session", "told"),
    [
        (SILENT, ["handshakes"]),
        ({**SILENT, "state": "established", "port": 51820}, ["tunnel"]),
    ],
    ids=["silent", "established"],
)
def test_a_silent_tunnel_is_explained_once(session: dict[str, Any], told: list[str]) -> None:
    ways = (path("underlay", 1500), path("tunnel", None))
    found = examine(replace(peer(sessions=[session]), paths=ways))
    assert [check.name for check, _ in found] == told
    remedy = found[0][1].remedy
    assert isinstance(remedy, str)
    assert ("pass UDP 8472, UDP 51820" in remedy) == (told == ["tunnel"])


def test_what_the_kernel_lacks_of_an_encrypted_network_is_named() -> None:
    lacking = Comparison(Outside("peer KEY", "wireguard"), "missing")
    (found,) = [finding for check, finding in examine(replace(WELL, entries=(lacking,)))]
    assert found.evidence == "peer KEY"


@pytest.mark.parametrize("state", ["missing", "different"])
def test_kernel_without_the_kind_of_device_is_the_only_cause_named(state: str) -> None:
    entries = (Comparison(VXLAN, state), Comparison(ROUTE, state))
    lacking = LackingFeature("vxlan", "it cannot make a device of this kind", "vxlan")
    found = examine(replace(WELL, entries=entries, lacking=(lacking,)))
    assert [check.name for check, _ in found] == ["kernel support"]


@pytest.mark.parametrize("state", [CharonState.ANSWERS, CharonState.NOT_RUNNING])
def test_a_charon_that_answers_us_or_the_daemon_is_no_finding(state: CharonState) -> None:
    assert examine(replace(WELL, charon=state)) == []


@pytest.mark.parametrize(
    "facts",
    [
        replace(WELL, cni=(FLANNEL, CALICO)),
        replace(WELL, cni=(MULTUS, FLANNEL)),
        replace(WELL, cni=(CALICO,), origin="host", has_subnet_file=False),
        replace(WELL, cni=(FLANNEL,), origin="host"),
    ],
    ids=["flannel's is first", "multus hands on to flannel", "flannel has none", "flannel may come back"],
)
def test_a_cni_config_that_does_no_harm_is_no_finding(facts: Facts) -> None:
    assert "cni" not in [check.name for check, _ in examine(facts)]


def test_a_node_of_which_nothing_is_known_breaks_no_check() -> None:
    assert [check.name for check, _ in examine(Facts())] == ["daemon"]


def test_the_report_says_what_the_evidence_the_reason_and_the_fix() -> None:
    facts = replace(WELL, firewalls=("firewalld",))
    text = [list(table_lines(table)) for table in DoctorReport(examine(facts), facts.unknown).tables()]
    assert text == [
        ["Healthy, with 1 hint"],
        [
            "hint      firewalld is at work here",
            "check     E keepers: the host's firewall and forwarding",
            "evidence  found by its files or its rules",
            "why       when it is reloaded it may remove rules; the daemon puts its own back",
            "advice    firewall-cmd --permanent --zone=trusted --add-source=10.5.0.0/16;"
            " firewall-cmd --permanent --add-port=8472/udp; firewall-cmd --reload",
        ],
        [f"{len(CHECKS)} checks: 0 problems, 1 hint"],
    ]


def test_programs_get_the_same() -> None:
    facts = of_host("net/ipv4/ip_forward", 0)
    answer = json.loads(json.dumps(DoctorReport(examine(facts), facts.unknown).plain()))
    (found,) = [each for each in answer["findings"] if each["check"] == "forwarding"]
    assert found["severity"] == "problem"
    assert found["fix"] == [["sysctl", "-w", "net.ipv4.ip_forward=1"]]
    assert found["advice"] is None


# ---- remedies -----------------------------------------------------------------------------------


def remedies(name: str, facts: Facts) -> list[Remedy]:
    return [finding.remedy for check, finding in examine(facts) if check.name == name]


def test_a_property_that_is_set_without_loss_has_a_fix() -> None:
    (remedy,) = remedies("devices", drift(mtu=1400, learning=True))
    assert remedy == (
        ("ip", "link", "set", "flannel.1", "type", "vxlan", "id", "1", "nolearning"),
        ("ip", "link", "set", "flannel.1", "mtu", "1450"),
    )


@pytest.mark.parametrize("change", [{"up": False}, {"port": 8473}, {"mtu": 1400, "mac": "02:00:00:00:00:99"}])
def test_a_device_that_has_lost_what_was_on_it_is_left_to_the_daemon(change: dict[str, Any]) -> None:
    (remedy,) = remedies("devices", drift(**change))
    assert isinstance(remedy, str)


#: Words of a command or advice that ends what another host may still use.
DELETES = re.compile(
    r"\b(delet|remov)\w* (\w+ ){0,2}(leases?|devices?|bridges?|nodes?)\b|\blink del|\bdelete (it|the key)\b",
    re.IGNORECASE,
)


def test_no_advice_and_no_error_deletes_a_lease_a_device_or_a_node() -> None:
    """A silent node may still run. The store ends what is gone. Who gives the command to delete is asked."""
    root = Path(flanneld.__file__).parent
    texts = {path.name: path.read_text() for path in root.rglob("*.py") if path.name != "store_commands.py"}
    found = [
        (name, node.value)
        for name, text in texts.items()
        for statement in ast.walk(ast.parse(text))
        if not isinstance(statement, ast.Expr)  # a docstring
        for node in ast.iter_child_nodes(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DELETES.search(node.value)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "delete its lease",
        "ip link delete cni0",
        "Remove the leases of",
        "delete the wrong node",
        "delete the key",
    ],
)
def test_advice_that_deletes_is_recognised(text: str) -> None:
    assert DELETES.search(text)


@pytest.mark.parametrize(("backend", "words"), [("wireguard", "remove the key file"), ("vxlan", NEW_MAC)])
def test_a_cloned_node_gets_the_advice_that_fits_its_backend(backend: str, words: str) -> None:
    (remedy,) = remedies("contested", peer(conflicts=["10.5.3.0/24"], state="contested", backend=backend))
    assert isinstance(remedy, str)
    assert words in remedy


@pytest.mark.parametrize(
    ("backend", "words"),
    [("vxlan", "set Backend.MTU"), ("ipip", "restart flanneld: it takes the MTU of flannel.1 from there")],
)
def test_a_device_too_large_gets_the_advice_that_fits_its_backend(backend: str, words: str) -> None:
    document = deepcopy(DOCUMENT)
    document["network"]["backend"] = backend
    (remedy,) = remedies("device", replace(CASES["device"][0], status=status_of(document)))
    assert isinstance(remedy, str)
    assert words in remedy


@pytest.mark.parametrize("backend", ["ipip", "udp", "ipsec"])
def test_ipv6_device_of_a_backend_without_ipv6_is_not_judged_by_its_size(backend: str) -> None:
    document = deepcopy(DOCUMENT)
    document["network"]["backend"] = backend
    document["devices"] = ["flannel-v6.1"]
    facts = replace(WELL, status=status_of(document), links=(link("eth0", 1450), link("flannel-v6.1", 1500)))
    assert remedies("device", facts) == []


def test_an_uplink_that_loses_its_ipv6_addresses_when_it_is_down_takes_more_than_a_command() -> None:
    down = with_links(link("eth0", up=False), flannel())
    assert remedies("uplink", down) == [(("ip", "link", "set", "dev", "eth0", "up"),)]
    document = deepcopy(DOCUMENT)
    document["uplink"]["addresses"].append("2001:db8::1")
    (remedy,) = remedies("uplink", replace(down, status=status_of(document)))
    assert isinstance(remedy, str)


def test_no_remedy_removes_an_interface_that_is_inside_the_network() -> None:
    facts = with_address("eth0", link("eth0"), flannel())
    (found,) = [finding for check, finding in examine(facts) if check.name == "bridge subnet"]
    assert (found.severity, found.about) == (Severity.HINT, "eth0")
    assert isinstance(found.remedy, str)
    assert "delete" not in found.remedy


@pytest.mark.parametrize(
    ("left", "problem"),
    [(-1.0, "the lease has expired"), (0.0, "the lease has expired"), (1.0, "the lease ends in 1 s")],
)
def test_lease_has_expired_once_no_second_is_left(left: float, problem: str) -> None:
    document = deepcopy(DOCUMENT)
    document["lease"]["expires"] = NOW + left
    (found,) = [
        each for check, each in examine(replace(WELL, status=status_of(document))) if check.name == "lease"
    ]
    assert found.problem == problem


@pytest.mark.parametrize("name", ["docker0", "cni0"])
def test_a_bridge_without_ports_is_no_finding(name: str) -> None:
    facts = with_address(name, link("eth0"), flannel(), bridge(name, 9000))
    assert not {"bridge subnet", "containers"} & {check.name for check, _ in examine(facts)}


def test_an_address_of_our_subnet_that_leads_to_no_container_limits_no_mtu() -> None:
    addresses = (*WELL.addresses, ("lo", ip_address("10.5.1.9")))
    assert examine(replace(WELL, links=(*WELL.links, link("lo", 65536)), addresses=addresses)) == []


@pytest.mark.parametrize(
    ("address", "subnet", "commands"),
    [
        ("10.5.1.2", "10.5.1.0/24", ["add 10.5.1.2/24 dev eth0", "del 10.5.1.2/16 dev eth0"]),
        ("fc00:5::2", "fc00:5::/64", ["del fc00:5::2/16 dev eth0", "add fc00:5::2/64 dev eth0 nodad"]),
    ],
)
def test_container_never_ends_without_its_address_when_its_prefix_is_corrected(
    address: str, subnet: str, commands: list[str]
) -> None:
    """An IPv6 address of any length is in the way of the same one with another length."""
    node = told(lambda document: document["lease"].update(subnets=[subnet]))
    wide = replace(CONTAINER, address=ip_address(address), length=16)
    (found,) = remedies("container routes", replace(node, containers=(wide,)))
    inside = "nsenter --net=/run/netns/a ip address "
    assert [" ".join(map(str, each)) for each in found] == [inside + each for each in commands]


@pytest.mark.parametrize("name", ["filters", "probes", "port", "forwarding", "reverse path", "uplink"])
def test_whatever_loses_packets_is_a_problem(name: str) -> None:
    for facts in CASES[name]:
        found = [finding.severity for check, finding in examine(facts) if check.name == name]
        assert set(found) == {Severity.PROBLEM}


def test_node_that_answers_for_its_own_address_is_no_duplicate() -> None:
    own = Claim(ip_address("192.0.2.1"), frozenset({MAC}))
    peers = Claim(ip_address("192.0.2.2"), frozenset({OTHER_MAC}))
    assert not remedies("duplicate addresses", replace(WELL, claims=(own, peers)))


def test_masqueraded_packets_are_a_hint_and_hide_no_silent_tunnel() -> None:
    masked = Drop("chain c", "packets", "masquerade", ACCEPT, families=frozenset(), verb=MASQUERADES)
    found = examine(replace(CASES["tunnel"][0], filtered=(masked,)))
    assert [(check.name, finding.severity) for check, finding in found] == [
        ("tunnel", Severity.PROBLEM),
        ("filters", Severity.HINT),
    ]


@pytest.mark.parametrize("heard", [False, True])
def test_lost_packets_of_containers_are_a_hint_where_the_network_passes_their_senders(heard: bool) -> None:
    masked = Drop("chain c", "packets", "masquerade", ACCEPT, families=frozenset(), verb=MASQUERADES)
    away = (("10.5.2.0/24", ip_address("10.5.1.1"), heard),)
    found = examine(replace(WELL, turned_away=away, filtered=(masked,)))
    severity = Severity.HINT if heard else Severity.PROBLEM
    assert ("tunnel", severity) in [(check.name, finding.severity) for check, finding in found]


def test_a_bridge_that_the_firewall_does_not_see_is_a_problem_where_services_are_used() -> None:
    setting = {"net/bridge/bridge-nf-call-iptables": 0}
    for services, severity in ((True, Severity.PROBLEM), (False, Severity.HINT)):
        known = host_settings.HostSettings((4,), "eth0", setting, services=services)
        facts = replace(WELL, host=host_settings.findings(known))
        assert [finding.severity for _, finding in examine(facts)] == [severity]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (WELL, "Healthy"),
        (replace(WELL, firewalls=("ufw",)), "Healthy, with 1 hint"),
        (replace(of_host("net/ipv4/ip_forward", 0), host=()), "Healthy"),
        (
            replace(CASES["filters"][0], firewalls=("ufw",)),
            "Broken: this node drops UDP 8472: chain INPUT of table ip filter",
        ),
        (
            replace(CASES["filters"][0], entries=(Comparison(ROUTE, "missing"),)),
            "Broken: this node drops UDP 8472: chain INPUT of table ip filter, and 1 more problem",
        ),
    ],
)
def test_the_verdict_is_one_line_and_names_a_cause_before_its_effects(facts: Facts, said: str) -> None:
    found = examine(facts)
    assert DoctorReport(found).verdict == said
    assert DoctorReport(found).plain()["verdict"] == said
    assert list(table_lines(DoctorReport(found, facts.unknown).tables()[0])) == [said]


def test_lease_of_a_host_that_has_left_comes_with_the_command_that_asks_and_ends_it() -> None:
    assert remedies("tunnel", CASES["tunnel"][2]) == [
        "run flannelctl doctor there; if its host has left: flannelctl lease delete 10.5.2.0/24;"
        " a lease that no node renews ends by itself"
    ]


def test_a_silent_tunnel_is_no_finding_of_its_own_if_its_cause_is_known() -> None:
    facts = replace(CASES["filters"][0], paths=(path("underlay", 1500), path("tunnel", None)))
    assert [check.name for check, _ in examine(facts)] == ["filters"]


@pytest.mark.parametrize(
    "facts",
    [
        replace(CASES["tunnel"][2], passing=frozenset({("10.5.2.0/24", 4)})),
        # Nodes of a cloud need not answer, and its table leads to them.
        replace(WELL, paths=(path("underlay", None),)),
    ],
)
def test_silence_is_no_finding_where_packets_pass_or_no_answer_is_due(facts: Facts) -> None:
    assert examine(facts) == []


def test_node_that_moved_is_one_finding_and_no_clone() -> None:
    ((check, finding),) = examine(FORMER)
    assert check.name == "former subnet"
    assert finding.evidence.endswith(
        "former lease of this node, which nothing here proves, it ends by itself"
    )


def test_leases_that_share_a_mac_are_named_once() -> None:
    document = deepcopy(DOCUMENT)
    (first,) = document["peers"]
    clone = {**first, "subnets": ["10.5.3.0/24"], "public_ips": ["192.0.2.3"], "conflicts": ["10.5.2.0/24"]}
    document["peers"] = [{**first, "conflicts": ["10.5.3.0/24"]}, clone]
    ((_, finding),) = examine(replace(WELL, status=status_of(document)))
    assert finding.problem == "10.5.2.0/24 (192.0.2.2) shares the MAC of 10.5.3.0/24 (192.0.2.3)"


def test_etcd_that_has_another_clock_tells_its_own() -> None:
    date = b"Date: Tue, 24 Nov 2015 00:00:00 GMT"
    with server(answering(b"HTTP/1.1 503 No\r\n" + date + b"\r\nContent-Length: 2\r\n\r\nno")) as url:
        problem = f"etcd does not answer ({url}: certificate verify failed: certificate is not yet valid)"
        word = ask_etcd(told(lambda d: d["store"].update(problem=problem)).status)
        assert word
        assert (word.url, word.is_healthy, word.said) == (url, False, "no")
        assert word.ahead > 86400
    assert ask_etcd(told(lambda d: d["store"].update(problem="etcd does not answer")).status) is None


def test_full_queue_is_no_finding_while_peers_answer() -> None:
    assert examine(replace(WELL, queued={("eth0", "fq_codel"): 3}, paths=(path("tunnel", 1450),))) == []


@pytest.mark.parametrize(
    ("kind", "lost", "carried", "severity"),
    [
        ("tbf", 1, 1450, Severity.HINT),
        ("tbf", 2, 1450, Severity.PROBLEM),
        ("fq_codel", 0, None, Severity.HINT),
        ("tbf", 0, None, Severity.PROBLEM),
    ],
)
def test_queue_is_the_cause_only_of_more_than_one_lost_echo_and_if_someone_chose_it(
    kind: str, lost: int, carried: int | None, severity: Severity
) -> None:
    lossy = replace(path("tunnel", carried), lost=lost)
    found = examine(replace(WELL, queued={("eth0", kind): 1}, paths=(lossy,)))
    assert [each.severity for check, each in found if check.name == "traffic control"] == [severity]


HOSTILE = "$(reboot) `reboot`; reboot"


def hostile(facts: Facts) -> Facts:
    """The same after others wrote into the store whatever they like."""
    document = msgspec.to_builtins(facts.status)
    document["store"]["name"] = document["network"]["backend"] = HOSTILE
    document["refused"] = [{"object": HOSTILE, "reason": HOSTILE}]
    for each in document["peers"]:
        each.update(reason=HOSTILE, backend=HOSTILE, state="refused", conflicts=[HOSTILE])
    return replace(facts, status=status_of(document))


def fixes(facts: Facts) -> list[tuple[Command, ...]]:
    return [finding.remedy for _, finding in examine(facts) if isinstance(finding.remedy, tuple)]


@pytest.mark.parametrize(
    "facts",
    [pytest.param(facts, id=name) for name, cases in CASES.items() for facts in cases if fixes(facts)],
)
def test_fixes_are_the_same_whatever_is_in_the_store(facts: Facts) -> None:
    assert HOSTILE in str(DoctorReport(examine(hostile(facts)), ()).tables())
    assert fixes(hostile(facts)) == fixes(facts)


def test_a_fix_is_shown_with_a_command_on_each_line_quoted_for_a_shell() -> None:
    commands = (("nft", "flush", "chain", "a b"), ("true",))
    facts = replace(WELL, left_rules=(LeftRules(("a rule",), commands),))
    (_, table, _) = DoctorReport(examine(facts), facts.unknown).tables()
    assert list(table_lines(table))[-2:] == ["fix       nft flush chain 'a b'", "fix       true"]


def test_open_tunnel_on_a_public_address_is_a_hint() -> None:
    ((_, found),) = examine(OUTSIDE)
    assert found.problem == "any host that reaches 8.8.4.4 by UDP port 8472 can send packets to containers"
    assert (found.severity, found.about) == (Severity.HINT, "eth0")
    assert examine(replace(OUTSIDE, is_guarded=True)) == []


def session(**changes: Any) -> Any:
    """The status of a node with one session of WireGuard."""
    told_of_it = {**SILENT, "state": "established", "rx_bytes": 5, "tx_bytes": 5, **changes}
    return told(
        lambda d: (d["network"].update(backend="wireguard"), d["peers"][0].update(sessions=[told_of_it]))
    ).status


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tx_bytes": 9}, ["10.5.2.0/24"]),
        ({"tx_bytes": 9, "rx_bytes": 6}, []),
        ({}, []),
        ({"tx_bytes": 9, "state": "silent"}, []),
    ],
)
def test_received_bytes_that_stand_while_sent_ones_grow_are_seen(
    changes: dict[str, Any], found: list[str]
) -> None:
    assert list(standing(session(), session(**changes))) == found
    assert list(standing(WELL.status, session(**changes))) == []


def test_peer_that_answers_is_not_stuck_however_little_it_sends() -> None:
    """A keepalive is not answered, and data only after a while."""
    answering = replace(STUCK, paths=(replace(STUCK.paths[0], carried=1450),))
    passing = replace(STUCK, passing=frozenset({("10.5.2.0/24", 4)}))
    for facts in (answering, replace(STUCK, paths=()), passing):
        assert not remedies("receiving", facts)
    both = replace(STUCK, standing=STUCK.standing * 2)
    (found,) = [finding for check, finding in examine(both) if check.name == "receiving"]
    assert found.problem.startswith("nothing comes in from 1 peer")


@pytest.mark.parametrize(("hops", "is_told"), [(0, False), (7, True), (8, False)])
def test_few_hops_of_a_container_are_told(hops: int, is_told: bool) -> None:
    found = [finding.problem for _, finding in examine(container(hops=hops))]
    assert found == (["1 container whose packets may take 7 hops only"] if is_told else [])


def test_bridge_that_is_down_is_the_only_cause_named() -> None:
    facts = replace(
        CASES["bridge down"][0],
        lost=(Lost(TO_CONTAINERS, "route", "", "the kernel drops it"),),
        containers=(replace(CONTAINER, reached_by=""),),
    )
    assert [check.name for check, _ in examine(facts)] == ["bridge down"]


def test_port_of_a_bridge_that_is_down_is_no_finding_of_its_own() -> None:
    facts = replace(
        container(port="veth1", off=("state",)),
        links=(link("eth0"), flannel(), replace(bridge("cni0", 1450), up=False), link("veth1")),
    )
    assert [check.name for check, _ in examine(facts)] == ["bridge down"]


def test_what_makes_vxlan_slow_is_a_hint_with_its_command_and_of_no_other_backend() -> None:
    slow = replace(WELL, uplink_lacks_segmentation=True, queues=(1, 4))
    assert {finding.severity for _, finding in examine(slow)} == {Severity.HINT}
    assert remedies("speed", slow) == [
        "ethtool -K eth0 tx-udp_tnl-segmentation on",
        "ethtool -L eth0 combined 4",
    ]
    assert str(remedies("speed", told(lambda d: d["uplink"].update(mtu=9000)))[0]).startswith(
        "if all uplinks have that MTU: set Backend.MTU to 8930; then"
    )
    lowered = told(lambda d: (d["uplink"].update(mtu=9000), d.update(mtu_lowered_from=8950)))
    assert remedies("speed", lowered) == []
    assert remedies("speed", told(lambda d: d["uplink"].update(mtu=65536))) == []
    host_gw = told(lambda d: (d["network"].update(backend="host-gw"), d["uplink"].update(mtu=9000)))
    assert remedies("speed", replace(host_gw, queues=(1, 4))) == []


def test_rule_that_may_drop_packets_is_named_before_the_mtu() -> None:
    doubt = "udp dport 8472 limit rate over 1/second drop"
    drop = Drop("chain c of table inet x", "UDP 8472", doubt, ACCEPT, doubt=doubt)
    facts = replace(WELL, filtered=(drop,), paths=(PathToPeer("tunnel", ip_address("10.5.2.0"), 1450, 576),))
    (advice,) = remedies("path", facts)
    assert str(advice).startswith(
        f"see first whether this rule drops them: {doubt}; else flannelctl netcheck"
    )
    assert "filters" in [check.name for check, _ in examine(facts)]
    assert examine(replace(WELL, filtered=(drop,))) == []


@pytest.mark.parametrize(
    ("node", "hop", "advice", "is_of_arp"),
    [
        (
            "192.0.2.2",
            "192.0.2.77",
            "ip route get 192.0.2.2 shows the route: correct it, or bring the router up",
            False,
        ),
        ("192.0.2.2", "192.0.2.2", "run flannelctl doctor there", True),
        ("fd00:18::2", "fd00:18::2", "run flannelctl doctor there", False),
    ],
)
def test_silent_peer_whose_next_hop_has_no_mac_is_told_with_that_hop(
    node: str, hop: str, advice: str, is_of_arp: bool
) -> None:
    paths = CASES["tunnel"][2].paths
    facts = replace(peer(public_ips=[node]), paths=paths, unresolved={node: hop})
    (found,) = [finding for check, finding in examine(facts) if check.name == "tunnel"]
    assert found.evidence == f"10.5.2.0/24 ({node}); no answer to ARP or NDP from {hop}"
    assert found.cure.startswith(advice)
    assert ("doctor" in found.cure) is ("doctor" in advice)
    assert found.cure.endswith("; see whether a rule here drops ARP: nft list ruleset arp") is is_of_arp


def test_silent_peers_behind_a_router_that_is_down_hide_no_other_silent_peer() -> None:
    other = {"subnets": ["10.5.3.0/24"], "public_ips": ["192.0.2.3"]}
    facts = replace(
        told(lambda d: d["peers"].append({**d["peers"][0], **other})),
        paths=(
            path("tunnel", None),
            replace(path("tunnel", None), target=ip_address("10.5.3.0"), peer="10.5.3.0/24"),
        ),
        unresolved={"192.0.2.2": "192.0.2.77"},
    )
    (found,) = remedies("tunnel", facts)
    assert str(found).startswith("ip route get 192.0.2.2 shows the route")
    assert "; run flannelctl doctor on the others; " in found


@pytest.mark.parametrize(("carried", "found"), [(1500, []), (None, ["filters"])])
def test_dropped_neighbour_discovery_counts_only_while_a_peer_is_silent(
    carried: int | None, found: list[str]
) -> None:
    drop = Drop("chain INPUT of table ip6 filter", DISCOVERY, "-p ipv6-icmp -j DROP", ())
    paths = (PathToPeer("underlay", ip_address("fd00:18::2"), 1500, carried),)
    assert [check.name for check, _ in examine(replace(WELL, filtered=(drop,), paths=paths))] == found


def test_veth_pair_with_two_mtus_is_found_from_either_end_and_one_with_a_small_mtu_is_not() -> None:
    def problems(inside: int, outside: int, bridge_mtu: int) -> list[str]:
        links = (*WELL.links[:1], flannel(), bridge("cni0", bridge_mtu))
        facts = replace(container(mtu=inside, port="veth1", port_mtu=outside), links=links)
        return [finding.problem for _, finding in examine(facts)]

    uneven = ["1 container whose veth pair has a smaller MTU at one end"]
    assert problems(1450, 1400, 1400) == problems(1400, 1450, 1450) == problems(1400, 1400, 1450) == uneven
    assert problems(1400, 1400, 1400) == problems(1450, 1500, 1450) == []


def test_silence_over_one_family_is_not_put_on_a_firewall_alone() -> None:
    """The peer may have lost its address, or know a wrong MAC address of this node."""
    ways = (path("underlay", 1500), path("underlay", None, "fd00::2"), path("tunnel", None, "fc00:5::"))
    (found,) = [found for check, found in examine(replace(WELL, paths=ways)) if check.name == "tunnel"]
    assert "a wrong address, route or neighbour at one end" in found.why


@pytest.mark.parametrize(("is_off", "number"), [(1, 0), (0, 1)])
def test_lost_way_to_a_node_is_no_finding_of_its_own_while_ipv6_is_off(is_off: int, number: int) -> None:
    way = Lost(TO_NODES, "no route", "fd00::2", "unreachable", families=frozenset({6}))
    seen = host_settings.HostSettings((6,), "eth0", {"net/ipv6/conf/eth0/disable_ipv6": is_off})
    found = examine(replace(WELL, lost=(way,), host=host_settings.findings(seen)))
    assert [check.name for check, _ in found].count("lookups") == number


@pytest.mark.parametrize("devices", [["flannel-v6.1", "flannel.1"], ["flannel.1", "flannel-v6.1"]])
def test_checksums_are_blamed_on_the_device_of_the_silent_family(devices: list[str]) -> None:
    document = deepcopy(DOCUMENT) | {"devices": devices}
    document["peers"][0]["backend"] = "vxlan"
    silent = (path("underlay", 1500), path("tunnel", None))
    (remedy,) = remedies("tunnel", replace(WELL, status=status_of(document), paths=silent))
    assert "ethtool -K flannel.1 tx-checksum-ip-generic off" in str(remedy)


@pytest.mark.parametrize(("peers_ip", "number"), [("fd00::2", 1), ("fe80::2", 0)])
def test_link_local_public_ip_is_a_problem_only_beside_others(peers_ip: str, number: int) -> None:
    def announce(document: dict[str, Any]) -> None:
        document["uplink"]["public_ips"].append("fe80::1")
        document["peers"][0]["public_ips"].append(peers_ip)

    assert [check.name for check, _ in examine(told(announce))].count("public ip") == number
