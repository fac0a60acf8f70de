"""Findings about a host, conditions of a daemon, and the commands that mend them (pure).

A command is a list of arguments, quoted only for a shell or a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

#: A program and its arguments.
Command = tuple[str, ...]


def command(*words: object) -> Command:
    """Return a command. Addresses and numbers are converted to text."""
    return tuple(map(str, words))


def line(commands: Iterable[Command]) -> str:
    """Return the commands as one line for a shell."""
    from shlex import join  # nothing is to be mended on most hosts

    return "; ".join(map(join, commands))


class Severity(StrEnum):
    """Severity: a problem loses packets, now or soon, and sets the exit status; a hint may be intended."""

    PROBLEM = "problem"
    HINT = "hint"


class Fix(Struct, frozen=True, gc=False):
    """Commands that correct the finding if root runs them in this order on this host.

    They contain no text from the store. ``tests/netns/test_doctor.py`` runs each on a broken host.
    """

    commands: tuple[Command, ...]

    @property
    def text(self) -> str:
        """The commands as one line for a shell."""
        return line(self.commands)


class Advice(Struct, frozen=True, gc=False):
    """Remedy that needs a decision, another host, or a program that we cannot run."""

    text: str


class Condition(Struct, frozen=True, gc=False):
    """A part of the daemon; ``problem`` is empty if it is healthy, and stable while a condition lasts."""

    part: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.problem}"


class Finding(Struct, frozen=True, gc=False):
    """One thing that is wrong: what, how that was seen, why it matters, and what mends it.

    ``about`` is the device, chain, file or subnet, if it concerns a single one.
    """

    problem: str
    evidence: str
    why: str
    remedy: Fix | Advice
    about: str = ""
    severity: Severity = Severity.PROBLEM
