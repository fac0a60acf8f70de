"""Where a measurement is made: an etcd full of leases, and a fresh node for each life of a daemon."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.bench.cluster import OVERLAY, UNDERLAY_PREFIX, open_leases
from tests.lab import Etcd, Lab, Node, wait_for
from tests.lab.lab import ADDRESS
from tests.lab.namespace import remove


@dataclass(frozen=True, slots=True)
class Bed:
    """A laboratory whose etcd holds the leases of so many peers."""

    lab: Lab
    backend: str
    peers: int

    @property
    def etcd(self) -> Etcd:
        return self.lab.etcd

    @contextmanager
    def node(self) -> Iterator[Node]:
        """A node that no daemon has run on; afterwards it goes with all it holds, its lease too."""
        (node,) = self.lab.add_nodes()
        node.namespace.ip(
            f"address del {node.address}/24 dev eth0",
            f"address add {node.address}/{UNDERLAY_PREFIX} dev eth0",
            f"route replace default via {ADDRESS}",
        )
        try:
            yield node
        finally:
            node.close()
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """The kernel takes a namespace apart in the background; it must not do so in the next measurement."""
        if node.env():
            self.etcd.delete_lease(node.subnet())
        remove([node.namespace])
        wait_for(lambda: not self._plugged_in(node), 120, f"the kernel to take {node.name} apart")

    def _plugged_in(self, node: Node) -> bool:
        """Is its end of the cable still there? It goes together with the node's."""
        with self.lab.switch.entered():
            return node.name in (name for _, name in socket.if_nameindex())


@contextmanager
def make_bed(backend: str, peers: int) -> Iterator[Bed]:
    """Build the laboratory, write the config and the leases."""
    with Lab() as lab:
        lab.etcd.put_config({"Network": OVERLAY, "SubnetLen": 24, "Backend": {"Type": backend}})
        with open_leases(lab.etcd, backend) as leases:
            leases.load(peers)
        yield Bed(lab, backend, peers)
