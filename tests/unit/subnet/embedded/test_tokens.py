"""Join tokens: who is let in, with real TLS on loopback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

import pytest

from flanneld.errors import Fatal, NoAnswer, Refused, Retryable
from flanneld.model import LeaseAttrs
from flanneld.option_values import RemoteServer
from flanneld.runtime import clock
from flanneld.subnet.embedded.tokens import Tokens, fingerprint_of_pem
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from flanneld.subnet.remote.tls import identity_context
from flanneld.subnet.remote.token import Denied, JoinToken, Permission, parse_token
from tests.clock import Clock
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, Running

DAY = 86400.0


class Guarded(NamedTuple):
    server: Running
    tokens: Tokens

    def client(self, token: str, file: Path | None = None) -> RemoteStore:
        server = RemoteServer("127.0.0.1", self.server.port)
        return RemoteStore(RemoteOptions((server,), token=token, token_file=str(file or "")), 0.05)

    def join(self, token: str, number: int = 1) -> str:
        manager = self.client(token)
        try:
            config = manager.network_config()
            return str(manager.acquire(config, attributes(number), (None, None)))
        finally:
            manager.close()


def attributes(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address("198.18.0.0") + number, backend_type="host-gw")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", CONFIG)
    tokens = Tokens(file.keystore.database)
    server = Running(file, tls=identity_context(tokens.identity()), check=tokens.check)
    yield Guarded(server, tokens)
    server.close()


def expire(tokens: Tokens) -> JoinToken:
    return tokens.create(-1.0)


def test_node_with_a_token_joins_renews_and_watches(guarded: Guarded) -> None:
    manager = guarded.client(guarded.tokens.create(DAY).text)
    lease = manager.acquire(manager.network_config(), attributes(1), (None, None))
    assert manager.renew(lease).key == lease.key
    manager.close()


def test_node_without_a_token_gets_nothing(guarded: Guarded) -> None:
    plain = RemoteStore(RemoteOptions((RemoteServer("127.0.0.1", guarded.server.port),)))
    with pytest.raises(NoAnswer):
        plain.network_config()
    plain.close()
    good = guarded.tokens.create(DAY)
    forged = JoinToken(good.id, good.ends + 1000, good.code, good.fingerprint)
    with pytest.raises(Retryable, match="not of this server; make another: flannelctl token create"):
        guarded.join(forged.text)


def test_server_with_another_certificate_does_not_see_the_token(guarded: Guarded) -> None:
    good = guarded.tokens.create(DAY)
    other = JoinToken(good.id, good.ends, good.code, "0" * 64)
    with pytest.raises(NoAnswer, match="its certificate is not the one in the token"):
        guarded.join(other.text)


def test_expired_token_lets_nodes_stay_and_no_other_join(guarded: Guarded) -> None:
    subnet = guarded.join(guarded.tokens.create(DAY).text, 1)
    late = expire(guarded.tokens).text
    assert guarded.join(late, 1) == subnet
    with pytest.raises(Retryable, match=r"the token has ended, and node 198\.18\.0\.2 has no lease here"):
        guarded.join(late, 2)
    manager = guarded.client(late)
    lease = manager.acquire(manager.network_config(), attributes(1), (None, None))
    assert manager.renew(lease).key == lease.key
    guarded.server.store.revoke("_", lease.key)
    with pytest.raises(Retryable, match=r"the token has ended, and node 198\.18\.0\.1 has no lease here"):
        manager.renew(lease)
    with pytest.raises(Retryable, match="the token has ended"):
        manager.release(lease.key)
    manager.close()


def test_revoked_token_ends_renewals_with_the_reason(guarded: Guarded) -> None:
    token = guarded.tokens.create(DAY)
    manager = guarded.client(token.text)
    lease = manager.acquire(manager.network_config(), attributes(1), (None, None))
    guarded.tokens.revoke(token.id)
    with pytest.raises(Retryable, match=f"the token {token.id} was revoked"):
        manager.renew(lease)
    manager.close()
    assert [each.state for each in guarded.tokens.listed()] == ["revoked"]
    with pytest.raises(Fatal, match="there is no token"):
        guarded.tokens.revoke("00000000")


def test_token_file_is_read_again_for_each_connection(guarded: Guarded, tmp_path: Path) -> None:
    path = tmp_path / "token"
    manager = guarded.client("", path)
    with pytest.raises(Retryable, match=r"cannot read .*token: No such file"):
        manager.network_config()
    path.write_text("garbage")
    with pytest.raises(Retryable, match="holds no token"):
        manager.network_config()
    path.write_text(guarded.tokens.create(DAY).text + "\n")
    assert manager.network_config().backend_type == "host-gw"
    manager.close()


def test_no_log_and_no_text_shows_a_token(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    token = guarded.tokens.create(DAY)
    with caplog.at_level(logging.DEBUG):
        guarded.join(token.text)
    options = RemoteOptions((RemoteServer("h", 1),), token=token.text)
    shown = f"{caplog.text} {options} {options!r} {token} {token!r}"
    assert token.code not in shown
    with pytest.raises(Refused) as caught:
        parse_token(token.text[:-1], "-token")
    assert token.code not in str(caught.value)


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n", "-----END CERTIFICATE-----"])
def test_text_without_a_whole_certificate_is_refused(text: str) -> None:
    with pytest.raises(Fatal, match="there is no certificate in PEM format"):
        fingerprint_of_pem(text)


def test_tokens_and_certificate_outlive_the_process(tmp_path: Path) -> None:
    one = Tokens(LocalFile(tmp_path / "leases.db").keystore.database)
    token = one.create(DAY)
    other = Tokens(LocalFile(tmp_path / "leases.db").keystore.database)
    assert other.identity() == one.identity()
    assert other.check(token.bearer) is Permission.JOIN
    assert other.create(DAY, "1" * 64).fingerprint == "1" * 64
    assert token.fingerprint == fingerprint_of_pem(one.identity())
    assert parse_token(token.text, "") == token


@pytest.mark.parametrize("header", ["", "Bearer", "Basic eDp5", "Bearer a-b-c", "Bearer " + "0" * 9000])
def test_header_that_holds_no_token_is_denied(tmp_path: Path, header: str) -> None:
    with pytest.raises(Denied, match="requires a token"):
        Tokens(LocalFile(tmp_path / "leases.db").keystore.database).check(header)


def test_time_of_a_token_is_the_servers(tmp_path: Path) -> None:
    tokens = Tokens(LocalFile(tmp_path / "leases.db").keystore.database)
    assert tokens.create(60).ends - clock.wall() <= 60
    assert tokens.check(expire(tokens).bearer) is Permission.STAY
    moved = Clock()
    with clock.replaced(moved):
        token = tokens.create(60)
        moved.time = token.ends - 1
        assert tokens.check(token.bearer) is Permission.JOIN
        moved.time = token.ends
        assert tokens.check(token.bearer) is Permission.STAY
