"""Rules and CNI configs that flannel or another network plug-in left on this host."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from flanneld.ctl.data_source import ranges_of
from flanneld.errors import Retryable
from flanneld.network.firewall.command import IptablesRunner
from flanneld.network.firewall.edits import RuleOwnership
from flanneld.network.firewall.rules_sweep import PLACES, commands_of, described, stale_rules
from flanneld.runtime.shell import Command

#: Directory and suffixes of CNI configs; runtimes use the first by name (libcni, ConfFiles).
CNI_DIRECTORY = "/etc/cni/net.d"
_CNI_SUFFIXES = (".conf", ".conflist", ".json")


class LeftRules(Struct, frozen=True, gc=False):
    """Rules for our network in a place that the daemon does not use, and the commands that remove them."""

    rules: tuple[str, ...]
    commands: tuple[Command, ...]


class CniConf(Struct, frozen=True, gc=False):
    """A CNI config file, and the types of its plug-ins."""

    path: str
    types: tuple[str, ...]


def left_rules(document: Mapping[str, Any]) -> Iterator[LeftRules]:
    """Yield stale rules, as far as they are readable; none without a daemon that names its own place."""
    firewall = document.get("firewall")
    others = [place for place in PLACES if firewall and place != firewall["place"]]
    for network, _ in ranges_of(document):
        for place in others:
            try:
                there, edits = stale_rules(
                    place, network.version, RuleOwnership((network,)), IptablesRunner(threading.Event())
                )
            except Retryable:
                continue
            if there and edits:
                lines = tuple(f"{there.name}: {line}" for line in described(edits))
                yield LeftRules(lines, tuple(commands_of(place, network.version, edits)))


def cni_confs(directory: Path) -> Iterator[CniConf]:
    """Yield the CNI configs in the order of container runtimes. Invalid files are skipped."""
    for path in sorted(directory.glob("*")):
        if path.suffix in _CNI_SUFFIXES and (types := _types(path)):
            yield CniConf(str(path), types)


def _types(path: Path) -> tuple[str, ...]:
    try:
        conf = json.loads(path.read_bytes())
        return tuple(str(each["type"]) for each in conf.get("plugins", [conf]))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ()
