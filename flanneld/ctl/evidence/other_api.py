"""Leases in that API of etcd which this node does not read: other nodes may have been told another one."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from flanneld import options
from flanneld.ctl.source import DataSource
from flanneld.errors import FlannelError

_NAME = re.compile(r"etcd (v2|v3) at ")
_OTHER = {"v2": "v3", "v3": "v2"}


class OtherApi(Struct, frozen=True, gc=False):
    """An API of etcd with leases of nodes that are unknown in the one in use."""

    used: str
    other: str
    leases: tuple[str, ...]


def read(source: DataSource) -> OtherApi | None:
    """Return the other API if it has such leases. Without the password or an answer it is not known."""
    used = _NAME.match(str((source.document.get("store") or {}).get("name")))
    wanted = _options(source)
    if used is None or wanted is None:
        return None
    other = _OTHER[used[1]]
    known = _public_ips(source.document)
    try:
        found = _leases(wanted, other)
    except (FlannelError, OSError):
        return None
    strange = sorted(f"{subnet} of {ip}" for subnet, ip in found if ip not in known)
    return OtherApi(used[1], other, tuple(strange)) if strange else None


def _options(source: DataSource) -> options.Options | None:
    """Return the daemon's options, or our own if there is no daemon; None if a secret is masked."""
    if source.origin != "daemon":
        return source.options
    words = shlex.split(str(source.document.get("flags", "")))
    if any(word.endswith("=***") for word in words):
        return None
    try:
        return options.read([f"--{word}" for word in words], {}, program="flanneld")
    except FlannelError:
        return None


def _public_ips(document: Mapping[str, Any]) -> set[str]:
    found = {ip for peer in document.get("peers", ()) for ip in peer["public_ips"]}
    return found | set((document.get("uplink") or {}).get("public_ips", ()))


def _leases(wanted: options.Options, api: str) -> Sequence[tuple[str, str]]:
    """Return subnet and public IP of each lease in one API."""
    from flanneld.model import FAMILIES, name_of
    from flanneld.subnet.etcd.api_choice import open_etcd
    from flanneld.subnet.etcd.store import EtcdStore
    from flanneld.subnet.opening import etcd_options

    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    manager = open_etcd(etcd_options(wanted), api)
    try:
        assert isinstance(manager, EtcdStore)
        leases = manager.listing().leases.values()
        return [
            (name_of(lease.key), str(ip))
            for lease in leases
            for family in FAMILIES[:1]
            if (ip := lease.attrs.public(family))
        ]
    finally:
        manager.close()
        logging.getLogger().setLevel(level)
