"""Rules in the JSON of libnftables, libnftables-json(5) (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.rules import (
    ACCEPT,
    ALL_BITS,
    MASQUERADE,
    NATIVE_FORWARD,
    NATIVE_POSTRTG,
    NATIVE_TABLE,
    RETURN,
    Chain,
    Match,
    Rule,
    Rules,
)

JsonCommand = dict[str, Any]

_PROTOCOL: Mapping[Family, str] = {4: "ip", 6: "ip6"}
#: Hooks of our chains. The policy accepts packets that no rule matches.
_HOOKS: Mapping[str, Mapping[str, Any]] = {
    NATIVE_FORWARD: {"type": "filter", "hook": "forward", "prio": 0, "policy": "accept"},
    NATIVE_POSTRTG: {"type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"},
}
_VERDICTS = {"accept": ACCEPT, "return": RETURN, "masquerade": MASQUERADE}
_STATEMENTS = {verdict: statement for statement, verdict in _VERDICTS.items()}
_FULLY_RANDOM = ("fully-random", ["fully-random"])

#: Kernel handles of the rules in each chain, by which they are deleted.
Handles = dict[tuple[Chain, Rule], list[int]]


class NftablesListing(Struct, frozen=True, gc=False):
    """Contents of our table; ``others`` is True if it has chains, sets or maps that are not flannel's."""

    rules: Rules
    handles: Handles
    others: bool


def table(family: Family) -> JsonCommand:
    return {"family": _PROTOCOL[family], "name": NATIVE_TABLE[family]}


def read_listing(family: Family, answer: Mapping[str, Any]) -> NftablesListing:
    """Parse the answer to ``list table``. Raises ``ValueError`` for anything else."""
    try:
        return _read_listing(family, answer)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("a table is listed in a way that is not understood") from error


def _read_listing(family: Family, answer: Mapping[str, Any]) -> NftablesListing:
    rules: dict[Chain, list[Rule]] = {}
    handles: Handles = {}
    others = False
    for item in answer["nftables"]:
        match item:
            case {"chain": {"name": name}} if name in _HOOKS:
                rules[NATIVE_TABLE[family], name] = []
            case {"chain": _} | {"set": _} | {"map": _}:
                others = True
            case {"rule": {"chain": name, "handle": handle} as given} if name in _HOOKS:
                chain, rule = (NATIVE_TABLE[family], name), read_rule(given)
                rules[chain].append(rule)
                handles.setdefault((chain, rule), []).append(handle)
    return NftablesListing({chain: tuple(there) for chain, there in rules.items()}, handles, others)


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
    place = {"family": _PROTOCOL[family], "table": edit.chain[0]}
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
    left = {"payload": {"protocol": _PROTOCOL[family], "field": field}}
    right = {"prefix": {"addr": str(match.net.network_address), "len": match.net.prefixlen}}
    return {"match": {"op": "==" if match.inside else "!=", "left": left, "right": right}}


def read_rule(given: Mapping[str, Any]) -> Rule:
    """Parse a listed rule. Parts that our rules never have are kept in ``extra``."""
    rule = Rule("", comment=given.get("comment", ""))
    extra = []
    for statement in given.get("expr", ()):
        understood = _read_statement(rule, statement)
        if understood is None:
            extra.append(str(statement))
        else:
            rule = understood
    return replace(rule, extra=" ".join(extra))


def _read_statement(rule: Rule, statement: Any) -> Rule | None:
    """Return the rule with one statement added, None if our rules have no such statement."""
    match statement:
        case {"counter": _}:
            return rule
        case {"accept": _} | {"return": _} | {"masquerade": None}:
            return replace(rule, verdict=_VERDICTS[next(iter(statement))])
        case {"masquerade": {"flags": flags}} if flags in _FULLY_RANDOM:
            return replace(rule, verdict=MASQUERADE, random=True)
        case {"match": {"op": op, "left": {"payload": {"field": field}}, "right": right}}:
            return _read_side(rule, op, field, right)
        case {"match": {"op": "==", "left": left, "right": int(value)}}:
            return _read_mark(rule, left, value)
    return None


def _read_side(rule: Rule, op: str, field: str, right: Any) -> Rule | None:
    net = _read_net(right)
    if net is None or op not in ("==", "!="):
        return None
    match = Match(net, op == "==")
    return {
        "saddr": replace(rule, source=match),
        "daddr": replace(rule, destination=match),
    }.get(field)


def _read_mark(rule: Rule, left: Any, value: int) -> Rule | None:
    match left:
        case {"meta": {"key": "mark"}}:
            return replace(rule, mark=(value, ALL_BITS))
        case {"&": [{"meta": {"key": "mark"}}, int(mask)]}:
            return replace(rule, mark=(value, mask))
    return None


def _read_net(right: Any) -> IPNetwork | None:
    try:
        match right:
            case {"prefix": {"addr": str(address), "len": int(length)}}:
                return ip_network(f"{address}/{length}")
            case str(address):
                return ip_network(address)
    except ValueError:
        return None
    return None
