"""The pictures of the documentation in a browser: no text covers another or leaves its box."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.test_pictures import PICTURES
from tests.browser.browser import browser
from tests.lab.daemon import ROOT

pytestmark = pytest.mark.long

#: Texts that overlap another one, leave the picture, or leave the rectangle at the start of their group.
MISPLACED = """(() => {
    const view = document.documentElement.viewBox.baseVal;
    const inside = (box, around) => box.x >= around.x && box.x + box.width <= around.x + around.width
        && box.y >= around.y && box.y + box.height <= around.y + around.height;
    const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width
        && a.y + 1 < b.y + b.height - 1 && b.y + 1 < a.y + a.height - 1;
    const texts = [...document.querySelectorAll('text')].map(each => [each, each.getBBox()]);
    return texts.filter(([each, box], place) => {
        const around = each.parentNode.querySelector(':scope > rect:not(.key)');
        return !inside(box, view) || (around && !inside(box, around.getBBox()))
            || texts.slice(place + 1).some(([, other]) => overlap(box, other));
    }).map(([each]) => each.textContent);
})()"""
BACKGROUND = "getComputedStyle(document.querySelector('.page')).fill"


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_readable_in_light_and_dark(name: str, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as shown:
        for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
            shown.prefer(scheme)
            shown.open(ROOT / "docs" / name)
            assert shown.value(MISPLACED) == []
            assert shown.value(BACKGROUND) == background
