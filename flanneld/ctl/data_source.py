"""Sources of answers: the running daemon, else the store, else this host alone.

All three give a document as ``flanneld.diagnostics.status`` makes it; the later ones with less in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from flanneld import options
from flanneld.diagnostics import status_socket
from flanneld.errors import FlannelError
from flanneld.options import Options
from flanneld.subnet import subnet_file

#: A daemon that says nothing for so many seconds counts as none.
DAEMON_TIME = 5.0
#: The options that say where a store is; without any of them the store is left alone.
_STORE_FLAGS = ("etcd-endpoints", "kube-subnet-mgr")


class Part(StrEnum):
    """A source of answers that did not answer."""

    DAEMON = "daemon"
    STORE = "store"


class Unknown(Struct, frozen=True, gc=False):
    """The answers that are lacking: ``part`` was not asked, or asked in vain (``failed``)."""

    part: Part
    reason: str
    failed: bool = True

    def __str__(self) -> str:
        return self.reason


class Source(Struct, frozen=True, gc=False):
    """``document`` came from ``origin``: ``daemon``, ``store`` or ``host``; ``unknown`` is what it lacks."""

    origin: str
    document: Mapping[str, Any]
    unknown: tuple[Unknown, ...] = ()
    options: Options = field(default_factory=Options)


def find(words: Sequence[str], environ: Mapping[str, str], socket_path: str = "") -> Source:
    """Ask the daemon, else the store, else this host.

    ``words`` and ``environ`` are as for flanneld. Raises what ``options.read`` does.
    """
    wanted = options.read(words, environ, program="flannelctl COMMAND")
    path = Path(socket_path) if socket_path else status_socket.path_beside(Path(wanted.subnet_file))
    try:
        return Source("daemon", _document(status_socket.ask(path, DAEMON_TIME)), options=wanted)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        silent = Unknown(Part.DAEMON, f"no daemon answers at {path}: {reason}")
    given = " ".join(words) + " " + " ".join(environ)
    if not any(
        flag in given or f"FLANNELD_{flag.upper().replace('-', '_')}" in given for flag in _STORE_FLAGS
    ):
        why = Unknown(Part.STORE, "the store was not asked: give -etcd-endpoints", failed=False)
        return Source("host", _of_the_host(wanted), (silent, why), wanted)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        return Source("store", _of_the_store(wanted, environ), (silent,), wanted)
    except (FlannelError, OSError) as error:
        lost = Unknown(Part.STORE, f"the store does not tell: {error}")
        return Source("host", _of_the_host(wanted), (silent, lost), wanted)


def _document(said: bytes) -> dict[str, Any]:
    """Raises ``ValueError`` for what no daemon says."""
    document = json.loads(said)
    if not isinstance(document, dict):
        raise ValueError("what answers is no daemon")  # noqa: TRY004 - it is the value that is wrong
    return document


def _of_the_store(wanted: Options, environ: Mapping[str, str]) -> dict[str, Any]:
    from flanneld.diagnostics import status
    from flanneld.diagnostics.dry_run import rehearse
    from flanneld.state.desired_state import LOCAL
    from flanneld.state.report import Failure
    from flanneld.subnet.stores import open_manager

    manager = open_manager(wanted, environ)
    outcome = rehearse(wanted, manager)
    local = outcome.view.wishes.get(LOCAL, ())
    to_make = [*outcome.notes.puts.values(), *(link for link, _ in outcome.notes.devices.values())]
    lacking = {item.key: Failure(item, "the kernel lacks it") for item in to_make}
    return {
        "store": {
            "name": manager.name,
            "answers": outcome.view.synced,
            "cache": outcome.view.cached or None,
        },
        "synced": outcome.view.synced,
        "network": status.network(outcome.config),
        "lease": status.lease(outcome.own) if outcome.has_lease else None,
        "uplink": status.uplink(outcome.uplink),
        "mtu": outcome.mtu,
        "devices": sorted(outcome.domain.links),
        "local": [status.describe(wish, lacking) for wish in local],
        "peers": list(status.peers_of(outcome.view, lacking)),
    }


def _of_the_host(wanted: Options) -> dict[str, Any]:
    previous = subnet_file.read(Path(wanted.subnet_file))
    subnets = [net for net in previous.subnets if net is not None]
    return {
        "network": {
            "ranges": [{"network": str(net), "subnet_len": length} for net, length in previous.ranges],
            "backend": None,
        },
        "lease": {"subnets": [str(net) for net in subnets]} if subnets else None,
    }


def knows_peers(document: Mapping[str, Any]) -> bool:
    """Return True if a document holds all leases: an object that it lacks has no owner then."""
    return "local" in document and document.get("synced") is not False


def ranges_of(document: Mapping[str, Any]) -> tuple[tuple[Any, int], ...]:
    """The cluster networks, each with the length of a node's subnet."""
    network = document.get("network") or {}
    return tuple((ip_network(each["network"]), each["subnet_len"]) for each in network.get("ranges", ()))
