"""Nodes that join a server whose leases are in a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from queue import Queue

import pytest
from msgspec import structs

from flanneld.diagnostics.plan import all_leases
from flanneld.errors import Cancelled, Fatal
from flanneld.model import Added, Event, Lease, LeaseAttrs, Snapshot
from flanneld.option_values import RemoteServer
from flanneld.subnet.embedded.store import config_of, store_of, write_config
from flanneld.subnet.remote.rest import RestApi, RestRequest
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from flanneld.subnet.store import Deliver, LocalFacts
from tests.local_etcd import LocalEtcd, running_etcd
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, Running, running_server


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", CONFIG)
    return file


@pytest.fixture
def server(file: LocalFile) -> Iterator[Running]:
    with running_server(file) as server:
        yield server


def client(server: Running) -> RemoteStore:
    return RemoteStore(RemoteOptions((RemoteServer("127.0.0.1", server.port),)), 0.05)


def attributes(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address("198.18.0.0") + number, backend_type="host-gw")


def join(server: Running, number: int) -> str:
    manager = client(server)
    try:
        return str(manager.acquire(manager.network_config(), attributes(number), (None, None)))
    finally:
        manager.close()


def test_hundred_nodes_that_join_at_once_get_subnets_of_their_own(server: Running) -> None:
    subnets: dict[int, str] = {}

    def run(number: int) -> None:
        subnets[number] = join(server, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(100)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert (len(subnets), len(set(subnets.values()))) == (100, 100)
    # And each has it again after its restart.
    assert all(join(server, number) == subnets[number] for number in range(0, 100, 10))


@pytest.mark.parametrize("key", ["10.5.0.0-16", "0.0.0.0-1", "10.5.0.0-16&fc00::-8"])
def test_record_that_no_node_follows_blocks_no_join_through_a_server(
    file: LocalFile, server: Running, key: str
) -> None:
    if "&" in key:
        file.put(f"{ROOT}/config", CONFIG[:-1] + ',"EnableIPv6":true,"IPv6Network":"fc00::/48"}')
    file.put(f"{ROOT}/subnets/{key}", '{"PublicIP":"198.18.0.9"}')
    subnet = join(server, 1)
    assert ("," in subnet, join(server, 1)) == ("&" in key, subnet)


def test_order_of_joins_reaches_clients_that_ask_for_it(file: LocalFile, server: Running) -> None:
    first, second = join(server, 9), join(server, 1)
    server.follow()
    cursor = server.cursor()
    file.put(f"{ROOT}/subnets/{first.replace('/', '-')}", '{"PublicIP":"198.18.0.9"}', 3600)
    manager = client(server)
    try:
        snapshot = all_leases(manager)
    finally:
        manager.close()
    created = {str(lease): lease.created for lease in snapshot.leases}
    assert 0 < created[first] < created[second]
    # A change keeps the order, in a watch as well. Go flannel is sent the bytes that it knows.
    for more in ("", f"?next={cursor}"):
        asked = RestRequest("GET", f"/v1/_/leases{more}", wants_index=True)
        text = RestApi(server.store, lambda _changes: None).answer(asked).body.decode()
        assert f'"Created":{created[first]}' in text
        assert "Created" not in server.ask("GET", f"/v1/_/leases{more}").body


def test_node_in_the_servers_process_shares_the_network(file: LocalFile, server: Running) -> None:
    own = store_of(file.keystore)
    lease = own.acquire(own.network_config(), attributes(1), (None, None))
    remote, heard = client(server), threading.Event()
    known: list[set[str]] = []

    def deliver(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Snapshot):
                known.append({str(each) for each in event.leases})
                heard.set()

    watch = threading.Thread(target=lambda: _watch(remote, deliver))
    watch.start()
    assert heard.wait(30)
    remote.close()
    own.close()
    watch.join(30)
    assert known == [{str(lease)}]


def _watch(manager: RemoteStore, deliver: Deliver) -> None:
    with suppress(Cancelled):
        manager.watch(deliver, lambda: None)


@pytest.mark.parametrize("place", ["file", "v2", "v3"])
def test_own_write_is_told_from_that_of_another_node(place: str, file: LocalFile) -> None:
    if place == "file":
        check_own_watch(file, place)
        return
    with running_etcd() as etcd:
        etcd.keys(place).put(f"{ROOT}/config", CONFIG)
        check_own_watch(etcd, place)


def test_nodes_behind_one_nat_have_leases_of_their_own(server: Running) -> None:
    def is_self(theirs: LeaseAttrs, ours: LeaseAttrs) -> bool:
        return bool(theirs.backend_data == ours.backend_data)

    subnets = []
    for key in ("one", "other", "one", "other"):
        attrs = LeaseAttrs(
            IPv4Address("198.18.0.1"), backend_type="wireguard", backend_data={"PublicKey": key}
        )
        manager = client(server)
        lease = manager.acquire(manager.network_config(), attrs, (None, None), LocalFacts(is_self=is_self))
        assert manager.renew(lease).attrs == attrs
        subnets.append(str(lease))
        moved = structs.replace(attrs, public_ip=IPv4Address("198.18.0.2"))
        manager.close()
    assert subnets[:2] == subnets[2:]
    assert subnets[0] != subnets[1]
    manager = client(server)
    # Known by its key under another public IP, too.
    kept = manager.acquire(manager.network_config(), moved, (None, None), LocalFacts(is_self=is_self))
    assert (str(kept), kept.attrs) == (subnets[1], moved)
    manager.close()


def check_own_watch(place: LocalFile | LocalEtcd, api: str) -> None:
    with running_server(place, api) as server:
        manager, heard = client(server), Queue[Event]()
        for number in (1, 2, 3):
            lease = manager.acquire(manager.network_config(), attributes(number), (None, None))
        watch = threading.Thread(target=lambda: _watch_own(manager, lease, heard))
        watch.start()
        first = heard.get(timeout=30)
        assert isinstance(first, Added)
        assert (first.lease.key, first.lease.asof) == (lease.key, lease.asof)
        rival = client(server)
        theirs = rival.acquire(rival.network_config(), attributes(3), (None, None))
        second = heard.get(timeout=30)
        assert isinstance(second, Added)
        assert second.lease.asof == theirs.asof > lease.asof
        for each in (manager, rival):
            each.close()
        watch.join(30)


def _watch_own(manager: RemoteStore, lease: Lease, heard: Queue[Event]) -> None:
    def deliver(events: list[Event]) -> None:
        for each in events:
            heard.put(each)

    with suppress(Cancelled):
        manager.watch_own(lease, deliver, lambda: None)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("10.5.0.0/16", {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}),
        ("fd00:5::/48", {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fd00:5::/48"}),
        ('{"Network": "10.6.0.0/16"}', {"Network": "10.6.0.0/16"}),
    ],
)
def test_network_is_a_network_or_a_whole_config(text: str, config: dict[str, object]) -> None:
    assert json.loads(config_of(text)).items() >= config.items()


@pytest.mark.parametrize("text", ["10.5.0.0/33", "10.5.0.1/16", "net", '{"Network": 5}', "{"])
def test_network_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(Fatal, match="-network: "):
        config_of(text)


def test_network_is_written_once_and_changed_on_demand(file: LocalFile) -> None:
    store = file.keystore
    path = f"{ROOT}/config"
    write_config(store, "10.5.0.0/16")
    assert store.get(path)[0].value == CONFIG
    write_config(store, '{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}')
    assert '"alloc"' in store.get(path)[0].value
    write_config(store, "10.7.0.0/16")
    assert "10.7.0.0/16" in store.get(path)[0].value
