"""A module gives each of its names one value: of two constants with one name, the later one holds for all."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flanneld"


def doubled(source: str) -> list[str]:
    """Return the names that a module binds more than once at its top level."""
    bound: Counter[str] = Counter()
    for statement in ast.parse(source).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name] += 1
            case ast.Assign(targets=targets):
                nodes = (node for target in targets for node in ast.walk(target))
                bound.update(node.id for node in nodes if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound[name] += 1
    return [name for name, number in bound.items() if number > 1]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_module_binds_each_name_once(path: Path) -> None:
    assert doubled(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("_A = 1\n_A, _B = 2, 3", ["_A"]),
        ("A: int = 1\ndef A(): ...", ["A"]),
        ("A = [B for B in C]\nB = 1", []),
    ],
)
def test_second_value_of_a_name_is_found(source: str, names: list[str]) -> None:
    assert doubled(source) == names
