"""Checks for objects left by an earlier run or by another network plug-in."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.ctl.findings import Advice, Finding, Fix, Severity, check, few
from flanneld.diagnostics.status import Status, known
from flanneld.errors import Retryable
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.edits import RuleOwnership
from flanneld.network.firewall.placing import PLACES, commands_of, described, stale_rules
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.runtime.shell import Command

if TYPE_CHECKING:
    from flanneld.ctl.facts import Facts

#: Directory and suffixes of CNI configs; runtimes use the first by name (libcni, ConfFiles).
CNI_DIRECTORY = "/etc/cni/net.d"
_CNI_SUFFIXES = (".conf", ".conflist", ".json")


class LeftRules(Struct, frozen=True, gc=False):
    """Rules for our network in a place that the daemon does not use, and the commands that remove them."""

    rules: tuple[str, ...]
    commands: tuple[Command, ...]


class CniFile(Struct, frozen=True, gc=False):
    """A CNI config file, and the types of its plug-ins."""

    path: str
    types: tuple[str, ...]


def read_left_rules(told: Status) -> Iterator[LeftRules]:
    """Yield stale rules, as far as they are readable; none without a daemon that names its own place."""
    firewall = known(told.firewall)
    others = [place for place in PLACES if firewall and place != firewall.place]
    for network, _ in told.ranges:
        for place in others:
            try:
                there, edits = stale_rules(
                    place, network.version, RuleOwnership((network,)), IptablesRunner(threading.Event())
                )
            except Retryable:
                continue
            if there and edits:
                lines = tuple(f"{there.name}: {line}" for line in described(edits))
                yield LeftRules(lines, tuple(commands_of(place, network.version, edits)))


def cni_confs(directory: Path) -> Iterator[CniFile]:
    """Yield the CNI configs in the order of container runtimes. Invalid files are skipped."""
    for path in sorted(directory.glob("*")):
        if path.suffix in _CNI_SUFFIXES and (types := _types(path)):
            yield CniFile(str(path), types)


def _types(path: Path) -> tuple[str, ...]:
    try:
        conf = json.loads(path.read_bytes())
        return tuple(str(each["type"]) for each in conf.get("plugins", [conf]))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ()


#: Plug-ins that delegate to the one with the next config.
_GO_BETWEENS = frozenset({"multus", "multus-shim"})


@check("E", "left rules", "flannel's rules are in one place only")
def left_rules(facts: Facts) -> Iterator[Finding]:
    for each in facts.left_rules:
        yield Finding(
            "rules of flannel are in a place that the daemon does not use",
            few(each.rules, "; "),
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
