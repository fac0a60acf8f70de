"""Rules of any packet filter, our own among them, and the fate of one packet in its chains (pure).

Whether a rule matches may be unknown: a match may not be parsed, or concern what the packet leaves open. The
walk then follows both ways. A fate is certain if all ways end alike, else it names the rule that is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, reduce
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import IPAddress, IPNetwork

ACCEPT, RETURN, MASQUERADE, DROP, REJECT = "ACCEPT", "RETURN", "MASQUERADE", "DROP", "REJECT"
SNAT, DNAT, REDIRECT = "SNAT", "DNAT", "REDIRECT"
#: Verdicts after which a packet goes on: with a new mark, without a connection, or as only a program knows.
MARK, NOTRACK, UNKNOWN_VERDICT = "MARK", "NOTRACK", "unknown"
#: iptables' targets after which a packet goes on as it is.
_PASSES_ON = frozenset(
    {"", "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "CONNMARK", "SECMARK", "CONNSECMARK", "CLASSIFY", "CT"}
    | {"TCPMSS", "TOS", "DSCP", "ECN", "TTL", "HL", "CHECKSUM", "SET", "TEE", "NFACCT", "RATEEST"}
    | {"IDLETIMER", "LED"}
)
#: Ends of a packet's walk through a table by the verdict.
_ENDS = dict.fromkeys((DNAT, REDIRECT), DNAT)
_ENDS |= {ACCEPT: ACCEPT, MASQUERADE: MASQUERADE, SNAT: MASQUERADE, DROP: DROP, REJECT: DROP}
#: Verdicts that lead to no chain. Only nftables may have chains of these names.
TARGETS = frozenset({*_PASSES_ON, *_ENDS, RETURN, MARK, NOTRACK, UNKNOWN_VERDICT} - {""})
ALL_BITS = 0xFFFF_FFFF
#: Other names and the numbers of IP protocols (/etc/protocols, where ipip is 94, not the tunnel's protocol).
_PROTOCOLS = {
    **dict.fromkeys(("4", "ipv4"), "ipencap"),
    **dict.fromkeys(("58", "icmpv6"), "ipv6-icmp"),
    "1": "icmp",
    "6": "tcp",
    "17": "udp",
    "47": "gre",
    "50": "esp",
    "51": "ah",
    "132": "sctp",
}
#: Numbers of ICMP messages (RFC 792, RFC 4443); iptables has 255 and "any" for all of them.
_ICMP = {**dict.fromkeys(("8", "128"), "echo-request"), **dict.fromkeys(("255", "any"), "*")}
_ICMP |= {"135": "nd-neighbor-solicit", "136": "nd-neighbor-advert"}
#: Flags of TCP (RFC 9293, RFC 3168) by their bits; iptables has "all" for the first six.
TCP_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128, "all": 63}
#: Chains that call each other are no deeper in any real packet filter (NFT_JUMP_STACK_SIZE is 16).
_DEEPEST = 16

#: A name, a network, a range of ports, a mark or TCP's flags with their mask, or tests that all hold.
Value = str | IPNetwork | tuple[int, int] | tuple["Test", ...]


class Packet(Struct, frozen=True, gc=False):
    """The first packet of a connection. None leaves a property open; an empty interface is none at all.

    ``protocol`` is the name of an IP protocol, as in /etc/protocols. Of a range of ports it has one. ``icmp``
    and ``pkttype`` are nft(8)'s names; the only one of TCP's ``flags`` is SYN if nothing else is said.
    """

    iif: str | None
    oif: str | None
    source: IPAddress
    destination: IPAddress
    protocol: str | None = None
    dport: int | tuple[int, int] | None = None
    sport: int | tuple[int, int] | None = None
    mark: int | None = 0
    state: str | None = "new"
    icmp: str = "echo-request"
    pkttype: str = "unicast"
    flags: int = 0x02

    @property
    def destination_type(self) -> str:
        """The type of the destination (linux/rtnetlink.h, RTN_*); a packet for this host has no oif."""
        return "unicast" if self.oif != "" else "local"

    @property
    def source_type(self) -> str:
        return "unicast" if self.iif != "" else "local"


class Test(Struct, frozen=True, gc=False):
    """Condition of a rule. ``field`` is a property of the packet, ``port``, ``any`` or ``unknown``.

    One of the ``values`` has to fit; without any the test never holds.
    """

    __test__ = False  # for pytest
    field: str
    values: tuple[Value, ...] = ()
    negated: bool = False

    def holds(self, packet: Packet) -> bool | None:
        """Return None if that cannot be told."""
        met = self._is_met(packet)
        return met if met is None else met != self.negated

    def _is_met(self, packet: Packet) -> bool | None:
        if self.field == "any":
            return _any(all_hold(value, packet) for value in self.values if isinstance(value, tuple))
        if self.field == "port":
            return _any(Test(side, self.values).holds(packet) for side in ("sport", "dport"))
        actual = getattr(packet, self.field, None)
        if actual is None or not self.values:
            return None if actual is None else False
        return _any(_fits(self.field, actual, value) for value in self.values)


def all_hold(tests: Iterable[Any], packet: Packet) -> bool | None:
    """Return True if all of these tests hold, None if that cannot be told."""
    unknown = False
    for test in tests:
        held = test.holds(packet)
        if held is False:
            return False
        unknown = unknown or held is None
    return None if unknown else True


def _any(held: Iterable[bool | None]) -> bool | None:
    found = set(held)
    return True if True in found else None if None in found else False


def _fits(field: str, actual: Any, value: Value) -> bool | None:
    if isinstance(value, str):
        return str(actual).startswith(value[:-1]) if value.endswith("*") else actual == value
    if not isinstance(value, tuple):
        return not isinstance(actual, str | int) and actual in value
    low, high = value
    assert isinstance(low, int)
    assert isinstance(high, int)
    if field in ("mark", "flags"):
        return bool(actual & high == low)
    first, last = actual if isinstance(actual, tuple) else (int(actual), int(actual))
    return True if low <= first and last <= high else None if first <= high and low <= last else False


UNKNOWN, NEVER = Test("unknown"), Test("any")


def protocol_name(given: str | int) -> str:
    """Return the name that ``Packet.protocol`` has for a protocol's number or other name."""
    return _PROTOCOLS.get(str(given), str(given))


def icmp_name(given: str | int) -> str:
    """Return the name of an ICMP message for its number, as far as ``Packet.icmp`` may have it."""
    return _ICMP.get(str(given), str(given))


class Rule(Struct, frozen=True, gc=False):
    """One rule, or one element of a verdict map: tests that all have to hold, and the verdict.

    ``verdict`` is a verdict in iptables' words, or a chain; an empty one lets packets pass on to the next
    rule. ``extra`` has the parts that our rules never have, so a rule with some is never ours. ``random``
    requests fully random source ports. ``new_mark`` are the bits that MARK toggles and those that it clears
    before, None if they are unknown. ``text`` is the rule as its program lists it, or its handle.
    """

    verdict: str = ""
    tests: tuple[Test, ...] = ()
    comment: str = ""
    random: bool = False
    extra: str = ""
    is_goto: bool = False
    new_mark: tuple[int, int] | None = None
    text: str = ""

    @property
    def is_plain(self) -> bool:
        """Return True if the rule has no part that ours never have."""
        return not self.extra and not self.is_goto and all(map(_is_plain, self.tests))

    def without_text(self) -> Rule:
        """Return the rule as ours compare: its tests in the order in which they are written."""
        ordered = (replace(each, values=tuple(sorted(each.values))) for each in self.tests)
        tests = sorted(ordered, key=lambda test: _ORDER.get(test.field, len(_ORDER)))
        return replace(self, text="", tests=tuple(tests))

    def matches(self, packet: Packet) -> bool | None:
        return all_hold(self.tests, packet)


#: Tests of our own rules, in the order in which they are written.
_ORDER = {"source": 0, "destination": 1, "mark": 2}


def _is_plain(test: Test) -> bool:
    is_set = test.field == "destination" and not test.negated and len(test.values) > 1
    single = len(test.values) == 1 and not (test.field == "mark" and test.negated)
    return test.field in _ORDER and (single or is_set)


#: The rules of each chain of one table.
Chains = Mapping[str, tuple[Rule, ...]]

_T = TypeVar("_T")


class LazyChains(Mapping[str, tuple[Rule, ...]]):
    """Chains whose rules are parsed when a packet gets there: of thousands most are never looked at."""

    def __init__(self, listed: Mapping[str, _T], parse: Callable[[_T], tuple[Rule, ...]]) -> None:
        self._listed = listed
        self._parse = cache(lambda chain: parse(listed[chain]))

    def __getitem__(self, chain: str) -> tuple[Rule, ...]:
        return self._parse(chain)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def parsed(self) -> int:
        """Number of chains that were parsed."""
        return self._parse.cache_info().currsize


class Fate(Struct, frozen=True, gc=False):
    """Result. An empty ``act`` means that no rule decided; ``by`` is the rule that did.

    If it depends on a rule that may match or not, that is ``doubt``; the fate is the one without it, and
    ``may_drop`` is True if that rule leads to a drop.
    """

    act: str = ""
    by: str = ""
    doubt: str = ""
    may_drop: bool = False

    @property
    def certain(self) -> bool:
        return not self.doubt


def fate(chains: Chains, chain: str, packet: Packet, policy: str = "") -> Fate:
    """Return what a chain does to a packet; without a policy, what its rules do."""
    return walked(chains, chain, packet, policy)[0]


def walked(chains: Chains, chain: str, packet: Packet, policy: str = "") -> tuple[Fate, Packet]:
    """Return what a chain does to a packet, and the packet afterwards."""
    if chain not in chains:
        return Fate(doubt=chain), packet
    walk = _Walk(chains, packet)
    ways = walk.through(chain)
    ends: dict[str, Fate] = {}
    for act, way in ways.items():
        end = act or policy
        if end not in ends or not way.doubt:
            ends[end] = Fate(end, way.by, way.doubt)
    plain = next((each for each in ends.values() if each.certain), Fate(doubt=chain))
    lost = ends.get(DROP, plain)
    doubt = lost.doubt or next((each.doubt for each in ends.values() if each.doubt), plain.doubt)
    decided = replace(plain, doubt=doubt, may_drop=lost is not plain)
    return decided, reduce(_either, walk.accepted, walk.packet)


class _Walk(Struct, gc=False):
    """Walk of one packet, which changes on the way: ``accepted`` are its forms where a rule accepts it."""

    chains: Chains
    packet: Packet
    accepted: list[Packet] = []

    def through(self, chain: str, depth: int = 0) -> dict[str, Fate]:
        """Return the possible ends in a chain, each with the unknown rule that has to match for it.

        One of them has none: it is the end if no unknown rule matches. The end "" is that of the chain.
        """
        ways: dict[str, Fate] = {}
        doubt = ""  # unknown rule that has to match for the packet to get here
        returned: list[Packet] = []
        for rule in self.chains[chain]:
            met = rule.matches(self.packet)
            if met is False or rule.verdict in _PASSES_ON:
                continue
            why = doubt or ("" if met else rule.text)
            before = self.packet
            ends, is_final = self._ends(rule, depth)
            if why:
                self.packet = _either(before, self.packet)
            for act, end in ends.items():
                if act or is_final:
                    _add(ways, act, end.by, why or end.doubt)
            if is_final and "" in ends:
                returned.append(self.packet)
            if met and (is_final or "" not in ends):
                break
            if met:
                doubt = doubt or ends[""].doubt
        else:
            _add(ways, "", "", doubt)
        self.packet = reduce(_either, returned, self.packet)
        return ways

    def _ends(self, rule: Rule, depth: int) -> tuple[dict[str, Fate], bool]:
        """Return the possible ends in a matching rule, and True if it ends the walk through its chain."""
        if rule.verdict in (MARK, NOTRACK):
            self.packet = _changed(self.packet, rule)
            return {"": Fate()}, False
        if rule.verdict in _ENDS:
            self.accepted.append(self.packet)
            return {_ENDS[rule.verdict]: Fate(by=rule.text)}, True
        if rule.verdict == RETURN:
            return {"": Fate()}, True
        if rule.verdict in self.chains and depth + 1 < _DEEPEST:
            return self.through(rule.verdict, depth + 1), rule.is_goto
        self.accepted.append(self.packet)
        ends = {act: Fate(by=rule.text, doubt=rule.text) for act in (ACCEPT, DROP)}
        return {**ends, "": Fate()}, False


def _changed(packet: Packet, rule: Rule) -> Packet:
    if rule.verdict == NOTRACK:
        return replace(packet, state="untracked")
    if rule.new_mark is None or packet.mark is None:
        return replace(packet, mark=None)
    toggled, cleared = rule.new_mark
    return replace(packet, mark=(packet.mark & (ALL_BITS ^ cleared)) ^ toggled)


def _either(one: Packet, other: Packet) -> Packet:
    """Return the packet after either way, with what differs left open."""
    mark = one.mark if one.mark == other.mark else None
    return replace(one, mark=mark, state=one.state if one.state == other.state else None)


def _add(ways: dict[str, Fate], act: str, by: str, doubt: str) -> None:
    """Add a way to an end, unless one is known; the one without doubt counts."""
    if act not in ways or (ways[act].doubt and not doubt):
        ways[act] = Fate(act, by, doubt)
