"""glog's log format on standard error, for the stdlib's ``logging``.

A line is ``I1121 12:00:00.123456    1234 main.py:42] message``: severity and MMDD, local time with
microseconds, process id in seven columns, source line. Continuation lines, as of a traceback, are indented,
so that each line in the first column is a new event.

With ``-logging-format=json`` a line is what Kubernetes' components write: one JSON object, with the keys of
k8s.io/component-base/logs/json: ``ts`` (milliseconds since 1970), ``caller``, ``msg``, and ``v`` for what is
no error. ``severity`` and ``stack`` are additions.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache

from flanneld.compat.flags import quoted
from flanneld.errors import Fatal, printable
from flanneld.runtime.logs import LogWriter

#: Libraries with noisy logs. etcd.client logs failures that it also raises; urllib3 logs a traceback for each
#: header that it skips.
_QUIET = {"etcd.client": logging.CRITICAL, "pyroute2": logging.WARNING, "urllib3": logging.ERROR}
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_SEVERITIES = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "fatal"}
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

#: A pattern for the base name of source files without extension, and their verbosity.
_Module = tuple[str, int]
#: The base name of a source file, and a line in it.
_Place = tuple[str, int]


def V(level: int) -> int:  # noqa: N802 - glog's name for it
    """Return the logging level of messages shown at ``-v level`` and above. Level 0 is always shown."""
    return min(logging.INFO, max(1, logging.INFO - level))


def counted(number: int, noun: str) -> str:
    """Return ``1 peer``, ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def setup(verbosity: int = 0, vmodule: str = "", backtrace_at: str = "", layout: str = "text") -> None:
    """Send all logging to standard error; what an earlier call set up is replaced.

    The values are those of ``-v``, ``-vmodule``, ``-log_backtrace_at`` and ``-logging-format``. Raises
    ``Fatal`` for one that cannot be understood, and then changes nothing.
    """
    modules = _modules(vmodule)
    place = _place(backtrace_at)
    handler = _handler()
    make = _JsonFormatter if layout == "json" else _Formatter
    handler.setFormatter(make(place, to_journal=_is_journal()))
    handler.addFilter(_shown(verbosity, modules))
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(min(V(level) for level in (verbosity, *(level for _, level in modules))))
    for name, lowest in _QUIET.items():
        logging.getLogger(name).setLevel(lowest)


def _handler() -> logging.Handler:
    try:
        return _StderrHandler(LogWriter(sys.stderr.fileno()))
    except (AttributeError, OSError):
        return logging.StreamHandler()  # Standard error is closed, or has no descriptor.


def _is_journal() -> bool:
    """Return True if standard error leads to systemd's journal (systemd.exec(5), $JOURNAL_STREAM)."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class _StderrHandler(logging.Handler):
    def __init__(self, log_writer: LogWriter) -> None:
        super().__init__()
        self._log_writer = log_writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log_writer.write(self.format(record))
        except MemoryError:  # a minimal line, without a traceback, which takes more memory
            with suppress(Exception):
                os.write(2, f"flanneld: {record.getMessage()}\n".encode())
        except Exception:  # a failure of the log must not end the thread that logs
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, backtrace_at: _Place | None, *, to_journal: bool = False) -> None:
        super().__init__()
        self._backtrace_at = backtrace_at
        self._to_journal = to_journal

    def format(self, record: logging.LogRecord) -> str:
        lines = [record.getMessage(), *(line for text in self.below(record) for line in text.splitlines())]
        between = f"\n{self.priority(record)}    "
        return self.priority(record) + _head(record) + between.join(map(_safe, lines))

    def below(self, record: logging.LogRecord) -> list[str]:
        """Return the tracebacks and stacks that belong to a record."""
        below = []
        if record.exc_info:
            below.append(self.formatException(record.exc_info))
        if record.stack_info:
            below.append(record.stack_info)
        if self._backtrace_at == (record.filename, record.lineno):
            below.append(_stack_of(record))
        return below

    def priority(self, record: logging.LogRecord) -> str:
        """Return the priority that systemd's journal reads before a line (sd-daemon(3)); empty elsewhere."""
        return f"<{_priority(record.levelno)}>" if self._to_journal else ""


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        severity = _SEVERITIES.get(record.levelno, "info")
        entry: dict[str, float | int | str] = {
            "ts": round(record.created * 1000, 3),
            "caller": f"{record.filename}:{record.lineno}",
            "msg": record.getMessage(),
            "severity": severity,
        }
        if severity in ("info", "warning"):
            entry["v"] = max(0, logging.INFO - record.levelno)
        if below := self.below(record):
            entry["stack"] = "\n".join(below)
        return self.priority(record) + json.dumps(entry)


def _safe(line: str) -> str:
    """Return a line that foreign text cannot break or turn round. A tab stays."""
    return "\t".join(map(printable, line.split("\t")))


def _priority(level: int) -> int:
    """Return syslog's number of a severity (sd-daemon(3))."""
    return next((number for lowest, number in _PRIORITIES if level >= lowest), 7)


def _head(record: logging.LogRecord) -> str:
    second, micros = divmod(round(record.created * 1_000_000), 1_000_000)
    letter = _LETTERS.get(record.levelno, "I")
    return f"{letter}{_time(second)}.{micros:06d} {os.getpid():>7} {record.filename}:{record.lineno}] "


@lru_cache(maxsize=1)
def _time(second: int) -> str:
    return time.strftime("%m%d %H:%M:%S", time.localtime(second))


def _stack_of(record: logging.LogRecord) -> str:
    """Return the stack of the log call, without the frames of logging itself."""
    frames = traceback.extract_stack()
    place = (record.pathname, record.lineno)
    while frames and (frames[-1].filename, frames[-1].lineno) != place:
        frames.pop()
    return "".join(frames.format())


def _shown(verbosity: int, modules: Sequence[_Module]) -> Callable[[logging.LogRecord], bool]:
    """Return a filter. The first pattern that matches a source file can only add messages."""

    def shown(record: logging.LogRecord) -> bool:
        if record.levelno >= V(verbosity):
            return True
        levels = (level for pattern, level in modules if fnmatchcase(record.module, pattern))
        return record.levelno >= V(next(levels, 0))

    return shown


def _modules(text: str) -> tuple[_Module, ...]:
    """Parse ``pattern=N,...``. Empty items and level 0 are ignored, as in glog."""
    found = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch("([^=]+)=([0-9]{1,9})", item)
        if match is None:
            raise Fatal(
                f"-vmodule: {quoted(item)} is not understood",
                "give pattern=level pairs, like vxlan=2,rtnl*=4",
            )
        if int(match[2]) > 0:
            found.append((match[1].replace("[^", "[!"), int(match[2])))
    return tuple(found)


def _place(text: str) -> _Place | None:
    """Parse ``file:N``; None for an empty text."""
    if not text:
        return None
    match = re.fullmatch(r"([^:]+\.[^:]+):([0-9]{1,9})", text)
    if match is None or int(match[2]) == 0:
        raise Fatal(
            f"-log_backtrace_at: {quoted(text)} is not understood", "give one source line, like main.py:42"
        )
    return match[1], int(match[2])
