"""The commands of docs/containers.md, by recipe, each with the host that it is for."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from tests.lab.daemon import ROOT

PAGE = ROOT / "docs/containers.md"
#: The part of the page that holds the recipes, by its heading.
PART = "\n## From nothing to a ping\n"
TITLE = "Recipe for "
#: A line that says where the block below it is run.
PLACE = re.compile(r"On (both hosts|the first host|the other host)\b.*:$")
BLOCK = re.compile(r"(?:^ {4}.*\n|^\n(?= {4}))+", re.MULTILINE)


class Step(NamedTuple):
    """One block of commands. ``place`` is ``both hosts``, ``the first host`` or ``the other host``."""

    place: str
    commands: str


def recipes(text: str) -> dict[str, list[Step]]:
    """Return the steps of each section of the recipes, by its title.

    Raises ``ValueError`` if a block does not say where it is run: nothing in this part stays untried.
    """
    part = text.partition(PART)[2].partition("\n## ")[0]
    _, *sections = re.split(r"^### ", part, flags=re.MULTILINE)
    titles_and_bodies = (section.split("\n", 1) for section in sections)
    return {title.removeprefix(TITLE): list(map(_step, _blocks(body))) for title, body in titles_and_bodies}


def _blocks(body: str) -> list[tuple[str, str]]:
    """Return each block with the line of text above it."""
    found = []
    for block in BLOCK.finditer(body):
        above = body[: block.start()].rstrip().rpartition("\n")[2]
        found.append((above, textwrap.dedent(block[0]).strip()))
    return found


def _step(found: tuple[str, str]) -> Step:
    above, commands = found
    place = PLACE.match(above)
    if place is None:
        raise ValueError(
            f"{above!r} does not say on which host its commands run; begin it with 'On ... host'"
        )
    return Step(place[1], commands)
