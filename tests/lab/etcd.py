"""A real etcd with both of its APIs, in a namespace, and the few requests that tests make of it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.lab import sparse
from tests.lab.etcd_v3 import V3Keys
from tests.lab.namespace import Namespace, suspend
from tests.lab.wait import WATCHED, wait_for
from tests.vm.machine import INSIDE

PORT = 2379
PREFIX = "/coreos.com/network"  # the daemon's default
TTL = 86400  # what a daemon gives its own lease, in seconds
#: Milliseconds after which it wakes up each time. A member is its own leader after five; in the machine each
#: of them takes a millisecond of CPU.
TICK = 100 if INSIDE in os.environ else 20


class EtcdError(Exception):
    """etcd refused: ``code`` is v2's error code, 100 for a key that is not there, or the gRPC code of v3."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.code = int(body.get("errorCode", body.get("code", 0)))
        super().__init__(f"{self.code} {body.get('message')} ({body.get('cause')})")


class Etcd:
    """One etcd member. Its data outlive ``stop``, ``kill`` and another ``start``.

    ``api`` is the one in which the network is, "v2" or "v3"; a node of v3 is told as v2 tells it. Keys that
    begin with ``/`` are taken as they are, others are below the network's prefix. ``program`` is by default
    what ``FLANNELD_TEST_ETCD`` names, else Debian's.
    """

    def __init__(
        self, namespace: Namespace, address: str, directory: Path, api: str = "v2", program: str = ""
    ) -> None:
        self._program = program or os.environ.get("FLANNELD_TEST_ETCD", "")
        self.namespace = namespace
        self.api = api
        self.v3 = V3Keys(lambda path, body: self.request("POST", f"/v3{path}", body, as_json=True))
        self.address = address
        self.endpoint = f"http://{address}:{PORT}"
        self._login: dict[str, str] = {}
        self._data = directory / "etcd"
        self._backup = directory / "etcd-backup"
        self._log = directory / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Start and wait until it answers; ``flags`` come after the lab's own and win."""
        self.launch(*flags)
        wait_for(self.healthy, 30, "etcd to answer")

    def launch(self, *flags: str) -> None:
        """Start; a member of a cluster answers when most of the others run."""
        command = self._program or shutil.which("etcd")
        if command is None:
            raise FileNotFoundError("etcd is not installed; apt-get install etcd-server")
        with self._log.open("ab") as output:
            start = partial(
                self.namespace.start,
                command,
                "--name=lab",
                f"--data-dir={self._data}",
                "--enable-v2=true",
                f"--listen-client-urls={self.endpoint}",
                f"--advertise-client-urls={self.endpoint}",
                f"--heartbeat-interval={TICK}",
                f"--election-timeout={5 * TICK}",
                *flags,
                output=output,
            )
            self._process = sparse.started(start)
        WATCHED.add(self)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process and wait for it."""
        WATCHED.discard(self)
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a power failure would."""
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and start it again with the same data."""
        self.stop(how)
        self.start()

    def forget(self) -> None:
        """Lose all data, while it is stopped."""
        shutil.rmtree(self._data)

    def back_up(self) -> None:
        """Copy its data for ``restore``; it is stopped for that."""
        self.stop()
        shutil.copytree(self._data, self._backup)
        self.start()

    def restore(self) -> None:
        """Have the data of the last backup, while it is stopped."""
        self.forget()
        shutil.copytree(self._backup, self._data)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Make it take connections and requests, and say nothing, for a while."""
        assert self._process is not None
        suspend(self._process.pid)
        try:
            yield
        finally:
            self.send_signal(signal.SIGCONT)

    def healthy(self) -> bool:
        """Does it answer, with a leader?"""
        try:
            return bool(self.request("GET", "/health").get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll() if self._process is not None else 0

    def failure(self) -> str:
        """How it ended by itself, and its last words; "" unless it did."""
        status = self.status()
        return f"etcd ended by itself, status {status}:\n{self.log()[-2000:]}" if status else ""

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, key: str) -> dict[str, Any] | None:
        """The node at ``key``, None when there is none."""
        if self.api == "v3":
            return self.v3.get(_full(key))
        try:
            return self._keys("GET", key)
        except EtcdError as error:
            if error.code == 100:
                return None
            raise

    def set(self, key: str, value: str, ttl: int | None = None) -> dict[str, Any]:
        """Write a value; without ``ttl`` (seconds) it is permanent."""
        if self.api == "v3":
            return {"modifiedIndex": self.v3.put(_full(key), value, ttl)}
        return self._keys("PUT", key, {"value": value} | ({} if ttl is None else {"ttl": str(ttl)}))

    def mkdir(self, key: str) -> dict[str, Any]:
        return self._keys("PUT", key, {"dir": "true"})

    def delete(self, key: str) -> None:
        """Delete a key, or a directory with all that is in it."""
        if self.api == "v3":
            self.v3.delete(_full(key))
            return
        self._keys("DELETE", key, query="?recursive=true")

    def children(self, key: str) -> list[dict[str, Any]]:
        """The nodes in a directory, ``[]`` when it is not there."""
        if self.api == "v3":
            return self.v3.children(_full(key))
        nodes: list[dict[str, Any]] = (self.get(key) or {}).get("nodes", [])
        return nodes

    def put_config(self, config: Mapping[str, Any]) -> None:
        """Write the network config."""
        self.set("config", json.dumps(config))

    def leases(self) -> dict[str, Any]:
        """The attributes of every lease by its subnet, ``10.5.7.0/24`` or ``10.5.7.0/24&fc00:5:0:7::/64``."""
        return {subnet: json.loads(value) for subnet, value in self.lease_values().items()}

    def lease_values(self) -> dict[str, str]:
        """The same as it is written there, be it sense or not."""
        return {_subnet(node["key"]): node.get("value", "") for node in self.children("subnets")}

    def lease(self, subnet: str) -> dict[str, Any] | None:
        """The etcd node of a lease with its ``value``, ``ttl`` and ``modifiedIndex``."""
        return self.get(f"subnets/{subnet.replace('/', '-')}")

    def put_lease(self, subnet: str, attributes: Mapping[str, Any], ttl: int | None = TTL) -> int:
        """Write a lease as a node of the cluster would and return its index; ``ttl`` None reserves it."""
        value = json.dumps(attributes, separators=(",", ":"))
        return int(self.set(f"subnets/{subnet.replace('/', '-')}", value, ttl)["modifiedIndex"])

    def delete_lease(self, subnet: str) -> None:
        self.delete(f"subnets/{subnet.replace('/', '-')}")

    def put_often(self, key: str, times: int, value: str = "") -> None:
        """Write one key again and again, as fast as one connection can."""
        with self._connected() as connection:
            for number in range(times):
                self._ask(connection, "PUT", f"/v2/keys{quote(key)}", {"value": value or str(number)})

    def drop_streams(self) -> None:
        """Write more into the network than etcd keeps for a v2 stream that nobody reads.

        The kernel's buffers take some MB, etcd another 100 events; then it forgets the stream, and leaves it
        open.
        """
        self.put_often(f"{PREFIX}/subnets/flood", 250, "x" * 65536)

    def write(self, times: int) -> None:
        """Let the revision rise by writes that are none of the network's."""
        if self.api == "v3":
            for number in range(times):
                self.v3.put("/unrelated", str(number))
        else:
            self.put_often("/unrelated", times)

    def forget_history(self) -> None:
        """Let nobody learn any more what has happened so far."""
        if self.api == "v3":
            self.v3.compact()
        else:
            self.put_often("/unrelated", 1000)

    def has_forgotten(self, index: int) -> bool:
        """Is what came after that index out of its memory?"""
        query = f"wait=true&recursive=true&waitIndex={index + 1}"
        try:
            if self.api == "v3":
                self.v3.read_at(f"{PREFIX}/config", index)
            else:
                self.request("GET", f"/v2/keys{PREFIX}/subnets?{query}")
        except EtcdError as error:
            return error.code in (401, 11)
        return False

    def gets(self) -> int:
        """How many reads of keys it has answered so far, or in v3 begun to."""
        if self.api == "v3":
            lines = self.text("/metrics").splitlines()
            counts = [line for line in lines if line.startswith("grpc_server_started") and '"Range"' in line]
            return sum(int(float(line.split()[-1])) for line in counts)
        counted = self.request("GET", "/v2/stats/store")
        return int(counted["getsSuccess"]) + int(counted["getsFail"])

    def watches(self) -> int:
        """How many watches it serves through v2."""
        return int(self.request("GET", "/v2/stats/store")["watchers"])

    def require_login(self, user: str, password: str) -> None:
        """Let in, besides the test, one user only, with no more rights than a daemon needs."""
        if self.api == "v3":
            self.v3.require_login(user, password, PREFIX)
            self.log_in(password)
            return
        kv = {"read": [f"{PREFIX}/*"], "write": [f"{PREFIX}/subnets/*"]}
        for path, order in (
            ("users/root", {"user": "root", "password": "of the test"}),
            ("roles/daemon", {"role": "daemon", "permissions": {"kv": kv}}),
            (f"users/{user}", {"user": user, "password": password, "roles": ["daemon"]}),
            ("enable", {}),
        ):
            self.request("PUT", f"/v2/auth/{path}", order, as_json=True)
        token = b64encode(b"root:of the test").decode()
        self._login = {"Authorization": f"Basic {token}"}
        self.request("DELETE", "/v2/auth/roles/guest")

    def log_in(self, password: str) -> None:
        """Let the test itself in again, where v3 has forgotten all logins."""
        self._login = {}
        self._login = {"Authorization": self.v3.token("root", password)}

    def change_password(self, user: str, password: str) -> None:
        order = {"user": user, "name": user, "password": password}
        if self.api == "v3":
            self.request("POST", "/v3/auth/user/changepw", order, as_json=True)
        else:
            self.request("PUT", f"/v2/auth/users/{user}", order, as_json=True)

    def request(
        self, method: str, path: str, form: Mapping[str, Any] | None = None, *, as_json: bool = False
    ) -> dict[str, Any]:
        """One HTTP request; raises ``EtcdError`` when etcd refuses, ``OSError`` when it is away."""
        with self._connected() as connection:
            return self._ask(connection, method, path, form, as_json=as_json)

    def text(self, path: str) -> str:
        """What it has to say there, as it is."""
        with self._connected() as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.address, PORT, timeout=60)
        with self.namespace.entered():
            connection.connect()
        try:
            yield connection
        finally:
            connection.close()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        form: Mapping[str, Any] | None = None,
        *,
        as_json: bool = False,
    ) -> dict[str, Any]:
        kind = "application/json" if as_json else "application/x-www-form-urlencoded"
        text = json.dumps(form) if as_json else urlencode(form or {})
        connection.request(method, path, text, {"Content-Type": kind, **self._login})
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read() or "{}")
        if response.status >= 400:
            raise EtcdError(body)
        return body

    def _keys(
        self, method: str, key: str, form: Mapping[str, str] | None = None, query: str = ""
    ) -> dict[str, Any]:
        node: dict[str, Any] = self.request(method, f"/v2/keys{quote(_full(key))}{query}", form)["node"]
        return node


def _full(key: str) -> str:
    return key if key.startswith("/") else f"{PREFIX}/{key}"


def _subnet(key: str) -> str:
    return key.rsplit("/", 1)[-1].replace("-", "/")
