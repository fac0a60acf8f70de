"""The recipe of the snap, as far as it can be checked without snapcraft, which Debian does not have."""

from __future__ import annotations

import tomllib

import yaml

from flanneld import __version__
from tests.kubernetes_objects import ROOT
from tests.lab.namespace import run

RECIPE = yaml.safe_load((ROOT / "dist/snap/snapcraft.yaml").read_text())
PART = RECIPE["parts"]["flanneld"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_snap_runs_the_commands_of_the_package() -> None:
    commands = {app["command"] for app in RECIPE["apps"].values()}
    assert commands == {f"bin/{name}" for name in PROJECT["scripts"]}


def test_snap_installs_extras_that_exist() -> None:
    (package,) = PART["python-packages"]
    extras = set(package.removeprefix(".[").removesuffix("]").split(","))
    assert extras < set(PROJECT["optional-dependencies"])


def test_snap_has_the_version_of_the_package() -> None:
    (line,) = [line for line in PART["override-pull"].splitlines() if "set version" in line]
    read = line.partition("$(")[2].removesuffix(')"')
    assert run("sh", "-c", f"cd {ROOT} && {read}").stdout == f"{__version__}\n"


def test_snap_is_for_the_architectures_of_upstreams_image() -> None:
    assert set(RECIPE["platforms"]) == {"amd64", "arm64", "armhf", "ppc64el", "riscv64", "s390x"}
