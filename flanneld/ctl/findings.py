"""Findings of the doctor, and what a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.network.host_settings import Topic
from flanneld.runtime.shell import Command

if TYPE_CHECKING:
    from flanneld.ctl.facts import Facts

#: Themes of users' typical problems with flannel.
THEMES = {
    "A": "devices and uplink",
    "B": "stale or missing objects",
    "C": "news of the peers",
    "D": "MAC addresses and device managers",
    "E": "the host's firewall and forwarding",
    "F": "subnet.env and bridges",
    "G": "containers on another subnet",
    "H": "the lease",
    "I": "the store",
    "J": "addresses",
    "K": "MTU and offload",
    "L": "the daemon itself",
    "M": "encryption",
    "N": "the cluster",
}


class Severity(StrEnum):
    """Severity: a problem loses packets, now or soon, and sets the exit status; a hint may be intended."""

    PROBLEM = "problem"
    HINT = "hint"


class Fix(Struct, frozen=True, gc=False):
    """Commands that correct the finding if root runs them in this order on this host.

    They contain no text from the store. ``tests/netns/test_doctor.py`` runs each on a broken host.
    """

    commands: tuple[Command, ...]


class Advice(Struct, frozen=True, gc=False):
    """Remedy that needs a decision, another host, or a program that we cannot run."""

    text: str


class Finding(Struct, frozen=True, gc=False):
    """One thing that is wrong.

    ``about`` is the device, chain, file or subnet, if it concerns a single one.
    """

    problem: str
    evidence: str
    why: str
    remedy: Fix | Advice
    about: str = ""
    severity: Severity = Severity.PROBLEM


class Check(Struct, frozen=True):
    """A function over facts; ``meaning`` is the condition that it checks, in one line."""

    theme: str
    name: str
    meaning: str
    look: Callable[[Facts], Iterator[Finding]]


#: Items named in a finding, at most.
_FEW = 3


def check(theme: str, name: str, meaning: str) -> Callable[[Callable[[Facts], Iterator[Finding]]], Check]:
    """Make a check of a function over facts; ``doctor.CHECKS`` finds it."""
    return lambda look: Check(theme, name, meaning, look)


def few(items: Sequence[object], separator: str = ", ") -> str:
    """Return the first items as text, and how many more there are."""
    shown = separator.join(map(str, items[:_FEW]))
    return f"{shown}{separator}and {len(items) - _FEW} more" if len(items) > _FEW else shown


def as_at_start(facts: Facts, topic: Topic) -> Iterator[Finding]:
    """Yield the findings of one topic that the daemon itself checks at startup."""
    for each in facts.host:
        if each.topic is topic:
            yield Finding(
                each.what,
                "read from /proc/sys",
                each.why,
                # br_netfilter affects every bridge of this host, also those of other programs.
                Advice(each.command) if topic is Topic.BRIDGES else Fix((each.argv,)),
                about=each.topic,
                severity=Severity.PROBLEM if each.grave else Severity.HINT,
            )
