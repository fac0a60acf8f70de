"""Parser of the kernel's nf_tables rules, limited to verdicts and addresses.

Source: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from ipaddress import ip_network

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.model import Family
from flanneld.network.firewall.rules import ACCEPT, DROP, REJECT, RETURN, Match, Rule
from flanneld.network.rtnetlink.netlink import attributes, number_of, text_of

_ATTRIBUTE = struct.Struct("=HH")
_CODE = struct.Struct(">i")
#: Attribute types: of an expression, of data, of a verdict, and of each kind of expression.
_NAME, _DATA = 1, 2
_VALUE, _VERDICT = 1, 2
_VERDICT_CODE, _VERDICT_CHAIN = 1, 2
_META_KEY, _CMP_OP, _CMP_DATA, _BITWISE_MASK, _IMMEDIATE_DATA = 2, 2, 3, 4, 2
_PAYLOAD_BASE, _PAYLOAD_OFFSET, _EXTENSION_NAME = 2, 3, 1

_NFPROTO, _NETWORK_HEADER, _EQUAL = 15, 1, 0
_VERDICTS = {0: DROP, 1: ACCEPT, -5: RETURN}
#: Offsets of the addresses in the network header.
_SIDES: Mapping[Family, Mapping[int | None, str]] = {
    4: {12: "source", 16: "destination"},
    6: {8: "source", 24: "destination"},
}
_PROTOCOL: Mapping[Family, bytes] = {4: b"\2", 6: b"\n"}
_ADDRESS_LENGTH: Mapping[Family, int] = {4: 4, 6: 16}
#: Expressions that do not affect which packets a rule matches.
_IDLE = frozenset({"counter", "log"})
_FAMILY = "family"


def read_rule(family: Family, data: bytes) -> Rule:
    """Return the rule with these expressions, for packets of a family. ``extra`` names unparsed ones."""
    reading = _Reading(family)
    for name, given in _expressions(data):
        reading.take(name, given)
    return replace(reading.rule, extra=" ".join(reading.extra))


class _Reading(Struct, gc=False):
    """Parser state of a rule. ``loaded`` is the operand of the next comparison."""

    family: Family
    rule: Rule = field(default_factory=lambda: Rule(""))
    extra: list[str] = field(default_factory=list)
    loaded: str = ""
    mask: bytes = b""

    def take(self, name: str, given: Mapping[int, bytes]) -> None:
        if name in _IDLE or (name == "match" and text_of(given, _EXTENSION_NAME) == "comment"):
            return
        if not self._load(name, given) and not self._compare(name, given) and not self._decide(name, given):
            self.extra.append(name)

    def _load(self, name: str, given: Mapping[int, bytes]) -> bool:
        loaded = ""
        if name == "meta" and number_of(given, _META_KEY) == _NFPROTO:
            loaded = _FAMILY
        elif name == "payload" and number_of(given, _PAYLOAD_BASE) == _NETWORK_HEADER:
            loaded = _SIDES[self.family].get(number_of(given, _PAYLOAD_OFFSET), "")
        if loaded:
            self.loaded, self.mask = loaded, b""
        return bool(loaded)

    def _compare(self, name: str, given: Mapping[int, bytes]) -> bool:
        if name == "bitwise" and self.loaded:
            self.mask = _nested(given, _BITWISE_MASK).get(_VALUE, b"")
            return True
        if name != "cmp" or not self.loaded or number_of(given, _CMP_OP) != _EQUAL:
            return False
        loaded, self.loaded = self.loaded, ""
        value = _nested(given, _CMP_DATA).get(_VALUE, b"")
        if loaded == _FAMILY:
            return value == _PROTOCOL[self.family]
        match = _match(self.family, value, self.mask)
        if match is None:
            return False
        is_source = loaded == "source"
        self.rule = replace(self.rule, source=match) if is_source else replace(self.rule, destination=match)
        return True

    def _decide(self, name: str, given: Mapping[int, bytes]) -> bool:
        verdict = ""
        if name == "immediate":
            verdict = _verdict(given)
        elif name == "reject" or (name == "target" and text_of(given, _EXTENSION_NAME) == REJECT):
            verdict = REJECT
        self.rule = replace(self.rule, verdict=verdict or self.rule.verdict)
        return bool(verdict)


def _match(family: Family, value: bytes, mask: bytes) -> Match | None:
    """Return the network of a comparison. Whole bytes are compared without a mask, as few as needed."""
    width = _ADDRESS_LENGTH[family]
    length = int.from_bytes(mask).bit_count() if mask else 8 * len(value)
    try:
        return Match(ip_network((value.ljust(width, b"\0"), length)))
    except ValueError:
        return None


def _verdict(given: Mapping[int, bytes]) -> str:
    """Return the verdict or the target chain; empty if the expression is no verdict."""
    data = _nested(given, _IMMEDIATE_DATA).get(_VERDICT, b"")
    verdict = attributes(data, 0, len(data))
    chain = text_of(verdict, _VERDICT_CHAIN)
    code = verdict.get(_VERDICT_CODE, b"")
    return chain or (_VERDICTS.get(_CODE.unpack(code)[0], "") if len(code) == _CODE.size else "")


def _expressions(data: bytes) -> Iterator[tuple[str, dict[int, bytes]]]:
    """Yield name and attributes of each expression.

    All have one type, so ``attributes`` would keep the last.
    """
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, _ = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        expression = attributes(data, at + _ATTRIBUTE.size, min(at + length, len(data)))
        yield text_of(expression, _NAME), _nested(expression, _DATA)
        at += (length + 3) & ~3


def _nested(given: Mapping[int, bytes], kind: int) -> dict[int, bytes]:
    data = given.get(kind, b"")
    return attributes(data, 0, len(data))
