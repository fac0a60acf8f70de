"""The graph of a cluster as text, DOT and a page: structure, and nothing foreign gets out of its place."""

from __future__ import annotations

import base64
import hashlib
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


def test_drawing_has_this_node_in_the_middle_and_a_shape_for_each_state() -> None:
    found = vertices(COLUMNS, [row(2), row(3, "PROBLEM"), row(4, "hint"), OWN])
    lines = [
        each for each in page(found, COLUMNS[4:-1], MADE) if re.match(r"</?(svg|line|circle|rect)", each)
    ]
    assert [each.partition("<title>")[0] for each in lines] == [
        '<svg viewBox="-72 -72 144 144" aria-hidden="true">',
        '<line id="l1" class="PROBLEM" x1="0" y1="0" x2="-19.2" y2="17.6"/>',
        '<line id="l2" class="hint" x1="0" y1="0" x2="3.2" y2="-36.6"/>',
        '<line id="l3" class="ok" x1="0" y1="0" x2="27.4" y2="35.7"/>',
        '<circle id="s0" class="shape ok own" cx="0.0" cy="0.0" r="9.8">',
        '<rect id="s1" class="shape PROBLEM" x="-26.2" y="10.6" width="14.0" height="14.0">',
        '<rect id="s2" class="shape hint" x="-3.8" y="-43.6" width="14.0" height="14.0"'
        ' transform="rotate(45 3.2 -36.6)">',
        '<circle id="s3" class="shape ok" cx="27.4" cy="35.7" r="7.0">',
        "</svg>",
    ]


@pytest.mark.parametrize("with_own", [True, False])
def test_shapes_lie_inside_the_drawing_and_apart(*, with_own: bool) -> None:
    found = [each for each in cluster() if with_own or not each.is_own]
    reader = Reader()
    reader.feed("\n".join(page(found, COLUMNS[4:-1], MADE)))
    (view,) = reader.of("svg")
    left, top, width, height = map(float, str(view["viewbox"]).split())
    shapes = [
        *((float(str(each["cx"])), float(str(each["cy"]))) for each in reader.of("circle")),
        *(
            (float(str(each["x"])) + size / 2, float(str(each["y"])) + size / 2)
            for each in reader.of("rect")
            for size in [float(str(each["width"]))]
        ),
    ]
    assert all(left + 10 < x < left + width - 10 and top + 10 < y < top + height - 10 for x, y in shapes)
    cells = {(round(x / 15), round(y / 15)) for x, y in shapes}
    assert len(cells) == len(shapes) == len(found)
    assert len(reader.of("line")) == (len(found) - 1 if with_own else 0)


def test_page_is_one_document_with_a_cell_of_each_row_for_each_column(html: str, read: Reader) -> None:
    assert html.startswith('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">')
    assert html.endswith("</script></body></html>")
    for tag in (
        "html",
        "head",
        "style",
        "body",
        "header",
        "main",
        "svg",
        "div",
        "table",
        "thead",
        "tbody",
        "p",
    ):
        assert html.count(f"<{tag}>") + html.count(f"<{tag} ") == html.count(f"</{tag}>") > 0
    columns = [each for each in read.of("th") if each.get("scope") == "col"]
    rows = len([each for each in read.of("tr") if "id" in each])
    assert len(columns) == 5 + len(COLUMNS[4:-1])
    assert len(read.of("td")) + len(read.of("th")) == (rows + 1) * len(columns)
    for tag in ("style", "script"):
        content = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html


def test_page_counts_nodes_by_state_and_shows_what_is_not_known_as_a_dash() -> None:
    few = vertices(COLUMNS, [(*row(2)[:5], "-", *row(2)[6:]), row(3, "PROBLEM", "no answer"), OWN])
    assert few[2].facts == tuple(
        (name, value) for name, value in zip(COLUMNS[4:-1], OWN[4:-1], strict=True) if name != "vni"
    )
    text = "\n".join(page(few, COLUMNS[4:-1], MADE))
    assert "<title>flannel: 3 nodes</title>" in text
    assert f"<p>1 PROBLEM, 2 ok. As seen from one node, {MADE}.</p>" in text
    assert (
        "<td>0.4 ms</td><td>vxlan</td><td>-</td><td>8472</td><td>1450</td><td>1.0</td><td>etcd v3</td></tr>"
        in text
    )
    assert '<td class="state">PROBLEM</td><td class="note">no answer</td>' in text


def test_graph_for_graphviz_has_a_shape_and_a_colour_for_each_state() -> None:
    found = vertices(COLUMNS, [row(2), row(3, "PROBLEM", "no answer"), row(4, "hint"), OWN])
    red, brown, green = '"#c62828"', '"#b26a00"', '"#2e7d32"'
    assert list(dot(found))[2:] == [
        f'  "10.5.1.0/24" [label="10.5.1.0/24\\n198.18.0.1", shape=doublecircle, color={green}];',
        f'  "10.0.3.0/24" [label="10.0.3.0/24\\n198.18.0.3\\nno answer", shape=box, color={red}];',
        f'  "10.0.4.0/24" [label="10.0.4.0/24\\n198.18.0.4", shape=diamond, color={brown}];',
        f'  "10.0.2.0/24" [label="10.0.2.0/24\\n198.18.0.2", shape=ellipse, color={green}];',
        f'  "10.5.1.0/24" -- "10.0.3.0/24" [color={red}];',
        f'  "10.5.1.0/24" -- "10.0.4.0/24" [color={brown}];',
        f'  "10.5.1.0/24" -- "10.0.2.0/24" [color={green}];',
        "}",
    ]
    assert edges(found)[0] == {"from": "10.5.1.0/24", "to": "10.0.3.0/24", "state": "PROBLEM"}
    assert edges(found[1:]) == []
