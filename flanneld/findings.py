"""Findings about a host, conditions of a daemon, and the commands that mend them (pure).

A command is a list of arguments, quoted only for a shell or a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import partial

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


#: Commands that correct a finding if root runs them in this order on this host, without text from the store;
#: ``tests/faults`` runs each on a broken host. Or advice: what needs a decision, another host, or a program
#: that we cannot run.
Remedy = tuple[Command, ...] | str


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
    remedy: Remedy
    about: str = ""
    severity: Severity = Severity.PROBLEM

    @property
    def cure(self) -> str:
        """The remedy in one line: advice, or commands for a shell."""
        return self.remedy if isinstance(self.remedy, str) else line(self.remedy)


#: Finding that may be intended.
hint = partial(Finding, severity=Severity.HINT)
