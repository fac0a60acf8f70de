"""Nodes with the ipsec backend, each with a charon of its own."""

from __future__ import annotations

import os
from contextlib import suppress

from flanneld.backends.ipsec.charon import NoCharon
from flanneld.backends.ipsec.charon import ViciConnection as Control
from flanneld.backends.ipsec.resources import ConnectionSas, by_connection
from flanneld.backends.ipsec.vici import texts
from tests.lab import Node
from tests.lab.forks import OWN_RUN

PSK = "a secret that no log may ever show, " * 3
IPSEC = {"Type": "ipsec", "PSK": PSK}


def with_own_run(node: Node, *command: str) -> list[str]:
    """Give a command a /run that only this node has: charon's socket and its pid file are always there."""
    run = node.directory / "run"
    run.mkdir(exist_ok=True)
    return [*OWN_RUN, str(run), *command]


def charon_of(node: Node) -> int:
    """Return the process, 0 if there is none."""
    with suppress(OSError, ValueError):
        pid = int((node.directory / "run/charon.pid").read_text())
        os.kill(pid, 0)
        return pid
    return 0


def control(node: Node) -> Control:
    return Control(str(node.directory / "run/charon.vici"))


def loaded(node: Node) -> tuple[list[str], list[str]]:
    """Return the names of charon's connections and keys; none while no charon answers."""
    try:
        with control(node) as charon:
            names = [name for event in charon.listing("list-conns", "list-conn") for name in event]
            return names, sorted(texts(charon.ask("get-shared"), "keys"))
    except NoCharon:
        return [], []


def associations(node: Node) -> dict[str, ConnectionSas]:
    """Return charon's SAs by connection; none while no charon answers."""
    try:
        with control(node) as charon:
            return by_connection(charon.listing("list-sas", "list-sa"))
    except NoCharon:
        return {}
