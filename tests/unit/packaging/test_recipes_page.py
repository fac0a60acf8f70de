"""The recipes of docs/containers.md can be read by the tests that run them."""

from __future__ import annotations

import re

import pytest

from tests.lab.daemon import ROOT
from tests.recipes.page import PAGE, PART, Step, recipes


@pytest.mark.parametrize("title", ["Docker", "Podman", "systemd-nspawn", "LXC"])
def test_recipe_begins_on_both_hosts_and_ends_with_a_ping(title: str) -> None:
    first, *_, last = recipes(PAGE.read_text())[title]
    assert first.place == "both hosts"
    assert (last.place, "ping -c 3" in last.commands) == ("the first host", True)


def test_block_keeps_its_lines_together() -> None:
    blocks = "On the other host, do this:\n\n    one \\\n        more\n\n    two\n\nThe end.\n"
    page = f"{PART}### A title\n{blocks}## Another part\n\n    reboot\n"
    assert recipes(page) == {"A title": [Step("the other host", "one \\\n    more\n\ntwo")]}


def test_block_without_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="'Or:' does not say on which host"):
        recipes(f"{PART}### A title\nOr:\n\n    reboot\n")


def test_setup_installs_the_packages_of_the_recipes() -> None:
    named = re.findall(r"^Packages?: `([^`]+)`(?: and `([^`]+)`)?", PAGE.read_text(), re.MULTILINE)
    packages = [package for pair in named for package in pair if package]
    assert len(packages) == 5
    assert [package for package in packages if f":{package}" not in (ROOT / "dist/setup").read_text()] == []
