"""Reader of a server's answer that gives up on a server that stalls or drips. One rule for all stores.

An answer's head has to be there in time. Its body has to bring ``LEAST`` bytes in each ``WITHIN`` seconds. A
limit on each read alone would never leave a server that sends a byte now and then. A limit on the whole
answer would break off a long one over a slow link.
"""

from __future__ import annotations

import io
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flanneld.runtime import clock

#: Bytes that a running answer brings within so many seconds, at least.
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
