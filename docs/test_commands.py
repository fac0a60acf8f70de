"""The commands that the documentation shows are understood by the programs that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flanneld import options
from flanneld.ctl import main as flannelctl
from tests.kubernetes_objects import CHART, IMAGE, manifest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Lines in the pages' blocks of code, with their continuations and without comments.
LINES = sorted(
    {
        re.split(r"\s#\s", line, maxsplit=1)[0]
        for page in PAGES
        for line in re.findall(r"^ {4,}([^\s#].*)$", page.read_text().replace("\\\n", " "), re.MULTILINE)
    }
)
#: Separates the commands of a line; ``--`` is before the one that kubectl runs in a pod.
BETWEEN = re.compile(r"\s(?:\|\|?|&&|;|--)\s")
#: What ends a command in a shell, or sends its output elsewhere.
END = re.compile(r"\s(?:>|>>|2>|&)(?:\s|\S|$)|;$")
#: A value that the reader has to fill in.
PLACEHOLDER = re.compile(r"<[^>]+>|\.\.\.")
PROGRAMS = ("flanneld", "flannelctl")


def shown() -> Iterator[str]:
    """Yield each command of this project, also in a pipe, behind variables, or as what kubectl runs."""
    for line in LINES:
        for part in BETWEEN.split(line):
            command = re.sub(r"^(\w+=\S+ +)+", "", END.split(part, maxsplit=1)[0].strip())
            word = command.partition(" ")[0]
            if Path(word).name in PROGRAMS or word.removeprefix("./").startswith(("dist/", "tests/")):
                yield command


def found(pattern: str, *, of: str = "") -> list[str]:
    """Return what a pattern finds in the lines of one program, or in all."""
    return sorted(
        {each for line in LINES if of in line.split() or not of for each in re.findall(pattern, line)}
    )


COMMANDS = sorted({command for command in shown() if not PLACEHOLDER.search(command)})


@pytest.mark.parametrize("path", found(r"(?:^|[\s=])(?:\./)?((?:dist|docs|tests)/[\w./-]+)"))
def test_path_in_a_command_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("variable", found(r"\b(FLANNELD_\w+)="))
def test_variable_in_a_command_is_one_of_a_flag_or_of_the_tests(variable: str) -> None:
    flags = {f"FLANNELD_{flag.name.upper().replace('-', '_')}" for flag in options.FLAGS}
    assert variable in flags or any(variable in file.read_text() for file in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("image", found(r"\blocalhost/flanneld\S*"))
def test_image_in_a_command_is_that_of_the_manifest(image: str) -> None:
    assert image == IMAGE


@pytest.mark.parametrize("unit", found(r"\sflanneld\S*", of="systemctl"))
def test_unit_in_a_command_of_systemctl_exists(unit: str) -> None:
    name = unit.strip() if "." in unit else f"{unit.strip()}.service"
    assert (ROOT / "dist/systemd" / name).exists()


@pytest.mark.parametrize("named", found(r"(?:configmap|daemonset|serviceaccount)[ /]\w[\w-]*", of="kubectl"))
def test_object_in_a_command_of_kubectl_is_in_the_manifest(named: str) -> None:
    kind, name = re.split("[ /]", named)
    assert (kind, name) in {(each["kind"].lower(), each["metadata"]["name"]) for each in manifest().values()}


@pytest.mark.parametrize("name", found(r"--set (\w[\w.]*)=", of="helm"))
def test_value_in_a_command_of_helm_is_one_of_the_chart(name: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in name.split("."):
        values = values[part]


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
