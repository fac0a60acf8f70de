"""From what is wanted to what the kernel and the drivers hold: read, compare, apply.

    facts -> wanted state -> difference to what the kernel holds -> apply -> report

When that is done, and how often, is for ``reconcile`` to say.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from flanneld.backends.contract import Backend
from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.model import IPNetwork, Lease
from flanneld.network.obstacles import Obstacles
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.links import described, is_flannels, is_not_ours_to_remove
from flanneld.network.rtnetlink.monitor import Monitor
from flanneld.network.uplink_facts import read_host_networks
from flanneld.reconcile import ownership
from flanneld.reconcile.counters import Work
from flanneld.reconcile.drivers import Outside
from flanneld.reconcile.ownership import Device
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.uplink_manager import UplinkManager
from flanneld.state.diff import Plan, compare, without_ways_to
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Failure, Report
from flanneld.state.resources import ForeignLink, Key, Kind, Link, Resource, Route

#: After more writes than this the kernel is read back rather than its echo of them.
_BULK = 500
_REMEDY_FOR_BLOCKED = "remove that route if nothing needs it, or choose another Network"


class Node(Struct, frozen=True):
    """This node, as the loop that moves its kernel has to know it.

    ``extras`` are wanted whoever the peers are; an earlier run may have left routes into ``former`` networks,
    and ``devices``. ``adopts`` says that another flanneld ran here before, ``adopted`` names the destinations
    of its routes that were kept. ``record`` keeps fields of ``ownership.State`` for the next run.
    """

    kernel: Kernel
    monitor: Monitor
    uplink_manager: UplinkManager
    lease: Lease
    extras: tuple[Resource, ...] = ()
    former: tuple[IPNetwork, ...] = ()
    devices: tuple[Device, ...] = ()
    adopts: bool = False
    adopted: frozenset[IPNetwork] = frozenset()
    record: Callable[..., None] = lambda **_: None


class Convergence:
    """Brings a node to what ``peers`` want of it. For one thread.

    ``unheard`` is called after writes during which we did not listen to the kernel, with what they did.
    """

    def __init__(
        self, node: Node, peers: Peers, removal_guard: RemovalGuard, unheard: Callable[[Report], None]
    ) -> None:
        self.work = Work()
        #: What of the kernel is ours.
        self.domain = Domain(
            node.uplink_manager.uplink.name,
            frozenset(),
            _ranges(node.uplink_manager, node.lease),
            node.former,
        )
        self.outside = Outside()
        self._driven: Backend | None = None
        #: The devices of ours and the uplink, by index, as last read.
        self.names: dict[int, str] = {}
        #: Devices of earlier runs, until they are swept.
        self._left = node.devices
        self._node = node
        self._kernel = node.kernel
        self._uplink_manager = node.uplink_manager
        self._peers = peers
        self._removal_guard = removal_guard
        self._unheard = unheard
        #: Routes as we made them or took them over. What stands elsewhere is of others and stays.
        self._ours: dict[Key, Resource] = {}
        #: Keys of objects that differed from the leases of a cache when these came; None before that.
        self._newer: set[Key] | None = None

    def prepare(self) -> Report:
        """Make what this node needs for itself. Raises ``Fatal`` when the kernel refuses."""
        self._wish_for_ourselves()
        try:
            self._open_drivers()
            self._spare_what_is_not_ours()
            self.look_at_host()
            self._spare_connected_networks()
            report = self._kernel.apply_links(self._links())
            # Nothing is put on a device that another daemon has just made.
            _demand_all(report)
            report.add(self.converge())
        except OSError as failure:
            raise Retryable(f"cannot read the kernel's tables: {cause_of(failure)}") from failure
        _demand_all(report)
        missing = self.outside.missing(report)
        if missing:
            raise Retryable(missing[0].reason)
        return report

    def start_to_sweep(self) -> None:
        """All peers are known: from now on what is stale may go, also what an earlier run left."""
        self.domain = replace(
            self.domain, sweep=True, adopt=True, unmarked=self._node.adopts, adopted=self._node.adopted
        )

    def is_swept(self) -> None:
        """What an earlier run left has been dealt with, but for its devices. Raises ``OSError``."""
        if self._node.adopts or self._node.adopted:
            self._node.record(adopted=frozenset(self._adopted()))
        self.domain = replace(self.domain, adopt=False)
        self._node.record(adopts=False)

    def _adopted(self) -> Iterator[IPNetwork]:
        """Name the routes of another flanneld that are right: they are not written again to be marked."""
        marked = replace(self.domain, unmarked=False, adopted=frozenset())
        for route in set(self._kernel.left_behind(self.domain)) - set(self._kernel.left_behind(marked)):
            if isinstance(route, Route):
                yield route.destination

    def sweep_devices(self) -> Report:
        """Remove the devices of earlier configurations. Raises ``OSError`` if the kernel cannot be read.

        Called once the routes through the present devices are in: packets may have taken the old ones.
        """
        if not self._left:
            return Report()
        stale = ownership.stale(self._left, self._kernel.links(), self.domain.links)
        links = tuple(seen.make for seen in stale if not isinstance(seen.make, ForeignLink))
        report = self._kernel.apply(Plan(drops=links), self.domain)
        if not report.failed:
            self._left = ()
            self._record_devices()
        return report

    def unclaimed_devices(self) -> list[str]:
        """Name flannel's devices with an address in our network that no run of ours is known to have made."""
        networks = [network for network, _ in self.domain.ranges]
        return [
            seen.name
            for seen in self._kernel.links()
            if is_flannels(seen)
            and seen.name not in self.domain.links
            and any(
                each.address in network
                for network in networks
                for each in self._kernel.addresses(network.version, seen.index)
            )
        ]

    def move(self) -> None:
        """The uplink is another one, and so is the backend."""
        self._wish_for_ourselves()

    def converge(self) -> Report:
        """Read, compare, apply. Raises ``OSError`` if the kernel cannot be read."""
        with self.work.reconcile:
            report = self._read_and_repair()
        self.work.converged(report)
        return report

    def look_at_host(self) -> Plan:
        """Read the host's networks: what to make and to remove if they have changed. Raises ``OSError``."""
        networks = [network for network, _ in self._uplink_manager.ranges]
        own = [net for net in self._node.lease.key if net is not None]
        host = read_host_networks(self._kernel, networks, own, self.domain.links)
        if host == self._peers.safety.obstacles.host:
            return Plan()
        return self._peers.look(Obstacles(host), self._uplink_manager.backend)

    def networks_around(self) -> list[str]:
        """Networks on this host's links that overlap the cluster's and are larger than a node's subnet."""
        lengths = {network.version: length for network, length in self.domain.ranges}
        return [str(obstacle) for obstacle in self._peers.safety.obstacles.around(lengths)]

    def apply(self, steps: Plan) -> Report:
        """Carry out what follows from news of leases, without a look at what there is."""
        over = {
            put.key: self._ours[put.key]
            for put in steps.puts
            if put.kind is Kind.ROUTE and put.key in self._ours
        }
        steps = replace(steps.only(self._is_not_of_others), puts=steps.puts, over=over)
        if not self.outside:
            return self._write(steps)
        report = self._write(steps.only(_in_kernel))
        report.add(self.outside.apply(steps.only(lambda resource: not _in_kernel(resource))))
        return report

    def _is_not_of_others(self, resource: Resource) -> bool:
        """Return False for a route that somebody else made just as we would have: it serves, and stays."""
        return resource.kind is not Kind.ROUTE or resource.key in self._ours

    # ---- what this node needs for itself -----------------------------------------------------

    def _spare_connected_networks(self) -> None:
        for route in self._peers.local_wishes():
            if not isinstance(route, Route):
                continue
            obstacle = self._peers.safety.obstacles.connected_at(route.destination)
            if obstacle is not None:
                raise Fatal(
                    f"{obstacle}, and all of {obstacle.net} would go into {route.device}",
                    "give the network config another Network, or use another backend",
                )

    def _spare_what_is_not_ours(self) -> None:
        for link in self._links():
            seen = self._kernel.link(link.name)
            if seen and is_not_ours_to_remove(link, seen.make):
                raise Fatal(
                    f"{link.name} is {described(seen.make)}, and we need a device of kind {link.make}",
                    f"if nobody needs it, remove it: ip link delete {link.name}",
                )

    def _wish_for_ourselves(self) -> None:
        self._peers.wish_locally((*self._uplink_manager.backend.local(self._node.lease), *self._node.extras))
        self.domain = replace(
            self.domain,
            uplink=self._uplink_manager.uplink.name,
            links=frozenset(link.name for link in self._links()),
        )

    def _links(self) -> list[Link]:
        return [item for item in self._peers.local_wishes() if isinstance(item, Link)]

    # ---- reading, comparing, applying --------------------------------------------------------

    def _open_drivers(self) -> None:
        """Have the drivers of the backend of now: those of its predecessor let go first."""
        if self._driven is not self._uplink_manager.backend:
            self.outside.hand_over()
            self.outside = Outside(self._uplink_manager.backend)
            self._driven = self._uplink_manager.backend

    def _read_and_repair(self) -> Report:
        self._open_drivers()
        report = self._kernel.apply_links(self._links())
        links = ((link, True) for link in self._links())
        found: Iterable[tuple[Resource, bool]] = self._kernel.read(self.domain, self._peers.wanted)
        if self._peers.cached and self._newer is None:
            found = self._noting_newer(found)
        steps = compare(self._peers.wanted, chain(links, found), self._ours)
        report.failed += _blocked(steps)
        for key in self._ours.keys() - self._peers.wanted.keys():
            del self._ours[key]
        steps = replace(steps, drops=self._stale(steps.drops) if self.domain.sweep else ())
        if self._peers.cached:
            steps = steps.only(lambda resource: resource.key not in (self._newer or ()))
        report.add(self._write(steps.only(_in_kernel) if self.outside else steps))
        report.add(
            self.outside.converge(self._peers.wanted, sweep=self.domain.sweep, unclear=self._peers.unclear)
        )
        names = self._interfaces()
        if names != self.names:
            self._record_devices()
            self.names = names
        return report

    def _record_devices(self) -> None:
        """Keep for the next run which devices are ours, and which are yet to be swept."""
        ours = [
            device
            for seen in self._kernel.links()
            if seen.name in self.domain.links and (device := ownership.device_of(seen))
        ]
        self._node.record(devices=tuple(dict.fromkeys([*ours, *self._left])))

    def _noting_newer(self, found: Iterable[tuple[Resource, bool]]) -> Iterator[tuple[Resource, bool]]:
        """Note what the kernel holds otherwise than a cache says, so that it stays until the store answers.

        The earlier run that left it there had news that it could not save.
        """
        newer: set[Key] = set()
        local = {resource.key for resource in self._peers.local_wishes()}
        for resource, ours in found:
            want = self._peers.wanted.get(resource.key)
            if want is not None and want != resource and resource.key not in local:
                newer.add(resource.key)
            yield resource, ours
        self._newer = newer  # not before: a read that failed has not seen all of it

    def _stale(self, unwanted: Collection[Resource]) -> tuple[Resource, ...]:
        """What may go of all that nobody wants."""
        stale = without_ways_to(self._peers.unclear, unwanted)
        held = self.domain.adopt and self._removal_guard.holds_sweep(
            sum(map(_is_route, stale)), sum(map(_is_route, self._peers.wanted.values()))
        )
        return () if held else stale

    def _write(self, steps: Plan) -> Report:
        if not steps:
            return Report()
        with self.work.apply:
            return self._write_all(steps)

    def _write_all(self, steps: Plan) -> Report:
        if len(steps.puts) + len(steps.drops) <= _BULK:
            report = self._kernel.apply(steps, self.domain)
        else:
            with self._node.monitor.deaf():
                report = self._kernel.apply(steps, self.domain)
            self._unheard(report)
        self._note(steps, report)
        return report

    def _note(self, steps: Plan, report: Report) -> None:
        """Remember which routes are ours."""
        for resource in steps.drops:
            if resource.kind is Kind.ROUTE:
                self._ours.pop(resource.key, None)
        for resource in report.made:
            if resource.kind is Kind.ROUTE:
                self._ours[resource.key] = resource

    def _interfaces(self) -> dict[int, str]:
        present = {name: index for index, name in socket.if_nameindex()}
        ours = (self.domain.uplink, *self.domain.links)
        return {present[name]: name for name in ours if name in present}


def _ranges(uplink_manager: UplinkManager, own: Lease) -> tuple[tuple[IPNetwork, int], ...]:
    """A subnet is as long as ours: in Kubernetes that is not for the network config to say."""
    own_lengths = {net.version: net.prefixlen for net in own.key if net is not None}
    return tuple(
        (network, own_lengths.get(network.version, length)) for network, length in uplink_manager.ranges
    )


def _blocked(steps: Plan) -> Iterator[Failure]:
    for wanted, there in steps.blocked:
        yield Failure(wanted, f"{there} stands there and is not flannel's", _REMEDY_FOR_BLOCKED)


def _demand_all(report: Report) -> None:
    """Raises ``Fatal`` for the first thing that the kernel refuses."""
    refused = [failure for failure in report.failed if _in_kernel(failure.resource)]
    if refused:
        raise Fatal(
            f"the kernel refuses {refused[0]}",
            refused[0].remedy or "run with CAP_NET_ADMIN on a kernel that has this kind of device",
        )


def _in_kernel(resource: Resource) -> bool:
    return resource.kind is not Kind.OUTSIDE


def _is_route(resource: Resource) -> bool:
    return resource.kind is Kind.ROUTE
