"""Watch of the way to the store: a lease around its address would cut this node off from it for good.

An address counts as outside the cluster's network if the way to it was not ours when the store was first seen
to answer. It is an obstacle then. If the way was ours, by a route or a device, the store lives inside the
network, and nothing changes. Such a way may also be the route that has cut this node off. So if the store is
lost, it is tried once without that route, also at the start, where an earlier run may have left it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from flanneld.errors import NoAnswer, Retryable
from flanneld.model import IPAddress, IPNetwork, lies_in, single
from flanneld.network.obstacles import Obstacle, concerns
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.network.uplink_facts import Way, way_to
from flanneld.reconcile.last_run import LastRun, StoreAddress
from flanneld.reconcile.local_node import LocalNode
from flanneld.runtime import clock, waits
from flanneld.runtime.sockets.interruptible import connected
from flanneld.state.resources import Key, Resource, Route, route_key
from flanneld.subnet.store import Store
from flanneld.subnet.subnet_file import Previous

log = logging.getLogger(__name__)

#: Seconds of a trial, and from the start of one to that of the next.
TRIAL, _TRIAL_PAUSE = 5.0, 600.0
#: Hours for which a former address of a server is remembered, and addresses that are, at most.
_FORMER, _MOST = 24, 64
TRIED = "Store unreachable: its address %s lies in the followed subnet %s; trying without that route for %g s"
ANSWERED = "Store answers without that route: its address %s is outside the network"
FAILED = "Store unreachable without that route, too, at its address %s; restoring the route"


class StoreWatch:
    """Watch of the ways to the store's addresses, stepped by ``look``. ``due`` is the end of a trial.

    ``followed`` returns the desired object with a key.
    """

    def __init__(self, node: LocalNode, followed: Callable[[Key], Resource | None]) -> None:
        self._node = node
        self._followed = followed
        self._known = node.last_run.store_addresses
        self._tried = node.last_run.store_tried
        self._trial: frozenset[IPAddress] = frozenset()
        self._has_reconnected = False
        self.due = math.inf

    def look(self, now: float, networks: Collection[IPNetwork], own: Collection[IPNetwork]) -> list[Obstacle]:
        """Return the addresses of the store that no lease may cover."""
        store = self._node.store
        if store is None:
            return []
        current = [each for each in store.addresses if concerns(single(each), networks, own)]
        problem = store.problem
        known = remembered(self._known, current, int(clock.wall() // 3600), answers=problem is None)
        ways = {each.address: way_to(self._node.kernel, each.address) for each in known}
        if problem is None:
            known = tuple(observed(each, ways[each.address]) for each in known)
        if self._trial:
            known = self._during_trial(known, now, is_lost=isinstance(problem, NoAnswer))
        elif isinstance(problem, NoAnswer):
            self._try_without(ways, now)
        if known != self._known:
            self._known = known
            self._node.last_run.record(store_addresses=known)
        return [
            _obstacle(each.address, ways[each.address])
            for each in known
            if each.is_outside or each.address in self._trial
        ]

    def _try_without(self, ways: Mapping[IPAddress, Way | None], now: float) -> None:
        """Begin a trial without the routes that lead to the store, unless there was one a short time ago."""
        found = {
            address: way.destination
            for address, way in ways.items()
            if way and way.is_ours and way.destination and self._followed(route_key(way.destination))
        }
        if not (found and is_due(self._tried)):
            return
        self._trial, self._tried, self.due = frozenset(found), int(clock.wall()), now + TRIAL
        self._has_reconnected = False
        self._node.last_run.record(store_tried=self._tried)
        for address, subnet in found.items():
            log.warning(TRIED, address, subnet, TRIAL)

    def applied(self) -> None:
        """Take note that the obstacles are applied: a trial that has begun needs new connections."""
        if self._node.store is not None and self._trial and not self._has_reconnected:
            self._has_reconnected = True
            self._node.store.reconnect()

    def _during_trial(
        self, known: tuple[StoreAddress, ...], now: float, *, is_lost: bool
    ) -> tuple[StoreAddress, ...]:
        """End the trial if the store answers or the time is over. Return what is known then."""
        assert self._node.store is not None
        answering = frozenset() if is_lost else answered(self._trial, self._node.store.addresses)
        if not answering and now < self.due:
            return known
        for address in self._trial:
            log.warning(ANSWERED if address in answering else FAILED, address)
        self._trial, self.due = frozenset(), math.inf
        return tuple(replace(each, is_outside=True) if each.address in answering else each for each in known)


def is_due(tried: int) -> bool:
    """Return True if another trial may begin after one at ``tried``, in seconds since the epoch."""
    return not 0 <= clock.wall() - tried < _TRIAL_PAUSE


def answered(tried: frozenset[IPAddress], addresses: frozenset[IPAddress]) -> frozenset[IPAddress]:
    """Return those of the ``tried`` addresses that may have answered, of all ``addresses`` of the store."""
    return tried if addresses <= tried else tried & connected()


def remembered(
    known: Iterable[StoreAddress], current: Collection[IPAddress], hour: int, *, answers: bool
) -> tuple[StoreAddress, ...]:
    """Return the known addresses with the current ones, which stay for a day after they were current.

    Nothing is forgotten unless the store ``answers``: without it names cannot be looked up either.
    """
    former = {each.address: each for each in known}
    found = [
        replace(former.pop(each, StoreAddress(each, hour)), hour=hour) for each in sorted(current, key=int)
    ]
    found += sorted(
        (each for each in former.values() if not answers or 0 <= hour - each.hour <= _FORMER),
        key=lambda each: (-each.hour, int(each.address)),
    )
    return tuple(found[:_MOST])


def observed(known: StoreAddress, way: Way | None) -> StoreAddress:
    """Return an address with its side, if the way there tells it for the first time.

    Later ways tell nothing: a node inside the network may have gone, with the route to it.
    """
    if known.is_outside is not None or way is None:
        return known
    return replace(known, is_outside=not way.is_ours)


def _obstacle(address: IPAddress, way: Way | None) -> Obstacle:
    """Return the obstacle for each subnet around the address, but for those around a route of others."""
    if way is None or way.is_ours:
        return Obstacle(single(address), "", "store")
    return Obstacle(single(address), way.device, "store", way.destination)


Result = TypeVar("Result")

#: Seconds between two requests of a trial.
_PAUSE = 0.2


class StoreTrial:
    """Trial after a request of a start that got no answer from the store."""

    def __init__(self, store: Store, previous: Previous, last_run: LastRun) -> None:
        self._store = store
        self._previous = previous
        self._last_run = last_run

    def ask(self, attempt: Callable[[], Result], failure: NoAnswer) -> Result:
        """Make attempts without the routes to the store. Raises as the last one; without routes ``failure``.

        The routes are restored if the store does not answer.
        """
        if not is_due(self._last_run.store_tried):
            raise failure
        kernel = Kernel()
        routes = self._routes(kernel)
        if not routes:
            raise failure
        self._last_run.store_tried = int(clock.wall())
        self._last_run.record(store_tried=self._last_run.store_tried)
        for route, address in routes.items():
            log.warning(TRIED, address, route.destination, TRIAL)
        kernel.write(list(routes), drop=True)
        has_answered = False
        try:
            answer = _until_answered(attempt)
            has_answered = True
        except Retryable as reason:
            has_answered = not isinstance(reason, NoAnswer)
            raise
        finally:
            self._end(kernel, routes, has_answered=has_answered)
        return answer

    def _routes(self, kernel: Kernel) -> dict[Route, IPAddress]:
        """Return the routes of an earlier run that lead to an address of the store, with that address."""
        addresses = {*self._store.addresses, *(each.address for each in self._last_run.store_addresses)}
        inside = [each for each in addresses if any(each in network for network in self._previous.networks)]
        if not inside:
            return {}
        links = frozenset(each.name for each in kernel.links() if is_flannels(each))
        kernel.domain = Domain("", links, self._previous.ranges)
        return {
            route: address
            for route in kernel.left_behind(kernel.domain)
            for address in inside
            if isinstance(route, Route)
            and address in route.destination
            and any(lies_in(route.destination, network) for network in self._previous.networks)
        }

    def _end(self, kernel: Kernel, routes: dict[Route, IPAddress], *, has_answered: bool) -> None:
        """Restore the routes to addresses that have not answered; record the others."""
        tried = frozenset(routes.values())
        answering = answered(tried, self._store.addresses) if has_answered else frozenset()
        kernel.write([route for route, address in routes.items() if address not in answering])
        for address in tried:
            log.warning(ANSWERED if address in answering else FAILED, address)
        known = {each.address: each for each in self._last_run.store_addresses}
        hour = int(clock.wall() // 3600)
        known |= {address: StoreAddress(address, hour, is_outside=True) for address in answering}
        self._last_run.store_addresses = tuple(known.values())
        self._last_run.record(store_addresses=self._last_run.store_addresses)


def _until_answered(attempt: Callable[[], Result]) -> Result:
    """Make attempts for the time of a trial, until one is answered. Raises as the last one."""
    deadline = clock.now() + TRIAL
    while True:
        try:
            return attempt()
        except NoAnswer:
            if clock.now() >= deadline:
                raise
        waits.pause(threading.Event(), _PAUSE)
