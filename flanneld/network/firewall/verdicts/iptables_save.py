"""Parser of the output of iptables-save: policies and rules of each chain (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from ipaddress import ip_network

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

#: Targets that end the walk through a table, and those that let packets pass on.
_VERDICTS = {"ACCEPT": ACCEPT, "DROP": DROP, "REJECT": DROP, "RETURN": RETURN}
_PASSES_ON = frozenset(
    {"LOG", "NFLOG", "TRACE", "MARK", "CONNMARK", "SECMARK", "CONNSECMARK", "CLASSIFY", "CT", "NOTRACK"}
    | {"TCPMSS", "TOS", "DSCP", "TTL", "HL", "CHECKSUM"}
)
_FIELDS = {
    "-i": "iif",
    "-o": "oif",
    "-s": "source",
    "-d": "destination",
    "-p": "protocol",
    "--dport": "dport",
    "--sport": "sport",
    "--dports": "dport",
    "--sports": "sport",
    "--ctstate": "state",
    "--state": "state",
    "--dst-type": "destination_type",
}
#: Extensions whose options are parsed, or that have none that matter.
_KNOWN = frozenset({"udp", "tcp", "icmp", "comment", "conntrack", "state", "multiport", "addrtype"})
_IDLE = {"--comment": 1, "--reject-with": 1}


def read(text: str) -> tuple[Chains, dict[str, str]]:
    """Return the rules and the policies of one table. A policy is the target's name, ``-`` for none."""
    chains: dict[str, list[Step]] = {}
    policies: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith(":"):
            name, policy, *_ = line[1:].split()
            chains[name], policies[name] = [], policy
        elif line.startswith("-A "):
            _, chain, *rest = line.split(" ", 2)
            chains.setdefault(chain, []).append(_step(line, rest[0] if rest else ""))
    return {name: tuple(steps) for name, steps in chains.items()}, policies


def _step(line: str, rule: str) -> Step:
    try:
        return _parsed(line, shlex.split(rule))
    except (ValueError, StopIteration):
        return Step(line, (UNKNOWN,), ACCEPT)  # it may end the walk


def _parsed(line: str, listed: list[str]) -> Step:
    tests: list[Test] = []
    act, target, negated = "", "", False
    words = iter(listed)
    for word in words:
        if word == "!":
            negated = True
            continue
        if word in _FIELDS:
            tests.append(_test(_FIELDS[word], next(words), negated=negated))
        elif word in ("-j", "-g"):
            target = next(words)
            act = _act(word, target)
        elif word in _IDLE:
            next(words)
        elif word == "-m":
            if next(words) not in _KNOWN:
                tests.append(UNKNOWN)
        elif not act:
            tests.append(UNKNOWN)
        negated = False
    return Step(line, tuple(tests), act, target)


def _act(word: str, target: str) -> str:
    if target in _PASSES_ON:
        return ""
    return _VERDICTS.get(target) or (GOTO if word == "-g" else JUMP)


def _test(field: str, value: str, *, negated: bool) -> Test:
    if field in ("source", "destination"):
        return Test(field, tuple(ip_network(each, strict=False) for each in value.split(",")), negated)
    if field in ("sport", "dport"):
        return Test(field, tuple(_ports(value)), negated)
    if field in ("state", "destination_type"):
        return Test(field, tuple(value.lower().split(",")), negated)
    if field == "protocol":
        return Test(field, (protocol_name(value),), negated)
    return Test(field, (f"{value[:-1]}*" if value.endswith("+") else value,), negated)


def _ports(text: str) -> Iterator[tuple[int, int]]:
    for each in text.split(","):
        low, colon, high = each.partition(":")
        yield int(low or 0), int(high or 65535) if colon else int(low)
