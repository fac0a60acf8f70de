"""Stores that were closed, and watches that were cancelled, stay so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.config import parse
from flanneld.errors import Cancelled
from flanneld.model import Lease, LeaseAttrs
from flanneld.options import read
from flanneld.subnet.embedded.store import EmbeddedClient, open_file
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.keys import KeyClient, Position
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.opening import open_store
from flanneld.subnet.store import Store
from tests.etcd_clients import transport_to
from tests.local_etcd import LocalEtcd
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, running_server

IP = IPv4Address("192.0.2.1")
LEASE = Lease(LeaseAttrs(IP), IPv4Network("10.5.7.0/24"))
CALLS: dict[str, Callable[[Store], object]] = {
    "read_leases": lambda manager: list(manager.read_leases()),
    "stored": lambda manager: manager.stored(IP),
    "acquire": lambda manager: manager.acquire(parse(CONFIG), LEASE.attrs, (None, None)),
    "renew": lambda manager: manager.renew(LEASE),
    "watch": lambda manager: manager.watch(lambda _: None, lambda: None),
    "watch_own": lambda manager: manager.watch_own(LEASE, lambda _: None, lambda: None),
}


@pytest.fixture(params=["v2", "v3", "gRPC", "auto", "both", "remote", "file", "kube"])
def manager(request: pytest.FixtureRequest, etcd: LocalEtcd, tmp_path: Path) -> Iterator[Store]:
    """A store that has answered, but for Kubernetes, and was closed then."""
    file = LocalFile(tmp_path / "leases.db")
    for keys in (etcd.keys("v2"), etcd.keys("v3"), file):
        keys.put(f"{ROOT}/config", CONFIG)
    net_conf = tmp_path / "net-conf.json"
    net_conf.write_text(CONFIG)
    with running_server(file) as server:
        flags = {
            "remote": [f"-remote=127.0.0.1:{server.port}"],
            "file": [f"-store={tmp_path / 'leases.db'}"],
            "gRPC": [f"-etcd-endpoints={etcd.url}", "-etcd-api=v3", "-etcd-transport=grpc"],
            "kube": ["-kube-subnet-mgr", "-kube-api-url=http://127.0.0.1:1", f"-net-config-path={net_conf}"],
        }.get(request.param, [f"-etcd-endpoints={etcd.url}", f"-etcd-api={request.param}"])
        manager = open_store(read(flags, {}), {"NODE_NAME": "n1"})
        manager.network_config()
        if request.param != "kube":
            list(manager.read_leases())
        manager.close()
        yield manager


@pytest.mark.parametrize("name", CALLS)
def test_closed_store_answers_no_call(manager: Store, name: str) -> None:
    for _ in range(2):
        with pytest.raises(Cancelled):
            CALLS[name](manager)


def test_closed_store_tells_no_config(manager: Store) -> None:
    if "Kubernetes" in manager.name:
        manager.network_config()  # a file of this host
    else:
        with pytest.raises(Cancelled):
            manager.network_config()


@pytest.mark.parametrize("api", ["v2", "v3", "gRPC", "file"])
def test_cancelled_watch_stays_cancelled(api: str, etcd: LocalEtcd, tmp_path: Path) -> None:
    if api == "file":
        client: KeyClient = EmbeddedClient(open_file(str(tmp_path / "leases.db"), create=True))
    else:
        transport = "grpc" if api == "gRPC" else "json"
        client = open_client(
            "v2" if api == "v2" else "v3",
            transport_to(etcd.url, timeouts=EtcdTimeouts(), transport=transport),
        )
    watcher = client.watcher("/cancelled", recursive=True, contact=lambda: None)
    watcher.cancel()
    for _ in range(2):
        with pytest.raises(Cancelled):
            watcher.read(Position(1, "1"))
    watcher.close()
