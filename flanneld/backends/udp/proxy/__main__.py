"""Process of the udp proxy: ``python -m flanneld.backends.udp.proxy`` with ``UdpProxy.words`` as arguments.

It prints ``ready`` once it carries packets, or the reason why it cannot, and closes its output. A data plane
runs in a thread, while the process answers daemons on the control channel. SIGTERM, which a service manager
sends to all remaining processes, also removes the device.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import TypeVar

from flanneld.backends.udp import control
from flanneld.backends.udp.client import READY, succeed
from flanneld.backends.udp.control import UdpProxy
from flanneld.backends.udp.proxy.plane import Offer, Plane, Wire, build, offers
from flanneld.network.interfaces import index_of, unmake

#: Seconds for a data plane to stop, and for a daemon to take an answer.
STOP_PATIENCE, SEND_PATIENCE = 2.0, 1.0


class ProxyServer:
    """Server that runs a data plane in a thread and answers daemons meanwhile."""

    def __init__(
        self,
        settings: UdpProxy,
        plane: Plane,
        why: str,
        listener: socket.socket,
        peers: Iterable[control.PeerEntry] = (),
    ) -> None:
        self._settings = settings
        self._plane = plane
        self._device = index_of(settings.tun)
        self._why = why
        self._listener = listener
        self._peers: dict[IPv4Network, IPv4Address] = {}
        self._connections: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._carry, daemon=True)
        #: What is written here ends a wait of ``serve``.
        self._wakeups, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: True or False once the proxy ends: the device stays, or is removed.
        self._device_stays: bool | None = None
        self._change(control.PUT, peers)

    def end(self) -> None:
        """End the proxy and remove the device. May be called from a signal handler."""
        self._device_stays = False
        os.write(self.waker, b"\0")

    def serve(self) -> bool:
        """Serve until the proxy ends. Return True if the device should stay."""
        self._thread.start()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wakeups, select.POLLIN)
        while self._device_stays is None:
            for fd, _ in poll.poll():
                if fd == self._listener.fileno():
                    self._welcome(poll)
                elif fd in self._connections and not self._attend(self._connections[fd]):
                    poll.unregister(fd)
                    self._connections.pop(fd).close()
        self._plane.stop()
        self._thread.join(STOP_PATIENCE)
        return self._device_stays

    def _carry(self) -> None:
        try:
            self._plane.run()
        except BaseException as failure:  # report every end of the thread
            text = (
                failure.strerror if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
            )
            self._say_farewell(f"the {self._plane.name} data plane: {text}")
        if self._device_stays is None:
            self._device_stays = True
        os.write(self.waker, b"\0")

    def _say_farewell(self, reason: str) -> None:
        for connection in tuple(self._connections.values()):
            with suppress(OSError):
                connection.send(control.END_REASON + reason.encode())

    # ---- connections -------------------------------------------------------------------------

    def _welcome(self, poll: select.poll) -> None:
        connection, _ = self._listener.accept()
        if not control.other_end(connection)[1]:
            connection.close()
            return
        connection.settimeout(SEND_PATIENCE)
        self._connections[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)

    def _attend(self, connection: socket.socket) -> bool:
        """Answer one message. Return False at the end of the connection."""
        try:
            message = connection.recv(control.LONGEST)
            if not message:
                return False
            verb = message[:1]
            for body in self._answers(verb, message[1:]):
                connection.send(verb + body)
        except (OSError, ValueError):
            return False
        return True

    def _answers(self, verb: bytes, body: bytes) -> Iterator[bytes]:
        match verb:
            case control.HELLO if index_of(self._settings.tun) != self._device:
                # The device was renamed or moved, so that its packets no longer reach us.
                self._device_stays = True
            case control.HELLO:
                words = [*self._settings.words(), str(os.getpid()), self._plane.name, self._why]
                yield "\0".join(words).encode()
            case control.LIST:
                yield from control.pack(self._peers.items())
            case control.COUNTERS:
                yield "\0".join(f"{name}={n}" for name, n in self._plane.counters().items()).encode()
            case control.PUT | control.DROP:
                self._change(verb, control.unpack(body))
                yield b""
            case control.LEAVE | control.LEAVE_NOTHING:
                self._device_stays = verb == control.LEAVE

    def _change(self, verb: bytes, entries: Iterable[control.PeerEntry]) -> None:
        for subnet, endpoint in entries:
            if verb == control.PUT:
                self._peers[subnet] = endpoint
                self._plane.set_peer(subnet, endpoint)
            else:
                self._peers.pop(subnet, None)
                self._plane.drop_peer(subnet)


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
    signal.set_wakeup_fd(server.waker)  # a signal just before a wait would not end that
    with suppress(BrokenPipeError):  # If the daemon was killed, the next one adopts this process.
        print(READY, flush=True)  # noqa: T201
    _close_output()
    if not server.serve():
        unmake(settings.tun)
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
