"""Many simulated nodes and their store, what happens to them, and what must hold once it is quiet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from flanneld.config import parse
from flanneld.state.resources import FdbEntry, Key, Neighbor, Resource, Route, Vxlan
from flanneld.state.table import Claim, Scope
from tests.unit.simulation.etcd import SimulatedEtcd
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kube import SimulatedApiServer
from tests.unit.simulation.node import BRIDGE, EtcdStore, KubeStore, Process, SimulatedHost, Store
from tests.unit.simulation.world import World

#: Hops after which a packet goes in circles.
TTL = 4
STORES = ("v2", "v3", "kube")
_NETWORK = IPv4Network("10.0.0.0/14")


class Cluster:
    """Hosts by number, and a store: etcd "v2" or "v3", or "kube"."""

    def __init__(self, world: World, store: str, directory: Path, backend: str = "vxlan") -> None:
        self.world = world
        config = {"Network": str(_NETWORK), "SubnetLen": 24, "Backend": {"Type": backend}}
        self.config = parse(json.dumps(config))
        self.hosts: dict[int, SimulatedHost] = {}
        self.by_address: dict[IPv4Address, SimulatedHost] = {}
        self.etcd: SimulatedEtcd | None = None
        self.kube: SimulatedApiServer | None = None
        self._net_config = directory / "net-conf.json"
        if store == "kube":
            self.kube = SimulatedApiServer(world)
            self._net_config.write_text(json.dumps(config))
        else:
            self.etcd = SimulatedEtcd(world, store, config)

    @property
    def store(self) -> SimulatedEtcd | SimulatedApiServer:
        store = self.etcd or self.kube
        assert store is not None
        return store

    def add(self, number: int) -> SimulatedHost:
        """Install a machine and run the daemon on it."""
        host = SimulatedHost(self.world, number, self.config, self._open_store)
        self.hosts[number] = host
        self.by_address[host.address] = host
        self.register_nodes()
        host.start()
        return host

    def register_nodes(self) -> None:
        """Kubelets register the machines that the API server lacks, and an operator deletes the others."""
        if self.kube is None:
            return
        hosts = {host.name: number for number, host in self.hosts.items()}
        for name in sorted(self.kube.nodes.keys() - hosts.keys()):
            self.kube.delete_node(name)
        for name, number in hosts.items():
            if name not in self.kube.nodes:
                subnet = int(_NETWORK.network_address) + (number << 8)
                self.kube.add_node(name, f"{IPv4Address(subnet)}/24")

    def remove(self, number: int) -> None:
        """Switch a machine off for good, and tell the store, as an operator would."""
        host = self.hosts[number]
        lease = host.process.lease if host.process else None
        self.switch_off(number)
        if self.kube is not None:
            self.kube.delete_node(host.name)
        elif self.etcd is not None and lease is not None:
            for key in [key for key in self.etcd.leases() if key.endswith(f"/{_etcd_name(lease.subnet)}")]:
                self.etcd.delete(key)

    def switch_off(self, number: int) -> None:
        """Switch a machine off for good. Its lease stays until it ends."""
        host = self.hosts.pop(number)
        host.stop()
        del self.by_address[host.address]

    def set_audit(self, seconds: float) -> None:
        for host in self.hosts.values():
            for table in host.kernel.tables.values():
                table.audit = seconds

    def _open_store(self, process: Process) -> Store:
        if self.kube is not None:
            return KubeStore(self.kube, process, self._net_config)
        assert self.etcd is not None
        return EtcdStore(self.etcd, process)

    # ---- what must hold --------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return what does not hold, in words; it all holds once the cluster is quiet."""
        return [*self._unfinished(), *self._shared_subnets(), *self._drift(), *self._lost_packets()]

    def _unfinished(self) -> Iterator[str]:
        for host in self.hosts.values():
            if host.process is None or host.process.lease is None or not host.process.is_settled:
                yield f"{host.name} has not settled"
            if host.kernel.foreign() != host.foreign:
                yield f"{host.name}: foreign objects are {host.kernel.foreign()}, were {host.foreign}"

    def lease_count(self) -> int:
        """Return how many leases the store has; in etcd that of a dead node lasts a day."""
        return len(self.hosts) if self.etcd is None else len(self.etcd.leases())

    def _shared_subnets(self) -> Iterator[str]:
        if self.etcd is not None:
            publics = [json.loads(value)["PublicIP"] for value in self.etcd.leases().values()]
            for host in self.hosts.values():
                if publics.count(str(host.address)) != 1:
                    yield f"{host.name} has {publics.count(str(host.address))} leases"
        owners: dict[object, str] = {}
        for host in self.hosts.values():
            if host.process is not None and host.process.lease is not None:
                other = owners.setdefault(host.process.lease.subnet, host.name)
                if other != host.name:
                    yield f"{host.name} and {other} have {host.process.lease}"

    def _drift(self) -> Iterator[str]:
        for host in self.hosts.values():
            peers = host.process.peers if host.process else None
            if peers is None:
                continue
            actual = ours(host.kernel)
            wanted = peers.wanted.state
            if actual != wanted:
                lacks = [str(each) for key, each in wanted.items() if actual.get(key) != each]
                extra = [str(each) for key, each in actual.items() if key not in wanted]
                yield f"{host.name} lacks {lacks[:3]}, has {extra[:3]} too many"
            if len(peers) != self.lease_count() - 1:
                yield f"{host.name} knows {len(peers)} peers of {self.lease_count() - 1}"

    def _lost_packets(self) -> Iterator[str]:
        targets = [
            (host, host.process.lease.subnet.network_address + 9)
            for host in self.hosts.values()
            if host.process and host.process.lease and host.process.lease.subnet
        ]
        for source in self.hosts.values():
            for host, address in targets:
                arrived = self.send(source, address)
                if arrived is not host:
                    yield f"a packet of {source.name} to {host.name} ends at {arrived and arrived.name}"

    def send(self, source: SimulatedHost, target: IPv4Address) -> SimulatedHost | None:
        """Return the host on whose bridge a packet arrives; None if it gets lost."""
        host: SimulatedHost | None = source
        for _ in range(TTL):
            route = host.kernel.route_to(target) if host else None
            if host is None or route is None or route.device == BRIDGE:
                return host if route is not None else None
            host = self._over(host.kernel, route, target)
        return None

    def _over(self, kernel: Kernel, route: Route, target: IPv4Address) -> SimulatedHost | None:
        """Return the host at the other end of a route."""
        link = kernel.links[route.device]
        if not isinstance(link, Vxlan):
            return self.by_address.get(route.gateway) if isinstance(route.gateway, IPv4Address) else None
        if route.gateway is None:
            return None
        neighbor = kernel.neighbors.get(Neighbor(link.name, route.gateway, "").key)
        entry = kernel.fdb.get(FdbEntry(link.name, neighbor.mac, target).key) if neighbor else None
        there = self.by_address.get(entry.remote) if entry and isinstance(entry.remote, IPv4Address) else None
        if there is None or neighbor is None:
            return None
        accepts = any(
            isinstance(each, Vxlan) and (each.vni, each.port, each.mac) == (link.vni, link.port, neighbor.mac)
            for each in there.kernel.links.values()
        )
        return there if accepts else None


def ours(kernel: Kernel) -> dict[Key, Resource]:
    """Return what the tables hold of ours, by key."""
    seen = (seen for table in kernel.tables.values() for seen in table.read(Scope({})))
    return {each.resource.key: each.resource for each in seen if each.claim is not Claim.FOREIGN}


def _etcd_name(subnet: IPv4Network | None) -> str:
    return str(subnet).replace("/", "-")
