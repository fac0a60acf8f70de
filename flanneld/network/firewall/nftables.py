"""Driver for nftables: rules in a table of our own, in the JSON of libnftables, libnftables-json(5)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert

from flanneld.errors import install_command
from flanneld.model import Family, IPNetwork
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.network.firewall.fate import UNKNOWN, Rule, Test
from flanneld.network.firewall.nft_json import VERDICTS, JsonCommand, ListedRule, understood
from flanneld.network.firewall.rules import (
    NATIVE_FORWARD,
    NATIVE_POSTRTG,
    NATIVE_TABLE,
    NFT_FAMILY,
    Chain,
    Edit,
    Rules,
)

_LIBRARY = "libnftables.so.1"
#: Table in which rules are tried.
_TRIAL = "flannel-trial"

#: Hooks of our chains. The policy accepts packets that no rule matches.
_HOOKS: Mapping[str, Mapping[str, Any]] = {
    NATIVE_FORWARD: {"type": "filter", "hook": "forward", "prio": 0, "policy": "accept"},
    NATIVE_POSTRTG: {"type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"},
}
#: Objects at the head of a listing.
_HEADS = frozenset({"metainfo", "table"})
_STATEMENTS = {verdict: statement for statement, verdict in VERDICTS.items()}

#: Held while the library runs: each network namespace has one context of it, for one thread at a time.
_TURN = threading.Lock()

#: Kernel handles of the rules in each chain, by which they are deleted.
Handles = dict[tuple[Chain, Rule], list[int]]


class NftablesListing(Struct, frozen=True, gc=False):
    """Contents of our table; ``others`` is True if it has chains, sets or maps that are not flannel's."""

    rules: Rules
    handles: Handles
    others: bool


def table_json(family: Family) -> JsonCommand:
    return {"family": NFT_FAMILY[family], "name": NATIVE_TABLE[family]}


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
        return [{"delete": {"table": table_json(family)}}]
    made = [{"add": {"table": {**table_json(family), "comment": "rules of flanneld"}}}]
    return made + [command for edit in edits for command in _chain_commands(family, edit, listing.handles)]


def _chain_commands(family: Family, edit: Edit, handles: Handles) -> Iterator[JsonCommand]:
    """Yield the commands of one edit."""
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
    statements: list[JsonCommand] = []
    for test in rule.tests:
        match test:
            case Test("source" | "destination" as side, values, negated):
                left = {"payload": {"protocol": NFT_FAMILY[family], "field": f"{side[0]}addr"}}
                elements = [
                    _network_json(net) for net in values if isinstance(net, IPv4Network | IPv6Network)
                ]
                right = elements[0] if len(elements) == 1 else {"set": elements}
                statements.append({"match": {"op": "!=" if negated else "==", "left": left, "right": right}})
            case Test("mark", ((value, mask),)):
                bits = {"&": [{"meta": {"key": "mark"}}, mask]}
                statements.append({"match": {"op": "==", "left": bits, "right": value}})
    flags = {"flags": "fully-random"} if rule.random else None
    statements.append({_STATEMENTS[rule.verdict]: flags})
    return {"expr": statements, "comment": rule.comment}


def _network_json(net: IPNetwork) -> JsonCommand | str:
    address = str(net.network_address)
    return (
        address if net.prefixlen == net.max_prefixlen else {"prefix": {"addr": address, "len": net.prefixlen}}
    )


def read_rule(given: ListedRule, family: Family) -> Rule:
    """Parse a rule of our table. ``extra`` names the parts that our rules never have."""
    return next(iter(understood(given, family)), Rule(tests=(UNKNOWN,))).without_text()


class Nftables:
    """Driver for the table ``ip flannel-ipv4`` or ``ip6 flannel-ipv6``; for one thread.

    Raises ``Unavailable``.
    """

    name = "nftables"

    def __init__(self, family: Family) -> None:
        load()
        self._family = family
        self._listing = NftablesListing({}, {}, others=False)

    def read(self) -> Rules:
        self._listing = self._list()
        return self._listing.rules

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply edits planned from the last ``read`` in one transaction."""
        run(self._orders(edits))

    def check(self, rules: Rules) -> None:
        """Try rules in a table that is gone in the same transaction. Raises ``Rejected``."""
        place = {**table_json(self._family), "name": _TRIAL}
        tried = (
            Edit((_TRIAL, name), flush=True, append=inside) for (_, name), inside in rules.items() if inside
        )
        made = (order for edit in tried for order in _chain_commands(self._family, edit, {}))
        run([{"add": {"table": place}}, *made, {"delete": {"table": place}}])

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        yield "nft -j -f - <<'END'"
        yield json.dumps({"nftables": self._orders(edits)})
        yield "END"

    def _orders(self, edits: Sequence[Edit]) -> list[JsonCommand]:
        return commands(self._family, edits, self._listing)

    def _list(self) -> NftablesListing:
        table = table_json(self._family)
        tables = run([{"list": {"tables": {"family": table["family"]}}}])
        names = [item["table"]["name"] for item in tables["nftables"] if "table" in item]
        if NATIVE_TABLE[self._family] not in names:
            return NftablesListing({}, {}, others=False)
        answer = run([{"list": {"table": table}}])
        try:
            return read_listing(self._family, answer)
        except ValueError as error:
            raise Rejected(f"cannot read our rules in nftables: {error}", "see `nft list ruleset`") from error


def run(commands: list[JsonCommand] | str) -> Any:
    """Run commands, JSON or lines for nft(8), in one transaction. Raises ``Unavailable``, ``Rejected``."""
    library = load()
    with _TURN:
        if isinstance(commands, str):
            status, answer, error = library.cmd(commands)
        else:
            status, answer, error = library.json_cmd({"nftables": commands})
    if status:
        said = " ".join(str(error).split())
        raise Rejected(f"nftables refuses our rules: {said}", "see `nft list ruleset`")
    return answer


def load() -> Any:
    """Return the library for the thread's network namespace, to which its socket belongs.

    It waits for its socket with select(2), which ends a process where the socket's number is 1024 or more:
    a caller that opens many descriptors loads it before. Raises ``Unavailable``.
    """
    return _load(Path("/proc/thread-self/ns/net").stat().st_ino)


@cache
def _load(_namespace: int) -> Any:
    """Import the Python binding on demand: it is optional, and so is the library that it loads."""
    import ctypes

    try:
        ctypes.CDLL(_LIBRARY)  # without the library, the binding would fail with output on stderr
    except OSError as error:
        raise Unavailable(
            f"cannot load {_LIBRARY}: {error}", "install the Debian package libnftables1"
        ) from error
    try:
        import nftables
    except ImportError as error:
        raise Unavailable(
            "the Python module nftables is not installed",
            install_command("nftables", "python3-nftables"),
        ) from error
    library = nftables.Nftables(_LIBRARY)
    library.set_json_output(True)
    library.set_handle_output(True)
    library.set_stateless_output(True)
    return library
