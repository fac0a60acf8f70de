"""Client of the udp proxy's control channel."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.backends.udp import control
from flanneld.backends.udp.control import UdpProxy
from flanneld.errors import Retryable
from flanneld.runtime import waits

if TYPE_CHECKING:
    from flanneld.runtime.command import LastingProcess

READY = "ready"
#: Seconds. An answer takes milliseconds, a process start 0.1 s; both take longer on a busy machine.
ANSWER_PATIENCE, _START_PATIENCE = 3.0, 10.0
#: Seconds that the kernel may take to end a process.
_END_PATIENCE = 5.0
_NEEDED = ("PATH", "LANG", "LD_LIBRARY_PATH")


class NoProxy(Retryable):
    """Error for a proxy that does not exist or does not answer correctly."""

    def __init__(self, tun: str, reason: str) -> None:
        super().__init__(f"no udp proxy for {tun}: {reason}")


class ProxySilent(NoProxy):
    """Error for a proxy whose process exists but does not answer."""


class RunningProxy(Struct, frozen=True, gc=False):
    """A proxy's description of itself; ``why`` gives the reason for its data plane."""

    settings: UdpProxy
    pid: int
    plane: str
    why: str


class ProxyClient:
    """Connection to the proxy of one device, made on demand and again after a loss.

    Only a process of this user or root is accepted as a proxy, unless ``of_anybody``, which suffices to end
    it.
    """

    def __init__(self, tun: str, *, of_anybody: bool = False) -> None:
        self.tun = tun
        self._of_anybody = of_anybody
        self._connection: socket.socket | None = None
        self._process: LastingProcess | None = None
        #: True if the connected proxy listens at the usual address.
        self.has_usual_name = True

    def fileno(self) -> int:
        return self._connection.fileno() if self._connection else -1

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process and self._process.status is not None:
            self._process = None

    # ---- requests ----------------------------------------------------------------------------

    def hello(self) -> RunningProxy:
        """Return the proxy's description.

        Raises ``NoProxy`` if there is none, or one of an incompatible version.
        """
        answer = self._ask(control.HELLO).decode(errors="replace")
        try:
            *words, pid, plane, why = answer.split("\0")
            running = RunningProxy(UdpProxy.of(words), int(pid), plane, why)
        except ValueError:
            raise NoProxy(self.tun, "it is of another version") from None
        if running.settings.tun != self.tun:
            raise NoProxy(self.tun, "the process that answers is no udp proxy")
        return running

    def peers(self) -> list[control.PeerEntry]:
        body = self._ask(control.LIST)
        try:
            entries = control.unpack(body)
            while control.is_full(body):
                body = self._receive(control.LIST)
                entries += control.unpack(body)
        except (OSError, ValueError) as failure:
            self.close()
            raise NoProxy(self.tun, str(failure)) from None
        return entries

    def put(self, entries: Iterable[control.PeerEntry]) -> None:
        self._tell(control.PUT, entries)

    def drop(self, entries: Iterable[control.PeerEntry]) -> None:
        self._tell(control.DROP, entries)

    def counters(self) -> dict[str, int]:
        pairs = (pair.partition("=") for pair in self._ask(control.COUNTERS).decode().split("\0"))
        return {name: int(number) for name, _, number in pairs}

    def leave(self, *, device_stays: bool) -> None:
        """End the proxy and wait for its exit. A missing one is no error."""
        verb = control.LEAVE if device_stays else control.LEAVE_NOTHING
        try:
            pid, trusted = self._connect()
        except NoProxy:
            return
        pidfd = _pidfd_of(pid)
        try:
            self._exchange(verb)
        except TimeoutError:
            # It hangs, and holds what its successor needs. The pid of an untrusted process is not reliable.
            if trusted and pidfd >= 0:
                end_process(pidfd)
        except OSError:
            pass  # The closed connection is the answer.
        finally:
            self.close()
            if pidfd >= 0:
                os.close(pidfd)

    def news(self) -> str:
        """Read why the connection became readable: the reason for the proxy's end."""
        try:
            return self._receive().decode(errors="replace")
        except OSError as failure:
            return failure.strerror or str(failure)
        finally:
            self.close()

    # ---- starting a proxy ---------------------------------------------------------------------

    def start(self, settings: UdpProxy) -> None:
        """Start a proxy, replacing a running one, and wait until it is ready. Raises ``Retryable``."""
        # Not needed by a new proxy, which uses this class to end the old one.
        from flanneld.runtime.command import LastingProcess

        self.close()
        argv = (sys.executable, "-S", "-P", "-m", "flanneld.backends.udp.proxy", *settings.words())
        self._process = LastingProcess(argv, _environment())
        said = self._process.said(_START_PATIENCE)
        if said != [READY]:
            raise NoProxy(self.tun, said[-1] if said else "it ended without a message")

    # ---- the wire ----------------------------------------------------------------------------

    def _tell(self, verb: bytes, entries: Iterable[control.PeerEntry]) -> None:
        for body in control.pack(entries):
            self._ask(verb, body)

    def _ask(self, verb: bytes, body: bytes = b"") -> bytes:
        self._connect()
        try:
            return self._exchange(verb, body)
        except TimeoutError:
            self.close()
            raise ProxySilent(self.tun, "it does not answer") from None
        except OSError as failure:
            self.close()
            raise NoProxy(self.tun, str(failure)) from None

    def _exchange(self, verb: bytes, body: bytes = b"") -> bytes:
        assert self._connection
        self._connection.send(verb + body)
        return self._receive(verb)

    def _receive(self, verb: bytes = control.END_REASON) -> bytes:
        assert self._connection
        message = self._connection.recv(control.LONGEST)
        if message[:1] == verb:
            return message[1:]
        raise ConnectionResetError(message[1:].decode(errors="replace") or "the process has ended")

    def _connect(self) -> tuple[int, bool]:
        """Connect if necessary; return pid and trust as ``other_end`` does. Raises ``NoProxy``."""
        reason: NoProxy | None = None
        if self._connection:
            return control.other_end(self._connection)
        for of_anybody in (False, True) if self._of_anybody else (False,):
            for address in control.addresses_of(self.tun, of_anybody=of_anybody):
                try:
                    return self._connect_to(address, of_anybody=of_anybody)
                except NoProxy as failure:
                    reason = reason or failure
        raise reason or NoProxy(self.tun, "another process has taken its socket name")

    def _connect_to(self, address: str, *, of_anybody: bool) -> tuple[int, bool]:
        connection = control.new_socket()
        try:
            control.connect(connection, address, ANSWER_PATIENCE)
            pid, trusted = control.other_end(connection)
        except OSError as failure:
            connection.close()
            # A full queue proves that the process exists.
            kind = ProxySilent if isinstance(failure, BlockingIOError) else NoProxy
            raise kind(self.tun, failure.strerror or str(failure)) from None
        if not (trusted or of_anybody):
            connection.close()
            raise NoProxy(self.tun, f"process {pid} poses as one, and is not of this user or root")
        self._connection = connection
        self.has_usual_name = address == control.address_of(self.tun)
        return pid, trusted


def succeed(tun: str) -> list[control.PeerEntry]:
    """End the proxy of a device, if there is one, and return its peers: most are still right."""
    client = ProxyClient(tun)
    try:
        return client.peers()
    except NoProxy:
        return []
    finally:
        client.close()
        ProxyClient(tun, of_anybody=True).leave(device_stays=True)


def end_process(pidfd: int) -> None:
    """Kill a process and wait for its end, which frees its resources."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    waits.readable(pidfd, _END_PATIENCE)


def _pidfd_of(pid: int) -> int:
    """Return a pidfd, negative if the process is not visible."""
    try:
        return os.pidfd_open(pid) if pid else -1
    except OSError:
        return -1


def _environment() -> dict[str, str]:
    """Return the environment that the proxy's Python needs. The rest may contain secrets."""
    kept = {name: value for name, value in os.environ.items() if name in _NEEDED or name.startswith("PYTHON")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
