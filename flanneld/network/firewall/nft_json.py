"""Rules in the JSON of libnftables, libnftables-json(5) (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from msgspec import Struct, ValidationError, convert

from flanneld.model import Family, IPNetwork
from flanneld.network.firewall import fate
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.fate import UNKNOWN, Chains, Step, Test, protocol_name
from flanneld.network.firewall.rules import (
    ACCEPT,
    ALL_BITS,
    MASQUERADE,
    NATIVE_FORWARD,
    NATIVE_POSTRTG,
    NATIVE_TABLE,
    NFT_FAMILY,
    RETURN,
    Chain,
    Match,
    Rule,
    Rules,
)

JsonCommand = dict[str, Any]

#: Hooks of our chains. The policy accepts packets that no rule matches.
_HOOKS: Mapping[str, Mapping[str, Any]] = {
    NATIVE_FORWARD: {"type": "filter", "hook": "forward", "prio": 0, "policy": "accept"},
    NATIVE_POSTRTG: {"type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"},
}
_VERDICTS = {"accept": ACCEPT, "return": RETURN, "masquerade": MASQUERADE}
_STATEMENTS = {verdict: statement for statement, verdict in _VERDICTS.items()}
_FULLY_RANDOM = ("fully-random", ["fully-random"])
#: Objects at the head of a listing.
_HEADS = frozenset({"metainfo", "table"})
#: Statements of our rules, those that affect no packet's walk, and those that end it.
_OURS = frozenset({"match", "counter", "accept", "return", "masquerade"})
_IDLE = frozenset({"counter", "log", "comment", "mangle", "notrack", "ct helper", "flow", "set", "limit_log"})
_ACTS = {
    "accept": fate.ACCEPT,
    "masquerade": fate.ACCEPT,
    "drop": fate.DROP,
    "reject": fate.DROP,
    "return": fate.RETURN,
    "jump": fate.JUMP,
    "goto": fate.GOTO,
    "continue": "",
}
#: Expressions, in the words of nft(8), and the property of a packet that each is.
_FIELDS = {
    "meta iif": "iif",
    "meta iifname": "iif",
    "meta oif": "oif",
    "meta oifname": "oif",
    "meta mark": "mark",
    "meta l4proto": "protocol",
    "ip protocol": "protocol",
    "ip6 nexthdr": "protocol",
    "ct state": "state",
    "fib daddr type": "destination_type",
    **{f"{header} saddr": "source" for header in ("ip", "ip6")},
    **{f"{header} daddr": "destination" for header in ("ip", "ip6")},
    **{f"{header} {port}": port for header in ("udp", "tcp", "th") for port in ("sport", "dport")},
}
#: Names of an IP version: as nfproto, and as an Ethernet protocol. Start of the other's expressions.
_FAMILY_NAMES: Mapping[Family, tuple[str, str]] = {4: ("ipv4", "ip"), 6: ("ipv6", "ip6")}
_OTHER_HEADER: Mapping[Family, str] = {4: "ip6 ", 6: "ip "}

#: Kernel handles of the rules in each chain, by which they are deleted.
Handles = dict[tuple[Chain, Rule], list[int]]


class NftablesListing(Struct, frozen=True, gc=False):
    """Contents of our table; ``others`` is True if it has chains, sets or maps that are not flannel's."""

    rules: Rules
    handles: Handles
    others: bool


def table(family: Family) -> JsonCommand:
    return {"family": NFT_FAMILY[family], "name": NATIVE_TABLE[family]}


class ListedRule(Struct, frozen=True, gc=False):
    """A rule as it is listed; ``handle`` is unique in its table."""

    chain: str
    handle: int
    expr: list[dict[str, Any]] = []
    comment: str = ""


def listed(answer: Any) -> tuple[dict[str, list[ListedRule]], bool]:
    """Parse the answer to ``list table``. Raises ``ValueError`` for anything else.

    Returns the rules of each chain, and True if there are sets, maps or other objects.
    """
    chains: dict[str, list[ListedRule]] = {}
    others = False
    try:
        for item in answer["nftables"]:
            match item:
                case {"chain": {"name": str(name)}}:
                    chains[name] = []
                case {"rule": given}:
                    rule = convert(given, ListedRule)
                    chains[rule.chain].append(rule)
                case _:
                    others = others or item.keys().isdisjoint(_HEADS)
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise ValueError("a table is listed in a way that is not understood") from error
    return chains, others


def read_listing(family: Family, answer: Any) -> NftablesListing:
    """Parse the answer to ``list table`` for our table. Raises ``ValueError`` for anything else."""
    chains, others = listed(answer)
    rules: dict[Chain, tuple[Rule, ...]] = {}
    handles: Handles = {}
    for name, there in chains.items():
        if name in _HOOKS:
            chain = NATIVE_TABLE[family], name
            rules[chain] = tuple(read_rule(given, family) for given in there)
            for rule, given in zip(rules[chain], there, strict=True):
                handles.setdefault((chain, rule), []).append(given.handle)
    return NftablesListing(rules, handles, others or len(rules) < len(chains))


def commands(family: Family, edits: Iterable[Edit], listing: NftablesListing) -> list[JsonCommand]:
    """Return the commands of one transaction."""
    edits = tuple(edits)
    drops = {edit.chain for edit in edits if edit.drop}
    if drops and not listing.others and drops == set(listing.rules):
        return [{"delete": {"table": table(family)}}]
    made = [{"add": {"table": {**table(family), "comment": "rules of flanneld"}}}]
    return made + [command for edit in edits for command in _commands(family, edit, listing.handles)]


def _commands(family: Family, edit: Edit, handles: Handles) -> Iterator[JsonCommand]:
    name = edit.chain[1]
    place = {"family": NFT_FAMILY[family], "table": edit.chain[0]}
    if edit.drop:
        yield {"flush": {"chain": {**place, "name": name}}}
        yield {"delete": {"chain": {**place, "name": name}}}
        return
    if edit.flush:
        yield {"add": {"chain": {**place, "name": name, **_HOOKS[name]}}}
        yield {"flush": {"chain": {**place, "name": name}}}
    for rule in dict.fromkeys(edit.delete):
        for handle in handles.get((edit.chain, rule), ()):
            yield {"delete": {"rule": {**place, "chain": name, "handle": handle}}}
    for verb, rules in (("insert", edit.insert), ("add", edit.append)):
        for rule in rules:
            yield {verb: {"rule": {**place, "chain": name, **rule_json(family, rule)}}}


def rule_json(family: Family, rule: Rule) -> JsonCommand:
    """Return the JSON of one of our rules."""
    statements = [_side(family, "saddr", rule.source), _side(family, "daddr", rule.destination)]
    if rule.mark:
        value, mask = rule.mark
        left = {"&": [{"meta": {"key": "mark"}}, mask]}
        statements.append({"match": {"op": "==", "left": left, "right": value}})
    flags = {"flags": "fully-random"} if rule.random else None
    statements.append({_STATEMENTS[rule.verdict]: flags})
    return {"expr": [statement for statement in statements if statement], "comment": rule.comment}


def _side(family: Family, field: str, match: Match | None) -> JsonCommand | None:
    if match is None:
        return None
    left = {"payload": {"protocol": NFT_FAMILY[family], "field": field}}
    right = {"prefix": {"addr": str(match.net.network_address), "len": match.net.prefixlen}}
    return {"match": {"op": "==" if match.inside else "!=", "left": left, "right": right}}


def read_rule(given: ListedRule, family: Family) -> Rule:
    """Parse a rule of our table. ``extra`` names the parts that our rules never have."""
    return next(read_steps(given, family), Step("", (UNKNOWN,))).as_rule()


def read_chains(text: str, family: Family) -> Chains:
    """Return the rules in the output of ``nft -j list table`` as they concern a family's packets.

    Raises ``ValueError``.
    """
    chains, _ = listed(json.loads(text))
    return {
        name: tuple(step for rule in rules for step in read_steps(rule, family))
        for name, rules in chains.items()
    }


def read_steps(rule: ListedRule, family: Family) -> Iterator[Step]:
    """Yield the steps of a rule: one, and for a verdict map one for each of its elements."""
    tests: list[Test] = []
    rest: list[str] = []
    for statement in rule.expr:
        (name, given), *_ = statement.items()
        rest += [] if name in _OURS else [name]
        match name, given:
            case "match", {"left": left, "op": op, "right": right}:
                tests.append(_test(left, op, right, family))
            case "vmap", {"key": key, "data": {"set": elements}}:
                for value, verdict in convert(elements, list[tuple[Any, dict[str, Any]]]):
                    yield _step(rule, [*tests, _test(key, "==", value, family)], verdict, rest)
                return
            case "vmap" | "queue", _:  # a named map, or a program: any verdict
                yield _step(rule, [*tests, UNKNOWN], statement, rest)
                return
            case _ if name in _ACTS:
                yield _step(rule, tests, statement, rest)
                return
            case _ if name not in _IDLE:
                tests.append(UNKNOWN)
    yield _step(rule, tests, {"continue": None}, rest)


def _step(rule: ListedRule, tests: list[Test], verdict: Mapping[str, Any], rest: list[str]) -> Step:
    (name, given), *_ = verdict.items()
    given = given if isinstance(given, dict) else {}
    random = given.get("flags") in _FULLY_RANDOM
    if given and not random:
        rest = [*rest, *given]
    target = _VERDICTS.get(name) or str(given.get("target", ""))
    act = _ACTS.get(name, fate.ACCEPT)
    return Step(str(rule.handle), tuple(tests), act, target, rule.comment, random, " ".join(rest))


def _test(left: Any, op: str, right: Any, family: Family) -> Test:
    mask = ALL_BITS
    match left:
        case {"&": [{"meta": {"key": "mark"}} as left, int(mask)]}:
            pass
    name, negated = _name(left), op == "!="
    values = right["set"] if isinstance(right, dict) and "set" in right else right
    values = values if isinstance(values, list) else [values]
    if op not in ("==", "!=") and not (op == "in" and name.startswith("ct ")):
        return UNKNOWN
    if name.startswith(_OTHER_HEADER[family]):
        return Test("state")  # never true
    if name in ("meta nfproto", "meta protocol"):
        is_ours = any(each in _FAMILY_NAMES[family] for each in values)
        return Test("state", ("new",) if is_ours else (), negated)
    if name == "ct status":
        return Test("state", (), negated)  # new connections have no translated address yet
    if any(isinstance(each, bool) or str(each).startswith("@") for each in values):
        return UNKNOWN  # a test of presence, or a named set
    try:
        return Test(_FIELDS[name], tuple(_value(_FIELDS[name], each, mask) for each in values), negated)
    except (KeyError, ValueError):
        return UNKNOWN


def _name(left: Any) -> str:
    """Return an expression in the words of nft(8)."""
    match left:
        case {"meta": {"key": key}}:
            return f"meta {key}"
        case {"ct": {"key": key}}:
            return f"ct {key}"
        case {"payload": {"protocol": protocol, "field": field}}:
            return f"{protocol} {field}"
        case {"fib": {"result": "type", "flags": ["daddr"] | "daddr"}}:
            return "fib daddr type"
    return ""


def _value(field: str, given: Any, mask: int) -> str | IPNetwork | tuple[int, int]:
    match field, given:
        case _, {"elem": {"val": value}}:
            return _value(field, value, mask)
        case "source" | "destination", {"prefix": {"addr": str(address), "len": int(length)}}:
            return ip_network(f"{address}/{length}")
        case "source" | "destination", str(address):
            return ip_network(address)
        case "sport" | "dport", {"range": [int(low), int(high)]}:
            return low, high
        case "sport" | "dport", int(port):
            return port, port
        case "mark", int(mark):
            return mark, mask
        case "protocol", int() | str():
            return protocol_name(given)
        case "iif" | "oif" | "state" | "destination_type", str():
            return str(given)
    raise ValueError(f"{given} is no {field}")
