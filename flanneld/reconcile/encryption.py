"""Ways by which a container's packet leaves this host in the clear though the backend encrypts (pure)."""

from __future__ import annotations

from collections.abc import Collection

from flanneld.backends.contract import Backend, Switches, encrypts
from flanneld.model import Lease
from flanneld.state.resources import Resource, Route


def leaks(resource: Resource, backend: Backend, own: Lease, links: Collection[str], *, synced: bool) -> bool:
    """Return True for a route of ours by which packets leave in the clear though the backend encrypts.

    ``links`` are our devices. While the backend takes over from another one, routes of that one serve until
    all peers are known: they are replaced then, and no packet is lost.
    """
    if not isinstance(resource, Route) or not encrypts(backend):
        return False
    if resource.device not in links:
        return synced or not isinstance(backend, Switches)
    return synced and isinstance(backend, Switches) and resource.device in backend.clear_devices(own)
