"""Checks for objects left by an earlier run or by another network plug-in."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, Fix, Severity, check
from flanneld.network.rtnetlink.links import is_flannels

#: Plug-ins that delegate to the one with the next config.
_GO_BETWEENS = frozenset({"multus", "multus-shim"})
_FEW = 2


@check("E", "left rules", "flannel's rules are in one place only")
def left_rules(facts: Facts) -> Iterator[Finding]:
    for each in facts.left_rules:
        more = f"; and {len(each.rules) - _FEW} more" if len(each.rules) > _FEW else ""
        yield Finding(
            "rules of flannel are in a place that the daemon does not use",
            "; ".join(each.rules[:_FEW]) + more,
            "packets still pass them; with another subnet they masquerade wrongly",
            Fix(each.commands),
        )


@check("B", "left devices", "no device of an earlier configuration is left")
def left_devices(facts: Facts) -> Iterator[Finding]:
    """Check for flannel devices of other configurations.

    Another daemon's have addresses in another network.
    """
    if facts.origin != "daemon":
        return
    networks = facts.networks
    for link in facts.links:
        held = [address for name, address in facts.addresses if name == link.name]
        inside = [str(address) for address in held if any(address in network for network in networks)]
        if is_flannels(link) and link.name not in facts.devices and inside:
            yield Finding(
                f"{link.name} is left from an earlier configuration",
                f"it has {', '.join(inside)} in our network, and is no device of this daemon",
                "it takes in packets that were sent to the former segment, and its routes may come first",
                Advice(
                    f"if no other flanneld of this host uses it: ip address flush dev {link.name};"
                    f" ip link set {link.name} down"
                ),
            )


@check("F", "cni", "the container runtime uses flannel, and flannel runs")
def cni(facts: Facts) -> Iterator[Finding]:
    confs = [conf for conf in facts.cni if not _GO_BETWEENS & set(conf.types)]
    ours = [conf for conf in confs if "flannel" in conf.types]
    if not ours:
        return
    first = confs[0]
    path = shlex.quote(first.path)
    if first != ours[0]:
        yield Finding(
            "the CNI config of another network plug-in comes before flannel's",
            f"{first.path} names {', '.join(first.types)}, and comes before {ours[0].path}",
            "container runtimes take the first: new containers are not on flannel's network",
            Advice(f"if that plug-in is no longer used: rm {path}, and restart the container runtime"),
            about=first.path,
            severity=Severity.HINT,
        )
    elif facts.origin != "daemon" and (first != confs[-1] or not facts.has_subnet_file):
        yield Finding(
            "the CNI config of flannel is there, and flannel is not",
            f"{first.path} comes first, and no daemon answers",
            "new containers fail, or get unreachable addresses",
            Advice(f"start the daemon; if flannel is no longer used here: rm {path}"),
        )
