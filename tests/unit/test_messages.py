"""Messages to operators hold no notation of Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "flanneld"
#: An error that only a mistake of ours can bring about, and is meant for those who mend it.
OF_PROGRAMMERS = {("network/rtnetlink/messages.py", "no rtnetlink message for ")}


def shown_as_repr(tree: ast.AST) -> Iterator[str]:
    """The first words of each text with a value as ``repr`` shows it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [each for each in node.values if isinstance(each, ast.FormattedValue)]
            if any(each.conversion == ord("r") for each in values):
                yield "".join(str(each.value) for each in node.values[:1] if isinstance(each, ast.Constant))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "%r" in node.value:
            yield node.value


def test_no_message_shows_a_value_as_python_writes_it() -> None:
    found = {
        (str(file.relative_to(PACKAGE)), words)
        for file in PACKAGE.rglob("*.py")
        for words in shown_as_repr(ast.parse(file.read_text()))
    }
    assert found == OF_PROGRAMMERS
