"""Opening of the embedded store that the options name, with its network config."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path

from flanneld.config import parse, say_the_same
from flanneld.errors import Fatal, Retryable
from flanneld.runtime import randomness
from flanneld.subnet.embedded.client import PREFIX, EmbeddedClient
from flanneld.subnet.embedded.database import Database
from flanneld.subnet.embedded.store import KeyStore
from flanneld.subnet.etcd.keys import NotFound
from flanneld.subnet.etcd.manager import EtcdManager

log = logging.getLogger(__name__)

_CONFIG = posixpath.join(PREFIX, "config")


def open_store(path: str, *, create: bool = False) -> KeyStore:
    """Open the store in a file; ``create`` makes a missing file. Raises ``Fatal``."""
    return KeyStore(Database(Path(path).absolute(), create=create))


def manager_of(
    store: KeyStore, network: str = "", randrange: Callable[[int], int] = randomness.randrange
) -> EtcdManager:
    """Return the subnet manager of a store; ``network`` is the network's name, or empty."""
    prefix = posixpath.join(PREFIX, network) if network else PREFIX
    name = f"{store.name} under {network}" if network else store.name
    return EtcdManager(
        EmbeddedClient(store), prefix, store.name, pause_time=1.0, randrange=randrange, name=name
    )


def config_of(text: str) -> str:
    """Return the network config that ``-network`` means: a network, or JSON. Raises ``Fatal``."""
    if not text.lstrip().startswith("{"):
        try:
            family = ip_network(text).version
        except ValueError as error:
            raise Fatal(f"-network: {error}", "give a network like 10.5.0.0/16, or JSON") from None
        named = (
            {"Network": text}
            if family == 4
            else {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": text}
        )
        text = json.dumps({**named, "Backend": {"Type": "vxlan"}})
    try:
        parse(text)
    except Retryable as error:
        raise Fatal(f"-network: {error.problem}", error.remedy) from None
    return text


def write_config(store: KeyStore, text: str) -> None:
    """Write the network config of ``-network``, unless the store has it.

    A bare network keeps the rest of a config that has this network. Raises ``Retryable`` and ``Fatal``.
    """
    wanted = config_of(text)
    try:
        node, _ = store.get(_CONFIG)
    except NotFound:
        store.create(_CONFIG, wanted, None)
        return
    if say_the_same(wanted, node.value) or (wanted != text and _has_network(node.value, wanted)):
        return
    store.replace(_CONFIG, wanted, None, node.modified)
    log.warning("Changed the network config in %s from %s to %s", store.name, node.value, wanted)


def _has_network(stored: str, wanted: str) -> bool:
    """Return True if two configs are for the same networks."""
    try:
        one, other = parse(stored), parse(wanted)
    except Retryable:
        return False
    return [each.network for each in one.ranges] == [each.network for each in other.ranges]
