"""Reader of any program's rules in the JSON of libnftables, libnftables-json(5) (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_network, summarize_address_range
from typing import Any

from msgspec import MsgspecError, Raw, Struct, convert
from msgspec.json import decode
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork
from flanneld.network.firewall.fate import (
    ACCEPT,
    ALL_BITS,
    DNAT,
    DROP,
    MARK,
    MASQUERADE,
    NEVER,
    NOTRACK,
    REJECT,
    RETURN,
    SNAT,
    TARGETS,
    TCP_FLAGS,
    UNKNOWN,
    UNKNOWN_VERDICT,
    Chains,
    LazyChains,
    Rule,
    Test,
    Value,
    icmp_name,
    protocol_name,
)

JsonCommand = dict[str, Any]

VERDICTS = {
    "accept": ACCEPT,
    "drop": DROP,
    "reject": REJECT,
    "return": RETURN,
    "masquerade": MASQUERADE,
    "snat": SNAT,
    **dict.fromkeys(("dnat", "redirect"), DNAT),
    "continue": "",
    "notrack": NOTRACK,
    MARK: MARK,
    **dict.fromkeys(("queue", "synproxy", "tproxy", "fwd"), UNKNOWN_VERDICT),
}
_FULLY_RANDOM = ("fully-random", ["fully-random"])
#: Statements of our rules, those that affect no packet's walk, and those that end it.
_OURS = frozenset({"match", "counter", "accept", "return", "masquerade"})
_IDLE = frozenset({"counter", "log", "comment", "mangle", "ct helper", "flow", "set"})
#: Expressions, in the words of nft(8), and the property of a packet that each is.
_FIELDS = {
    "meta iif": "iif",
    "meta iifname": "iif",
    "meta oif": "oif",
    "meta oifname": "oif",
    "meta mark": "mark",
    "meta pkttype": "pkttype",
    "meta l4proto": "protocol",
    "ip protocol": "protocol",
    "ip6 nexthdr": "protocol",
    "ct state": "state",
    "fib daddr type": "destination_type",
    "fib saddr type": "source_type",
    "icmp type": "icmp",
    "icmpv6 type": "icmp",
    "tcp flags": "flags",
    **{f"{header} saddr": "source" for header in ("ip", "ip6")},
    **{f"{header} daddr": "destination" for header in ("ip", "ip6")},
    **{f"{header} {port}": port for header in ("udp", "tcp", "th") for port in ("sport", "dport")},
}
#: Headers of other protocols than IP's own: an expression about one holds for its packets only.
_TRANSPORTS = frozenset(
    {"tcp", "udp", "udplite", "sctp", "dccp", "icmp", "icmpv6", "igmp", "esp", "ah", "comp", "gre"}
)
_PORTS = 1 << 16
#: Properties with names, each with the function that makes ``Packet``'s name of it.
_NAMED: Mapping[str, Callable[[str | int], str]] = {
    **dict.fromkeys(("iif", "oif", "state", "destination_type", "source_type"), str),
    "protocol": protocol_name,
    "icmp": icmp_name,
    "pkttype": lambda given: str(given).replace("host", "unicast"),
}
#: Names of an IP version: as nfproto, and as an Ethernet protocol. Start of the other's expressions.
_FAMILY_NAMES: Mapping[Family, tuple[str, str]] = {4: ("ipv4", "ip"), 6: ("ipv6", "ip6")}
_OTHER_HEADER: Mapping[Family, str] = {4: "ip6 ", 6: "ip "}

#: Elements of each set and map of a table, in JSON.
Sets = Mapping[str, Raw]
_NO_SETS: Sets = {}


class ListedRule(Struct, frozen=True, gc=False):
    """A rule as it is listed; ``handle`` is unique in its table."""

    chain: str
    handle: int
    expr: list[dict[str, Any]] = []
    comment: str = ""


class _RawRule(Struct, frozen=True, gc=False):
    """A rule whose expressions are not parsed yet."""

    chain: str
    handle: int
    expr: Raw = Raw(b"[]")
    comment: str = ""


class _Named(Struct, frozen=True, gc=False):
    """A chain, set or map."""

    name: str
    elem: Raw = Raw(b"[]")


class _Item(Struct, frozen=True, gc=False):
    """One object of a listing; all its other kinds are left out."""

    chain: _Named | None = None
    rule: _RawRule | None = None
    set: _Named | None = None
    map: _Named | None = None


class _Listing(Struct, frozen=True, gc=False):
    nftables: list[_Item]


def read_chains(text: str, family: Family) -> Chains:
    """Return the rules in the output of ``nft -j list table`` as they concern a family's packets.

    Raises ``ValueError``.
    """
    try:
        items = decode(text, type=_Listing).nftables
    except MsgspecError as error:
        raise ValueError("a table is listed in a way that is not understood") from error
    chains: dict[str, list[_RawRule]] = {item.chain.name: [] for item in items if item.chain}
    sets = {each.name: each.elem for item in items if (each := item.set or item.map)}
    for item in items:
        if item.rule:
            chains.setdefault(item.rule.chain, []).append(item.rule)

    def parse(rules: list[_RawRule]) -> tuple[Rule, ...]:
        listed = (ListedRule(raw.chain, raw.handle, decode(raw.expr), raw.comment) for raw in rules)
        return tuple(each for rule in listed for each in understood(rule, family, sets))

    return LazyChains(chains, parse)


def understood(rule: ListedRule, family: Family, sets: Sets = _NO_SETS) -> list[Rule]:
    """Return the steps of a rule. One that cannot be parsed may do anything."""
    try:
        return list(read_rules(rule, family, sets))
    except (MsgspecError, ValueError, TypeError, KeyError, AttributeError):
        return [Rule(UNKNOWN_VERDICT, (UNKNOWN,), text=str(rule.handle))]


def read_rules(rule: ListedRule, family: Family, sets: Sets = _NO_SETS) -> Iterator[Rule]:
    """Yield the steps of a rule: for a new mark, for its verdict, or for each element of a verdict map."""
    tests: list[Test] = []
    rest: list[str] = []
    for statement in rule.expr:
        (name, given), *_ = statement.items()
        rest += [] if name in _OURS else [name]
        match name, given:
            case "match", {"left": left, "op": op, "right": right}:
                tests += _tests(left, op, right, family, sets)
            case "vmap", {"key": key, "data": data}:
                yield from _elements(rule, tests, key, data, family, sets)
                return
            case "mangle", {"key": {"meta": {"key": "mark"}}, "value": value}:
                yield replace(_rule(rule, tests, {MARK: None}, rest), new_mark=_new_mark(value))
            case "mangle", {"key": {"payload": {"field": str(field)}}, "value": value} if (
                end := _end_by_rewriting(field, value)
            ):
                yield _rule(rule, tests, {end: None}, rest)
                return
            case "set", {"stmt": _}:  # a limit of its own for each element
                tests.append(UNKNOWN)
            case "notrack", _:
                yield _rule(rule, tests, statement, rest)
            case _ if name in VERDICTS or name in ("jump", "goto"):
                yield _rule(rule, tests, statement, rest)
                return
            case _ if name not in _IDLE:
                tests.append(UNKNOWN)
    yield _rule(rule, tests, {"queue": None} if "xt" in rest else {"continue": None}, rest)


def _elements(
    rule: ListedRule, tests: list[Test], key: Any, data: Any, family: Family, sets: Sets
) -> Iterator[Rule]:
    """Yield a step for each element of a verdict map; one that is not in the listing may decide anything."""
    elements = _listed_set(data, sets)
    if elements is None:
        yield _rule(rule, tests, {"queue": None}, ["vmap"])
        return
    for value, verdict in convert(elements, list[tuple[Any, dict[str, Any]]]):
        yield _rule(rule, [*tests, *_tests(key, "==", value, family, sets)], verdict, ["vmap"])


def _listed_set(given: Any, sets: Sets) -> list[Any] | None:
    """Return the elements of a set or map, None for one that is not in the listing."""
    match given:
        case {"set": [*elements]}:
            return elements
        case {"set": element}:
            return [element]
        case str() if given.startswith("@") and given[1:] in sets:
            return decode(sets[given[1:]], type=list[Any])
    return None


def _rule(listed: ListedRule, tests: list[Test], verdict: Mapping[str, Any], rest: list[str]) -> Rule:
    (name, given), *_ = verdict.items()
    given = given if isinstance(given, dict) else {}
    random = given.get("flags") in _FULLY_RANDOM
    target = str(given.get("target", ""))
    if given and not random and not target:
        rest = [*rest, *given]
    to = UNKNOWN_VERDICT if target in TARGETS else target or VERDICTS.get(name, ACCEPT)
    extra, text = " ".join(rest), str(listed.handle)
    return Rule(to, tuple(tests), listed.comment, random, extra, name == "goto", text=text)


def _end_by_rewriting(field: str, value: Any) -> str:
    """Return what becomes of a packet with a new value in a field of its header; empty if it gets there."""
    if field in ("ttl", "hoplimit"):
        return "drop" if value in (0, 1) else ""  # by the next router, which is the peer
    return "dnat" if field in ("saddr", "daddr", "sport", "dport") else ""


def _new_mark(value: Any) -> tuple[int, int] | None:
    """Return the bits that a new mark toggles and those that it clears before; None if that is not simple."""
    match value:
        case int():
            return value, ALL_BITS
        case {"|": [{"meta": {"key": "mark"}}, int(bits)]}:
            return bits, bits
        case {"&": [{"meta": {"key": "mark"}}, int(bits)]}:
            return 0, ALL_BITS ^ bits
        case {"^": [{"&": [{"meta": {"key": "mark"}}, int(bits)]}, int(toggled)]}:
            return toggled, ALL_BITS ^ bits
    return None


def _tests(left: Any, op: str, right: Any, family: Family, sets: Sets) -> list[Test]:
    """Return the tests of a comparison: the protocol of its header, and the comparison itself."""
    match left:
        case {"concat": [*parts]}:
            return [_any_of(parts, op, right, family, sets)]
        case {"exthdr": _}:  # no first packet of ours has an extension header
            return [replace(NEVER, negated=(right is False) != (op == "!="))]
        case {"payload": {"protocol": header}} | {"&": [{"payload": {"protocol": header}}, _]}:
            if header in _TRANSPORTS:
                implied = Test("protocol", (protocol_name(header),))
                return [implied, _test(left, op, right, family, sets)]
    return [_test(left, op, right, family, sets)]


def _any_of(parts: list[Any], op: str, right: Any, family: Family, sets: Sets) -> Test:
    """Return a test that one of several combinations fits."""
    listed = _listed_set(right, sets)
    if listed is None and isinstance(right, str):
        return UNKNOWN
    ways = []
    for element in [right] if listed is None else listed:
        values = _bare(element)["concat"]
        tests = (_tests(part, "==", value, family, sets) for part, value in zip(parts, values, strict=True))
        ways.append(tuple(test for each in tests for test in each))
    return Test("any", tuple(ways), op == "!=")


def _bare(element: Any) -> Any:
    """Return an element of a set without what it counts, and its timeout."""
    match element:
        case {"elem": {"val": value}}:
            return value
    return element


def _test(left: Any, op: str, right: Any, family: Family, sets: Sets) -> Test:
    masked = _masked_test(left, op, right)
    if masked is not None:
        return masked
    name, negated = _name(left), op == "!="
    if name.startswith((_OTHER_HEADER[family], "arp ")):
        return NEVER
    listed = _listed_set(right, sets)
    given = listed if listed is not None else right if isinstance(right, list) else [right]
    values = [_bare(each) for each in given]
    if name in ("meta nfproto", "meta protocol", "ether type"):
        is_ours = any(each in _FAMILY_NAMES[family] for each in values)
        return replace(NEVER, negated=is_ours != negated)
    if name in ("ct status", "ct direction"):  # of a new connection, without a translated address yet
        return Test("state", ("new",), negated) if "original" in values else replace(NEVER, negated=negated)
    if name == "tcp flags":
        return Test(
            "flags", tuple((_flags(each), _flags(each) if op == "in" else 255) for each in values), negated
        )
    field = _FIELDS.get(name, "")
    if op in ("<", "<=", ">", ">=") and field in ("sport", "dport") and isinstance(right, int):
        ranges = {"<": (0, right - 1), "<=": (0, right), ">": (right + 1, _PORTS), ">=": (right, _PORTS)}
        return Test(field, (ranges[op],))
    if op not in ("==", "!=") and not (op == "in" and name.startswith("ct ")):
        return UNKNOWN
    try:
        return Test(field, tuple(value for each in values for value in _values(field, each)), negated)
    except (KeyError, ValueError):
        return UNKNOWN  # such as a test of presence, or a set that is not in the listing


def _masked_test(left: Any, op: str, right: Any) -> Test | None:
    """Return the test of some bits: of a mark, of TCP's flags, or whether this is a later fragment."""
    match left, right:
        case {"&": [{"meta": {"key": "mark"}}, int(mask)]}, int(mark) if op in ("==", "!="):
            return Test("mark", ((mark, mask),), op == "!=")
        case {"&": [{"payload": {"protocol": "tcp", "field": "flags"}}, bits]}, _ if op in ("==", "!="):
            return Test("flags", ((_flags(right), _flags(bits)),), op == "!=")
        case {"&": [{"payload": {"protocol": "ip", "field": "frag-off"}}, _]}, 0:
            return replace(NEVER, negated=op == "==")
        case {"&": _}, _:
            return UNKNOWN
    return None


def _flags(given: Any) -> int:
    """Return the bits of TCP flags. Raises ``KeyError``."""
    match given:
        case int():
            return given
        case {"|": [*several]} | [*several]:
            bits = 0
            for each in several:
                bits |= _flags(each)
            return bits
    return TCP_FLAGS[given]


def _name(left: Any) -> str:
    """Return an expression in the words of nft(8)."""
    match left:
        case {"meta": {"key": key}}:
            return f"meta {key}"
        case {"ct": {"key": key}}:
            return f"ct {key}"
        case {"payload": {"protocol": protocol, "field": field}}:
            return f"{protocol} {field}"
        case {"fib": {"result": "type", "flags": flags}}:
            side = next((each for each in ("daddr", "saddr") if each in flags), "")
            return f"fib {side} type"
    return ""


def _values(field: str, given: Any) -> Iterator[Value]:
    """Yield the values that an element stands for. Raises ``ValueError``."""
    match field, given:
        case _, bool() | None:
            raise ValueError(f"{given} is no {field}")
        case _, str() if given.startswith("@"):
            raise ValueError(f"the set {given} is not listed")
        case "source" | "destination", _:
            yield from _networks(given)
        case "sport" | "dport", {"range": [int(low), int(high)]}:
            yield low, high
        case "sport" | "dport", int(port):
            yield port, port
        case "mark", int(mark):
            yield mark, ALL_BITS
        case _, int() | str() if field in _NAMED:
            yield _NAMED[field](given)
        case _:
            raise ValueError(f"{given} is no {field}")


def _networks(given: Any) -> Iterator[IPNetwork]:
    match given:
        case {"prefix": {"addr": str(address), "len": int(length)}}:
            yield ip_network(f"{address}/{length}")
        case {"range": [str(first), str(last)]}:
            yield from summarize_address_range(ip_address(first), ip_address(last))
        case str(address):
            yield ip_network(address)
        case _:
            raise ValueError(f"{given} is no network")
