"""A store for tests that ask nothing of it, and a node for those that start nothing of it."""

from __future__ import annotations

from flanneld import effects
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile.counters import CountedStore, counted
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions


def unasked_store() -> CountedStore:
    """Open etcd at an address for documentation; that connects to nothing."""
    return counted(open_etcd(EtcdOptions(("http://192.0.2.1:2379",)), "v3"))


def idle_node(options: Options, manager: CountedStore | None = None) -> Node:
    """Return a node that has not begun."""
    return Node(options, effects.dry_run(options, {}), manager or unasked_store())
