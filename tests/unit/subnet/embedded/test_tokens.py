"""Join tokens: who is let in, with real TLS on loopback."""

from __future__ import annotations

import hashlib
import http.client
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from flanneld.errors import Fatal, NoAnswer, Refused, Retryable
from flanneld.lease_server import LeaseService
from flanneld.model import LeaseAttrs, LeaseKey, name_of
from flanneld.option_values import RemoteServer
from flanneld.options import read
from flanneld.runtime import clock
from flanneld.runtime.sockets.http_connection import TlsFiles, client_context
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet.embedded.store import store_of
from flanneld.subnet.embedded.tokens import Tokens, fingerprint_of_pem
from flanneld.subnet.remote import wire
from flanneld.subnet.remote.credentials import (
    Caller,
    Denied,
    JoinToken,
    identity_context,
    owner_of,
    parse_token,
)
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from flanneld.subnet.remote.wire import SECRET, Acquisition, Reservation
from tests.clock import Clock
from tests.local_etcd import DEADLINE, make_certificates, server
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, Running

DAY = 86400.0


class Guarded(NamedTuple):
    server: Running
    tokens: Tokens
    folder: Path

    def client(self, token: str, file: Path | None = None, node: str = "") -> RemoteStore:
        """Open the store as a node does; one of an earlier version has no name, and no secret."""
        server = RemoteServer("127.0.0.1", self.server.port)
        secret_file = str(self.folder / node / "node-secret") if node else ""
        options = RemoteOptions((server,), token=token, token_file=str(file or ""), secret_file=secret_file)
        return RemoteStore(options, 0.05)

    def join(self, token: str, number: int = 1, node: str = "", mac: str = "") -> str:
        with closing(self.client(token, node=node)) as manager:
            config = manager.network_config()
            return str(manager.acquire(config, attributes(number, mac), (None, None)))

    def ask(self, method: str, target: str, body: str, token: JoinToken, node: str = "") -> tuple[int, str]:
        """Send a request as whoever has a token can, with the secret of a node or without."""
        tls = client_context(TlsFiles(), is_pinned=True)
        connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=10, context=tls)
        secret = self.client(token.text, node=node)._options.read_secret() if node else ""
        with closing(connection):
            headers = {"Authorization": token.bearer, SECRET: secret}
            connection.request(method, f"/v1/_{target}", body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    @property
    def leases(self) -> list[tuple[str, LeaseAttrs]]:
        return [(name_of(each.key), each.attrs) for each in self.server.store.leases("_")[0]]


def attributes(number: int, mac: str = "") -> LeaseAttrs:
    kind = "vxlan" if mac else "host-gw"
    data = {"VtepMAC": mac} if mac else None
    return LeaseAttrs(IPv4Address("198.18.0.0") + number, backend_type=kind, backend_data=data)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", CONFIG)
    tokens = Tokens(file.keystore.database)
    server = Running(file, tls=identity_context(tokens.identity()), check=tokens.check)
    yield Guarded(server, tokens, tmp_path)
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


def test_server_with_another_certificate_does_not_see_the_token(guarded: Guarded, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    heard: list[bytes] = []
    ended = threading.Event()

    def listen(sock: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(sock, server_side=True) as encrypted:
            heard.append(encrypted.recv(65536))
        ended.set()

    with server(listen) as url:
        false_server = RemoteServer("127.0.0.1", int(url.rpartition(":")[2]))
        client = RemoteStore(RemoteOptions((false_server,), token=guarded.tokens.create(DAY).text))
        with pytest.raises(NoAnswer, match="its certificate is not the one in the token"):
            client.network_config()
        assert ended.wait(DEADLINE)
        client.close()
    assert b"".join(heard) == b""


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
    path.touch(0o600)
    path.write_text("garbage")
    with pytest.raises(Retryable, match="holds no token"):
        manager.network_config()
    path.write_text(guarded.tokens.create(DAY).text + "\n")
    assert manager.network_config().backend_type == "host-gw"
    manager.close()


def test_token_file_that_every_user_can_read_is_refused(guarded: Guarded, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(guarded.tokens.create(DAY).text)
    path.chmod(0o644)
    with closing(guarded.client("", path)) as manager:
        with pytest.raises(Retryable, match="every user of this host can read the token file; chmod o="):
            manager.network_config()
        path.chmod(0o640)
        assert manager.network_config().backend_type == "host-gw"


MAC, OTHER_MAC = "ee:00:00:00:00:01", "ee:00:00:00:00:02"
ANOTHERS = "belongs to a node with another secret"


@pytest.mark.parametrize("lasts", [DAY, -1.0], ids=["valid", "ended"])
@pytest.mark.parametrize("attacker", ["", "attacker"], ids=["without-secret", "with-own-secret"])
def test_no_token_takes_over_changes_or_removes_the_lease_of_another_node(
    guarded: Guarded, lasts: float, attacker: str
) -> None:
    subnet = guarded.join(guarded.tokens.create(DAY).text, 1, "victim", MAC)
    before, token = guarded.leases, guarded.tokens.create(lasts)
    victim = wire.WireLease(attributes(1, MAC), before_key(before), 2**62)
    taken = wire.WireLease(attributes(9, OTHER_MAC), victim.key, 2**62)
    path = f"/leases/{subnet.replace('/', '-')}"
    attacks = [
        ("PUT", path, wire.format_renewal(taken, victim.attrs)),
        ("PUT", path, wire.format_renewal(victim, None)),
        ("POST", "/leases", wire.format_acquisition(Acquisition(attributes(1, OTHER_MAC)))),
        ("POST", "/leases", wire.format_acquisition(Acquisition(attributes(1, MAC)))),
        ("DELETE", path, ""),
        ("DELETE", path.replace("leases", "reservations"), ""),
        ("POST", "/reservations", f'{{"Subnet":"{subnet}","PublicIP":"198.18.0.1"}}'),
    ]
    for method, target, body in attacks:
        status, text = guarded.ask(method, target, body, token, attacker)
        assert status == 403, (method, target, text)
        assert ANOTHERS in text or "the token has ended" in text, (method, target, text)
    assert guarded.leases == before
    assert guarded.join(expire(guarded.tokens).text, 1, "victim", MAC) == subnet


def test_ended_token_announces_endpoints_only_of_the_key_in_the_nodes_own_lease(guarded: Guarded) -> None:
    key = "+/" + 41 * "A" + "="
    name, valid, ended = "-_" + key[2:], guarded.tokens.create(DAY), expire(guarded.tokens)

    def publish(of: str, token: JoinToken, node: str = "") -> int:
        return guarded.ask("PUT", f"/endpoints/{of}", "203.0.113.9:51820", token, node)[0]

    with closing(guarded.client(valid.text, node="victim")) as manager:
        attrs = LeaseAttrs(IPv4Address("198.18.0.1"), None, "wireguard", {"PublicKey": key, "Port": 51820})
        manager.acquire(manager.network_config(), attrs, (None, None))
    unused = 43 * "B" + "="
    for of in (name, unused):
        assert [publish(of, ended), publish(of, ended, "attacker")] == [403, 403]
    assert publish(unused, ended, "victim") == 403
    assert guarded.server.store.endpoints("_") == {}
    assert publish(name, ended, "victim") == 200
    assert publish(name, valid, "attacker") == 403
    assert publish(unused, valid, "attacker") == 200
    assert publish(unused, ended, "attacker") == 200


def before_key(leases: list[tuple[str, LeaseAttrs]]) -> LeaseKey:
    return IPv4Network(leases[0][0]), None


def test_node_changes_and_renews_its_own_lease_with_an_ended_token(guarded: Guarded) -> None:
    guarded.join(guarded.tokens.create(DAY).text, 1, "node", MAC)
    with closing(guarded.client(expire(guarded.tokens).text, node="node")) as manager:
        lease = manager.acquire(manager.network_config(), attributes(1, OTHER_MAC), (None, None))
        moved = manager.renew(structs.replace(lease, attrs=attributes(2, OTHER_MAC)))
        assert manager.renew(moved).key == lease.key
    assert guarded.leases == [(str(lease), attributes(2, OTHER_MAC))]


def test_lease_of_an_earlier_version_is_renewed_as_it_is_and_becomes_its_nodes(guarded: Guarded) -> None:
    subnet, late = guarded.join(guarded.tokens.create(DAY).text, 1, mac=MAC), expire(guarded.tokens)
    assert guarded.join(late.text, 1, mac=MAC) == subnet
    with pytest.raises(Retryable, match="has no secret yet"):
        guarded.join(late.text, 1, "attacker", OTHER_MAC)
    assert guarded.join(late.text, 1, "node", MAC) == subnet
    with pytest.raises(Retryable, match=ANOTHERS):
        guarded.join(late.text, 1, mac=MAC)
    assert guarded.join(late.text, 1, "node", OTHER_MAC) == subnet


def test_reservation_is_the_nodes_that_takes_it_first(guarded: Guarded) -> None:
    reservation = Reservation(IPv4Network("10.5.9.0/24"), IPv4Address("198.18.0.1"))
    guarded.server.store.reserve("_", reservation)
    token = guarded.tokens.create(DAY).text
    assert guarded.join(token, 1, "node") == "10.5.9.0/24"
    with closing(guarded.client(token, node="node")) as manager:
        lease = manager.acquire(manager.network_config(), attributes(1), (None, None))
        assert manager.renew(lease).expires is None
    with pytest.raises(Retryable, match=ANOTHERS):
        guarded.join(token, 1, "attacker")


def test_administrator_gives_a_reinstalled_node_its_lease_again(guarded: Guarded) -> None:
    token, store = guarded.tokens.create(DAY).text, guarded.server.store
    subnet = guarded.join(token, 1, "node")
    with pytest.raises(Retryable, match=f"{ANOTHERS}; if its node was reinstalled, add a reservation"):
        guarded.join(token, 1, "reinstalled")
    for _ in range(2):  # a lease, then a reservation
        store.reserve("_", Reservation(IPv4Network(subnet), IPv4Address("198.18.0.1")))
        assert guarded.join(token, 1, "reinstalled") == subnet
        with pytest.raises(Retryable, match=ANOTHERS):
            guarded.join(token, 1, "node")


@pytest.mark.parametrize("lasts", [DAY, -1.0], ids=["valid", "ended"])
def test_no_token_changes_the_endpoints_of_another_node(guarded: Guarded, lasts: float) -> None:
    name, token = "A" * 43 + "=", guarded.tokens.create(lasts)
    for text, with_token in (("192.0.2.1:51820", guarded.tokens.create(DAY)), ("192.0.2.2:51820", token)):
        assert guarded.ask("PUT", f"/endpoints/{name}", text, with_token, "node")[0] == 200
    for attacker in ("", "attacker"):
        status, told = guarded.ask("PUT", f"/endpoints/{name}", "192.0.2.9:51820", token, attacker)
        assert (status, ANOTHERS in told) == (403, True)
    assert guarded.server.store.endpoints("_") == {name: "192.0.2.2:51820"}


def test_lease_of_the_host_with_the_file_is_its_own(guarded: Guarded) -> None:
    place = guarded.server.place
    assert isinstance(place, LocalFile)
    own = store_of(place.keystore)
    lease = own.acquire(own.network_config(), attributes(1, MAC), (None, None))
    with pytest.raises(Retryable, match=ANOTHERS):
        guarded.join(guarded.tokens.create(DAY).text, 1, "attacker", MAC)
    assert own.renew(lease).attrs == attributes(1, MAC)


def test_server_without_tokens_asks_no_secret(guarded: Guarded, tmp_path: Path) -> None:
    """As with Go flannel 0.6.2, whose clients have none."""
    subnet = guarded.join(guarded.tokens.create(DAY).text, 1, "node", MAC)
    with closing(Running(LocalFile(tmp_path / "leases.db"))) as open_server:
        body = wire.format_acquisition(Acquisition(attributes(1, OTHER_MAC)))
        assert f'"Subnet":"{subnet}"' in open_server.ask("POST", "/v1/_/leases", body).body
        assert open_server.ask("DELETE", f"/v1/_/leases/{subnet.replace('/', '-')}").status == 200


def test_store_keeps_the_hash_of_a_secret_only(guarded: Guarded) -> None:
    guarded.join(guarded.tokens.create(DAY).text, 1, "node")
    path = guarded.folder / "node" / "node-secret"
    assert path.stat().st_mode & 0o777 == 0o400
    secret = hashlib.sha256(path.read_bytes()).hexdigest()
    with guarded.tokens._database.reading() as connection:
        content = "\n".join(connection.iterdump())
    assert owner_of(secret) in content
    assert secret not in content


def test_no_secret_is_made_or_sent_without_a_token(tmp_path: Path) -> None:
    options = RemoteOptions((RemoteServer("h", 1),), secret_file=str(tmp_path / "node-secret"))
    assert options.read_secret() == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("with_tokens", "with_files"), [(True, False), (True, True), (False, True)])
def test_server_with_tokens_speaks_tls_1_3_only(
    guarded: Guarded, with_files: bool, with_tokens: bool
) -> None:
    """Go flannel 0.6.2, whose clients may have certificates, speaks 1.2."""
    path = guarded.folder / "identity.pem"
    path.write_text(guarded.tokens.identity())
    words = ["-listen=127.0.0.1:0", f"-store={guarded.folder}/leases.db"]
    words += ["-require-token"] if with_tokens else []
    if with_files:
        words += [f"-remote-certfile={path}", f"-remote-keyfile={path}"]
    place = guarded.server.place
    assert isinstance(place, LocalFile)
    service = LeaseService(read(words, {}), {}, Supervisor(), place.keystore)
    service.close()
    with closing(Running(place, tls=service.server.tls)) as server:
        assert handshake(server.port, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert handshake(server.port, ssl.TLSVersion.TLSv1_2) == ("" if with_tokens else "TLSv1.2")


def handshake(port: int, most: ssl.TLSVersion) -> str:
    """Return the version of TLS to which a client with at most this one comes; empty if to none."""
    tls = client_context(TlsFiles(), is_pinned=True)
    assert tls is not None
    tls.minimum_version, tls.maximum_version = ssl.TLSVersion.TLSv1_2, most
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        try:
            return tls.wrap_socket(plain).version() or ""
        except ssl.SSLError:
            return ""


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
    assert other.check(token.bearer) == Caller(True, "")
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
    assert tokens.check(expire(tokens).bearer) == Caller(False, "")
    moved = Clock()
    with clock.replaced(moved):
        token = tokens.create(60)
        moved.time = token.ends - 1
        assert tokens.check(token.bearer) == Caller(True, "")
        moved.time = token.ends
        assert tokens.check(token.bearer) == Caller(False, "")
