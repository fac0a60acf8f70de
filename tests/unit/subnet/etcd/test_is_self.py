"""Leases of nodes that share a public IP behind NAT, told apart by their public keys, in a real etcd."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.model import Lease, LeaseAttrs
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.store import NO_FACTS, LocalFacts, Store
from tests.local_etcd import LocalEtcd

CONFIG = '{"Network": "10.5.0.0/16", "Backend": {"Type": "wireguard"}}'
NAT, ELSEWHERE = IPv4Address("198.51.100.7"), IPv4Address("203.0.113.9")
_numbers = itertools.count()


def attrs(key: str, public_ip: IPv4Address = NAT) -> LeaseAttrs:
    return LeaseAttrs(public_ip, backend_type="wireguard", backend_data={"PublicKey": key})


def by_key(key: str) -> LocalFacts:
    """What is known on a node whose backend goes by this public key."""

    def is_self(theirs: LeaseAttrs, _ours: LeaseAttrs) -> bool:
        return bool(theirs.backend_data == {"PublicKey": key})

    return LocalFacts(is_self=is_self)


class Network:
    """A prefix of its own in one API of etcd, or in both."""

    def __init__(self, etcd: LocalEtcd, api: str) -> None:
        self._etcd = etcd
        self._api = api
        self._apis = ("v2", "v3") if api == "both" else (api,)
        self._prefix = f"/nat-{next(_numbers)}"
        self.opened: list[Store] = []
        self._put("config", CONFIG)

    def join(
        self, key: str, public_ip: IPv4Address = NAT, local: LocalFacts | None = None
    ) -> tuple[Store, Lease]:
        """Start a node; without ``local`` its backend goes by its key."""
        options = EtcdOptions((self._etcd.url,), self._prefix, transport="json")
        manager = open_etcd(options, self._api, EtcdTimeouts(read=20.0))
        self.opened.append(manager)
        config = manager.network_config()
        return manager, manager.acquire(config, attrs(key, public_ip), (None, None), local or by_key(key))

    def overwrite(self, lease: Lease, key: str) -> None:
        value = {"PublicIP": str(NAT), "BackendType": "wireguard", "BackendData": {"PublicKey": key}}
        self._put(f"subnets/{str(lease.subnet).replace('/', '-')}", json.dumps(value))

    def _put(self, name: str, value: str) -> None:
        for api in self._apis:
            self._etcd.keys(api).put(f"{self._prefix}/{name}", value, None if name == "config" else 3600)


@pytest.fixture(params=["v2", "v3", "both"])
def network(request: pytest.FixtureRequest, etcd: LocalEtcd) -> Iterator[Network]:
    network = Network(etcd, request.param)
    yield network
    for manager in network.opened:
        manager.close()


def test_nodes_with_one_public_ip_have_a_lease_each_and_find_it_again(network: Network) -> None:
    (_, one), (_, other) = network.join("one"), network.join("other")
    assert one.key != other.key
    assert [network.join(key)[1].key for key in ("one", "other")] == [one.key, other.key]


def test_public_ip_decides_for_a_backend_that_does_not_say(network: Network) -> None:
    _, one = network.join("one")
    assert network.join("other", local=NO_FACTS)[1].key == one.key


def test_node_finds_its_lease_under_another_public_ip(network: Network) -> None:
    _, lease = network.join("one")
    _, found = network.join("one", ELSEWHERE)
    assert (found.key, found.attrs) == (lease.key, attrs("one", ELSEWHERE))


def test_renewal_overwrites_its_own_lease_under_another_public_ip(network: Network) -> None:
    manager, lease = network.join("one")
    network.overwrite(lease, "one")
    moved = attrs("one", ELSEWHERE)
    assert manager.renew(replace(lease, attrs=moved)).attrs == moved


def test_renewal_leaves_the_lease_of_another_node_behind_the_same_public_ip(network: Network) -> None:
    manager, lease = network.join("one")
    network.overwrite(lease, "other")
    with pytest.raises(Retryable, match=f"the lease {lease} belongs to node {NAT} now"):
        manager.renew(lease)
