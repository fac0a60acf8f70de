"""Many simulated nodes and their store, what happens to them, and what must hold once it is quiet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from flanneld.config import SubnetRange, parse
from flanneld.model import IPAddress, Lease
from flanneld.state.resources import FdbEntry, ForeignLink, Key, Neighbor, Resource, Route, Vxlan
from flanneld.state.table import Claim, Scope
from flanneld.subnet.store import Store
from tests.unit.simulation import encrypting
from tests.unit.simulation.etcd import PREFIX, SimulatedEtcd
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kernel_tables import tables
from tests.unit.simulation.kube import SimulatedApiServer
from tests.unit.simulation.node import BRIDGE, Process, SimulatedHost
from tests.unit.simulation.stores import SimulatedEtcdStore, SimulatedKubeStore
from tests.unit.simulation.world import World

#: Hops after which a packet goes in circles.
TTL = 4
STORES = ("v2", "v3", "both", "kube")
#: Addresses of machines that have moved begin with this number.
_MOVED = 0x4000
_IPV4: dict[str, object] = {"Network": "10.0.0.0/14", "SubnetLen": 24}
_IPV6: dict[str, object] = {"EnableIPv6": True, "IPv6Network": "fd00:10::/48", "IPv6SubnetLen": 64}
_FAMILIES: Mapping[str, Mapping[str, object]] = {
    "ipv4": _IPV4,
    "dual": {**_IPV4, **_IPV6},
    "ipv6": {"EnableIPv4": False, **_IPV6},
}


def _backend(name: str, also: str = "") -> dict[str, object]:
    beside = {"Also": _backend(also)} if also else {}
    return {"Type": name, **encrypting.OPTIONS.get(name, {}), **beside}


class Cluster:
    """Hosts by number, and a store: etcd "v2" or "v3" or "both", or "kube"."""

    def __init__(
        self, world: World, store: str, directory: Path, backend: str = "vxlan", families: str = "ipv4"
    ) -> None:
        self.world = world
        self._families = families
        config = {**_FAMILIES[families], "Backend": _backend(backend)}
        self.config = parse(json.dumps(config))
        self.hosts: dict[int, SimulatedHost] = {}
        #: Called before and after each write of a daemon.
        self.on_effect: Callable[[SimulatedHost], None] = lambda _: None
        self._moves = 0
        self.kube: SimulatedApiServer | None = None
        self.etcds: tuple[SimulatedEtcd, ...] = ()
        self._net_config = directory / "net-conf.json"
        if store == "kube":
            self.kube = SimulatedApiServer(world)
            self._net_config.write_text(json.dumps(config))
        else:
            apis = ("v3", "v2") if store == "both" else (store,)
            self.etcds = tuple(SimulatedEtcd(world, api, config) for api in apis)

    def set_backend(self, backend: str, also: str = "") -> None:
        """Write another backend into the network config, which each daemon reads at its next start."""
        config = json.dumps({**_FAMILIES[self._families], "Backend": _backend(backend, also)})
        if self.kube is not None:
            self._net_config.write_text(config)
        for etcd in self.etcds:
            etcd.put(f"{PREFIX}/config", config, None)

    @property
    def stores(self) -> Sequence[SimulatedEtcd | SimulatedApiServer]:
        """Return what may fail by itself."""
        return [self.kube] if self.kube is not None else self.etcds

    def add(self, number: int) -> SimulatedHost:
        """Install a machine and run the daemon on it."""
        host = SimulatedHost(self.world, number, self.config, self._open_store)
        self.hosts[number] = host
        host.on_effect = lambda _: self.on_effect(host)
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
                self.kube.add_node(name, *(_pod_cidr(each, number) for each in self.config.ranges))

    def remove(self, number: int) -> None:
        """Switch a machine off for good, and tell the store, as an operator would."""
        host = self.hosts[number]
        lease = host.process.lease if host.process else None
        self.switch_off(number)
        if self.kube is not None:
            self.kube.delete_node(host.name)
        if lease is None:
            return
        for etcd in self.etcds:
            for key in [key for key in etcd.leases() if key.endswith(f"/{_etcd_name(lease)}")]:
                etcd.delete(key)

    def switch_off(self, number: int) -> None:
        """Switch a machine off for good. Its lease stays until it ends."""
        self.hosts.pop(number).stop()

    def move(self, number: int, gap: float) -> None:
        """Give a machine other addresses, after some seconds without any."""
        host = self.hosts[number]
        if not host.addresses:
            return
        self._moves += 1
        to = _MOVED + self._moves
        host.lose_addresses()
        self.world.at(self.world.time + gap, lambda: host.take_addresses(to))

    def set_audit(self, seconds: float) -> None:
        """Have the nodes read their tables more rarely."""
        for host in self.hosts.values():
            host.audit = seconds
            for table in host.process.tables.values() if host.process else ():
                table.audit = seconds

    def _open_store(self, process: Process) -> Store:
        if self.kube is not None:
            return SimulatedKubeStore(self.kube, process, self._net_config)
        return cast("Store", SimulatedEtcdStore(self.etcds, process))  # it has the attributes of the real one

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
        return len({key for etcd in self.etcds for key in etcd.leases()}) if self.etcds else len(self.hosts)

    def _shared_subnets(self) -> Iterator[str]:
        for etcd in self.etcds:
            publics = [_public_ip(json.loads(value)) for value in etcd.leases().values()]
            for host in self.hosts.values():
                number = publics.count(str(host.addresses[0]))
                if number != 1:
                    yield f"{host.name} has {number} leases in {etcd.api}"
        owners: dict[object, str] = {}
        for host in self.hosts.values():
            for net in host.process.lease.key if host.process and host.process.lease else ():
                other = owners.setdefault(net, host.name) if net else host.name
                if other != host.name:
                    yield f"{host.name} and {other} have {net}"

    def _drift(self) -> Iterator[str]:
        for host in self.hosts.values():
            peers = host.process.peers if host.process else None
            if peers is None:
                continue
            actual = ours(host)
            desired = host.process.desired() if host.process else {}
            if actual != desired:
                lacks = [str(each) for key, each in desired.items() if actual.get(key) != each]
                extra = [str(each) for key, each in actual.items() if key not in desired]
                yield f"{host.name} lacks {lacks[:3]}, has {extra[:3]} too many"
            if len(peers) != self.lease_count() - 1:
                yield f"{host.name} knows {len(peers)} peers of {self.lease_count() - 1}"

    def _lost_packets(self) -> Iterator[str]:
        by_address = self._by_address()
        targets = [
            (host, net.network_address + 9)
            for host in self.hosts.values()
            if host.process and host.process.lease
            for net in host.process.lease.key
            if net is not None
        ]
        for source in self.hosts.values():
            for host, address in targets:
                arrived = send(by_address, source, address)
                if arrived is not host:
                    yield f"a packet of {source.name} to {host.name} ends at {arrived and arrived.name}"

    def send(self, source: SimulatedHost, target: IPAddress) -> SimulatedHost | None:
        """Return the host on whose bridge a packet arrives; None if it gets lost."""
        return send(self._by_address(), source, target)

    def _by_address(self) -> dict[IPAddress, SimulatedHost]:
        return {address: host for host in self.hosts.values() for address in host.addresses}


def send(
    by_address: Mapping[IPAddress, SimulatedHost], source: SimulatedHost, target: IPAddress
) -> SimulatedHost | None:
    """Forward a packet by the hosts' tables."""
    host: SimulatedHost | None = source
    for _ in range(TTL):
        route = host.kernel.route_to(target) if host else None
        if host is None or route is None or route.device == BRIDGE:
            return host if route is not None else None
        host = _over(by_address, host.kernel, route, target, container(source, target))
    return None


def container(host: SimulatedHost, target: IPAddress) -> IPAddress:
    """Return the address of a container on a host, of the target's family."""
    return next((net[9] for net in host.subnet_env if net and net.version == target.version), target)


def _over(
    by_address: Mapping[IPAddress, SimulatedHost],
    kernel: Kernel,
    route: Route,
    target: IPAddress,
    source: IPAddress,
) -> SimulatedHost | None:
    """Return the host at the other end of a route."""
    link = kernel.devices[route.device]
    if not isinstance(link, Vxlan | ForeignLink):
        end, key = encrypting.encrypted_end(kernel, link, source, target)
        other = by_address.get(end) if end else None
        return other if other and encrypting.accepts(other.kernel, key, source, target) else None
    if route.gateway is None:
        return None
    if not isinstance(link, Vxlan):
        return by_address.get(route.gateway)
    neighbor = kernel.neighbors.get(Neighbor(link.name, route.gateway, "").key)
    entry = kernel.fdb.get(FdbEntry(link.name, neighbor.mac, target).key) if neighbor else None
    there = by_address.get(entry.remote) if entry else None
    if there is None or neighbor is None:
        return None
    accepts = any(
        isinstance(each, Vxlan) and (each.vni, each.port, each.mac) == (link.vni, link.port, neighbor.mac)
        for each in there.kernel.devices.values()
    )
    return there if accepts else None


def ours(host: SimulatedHost) -> dict[Key, Resource]:
    """Return what the tables hold of ours, by key."""
    desired = host.process.desired() if host.process else {}
    seen = (seen for table in tables(host.kernel).values() for seen in table.read(Scope(desired)))
    found = {each.resource.key: each.resource for each in seen if each.claim is not Claim.FOREIGN}
    return found | {key: each for held in host.kernel.beside.values() for key, each in held.items()}


def _etcd_name(lease: Lease) -> str:
    return "&".join(str(net).replace("/", "-") for net in lease.key if net is not None)


def _public_ip(value: Mapping[str, str]) -> str:
    """Return the address by which a node is known: IPv4 if it has one."""
    public = value.get("PublicIP", "")
    return public if public not in ("", "0.0.0.0") else value.get("PublicIPv6", "")


def _pod_cidr(pool: SubnetRange, number: int) -> str:
    size = 1 << (pool.network.max_prefixlen - pool.subnet_len)
    return f"{pool.network.network_address + number * size}/{pool.subnet_len}"
