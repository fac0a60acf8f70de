"""Base chains of this host's packet filters, with all that they can lead to.

Some drop by their policy, as Docker's, others by a final rule, as firewalld's. Each packet passes every
table, and a drop in any of them is final. So an accept only helps in the table that would drop, and ours is
in one table.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress

from msgspec import Struct

from flanneld.errors import FlannelError
from flanneld.findings import Command, command
from flanneld.model import Family, IPNetwork, family_of
from flanneld.network.firewall import xtables
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import DROP, Chains, Fate, Packet, walked
from flanneld.network.firewall.iptables import Flavour, program
from flanneld.network.firewall.iptables_text import IpSets, read_ipsets, read_table
from flanneld.network.firewall.netlink import Hooked, Netfilter
from flanneld.network.firewall.placing import RulePlace
from flanneld.network.firewall.rules import NATIVE_TABLE, NFT_FAMILY, Chain

#: Tables of iptables with their priorities, by nft's type of their chains. In those of nat no rule drops.
_TABLES = {"filter": {"raw": -300, "mangle": -150, "filter": 0, "security": 50}, "nat": {"nat": 100}}
_FIREWALLD = "inet firewalld"
_FIREWALLDS_CHAIN: Chain = ("filter", "INPUT_ZONES")
#: Ports that senders use: those below are of services. A port of a container that rules hardly name.
SENDERS, SOME_PORT = (1024, 65535), 20111
#: Hooks in the order in which packets pass those that they pass at all.
_HOOKS = ("ingress", "prerouting", "input", "forward", "output", "postrouting", "egress")


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
        if self.device and self.device != (packet.oif if self.hook == "egress" else packet.iif):
            return Fate(), packet
        return walked(self.chains, self.chain, packet, DROP if self.drops else "")

    @property
    def is_firewalld(self) -> bool:
        """Return True for firewalld's chains: rules that others add there are lost at a reload."""
        return self.table == _FIREWALLD

    def spare(self, network: IPNetwork) -> Command:
        """Return the command that has packets inside a network pass this chain by (pure)."""
        inside = of_network(network)
        if self.place == "native":
            tests = (word for each in inside for word in each.nft(self.family))
            return command("nft", "insert", "rule", *self.table.split(), self.chain, *tests, "return")
        tests = (word for each in inside for word in each.iptables())
        table = _unless_filter(self.table.split()[1])
        return command(program(self.place, self.family), *table, "-I", self.chain, *tests, "-j", "RETURN")

    def without(self, rule: str) -> Command:
        """Return the command that deletes a rule of iptables from its chain (pure)."""
        assert self.place != "native"
        _, *words = shlex.split(rule)
        table = _unless_filter(self.table.split()[1])
        return command(program(self.place, self.family), *table, "-D", *words)

    def accept(self, *openings: Opening) -> tuple[Command, ...]:
        """Return the commands that make the chain accept packets before its first rule drops them (pure)."""
        if self.is_firewalld:
            settings = dict.fromkeys(each.firewalld() for each in openings)
            return *(("firewall-cmd", "--permanent", *each) for each in settings), (
                "firewall-cmd",
                "--reload",
            )
        if self.place == "native":
            insert = command("nft", "insert", "rule", *self.table.split(), self.chain)
            return tuple((*insert, *each.nft(self.family), "accept") for each in openings)
        table = self.table.split()[1]
        insert = command(program(self.place, self.family), *_unless_filter(table), "-I", self.chain)
        return tuple((*insert, *each.iptables(), "-j", "ACCEPT") for each in openings)


class PolicyChain(BaseChain, frozen=True, gc=False):
    """The policies of XFRM of one family and direction; the text of each ends in its index and direction."""

    def __str__(self) -> str:
        return f"the XFRM policies for {self.hook}"


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

    def firewalld(self) -> tuple[str, ...]:
        if self.network:
            return "--zone=trusted", f"--add-source={self.network}"
        return (
            f"--add-port={self.port}/{self.protocol}" if self.port else f"--add-protocol={self.protocol}",
        )


def of_network(network: IPNetwork) -> tuple[Opening, Opening]:
    """Return what to accept for the packets of a network's containers."""
    return Opening(side="saddr", network=network), Opening(side="daddr", network=network)


def between_containers(network: IPNetwork) -> Iterator[Packet]:
    """Yield packets between containers of two nodes, by interfaces that are not known."""
    ends = network[2 % network.num_addresses], network[-3 % network.num_addresses]
    for source, destination in (ends, ends[::-1]):
        yield Packet(None, None, source, destination, "tcp", SOME_PORT, SENDERS)


def drops_the_rest(base: BaseChain, decided: Fate) -> bool:
    """Return True for a drop by the policy of a FORWARD chain, or by its rule about all packets."""
    by = next((rule for rule in base.chains.get(base.chain, ()) if rule.text == decided.by), None)
    unconditional = not decided.by or (by is not None and not by.tests)
    return base.hook == "forward" and decided.act == DROP and unconditional


def forward_drops(network: IPNetwork, commands: IptablesRunner) -> list[BaseChain]:
    """Return the chains that drop what they do not accept, and accept no packet between containers."""
    bases = list(read(family_of(network), "forward", commands))
    found = (each for packet in between_containers(network) for each in fates(bases, packet, ("forward",)))
    return list({str(base): base for base, decided in found if drops_the_rest(base, decided)}.values())


def has_firewalld() -> bool:
    """Return True if firewalld is active in this network namespace, with nftables or iptables."""
    with suppress(OSError), Netfilter() as netfilter:
        if any(each.table == _FIREWALLD for each in netfilter.hooked(4)):
            return True
        if netfilter.has_chain(4, _FIREWALLDS_CHAIN):
            return True
    with suppress(OSError):
        return xtables.has_chain(4, _FIREWALLDS_CHAIN)
    return False


def fates(
    bases: Iterable[BaseChain], packet: Packet, hooks: Container[str]
) -> Iterator[tuple[BaseChain, Fate]]:
    """Yield what happens to a packet in each chain at its hooks, as if none dropped it (pure)."""
    passed = (base for base in bases if base.hook in hooks and base.family == packet.source.version)
    for base in sorted(passed, key=lambda each: (_HOOKS.index(each.hook.split()[-1]), each.priority)):
        decided, packet = base.walked(packet)
        yield base, decided


def marked(bases: Iterable[BaseChain], packet: Packet, hooks: Container[str]) -> int:
    """Return the mark that a packet has behind these hooks, 0 if it is not known (pure)."""
    for base in sorted(bases, key=lambda each: each.priority):
        if base.hook in hooks and base.family == packet.source.version:
            packet = base.walked(packet)[1]
    return packet.mark or 0


def read(
    family: Family, hook: str = "", commands: IptablesRunner | None = None, kind: str = "filter"
) -> Iterator[BaseChain]:
    """Yield the base chains that may drop packets of a family, as far as rights and programs allow.

    With ``hook`` only those there: no table without such a chain is listed. Those of the ``kind`` "nat" do
    not drop: they change the sender or the destination.
    """
    yield from (each for each in _read(family, hook, commands, kind) if hook in ("", each.hook))


def _read(family: Family, hook: str, commands: IptablesRunner | None, kind: str) -> Iterator[BaseChain]:
    tables = _TABLES[kind]
    with suppress(OSError):  # only root can read the legacy tables
        for table in sorted(xtables.tables(family) & tables.keys()):
            yield from _of_iptables("legacy", family, table, tables[table], commands)
    hooked: list[Hooked] = []
    with suppress(OSError), Netfilter() as netfilter:  # the kernel may lack nf_tables
        # Chains of the type "route" filter, and set marks.
        hooked = [each for each in netfilter.hooked(family) if (each.type == "nat") == (kind == "nat")]
    for table in sorted({each.table for each in hooked if hook in ("", each.hook)}):
        nft, _, name = table.partition(" ")
        if name == NATIVE_TABLE[family]:
            continue  # ours accepts only
        there = [each for each in hooked if each.table == table]
        if nft == NFT_FAMILY[family] and name in tables and all(each.chain.isupper() for each in there):
            yield from _of_iptables("nft", family, name, tables[name], commands)
        else:
            yield from _native(family, there, commands)


def _of_iptables(
    place: Flavour, family: Family, table: str, priority: int, commands: IptablesRunner | None
) -> Iterator[BaseChain]:
    commands = commands or IptablesRunner()
    try:
        text = commands.run((f"{program(place, family)}-save", "-t", table))
    except FlannelError:
        return
    sets: IpSets = {}
    if " --match-set " in text:
        with suppress(FlannelError):
            sets = read_ipsets(commands.run(("ipset", "save")))
    chains, policies = read_table(text, sets)
    for name, policy in policies.items():
        if policy != "-":
            qualified = f"{NFT_FAMILY[family]} {table}"
            drops = policy == "DROP"
            yield BaseChain(place, family, qualified, name, name.lower(), drops, chains, priority=priority)


def _native(family: Family, hooked: list[Hooked], commands: IptablesRunner | None) -> Iterator[BaseChain]:
    from flanneld.network.firewall.nft_json import read_chains  # not needed on most hosts

    try:
        text = (commands or IptablesRunner()).run(("nft", "-j", "list", "table", *hooked[0].table.split()))
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
        listing = IptablesRunner().run(("nft", "-a", "list", "table", *base.table.split()))
    except FlannelError:
        return f"rule # handle {rule}"
    mark = f" # handle {rule}"
    found = (line.removesuffix(mark).strip() for line in listing.splitlines() if line.endswith(mark))
    # Tables have handles of their own.
    return f"{next((text for text in found if not text.endswith('{')), 'rule')}{mark}"
