"""Fate of one packet in the chains of a packet filter (pure).

Whether a rule matches may be unknown: a match may not be parsed, or concern what the packet leaves open. A
drop is certain only if no rule before it may have accepted the packet.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from typing import Any

from msgspec import Struct

from flanneld.model import IPAddress, IPNetwork
from flanneld.network.firewall.rules import Match, Rule

ACCEPT, DROP, RETURN, JUMP, GOTO = "accept", "drop", "return", "jump", "goto"
#: Other names and the numbers of the protocols that nodes send to each other (/etc/protocols).
_PROTOCOLS = {"4": "ipencap", "ipip": "ipencap", "ipv4": "ipencap", "17": "udp", "6": "tcp", "50": "esp"}
#: Chains that call each other are no deeper in any real packet filter (NFT_JUMP_STACK_SIZE is 16).
_DEEPEST = 16


class Packet(Struct, frozen=True, gc=False):
    """The first packet of a connection. None leaves a property open; an empty interface is none at all.

    ``protocol`` is the name of an IP protocol, as in /etc/protocols.
    """

    iif: str | None
    oif: str | None
    source: IPAddress
    destination: IPAddress
    protocol: str | None = None
    dport: int | None = None
    sport: int | None = None

    @property
    def destination_type(self) -> str:
        """The type of the destination (linux/rtnetlink.h, RTN_*); a packet for this host has no oif."""
        return "unicast" if self.oif != "" else "local"


class Test(Struct, frozen=True, gc=False):
    """Condition of a rule. ``field`` is a property of the packet, ``state``, or ``unknown``.

    ``values`` are names, networks, inclusive ranges of ports, or marks with their masks; one has to fit.
    """

    __test__ = False  # for pytest
    field: str
    values: tuple[str | IPNetwork | tuple[int, int], ...] = ()
    negated: bool = False

    def holds(self, packet: Packet) -> bool | None:
        """Return None if that cannot be told."""
        met = self._is_met(packet)
        return met if met is None else met != self.negated

    def _is_met(self, packet: Packet) -> bool | None:
        if self.field == "state":
            return "new" in self.values
        actual = getattr(packet, self.field, None)
        if actual is None:
            return None
        return any(_fits(actual, value) for value in self.values)


def _fits(actual: str | int | IPAddress, value: str | IPNetwork | tuple[int, int]) -> bool:
    if isinstance(value, tuple):
        return isinstance(actual, int) and value[0] <= actual <= value[1]
    if isinstance(value, str):
        return str(actual).startswith(value[:-1]) if value.endswith("*") else actual == value
    return not isinstance(actual, str | int) and actual in value


UNKNOWN = Test("unknown")


def protocol_name(given: str | int) -> str:
    """Return the name that ``Packet.protocol`` has for a protocol's number or other name."""
    return _PROTOCOLS.get(str(given), str(given))


class Step(Struct, frozen=True, gc=False):
    """One rule, or one element of a verdict map. An empty ``act`` lets packets pass on to the next rule.

    ``target`` is a chain, or iptables' name of the verdict; ``random`` requests fully random source ports.
    ``rest`` names other parts that affect no packet's walk.
    """

    text: str
    tests: tuple[Test, ...] = ()
    act: str = ""
    target: str = ""
    comment: str = ""
    random: bool = False
    rest: str = ""

    def as_rule(self) -> Rule:
        """Return it as one of our rules; ``extra`` names what they never have."""
        fields: dict[str, Any] = {}
        extra = [self.rest] if self.rest else []
        for test in self.tests:
            match test:
                case Test("source" | "destination" as side, (IPv4Network() | IPv6Network() as net,)):
                    fields[side] = Match(net, not test.negated)
                case Test("mark", (mark,), False):
                    fields["mark"] = mark
                case _:
                    extra.append(test.field)
        return Rule(self.target, comment=self.comment, random=self.random, extra=" ".join(extra), **fields)

    def matches(self, packet: Packet) -> bool | None:
        held = {test.holds(packet) for test in self.tests}
        return False if False in held else None if None in held else True


#: The rules of each chain of one table.
Chains = Mapping[str, tuple[Step, ...]]


class Fate(Struct, frozen=True, gc=False):
    """Result. An empty ``act`` means that no rule decided; ``by`` is the rule that did."""

    act: str = ""
    by: str = ""
    certain: bool = True


def fate(chains: Chains, chain: str, packet: Packet, depth: int = 0) -> Fate:
    """Return what a chain does to a packet, without the chain's policy."""
    certain = depth < _DEEPEST and chain in chains
    for step in chains.get(chain, ()) if certain else ():
        met = step.matches(packet)
        if met is False or not step.act:
            continue
        if step.act in (JUMP, GOTO):
            inner = fate(chains, step.target, packet, depth + 1)
            if met and inner.act:
                return Fate(inner.act, inner.by, certain and inner.certain)
            certain = certain and inner.certain and not inner.act
            if met and step.act == GOTO:
                break
        elif met:
            return Fate("" if step.act == RETURN else step.act, step.text, certain)
        elif step.act != DROP:
            certain = False
    return Fate(certain=certain)
