"""Findings of the doctor, and the registry of its checks (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from msgspec import Struct

from flanneld.ctl.facts import Facts
from flanneld.diagnostics.host_checks import Topic
from flanneld.runtime.shell import Command

#: The themes under which users of flannel report trouble.
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
}


class Severity(StrEnum):
    """A problem loses packets or soon will, and sets the exit status; a hint may have good reasons."""

    PROBLEM = "problem"
    HINT = "hint"


class Fix(Struct, frozen=True, gc=False):
    """Commands that heal the finding when root runs them in this order on this host.

    They hold no text out of the store. ``tests/netns/test_doctor.py`` runs each on a host that is broken.
    """

    commands: tuple[Command, ...]


class Advice(Struct, frozen=True, gc=False):
    """A remedy to think about first: it needs a choice, another host, or a program that we cannot run."""

    text: str


class Finding(Struct, frozen=True, gc=False):
    """One thing that is wrong. ``about`` is the device, chain, file or subnet that it concerns, if any."""

    problem: str
    evidence: str
    why: str
    remedy: Fix | Advice
    about: str = ""
    severity: Severity = Severity.PROBLEM


class Check(Struct, frozen=True):
    """A small function over facts; ``meaning`` is what it looks for, in a line."""

    theme: str
    name: str
    meaning: str
    look: Callable[[Facts], Iterator[Finding]]


#: Filled as the modules of checks are imported.
_REGISTRY: list[Check] = []


def check(theme: str, name: str, meaning: str) -> Callable[[Callable[[Facts], Iterator[Finding]]], Check]:
    """Register a check."""

    def register(look: Callable[[Facts], Iterator[Finding]]) -> Check:
        made = Check(theme, name, meaning, look)
        _REGISTRY.append(made)
        return made

    return register


def registered() -> tuple[Check, ...]:
    """By theme, and then in the order in which they are written."""
    return tuple(sorted(_REGISTRY, key=lambda each: each.theme))


def as_at_start(facts: Facts, topic: Topic) -> Iterator[Finding]:
    """Yield the obstacles of one topic that the daemon itself looks for when it starts."""
    for each in facts.host:
        if each.topic is topic:
            yield Finding(
                each.what,
                "read from /proc/sys",
                each.why,
                # br_netfilter concerns every bridge of this host, also those of others.
                Advice(each.command) if topic is Topic.BRIDGES else Fix((each.argv,)),
                about=each.topic,
                severity=Severity.PROBLEM if each.grave else Severity.HINT,
            )
