"""The only loop that moves the kernel: when it is read and repaired. ``convergence`` knows how.

News of one lease touches only what belongs to this lease. An audit reads everything back and
repairs the difference: at the start, when somebody else touched what is ours, after a refusal,
and from time to time. Nothing is removed before the first snapshot of the leases: until then what
an earlier run left may be all that keeps the containers talking.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec.structs import replace

from flanneld.compat.glog import Once, V, counted
from flanneld.errors import cause_of
from flanneld.model import Cached, Event, IPAddress, IPNetwork
from flanneld.network.change_origin import ChangeOrigins
from flanneld.network.obstacles import single
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.monitor import Gone, HostRouteChanged, InterfaceChanged, News, Overrun, Seen
from flanneld.reconcile.convergence import Convergence, Node
from flanneld.reconcile.counters import Work
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.uplink_manager import UplinkManager
from flanneld.runtime import clock
from flanneld.runtime.event_queue import EventQueue
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Report
from flanneld.state.resources import Kind, Resource, Route, destination_of

log = logging.getLogger(__name__)

AUDIT_PERIOD = 30.0
#: Lets a burst of notifications end before the kernel is read back.
_SETTLE = 0.005
#: Between two repairs where somebody keeps undoing our work; and as a multiple of the CPU time one costs.
_REPAIR_SPACING, _REPAIR_COST_FACTOR = 0.2, 10
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
#: So many lines about single objects are worth reading at a time.
_FEW = 10


class KernelReconciler:
    """Keeps the kernel in the wanted state. ``inbox`` takes the events of one reading of the store."""

    def __init__(
        self,
        node: Node,
        removal_guard: RemovalGuard,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
        on_move: Callable[[], None],
        on_synced: Callable[[], None],
        reread: Callable[[], None],
    ) -> None:
        self.event_queue: EventQueue[list[Event]] = EventQueue()
        self._uplink_manager = node.uplink_manager
        self._stop = stop
        self._heartbeat = heartbeat
        self._on_move = on_move
        self._on_synced = on_synced
        self._reread = reread
        self._removal_guard = removal_guard
        self._monitor = node.monitor
        self._peers = Peers(node.lease, [network for network, _ in node.uplink_manager.ranges], removal_guard)
        self._convergence = Convergence(node, self._peers, removal_guard, self._look_at_all)
        self._once = Once()
        self._change_origins = ChangeOrigins()
        self._next_audit = clock.now()
        self._earliest_repair = 0.0
        #: When to read the host's networks, and not before when.
        self._next_look = math.inf
        self._earliest_look = 0.0
        self._retry_delay = _FIRST_RETRY
        self._uplink_may_have_moved = False

    @property
    def peers(self) -> Peers:
        return self._peers

    @property
    def uplink_manager(self) -> UplinkManager:
        return self._uplink_manager

    @property
    def domain(self) -> Domain:
        return self._convergence.domain

    @property
    def work(self) -> Work:
        return self._convergence.work

    @property
    def removal_guard(self) -> RemovalGuard:
        return self._removal_guard

    # ---- before the first peer ---------------------------------------------------------------

    def prepare(self) -> None:
        """Make what this node needs for itself. Raises ``Fatal`` when the kernel refuses."""
        report = self._convergence.prepare()
        for resource in report.made:
            log.info("Made %s", resource)
        for network in self._convergence.networks_around():
            log.warning(
                "Network overlap: %s; its hosts with addresses in a node's subnet are not reached; "
                "choose a Network that no link of any node uses",
                network,
            )
        self._next_audit = clock.now() + AUDIT_PERIOD
        self._account(report)

    # ---- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.close()

    def close(self) -> None:
        """Close the backend's drivers. Not while ``run`` goes on elsewhere, which does so at its end."""
        self._convergence.outside.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._heartbeat(2 * AUDIT_PERIOD)
            self._sleep()
            self._take_events([event for events in self.event_queue.drain() for event in events])
            self.event_queue.settle()
            self._take_news(self._monitor.read(self._convergence.names.get))
            if clock.now() >= self._next_look and not self._stop.is_set():
                self._look_at_host()
            if clock.now() >= self._next_audit and not self._stop.is_set():
                self._audit()
            if self._removal_guard.is_due():
                self._reread()

    def cancel(self) -> None:
        self.event_queue.wake()

    def _sleep(self) -> None:
        """Until there is something to do."""
        outside = self._convergence.outside
        drivers = outside.sources()
        poll = select.poll()
        for source in (self.event_queue.fileno(), self._monitor.fileno(), *drivers):
            poll.register(source, select.POLLIN)
        next_act = min(self._next_audit, self._next_look, self._removal_guard.next_reading, outside.next_look)
        for fd, _ in poll.poll(max(0.0, next_act - clock.now()) * 1000):
            if fd in drivers:
                drivers[fd].news()
                self._repair_soon()
        if outside.look():
            self._repair_soon()

    # ---- news of leases ----------------------------------------------------------------------

    def _take_events(self, events: list[Event]) -> None:
        was_synced = self._peers.synced
        steps = self._peers.take(events, self._uplink_manager.backend)
        if not was_synced:
            if self._peers.synced:
                self._first_sync()
            elif any(isinstance(event, Cached) for event in events):
                self._use_cache()
            return
        if events and self.domain.adopt:
            self._repair_soon()
        try:
            if steps:
                report = self._convergence.apply(steps)
                self.work.applied(report, self.event_queue.since)
                self._account_news(report)
        except OSError as failure:
            self._could_not_read(failure)
        self._peers.tell()

    def _use_cache(self) -> None:
        """Make what leads to the peers of a cache; nothing is removed, and nothing replaced."""
        try:
            report = self._convergence.converge()
        except OSError as failure:
            self._could_not_read(failure)
            return
        log.warning(
            "Using %s: %d peers, made %d objects; removing and replacing nothing until the store answers",
            self._peers.cached,
            len(self._peers),
            len(report.made),
        )
        self._account(report)
        self._on_synced()

    def _first_sync(self) -> None:
        """All peers are known: from now on what is stale may go."""
        self._convergence.start_to_sweep()
        try:
            report = self._convergence.converge()
        except OSError as failure:
            self._could_not_read(failure)
            return
        log.info(
            "In sync with %s: made %s, removed %d left by an earlier run",
            counted(len(self._peers), "peer"),
            counted(len(report.made), "object"),
            len(report.removed),
        )
        self._log_sweep(report.removed)
        self._account(report)
        self._is_swept()
        self._sweep_devices(report)
        self._report_unclaimed()

    def _is_swept(self) -> None:
        """What an earlier run left has been dealt with, or is held back."""
        if not self._removal_guard.sweep_is_held:
            try:
                self._convergence.is_swept()
            except OSError as failure:
                self._could_not_read(failure)
        self._on_synced()

    def _sweep_devices(self, report: Report) -> None:
        """Remove the devices of earlier configurations, if all routes are in and none is held back."""
        if report.failed or not self._peers.synced or self._removal_guard.sweep_is_held:
            return
        try:
            swept = self._convergence.sweep_devices()
        except OSError as failure:
            self._could_not_read(failure)
            return
        self._log_sweep(swept.removed)
        self._account(swept)

    def _log_sweep(self, resources: list[Resource]) -> None:
        for resource in resources[:_FEW]:
            log.info("Removed, left by an earlier run: %s", resource)
        if len(resources) > _FEW:
            log.info("Removed, left by an earlier run: %d more objects", len(resources) - _FEW)

    def _report_unclaimed(self) -> None:
        """Name devices that look as if an earlier run had left them, without a record that says so."""
        with suppress(OSError):
            for name in self._convergence.unclaimed_devices()[:_FEW]:
                log.warning(
                    "Left alone: %s has an address in our network, and no record says that we made it; if no"
                    " other daemon uses it: ip link delete %s",
                    name,
                    name,
                )

    # ---- news of the kernel ------------------------------------------------------------------

    def _take_news(self, news: Iterable[News]) -> None:
        for item in news:
            if self._may_be_obstacle(item):
                self._look_soon()
            match item:
                case Overrun():
                    self.work.overruns += 1
                    log.log(V(1), "Kernel notifications were lost: reading everything back")
                    self._uplink_may_have_moved = True
                    self._repair_soon()
                case InterfaceChanged(index, name, port):
                    if self._concerns_us(index, name):
                        self._change_origins.note((Kind.LINK, name or ""), port)
                        self._uplink_may_have_moved = True
                        self._repair_soon()
                case Gone(key, port):
                    if key in self._peers.wanted or self._uplink_manager.asks_routes:
                        self._change_origins.note(key, port)
                        self._repair_soon()
                case Seen(resource, port):
                    if self._is_drift(resource) or self._uplink_manager.asks_routes:
                        self._change_origins.note(resource.key, port)
                        self._repair_soon()

    def _concerns_us(self, index: int, name: str | None) -> bool:
        ours = name == self._uplink_manager.uplink.name or name in self.domain.links
        return (
            ours
            or index in self._convergence.names
            or self._uplink_manager.asks_routes
            or self._uplink_manager.is_adrift
        )

    def _is_drift(self, resource: Resource) -> bool:
        wanted = self._peers.wanted.get(resource.key)
        if wanted is None:
            return getattr(resource, "device", None) in self.domain.links
        return wanted != resource

    def _may_be_obstacle(self, item: News) -> bool:
        """Return True if an address, a network on a link or a gateway of the host may be another one now."""
        match item:
            case InterfaceChanged(name=name, address=address):
                # The kernel does not tell of IPv4 routes that go with their link.
                is_known = name in self._peers.safety.obstacles.devices
                return is_known or (address is not None and name not in self.domain.links)
            case HostRouteChanged(destination, gateways):
                return self._may_harm(destination, *gateways)
            case Gone(key, gateway=gateway):
                return self._may_harm(destination_of(key), gateway)
            case Seen(Route() as route):
                return route.device not in self.domain.links and self._may_harm(
                    route.destination, route.gateway
                )
        return False

    def _may_harm(self, destination: IPNetwork | None, *gateways: IPAddress | None) -> bool:
        """Return True if one of these is where a lease may be."""
        nets = (destination, *(single(gateway) for gateway in gateways if gateway is not None))
        return any(net is not None and self._peers.safety.concerns(net) for net in nets)

    def _look_soon(self) -> None:
        self._next_look = min(self._next_look, max(clock.now() + _SETTLE, self._earliest_look))

    def _look_at_host(self) -> None:
        """Withdraw what leads to leases that have become unsafe, and lead to those that are safe again."""
        began = time.thread_time()
        self._next_look = math.inf
        try:
            steps = self._convergence.look_at_host()
            if steps and self._peers.synced:
                self._account_news(self._convergence.apply(steps))
        except OSError as failure:
            self._could_not_read(failure)
            return
        self._peers.tell()
        self._earliest_look = clock.now() + _REPAIR_COST_FACTOR * (time.thread_time() - began)

    def _repair_soon(self) -> None:
        self.work.was_told = True
        self._next_audit = min(self._next_audit, max(clock.now() + _SETTLE, self._earliest_repair))

    # ---- the audit ---------------------------------------------------------------------------

    def _audit(self) -> None:
        began = time.thread_time()
        self._next_audit = clock.now() + AUDIT_PERIOD
        try:
            self._follow_uplink()
            self._look_at_host()
            report = self._convergence.converge()
            self.work.healed(report)
        except OSError as failure:
            self._could_not_read(failure)
            return
        self._once.clear("read")
        self._log_repairs("Healed", report.made)
        self._log_repairs("Removed what nobody wants", report.removed)
        self._change_origins.forget()
        if not report.failed:
            self._retry_delay = _FIRST_RETRY
            if self._once.clear("refused"):
                log.info("All that is wanted is there again")
        cost = time.thread_time() - began
        self._earliest_repair = clock.now() + max(_REPAIR_SPACING, _REPAIR_COST_FACTOR * cost)
        self._next_audit = max(self._next_audit, self._earliest_repair)
        self._account(report)
        if self._peers.synced and self.domain.adopt:
            self._is_swept()
        elif self._peers.cached:
            self._on_synced()
        self._sweep_devices(report)

    def _follow_uplink(self) -> None:
        look = (
            self._uplink_may_have_moved or self._uplink_manager.asks_routes or self._uplink_manager.is_adrift
        )
        moved = look and self._uplink_manager.follow()
        self._uplink_may_have_moved = False
        if moved:
            self._convergence.move()
        if moved or self._uplink_manager.asks_routes:
            self._peers.reconsider(self._uplink_manager.backend)
        if moved:
            self._on_move()

    def _look_at_all(self, report: Report) -> None:
        """After writes in bulk: what else happened meanwhile was not heard, and reading back is a proof."""
        self._uplink_may_have_moved = True
        if report.made or report.removed:
            self._repair_soon()

    # ---- afterwards --------------------------------------------------------------------------

    def _account(self, report: Report) -> None:
        """Say what was refused, and when to try again."""
        if report.failed:
            first = report.failed[0]
            more = f", and {len(report.failed) - 1} more" if len(report.failed) > 1 else ""
            self._once.warn(log, "refused", f"Refused: {first}{more}; trying again")
            self._next_audit = min(self._next_audit, clock.now() + self._retry_delay)
            self._retry_delay = min(2 * self._retry_delay, _LAST_RETRY)

    def _account_news(self, report: Report) -> None:
        """The same, after writes without a look at what there is: an audit sees what stands in the way."""
        if any(failure.is_taken for failure in report.failed):
            self._repair_soon()
        self._account(replace(report, failed=[each for each in report.failed if not each.is_taken]))

    def _log_repairs(self, what: str, resources: list[Resource]) -> None:
        for resource in resources[:_FEW]:
            origin = self._change_origins.of(resource)
            log.warning("%s: %s%s", what, resource, f", after a change by {origin}" if origin else "")
        if len(resources) > _FEW:
            log.warning("%s: %s", what, counted(len(resources) - _FEW, "more object"))

    def _could_not_read(self, failure: OSError) -> None:
        self._once.warn(
            log,
            "read",
            f"Cannot read the kernel's tables: {cause_of(failure)}; changing nothing until we can",
        )
        self._next_audit = clock.now() + _FIRST_RETRY
