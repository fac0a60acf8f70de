"""Commands for an operator: lists of arguments, quoted only where a shell or a person reads them (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

#: A program and its arguments.
Command = tuple[str, ...]


def command(*words: object) -> Command:
    """Return a command; an address or a number stands for its text."""
    return tuple(map(str, words))


def line(commands: Iterable[Command]) -> str:
    """Return the commands as one line for a shell."""
    return "; ".join(map(shlex.join, commands))
