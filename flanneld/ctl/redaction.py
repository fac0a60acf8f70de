"""Redaction of secrets in output that leaves this host (pure).

Known secret values are masked at any place. A text that looks like a secret by its name or form is masked
even if its value is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
#: Shorter values would mask parts of ordinary words.
_SHORTEST = 4
#: Names whose values are secret; the names of files are not.
_NAME = (
    r"[\w.-]*(?:password|passwd|secret|token|psk"
    r"|private[\s_-]?key|preshared[\s_-]?key|access[_-]?key\w*|api[_-]?key)"
)
_BY_NAME = (
    # JSON: the value is a string.
    re.compile(rf'("{_NAME}"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE),
    # JSON inside a JSON string.
    re.compile(rf'(\\"{_NAME}\\"\s*:\s*)\\"(?:[^"\\])*\\"', re.IGNORECASE),
    # Variables, flags and wg's output: name=value, name: value.
    re.compile(rf"(\b-{{0,2}}{_NAME}\s*[=:]\s*)(?![\"{{\[])\S+", re.IGNORECASE),
)
_USER_OF_URL = re.compile(r"(\w+://)[^/\s\"'@]*@")
_BEARER = re.compile(r"((?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the given secrets, and without texts that look like secrets."""
    for secret in sorted(filter(_is_long_enough, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _PEM.sub(MASK, text)
    text = _USER_OF_URL.sub(rf"\g<1>{MASK}@", text)
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    in_json, in_string, in_words = _BY_NAME
    text = in_json.sub(rf'\g<1>"{MASK}"', text)
    text = in_string.sub(rf'\g<1>\\"{MASK}\\"', text)
    return in_words.sub(rf"\g<1>{MASK}", text)


def secrets_in(text: str) -> set[str]:
    """Return the values of variables in a file whose names mark them as secret."""
    found = set()
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and re.fullmatch(_NAME, name.strip(), re.IGNORECASE):
            found.add(value.strip().strip("\"'"))
    return found


def _is_long_enough(secret: str) -> bool:
    return len(secret) >= _SHORTEST and secret != MASK
