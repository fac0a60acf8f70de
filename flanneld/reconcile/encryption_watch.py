"""Detection of routes and policies by which packets leave unencrypted though the backend encrypts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from flanneld.backends.contract import Backend
from flanneld.model import Lease
from flanneld.network.obstacles import HostRoute
from flanneld.runtime.logs import Once
from flanneld.state.resources import Key, Resource, Route, route_key
from flanneld.state.table import Bypass

log = logging.getLogger(__name__)


def leaks(resource: Resource, backend: Backend, own: Lease, links: Collection[str], *, synced: bool) -> bool:
    """Return True if packets leave unencrypted by this own route though the backend encrypts.

    ``links`` are our devices. While one backend takes over from another, the routes of the former serve
    until all peers are known. Then they are replaced without packet loss.
    """
    if not isinstance(resource, Route) or not backend.encrypts:
        return False
    if resource.device not in links:
        return synced or not backend.switches
    return synced and resource.device in backend.clear_devices(own)


def bypasses(detours: Iterable[HostRoute], desired: Mapping[Key, Resource]) -> list[HostRoute]:
    """Return other programs' routes that bypass the encryption. Desired routes do not count."""

    def is_wanted(route: HostRoute) -> bool:
        want = desired.get(route_key(route.destination)) if route.destination else None
        return isinstance(want, Route) and route.hops == ((want.device, want.gateway),)

    return sorted((route for route in detours if not is_wanted(route)), key=str)


class EncryptionWatch:
    """Watch that reports other programs' routes and policies past the encryption. It never removes them."""

    def __init__(self) -> None:
        #: Reason why packets may leave unencrypted, with the remedy; else empty. Read from any thread.
        self.problem = ""
        self._once = Once()

    def look(
        self,
        detours: Iterable[HostRoute],
        desired: Mapping[Key, Resource],
        policies: Iterable[Bypass] = (),
    ) -> None:
        routes = (Bypass(f"route {each}", f"ip route delete {each}") for each in bypasses(detours, desired))
        found = [*routes, *policies]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        self.problem = (
            f"packets may leave unencrypted by another program's {found[0].what}{more};"
            f" remove it: {found[0].removal}"
            if found
            else ""
        )
        if self.problem:
            self._once.warn(log, "bypass", f"Encryption bypassed: {self.problem}")
        elif self._once.clear("bypass"):
            log.info("Encryption no longer bypassed")
