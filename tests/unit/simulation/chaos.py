"""What goes wrong in a cluster, chosen by chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from flanneld.network.rtnetlink.kernel import InterfaceChanged, Notification, Overrun, ResourceRemoved
from flanneld.state.resources import Key, Link
from tests.unit.simulation import etcd, kube
from tests.unit.simulation.cluster import Cluster
from tests.unit.simulation.node import SimulatedHost

#: Seconds after the last trouble until all must be well: a stalled watch, an audit and a contest have passed.
QUIET = 1500.0
#: Nodes of a cluster at least, so that it does not vanish.
_FEWEST = 4


class Chaos:
    """Troubles a cluster, one thing after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._random = cluster.world.random
        self._next = max(cluster.hosts) + 1
        self._deeds: list[Callable[[], None]] = [
            self._kill,
            self._kill_within_its_next_steps,
            self._join,
            self._remove,
            self._outage,
            self._compact,
            self._break_watches,
            self._stall,
            self._lose_lease,
            self._restore,
            self._vandalize,
            self._vandalize,
            self._hide_the_kernel,
            self._move,
            self._move,
        ]

    def run(self, deeds: int) -> None:
        """Do so many things, then let the world heal."""
        for store in self._cluster.stores:
            faults = store.faults
            faults.stale, faults.lag = 0.5, 5.0
            if isinstance(faults, etcd.Faults):
                faults.lost_answer = 0.1
            if isinstance(faults, kube.Faults):
                faults.repeated = 0.3
        for _ in range(deeds):
            self._world.run(self._random.uniform(0.1, 20.0))
            deed = self._random.choice(self._deeds)
            self._world.tell(f"chaos: {deed.__name__.strip('_')}")
            deed()
        for store in self._cluster.stores:
            store.faults = type(store.faults)()
        for host in self._cluster.hosts.values():
            for table in host.process.tables.values() if host.process else ():
                table.unreadable = False
            if host.operations_left < math.inf:  # now rather than late in the calm
                host.operations_left = math.inf
                host.ended(InterruptedError("killed"))
        self._world.run(QUIET)

    def _store(self) -> etcd.SimulatedEtcd | kube.SimulatedApiServer:
        return self._random.choice(list(self._cluster.stores))

    def _host(self) -> SimulatedHost:
        return self._random.choice(list(self._cluster.hosts.values()))

    def _kill(self) -> None:
        self._host().ended(InterruptedError("killed"))

    def _kill_within_its_next_steps(self) -> None:
        self._host().operations_left = self._random.randint(0, 40)

    def _join(self) -> None:
        """Some nodes come at once, and look for a free subnet at the same time."""
        for _ in range(self._random.randint(1, 3)):
            number = self._next
            self._next += 1
            self._world.at(self._world.time + 0.2 * self._random.random(), partial(self._cluster.add, number))

    def _remove(self) -> None:
        if len(self._cluster.hosts) > _FEWEST:
            self._cluster.remove(self._host().number)

    def _outage(self) -> None:
        store = self._store()
        store.set_down(down=True)
        self._world.at(self._world.time + self._random.uniform(0.5, 60.0), lambda: store.set_down(down=False))

    def _compact(self) -> None:
        self._store().compact()

    def _break_watches(self) -> None:
        self._store().break_watches()

    def _stall(self) -> None:
        store = self._store()
        streams: list[Any] = store.watchers if isinstance(store, etcd.SimulatedEtcd) else store.streams
        if streams:
            self._random.choice(streams).stalled_until = self._world.time + self._random.uniform(10.0, 300.0)

    def _lose_lease(self) -> None:
        """An operator deletes a lease, or a node that registers itself again."""
        store = self._store()
        if isinstance(store, etcd.SimulatedEtcd):
            leases = sorted(store.leases())
            if leases:
                store.delete(self._random.choice(leases))
            return
        store.delete_node(self._random.choice(sorted(store.nodes)))
        self._world.at(self._world.time + 2.0, self._cluster.register_nodes)

    def _restore(self) -> None:
        self._store().restore(self._random.randint(1, 10))
        self._world.at(self._world.time + 2.0, self._cluster.register_nodes)

    def _move(self) -> None:
        """A machine gets other addresses, perhaps a moment after it has lost its old ones."""
        self._cluster.move(self._host().number, self._random.choice((0.0, 0.05, 3.0)))

    def _vandalize(self) -> None:
        """Another program removes or changes what is ours; the kernel tells of it, or does not."""
        host = self._host()
        kernel = host.kernel
        links = [link for link in kernel.devices.values() if isinstance(link, Link)]
        routes = [held.route for held in kernel.all_routes() if kernel.owns(held) and held.metric == 0]
        choice = self._random.randrange(5)
        news: Notification = Overrun()
        if choice <= 1 and links:
            news = InterfaceChanged(kernel.indexes[links[0].name], links[0].name)
            (kernel.set_down if choice else kernel.delete_link)(links[0].name)
        elif choice == 2 and routes:
            route = self._random.choice(routes)
            kernel.delete_route(route)
            news = ResourceRemoved(route.key, gateway=route.gateway)
        else:
            entries: dict[Key, Any] = kernel.neighbors if choice == 3 else kernel.fdb
            key = self._random.choice(sorted(entries, key=str)) if entries else None
            if key is not None:
                del entries[key]
                news = ResourceRemoved(key)
        if self._random.random() < 0.7:
            host.tell(news)

    def _hide_the_kernel(self) -> None:
        process = self._host().process
        if process is None or not process.tables:
            return
        table = self._random.choice(list(process.tables.values()))
        table.unreadable = True
        self._world.at(
            self._world.time + self._random.uniform(1.0, 60.0), lambda: setattr(table, "unreadable", False)
        )
