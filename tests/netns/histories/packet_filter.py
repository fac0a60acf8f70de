"""A node's packet filter: what it should hold, what others do to it, and what it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.lab import Node
from tests.lab.namespace import run
from tests.netns.histories.setting import NETWORKS, Setting, nets
from tests.unit.network.firewall.test_rules import GOLDEN

#: The subnet that the golden rules are about.
_GOLDEN_SUBNET = {4: "10.5.72.0/24", 6: "fc00:5:0:72::/64"}
_TABLE = {4: "ip flannel-ipv4", 6: "ip6 flannel-ipv6"}
_PREFIX = {4: "ip", 6: "ip6"}


class Damage(NamedTuple):
    """A command, and how the lines of those foreign rules begin that go with it."""

    command: str
    takes: tuple[str, ...] = ()


IPTABLES_DAMAGE = (
    Damage("{iptables} -F", ("4 filter",)),
    Damage("{iptables} -t nat -F", ("4 nat",)),
    Damage("{iptables} -F FLANNEL-FWD", ("4 filter -A FLANNEL-FWD",)),
    Damage("{iptables} -F FORWARD", ("4 filter -A FORWARD",)),
    Damage("{iptables} -t nat -F FLANNEL-POSTRTG", ("4 nat -A FLANNEL-POSTRTG",)),
    Damage("{iptables} -D FLANNEL-FWD -s {network} -m comment --comment 'flanneld forward' -j ACCEPT"),
    Damage("{iptables} -t nat -D POSTROUTING -m comment --comment 'flanneld masq' -j FLANNEL-POSTRTG"),
    Damage("{iptables} -t nat -I POSTROUTING -m comment --comment 'flanneld masq' -j FLANNEL-POSTRTG"),
)
#: The first one of each takes everything.
NFT_DAMAGE = (
    Damage("nft flush ruleset", ("",)),
    Damage("nft delete table ip nat", ("4 nat",)),
    *IPTABLES_DAMAGE,
)
LEGACY_DAMAGE = (
    Damage("printf '*filter\\nCOMMIT\\n*nat\\nCOMMIT\\n' | iptables-legacy-restore -w", ("",)),
    Damage("printf '*nat\\nCOMMIT\\n' | iptables-legacy-restore -w", ("4 nat",)),
    *IPTABLES_DAMAGE,
)
NATIVE_DAMAGE = (
    Damage("nft flush ruleset", ("",)),
    Damage("nft delete table ip flannel-ipv4", ("4 flannel",)),
    Damage("nft flush chain ip flannel-ipv4 postrtg", ("4 flannel -A postrtg",)),
    Damage("nft flush table ip flannel-ipv4", ("4 flannel",)),
)
FOREIGN = (
    "{iptables} -A FORWARD -s 192.0.2.0/24 -j DROP",
    "{iptables} -A FORWARD -s {network} -j ACCEPT",
    "{iptables} -I FORWARD -d {network} -m comment --comment 'flanneld forward' -j ACCEPT",
    "{iptables} -A INPUT -p tcp --dport 22 -j ACCEPT",
    "{iptables} -t nat -A POSTROUTING -s 203.0.113.0/24 -j MASQUERADE",
    "{iptables} -t nat -I POSTROUTING -s {network} -o lo -j RETURN",
    "{iptables} -A FLANNEL-FWD -s 10.5.3.0/24 -p tcp -j DROP",
    "{iptables} -t nat -A FLANNEL-POSTRTG -s 10.7.0.0/16 -m comment --comment 'flanneld masq' -j RETURN",
)
NATIVE_FOREIGN = (
    "{iptables} -A FORWARD -s 192.0.2.0/24 -j DROP",
    "nft add rule ip flannel-ipv4 forward ip saddr 192.0.2.1 drop comment mine",
    "nft insert rule ip flannel-ipv4 postrtg ip saddr 192.0.2.1 return",
)


def damage(setting: Setting) -> tuple[Damage, ...]:
    if setting.native:
        return NATIVE_DAMAGE
    return LEGACY_DAMAGE if setting.flavour == "legacy" else NFT_DAMAGE


def foreign_rules(setting: Setting) -> tuple[str, ...]:
    return NATIVE_FOREIGN if setting.native else FOREIGN


def script(setting: Setting, command: str) -> tuple[str, ...]:
    """One of these commands, as it is run on the node of a setting."""
    # Only the legacy tables have a lock, which the daemon may have.
    iptables = "iptables-legacy -w" if setting.flavour == "legacy" else "iptables-nft"
    return ("sh", "-ec", command.format(network=NETWORKS[4], iptables=iptables))


def survivors(rules: Iterable[str], damage: Damage) -> list[str]:
    """The foreign rules that are left."""
    return [rule for rule in rules if not rule.startswith(damage.takes)]


def wanted_rules(setting: Setting, own: str) -> list[str]:
    """The rules of upstream, for our subnet, as ``Rules.ours`` gives them."""
    found = []
    for family in setting.families:
        name = f"native-ipv{family}.nft" if setting.native else f"own-chains-both-ipv{family}.txt"
        text = (GOLDEN / name).read_text().replace(_GOLDEN_SUBNET[family], str(nets(own)[family]))
        found += _native(family, text) if setting.native else _iptables(family, text)
    return sorted(found, key=_chain)


class Rules:
    """What is in a node's packet filter now, rule by rule, those of a chain in their order."""

    def __init__(self, node: Node, setting: Setting) -> None:
        self._found: list[str] = []
        with node.namespace.entered():
            for family in setting.families:
                self._found += _iptables(
                    family, run(f"{_PREFIX[family]}tables-{setting.flavour}-save").stdout
                )
                if setting.native:
                    own = run("nft", "-s", "list", "table", *_TABLE[family].split(), check=False).stdout
                    self._found += _native(family, own)
        self._found.sort(key=_chain)

    def split(self, wanted: Iterable[str]) -> tuple[list[str], list[str]]:
        """The rules that are wanted, each where it comes first, and all others."""
        ours = set(wanted)
        there = dict.fromkeys(each for each in self._found if each in ours)
        return list(there), [each for each in self._found if each not in ours]


def _iptables(family: int, text: str) -> list[str]:
    table, found = "", []
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith("-A"):
            found.append(f"{family} {table} {line}")
    return found


def _native(family: int, text: str) -> list[str]:
    chain, found = "", []
    for line in map(str.strip, text.splitlines()):
        if match := re.match(r"chain (\S+) \{", line):
            chain = match[1]
        elif line and chain and line not in ("}", "{") and not line.startswith(("type ", "table ")):
            found.append(f"{family} flannel -A {chain} {line}")
    return found


def _chain(line: str) -> list[str]:
    return line.split()[:4]
