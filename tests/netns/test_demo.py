"""The demonstration, from its start to the clean-up."""

from __future__ import annotations

import sys

import pytest

from tests.lab.daemon import ROOT
from tests.lab.namespace import run


@pytest.mark.parametrize("store", ["embedded", "kubernetes"])
def test_demo_shows_a_network_and_all_is_well(store: str) -> None:
    words = ("-m", "dist.demo", "--nodes=2", f"--store={store}")
    said = run("env", "-C", str(ROOT), sys.executable, *words, timeout=300).stdout
    assert "FAILED" not in said
    assert "all containers reach each other" in said
    assert said.endswith("All is well; cleaned up.\n")
    assert ('"type": "bridge"' in said) == (store == "kubernetes")


def test_help_needs_no_python_package() -> None:
    assert "--kubernetes" in run("env", "-C", str(ROOT), "dist/demo", "--help").stdout
