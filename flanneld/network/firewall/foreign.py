"""Base chains of this host's packet filters, with all that they can lead to."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress

from msgspec import Struct

from flanneld.errors import FlannelError
from flanneld.model import Family, IPNetwork
from flanneld.network.firewall import xtables
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import DROP, Chains, Fate, Packet, walked
from flanneld.network.firewall.iptables import Flavour, program
from flanneld.network.firewall.iptables_text import read_table
from flanneld.network.firewall.netlink import Hooked, Netfilter
from flanneld.network.firewall.nft_json import read_chains
from flanneld.network.firewall.placing import RulePlace
from flanneld.network.firewall.rules import NATIVE_TABLE, NFT_FAMILY
from flanneld.runtime.shell import Command, command

#: Tables of iptables in which rules drop packets, with their priorities; in nat none do.
_TABLES = {"raw": -300, "mangle": -150, "filter": 0, "security": 50}
#: Hooks in the order in which packets pass those that they pass at all.
_HOOKS = ("ingress", "prerouting", "input", "forward", "output", "postrouting")


class BaseChain(Struct, frozen=True, gc=False):
    """A base chain. ``table`` is nft(8)'s name for its table; ``hook`` is in lower case."""

    place: RulePlace
    family: Family
    table: str
    chain: str
    hook: str
    drops: bool
    chains: Chains
    device: str = ""
    priority: int = 0

    def __str__(self) -> str:
        return f"chain {self.chain} of table {self.table}{' (legacy)' if self.place == 'legacy' else ''}"

    def fate(self, packet: Packet) -> Fate:
        """Return what happens to a packet here (pure)."""
        return self.walked(packet)[0]

    def walked(self, packet: Packet) -> tuple[Fate, Packet]:
        """Return what happens to a packet here, and the packet afterwards (pure)."""
        if self.device and packet.iif != self.device:
            return Fate(), packet
        return walked(self.chains, self.chain, packet, DROP if self.drops else "")

    def accept(self, *openings: Opening) -> tuple[Command, ...]:
        """Return the commands that make the chain accept packets before its first rule (pure)."""
        if self.place == "native":
            insert = command("nft", "insert", "rule", *self.table.split(), self.chain)
            return tuple((*insert, *each.nft(self.family), "accept") for each in openings)
        table = self.table.split()[1]
        insert = command(program(self.place, self.family), *_unless_filter(table), "-I", self.chain)
        return tuple((*insert, *each.iptables(), "-j", "ACCEPT") for each in openings)


def _unless_filter(table: str) -> tuple[str, ...]:
    return () if table == "filter" else ("-t", table)


class Opening(Struct, frozen=True, gc=False):
    """Packets to accept: of a protocol, to a port, or from or to (``side``) a network."""

    protocol: str = ""
    port: int | None = None
    side: str = ""
    network: IPNetwork | None = None

    def iptables(self) -> tuple[str, ...]:
        if self.network:
            return ("-s" if self.side == "saddr" else "-d", str(self.network))
        return ("-p", self.protocol, *(("--dport", str(self.port)) if self.port else ()))

    def nft(self, family: Family) -> tuple[str, ...]:
        if self.network:
            return (NFT_FAMILY[family], self.side, str(self.network))
        return (self.protocol, "dport", str(self.port)) if self.port else ("meta", "l4proto", self.protocol)


def fates(
    bases: Iterable[BaseChain], packet: Packet, hooks: Container[str]
) -> Iterator[tuple[BaseChain, Fate]]:
    """Yield what happens to a packet in each chain at its hooks, as if none dropped it (pure)."""
    passed = (base for base in bases if base.hook in hooks and base.family == packet.source.version)
    for base in sorted(passed, key=lambda each: (_HOOKS.index(each.hook), each.priority)):
        decided, packet = base.walked(packet)
        yield base, decided


def read(family: Family) -> Iterator[BaseChain]:
    """Yield the base chains that may drop packets of a family, as far as rights and programs allow."""
    commands = IptablesRunner(threading.Event())
    with suppress(OSError):  # only root can read the legacy tables
        for table in sorted(xtables.tables(family) & _TABLES.keys()):
            yield from _of_iptables("legacy", family, table, commands)
    hooked: list[Hooked] = []
    with suppress(OSError), Netfilter() as netfilter:  # the kernel may lack nf_tables
        hooked = [each for each in netfilter.hooked(family) if each.type == "filter"]
    for table in sorted({each.table for each in hooked}):
        kind, _, name = table.partition(" ")
        if name == NATIVE_TABLE[family]:
            continue  # ours accepts only
        there = [each for each in hooked if each.table == table]
        if kind == NFT_FAMILY[family] and name in _TABLES and all(each.chain.isupper() for each in there):
            yield from _of_iptables("nft", family, name, commands)
        else:
            yield from _native(family, there, commands)


def _of_iptables(place: Flavour, family: Family, table: str, commands: IptablesRunner) -> Iterator[BaseChain]:
    try:
        text = commands.run((f"{program(place, family)}-save", "-t", table))
    except FlannelError:
        return
    chains, policies = read_table(text)
    for name, policy in policies.items():
        if policy != "-":
            qualified = f"{NFT_FAMILY[family]} {table}"
            drops, priority = policy == "DROP", _TABLES[table]
            yield BaseChain(place, family, qualified, name, name.lower(), drops, chains, priority=priority)


def _native(family: Family, hooked: list[Hooked], commands: IptablesRunner) -> Iterator[BaseChain]:
    try:
        text = commands.run(("nft", "-j", "list", "table", *hooked[0].table.split()))
        chains = read_chains(text, family)
    except (FlannelError, ValueError):
        return
    for each in hooked:
        yield BaseChain(
            "native",
            family,
            each.table,
            each.chain,
            each.hook,
            each.drops,
            chains,
            each.device,
            each.priority,
        )


def text_of(base: BaseChain, rule: str) -> str:
    """Return a rule of a ``Fate`` as its program lists it; empty for the policy."""
    if base.place != "native" or not rule:
        return rule
    try:
        listing = IptablesRunner(threading.Event()).run(("nft", "-a", "list", "table", *base.table.split()))
    except FlannelError:
        return f"rule # handle {rule}"
    mark = f" # handle {rule}"
    found = (line.removesuffix(mark).strip() for line in listing.splitlines() if line.endswith(mark))
    return f"{next(found, 'rule')} # handle {rule}"
