"""Parser of ``nft -j list table``: the rules of each chain (libnftables-json(5); pure)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from flanneld.network.firewall.verdicts.packet import (
    ACCEPT,
    DROP,
    GOTO,
    JUMP,
    RETURN,
    UNKNOWN,
    Chains,
    Step,
    Test,
    protocol_name,
)

_IDLE = frozenset({"counter", "log", "comment", "mangle", "notrack", "ct helper", "flow", "set", "limit_log"})
_VERDICTS = {"accept": ACCEPT, "drop": DROP, "reject": DROP, "return": RETURN, "jump": JUMP, "goto": GOTO}
_META = {"iifname": "iif", "iif": "iif", "oifname": "oif", "oif": "oif", "l4proto": "protocol"}
_PAYLOAD = {"saddr": "source", "daddr": "destination", "sport": "sport", "dport": "dport"}
_PAYLOAD |= {"protocol": "protocol", "nexthdr": "protocol"}
#: Names of an IP version: as nfproto, and as an Ethernet protocol.
_FAMILY_NAMES = {4: ("ipv4", "ip"), 6: ("ipv6", "ip6")}
#: Operators of a plain comparison; "in" is used for flags such as ct state.
_EQUAL, _UNEQUAL = ("==", "in"), "!="


def read(text: str, version: int) -> Chains:
    """Return the rules as they concern packets of an IP version. Raises ``ValueError``."""
    chains: dict[str, list[Step]] = {}
    try:
        for item in json.loads(text)["nftables"]:
            if "chain" in item:
                chains.setdefault(item["chain"]["name"], [])
            elif "rule" in item:
                rule = item["rule"]
                chains.setdefault(rule["chain"], []).extend(_steps(rule, version))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("nft lists a table in a way that is not understood") from error
    return {name: tuple(steps) for name, steps in chains.items()}


def _steps(rule: Mapping[str, Any], version: int) -> Iterator[Step]:
    """Yield the steps of a rule: one, and for a verdict map one for each of its elements."""
    text = str(rule["handle"])
    tests: list[Test] = []
    for statement in rule.get("expr", ()):
        (name, given), *_ = statement.items()
        if name == "match":
            tests.append(_test(given["left"], given["right"], given["op"], version))
        elif name in _VERDICTS:
            yield Step(text, tuple(tests), _VERDICTS[name], (given or {}).get("target", ""))
            return
        elif name == "vmap":
            yield from _mapped(text, tests, given, version)
            return
        elif name not in _IDLE:
            tests.append(UNKNOWN)
    yield Step(text, tuple(tests))


def _mapped(text: str, tests: list[Test], given: Mapping[str, Any], version: int) -> Iterator[Step]:
    data = given["data"]
    if not (isinstance(data, dict) and isinstance(data.get("set"), list)):
        yield Step(text, (*tests, UNKNOWN), ACCEPT)  # a named map, which may hold any verdict
        return
    for value, verdict in data["set"]:
        (name, target), *_ = verdict.items()
        test = _test(given["key"], value, "==", version)
        yield Step(text, (*tests, test), _VERDICTS.get(name, ACCEPT), (target or {}).get("target", ""))


def _test(left: Any, right: Any, op: str, version: int) -> Test:
    if op not in _EQUAL and op != _UNEQUAL:
        return UNKNOWN
    negated = op == _UNEQUAL
    match left:
        case {"meta": {"key": "nfproto" | "protocol"}}:
            return _of_family(right in _FAMILY_NAMES[version], negated=negated)
        case {"meta": {"key": key}} if key in _META:
            return _compared(_META[key], right, negated=negated)
        case {"ct": {"key": "state"}}:
            return _compared("state", right, negated=negated)
        case {"ct": {"key": "status"}}:
            return Test("state", (), negated)  # new connections have no translated address yet
        case {"fib": {"result": "type", "flags": ["daddr"] | "daddr"}}:
            return _compared("destination_type", right, negated=negated)
        case {"payload": {"protocol": "ip" | "ip6" as protocol, "field": field}}:
            if (protocol == "ip") != (version == 4):
                return Test("state")  # of the other family: never true
            return _compared(_PAYLOAD.get(field, ""), right, negated=negated)
        case {"payload": {"protocol": "udp" | "tcp" | "th", "field": field}} if field in _PAYLOAD:
            return _compared(_PAYLOAD[field], right, negated=negated)
    return UNKNOWN


def _of_family(is_ours: bool, *, negated: bool) -> Test:
    return Test("state", ("new",) if is_ours else (), negated)


def _compared(field: str, right: Any, *, negated: bool) -> Test:
    if isinstance(right, dict) and "set" in right:
        right = right["set"]
    values = [_value(field, each) for each in (right if isinstance(right, list) else [right])]
    if not field or None in values:
        return UNKNOWN
    return Test(field, tuple(value for value in values if value is not None), negated)


def _value(field: str, given: Any) -> Any:
    """Return a value as ``Test`` has it, None if it is not understood."""
    match given:
        case {"elem": {"val": value}}:
            return _value(field, value)
        case {"prefix": {"addr": str(address), "len": int(length)}}:
            return ip_network(f"{address}/{length}")
        case {"range": [int(low), int(high)]}:
            return low, high
        case bool():
            return None
        case int() if field in ("sport", "dport"):
            return given, given
        case int() | str() if field == "protocol":
            return protocol_name(given)
        case str() if given.startswith("@"):
            return None
        case str() if field in ("source", "destination"):
            return ip_network(given)
        case str() if field in ("iif", "oif", "state", "destination_type"):
            return given
    return None
