"""The picture, diagrams and tables of architecture.md name what the code has, and calls that it makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = (DOCS / "architecture.md").read_text()
DIAGRAMS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINE = re.compile(r"( *)(->|=>)? ?([\w.]+) +([\w/]+\.py)(?: .*)?")
#: The longest list of files for one change. More would mean that a change is scattered.
MOST_FILES = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Step(NamedTuple):
    """A line of a diagram: a function in a file, and the arrow that leads to it."""

    depth: int
    arrow: str
    name: str
    file: str


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "flanneld" / file).read_text())


def function(step: Step) -> Function | None:
    """Return the function, defined in its class or inherited within the file."""
    owner, _, name = step.name.rpartition(".")
    classes = {node.name: node for node in tree(step.file).body if isinstance(node, ast.ClassDef)}
    bodies = [tree(step.file).body] if not owner else []
    while owner in classes:
        bodies.append(classes[owner].body)
        owner = next((base.id for base in classes[owner].bases if isinstance(base, ast.Name)), "")
    return next(
        (node for body in bodies for node in body if isinstance(node, Function) and node.name == name), None
    )


def steps(diagram: str) -> list[Step]:
    found = []
    for line in diagram.splitlines():
        match = LINE.fullmatch(line)
        assert match, f"not understood: {line}"
        indent, arrow, name, file = match.groups()
        found.append(Step(len(indent), arrow or "", name, file))
    return found


def calls(diagram: str) -> Iterator[tuple[Step, list[Step]]]:
    """Yield each step with the steps that it calls, as drawn."""
    found = steps(diagram)
    for place, step in enumerate(found):
        below = []
        for other in found[place + 1 :]:
            if other.depth <= step.depth:
                break
            below.append(other)
        nearest = min((each.depth for each in below), default=0)
        yield step, [each for each in below if each.depth == nearest and each.arrow == "->"]


def mentions(inside: Function, name: str) -> list[tuple[int, int]]:
    """Return the places where a call of a function ends, or where it is handed on; by its last name."""
    nodes = [*ast.walk(inside)]
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    found = [
        called.get(id(node), node)
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr == name)
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load))
    ]
    return sorted((node.end_lineno or 0, node.end_col_offset or 0) for node in found)


ALL_STEPS = [step for diagram in DIAGRAMS for step in steps(diagram)]
ALL_CALLS = [(step, below) for diagram in DIAGRAMS for step, below in calls(diagram) if below]


@pytest.mark.parametrize("step", dict.fromkeys(ALL_STEPS), ids=lambda step: step.name)
def test_a_function_in_a_diagram_exists(step: Step) -> None:
    assert function(step) is not None, f"{step.name} is not in flanneld/{step.file}"


@pytest.mark.parametrize(("step", "below"), ALL_CALLS, ids=[step.name for step, _ in ALL_CALLS])
def test_arrows_of_a_diagram_are_calls_in_the_order_of_the_code(step: Step, below: list[Step]) -> None:
    caller = function(step)
    assert caller is not None
    found = [mentions(caller, each.name.rpartition(".")[2]) for each in below]
    missing = [each.name for each, places in zip(below, found, strict=True) if not places]
    assert missing == [], f"{step.name} calls none of these"
    first = [places[0] for places in found]
    assert first == sorted(first)


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading, without its head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_each_folder_of_the_package_has_a_line() -> None:
    named = [row[0].strip("`") for row in rows("Folders")]
    modules = [path.relative_to(ROOT).parent for path in (ROOT / "flanneld").rglob("*.py")]
    assert sorted(named) == sorted({f"{folder}/" for folder in modules})


def test_each_module_says_in_its_first_line_what_it_holds() -> None:
    """The page has no list of modules: these lines are the list."""
    texts = {str(path): path.read_text() for path in (ROOT / "flanneld").rglob("*.py")}
    first = {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in texts.items()
    }
    assert [name for name, line in first.items() if texts[name] and not line.endswith((".", ":"))] == []


@pytest.mark.parametrize("row", rows("Where to make a change"), ids=lambda row: row[0])
def test_a_change_touches_few_files_and_they_exist(row: list[str]) -> None:
    files = re.findall(r"`((?:flanneld|tests|docs|dist)/[^`]*)`", row[1])
    assert 1 <= len(files) <= MOST_FILES
    assert [file for file in files if not (ROOT / file).exists()] == []


TEXTS = list(ElementTree.parse(DOCS / "house.svg").iter())  # noqa: S314 - ours
PARTS = [(each.text or "", each.get("data-in", "")) for each in TEXTS if each.get("data-in")]
THREADS = [thread for each in TEXTS for thread in each.get("data-thread", "").split(", ") if thread]


@pytest.mark.parametrize(("name", "file"), PARTS)
def test_part_in_the_picture_of_the_house_is_in_its_module(name: str, file: str) -> None:
    body = ast.parse((ROOT / file).read_text()).body
    assert name in [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def test_stages_of_startup_are_drawn_in_their_order() -> None:
    stages = [name for name, file in PARTS if file == "flanneld/startup.py"]
    assert stages == [row[0] for row in rows("Startup")]


@pytest.mark.parametrize("thread", dict.fromkeys(THREADS))
def test_thread_in_the_picture_of_the_house_is_in_the_table_of_threads(thread: str) -> None:
    assert thread in [row[0] for row in rows("Threads")]


def test_the_diagrams_are_found() -> None:
    assert len(PARTS) > 20
    assert len(THREADS) > 8
    assert len(DIAGRAMS) == 3
    assert len(ALL_STEPS) > 20
    assert len(rows("Where to make a change")) > 10
