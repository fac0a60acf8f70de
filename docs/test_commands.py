"""The commands that the documentation shows are understood by the programs that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld import options
from flanneld.ctl import main as flannelctl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What ends a command in a shell, or sends its output elsewhere.
END = re.compile(r"\s(#|>|>>|2>|\||&&|&|;)(\s|\S|$)")
#: A value that the reader has to fill in.
PLACEHOLDER = re.compile(r"<[^>]+>|\.\.\.")
PROGRAMS = ("flanneld", "flannelctl")


def shown() -> Iterator[str]:
    """Yield each command of this project in the pages' blocks of code."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE):
            command = END.split(line, maxsplit=1)[0].strip()
            word = command.partition(" ")[0]
            if Path(word).name in PROGRAMS or word.removeprefix("./").startswith(("dist/", "tests/")):
                yield command


COMMANDS = sorted({command for command in shown() if not PLACEHOLDER.search(command)})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_that_is_shown_is_understood(command: str) -> None:
    program, *words = shlex.split(command)
    match Path(program).name:
        case "flanneld":
            options.read(words, {})
        case "flannelctl":
            _, flags = flannelctl.parse(words)
            options.read(flags, {})
        case _:
            assert (ROOT / program).exists()
            paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
            assert [path for path in paths if not (ROOT / path).exists()] == []


def test_modules_that_are_run_exist() -> None:
    names = {
        name
        for page in PAGES
        for name in re.findall(r"python -m ((?:tests|dist|flanneld)[\w.]*)", page.read_text())
    }
    assert names
    assert [
        name
        for name in names
        if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
        and not (ROOT / name.replace(".", "/") / "__main__.py").exists()
    ] == []


def test_commands_are_found() -> None:
    """The patterns match something."""
    assert len(COMMANDS) > 30
