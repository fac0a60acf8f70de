"""Translation of Go's regular expressions, RE2, for Python's ``re`` (pure)."""

from __future__ import annotations

import re

from flanneld.compat.flags import quoted
from flanneld.errors import Fatal

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
