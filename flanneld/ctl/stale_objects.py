"""Rules and CNI configs on this host that flannel or another network plug-in left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from flanneld.ctl.data_source import ranges_of
from flanneld.errors import Retryable
from flanneld.network.firewall.command import Commands
from flanneld.network.firewall.plan import Claim
from flanneld.network.firewall.sweep import PLACES, commands_of, described, stale_rules
from flanneld.runtime.shell import Command

#: Where container runtimes look, and which files they take, the first by name (libcni, ConfFiles).
CNI_DIRECTORY = "/etc/cni/net.d"
_CNI_SUFFIXES = (".conf", ".conflist", ".json")


class LeftRules(Struct, frozen=True, gc=False):
    """Rules for our network in another place than the daemon's, and the commands that remove them."""

    rules: tuple[str, ...]
    commands: tuple[Command, ...]


class CniConf(Struct, frozen=True, gc=False):
    """A configuration for container runtimes, and the plug-ins that it names."""

    path: str
    types: tuple[str, ...]


def left_rules(document: Mapping[str, Any]) -> Iterator[LeftRules]:
    """As far as we may see them. Nothing is known of them if no daemon says where its own are."""
    firewall = document.get("firewall")
    others = [place for place in PLACES if firewall and place != firewall["place"]]
    for network, _ in ranges_of(document):
        for place in others:
            try:
                there, edits = stale_rules(
                    place, network.version, Claim((network,)), Commands(threading.Event())
                )
            except Retryable:
                continue
            if there and edits:
                lines = tuple(f"{there.name}: {line}" for line in described(edits))
                yield LeftRules(lines, tuple(commands_of(place, network.version, edits)))


def cni_confs(directory: Path) -> Iterator[CniConf]:
    """In the order in which runtimes look at them. What is no configuration is left out."""
    for path in sorted(directory.glob("*")):
        if path.suffix in _CNI_SUFFIXES and (types := _types(path)):
            yield CniConf(str(path), types)


def _types(path: Path) -> tuple[str, ...]:
    try:
        conf = json.loads(path.read_bytes())
        return tuple(str(each["type"]) for each in conf.get("plugins", [conf]))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ()
