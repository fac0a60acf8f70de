"""The page of ``flannelctl graph`` with 1,000 nodes in a browser, by keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.ctl.graph import page
from tests.browser.browser import Browser, browser
from tests.unit.ctl.test_graph import COLUMNS, MADE, cluster

pytestmark = pytest.mark.long

FOCUSED = "document.activeElement.id"
SHOWN = "document.querySelectorAll('tbody tr:not([hidden])').length"
CHOSEN = "[...document.querySelectorAll('svg .chosen')].map(each => each.id).join()"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Browser]:
    path = tmp_path / "graph.html"
    path.write_text("\n".join(page(cluster(), COLUMNS[4:-1], MADE)))
    with browser(tmp_path / "profile") as found:
        found.open(path)
        yield found


def test_list_is_walked_and_searched_by_keyboard(shown: Browser) -> None:
    assert shown.value(SHOWN) == 1000
    for _ in range(10):
        shown.press("Tab")
        if shown.value(FOCUSED) == "r0":
            break
    assert shown.value(FOCUSED) == "r0"
    for key, row in (("ArrowDown", 1), ("PageDown", 21), ("ArrowUp", 20), ("End", 999), ("Home", 0)):
        shown.press(key)
        assert (shown.value(FOCUSED), shown.value(CHOSEN)) == (f"r{row}", f"s{row}")

    shown.press("/")
    assert shown.value(FOCUSED) == "search"
    for key in "198.18.3.7":
        shown.press(key)
    # 198.18.3.7, .70 to .79
    assert shown.value(SHOWN) == 11
    shown.press("Escape")
    assert shown.value(SHOWN) == 1000


def test_states_can_be_left_out(shown: Browser) -> None:
    shown.value("document.querySelector('input[value=ok]').focus()")
    shown.press(" ")
    number = shown.value(SHOWN)
    assert number == 1000 - shown.value("document.querySelectorAll('tr.ok').length")
    assert shown.value("document.getElementById('count').textContent") == f"{number} of 1000 shown"


def test_page_is_dark_where_that_is_preferred(shown: Browser) -> None:
    shown.prefer("light")
    assert shown.value(BACKGROUND) == "rgb(255, 255, 255)"
    shown.prefer("dark")
    assert shown.value(BACKGROUND) == "rgb(18, 18, 18)"


def test_text_of_others_runs_no_script(shown: Browser) -> None:
    assert shown.value("document.scripts.length") == 1
    assert shown.value("document.images.length") == 0
