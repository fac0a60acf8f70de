"""Join tokens of a store: creation, list, revocation and check. The file also has secret and certificate."""

from __future__ import annotations

import hmac
import ssl
import threading
from collections.abc import Callable

from msgspec import Struct

from flanneld.errors import Fatal, Retryable
from flanneld.runtime import clock
from flanneld.runtime.clock import random_bytes
from flanneld.runtime.command import CommandRunner
from flanneld.subnet.embedded.database import Database, fact, set_fact
from flanneld.subnet.remote.credentials import (
    ANOTHER,
    Caller,
    Denied,
    JoinToken,
    code_of,
    fingerprint_of,
    owner_of,
    parse_bearer,
)

#: An ECDSA certificate for a hundred years: nodes know it by its fingerprint, so no date ends it.
_OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -batch -days 36500"
    " -subj /CN=flannel -keyout /dev/stdout -out /dev/stdout"
)


class Listed(Struct, frozen=True, gc=False):
    """A token as ``flannelctl token list`` shows it; ``state`` is valid, expired or revoked."""

    id: str
    ends: str
    state: str


class Tokens:
    """Tokens in a database. May be used from any thread, and from several processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, lasts: float, fingerprint: str = "") -> JoinToken:
        """Create a token for joins within ``lasts`` seconds, with this fingerprint or the store's."""
        fingerprint = fingerprint or fingerprint_of_pem(self.identity())
        secret, token_id = self._secret(), random_bytes(4).hex()
        ends = int(clock.wall() + lasts)
        with self._database.writing() as connection:
            connection.execute("INSERT INTO tokens VALUES (?, ?, 0)", (token_id, ends))
        return JoinToken(token_id, ends, code_of(secret, token_id, ends), fingerprint)

    def listed(self) -> list[Listed]:
        """Return all tokens by their end, the latest last."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT id, ends, is_revoked FROM tokens ORDER BY ends, id").fetchall()
        now = clock.wall()
        return [
            Listed(
                name, clock.utc_text(ends), "revoked" if is_revoked else "expired" if ends <= now else "valid"
            )
            for name, ends, is_revoked in rows
        ]

    def revoke(self, token_id: str) -> None:
        """Revoke a token: its nodes are refused from now on. Raises ``Fatal`` if there is no such token."""
        with self._database.writing() as connection:
            done = connection.execute("UPDATE tokens SET is_revoked = 1 WHERE id = ?", (token_id,)).rowcount
        if not done:
            raise Fatal(f"there is no token {token_id}", "see flannelctl token list")

    def check(self, header: str, secret: str = "") -> Caller:
        """Return the rights by a header ``Authorization`` and the secret of the node, if it sends one.

        Raises ``Denied``, ``Retryable``.
        """
        found = parse_bearer(header)
        if found is None:
            raise Denied("this server requires a token", "give the node one: flannelctl token create")
        token_id, ends, code = found
        if not hmac.compare_digest(code, code_of(self._secret(), token_id, ends)):
            raise Denied("the token is not of this server", ANOTHER)
        with self._database.reading() as connection:
            row = connection.execute("SELECT is_revoked FROM tokens WHERE id = ?", (token_id,)).fetchone()
        if row is None or row[0]:
            raise Denied(f"the token {token_id} was revoked", ANOTHER)
        return Caller(clock.wall() < ends, owner_of(secret))

    def identity(self) -> str:
        """Return the server's key and certificate in PEM. The first call creates them."""
        return self._kept("identity", _made_identity)

    def _secret(self) -> bytes:
        return bytes.fromhex(self._kept("secret", lambda: random_bytes(32).hex()))

    def _kept(self, name: str, make: Callable[[], str]) -> str:
        with self._database.reading() as connection:
            value = fact(connection, name)
        if value is None:
            made = make()
            with self._database.writing() as connection:
                # Another process may have created them meanwhile.
                value = fact(connection, name) or made
                set_fact(connection, name, str(value))
        return str(value)


def fingerprint_of_pem(text: str) -> str:
    """Return the fingerprint of the first certificate in a text. Raises ``Fatal`` without one."""
    start = text.find(ssl.PEM_HEADER)
    end = text.find(ssl.PEM_FOOTER, start)
    if start < 0 or end < 0:
        raise Fatal("there is no certificate in PEM format", "correct -remote-certfile")
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)]))


def _made_identity() -> str:
    try:
        done = CommandRunner(threading.Event()).run(_OPENSSL.split(), name="openssl req")
    except Retryable as error:
        raise Fatal(
            f"cannot make a certificate: {error.problem}",
            "install openssl, or give -remote-certfile and -remote-keyfile",
        ) from None
    if done.status:
        raise Fatal("openssl req made no certificate", "give -remote-certfile and -remote-keyfile")
    return done.output
