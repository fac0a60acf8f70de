"""TCP connection that another thread can cut, its reader, and the addresses of hosts to connect to.

The reader gives up on a server that stalls or drips. There is one rule for all stores: an answer's head has
to be there in time. Its body has to bring ``LEAST`` bytes in each ``WITHIN`` seconds. A limit on each read
alone would never leave a server that sends a byte now and then. A limit on the whole answer would break off a
long one over a slow link.
"""

from __future__ import annotations

import io
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from flanneld.errors import Cancelled
from flanneld.runtime import clock

#: Keepalive: a peer that vanished is noticed within half a minute, even while nothing is to be sent.
TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),  # milliseconds
)


class Unreachable(Exception):
    """Error for a connection that could not be made. The text gives the reason."""


class UnknownName(Unreachable):
    """Error for a host whose name the resolver does not know, or does not answer for in time."""


class InterruptibleSocket:
    """Connection of one thread, one at a time. It is held from before it connects."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cut = False
        self._sock: socket.socket | None = None

    def check(self) -> None:
        """Raise ``Cancelled`` once ``cancel`` was called."""
        if self._cut:
            raise Cancelled

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Connect to the first address of the host that answers, after dropping the previous connection.

        ``timeout``, in seconds, is per address, and remains the socket's. Raises ``Unreachable`` or
        ``Cancelled``.
        """
        problem = "it has no address"
        for family, kind, protocol, _, address in self._resolve(host, port, timeout):
            sock = socket.socket(family, kind, protocol)
            try:
                self._hold(sock)
                for level, option, value in TCP_OPTIONS:
                    sock.setsockopt(level, option, value)
                sock.settimeout(timeout)
                sock.connect(address)
            except (OSError, Cancelled) as error:
                sock.close()
                self.check()
                problem = _text(error, timeout)
            else:
                return sock
        raise Unreachable(problem)

    def disconnect(self) -> None:
        """Close the connection; another may follow. May be called from any thread."""
        with self._changed:
            if self._sock is not None:
                _shut_down(self._sock)
                self._sock.close()
            self._sock = None

    def cancel(self) -> None:
        """Close the connection and refuse further ones. May be called repeatedly, from any thread."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()
        self.disconnect()

    def _hold(self, sock: socket.socket) -> None:
        # A duplicate, because TLS detaches the descriptor from the socket it wraps. Held before it connects,
        # because a shutdown also interrupts a connect.
        self.disconnect()
        with self._changed:
            self.check()
            self._sock = sock.dup()

    def _resolve(self, host: str, port: int, timeout: float) -> list[Any]:
        try:
            name = host.encode("ascii")  # bytes, because for text Python would load its IDNA tables
        except UnicodeError:
            raise UnknownName("its name is not ASCII") from None
        try:
            return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return self._look_up(name, port, timeout)

    def _look_up(self, name: bytes, port: int, timeout: float) -> list[Any]:
        """Call the resolver in a thread of its own, because it cannot be interrupted."""
        answers: list[list[Any]] = []

        def ask() -> None:
            try:
                answer: list[Any] = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except OSError:
                answer = []
            with self._changed:
                answers.append(answer)
                self._changed.notify_all()

        threading.Thread(target=ask, name="resolver", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: answers or self._cut, timeout)
        self.check()
        if not answers:
            raise UnknownName(f"its name was not resolved within {timeout:g} s")
        if not answers[0]:
            raise UnknownName("its name cannot be resolved")
        return answers[0]


def _text(error: Exception, timeout: float) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else f"no connection within {timeout:g} s"


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was not connected


#: Bytes that a running answer brings at least, and the seconds in which it does.
LEAST, WITHIN = 4 << 10, 10.0
#: Seconds of silence after which a reader that waits for a change sends a heartbeat.
LONGEST_SILENCE = 60.0


class TooSlow(TimeoutError):
    """Error for a server whose answer runs too slowly."""

    def __init__(self) -> None:
        super().__init__(f"its answer brings less than {LEAST >> 10} KiB in {WITHIN:g} s")


def no_heartbeat() -> None:
    """Do nothing: the heartbeat callback for short responses."""


class PacedReader(io.RawIOBase):
    """Raw reader of one answer on a connected socket. It counts the time spent waiting for the server only.

    Reads wait for at most ``seconds`` in total, until ``expect_body`` or ``allow``. With ``waiting`` this
    begins with the first byte; until then ``waiting`` is called at least every minute. ``file`` is the
    socket's unbuffered file, which keeps the socket open.
    """

    def __init__(
        self, sock: socket.socket, file: Any, seconds: float | None, waiting: Callable[[], None] | None = None
    ) -> None:
        self._sock = sock
        self._file = file
        self._waiting = waiting
        self.allow(seconds)

    def allow(self, seconds: float | None) -> None:
        """Let all following reads wait for at most ``seconds`` in total; None is no limit."""
        self._seconds = math.inf if seconds is None else seconds
        self._least, self._alive = math.inf, no_heartbeat
        self._waited, self._size = 0.0, 0

    def expect_body(self, alive: Callable[[], None] = no_heartbeat) -> None:
        """Apply the rule for running answers from now on. ``alive`` is called for each part received."""
        self.allow(WITHIN)
        self._least, self._alive = LEAST, alive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Raises ``TimeoutError``, of this ``TooSlow`` for a body."""
        if self._sock.gettimeout() == 0:
            try:
                return self._sock.recv_into(buffer)
            except BlockingIOError:
                return None
        if self._waiting is not None:
            return self._first(buffer, self._waiting)
        began = clock.now()
        size = self._receive(buffer, self._seconds - self._waited)
        self._waited += clock.now() - began
        if self._least < math.inf:  # the rule for running answers
            self._size += size
            if self._size >= self._least:
                self._waited, self._size = 0.0, 0
            self._alive()
        return size

    def close(self) -> None:
        self._file.close()
        super().close()

    def _first(self, buffer: Any, waiting: Callable[[], None]) -> int:
        while True:
            self._sock.settimeout(LONGEST_SILENCE)
            try:
                size = self._sock.recv_into(buffer)
            except TimeoutError:
                waiting()
            else:
                self._waiting = None
                return size

    def _receive(self, buffer: Any, seconds: float) -> int:
        if seconds > 0:
            self._sock.settimeout(None if seconds == math.inf else seconds)
            with suppress(TimeoutError):
                return self._sock.recv_into(buffer)
        raise TimeoutError("no answer in time") if self._least == math.inf else TooSlow


# ---- addresses of hosts, looked up without blocking the caller, and of those with a connection to us -----

Address = IPv4Address | IPv6Address

#: Seconds between two lookups of the names.
_PERIOD = 60.0


class HostAddresses:
    """All addresses of hosts, which ``hosts`` returns as names or addresses. For any thread."""

    def __init__(self, hosts: Callable[[], Iterable[str]]) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._is_busy = False
        self._due = -math.inf
        #: By name, the last answer of the resolver.
        self._answers: dict[str, frozenset[Address]] = {}

    def known(self) -> frozenset[Address]:
        """Return the addresses known by now. If it is time, look the names up in a thread of its own.

        A failed lookup changes nothing: the last answer stays.
        """
        found = {host: address_of(host) for host in self._hosts()}
        names = [host for host, address in found.items() if address is None]
        with self._lock:
            if names and not self._is_busy and clock.now() >= self._due:
                self._is_busy = True
                threading.Thread(target=self._look_up, args=(names,), name="resolver", daemon=True).start()
            resolved = [self._answers.get(name, frozenset()) for name in names]
        return frozenset(each for each in found.values() if each).union(*resolved)

    def _look_up(self, names: list[str]) -> None:
        for name in names:
            if addresses := look_up(name):
                with self._lock:
                    self._answers[name] = frozenset(addresses)
        with self._lock:
            self._is_busy, self._due = False, clock.now() + _PERIOD


def look_up(name: str) -> list[Address]:
    """Return the resolver's addresses for a name, none after a failure. Blocks until the resolver answers."""
    try:
        # As bytes, because for text Python would load its IDNA tables.
        answer = socket.getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [address for each in answer if (address := address_of(str(each[4][0])))]


def connected() -> frozenset[Address]:
    """Return the addresses of the hosts with which this process has a TCP connection."""
    found: set[Address] = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=int(file.name))
        except OSError:
            continue  # It is no socket, or has been closed meanwhile.
        with suppress(OSError):
            peer = sock.getpeername()
            if sock.family in (socket.AF_INET, socket.AF_INET6) and (address := address_of(peer[0])):
                found.add(address)
        sock.detach()
    return frozenset(found)


def address_of(host: str) -> Address | None:
    """Return the address that a text is, None for a name. A mapped IPv4 address counts as one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
