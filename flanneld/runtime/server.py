"""Server of one listening socket for many connections, with limits on time and number, none blocking another.

All connections share one thread until their first request is there. So those that only wait, or send slowly,
take a file descriptor each, and no thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from msgspec import Struct

from flanneld.runtime import clock
from flanneld.runtime.logs import PACE
from flanneld.runtime.sockets.interruptible import address_of
from flanneld.runtime.supervisor import Wakeup

log = logging.getLogger(__name__)

#: Coroutine of one connection. It yields the event to wait for (``READABLE`` or ``WRITABLE``) and ends
#: with the connection. It may be resumed without the event, so it must not block. If it returns the socket,
#: which it may have wrapped, and a function, that is called in a thread, and the connection ends with it.
Conversation = Generator[int, None, Any]
#: Yielded to wait until the peer sends, or accepts more data.
READABLE, WRITABLE = select.POLLIN, select.POLLOUT

#: Connections to accept before others go on: the newest must not all come before those that are there.
_AT_ONCE = 16
#: Descriptors from here on make room for others if they can: see ``_lifted``.
_CROWDED = 512
#: First descriptor that select(2) cannot wait for, __FD_SETSIZE of linux/posix_types.h.
_BEYOND_SELECT = 1024
#: Seconds to wait without free file descriptors; the connection stays in the queue meanwhile.
_STARVED = 0.1
#: Prefix length of one IPv6 source: a host may use 2^64 addresses of its network.
_IPV6_SOURCE = 64
#: Bytes of a thread's stack: 8 MiB of address space each, the default, soon are more than a limit allows.
_STACK = 512 << 10


class Limits(Struct, frozen=True, gc=False):
    """Limits of a server.

    ``seconds`` is the lifetime of a connection without a thread; ``reserved`` ones are for this host.
    """

    seconds: float
    connections: int
    per_source: int
    reserved: int = 0
    threads: int = 0


class ConnectionOrigin(Struct, frozen=True, gc=False):
    """Origin of a connection. Local connections, such as kubelet's probes, have a reserve."""

    name: str
    is_local: bool


class _Open(Struct, frozen=True, gc=False):
    connection: socket.socket
    conversation: Conversation
    source: ConnectionOrigin
    deadline: float


def to_evict(old: Sequence[ConnectionOrigin], new: ConnectionOrigin, limits: Limits) -> int | None:
    """Return the index of the connection to close for a new one, None if there is room (pure).

    ``old`` are the open ones, oldest first. A source at its limit loses its oldest connection. At the total
    limit, the source with the most connections loses its oldest.
    """
    of_same = [number for number, source in enumerate(old) if source == new]
    if len(of_same) >= limits.per_source:
        return of_same[0]
    rivals = [number for number, source in enumerate(old) if new.is_local or not source.is_local]
    if len(rivals) < limits.connections - (0 if new.is_local else limits.reserved):
        return None
    largest = Counter(old[number] for number in rivals).most_common(1)[0][0]
    return next(number for number in rivals if old[number] == largest)


class PolledServer:
    """Server in the thread of ``serve``. ``talk`` returns the coroutine of a new connection.

    ``failing`` is logged for a coroutine or a function that fails through a bug.
    """

    def __init__(
        self,
        listener: socket.socket,
        talk: Callable[[socket.socket], Conversation],
        limits: Limits,
        failing: str,
    ) -> None:
        self._listener = listener
        self._talk = talk
        self._limits = limits
        self._failing = failing
        self._closing = threading.Event()
        self._poll = select.poll()
        self._wake = Wakeup()
        #: Open connections without a thread by file descriptor, oldest first.
        self._open: dict[int, _Open] = {}
        #: Guards counters, also those of a subclass.
        self.lock = threading.Lock()
        self._threads = 0
        #: When a refused connection was logged last.
        self._refused = -math.inf

    def serve(self) -> None:
        """Serve until ``close``."""
        self._listener.setblocking(False)
        own = self._listener.fileno()
        self._poll.register(own, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        if self._limits.threads:
            threading.stack_size(_STACK)
        try:
            while not self._closing.is_set():
                for fd, _ in self._poll.poll(self._patience()):
                    self._accept_some() if fd == own else self._go_on(fd)
                self._cut_off_the_late()
        finally:
            for fd in tuple(self._open):
                self._end(fd)
            self._listener.close()
            if self._limits.threads:
                threading.stack_size(0)

    @property
    def connections(self) -> int:
        """Number of open connections. May be read from any thread."""
        return len(self._open) + self._threads

    def close(self) -> None:
        """End ``serve`` at once. May be called repeatedly, from any thread."""
        self._closing.set()
        self._wake.set()  # no shutdown: systemd may keep the listening socket

    def _patience(self) -> float | None:
        """Return the milliseconds until the oldest connection expires: all have the same lifetime."""
        oldest = next(iter(self._open.values()), None)
        return None if oldest is None else max(0.0, math.ceil(1000 * (oldest.deadline - time.monotonic())))

    def _accept_some(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no more, or the client has already closed it
            for _ in range(_AT_ONCE):
                self._accept()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            raise
        except OSError:
            if self._open:
                self._end(next(iter(self._open)))
            else:
                self._closing.wait(_STARVED)
            return
        connection = _lifted(connection)
        source = _source(connection, address)
        fds = tuple(self._open)
        surplus = to_evict([self._open[fd].source for fd in fds], source, self._limits)
        if surplus is not None:
            self._end(fds[surplus])
        connection.setblocking(False)
        deadline = time.monotonic() + self._limits.seconds
        self._open[connection.fileno()] = _Open(connection, self._talk(connection), source, deadline)
        self._poll.register(connection.fileno(), 0)
        self._go_on(connection.fileno())

    def _go_on(self, fd: int) -> None:
        if fd not in self._open:  # evicted while another event was handled
            return
        try:
            self._poll.modify(fd, next(self._open[fd].conversation))
        except StopIteration as done:
            if done.value is None:
                self._end(fd)
                return
            self._poll.unregister(fd)
            del self._open[fd]
            self._start(*done.value)
        except OSError:  # the client failed
            self._end(fd)
        except Exception:  # a bug must not end the daemon
            log.exception("%s", self._failing)
            self._end(fd)

    def _start(self, connection: socket.socket, handle: Callable[[], object]) -> None:
        """Call ``handle`` in a thread, and close the connection after it; at once if there is no room."""
        with self.lock:
            has_room = self._threads < self._limits.threads
            self._threads += has_room
        if has_room:
            thread = threading.Thread(
                target=self._run, args=(connection, handle), name="request", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no memory for a thread
                thread.start()
                return
            with self.lock:
                self._threads -= 1
        if clock.now() - self._refused >= PACE:
            self._refused = clock.now()
            log.warning("Too many connections: refusing one of %s; start another server", _peer(connection))
        connection.close()

    def _run(self, connection: socket.socket, handle: Callable[[], object]) -> None:
        try:
            handle()
        except Exception:  # a bug must not end the daemon
            log.exception("%s of %s", self._failing, _peer(connection))
        finally:
            with contextlib.suppress(OSError):  # the client has gone
                connection.shutdown(socket.SHUT_WR)
            connection.close()
            with self.lock:
                self._threads -= 1

    def _cut_off_the_late(self) -> None:
        now = time.monotonic()
        for fd, each in tuple(self._open.items()):
            if each.deadline > now:
                return
            self._end(fd)

    def _end(self, fd: int) -> None:
        self._poll.unregister(fd)
        ended = self._open.pop(fd)
        ended.conversation.close()  # it may have wrapped the connection
        ended.connection.close()


def listen(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    """Return a TCP socket that listens at an address. Raises ``OSError`` and ``OverflowError``."""
    # Not create_server, which gives IPv6 sockets IPV6_V6ONLY, and errors another text.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def receive(connection: socket.socket, size: int) -> Generator[int, None, bytes]:
    """Receive available data; empty at the end of the stream."""
    while True:
        yield READABLE
        with contextlib.suppress(BlockingIOError):
            return connection.recv(size)


def send(connection: socket.socket, data: bytes) -> Generator[int, None, None]:
    """Send all data, yielding whenever the client is slow."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            yield WRITABLE


def _lifted(connection: socket.socket) -> socket.socket:
    """Return the connection with a high descriptor if it has no low one.

    The low ones are for libraries that wait with select(2), such as libnftables, which would end the process.
    """
    if connection.fileno() < _CROWDED:
        return connection
    with contextlib.suppress(OSError):  # the limit may be lower
        lifted = socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _BEYOND_SELECT))
        connection.close()
        return lifted
    return connection


def _source(connection: socket.socket, address: object) -> ConnectionOrigin:
    if not isinstance(address, tuple):
        return ConnectionOrigin("", is_local=True)  # a Unix socket is local
    host = address_of(str(address[0]))
    assert host
    is_local = host.is_loopback or address[0] == connection.getsockname()[0]
    if host.version == 6 and not is_local:
        return ConnectionOrigin(f"{int(host) >> (128 - _IPV6_SOURCE):x}", is_local=False)
    return ConnectionOrigin(str(host), is_local)


def _peer(connection: socket.socket) -> object:
    with contextlib.suppress(OSError):
        return connection.getpeername()
    return "a client that has gone"
