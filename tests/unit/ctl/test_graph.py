"""The graph of a cluster as text, DOT and a page: structure, and nothing foreign gets out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from flanneld.ctl.graph import Vertex, dot, edges, page, text, vertices

COLUMNS = ("node", "public ip", "state", "rtt", "backend", "vni", "port", "mtu", "version", "store", "note")
OWN = ("10.5.1.0/24", "198.18.0.1", "ok", "this node", "vxlan", "1", "8472", "1450", "1.0", "etcd v3", "")
EVIL = "</script><script>alert(1)</script>\"'\\<img src=x onerror=alert(1)>"
MADE = "2020-01-01T00:00:00Z"


def row(number: int, state: str = "ok", note: str = "") -> tuple[str, ...]:
    name = f"10.{number // 250}.{number % 250}.0/24"
    return (name, f"198.18.{number // 250}.{number % 250}", state, "0.4 ms", *OWN[4:-1], note)


def cluster(number: int = 1000) -> list[Vertex]:
    states = {0: "PROBLEM", 1: "hint"}
    rows = [
        row(each, states.get(each % 40, "ok"), EVIL if each % 40 < 2 else "") for each in range(2, number + 1)
    ]
    return vertices(COLUMNS, [*rows, OWN])


class Reader(HTMLParser):
    """Collects elements with their attributes, and the text of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return "\n".join(page(cluster(), COLUMNS[4:-1], MADE))


@pytest.fixture(scope="module")
def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def test_page_has_a_row_a_shape_and_a_way_for_each_node(read: Reader) -> None:
    rows = [each for each in read.of("tr") if "id" in each]
    shapes = [each for tag in ("circle", "rect") for each in read.of(tag)]
    assert (len(rows), len(shapes), len(read.of("line"))) == (1000, 1000, 999)
    numbers = {str(number) for number in range(1000)}
    assert {each["id"] for each in shapes} == {f"s{number}" for number in numbers}
    assert {each["id"] for each in rows} == {f"r{number}" for number in numbers}


def test_page_needs_no_other_file_and_runs_no_other_script(html: str, read: Reader) -> None:
    assert len(read.of("script")) == 1
    assert not read.of("img")
    assert not [each for _, attrs in read.elements for each in attrs if each in ("src", "href", "style")]
    assert not [each for _, attrs in read.elements for each in attrs if each.startswith("on")]
    (policy,) = (each["content"] for each in read.of("meta") if "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in re.sub("http-equiv", "", html)


def test_foreign_text_is_shown_as_it_is(read: Reader) -> None:
    assert EVIL in read.texts


def test_problems_come_first_and_are_not_told_by_colour_alone(read: Reader) -> None:
    states = [str(each["data-state"]) for each in read.of("tr") if "data-state" in each]
    assert states[0] == "ok"
    assert states[1:] == sorted(states[1:], key=["PROBLEM", "hint", "ok"].index)
    assert all("PROBLEM" not in str(each["class"]) for each in read.of("circle"))


def test_page_has_a_box_for_each_state_of_a_node(read: Reader) -> None:
    boxes = [each["value"] for each in read.of("input") if each.get("type") == "checkbox"]
    assert boxes == ["PROBLEM", "hint", "ok"]


def test_text_has_a_line_for_each_node_and_counts_states() -> None:
    lines = list(text(vertices(COLUMNS, [row(2), row(3, "PROBLEM", "no answer"), OWN])))
    assert lines == [
        "10.5.1.0/24  198.18.0.1  this node",
        "|-- PROBLEM: 1 node",
        "|   `-- 10.0.3.0/24  198.18.0.3  0.4 ms  no answer",
        "`-- ok: 1 node",
        "    `-- 10.0.2.0/24  198.18.0.2  0.4 ms",
    ]
    assert next(text([])) == "this node has no lease"


def test_quotes_and_backslashes_of_others_stay_inside_the_strings_of_dot() -> None:
    found = vertices(COLUMNS, [row(2, "hint", EVIL), OWN])
    for line in dot(found):
        assert re.fullmatch(r'(?:[^"\\]|"(?:[^"\\]|\\.)*")*', line)
    assert sum(" -- " in line for line in dot(found)) == len(edges(found)) == 1
