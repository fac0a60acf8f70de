"""Writer of the log, and the event history: the log's last lines.

The history is kept in memory and, over restarts of the daemon, in a file. The log says once what has changed
and why, so it is the history already; this only remembers its end.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

from flanneld.errors import cause_of
from flanneld.runtime import files

log = logging.getLogger(__name__)

#: Bytes that a writable pipe takes without blocking (pipe(7), PIPE_BUF).
_PIECE = 4096
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Seconds to wait for the reader to make room.
PATIENCE = 1.0


class LogWriter:
    """Writer of lines to a file descriptor. Lines that find no room in time are lost.

    Once there is room again, a line reports their number.
    """

    def __init__(self, fd: int, time_limit: float = PATIENCE) -> None:
        self._fd = fd
        self._patience = time_limit
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lost = 0
        #: True if the end of the last written line was lost.
        self._is_torn = False

    def write(self, line: str) -> None:
        """Write a line, given without its newline. Raises ``OSError`` if there is no reader."""
        # After a lost line, do not wait for this reader again.
        deadline = time.monotonic() + (0.0 if self._lost else self._patience)
        if self._lost:
            gap = "\n" if self._is_torn else ""
            lost = "1 line of the log is" if self._lost == 1 else f"{self._lost} lines of the log are"
            line = f"{gap}... {lost} lost: there was no room\n{line}"
        if self._write(f"{line}\n".encode(errors="backslashreplace"), deadline):
            self._lost, self._is_torn = 0, False
        else:
            self._lost += 1

    def _write(self, data: bytes, deadline: float) -> bool:
        rest = memoryview(data)
        while rest:
            if not self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                break
            try:
                rest = rest[os.write(self._fd, rest[:_PIECE]) :]
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                break
        self._is_torn |= 0 < len(rest) < len(data)
        return not rest


#: Number of events that are remembered, and characters of each.
LIMIT, LENGTH = 200, 400
#: Bytes of the file at which the events that are no longer remembered are dropped from it.
LONGEST_FILE = 256 << 10

#: The level of ``-v=1``.
_VERBOSE = logging.INFO - 1

#: Seconds since the epoch, glog's severity letter, name of the source file, text.
LoggedEvent = tuple[float, str, str, str]


class Events(logging.Handler):
    """Ring buffer of the log at level INFO and above, without ``-v``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[LoggedEvent] = deque(maxlen=LIMIT)
        self._path: Path | None = None
        self._file: IO[bytes] | None = None

    def keep(self, path: Path) -> None:
        """Take over the events that an earlier run left in a file, and add to it from now on.

        If the file cannot be used, the events are in memory only. That is no warning: ``subnet.env`` beside
        it has the same trouble, and the daemon does without a history.
        """
        self.acquire()
        try:
            self._ring = deque([*read_events(path), *self._ring], maxlen=LIMIT)
            self._path = path
            problem = self._write_all()
        finally:
            self.release()
        if problem:
            log.log(_VERBOSE, "Events are not kept over restarts: %s: %s", path, problem)

    def emit(self, record: logging.LogRecord) -> None:
        # The handler that writes the log reports a wrong format string.
        with suppress(TypeError, ValueError, KeyError):
            text = record.getMessage()[:LENGTH]
            severity = "F" if record.levelno >= logging.CRITICAL else record.levelname[0]
            event = (record.created, severity, record.module, text)
            self._ring.append(event)
            if self._file:
                self._append(self._file, event)

    def recent(self) -> list[LoggedEvent]:
        """Return the events, oldest first. May be called from any thread."""
        return list(self._ring.copy())

    def close(self) -> None:
        """Close the file; what it holds stays."""
        if self._file:
            self._file.close()
            self._file = None
        super().close()

    def _append(self, file: IO[bytes], event: LoggedEvent) -> None:
        try:
            if file.write(_line(event)) and file.tell() > LONGEST_FILE:
                self._write_all()
        except OSError:  # a full disk: the events go on in memory
            with suppress(OSError):
                file.close()
            self._file = None

    def _write_all(self) -> str:
        """Write the file anew, with what is remembered; return what went wrong."""
        assert self._path
        if self._file:
            self._file.close()
            self._file = None
        try:
            files.replace(self._path, b"".join(map(_line, self._ring)), 0o600)
            # Unbuffered: what a killed daemon said last is what matters.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            return cause_of(error)
        return ""


def remember() -> Events:
    """Install and return the ring buffer."""
    events = Events()
    logging.getLogger().addHandler(events)
    return events


def _line(event: LoggedEvent) -> bytes:
    return f"{json.dumps(event)}\n".encode()


def read_events(path: Path) -> list[LoggedEvent]:
    """Return the last ``LIMIT`` events in a file. What is no event, as a line that was cut, is left out."""
    try:
        lines = files.read(path, 2 * LONGEST_FILE).splitlines()
    except OSError:
        return []
    return [event for line in lines if (event := _event(line))][-LIMIT:]


def _event(line: bytes) -> LoggedEvent | None:
    try:
        time, severity, source, text = json.loads(line)
        event = (float(time), str(severity)[:1], str(source)[:LENGTH], str(text)[:LENGTH])
    except (ValueError, TypeError, RecursionError):
        return None
    return event
