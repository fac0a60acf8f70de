"""Rules in the syntax of iptables-restore and ``iptables -S`` (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from ipaddress import ip_network

from msgspec.structs import replace

from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.rules import ALL_BITS, Match, Rule

#: Match extensions whose options are parsed; their names add nothing to a rule.
_KNOWN_MATCHES = frozenset({"mark", "comment"})


def restore_text(edits: Iterable[Edit]) -> str:
    """Return the input of ``iptables-restore --noflush``: one block, and so one transaction, per table."""
    tables: dict[str, list[str]] = {}
    for edit in edits:
        tables.setdefault(edit.chain[0], []).extend(_lines(edit))
    return "".join(f"*{table}\n{''.join(lines)}COMMIT\n" for table, lines in tables.items())


def _lines(edit: Edit) -> Iterator[str]:
    chain = edit.chain[1]
    if edit.flush:
        yield f":{chain} - [0:0]\n"
    for flag, rules in (("-D", edit.delete), ("-I", edit.insert), ("-A", edit.append)):
        for rule in rules:
            yield f"{flag} {chain} {rule_text(rule)}\n"
    if edit.drop:
        yield f"-F {chain}\n-X {chain}\n"


def rule_text(rule: Rule) -> str:
    """Return our rule as text, with its options in Go flannel's order."""
    words = [*_side("-s", rule.source), *_side("-d", rule.destination)]
    if rule.mark:
        words.append(f"-m mark --mark {rule.mark[0]:#x}/{rule.mark[1]:#x}")
    if rule.comment:
        words.append(f'-m comment --comment "{rule.comment}"')
    words.append(f"-j {rule.verdict}")
    if rule.random:
        words.append("--random-fully")
    return " ".join(words)


def _side(flag: str, match: Match | None) -> list[str]:
    if match is None:
        return []
    return [f"{flag} {match.net}" if match.inside else f"! {flag} {match.net}"]


def rule_words(rule: Rule) -> list[str]:
    """Return our rule as command arguments."""
    return shlex.split(rule_text(rule))


def read_rules(listing: str) -> tuple[Rule, ...]:
    """Return the rules in the output of ``iptables -S CHAIN``."""
    lines = (line.split(" ", 2) for line in listing.splitlines())
    return tuple(read_rule(words[2] if len(words) > 2 else "") for words in lines if words[0] == "-A")


def read_rule(text: str) -> Rule:
    """Parse a rule printed by iptables. Parts that our rules never have are kept in ``extra``."""
    try:
        return _rule_of(shlex.split(text))
    except (ValueError, StopIteration):
        return Rule("", extra=text)


def _rule_of(listed: list[str]) -> Rule:
    rule, extra, inside = Rule(""), [], True
    words = iter(listed)
    for word in words:
        match word:
            case "!":
                inside = False
                continue
            case "-s":
                rule = replace(rule, source=Match(ip_network(next(words), strict=False), inside))
            case "-d":
                rule = replace(rule, destination=Match(ip_network(next(words), strict=False), inside))
            case "--mark" if inside:
                rule = replace(rule, mark=_mark(next(words)))
            case "--comment":
                rule = replace(rule, comment=next(words))
            case "-j":
                rule = replace(rule, verdict=next(words))
            case "--random-fully":
                rule = replace(rule, random=True)
            case "-m":
                extra += _unless_known(next(words))
            case _:
                extra += [word] if inside else ["!", word]
        inside = True
    return replace(rule, extra=" ".join(extra))


def _unless_known(extension: str) -> list[str]:
    return [] if extension in _KNOWN_MATCHES else ["-m", extension]


def _mark(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else ALL_BITS
