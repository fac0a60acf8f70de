"""Credentials of both sides: join tokens, rights of a request, and TLS from the flags ``-remote-*``.

A token says who may join. The secret of a node says whose lease it is: the store keeps its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl

from msgspec import Struct

from flanneld.errors import Fatal, FlannelError, Refused
from flanneld.runtime.sockets.http_connection import TlsFiles

_TOKEN = re.compile(r"fl1-([0-9a-f]{8})-([0-9]{1,12})-([0-9a-f]{64})-([0-9a-f]{64})")
#: Remedy for an unusable token.
ANOTHER = "make another: flannelctl token create"
_BEARER = re.compile(r"Bearer ([0-9a-f]{8})-([0-9]{1,12})-([0-9a-f]{64})")


class Caller(Struct, frozen=True, gc=False):
    """Rights of a request. ``may_join`` permits a new lease.

    ``owner`` is the hash of its node's secret, empty without one. It is None for those who may change every
    lease: an administrator, and each client of a server without tokens.
    """

    may_join: bool = True
    owner: str | None = None


ADMINISTRATOR = Caller()


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


def owner_of(secret: str) -> str:
    """Return the hash of a node's secret as the store keeps it; empty without a secret."""
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


def fingerprint_of(certificate: bytes) -> str:
    """Return the fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()


# ---- TLS ---------------------------------------------------------------------------------------


def server_context(files: TlsFiles, *, with_tokens: bool = False) -> ssl.SSLContext | None:
    """Return the server's TLS; None without a certificate. With an authority, clients need one of its.

    Clients with tokens have TLS 1.3, those of Go flannel 0.6.2 have 1.2.
    """
    files.check()
    if not files.certfile:
        if files.cafile:
            # Go flannel 0.6.2 then listens without TLS.
            raise Fatal(
                "-remote-cafile alone gives the server no TLS",
                "set -remote-certfile and -remote-keyfile too, or unset -remote-cafile",
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if with_tokens:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    files.load(context)
    if files.cafile:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def identity_context(identity: str, cafile: str = "") -> ssl.SSLContext:
    """Return a server's TLS 1.3 with this key and certificate in PEM; ``cafile`` as in ``server_context``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    descriptor = os.memfd_create("flannel-identity", os.MFD_CLOEXEC)  # The library reads files only.
    try:
        os.write(descriptor, identity.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if cafile:
        TlsFiles(cafile=cafile).load(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
