"""Interface of a data plane, its parameters, and its choice."""

from __future__ import annotations

import errno
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from typing import Protocol

from msgspec import Struct


class Plane(Protocol):
    """Data plane: carries packets between a TUN and a UDP socket, in its own threads or loop."""

    name: str

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Add or replace a peer, also while traffic flows."""
        ...

    def drop_peer(self, subnet: IPv4Network) -> None:
        """Remove a peer. A missing one is no error."""
        ...

    def run(self) -> None:
        """Carry packets until ``stop``. Raises ``OSError`` if the TUN is gone."""
        ...

    def stop(self) -> None:
        """Make ``run`` return soon. May be called from any thread or a signal handler."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the counters of carried packets, and of dropped ones by reason."""
        ...


class Wire(Struct, frozen=True, gc=False):
    """Endpoints of a data plane.

    - ``socket`` is the descriptor of a bound UDP socket without any options set.
    - ``address`` is the TUN's, ``port`` the peers' UDP port.
    - ``accept_any`` accepts datagrams from any source, otherwise only from the public IPs of known peers.
    """

    tun: str
    socket: int
    address: IPv4Address
    mtu: int
    port: int
    accept_any: bool


#: A data plane's constructor, and the reason for choosing it.
Offer = tuple[Callable[[Wire], Plane], str]


def offers(data_plane: str) -> list[Offer]:
    """Return the data planes to try, best first. Raises ``OSError`` if the requested one is missing."""
    from flanneld.backends.udp.proxy import native  # both import this module
    from flanneld.backends.udp.proxy.python import PythonPlane

    if data_plane == "python":
        return [(PythonPlane, "as DataPlane says")]
    missing = native.available()
    if data_plane == "native":
        if missing is not None:
            raise OSError(errno.ENOSYS, f"no native data plane: {missing}")
        return [(native.NativePlane, "as DataPlane says")]
    if missing is not None:
        return [(PythonPlane, f"no native one: {missing}")]
    return [(native.NativePlane, "the faster one"), (PythonPlane, "nothing else works")]


def build(candidates: list[Offer], ends: Wire) -> tuple[Plane, str]:
    """Return the first data plane that works on this kernel. Raises ``OSError`` if none does."""
    (make, why), *others = candidates
    try:
        return make(ends), why
    except OSError as failure:
        if failure.errno == errno.EBUSY or not others:
            raise
        reason = f"the better one fails: {failure.strerror or failure}"
    return build([(make, reason) for make, _ in others], ends)
