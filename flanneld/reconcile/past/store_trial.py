"""Trial of a start that does not reach the store: without the routes of an earlier run that lead there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from flanneld.errors import NoAnswer, Retryable
from flanneld.model import IPAddress, lies_in
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.reconcile.host.store_watch import ANSWERED, FAILED, TRIAL, TRIED, answered, is_due
from flanneld.reconcile.past.last_run import LastRun
from flanneld.reconcile.past.ownership import StoreAddress
from flanneld.runtime import clock, waits
from flanneld.state.resources import Route
from flanneld.subnet.store import Store
from flanneld.subnet.subnet_file import Previous

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Seconds between two requests of a trial.
_PAUSE = 0.2


class StoreTrial:
    """Trial after a request of a start that got no answer from the store."""

    def __init__(self, manager: Store, previous: Previous, last_run: LastRun) -> None:
        self._manager = manager
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
        addresses = {*self._manager.addresses, *(each.address for each in self._last_run.store_addresses)}
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
        answering = answered(tried, self._manager.addresses) if has_answered else frozenset()
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
