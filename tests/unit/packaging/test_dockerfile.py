"""The Dockerfile, read without building it; tests/image builds it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
Instruction = tuple[str, str]  # the word in upper case, and what comes after it


def instructions(text: str) -> list[Instruction]:
    """The instructions in order, without comments and with continued lines joined."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(word.upper(), rest) for word, rest in words]


def stages(text: str) -> list[list[Instruction]]:
    """The instructions of each stage, beginning with its FROM."""
    found: list[list[Instruction]] = []
    for instruction in instructions(text):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


TEXT = (ROOT / "Dockerfile").read_text()
PLUG_INS, BUILD, FINAL = stages(TEXT)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "dist/image/constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def extras() -> list[str]:
    """Those that the image installs."""
    found: str
    (found,) = re.findall(r"'\.\[([a-z,-]+)\]'", TEXT)
    return found.split(",")


def installed(stage: list[Instruction]) -> set[str]:
    """The Debian packages that a stage installs."""
    commands = [part for word, rest in stage if word == "RUN" for part in rest.split("&&")]
    lists = [shlex.split(part.partition(" install ")[2]) for part in commands if "apt-get install" in part]
    return {word for words in lists for word in words if not word.startswith("-")}


def test_every_stage_stands_on_one_base_that_can_be_replaced() -> None:
    assert instructions(TEXT)[0][0] == "ARG"
    assert {stage[0][1].split()[0] for stage in (PLUG_INS, BUILD, FINAL)} == {"${BASE}"}


def test_the_base_is_pinned_by_digest() -> None:
    assert re.fullmatch(
        r"BASE=docker\.io/library/debian:[a-z]+-\d{8}-slim@sha256:[0-9a-f]{64}", instructions(TEXT)[0][1]
    )


def test_files_copied_by_the_dockerfile_exist() -> None:
    copies = [
        rest.split() for word, rest in PLUG_INS + BUILD + FINAL if word == "COPY" and "--from=" not in rest
    ]
    sources = [name for words in copies for name in words[:-1]]
    assert sources
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_the_final_stage_takes_nothing_but_what_was_built() -> None:
    copies = [rest for word, rest in FINAL if word in {"COPY", "ADD"}]
    assert {copy.split()[0] for copy in copies} == {"--from=build", "--from=plug-ins"}


def test_the_compiler_stays_in_the_stage_that_builds() -> None:
    assert {"build-essential", "python3-dev"} <= installed(BUILD)
    charon = {"libstrongswan-standard-plugins", "strongswan-charon", "strongswan-swanctl"}
    tools = {"iproute2", "wireguard-tools"}
    assert installed(FINAL) == {"ca-certificates", "iptables", "libnftables1", "python3", *charon, *tools}


def test_the_entry_point_is_upstreams() -> None:
    assert [json.loads(rest) for word, rest in FINAL if word == "ENTRYPOINT"] == [["/opt/bin/flanneld"]]


def test_flannelctl_is_in_the_path() -> None:
    """The page on the image shows ``kubectl exec ... -- flannelctl``."""
    assert "ln -s /opt/flanneld/bin/flannelctl /out/usr/local/bin/flannelctl" in TEXT


def test_no_architecture_is_named() -> None:
    names = r"amd64|x86_64|arm64|aarch64|armhf|armv7|ppc64|s390x|riscv|--platform"
    assert re.findall(names, TEXT) == []


@pytest.mark.parametrize(
    "requirement",
    [
        *PROJECT["dependencies"],
        *(each for extra in extras() for each in PROJECT["optional-dependencies"].get(extra, ())),
    ],
)
def test_a_requirement_is_pinned_to_a_version_that_meets_it(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])
