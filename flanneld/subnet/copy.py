"""Copy networks from one store to another, and list what was copied: etcd v2, v3, or a file.

Leases are copied first and the config last: daemons with ``-etcd-api=auto`` use the API that has a config.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from flanneld.config import parse, say_the_same
from flanneld.errors import Refused, Retryable
from flanneld.model import IPNetwork, Lease, name_of, overlap
from flanneld.runtime import clock
from flanneld.subnet.codec import format_attrs, format_key, parse_attrs
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, KeyStore
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.keys import Conflict, KeyClient, NotFound, StoredKey
from flanneld.subnet.etcd.leases import LeaseReader
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport
from flanneld.subnet.remote.leases import LeaseStore

#: Seconds by which a copy may expire before its original in v2. Beyond that it is prolonged.
TOLERANCE = 300.0
#: Seconds by which a prolonged copy ends before its original in v2. A full TTL in a daemon's own lease would
#: look like the write of another node with its address.
CURTAILMENT = 120.0
#: Attempts to write a lease while others are writing it, too.
TRIES = 10
#: Name of a store that is not an API of etcd.
_PLACES = {"embedded": "the file"}


class KeyAction(Struct, frozen=True, gc=False):
    """Action for one key. ``why`` gives the reason of a refusal."""

    act: Literal["copy", "renew", "keep", "refuse"]
    why: str = ""


def decide(
    lease: Lease, found: StoredKey | None, others: list[IPNetwork], now: float, there: str = "v3"
) -> KeyAction:
    """Decide what to do about a lease of the old store (pure).

    ``found`` is its key in the new store, named ``there``, or None. ``others`` are the networks of leases
    that only the new store has.
    """
    if found is None:
        rival = next((net for net in others for ours in lease.key if ours and overlap(ours, net)), None)
        return (
            KeyAction("refuse", f"it overlaps {rival}, which is in {there}") if rival else KeyAction("copy")
        )
    try:
        stored = parse_attrs(found.value)
    except Refused as reason:
        return KeyAction("refuse", f"in {there} there is something else: {reason.problem}")
    if stored != lease.attrs:
        owner = stored.public_ip or stored.public_ipv6
        whose = "of the same node, with other data" if owner in lease.attrs.public_ips else f"of {owner}"
        return KeyAction("refuse", f"{there} has another lease there, {whose}")
    if found.ttl is None:
        return KeyAction("keep")
    if lease.expires is None or lease.expires - now > found.ttl + TOLERANCE:
        return KeyAction("renew")
    return KeyAction("keep")


def migrate(options: EtcdOptions, say: Callable[[str], None], *, dry_run: bool) -> bool:
    """Copy config and leases, and report each in a line. Return False if something could not be copied.

    Leases keep their remaining TTL, reservations stay reservations. Only an earlier copy whose TTL is too
    short is overwritten.

    Raises ``Fatal`` for unusable options. Raises ``Retryable`` if etcd fails; then part may have been copied.
    """
    transport = Transport(Servers(options), EtcdTimeouts())
    old, new = open_client("v2", transport), open_client("v3", transport)
    return Migration(old, new, options.prefix, say, dry_run=dry_run).run()


class Migration:
    """One run, from one client to another, whose prefix is the same unless ``new_prefix`` is given."""

    def __init__(
        self,
        old: KeyClient,
        new: KeyClient,
        prefix: str,
        say: Callable[[str], None],
        *,
        dry_run: bool,
        new_prefix: str = "",
    ) -> None:
        self._old = old
        self._new = new
        self._here, self._there = (_PLACES.get(each.api, each.api) for each in (old, new))
        self._old_root, self._new_root = old.root(prefix), new.root(new_prefix or prefix)
        self._leases = LeaseReader(posixpath.join(self._new_root, "subnets"))
        self._say = say
        self._dry_run = dry_run

    def run(self) -> bool:
        config = self._config()
        old = LeaseReader(
            posixpath.join(self._old_root, "subnets"), is_ordered=self._old.api != "v2"
        ).read_all(self._old)
        new = self._leases.read_all(self._new)
        known = set(old.lease_keys())
        others = [net for key in new.lease_keys() if key not in known for net in key if net]
        complete = True
        # In the order of their creation, so that they have it there as well.
        for _, lease in sorted(old.leases.items(), key=lambda item: (item[1].created, item[0])):
            complete &= self._copy_lease(lease, others)
        for key in sorted(old.unreadable, key=name_of):
            complete &= self._refused(self._leases.key_of(key), f"its value in {self._here} is invalid")
        return self._copy_config(config, complete=complete)

    # ---- leases ------------------------------------------------------------------------------

    def _copy_lease(self, lease: Lease, others: list[IPNetwork]) -> bool:
        path = self._leases.key_of(lease.key)
        if lease.expires == math.inf:
            lease = self._timed(lease)
        for _ in range(TRIES):
            found = self._found(path)
            step = decide(lease, found, others, clock.now(), self._there)
            if step.act == "refuse":
                return self._refused(path, step.why)
            if step.act == "keep":
                return self._said("kept", path)
            try:
                return self._write(lease, path, found)
            except Conflict:
                continue
        return self._refused(path, "it changes all the time")

    def _write(self, lease: Lease, path: str, found: StoredKey | None) -> bool:
        value = format_attrs(lease.attrs, with_ipv6=True)
        left = None
        if lease.expires is not None:
            left = max(1, round(lease.expires - clock.now() - (CURTAILMENT if found else 0.0)))
        if self._dry_run:
            pass
        elif found:
            self._new.replace(path, value, left, found.modified)
        else:
            self._new.create(path, value, left)
        what = "a reservation" if left is None else f"{left} s left"
        return self._said("prolonged" if found else "copied", f"{path}, {what}")

    def _timed(self, lease: Lease) -> Lease:
        """Read a lease again whose end a list does not name, as in v3."""
        path = posixpath.join(self._old_root, "subnets", format_key(lease.key))
        node = self._old.fetch(path).node
        return replace(lease, expires=None if node is None or node.ttl is None else clock.now() + node.ttl)

    def _found(self, path: str) -> StoredKey | None:
        try:
            return self._new.fetch(path).node
        except NotFound:
            return None

    # ---- the config --------------------------------------------------------------------------

    def _config(self) -> str:
        path = posixpath.join(self._old_root, "config")
        try:
            node = self._old.fetch(path).node
        except NotFound:
            raise Retryable(
                f"there is no network config at {path} in {self._here}",
                "check -etcd-prefix and -etcd-endpoints",
            ) from None
        text = node.value if node else ""
        parse(text)
        return text

    def _copy_config(self, text: str, *, complete: bool) -> bool:
        path = posixpath.join(self._new_root, "config")
        found = self._found(path)
        if found:
            if say_the_same(text, found.value):
                self._said("kept", path)
                return complete
            return self._refused(path, f"{self._there} has another config there")
        if not complete:
            return self._refused(path, "it comes last, so that no daemon misses the leases above")
        try:
            if not self._dry_run:
                self._new.create(path, text, None)
        except Conflict:
            return self._refused(path, "somebody else has just written one")
        return self._said("copied", path)

    # ---- reporting ---------------------------------------------------------------------------

    def _said(self, done: str, what: str) -> bool:
        would = {"kept": "would keep", "copied": "would copy", "prolonged": "would prolong"}
        self._say(f"{would[done] if self._dry_run else done} {what}")
        return True

    def _refused(self, path: str, why: str) -> bool:
        self._say(f"could not copy {path}: {why}")
        return False


def move(
    file: KeyStore,
    options: EtcdOptions,
    api: str,
    say: Callable[[str], None],
    *,
    into_file: bool,
    dry_run: bool,
) -> bool:
    """Copy every network from the file to etcd, or back; ``api`` is "v2", else v3 is meant.

    Each key is reported in a line. Leases keep their remaining term. Only an earlier copy with too short a
    term is overwritten. Return False if something could not be copied. Raises ``Retryable``.
    """
    etcd = open_client("v2" if api == "v2" else "v3", Transport(Servers(options), EtcdTimeouts()))
    sides: list[tuple[KeyClient, str]] = [(EmbeddedClient(file), PREFIX), (etcd, options.prefix)]
    (old, old_prefix), (new, new_prefix) = reversed(sides) if into_file else sides
    names = _names(old, old_prefix)
    if not names:
        raise Retryable(
            "there is no network to copy", "check -store, -etcd-prefix, -etcd-endpoints and -etcd-api"
        )
    runs = [
        Migration(
            old,
            new,
            posixpath.join(old_prefix, name),
            say,
            dry_run=dry_run,
            new_prefix=posixpath.join(new_prefix, name),
        ).run()
        for name in names
    ]
    return all(runs)


def _names(client: KeyClient, prefix: str) -> list[str]:
    """Return the networks that have a config, the unnamed one as an empty name."""
    store = LeaseStore([client], prefix, "")
    names, _ = store.networks()
    return [*([""] if store.has_unnamed() else []), *names]
