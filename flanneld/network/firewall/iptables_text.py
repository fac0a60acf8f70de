"""Rules in the syntax of iptables-restore, iptables-save and ``iptables -S`` (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network, summarize_address_range
from itertools import takewhile

from msgspec.structs import replace

from flanneld.model import IPNetwork
from flanneld.network.firewall.fate import (
    ALL_BITS,
    DROP,
    MARK,
    NEVER,
    NOTRACK,
    TCP_FLAGS,
    UNKNOWN,
    UNKNOWN_VERDICT,
    Chains,
    LazyChains,
    Rule,
    Test,
    icmp_name,
    protocol_name,
)
from flanneld.network.firewall.rules import Edit

#: Options that are parsed: the property of a packet that each is about.
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
    "--ports": "port",
    "--src-range": "source",
    "--dst-range": "destination",
    "--ctstate": "state",
    "--state": "state",
    "--dst-type": "destination_type",
    "--src-type": "source_type",
    "--pkt-type": "pkttype",
    "--icmp-type": "icmp",
    "--icmpv6-type": "icmp",
    "--mark": "mark",
}
#: Options with exactly one value, which may be any text. Others have the words up to the next option.
_ONE_VALUE = frozenset(
    {*_FIELDS, "-m", "-j", "-g", "--comment", "--log-prefix", "--nflog-prefix", "--string", "--hex-string"}
)
#: Match extensions whose options are parsed; their names add nothing to a rule.
_EXTENSIONS = frozenset(
    {
        "addrtype",
        "comment",
        "conntrack",
        "icmp",
        "icmp6",
        "iprange",
        "mark",
        "multiport",
        "physdev",
        "pkttype",
    }
    | {"set", "state", "tcp", "udp"}
)
#: Options about packets that a bridge passes on, and about fragments: no first packet that is routed. One may
#: have come in by a port of a bridge.
_OF_OTHER_PACKETS = frozenset({"-f", "--physdev-is-bridged", "--physdev-is-out", "--physdev-out"})

#: Dimensions and elements of each set of ipset(8), such as "ip,port" and "192.0.2.1,udp:8472".
IpSets = Mapping[str, tuple[str, list[str]]]
_NO_SETS: IpSets = {}
#: Elements of a set that are read. Each rule about it has them, and lists of hostile hosts have a million.
_MOST_ELEMENTS = 10_000


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
    """Return our rule as text, with its options in Go flannel's order. Only nftables has several networks."""
    words: list[str] = []
    for test in rule.tests:
        match test:
            case Test("source" | "destination" as side, (net, *more), negated):
                words.append(f"{'! ' if negated else ''}{'-s' if side == 'source' else '-d'} {net}")
                words += [f"(and {len(more)} more)"] if more else []
            case Test("mark", ((int(value), int(mask)),)):
                words.append(f"-m mark --mark {value:#x}/{mask:#x}")
    if rule.comment:
        words.append(f'-m comment --comment "{rule.comment}"')
    words.append(f"-j {rule.verdict}")
    if rule.random:
        words.append("--random-fully")
    return " ".join(words)


def rule_words(rule: Rule) -> list[str]:
    """Return our rule as command arguments."""
    return shlex.split(rule_text(rule))


def read_rules(listing: str) -> tuple[Rule, ...]:
    """Return the rules in the output of ``iptables -S CHAIN``."""
    chains, _ = read_table(listing)
    return tuple(rule.without_text() for rules in chains.values() for rule in rules)


def read_ipsets(listing: str) -> IpSets:
    """Return the sets in the output of ``ipset save``. What is not understood has elements that are none.

    A set that is too large is not complete, and counts as one with unknown elements.
    """
    sets: dict[str, tuple[str, list[str]]] = {}
    for line in listing.split("\n"):
        match line.split(" "):
            case ["create", name, kind, *options]:
                is_masked = "netmask" in options or "bitmask" in options
                sets[name] = "" if is_masked else kind.partition(":")[2], []
            case ["add", name, element, *options] if len(sets[name][1]) <= _MOST_ELEMENTS:
                sets[name][1].append("nomatch" if "nomatch" in options else element)
    return sets


def read_table(listing: str, sets: IpSets = _NO_SETS) -> tuple[Chains, dict[str, str]]:
    """Return the rules and the policies in the output of ``iptables-save -t TABLE``.

    A policy is the target's name, ``-`` for none. A set that is not in ``sets`` has unknown elements.
    """
    chains: dict[str, list[str]] = {}
    policies: dict[str, str] = {}
    for line in listing.split("\n"):  # a comment may contain other line ends
        if line.startswith(":"):
            name, policy, *_ = line[1:].split()
            chains[name], policies[name] = [], policy
        elif line.startswith("-A "):
            chains.setdefault(line.split(" ", 2)[1], []).append(line)
    return LazyChains(chains, lambda lines: tuple(_read_rule(line, sets) for line in lines)), policies


def _read_rule(line: str, sets: IpSets) -> Rule:
    rule, tests = Rule(text=line), list[Test]()
    try:
        for name, values, negated in _options("".join(line.split(" ", 2)[2:])):
            if rule.verdict:
                rule = _with_option(rule, name, values)
            elif name in ("-j", "-g"):
                (verdict,) = values
                rule = replace(rule, verdict=MARK if verdict == "HMARK" else verdict, is_goto=name == "-g")
            elif name == "--comment":
                rule = replace(rule, comment=values[0])
            elif name != "-m" or values[0] not in _EXTENSIONS:
                tests.append(_condition(name, values, sets, negated=negated))
    except ValueError:
        return Rule(UNKNOWN_VERDICT, (UNKNOWN,), text=line)
    return replace(rule, tests=tuple(tests))


def _with_option(rule: Rule, name: str, values: tuple[str, ...]) -> Rule:
    """Return a rule with an option of its target."""
    if name == "--random-fully":
        return replace(rule, random=True)
    if name == "--set-xmark":
        rule = replace(rule, new_mark=_mark(*values))
    if name in ("--notrack", "--restore-mark"):
        rule = replace(rule, verdict=NOTRACK if name == "--notrack" else MARK)
    if name in ("--ttl-set", "--hl-set") and values[0] in ("0", "1"):
        rule = replace(rule, verdict=DROP)  # by the next router, which is the peer
    return replace(rule, extra=f"{rule.extra} {name}".strip())


def _condition(name: str, values: tuple[str, ...], sets: IpSets, *, negated: bool) -> Test:
    if name == "--match-set" and len(values) == 2:
        return _in_set(values[0], values[1], sets, negated=negated)
    if name in _OF_OTHER_PACKETS:
        return replace(NEVER, negated=negated)
    if name == "--tcp-flags" and len(values) == 2:
        return Test("flags", ((_flags(values[1]), _flags(values[0])),), negated)
    return _test(_FIELDS[name], *values, negated=negated) if name in _FIELDS else UNKNOWN


def _in_set(name: str, sides: str, sets: IpSets, *, negated: bool = False) -> Test:
    """Return the test that a set has a packet's properties of these sides, ``src`` or ``dst`` each."""
    dimensions, elements = sets.get(name, ("", ["unknown"]))
    if len(elements) > _MOST_ELEMENTS:
        return UNKNOWN
    try:
        if dimensions in ("ip", "net") and elements:
            side = "source" if sides.startswith("src") else "destination"
            return _test(side, ",".join(elements), negated=negated)
        ways = tuple(tuple(_in_element(dimensions, each, sides, sets)) for each in elements)
    except ValueError:
        return UNKNOWN
    return Test("any", ways, negated)


def _in_element(dimensions: str, element: str, sides: str, sets: IpSets) -> Iterator[Test]:
    for kind, value, side in zip(dimensions.split(","), element.split(","), sides.split(","), strict=False):
        is_source = side == "src"
        match kind:
            case "ip" | "net":
                yield _test("source" if is_source else "destination", value, negated=False)
            case "port":
                protocol, _, port = value.rpartition(":")
                yield from [_test("protocol", protocol, negated=False)] if protocol else ()
                yield _test("sport" if is_source else "dport", port.replace("-", ":"), negated=False)
            case "iface":
                yield Test("iif" if is_source else "oif", (value,))
            case "set":
                yield _in_set(value, sides, sets)
            case _:
                yield UNKNOWN


def _options(rule: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield name and values of each option, and True if it is negated. Raises ``ValueError``."""
    words = shlex.split(rule)
    while words:
        negated = words[0] == "!"
        name, *rest = words[negated:]
        count = 1 if name in _ONE_VALUE else sum(1 for _ in takewhile(_is_value, rest))
        if len(rest) < count:
            raise ValueError(f"{name} has no value")
        yield name, tuple(rest[:count]), negated
        words = rest[count:]


def _is_value(word: str) -> bool:
    return word != "!" and not word.startswith("-")


def _test(field: str, value: str, *, negated: bool) -> Test:
    match field:
        case "iif" | "oif":
            return Test(field, (f"{value[:-1]}*" if value.endswith("+") else value,), negated)
        case "source" | "destination":
            return Test(field, tuple(_networks(value)), negated)
        case "sport" | "dport" | "port":
            return Test(field, tuple(map(_ports, value.split(","))), negated)
        case "protocol":
            return Test(field, (protocol_name(value),), negated)
        case "mark":
            return Test(field, (_mark(value),), negated)
        case "icmp":
            return Test(field, (icmp_name(value.partition("/")[0]),), negated)
        case "pkttype":
            return Test(field, (value.replace("host", "unicast"),), negated)
    return Test(field, tuple(value.lower().split(",")), negated)


def _networks(text: str) -> Iterator[IPNetwork]:
    first, dash, last = text.partition("-")
    if dash:
        yield from summarize_address_range(ip_address(first), ip_address(last))
    else:
        yield from (ip_network(each, strict=False) for each in text.split(","))


def _mark(text: str) -> tuple[int, int]:
    mark, _, mask = text.partition("/")
    return int(mark, 0), int(mask, 0) if mask else ALL_BITS


def _flags(text: str) -> int:
    return sum(TCP_FLAGS.get(each, 0) for each in text.lower().split(","))


def _ports(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    return (int(low or 0), int(high or 65535)) if colon else (int(low), int(low))
