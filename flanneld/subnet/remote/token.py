"""Join tokens: a node's permission to join, and the fingerprint of the server's certificate (pure)."""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import Enum

from msgspec import Struct

from flanneld.errors import FlannelError, Refused

_TOKEN = re.compile(r"fl1-([0-9a-f]{8})-([0-9]{1,12})-([0-9a-f]{64})-([0-9a-f]{64})")
#: Remedy for an unusable token.
ANOTHER = "make another: flannelctl token create"
_BEARER = re.compile(r"Bearer ([0-9a-f]{8})-([0-9]{1,12})-([0-9a-f]{64})")


class Permission(Enum):
    """Permission of a request: ``JOIN`` for everything, ``STAY`` for a node with a lease."""

    JOIN = "join"
    STAY = "stay"


class Denied(FlannelError):
    """Error for a request without a token, or with one that does not permit it."""


class JoinToken(Struct, frozen=True, gc=False):
    """Join token. It is valid for joins until ``ends``, in seconds of Unix time.

    ``code`` is the HMAC-SHA256 of id and end under the server's secret, ``fingerprint`` the SHA-256 of the
    server's certificate; both are in hexadecimal digits.
    """

    id: str
    ends: int
    code: str
    fingerprint: str

    @property
    def text(self) -> str:
        """Return the text for the option ``-token``."""
        return f"fl1-{self.id}-{self.ends}-{self.code}-{self.fingerprint}"

    @property
    def bearer(self) -> str:
        """Value of the header ``Authorization``."""
        return f"Bearer {self.id}-{self.ends}-{self.code}"

    def __repr__(self) -> str:
        return f"Token({self.id})"

    __str__ = __repr__


def parse_token(text: str, source: str) -> JoinToken:
    """Parse a token from ``source``. Raises ``Refused`` without any part of the token."""
    found = _TOKEN.fullmatch(text.strip())
    if not found:
        raise Refused(f"{source} holds no token", "copy all of what flannelctl token create printed")
    return JoinToken(found[1], int(found[2]), found[3], found[4])


def parse_bearer(header: str) -> tuple[str, int, str] | None:
    """Read the header of a request: id, end and code; None if it holds none."""
    found = _BEARER.fullmatch(header)
    return (found[1], int(found[2]), found[3]) if found else None


def code_of(secret: bytes, token_id: str, ends: int) -> str:
    """Return the code for id and end under the server's secret."""
    return hmac.new(secret, f"{token_id}-{ends}".encode(), hashlib.sha256).hexdigest()


def fingerprint_of(certificate: bytes) -> str:
    """Return the fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()
