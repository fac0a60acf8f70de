"""Output of a command: tables for a terminal, in colour if rich is installed; and repeated queries."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TextIO, TypeVar

from msgspec import Struct

from flanneld.errors import printable
from flanneld.runtime import waits


class State(StrEnum):
    """Verdict on one thing, in all commands: a problem sets the exit status, a hint may be intended."""

    PROBLEM = "PROBLEM"
    HINT = "hint"
    UNKNOWN = "unknown"
    OK = "ok"


#: Colours of words, for rich.
_COLOURS: Mapping[str, str] = {
    State.OK: "green",
    State.HINT: "yellow",
    **dict.fromkeys((State.PROBLEM, "no", "missing"), "bold red"),
    "yes": "green",
}


class TextTable(Struct, frozen=True, gc=False):
    """A table. ``rows`` may have newlines in their last cell. Without ``columns`` it has no header."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def in_lines(lines: Iterable[str]) -> TextTable:
    """Return a table of one column without a header."""
    return TextTable((), [(line,) for line in lines])


def show(tables: Sequence[TextTable], out: TextIO | None = None) -> None:
    """Print tables on standard output, separated by empty lines."""
    out = out or sys.stdout
    if out.isatty() and _show_rich(tables, out):
        return
    out.write("\n".join(f"{text}\n" for table in tables if (text := "\n".join(table_lines(table)))))


def table_lines(table: TextTable) -> Iterator[str]:
    """Yield a table's lines: columns two spaces apart, without trailing spaces."""
    rows = [[printable(cell) for cell in row] for row in table.rows]
    if table.columns:
        rows.insert(0, [column.upper() for column in table.columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def when(stamp: float | None) -> str:
    """Show a time since the epoch, in local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp)) if stamp else "never"
    except (OverflowError, ValueError):
        return f"{stamp} s after 1970"


def _show_rich(tables: Sequence[TextTable], out: TextIO) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out)
    for table in tables:
        drawn = RichTable(show_header=bool(table.columns), box=None)
        for column in table.columns or [""] * len(table.rows[0] if table.rows else ()):
            drawn.add_column(column.upper(), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(printable(cell), style=_COLOURS.get(cell, "")) for cell in row))
        console.print(drawn)
    return True


@contextmanager
def progress(out: TextIO) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is done now in one line of a terminal. It is erased at the end."""

    def tell(text: str) -> None:
        if out.isatty():
            out.write(f"\r\x1b[K{text}")
            out.flush()

    try:
        yield tell
    finally:
        tell("")


T = TypeVar("T")
#: Seconds between two queries of ``until_good``: a start takes a quarter of a second.
_EVERY = 0.2


def until_good(ask: Callable[[], T], is_good: Callable[[T], bool], within: float) -> T:
    """Repeat ``ask`` for at most ``within`` seconds until an answer is good. Return the last answer."""
    answers = [ask()]

    def attempt() -> bool:
        answers[:] = [ask()]
        return is_good(answers[0])

    if within and not is_good(answers[0]):
        waits.until(attempt, within=within, every=_EVERY)
    return answers[0]


def changes(ask: Callable[[], T], seen: Callable[[T], object], every: float) -> Iterator[T]:
    """Call ``ask`` every ``every`` seconds. Yield each answer for which ``seen`` returns a new value."""
    stop, last = threading.Event(), None
    while True:
        answer = ask()
        if (now := seen(answer)) != last:
            last = now
            yield answer
        waits.pause(stop, every)
