"""Where a measurement is made: a store full of leases, and a fresh node for each life of a daemon."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.bench.cluster import (
    FIRST_PUBLIC_IP,
    IPV6_OVERLAY,
    OVERLAY,
    UNDERLAY_PREFIX,
    Nodes,
    Writer,
    open_leases,
)
from tests.lab import Etcd, Lab, Node, own_command, wait_for
from tests.lab.daemon import Daemon
from tests.lab.forks import exact
from tests.lab.lab import ADDRESS
from tests.lab.namespace import remove


@dataclass(frozen=True, slots=True)
class Bed:
    """A laboratory whose etcd holds the leases of so many peers."""

    lab: Lab
    backend: str
    peers: int
    #: With IPv6 beside IPv4?
    dual: bool = False

    @property
    def title(self) -> str:
        """What the bed is called in the results."""
        if self.dual:
            return f"{self.backend}, both families"
        return f"{self.backend} on etcd v3" if self.etcd.api == "v3" else self.backend

    @property
    def etcd(self) -> Etcd:
        return self.lab.etcd

    def writer(self) -> AbstractContextManager[Writer]:
        """What has more peers come and go."""
        return open_leases(self.etcd, self.backend, dual=self.dual)

    def start(self, node: Node, command: Sequence[str]) -> None:
        """Start a daemon on a node of this bed."""
        node.start(command=command, environment={"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")})

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
        self._forget(node)
        remove([node.namespace])
        wait_for(lambda: not self._plugged_in(node), 120, f"the kernel to take {node.name} apart")

    def _forget(self, node: Node) -> None:
        if node.env():
            self.etcd.delete_lease(node.subnet())

    def _plugged_in(self, node: Node) -> bool:
        """Is its end of the cable still there? It goes together with the node's."""
        with self.lab.switch.entered():
            return node.name in (name for _, name in socket.if_nameindex())


@contextmanager
def make_bed(backend: str, peers: int, api: str = "v2", *, dual: bool = False) -> Iterator[Bed]:
    """Build the laboratory, write the config and the leases."""
    with Lab(api=api) as lab, exact():
        config = {"Network": OVERLAY, "SubnetLen": 24, "Backend": {"Type": backend}}
        lab.etcd.put_config(config | ({"EnableIPv6": True, "IPv6Network": IPV6_OVERLAY} if dual else {}))
        bed = Bed(lab, backend, peers, dual)
        with open_leases(lab.etcd, backend, dual=dual) as leases:
            leases.load(peers)
        yield bed


class ServerBed(Bed):
    """The same with a server of leases between the node and etcd."""

    @property
    def title(self) -> str:
        return f"{self.backend} through a server"

    def start(self, node: Node, command: Sequence[str]) -> None:
        node.start(f"--remote={ADDRESS}:{_SERVER}", command=command)


@contextmanager
def make_server_bed(backend: str, peers: int) -> Iterator[Bed]:
    """Build the laboratory with a server of ours beside etcd."""
    with make_bed(backend, peers) as bed:
        flags = [f"--listen={ADDRESS}:{_SERVER}", f"--etcd-endpoints={bed.etcd.endpoint}", "--etcd-api=v2"]
        server = Daemon(bed.lab.switch, [*own_command(), *flags], bed.lab.directory / "server.log")
        try:
            wait_for(lambda: "running as server" in server.log(), what="the server to listen")
            yield ServerBed(bed.lab, backend, peers)
        finally:
            server.end(signal.SIGKILL, 20)


#: Port of the server of leases.
_SERVER = 8888
#: Seconds from one heartbeat of a kubelet to the next while nothing else changes.
HEARTBEAT_INTERVAL = 300


class KubeBed(Bed):
    """The same with a Kubernetes API server full of nodes, whose kubelets report all the time."""

    @property
    def title(self) -> str:
        return f"{self.backend} in Kubernetes"

    @contextmanager
    def node(self) -> Iterator[Node]:
        with super().node() as node:
            self.lab.kube.add(node)
            yield node

    def start(self, node: Node, command: Sequence[str]) -> None:
        flags = [*self.lab.kube.flags(), f"--net-config-path={_net_conf(self.lab)}"]
        node.start(*flags, command=command, environment={"NODE_NAME": node.name})

    def writer(self) -> AbstractContextManager[Writer]:
        return nullcontext(Nodes(self.lab.kube.control, self.backend))

    def _forget(self, node: Node) -> None:
        self.lab.kube.control.delete_node(node.name)


@contextmanager
def make_kube_bed(backend: str, peers: int) -> Iterator[Bed]:
    """Build the laboratory with nodes of a real one's size, and let their heartbeats come."""
    with Lab() as lab, exact():
        config = {"Network": OVERLAY, "Backend": {"Type": backend}}
        _net_conf(lab).write_text(json.dumps(config))
        control = lab.kube.control
        control.put_crowd(peers, OVERLAY, FIRST_PUBLIC_IP, backend)
        if peers:
            control.start_heartbeats(peers / HEARTBEAT_INTERVAL)
        yield KubeBed(lab, backend, peers)


def _net_conf(lab: Lab) -> Path:
    return lab.directory / "net-conf.json"
