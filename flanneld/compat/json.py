"""JSON as Go's ``encoding/json`` reads and writes it (pure).

Existing configs and other nodes rely on Go's rules: stricter about types than Python, looser about key names.
Both implementations must accept the same input with the same meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import islice
from math import inf
from sys import intern
from typing import Any, NoReturn, TypeVar

A = TypeVar("A", bound=IPv4Address | IPv6Address)
N = TypeVar("N", bound=IPv4Network | IPv6Network)
T = TypeVar("T")

#: Nesting levels, at most. Go allows 10,000, but comparing two values must not exhaust Python's stack.
MAX_DEPTH = 100
#: Unknown keys named in one message, at most.
_FEW_UNREAD = 10

_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}

_ADDRESSES: dict[type, str] = {IPv4Address: "an IPv4 address", IPv6Address: "an IPv6 address"}
_NETWORKS: dict[type, str] = {
    IPv4Network: "an IPv4 network such as 10.244.0.0/16",
    IPv6Network: "an IPv6 network such as fd00:10:244::/48",
}
_OCTETS = {str(number): number for number in range(256)}
_ADDRESS = re.compile(r"[0-9a-fA-F:.]+")
_NETWORK = re.compile(r"[0-9a-fA-F:.]+/[0-9]{1,3}")
_RAW_SURROGATE = "[\ud800-\udfff]"
# Every escape is matched, so that the second half of an escaped backslash does not start one.
_ESCAPE = (
    r"(?s)(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"  # a surrogate pair
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"  # a lone surrogate
    r"|(\\.)"
)
_ESCAPED_ON_OUTPUT = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


class GoJsonError(ValueError):
    """Error for invalid JSON or an unexpected type: one sentence without the remedy."""


class Repeated(dict[str, Any]):
    """An object with a repeated key; ``pairs`` has all of them, in order."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def parse(text: str | bytes) -> object:
    """Decode a JSON value: dict, list, str, int, float, bool or None.

    A number with a fraction or an exponent is a float, even ``1.0``. Invalid UTF-8 is replaced by U+FFFD.
    Raises ``GoJsonError``.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")  # one surrogate for each invalid byte
    if not text.isascii():
        text = re.sub(_RAW_SURROGATE, "\ufffd", text)
    if "\\u" in text:
        text = re.sub(_ESCAPE, lambda found: found[0] if found.lastindex else r"\ufffd", text)
    try:
        value: object = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise GoJsonError(f"this is no JSON at {place}: {error.msg}") from None
    except GoJsonError:
        raise
    except ValueError:  # Python limits the digits of an integer
        raise GoJsonError("a number has too many digits") from None
    except RecursionError:
        raise _too_deep() from None
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value)
    return value


def compact(value: object) -> str:
    """Encode as Go's ``Marshal``: no spaces, keys in the given order, HTML characters escaped."""
    text = _ENCODER.encode(value).translate(_ESCAPED_ON_OUTPUT)
    return text if text.isascii() else re.sub(_RAW_SURROGATE, r"\\ufffd", text)


def _kind(value: object) -> str:
    """Return the type of a value, without the value, which may be a password."""
    return _KINDS.get(type(value), "an object")


def _number(value: object) -> str:
    return str(value)[:40] if type(value) in (int, float) else _kind(value)


class Fields:
    """Reader of a JSON object, field by field as Go fills a struct.

    A key matches a name in any case. If it is repeated, all values must have the right type and the last one
    counts. ``null`` is an empty object, and leaves a plain field at its default. All readers raise
    ``GoJsonError``.
    """

    __slots__ = ("_asked", "_keys", "_values", "_where")

    def __init__(self, obj: object, where: str = "") -> None:
        """Read an object. ``where`` is its own name for messages, empty at the top level."""
        if obj is not None and not isinstance(obj, dict):
            raise GoJsonError(f"{where or 'the top level'} must be an object, found {_kind(obj)}")
        self._where = where
        self._asked: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._values: dict[str, list[object]] = {}
        for key, value in _pairs(obj or {}):
            folded = _fold(key)
            self._keys.setdefault(folded, key)
            self._values.setdefault(folded, []).append(value)

    def uint(self, name: str, default: int) -> int:
        return self._last(name, default, "a whole number of at most 64 bits, not negative", range(2**64))

    def integer(self, name: str, default: int) -> int:
        return self._last(name, default, "a whole number of at most 64 bits", range(-(2**63), 2**63))

    def boolean(self, name: str, default: bool) -> bool:
        return self._last(name, default, "true or false")

    def string(self, name: str, default: str) -> str:
        return self._last(name, default, "a string")

    def strings(self, name: str) -> list[str]:
        """Return an array of strings, an empty one if it is absent or null."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "an array of strings", compact(value)[:60])
        return value

    def raw(self, name: str) -> Any:
        """Return the decoded value; None if it is absent or null."""
        values = self._of(name)
        return values[-1] if values else None

    def address(self, name: str, kind: type[A]) -> A | None:
        """Return an address; None if it is absent or zero.

        As in Go, null is an error for IPv4 and absent for IPv6.
        """
        values = self._of(name)
        if not values or (values[-1] is None and kind is IPv6Address):
            return None
        value = values[-1]
        try:
            return address_of(value, kind)
        except ValueError:
            raise self._wrong(name, _ADDRESSES[kind], compact(value)[:60]) from None

    def network(self, name: str, kind: type[N]) -> N | None:
        """Return a network without its host bits; None if absent or of length 0. Null is an error."""
        if not self.has(name):
            return None
        value = self.raw(name)
        try:
            net = kind(_literal(value, _NETWORK), strict=False)
        except ValueError:
            raise self._wrong(name, _NETWORKS[kind], compact(value)[:60]) from None
        return net if net.prefixlen else None

    def has(self, name: str) -> bool:
        """Return True if the key is present, also with null."""
        return bool(self._of(name))

    def unread(self) -> list[tuple[str, str | None]]:
        """Return the first few keys that were never read, each with the most similar known name."""
        unknown = ((key, folded) for folded, key in self._keys.items() if folded not in self._asked)
        return [(key, self._similar(folded)) for key, folded in islice(unknown, _FEW_UNREAD)]

    def _of(self, name: str) -> list[object]:
        folded = _fold_name(name)
        self._asked[folded] = name
        return self._values.get(folded, [])

    def _last(self, name: str, default: T, wanted: str, numbers: range | None = None) -> T:
        """Return the last value, which must have the default's type and be in ``numbers``."""
        result = default
        for value in self._of(name):
            if type(value) is type(default) and (numbers is None or value in numbers):
                result = value
            elif value is not None:
                raise self._wrong(name, wanted, _kind(value) if numbers is None else _number(value))
        return result

    def _wrong(self, name: str, wanted: str, found: str) -> GoJsonError:
        path = f"{self._where}.{name}" if self._where else name
        return GoJsonError(f"{path} must be {wanted}, found {found}")

    def _similar(self, folded: str) -> str | None:
        from difflib import get_close_matches  # rarely needed, and slow to import

        close = get_close_matches(folded, list(self._asked), n=1)
        return self._asked[close[0]] if close else None


def address_of(value: object, kind: type[A]) -> A | None:
    """Return an address, None for the zero address. Raises ``ValueError`` if Go refuses the value."""
    number = address_number(value, kind)
    return kind(number) if number else None


def address_number(value: object, kind: type[A]) -> int:
    """Return an address as a number. For IPv4 this is faster than ``ipaddress``.

    Raises ``ValueError`` if Go refuses the value.
    """
    if not (issubclass(kind, IPv4Address) and isinstance(value, str)):
        return int(kind(_literal(value, _ADDRESS)))
    try:
        a, b, c, d = value.split(".")
        return _OCTETS[a] << 24 | _OCTETS[b] << 16 | _OCTETS[c] << 8 | _OCTETS[d]
    except (KeyError, ValueError):
        return int(kind(_literal(value, _ADDRESS)))


def _literal(value: object, form: re.Pattern[str]) -> str:
    """Return the text if Go accepts its form. Python also accepts numbers, zones, netmasks and no length."""
    if isinstance(value, str) and form.fullmatch(value):
        return value
    raise ValueError


def _pairs(obj: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return obj.pairs if isinstance(obj, Repeated) else obj.items()


def _fold(key: str) -> str:
    # Go folds two letters into ASCII: the Kelvin sign, which lower() handles, and the long s.
    return key.lower() if key.isascii() else key.lower().replace("\u017f", "s")


#: Cached, for the few names that are read.
_fold_name = cache(_fold)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Interned, because thousands of leases have the same few keys.
    plain = {intern(key): value for key, value in pairs}
    return plain if len(plain) == len(pairs) else Repeated(pairs)


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (inf, -inf):
        raise GoJsonError(f"the number {literal[:40]} is too large")
    return value


def _no_constant(literal: str) -> NoReturn:
    raise GoJsonError(f"{literal} is not a JSON value")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> GoJsonError:
    return GoJsonError(f"the JSON is nested more than {MAX_DEPTH} levels deep")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
