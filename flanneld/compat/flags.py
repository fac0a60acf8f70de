"""Command line syntax of Go's ``flag`` package, and translation of Go's regular expressions, RE2 (pure).

Accepts ``-name=value``, ``-name value`` and the same with two dashes. A boolean takes a value only after
``=``. The first word that is no flag ends the flags, and so does ``--``; the rest is ignored. Source: the
package's documentation, https://pkg.go.dev/flag. Error texts are identical.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from flanneld.errors import Fatal

FlagKind = Literal["bool", "int", "string"]
Scalar = bool | int | str
FlagValue = Scalar | tuple[Scalar, ...]

_BOOLS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
#: Integer literals of the Go language specification; an underscore must separate digits.
_INT = (
    r"(?P<sign>[+-]?)(?:0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<binary>(?:_?[01])+)"
    r"|0[oO]?(?P<octal>(?:_?[0-7])+)|(?P<decimal>0|[1-9](?:_?[0-9])*))"
)
_BASES = {"hex": 16, "binary": 2, "octal": 8, "decimal": 10}
_ESCAPES = {
    '"': r"\"", "\\": r"\\", "\a": r"\a", "\b": r"\b", "\f": r"\f",
    "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v",
}  # fmt: skip


class Flag(Struct, frozen=True, gc=False):
    """A flag. A word of ``usage`` in back quotes names the value in the usage text.

    The value of a ``repeatable`` flag is a tuple, and so is its default.
    """

    name: str
    kind: FlagKind
    default: FlagValue
    usage: str
    repeatable: bool = False


class FlagError(ValueError):
    """Error for an invalid word; ``str(error)`` is the line that Go prints."""


class HelpRequested(Exception):
    """Raised for ``-h`` and ``-help``."""


def parse(flags: Iterable[Flag], argv: Sequence[str]) -> dict[str, FlagValue]:
    """Parse the words after the program's name. The result contains only the flags given.

    Raises ``FlagError`` or ``HelpRequested`` at the first such word.
    """
    known = {flag.name: flag for flag in flags}
    given: dict[str, FlagValue] = {}
    words = iter(argv)
    for word in words:
        if len(word) < 2 or word[0] != "-" or word == "--":
            break
        flag, text = _split(known, word)
        if text is None:
            text = "true" if flag.kind == "bool" else next(words, None)
        if text is None:
            raise FlagError(f"flag needs an argument: -{flag.name}")
        target = f"-{flag.name}" if flag.kind == "bool" else f"flag -{flag.name}"
        value = _value(flag, text, target)
        given[flag.name] = _appended(given.get(flag.name, ()), value) if flag.repeatable else value
    return given


def from_environment(flags: Iterable[Flag], environ: Mapping[str, str], prefix: str) -> dict[str, FlagValue]:
    """Parse the flags' environment variables. An empty one counts as absent.

    A repeatable flag gets exactly one element. Raises ``FlagError`` with the variable's name.
    """
    given: dict[str, FlagValue] = {}
    for flag in flags:
        name = variable(flag.name, prefix)
        if text := environ.get(name):
            value = _value(flag, text, name)
            given[flag.name] = (value,) if flag.repeatable else value
    return given


def variable(name: str, prefix: str) -> str:
    """Return the environment variable of a flag: ``iface-regex`` is ``PREFIX_IFACE_REGEX``."""
    return f"{prefix}_{name}".upper().replace("-", "_")


def usage(flags: Iterable[Flag]) -> str:
    """Return the usage text of all flags by name, in the layout of Go's ``PrintDefaults``."""
    return "".join(f"{_describe(flag)}\n" for flag in sorted(flags, key=lambda flag: flag.name))


def quoted(text: str) -> str:
    """Return Go's ``%q``: the text in double quotes, with unprintable characters escaped."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _split(known: Mapping[str, Flag], word: str) -> tuple[Flag, str | None]:
    body = word[2:] if word.startswith("--") else word[1:]
    if body[0] in "-=":
        raise FlagError(f"bad flag syntax: {word}")
    name, equals, text = body.partition("=")
    if name in known:
        return known[name], text if equals else None
    if name in ("h", "help"):
        raise HelpRequested
    raise FlagError(f"flag provided but not defined: -{name}")


def _appended(old: FlagValue, value: Scalar) -> FlagValue:
    return (*old, value) if isinstance(old, tuple) else (value,)


def _value(flag: Flag, text: str, target: str) -> Scalar:
    if flag.kind == "string":
        return text
    try:
        return _bool(text) if flag.kind == "bool" else _int(text)
    except ValueError as error:
        what = "boolean value" if flag.kind == "bool" else "value"
        raise FlagError(f"invalid {what} {quoted(text)} for {target}: {error}") from None


def _bool(text: str) -> bool:
    if text not in _BOOLS:
        raise ValueError("parse error")
    return _BOOLS[text]


def _int(text: str) -> int:
    match = re.fullmatch(_INT, text)
    if match is None or match.lastgroup is None:
        raise ValueError("parse error")
    base = _BASES[match.lastgroup]
    digits = match[match.lastgroup].replace("_", "").lstrip("0") or "0"
    # Python takes long to convert a million digits, and 64 bits have at most 64.
    number = int(match["sign"] + digits, base) if len(digits) <= 64 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError("value out of range")
    return number


def _describe(flag: Flag) -> str:
    value, text = value_and_usage(flag)
    head = f"  -{flag.name} {value}" if value else f"  -{flag.name}"
    # A flag of one letter without a value has its text on the same line.
    gap = "\t" if len(head) <= 4 else "\n    \t"
    return head + gap + text.replace("\n", "\n    \t") + _default(flag)


def value_and_usage(flag: Flag) -> tuple[str, str]:
    """Return the value's name, empty for a switch, and the usage text without its back quotes."""
    if match := re.search("`([^`]*)`", flag.usage):
        return match[1], flag.usage.replace(match[0], match[1], 1)
    if flag.repeatable:
        return "value", flag.usage
    return "" if flag.kind == "bool" else flag.kind, flag.usage


def _default(flag: Flag) -> str:
    if not flag.default:
        return ""
    match flag.default:
        case str(text):
            return f" (default {quoted(text)})"
        case bool(truth):
            return f" (default {str(truth).lower()})"
        case tuple(items):
            return f" (default [{' '.join(map(str, items))}])"
        case number:
            return f" (default {number})"


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    if code < 0x80 or 0xDC80 <= code <= 0xDCFF:  # an invalid UTF-8 byte is kept as a surrogate
        return f"\\x{code & 0xFF:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ", "digit": "0-9",
    "cntrl": r"\x00-\x1f\x7f", "graph": "!-~", "lower": "a-z", "print": " -~", "space": r"\t-\r ",
    "punct": r"!-/:-@\[-`{-~", "upper": "A-Z", "word": r"\w", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_RE2 = r"""(?sx)
    \\Q (?P<quoted>.*?) (?: \\E | \Z )
  | (?P<set> \[ \^? \]? (?: \[:\^?\w+:\] | \\. | [^]\\] )* \] )
  | (?P<refused> \\[1-9ZNuU] | \(\? (?: [^P<:imsU-] | P[^<] | <[=!] ) | (?: [*+?] | \{\d+(?:,\d*)?\} )\??\+ )
  | (?P<end> \\z )
  | (?P<group> \( (?: \?P?<\w+> )? (?!\?) )
  | (?P<open> \{ (?!\d) )
  | \\. | .
"""


def compile_re2(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression in RE2 syntax with Python's ``re``.

    Approximations: ``(?i)`` folds ASCII letters only and must be at the start or ``(?i:...)``. Unicode
    classes (``\\pL``), octal, ``\\x{...}``, ``[[:^alpha:]]`` and the flag U are refused. Raises ``Fatal`` for
    these, for what RE2 itself refuses, and for malformed patterns.
    """
    try:
        return re.compile(re.sub(_RE2, _to_python, pattern), re.ASCII)
    except (KeyError, ValueError, OverflowError, RecursionError, re.error) as error:
        remedy = "use RE2 syntax: no lookaround, backreferences, possessive or atomic groups"
        raise Fatal(f"regular expression {quoted(pattern)} is not RE2: {error}", remedy) from error


def _to_python(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "quoted":
            return re.escape(token["quoted"])
        case "set":
            return re.sub(r"\[:(\^?\w+):\]", lambda posix: _POSIX[posix[1]], token["set"])
        case "refused":
            raise ValueError(f"{quoted(token['refused'])} at position {token.start()}")
        case "end":
            return r"\Z"
        case "group":
            return "(?:"  # only a match or no match counts, so groups need neither name nor number
        case "open":
            return r"\{"
    return token[0]
