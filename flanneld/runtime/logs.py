"""The log: messages at a limited rate, its writer, and the event history, which is its last lines.

What lasts or repeats is logged one by one, in batches, or as an outage. The history is kept in memory and,
over restarts of the daemon, in a file. The log says once what has changed and why, so it is the history
already; this only remembers its end.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Generic, TypeVar

from flanneld.errors import Retryable, cause_of, remembered, shown
from flanneld.runtime import clock, files

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
        """Rewrite the file with the remembered events. Return the problem, or an empty text."""
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


Item = TypeVar("Item")

#: Seconds between repetitions of a message.
PACE = 60.0
#: Lines about single keys per minute. More would hide other lines.
FEW = 25
#: Keys named in a line with a count.
_NAMED = 3


class Once:
    """Warnings by key, logged once until their text changes or they are cleared. Threads may share it.

    After ``again`` seconds a warning is repeated. It remembers ``limit`` keys. Further warnings are dropped,
    after one line that says so.
    """

    def __init__(self, limit: int = 10_000, again: float = math.inf) -> None:
        self._limit = limit
        self._again = again
        self._lock = threading.Lock()
        #: The last text, and the time of its next repetition.
        self._said: dict[Hashable, tuple[str, float]] = {}
        self._full = False

    def warn(self, log: logging.Logger, key: Hashable, text: str, level: int = logging.WARNING) -> None:
        """Log a warning with the caller's source line, unless it is the last one for this key."""
        with self._lock:
            news = self._news(key, text)
        if news:
            log.log(level, "%s", news, stacklevel=2)

    def clear(self, key: Hashable) -> bool:
        """Forget a warning, because its cause is gone. Return True if there was one."""
        if not self._said:
            return False
        with self._lock:
            known = self._said.pop(key, None) is not None
            self._full = self._full and not known
        return known

    def _news(self, key: Hashable, text: str) -> str:
        now = clock.now()
        said, until = self._said.get(key, ("", now))
        if said == text and now < until:
            return ""
        if key in self._said or len(self._said) < self._limit:
            self._said[key] = text, now + self._again
            return text
        if self._full:
            return ""
        self._full = True
        return f"more than {self._limit} complaints are open; others are left out until one is settled"


class LogBatch(Generic[Item]):
    """Log lines, at most ``few`` in each ``period`` seconds. For one thread.

    What exceeds them waits for the next period, and shares one line if it is still too much. ``one`` makes
    the line of an item, ``several`` that of many.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int,
        several: Callable[[Collection[Item]], str],
        one: Callable[[Item], str] = str,
        few: int = FEW,
        period: float = PACE,
    ) -> None:
        self._log = log
        self._level = level
        self._several = several
        self._one = one
        self._few = self._left = few
        self._period = period
        self._period_end = -math.inf
        self._waiting: dict[Hashable, Item] = {}

    @property
    def due(self) -> float:
        """Time of the next ``write`` that is needed; infinity if nothing waits."""
        return self._period_end if self._waiting else math.inf

    def add(self, item: Item, key: Hashable = None) -> None:
        """Queue an item for ``write``, in the place of the one with its key."""
        self._waiting[object() if key is None else key] = item

    def write(self, now: float) -> None:
        """Log what may be logged by now."""
        for line in self._lines(now):
            self._log.log(self._level, "%s", line, stacklevel=2)

    def _lines(self, now: float) -> list[str]:
        items = self._waiting.values()
        if items and now >= self._period_end:
            self._left, self._period_end = self._few, now + self._period
        if len(items) <= self._left:
            lines = [self._one(item) for item in items]
        elif self._left == self._few:
            lines = [self._several(items)]
        else:
            return []
        self._left -= min(len(items), self._left)
        self._waiting = {}
        return lines


class BatchedWarnings(LogBatch[tuple[str, str]]):
    """Warnings by key, logged once until their text changes or they are cleared. Threads may share it.

    ``one`` is the format of a line with ``key`` and ``reason``. ``several`` is that of a line with ``count``,
    to which the first few warnings are appended in the format ``item``.
    """

    def __init__(self, log: logging.Logger, one: str, several: str, item: str = "{key}: {reason}") -> None:
        def line_of_many(found: Collection[tuple[str, str]]) -> str:
            named = [item.format(key=key, reason=reason) for key, reason in islice(found, _NAMED)]
            return f"{several.format(count=len(found))}: {'; '.join(named)}; and {len(found) - _NAMED} more"

        def line(found: tuple[str, str]) -> str:
            return one.format(key=found[0], reason=found[1])

        super().__init__(log, logging.WARNING, line_of_many, line)
        self._lock = threading.Lock()
        #: Hash of each warning's text. Thousands of texts would take some MB.
        self._known: dict[str, int] = {}

    def note(self, key: str, reason: object) -> None:
        """Queue a warning for ``flush`` unless it is known."""
        text = str(reason)
        with self._lock:
            if self._known.get(key) != hash(text):
                self._known[key] = hash(text)
                self.add((shown(key), text), key)

    def clear(self, key: str) -> None:
        """Forget the warning about a key, whose cause is gone."""
        if not self._known:
            return
        with self._lock:
            self._known.pop(key, None)
            self._waiting.pop(key, None)

    def retain(self, keys: Collection[str]) -> None:
        """Forget all warnings except those about these keys."""
        for key in [key for key in self._known.copy() if key not in keys]:
            self.clear(key)

    def flush(self) -> None:
        """Log new warnings. Beyond the limit they wait for the next minute and share one line."""
        if self._waiting:
            with self._lock:
                lines = self._lines(clock.now())
            for line in lines:
                self._log.warning("%s", line, stacklevel=2)


class Outage:
    """Log of one outage: its start, one line a minute while it lasts, and its end.

    A failure of another kind, such as a refusal after silence, has a line at once. The reason follows
    ``failing`` in the log. For one thread; ``problem`` may be read from any.
    """

    def __init__(self, log: logging.Logger, failing: str, working: str) -> None:
        self._log = log
        self._failing = failing
        self._working = working
        self._said = -math.inf
        #: Kinds of failures that were logged since then.
        self._kinds: set[type[Retryable]] = set()
        self._since: float | None = None
        self._problem: Retryable | None = None
        self._is_told = False

    @property
    def problem(self) -> Retryable | None:
        """The last failure, None since the last success."""
        return self._problem

    def failed(self, reason: Retryable) -> None:
        """Record a failure."""
        now = clock.now()
        self._problem = remembered(reason)
        if self._since is None:
            self._since = now
        if now - self._said >= PACE:
            self._said, self._kinds = now, set()
        if type(reason) not in self._kinds:
            self._kinds.add(type(reason))
            lasted = now - self._since
            since = f" (for {lasted:.0f} s now)" if lasted >= 1 else ""
            self._log.warning("%s: %s%s", self._failing, reason, since, stacklevel=2)
            self._is_told = True

    def answered(self) -> bool:
        """Record an apparent success; log the end if the start was logged. Return True if so.

        A failure soon after counts as the same outage, so that an intermittent one does not fill the log.
        """
        return self._works()

    def over(self) -> bool:
        """Record a definite success: the next failure is a new outage. Returns as ``answered``."""
        self._said = -math.inf
        return self._problem is not None and self._works()

    def _works(self) -> bool:
        since, self._since = self._since, None
        self._problem = None
        told, self._is_told = self._is_told, False
        if told and since is not None:
            lasted = clock.now() - since
            self._log.info("%s after %.0f s", self._working, lasted, stacklevel=3)
        return told
