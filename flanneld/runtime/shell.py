"""Commands for an operator: argument lists, quoted only for a shell or a person (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

#: A program and its arguments.
Command = tuple[str, ...]


def command(*words: object) -> Command:
    """Return a command. Addresses and numbers are converted to text."""
    return tuple(map(str, words))


def line(commands: Iterable[Command]) -> str:
    """Return the commands as one line for a shell."""
    return "; ".join(map(shlex.join, commands))
