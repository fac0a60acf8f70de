"""Checks of what several nodes must have in common, and of the way between them."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Any

from flanneld.compat.glog import counted
from flanneld.ctl.evidence.flows import carriers
from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, check, few
from flanneld.ctl.path_mtu import Path
from flanneld.errors import LEASES_END
from flanneld.state.resources import Route

#: Peers with a finding of their own, at most.
_FEW = 3


@check("J", "off link", "with host-gw all nodes are on one network")
def off_link(facts: Facts) -> Iterator[Finding]:
    name = facts.section("uplink").get("name", "")
    missing = [each.value for each in facts.entries if each.state == "missing"]
    lacking = set(map(str, missing))
    # The kernel's answer to a gateway that is not on the link.
    refused = {
        each["object"] for each in facts.document.get("refused", ()) if each.get("errno") == errno.ENETUNREACH
    }
    routes = [each for each in missing if str(each) in refused]
    away = dict.fromkeys(
        str(each.gateway)
        for each in routes
        if isinstance(each, Route) and each.device == name and each.gateway
    )
    if away:
        yield Finding(
            f"{few(list(away))} is not on the network of {name}",
            f"the kernel takes no route by a gateway behind another one: {min(lacking & refused)}",
            "host-gw needs all nodes on one network: packets for this peer go nowhere",
            Advice(
                "put the nodes on one network, or set Backend.Type to vxlan, with DirectRouting if you like"
            ),
            about=name,
        )


@check("K", "tunnel", "peers answer through the tunnel")
def tunnel(facts: Facts) -> Iterator[Finding]:
    if facts.filtered or facts.lost:
        return  # a cause on this host is known, and the silence is its effect
    answered = {each.peer for each in facts.paths if each.name == "underlay" and each.carried is not None}
    silent = list(_silent(facts))
    peers = {peer["subnets"][0]: peer for peer in (facts.peers if silent else ())}
    # No handshake is a finding of its own.
    keyless = {
        name for name, peer in peers.items() if any(x["state"] == "silent" for x in peer.get("sessions", ()))
    }
    there = [each for each in silent if each.name == "tunnel" and each.peer in answered - keyless]
    for each in there[:_FEW]:
        used = dict.fromkeys(each.name for each in carriers(facts.document, peers.get(each.peer, {})))
        public = next((p.target for p in facts.paths if p.name == "underlay" and p.peer == each.peer), None)
        refused = public is not None and str(public) in facts.refusing
        yield Finding(
            f"no packet comes back through the tunnel to {public}",
            f"{public} answers ICMP echoes, {each.target} behind the tunnel does not"
            + ("; the node refuses our UDP port" if refused else ""),
            "packets of containers to that node are lost, or the answers",
            Advice(
                _where_refused(peers.get(each.peer, {}))
                if refused
                else "run flannelctl doctor there, too; let the network between pass"
                f" {', '.join(used) or 'the packets of the tunnel'}"
            ),
            about=each.peer,
        )
    gone = [each for each in silent if each.name == "underlay" or each.peer not in answered]
    if gone:
        ways = ", neither from the node nor through the tunnel" if gone[0].name == "tunnel" else ""
        yield Finding(
            f"no answer from {counted(len(gone), 'peer')}{ways}",
            few([str(each.target) for each in gone]),
            "neither ICMP nor TCP comes back: the nodes are off, or a firewall drops all packets",
            Advice(f"run flannelctl doctor there; {LEASES_END}"),
        )


def _where_refused(peer: Mapping[str, Any]) -> str:
    if peer.get("backend") == "ipsec":
        return "see that flanneld and charon run there, and no firewall rejects UDP 500 and UDP 4500"
    return "see that flannel runs there with the same Backend.Port, and no firewall rejects it"


def _silent(facts: Facts) -> Iterator[Path]:
    """Yield the paths on which a peer's silence is a loss: through a tunnel, and to gateways of our routes.

    A cloud's table leads to peers that need not answer. One that passes packets on or refuses TCP loses none.
    """
    silent = [each for each in facts.paths if each.carried is None]
    tunnels = {(each.peer, each.target.version) for each in facts.paths if each.name == "tunnel"}
    routes = (entry.value for entry in (facts.entries if silent else ()))
    gateways = {route.gateway for route in routes if isinstance(route, Route)}
    for each in silent:
        end = (each.peer, each.target.version)
        if end not in facts.passing and (
            each.name == "tunnel" or (end not in tunnels and each.target in gateways)
        ):
            yield each


@check("D", "segment", "all nodes have the same VNI")
def segment(facts: Facts) -> Iterator[Finding]:
    ours = facts.vnis
    for peer in facts.peers:
        theirs = set(peer.get("vnis", ()))
        if ours and theirs and not ours & theirs:
            subnets = ",".join(peer["subnets"])
            yield Finding(
                f"the node of {subnets} has VNI {_listed(theirs)}, this one {_listed(ours)}",
                f"its lease says so, public IP {', '.join(peer['public_ips'])}",
                "either node drops what the other one sends",
                Advice("restart flanneld on the node whose VNI is not Backend.VNI of the network config"),
                about=subnets,
            )


@check("I", "other api", "all nodes use the same API of etcd")
def other_api(facts: Facts) -> Iterator[Finding]:
    found = facts.other_api
    if found:
        yield Finding(
            f"{counted(len(found.leases), 'node')} in etcd's {found.other} API, this one in {found.used}",
            few(found.leases),
            "these nodes and this one know nothing of each other",
            Advice(
                "start flanneld on all nodes with the same -etcd-api; while they move, with -etcd-api=both"
            ),
        )


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
