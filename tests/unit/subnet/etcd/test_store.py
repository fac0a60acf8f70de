"""The store on one API over a file in place of an etcd: races that are lost, and what is not counted."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.errors import Cancelled, Retryable
from flanneld.model import LeaseAttrs
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, open_file
from flanneld.subnet.etcd.keys import Conflict, KeyReply
from flanneld.subnet.etcd.store import EtcdStore

CONFIG = '{"Network":"10.5.0.0/16"}'
ATTRS = LeaseAttrs(IPv4Address("192.0.2.1"), backend_type="host-gw")
NO_PREVIOUS = (None, None)


class Contested(EmbeddedClient):
    """A client that other nodes are quicker than, so many times."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_file(str(path), create=True))
        self.lost = 0

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        self._race(key)
        return super().create(key, value, ttl)

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        self._race(key)
        return super().replace(key, value, ttl, modified)

    def prolong(self, key: str, modified: int) -> None:
        """Let each renewal be a write, as in v2."""

    def _race(self, key: str) -> None:
        self.lost -= 1
        if self.lost >= 0:
            raise Conflict(f"{key} has changed")


@pytest.fixture
def client(tmp_path: Path) -> Contested:
    return Contested(tmp_path / "leases.db")


@pytest.fixture
def store(client: Contested) -> EtcdStore:
    client.store.create(f"{PREFIX}/config", CONFIG, None)
    return EtcdStore(client, PREFIX, "a file", pause_time=0.0, randrange=lambda _: 0)


def put(client: Contested, key: str, number: int) -> None:
    value = json.dumps({"PublicIP": f"192.0.2.{number}", "BackendType": "host-gw"})
    client.store.create(f"{PREFIX}/subnets/{key}", value, 600)


@pytest.mark.parametrize(("lost", "joins"), [(9, True), (10, False)])
def test_join_is_tried_ten_times_against_quicker_nodes(
    client: Contested, store: EtcdStore, lost: int, joins: bool
) -> None:
    client.lost = lost
    if joins:
        assert str(store.acquire(store.network_config(), ATTRS, NO_PREVIOUS)) == "10.5.1.0/24"
    else:
        with pytest.raises(Retryable, match="other nodes were quicker 10 times in a row"):
            store.acquire(store.network_config(), ATTRS, NO_PREVIOUS)


def test_leases_are_listed_again_once_a_race_is_lost(client: Contested, store: EtcdStore) -> None:
    config, wanted = store.network_config(), IPv4Network("10.5.1.0/24")
    assert store.stored(IPv4Address("192.0.2.2")) is None
    put(client, "10.5.1.0-24", 2)
    assert str(store.acquire(config, ATTRS, (wanted, None))) == "10.5.2.0/24"


@pytest.mark.parametrize(("lost", "is_renewed"), [(9, True), (10, False)])
def test_renewal_is_tried_ten_times_against_other_writers(
    client: Contested, store: EtcdStore, lost: int, is_renewed: bool
) -> None:
    lease = store.acquire(store.network_config(), ATTRS, NO_PREVIOUS)
    client.lost = lost
    if is_renewed:
        assert store.renew(lease).asof > lease.asof
    else:
        with pytest.raises(Retryable, match=r"the lease 10\.5\.1\.0/24 changes all the time"):
            store.renew(lease)


@pytest.mark.parametrize(("count", "more"), [(1, ""), (5, ""), (6, " and 1 more"), (7, " and 2 more")])
def test_at_most_five_records_that_no_node_follows_are_named(
    client: Contested, store: EtcdStore, caplog: pytest.LogCaptureFixture, count: int, more: str
) -> None:
    keys = [f"10.0.0.0-{length}" for length in range(7, 7 + count)]
    for number, key in enumerate(keys, 20):
        put(client, key, number)
    assert str(store.acquire(store.network_config(), ATTRS, NO_PREVIOUS)) == "10.5.1.0/24"
    named = ", ".join(sorted(f"{PREFIX}/subnets/{key}" for key in keys)[:5])
    (warning,) = [each for each in caplog.messages if each.startswith("Not counted")]
    assert warning.startswith(f"Not counted as leased: {named}{more}, as no node follows")


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        (["10.5.7.0-24"], f"{PREFIX}/subnets/10.5.7.0-24 (public IP 192.0.2.20); if that is a former lease"),
        (["10.5.6.0-24", "10.5.7.0-25"], f": {PREFIX}/subnets/10.5.7.0-25 (public IP 192.0.2.21); if that"),
    ],
)
def test_holder_of_our_previous_subnet_is_named(
    client: Contested, store: EtcdStore, caplog: pytest.LogCaptureFixture, holders: list[str], words: str
) -> None:
    for number, key in enumerate(holders, 20):
        put(client, key, number)
    previous = IPv4Network("10.5.7.0/24")
    lease = store.acquire(store.network_config(), ATTRS, (previous, None))
    assert lease.subnet != previous
    assert f"The subnet {previous} of the subnet file belongs to another node now" in caplog.text
    assert words in caplog.text


def test_closed_store_reads_nothing(client: Contested, store: EtcdStore) -> None:
    store.acquire(store.network_config(), ATTRS, NO_PREVIOUS)
    store.close()
    with pytest.raises(Cancelled):
        store.listing()
    assert len(client.store.below(f"{PREFIX}/subnets")[0]) == 1
