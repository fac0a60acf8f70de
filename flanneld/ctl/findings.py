"""What a check says, and the registry of checks (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flanneld.ctl.facts import Facts

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
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. A ``hint`` may have good reasons; it does not count as a problem."""

    what: str
    evidence: str
    why: str
    fix: str
    hint: bool = False


@dataclass(frozen=True, slots=True)
class Check:
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


def as_at_start(facts: Facts, *words: str) -> Iterator[Finding]:
    """What the daemon itself looks at when it starts, as far as one of the words is in it."""
    for each in facts.host:
        if any(word in each.what for word in words):
            yield Finding(each.what, "read from /proc/sys", each.why, each.command, hint=not each.grave)
