"""Bounds and errors of the server of leases."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from urllib.parse import quote

import pytest

from flanneld.errors import Fatal
from flanneld.model import LeaseAttrs, LeaseKey
from flanneld.option_values import RemoteServer
from flanneld.runtime.sockets.http_connection import TlsFiles, client_context
from flanneld.subnet.codec import format_key
from flanneld.subnet.embedded.store import EmbeddedClient
from flanneld.subnet.etcd.keys import KeyReply
from flanneld.subnet.etcd.transport import EtcdOptions
from flanneld.subnet.remote import server as http_server
from flanneld.subnet.remote.credentials import Caller, Denied, server_context
from flanneld.subnet.remote.leases import LeaseStore, over_etcd, over_file
from flanneld.subnet.remote.server import open_listener
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from flanneld.subnet.remote.wire import Acquisition
from flanneld.subnet.store import LocalFacts
from tests.lab.wait import wait_for
from tests.local_etcd import LocalEtcd, free_port, make_certificates, running_etcd
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, Running, running_server

LEASE = f"{ROOT}/subnets/10.5.12.0-24"


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with running_etcd() as etcd:
        etcd.put(f"{ROOT}/config", CONFIG)
        yield etcd


@pytest.fixture
def server(etcd: LocalEtcd) -> Iterator[Running]:
    with running_server(etcd, "v2") as server:
        yield server


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def test_thousand_watches_are_all_answered(etcd: LocalEtcd, server: Running) -> None:
    request = f"GET /v1/_/leases?next={server.cursor()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    before = _resident()
    clients = [connect(server) for _ in range(1000)]
    for client in clients:
        client.sendall(request)
    wait_for(lambda: threading.active_count() >= 1000, what="1,000 threads")
    assert _resident() - before < 120 << 20
    assert server.ask("GET", "/v1/_/config").status == 200
    etcd.put(LEASE, '{"PublicIP":"10.99.0.11"}', 86400)
    for client in clients:
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
        client.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _handlers(known: Collection[threading.Thread]) -> list[threading.Thread]:
    """Return the threads of a server's connections, without those of other tests that end at some time."""
    found = [each for each in threading.enumerate() if each.name == "request"]
    return [each for each in found if each not in known]


def test_watch_of_a_client_that_left_ends(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flanneld.subnet.remote.change_log.LOOK", 0.1)
    cursor, known = server.cursor(), threading.enumerate()
    with connect(server) as client:
        client.sendall(f"GET /v1/_/leases/10.5.1.0-24?next={cursor} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_for(lambda: _handlers(known), what="the watch to wait")
    wait_for(lambda: not _handlers(known), what="the watch to end")


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /v1/_/config HT", b"POST /v1/_/leases HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"],
)
def test_slow_client_is_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIME", 0.3)
    monkeypatch.setattr(http_server, "IDLE_TIME", 0.3)
    with connect(server) as client:
        client.sendall(b"GET /v1/_/config HTTP/1.1\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
        client.sendall(start)
        assert client.recv(100) == b""


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1/_/config HT", b"POST /v1/_/leases HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_client_without_a_first_request_is_cut_off(
    etcd: LocalEtcd, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(http_server, "FIRST_TIME", 0.3)
    known = threading.enumerate()
    with running_server(etcd, "v2") as server, connect(server) as client:
        client.sendall(start)
        assert client.recv(100) == b""
        assert not _handlers(known)


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST /v1/_/leases HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/_/leases HTTP/1.1\ncontent-length:2\n\n{}",
        b"GET /v1/_/config HTTP/1.0\r\n\r\n",
    ],
)
def test_first_request_may_come_in_pieces(server: Running, request_text: bytes) -> None:
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request_text:
            client.sendall(bytes([byte]))
        assert client.recv(4096).startswith(b"HTTP/1.")


def test_requests_may_come_at_once(server: Running) -> None:
    with connect(server) as client:
        client.sendall(
            b"GET /v1/_/config HTTP/1.1\r\n\r\nGET /v1/_/config HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        answers = b""
        while piece := client.recv(4096):
            answers += piece
    assert answers.count(b"HTTP/1.1 200 OK") == 2


def test_body_that_waits_for_leave_is_taken(server: Running) -> None:
    head = b"POST /v1/_/leases HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with connect(server) as client:
        for _ in range(2):
            client.sendall(head)
            assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"{}")
            assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_client_that_is_not_admitted_keeps_no_connection(etcd: LocalEtcd) -> None:
    def refuse(_header: str, _secret: str) -> Caller:
        raise Denied("the token is unknown")

    with closing(Running(etcd, "v2", check=refuse)) as server, connect(server) as client:
        client.sendall(b"GET /v1/_/leases HTTP/1.1\r\n\r\n")
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nConnection: close\r\n" in answer


def test_surplus_connections_are_closed(etcd: LocalEtcd) -> None:
    known = threading.enumerate()
    with running_server(etcd, "v2", connections=2) as server, connect(server) as one, connect(server) as two:
        request = f"GET /v1/_/leases?next={server.cursor()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        wait_for(lambda: not _handlers(known), what="the connection of the cursor to end")
        for client in (one, two):
            client.sendall(request)
        wait_for(lambda: len(_handlers(known)) == 2, what="two connections")
        with connect(server) as third:
            third.sendall(request)
            assert third.recv(1) == b""
        one.close()
        two.close()
        wait_for(lambda: _answers(server), what="room for another connection")


def _answers(server: Running) -> bool:
    try:
        return server.ask("GET", "/v1/_/config").status == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /v1/_/config HTTP/9\r\n\r\n", b"400"),
        (b"POST /v1/_/leases HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /v1/_/leases HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /v1/_/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"BREW / HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_request_without_sense_is_refused(server: Running, request_text: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(request_text)
        assert client.recv(4096).split()[1] == status
    assert _answers(server)


def test_log_has_a_line_for_each_request(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flanneld.subnet.remote.server"):
        server.ask("GET", "/v1/_/leases?next=x")
        wait_for(lambda: bool(caplog.messages), what="the line")
    assert caplog.messages == ["GET /v1/_/leases?next=x - 500"]


def test_metrics_count_requests_and_those_that_wait(server: Running) -> None:
    server.ask("GET", "/v1/_/config")
    with connect(server) as client:
        client.sendall(f"GET /v1/_/leases?next={server.cursor()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_for(lambda: b"pending_requests 1" in server.server.metrics("")[2], what="the watch to wait")
        wait_for(lambda: b"connections 1\n" in server.server.metrics("")[2], what="the others to end")
        page = server.server.metrics("")[2].decode()
    assert 'flannel_server_requests_total{method="GET",status="200"} 2\n' in page


# ---- listening --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8888", "missing port in address"),
        ("10.99.0.1", "missing port in address"),
        ("udp://:1", "bad listener scheme"),
        ("198.51.100.7:8888", "cannot assign requested address"),
        ("fd://", "out of range"),
        ("fd://x", "fd index is not a number"),
        ("fd://2", "out of range"),
        ("127.0.0.1:99999", "missing port in address"),
    ],
)
def test_address_that_cannot_be_used_is_fatal(text: str, problem: str) -> None:
    with pytest.raises(Fatal, match=f"Error listening on .*{problem}.*; "):
        open_listener(text, {})


def test_socket_of_systemd_is_used() -> None:
    code = (
        "import os, sys\n"
        "from flanneld.subnet.remote.server import open_listener\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "environ = {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}\n"
        "print(open_listener('fd://', environ).getsockname()[1])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-c", code, str(number)]
        done = subprocess.run(command, pass_fds=[number], capture_output=True, text=True, check=True)
        assert int(done.stdout) == listener.getsockname()[1]


# ---- TLS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


def files(folder: Path, name: str, ca: str = "ca") -> TlsFiles:
    return TlsFiles(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / f"{ca}.crt"))


def ask(port: int, context: ssl.SSLContext | None) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    connection.request("GET", "/v1/_/config")
    return connection.getresponse().status


def test_only_clients_with_a_certificate_are_answered(etcd: LocalEtcd, tls: Path) -> None:
    with running_server(etcd, "v2", files(tls, "server")) as server:
        assert ask(server.port, client_context(files(tls, "client"))) == 200
        for wrong in (TlsFiles(cafile=str(tls / "ca.crt")), files(tls, "other")):
            with pytest.raises(OSError, match=r"(?i)certificate|unknown ca|reset|EOF|closed"):
                ask(server.port, client_context(wrong))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server.port, client_context(files(tls, "client", "other")))
        with pytest.raises((OSError, http.client.HTTPException)):
            server.ask("GET", "/v1/_/config")
        assert ask(server.port, client_context(files(tls, "client"))) == 200


def test_client_without_tls_is_left_at_once(
    etcd: LocalEtcd, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first bytes are no size of a record to wait for."""
    monkeypatch.setattr(http_server, "FIRST_TIME", 1000.0)
    with (
        running_server(etcd, "v2", files(tls, "server")) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as client,
    ):
        client.sendall(b"GET /v1/_/config HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert b"200" not in client.recv(100)


def test_authority_without_a_certificate_is_fatal_for_a_server(tls: Path) -> None:
    with pytest.raises(Fatal, match="no TLS; set -remote-certfile"):
        server_context(TlsFiles(cafile=str(tls / "ca.crt")))


@pytest.mark.parametrize("make", [server_context, client_context])
def test_files_that_do_not_fit_are_fatal(tls: Path, make: object) -> None:
    assert callable(make)
    for wrong, problem in (
        (TlsFiles(certfile=str(tls / "ca.crt")), "only one"),
        (TlsFiles(str(tls / "absent"), str(tls / "ca.key")), "cannot read"),
        (TlsFiles(str(tls / "server.crt"), str(tls / "client.key")), "do not hold"),
        (TlsFiles(str(tls / "server.crt"), str(tls / "server.key"), str(tls / "names")), "holds no cert"),
    ):
        with pytest.raises(Fatal, match=problem):
            make(wrong)


def test_a_taken_port_is_fatal() -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(Fatal, match="address already in use; give"),
    ):
        open_listener(f"127.0.0.1:{port}", {})


# ---- leases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/v1/_/leases", "{}"),
        ("POST", "/v1/_/leases", "[]"),
        ("PUT", "/v1/_/leases/10.5.1.0-24", "{}"),
        ("PUT", "/v1/_/leases/10.5.1.0-24", '{"Attrs":{"PublicIP":"10.99.0.1"}}'),
        ("POST", "/v1/_/reservations", "{}"),
    ],
)
def test_request_without_subnet_or_address_is_refused(
    server: Running, method: str, target: str, body: str
) -> None:
    assert server.ask(method, target, body).status == 400


@pytest.mark.parametrize("is_by_us", [False, True], ids=["written by a node", "written by this server"])
def test_renewal_overwrites_no_other_nodes_lease(etcd: LocalEtcd, server: Running, is_by_us: bool) -> None:
    etcd.put(LEASE, '{"PublicIP":"10.99.0.11"}', 86400)
    if is_by_us:
        theirs = '{"Subnet":"10.5.12.0/24","Attrs":{"PublicIP":"10.99.0.11"}}'
        assert server.ask("PUT", "/v1/_/leases/10.5.12.0-24", theirs).status == 200
    lease = '{"Subnet":"10.5.12.0/24","Attrs":{"PublicIP":"10.99.0.12"}}'
    refused = server.ask("PUT", "/v1/_/leases/10.5.12.0-24", lease)
    assert (refused.status, "belongs to node 10.99.0.11" in refused.body) == (500, True)
    proven = lease[:-1] + ',"Former":{"PublicIP":"10.99.0.11"}}'
    assert server.ask("PUT", "/v1/_/leases/10.5.12.0-24", proven).status == 200


def renewal(subnet: str, public_ip: str = "10.99.0.61", more: str = "") -> str:
    return f'{{"Subnet":"{subnet}"{more},"Attrs":{{"PublicIP":"{public_ip}","BackendType":"host-gw"}}}}'


def _values(etcd: LocalEtcd) -> dict[str, str]:
    return {each["key"]: each["value"] for each in etcd.children(f"{ROOT}/subnets")}


CLAIMS = [
    ("10.6.1.0-24", renewal("10.6.1.0/24"), "the subnet 10.6.1.0/24 is outside the network"),
    ("10.5.0.0-16", renewal("10.5.0.0/16"), "the subnet 10.5.0.0/16 is no /24"),
    ("10.0.0.0-8", renewal("10.0.0.0/8"), "the subnet 10.0.0.0/8 is outside the network"),
    ("10.5.61.0-25", renewal("10.5.61.0/25"), "the subnet 10.5.61.0/25 is no /24"),
    ("10.5.62.0-24", renewal("10.5.61.0/24"), "of the lease 10.5.61.0/24, the path of 10.5.62.0/24"),
    ("any", renewal("10.5.61.0/24"), "of the lease 10.5.61.0/24, the path of none"),
    (
        "10.5.61.0-24&fd00::-64",
        renewal("10.5.61.0/24", more=',"IPv6Subnet":"fd00::/64"'),
        "the subnet fd00::/64 is outside the network",
    ),
    *(
        ("10.5.61.0-24", renewal("10.5.61.0/24", public_ip), f"the public IP {public_ip} is no host's")
        for public_ip in ("127.0.0.1", "224.0.0.5", "255.255.255.255")
    ),
]


@pytest.mark.parametrize(("name", "body", "reason"), CLAIMS)
def test_claim_that_no_node_would_follow_is_refused_unless_it_is_a_renewal(
    etcd: LocalEtcd, server: Running, name: str, body: str, reason: str
) -> None:
    subnets = f"{ROOT}/subnets"
    lease = json.loads(body)
    key = format_key(
        (IPv4Network(lease["Subnet"]), IPv6Network(six) if (six := lease.get("IPv6Subnet")) else None)
    )
    for stored in (None, '{"PublicIP":"10.99.0.61","BackendType":"vxlan"}'):
        if stored is not None:
            etcd.put(f"{subnets}/{key}", stored, 86400)
        before = _values(etcd)
        refused = server.ask("PUT", f"/v1/_/leases/{quote(name)}", body)
        assert (refused.status, reason in refused.body) == (400, True)
        assert _values(etcd) == before
    # Another flannel has written it.
    etcd.put(f"{subnets}/{key}", json.dumps(lease["Attrs"]), 3600)
    renewed = server.ask("PUT", f"/v1/_/leases/{quote(name)}", body)
    assert renewed.status == 200
    assert lease["Attrs"].items() <= json.loads(renewed.body)["Attrs"].items()
    etcd.delete(f"{subnets}/{key}")


ON_LOOPBACK = '{"Network":"127.0.0.0/8","SubnetMin":"127.0.0.0","SubnetMax":"127.0.1.0"}'


def test_new_lease_avoids_address_of_the_server(tmp_path: Path) -> None:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", ON_LOOPBACK)
    with running_server(file) as server:
        answer = server.ask("POST", "/v1/_/leases", '{"PublicIP":"10.99.0.71","BackendType":"vxlan"}')
    assert json.loads(answer.body)["Subnet"] == "127.0.1.0/24"


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_server_finds_the_network_in_the_api_that_has_it(api: str, etcd: LocalEtcd) -> None:
    prefix = f"/found-in-{api}"
    etcd.keys(api).put(f"{prefix}/config", CONFIG)
    store = over_etcd(EtcdOptions((etcd.url,), prefix), "auto")
    assert store.config("_").backend_type == "host-gw"
    store.close()


def test_new_lease_of_a_server_avoids_address_of_etcd(etcd: LocalEtcd) -> None:
    etcd.put(f"{ROOT}/loop/config", ON_LOOPBACK)
    store = over_etcd(EtcdOptions((etcd.url,)), "v2")
    attrs = LeaseAttrs(IPv4Address("10.99.0.72"), backend_type="vxlan")
    wanted = Acquisition(attrs, (None, None), frozenset())
    assert store.acquire("loop", wanted).key == (IPv4Network("127.0.1.0/24"), None)
    store.close()


def test_join_with_an_address_that_is_no_hosts_is_refused_unless_it_has_its_lease(
    etcd: LocalEtcd, server: Running
) -> None:
    body = '{"PublicIP":"127.0.0.1","BackendType":"host-gw"}'
    reserved = '{"Subnet":"10.5.63.0/24","PublicIP":"127.0.0.1"}'
    for kind, text in (("leases", body), ("reservations", reserved)):
        refused = server.ask("POST", f"/v1/_/{kind}", text)
        assert (refused.status, "the public IP 127.0.0.1 is no host's" in refused.body) == (400, True)
    etcd.put(f"{ROOT}/subnets/10.5.63.0-24", body, 86400)
    assert '"Subnet":"10.5.63.0/24"' in server.ask("POST", "/v1/_/leases", body).body
    assert server.ask("POST", "/v1/_/reservations", reserved).status == 200
    etcd.delete(f"{ROOT}/subnets/10.5.63.0-24")


def test_lease_is_renewed_while_there_is_no_network_config(etcd: LocalEtcd, server: Running) -> None:
    body = renewal("10.5.64.0/24")
    assert server.ask("PUT", "/v1/_/leases/10.5.64.0-24", body).status == 200
    etcd.delete(f"{ROOT}/config")
    try:
        assert server.ask("PUT", "/v1/_/leases/10.5.64.0-24", body).status == 200
        assert server.ask("PUT", "/v1/_/leases/10.5.65.0-24", renewal("10.5.65.0/24")).status == 500
    finally:
        etcd.put(f"{ROOT}/config", CONFIG)


def test_leases_and_watch_of_ipv6_are_told(server: Running, etcd: LocalEtcd) -> None:
    etcd.put(
        f"{ROOT}/six/config",
        '{"Network":"10.6.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:6::/48","Backend":{"Type":"host-gw"}}',
    )
    manager = RemoteStore(RemoteOptions((RemoteServer("127.0.0.1", server.port),), network="six"))
    config = manager.network_config()
    attrs = LeaseAttrs(IPv4Address("10.99.0.41"), IPv6Address("fd00::41"), "host-gw")
    lease = manager.acquire(config, attrs, (None, None))
    assert config.families == (4, 6)
    assert None not in lease.key
    assert manager.renew(lease).key == lease.key
    assert manager.stored(IPv6Address("fd00::41")) == attrs
    manager.close()


def test_lease_of_our_former_address_is_kept(server: Running) -> None:
    manager = RemoteStore(RemoteOptions((RemoteServer("127.0.0.1", server.port),)))
    config = manager.network_config()
    old = manager.acquire(config, LeaseAttrs(IPv4Address("10.99.0.51"), None, "host-gw"), (None, None))
    new = LeaseAttrs(IPv4Address("10.99.0.52"), None, "host-gw")
    kept = manager.acquire(config, new, (None, None), LocalFacts(written=old))
    assert (kept.key, kept.attrs) == (old.key, new)
    manager.close()


def test_endpoints_are_written_and_read_through_the_server(etcd: LocalEtcd, server: Running) -> None:
    one, other = (RemoteStore(RemoteOptions((RemoteServer("127.0.0.1", server.port),))) for _ in range(2))
    name = f"{'a' * 43}="
    with closing(one), closing(other):
        one.publish_endpoints(name, "203.0.113.9:40000,[2001:db8::1]:51820")
        assert other.endpoints() == {name: "203.0.113.9:40000,[2001:db8::1]:51820"}
    assert (etcd.keys("v2").get(f"{ROOT}/endpoints/{name}") or {})["ttl"] > 86000
    for target, body in (("/v1/_/endpoints/short", "x:1"), (f"/v1/_/endpoints/{name}", "{}")):
        answer = server.ask("PUT", target, body)
        assert (answer.status, answer.body) == (400, "bad endpoints")


@pytest.mark.parametrize("act", [LeaseStore.revoke, LeaseStore.release])
def test_lease_that_changes_before_it_is_removed_or_released_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[LeaseStore, str, LeaseKey], None]
) -> None:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", CONFIG)
    file.put(LEASE, '{"PublicIP":"10.99.0.11"}')
    read: list[str] = []

    def fetch(client: EmbeddedClient, key: str, *, recursive: bool = False) -> KeyReply:
        reply = actually(client, key, recursive=recursive)
        if key == LEASE:
            read.append(key)
            if len(read) == 1:
                file.put(LEASE, '{"PublicIP":"10.99.0.12"}')
        return reply

    actually = EmbeddedClient.fetch
    monkeypatch.setattr(EmbeddedClient, "fetch", fetch)
    act(over_file(file.keystore), "_", (IPv4Network("10.5.12.0/24"), None))
    assert len(read) == 2
    left = [(node.value, node.ttl is None) for node in file.keystore.below(f"{ROOT}/subnets")[0]]
    assert left == ([] if act is LeaseStore.revoke else [('{"PublicIP":"10.99.0.12"}', False)])
