"""Process of the udp proxy: ``python -m flanneld.backends.udp.proxy`` with ``UdpProxy.words`` as arguments.

It prints ``ready`` once it carries packets, or the reason why it cannot, and closes its output. SIGTERM,
which a service manager sends to all remaining processes, also removes the device.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from flanneld.backends.udp import control
from flanneld.backends.udp.client import READY, succeed
from flanneld.backends.udp.proxy.plane import Offer, Plane, Wire, build, offers
from flanneld.backends.udp.proxy.server import ProxyServer
from flanneld.backends.udp.resources import UdpProxy
from flanneld.network import interfaces

#: Seconds to retry what the previous proxy still holds, and between two attempts.
_PATIENCE, _PAUSE = 0.5, 0.001
_GRACE = 0.3

Result = TypeVar("Result")


def main() -> int:
    settings = UdpProxy.of(sys.argv[1:])
    try:
        # All modules are loaded before the old proxy ends, to shorten the interruption.
        candidates = offers(settings.data_plane)
        peers = succeed(settings.tun)
        listener = _listen(settings.tun)
        plane, why = _take_over(settings, candidates)
    except OSError as failure:
        print(failure.strerror or failure)  # noqa: T201
        return 1
    server = ProxyServer(settings, plane, why, listener, peers)

    def end(*_: object) -> None:
        # Wait until a daemon that gets the same signal no longer repairs the device removed here.
        time.sleep(_GRACE)
        server.end()

    signal.signal(signal.SIGTERM, end)
    with suppress(BrokenPipeError):  # If the daemon was killed, the next one adopts this process.
        print(READY, flush=True)  # noqa: T201
    _close_output()
    if not server.serve():
        interfaces.unmake(settings.tun)
    # Closing the connections tells a successor that all is released, so release all at once.
    os._exit(0)


def _listen(tun: str) -> socket.socket:
    try:
        return _soon(lambda: control.listen(tun))
    except OSError as failure:
        if failure.errno != errno.EADDRINUSE:
            raise
        return control.listen_elsewhere(tun)


def _take_over(settings: UdpProxy, candidates: list[Offer]) -> tuple[Plane, str]:
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        _soon(lambda: wire.bind((str(settings.local), settings.port)))
    except OSError as failure:
        reason = failure.strerror
        if failure.errno == errno.EADDRINUSE:
            from flanneld.network.processes import owner_of  # rarely needed

            reason = f"in use by {owner_of(settings.port, settings.local)}, which has to be stopped"
        raise OSError(failure.errno, f"{settings.local}:{settings.port}, UDP: {reason}") from None
    ends = Wire(
        settings.tun, wire.detach(), settings.address, settings.mtu, settings.port, settings.accept_any
    )
    return _soon(lambda: build(candidates, ends))


def _soon(attempt: Callable[[], Result]) -> Result:
    """Retry while a process that is just ending still holds the resource. Raises ``OSError``."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return attempt()
        except OSError as failure:
            held = failure.errno in (errno.EADDRINUSE, errno.EBUSY)
            if not held or time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE)


def _close_output() -> None:
    """Detach from the daemon's output, so that its readers see the end when the daemon ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
