"""What this host's kernel holds, next to what should be there."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flanneld.ctl.source import knows_peers, ranges_of
from flanneld.model import IPAddress
from flanneld.network.domain import Domain
from flanneld.network.kernel import Kernel
from flanneld.network.links import SeenLink
from flanneld.network.rtnl import RTN_UNICAST
from flanneld.ownership import is_flannels

#: linux/rtnetlink.h
_RTN_LOCAL = 2


@dataclass(frozen=True, slots=True)
class Found:
    """The kernel's side: the texts of what there is where ours should be, each with whether it is ours."""

    objects: Mapping[str, bool]
    links: tuple[SeenLink, ...]

    def link(self, name: str) -> SeenLink | None:
        return next((each for each in self.links if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Way:
    """Where the kernel would send a packet; ``device`` is empty when nowhere. ``is_here``: it stays here."""

    device: str
    gateway: IPAddress | None = None
    is_here: bool = False

    def __str__(self) -> str:
        if self.is_here:
            return "this host"
        if not self.device:
            return "nowhere"
        return f"via {self.gateway} dev {self.device}" if self.gateway else f"dev {self.device}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One object, ``ok``, ``missing``, ``not wanted`` or, if nobody says what is wanted, just ``found``."""

    kind: str
    text: str
    state: str
    owner: str = ""


def read(document: Mapping[str, Any]) -> Found:
    """Raises ``OSError``."""
    kernel = Kernel()
    links = tuple(kernel.links())
    devices = document.get("devices") or [link.name for link in links if is_flannels(link)]
    ours = {link.name: link.make for link in links if link.name in devices}
    uplink = (document.get("uplink") or {}).get("name", "")
    domain = Domain(uplink, frozenset(devices), ranges_of(document), adopt=not document.get("peers"))
    there = {make.key: make for make in ours.values()}
    objects = {str(make): True for make in ours.values()}
    objects |= {str(item): is_ours for item, is_ours in kernel.read(domain, there)}
    return Found(objects, links)


def way_to(target: IPAddress) -> Way:
    """Raises ``OSError``."""
    way = Kernel().way_to(target)
    if way is None or way.kind not in (RTN_UNICAST, _RTN_LOCAL):
        return Way("")
    try:
        return Way(socket.if_indextoname(way.index), way.gateway, is_here=way.kind == _RTN_LOCAL)
    except OSError:
        return Way("")


def wanted(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The kind, the text and the owner of each object that should be in the kernel."""
    for item in document.get("local") or ():
        yield item["kind"], item["text"], "this node"
    for peer in document.get("peers") or ():
        for item in peer["objects"]:
            yield item["kind"], item["text"], ",".join(peer["subnets"])


def compare(document: Mapping[str, Any], found: Found) -> list[Entry]:
    """All that is wanted or ours, in this order (pure)."""
    if not knows_peers(document):
        return [Entry(_kind(text), text, "found") for text, is_ours in found.objects.items() if is_ours]
    contested = {item["text"] for peer in document["peers"] if peer["conflicts"] for item in peer["objects"]}
    entries = []
    texts = set()
    for kind, text, owner in wanted(document):
        texts.add(text)
        if kind == "outside":
            continue
        if text in found.objects:
            entries.append(Entry(kind, text, "ok", owner))
        elif text not in contested:
            entries.append(Entry(kind, text, "missing", owner))
    extra = [text for text, is_ours in found.objects.items() if is_ours and text not in texts]
    return entries + [Entry(_kind(text), text, "not wanted") for text in extra]


def after(word: str, text: str) -> str:
    """What follows a word in the text of an object, empty if it does not occur."""
    words = text.split()
    return words[words.index(word) + 1] if word in words else ""


def _kind(text: str) -> str:
    word = text.split()[0]
    return {"neigh": "neighbor", "blackhole": "route"}.get(word, word)
