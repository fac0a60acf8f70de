"""Tables in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from flanneld.ctl.output import TextTable, show, when


def shown(*tables: TextTable) -> str:
    out = io.StringIO()
    show(tables, out)
    return out.getvalue()


def test_columns_are_aligned_and_lines_end_with_their_last_word() -> None:
    table = TextTable(("subnet", "state"), [("10.5.1.0/24", "ok"), ("10.5.100.0/24", "")])
    assert shown(table) == "SUBNET         STATE\n10.5.1.0/24    ok\n10.5.100.0/24\n"


def test_a_table_without_columns_has_no_head() -> None:
    assert shown(TextTable((), [("ready", "yes"), ("MTU", "1450")])) == "ready  yes\nMTU    1450\n"


def test_tables_are_apart() -> None:
    assert shown(TextTable((), [("one",)]), TextTable((), [("two",)])) == "one\n\ntwo\n"


def test_nothing_is_nothing() -> None:
    assert shown(TextTable((), [])) == ""
    assert shown(TextTable(("time", "event"), [])) == "TIME  EVENT\n"


def test_what_other_nodes_wrote_cannot_steer_the_terminal() -> None:
    assert shown(TextTable((), [("a\x1b[31mb\nc\u202ed",)])) == "a\\x1b[31mb\\nc\\u202ed\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TABLE = TextTable(("state", "object"), [("missing", "route 10.5.1.0/24 [red]not a colour\x1b[0m")])


def test_a_terminal_gets_colours_and_the_same_words() -> None:
    terminal = Terminal()
    show([TABLE], terminal)
    assert "[red]not a colour\\x1b[0m" in " ".join(terminal.getvalue().split())
    assert terminal.getvalue() != shown(TABLE)


@pytest.mark.parametrize("columns", [(), ("what", "why")])
def test_a_terminal_gets_all_of_a_long_text(columns: tuple[str, ...]) -> None:
    terminal = Terminal()
    show([TextTable(columns, [("advice", "x" * 300)])], terminal)
    assert terminal.getvalue().count("x") == 300
    assert ("WHAT" in terminal.getvalue()) is bool(columns)


@pytest.mark.parametrize(("stamp", "text"), [(None, "never"), (0.0, "never"), (1e300, "1e+300 s after 1970")])
def test_time_that_is_none_or_out_of_range_is_told(stamp: float | None, text: str) -> None:
    assert when(stamp) == text


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    show([TABLE], terminal)
    assert terminal.getvalue() == shown(TABLE)
