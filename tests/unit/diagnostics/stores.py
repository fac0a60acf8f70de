"""A store for tests that ask nothing of it."""

from __future__ import annotations

from flanneld.reconcile.counted_manager import CountedManager, counted
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.endpoints import EtcdOptions


def unasked_store() -> CountedManager:
    """Open etcd at an address for documentation; that connects to nothing."""
    return counted(open_etcd(EtcdOptions(("http://192.0.2.1:2379",)), "v3"))
