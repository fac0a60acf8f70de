"""Counting what a store is asked: by a wrapper, which leaves the store as it is."""

from __future__ import annotations

import pytest

from flanneld.errors import Cancelled, Retryable
from flanneld.model import Event
from flanneld.reconcile.counters import counted
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.store import NodeStore, Store
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import LocalEtcd

CONFIG = '{"Network": "10.3.0.0/16"}'


def store_in(etcd: LocalEtcd, prefix: str) -> Store:
    return open_etcd(EtcdOptions((etcd.url,), prefix), "v3")


def test_no_attribute_of_the_store_is_replaced(etcd: LocalEtcd) -> None:
    store = store_in(etcd, "/counted/replaced")
    before = dict(vars(store))
    counted(store).reread()
    assert vars(store) == before


def test_requests_and_failures_are_counted_and_a_success_clears_the_failure(
    etcd: LocalEtcd, keys: V3Keys
) -> None:
    store = counted(store_in(etcd, "/counted/requests"))
    with pytest.raises(Retryable) as failure:
        store.network_config()
    assert str(store.counters.problems["network_config"]) == str(failure.value)
    keys.put("/counted/requests/config", CONFIG)
    assert str(store.network_config().ranges[0].network) == "10.3.0.0/16"
    assert store.counters.problems == {}
    assert (sum(store.counters.requests.counts), store.counters.errors) == (2, 1)


def test_events_and_relists_of_the_watch_are_counted_before_they_are_delivered(
    etcd: LocalEtcd, keys: V3Keys
) -> None:
    keys.put("/counted/watch/config", CONFIG)
    store = counted(store_in(etcd, "/counted/watch"))
    told: list[int] = []

    def deliver(_events: list[Event]) -> None:
        told.append(store.counters.events)
        if len(told) == 1:
            store.reread()
        else:
            store.close()

    with pytest.raises(Cancelled):
        store.watch(deliver, lambda: None)
    assert told == [1, 2]
    assert store.counters.resyncs == {"asked": 1, "store": 0}


def test_a_store_that_holds_nodes_still_does(etcd: LocalEtcd) -> None:
    kube = KubeStore(
        KubeOptions("http://192.0.2.1", "", "flannel.alpha.coreos.com", "", ""), {"NODE_NAME": "n1"}
    )
    assert isinstance(counted(kube), NodeStore)
    assert not isinstance(counted(store_in(etcd, "/counted/nodes")), NodeStore)
