"""A server of ours over a real etcd, and what Go flannel 0.6.2 was recorded to say."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flanneld.errors import Cancelled
from flanneld.runtime.sockets.http_connection import TlsFiles
from flanneld.subnet.embedded.store import open_file
from flanneld.subnet.etcd.keys import NotFound
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.remote.change_log import ChangeLog
from flanneld.subnet.remote.credentials import ADMINISTRATOR, Caller, server_context
from flanneld.subnet.remote.leases import over_etcd, over_file
from flanneld.subnet.remote.rest import RestApi
from flanneld.subnet.remote.server import LeaseServer, open_listener
from tests.local_etcd import LocalEtcd, free_port

#: By number and name: method, target, body; status, headers and body of the answer if there was one.
EXCHANGES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("exchanges.json").read_text())
ROOT = "/coreos.com/network"
CONFIG = '{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}'


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def exchange(number: int) -> dict[str, Any]:
    """Return a recorded exchange by its number."""
    return next(each for name, each in EXCHANGES.items() if name.startswith(f"{number:03}-"))


class LocalFile:
    """A store in a file, filled as a ``LocalEtcd`` is."""

    def __init__(self, path: Path) -> None:
        self.keystore = open_file(str(path), create=True)

    def keys(self, _api: str) -> LocalFile:
        return self

    def put(self, key: str, value: str, ttl: int | None = None) -> None:
        try:
            node, _ = self.keystore.get(key)
        except NotFound:
            self.keystore.create(key, value, ttl)
        else:
            self.keystore.replace(key, value, ttl, node.modified)

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self.keystore.remove(key, self.keystore.get(key)[0].modified)
        for node in self.keystore.below(key)[0]:
            self.keystore.remove(node.key, node.modified)


class Running:
    """A server on loopback. Its store and its threads end with it."""

    def __init__(
        self,
        place: LocalEtcd | LocalFile,
        api: str = "",
        tls: TlsFiles | ssl.SSLContext | None = None,
        connections: int = 2000,
        check: Callable[[str, str], Caller] = lambda _header, _secret: ADMINISTRATOR,
    ) -> None:
        self.port = free_port()
        self.place = place
        if isinstance(place, LocalFile):
            self.store = over_file(place.keystore)
        else:
            self.store = over_etcd(EtcdOptions((place.url,)), api, EtcdTimeouts(read=2.0, pause=0.05))
        listener = open_listener(f"127.0.0.1:{self.port}", {})
        context = tls if isinstance(tls, ssl.SSLContext) else server_context(tls or TlsFiles())
        self.server = LeaseServer(listener, RestApi(self.store, self._follow, check), context, connections)
        self.threads = [threading.Thread(target=self.server.serve)]
        self.threads[0].start()

    def ask(self, method: str, target: str, body: str = "", timeout: float = 20) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, target, body or None)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode())
        finally:
            connection.close()

    def cursor(self, target: str = "/v1/_/leases") -> str:
        cursor: str = json.loads(self.ask("GET", target).body)["cursor"]
        return cursor

    def follow(self) -> None:
        """Have the server follow its store, as the first watch does. A snapshot tells what came before."""
        self.ask("GET", "/v1/_/leases?next=0")

    def close(self) -> None:
        self.store.close()
        self.server.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()

    def _follow(self, changes: ChangeLog) -> None:
        def run() -> None:
            with suppress(Cancelled):
                changes.run(lambda: None)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()


@contextmanager
def running_server(
    place: LocalEtcd | LocalFile, api: str = "", tls: TlsFiles | None = None, connections: int = 2000
) -> Iterator[Running]:
    server = Running(place, api, tls, connections)
    try:
        yield server
    finally:
        server.close()


def timeless(text: str) -> str:
    """Leave out what no two runs have in common: times, and etcd's indices with the key next to them."""
    text = re.sub(r'"Expiration":"(?!0001-)[^"]*Z"', '"Expiration":"T"', text)
    text = re.sub(r'"cursor":"\d+"', '"cursor":"N"', text)
    return re.sub(r"Key not found \(\S*\) \[\d+\]", "Key not found (K) [N]", text)
