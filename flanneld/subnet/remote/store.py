"""Store over a flannel server: the client side of v0.6.2's REST API."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct, structs

from flanneld.compat import json as gojson
from flanneld.compat.json import GoJsonError
from flanneld.config import Config, parse
from flanneld.errors import Refused, Retryable, cause_of
from flanneld.model import (
    Added,
    Event,
    IPAddress,
    Lease,
    LeaseAttrs,
    LeaseKey,
    Removed,
    Snapshot,
    family_of,
    is_same_node,
)
from flanneld.option_values import RemoteServer
from flanneld.runtime import clock, files
from flanneld.runtime.clock import random_bytes
from flanneld.runtime.sockets.http_connection import TlsFiles, client_context
from flanneld.subnet.allocation import fits
from flanneld.subnet.codec import format_key
from flanneld.subnet.list_watch import Contact, ListWatch, PossibleGap, Watches
from flanneld.subnet.remote import wire
from flanneld.subnet.remote.connection import RemoteAnswer, RemoteClient, RemoteServers, accepted, nonsense
from flanneld.subnet.remote.credentials import JoinToken, parse_token
from flanneld.subnet.remote.wire import Acquisition, Reservation, WatchResult, WireLease
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts

log = logging.getLogger(__name__)

#: Seconds between two attempts of a watch, as in Go flannel.
PAUSE = 1.0
T = TypeVar("T")
_ABSENT = b"100: Key not found"


class RemoteOptions(Struct, frozen=True, gc=False):
    """Flags ``-remote*`` and ``-token*``. ``network`` is the network's name, empty for the unnamed one.

    ``secret_file`` keeps the secret of this node, and nothing does if it is empty. The repr shows no token.
    """

    servers: tuple[RemoteServer, ...]
    tls: TlsFiles = TlsFiles()
    network: str = ""
    token: str = ""
    token_file: str = ""
    secret_file: str = ""

    def __repr__(self) -> str:
        return f"RemoteOptions({', '.join(each.name for each in self.servers)})"

    def open_servers(self) -> RemoteServers:
        """Return the servers, not connected yet. Raises ``Fatal`` for unusable TLS files."""
        is_pinned = bool(self.token or self.token_file)
        tls = client_context(self.tls, is_pinned=is_pinned) if self.tls or is_pinned else None
        return RemoteServers(self.servers, tls, self.read_token)

    def read_token(self) -> JoinToken | None:
        """Return the token; None without an option. Raises ``Retryable`` if it cannot be read."""
        source = self.token_file or "-token"
        try:
            text = files.read(Path(source), 4096, _check_mode).decode() if self.token_file else self.token
            return parse_token(text, source) if text or self.token_file else None
        except Refused as refusal:
            raise Retryable(refusal.problem, refusal.remedy) from None
        except (OSError, UnicodeDecodeError) as error:
            raise Retryable(f"cannot read {source}: {cause_of(error)}", "write the token there") from None

    def read_secret(self) -> str:
        """Return the secret of this node, made at first use; empty if no token is given.

        Raises ``Retryable`` if it cannot be kept, and ``Fatal`` if others can write it.
        """
        if not self.secret_file or not (self.token or self.token_file):
            return ""
        kept = files.read_secret(Path(self.secret_file), lambda: random_bytes(32))
        return hashlib.sha256(kept).hexdigest()


def _check_mode(found: os.stat_result) -> None:
    if found.st_mode & stat.S_IROTH:
        raise Refused("every user of this host can read the token file", "chmod o= on it, and make another")


class RemoteStore:
    """``Store`` over one of several servers. The constructor connects to nothing."""

    def __init__(self, options: RemoteOptions, pause: float = PAUSE) -> None:
        self._options = options
        self._servers = options.open_servers()
        self._root = f"/v1/{quote(options.network, safe='') or '_'}"
        self._requests = RemoteClient(self._servers)
        self._pause = pause
        self._watches = Watches()
        #: Last written attributes of our lease. They authorize the server to replace them.
        self._written: LeaseAttrs | None = None
        #: The server names the index of a lease.
        self._has_index = False
        self.name = f"flannel server {self._servers.name}"

    @property
    def problem(self) -> Retryable | None:
        """Current failure of a watch, or None."""
        return self._watches.problem

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._servers.addresses.known()

    def network_config(self) -> Config:
        return self._ask("GET", "/config", understand=_config)

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        if public_ip is None:
            return None
        family = family_of(public_ip)
        return next(
            (each.attrs for each in self.read_leases() if each.attrs.public(family) == public_ip), None
        )

    def read_leases(self) -> list[Lease]:
        result = self._ask("GET", "/leases", understand=_result)
        return [_lease(each, result) for each in result.snapshot or ()]

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        self._servers.secret = self._options.read_secret()
        leases: tuple[WireLease, ...] = ()
        if local != NO_FACTS:
            leases = self._ask("GET", "/leases", understand=_result).snapshot or ()
        kept = self._keep(config, attrs, local, leases)
        if kept is not None:
            return kept
        # Behind one NAT several nodes may have one public IP: the server cannot tell them apart.
        strangers = frozenset(
            each.key
            for each in leases
            if is_same_node(each.attrs, attrs) and not local.is_self(each.attrs, attrs)
        )
        wanted = Acquisition(attrs, previous, strangers)
        return self._ask("POST", "/leases", wire.format_acquisition(wanted), understand=self._lease_of)

    def reservations(self) -> list[Reservation]:
        """Return the reservations of the network."""
        return wire.parse_reservations(self._ask("GET", "/reservations", understand=accepted).body)

    def reserve(self, wanted: Reservation) -> None:
        """Reserve a subnet for a node permanently. It must be free, or that node's lease."""
        self._ask("POST", "/reservations", wire.format_reservation(wanted), understand=accepted)

    def release(self, key: LeaseKey) -> None:
        """Turn a reservation into a lease, which ends in a day unless its node renews it."""
        self._ask("DELETE", f"/reservations/{quote(format_key(key), safe='')}", understand=accepted)

    def renew(self, lease: Lease) -> Lease:
        held = WireLease(lease.attrs, lease.key, self._expires_ns(lease))
        target = f"/leases/{quote(format_key(lease.key), safe='')}"
        return self._ask("PUT", target, wire.format_renewal(held, self._written), understand=self._lease_of)

    def publish_endpoints(self, name: str, text: str) -> None:
        self._ask("PUT", f"/endpoints/{name}", text, understand=accepted)

    def endpoints(self) -> dict[str, str]:
        return self._ask("GET", "/endpoints", understand=_endpoints)

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        def events(result: WatchResult) -> list[Event]:
            if result.snapshot is None:
                return _events(result)
            return [Snapshot(tuple(_lease(each, result) for each in result.snapshot), result.unreadable)]

        self._follow("/leases", events, deliver, alive)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        def events(result: WatchResult) -> list[Event]:
            if result.snapshot is None:
                return [each for each in _events(result) if _key_of(each) == lease.key]
            found = [each for each in result.snapshot if each.key == lease.key]
            return [Added(_lease(each, result)) for each in found] or [Removed(lease.key)]

        def own(result: WatchResult) -> list[Event]:
            return [self._without_own_index(event) for event in events(result)]

        target = f"/leases/{quote(format_key(lease.key), safe='')}"
        self._follow(target, own, deliver, alive, absent=Removed(lease.key))

    def reread(self) -> None:
        self._watches.reread()

    def reconnect(self) -> None:
        self._requests.reconnect()
        self._watches.reconnect()

    def close(self) -> None:
        self._watches.close()
        self._requests.cancel()

    # ---- one request ---------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        target: str,
        body: str | None = None,
        *,
        understand: Callable[[RemoteAnswer], T],
    ) -> T:
        return self._requests.ask(method, self._root + target, body, understand=understand)

    def _keep(
        self, config: Config, attrs: LeaseAttrs, local: LocalFacts, leases: tuple[WireLease, ...]
    ) -> Lease | None:
        """Return a lease with our former public IP if we wrote it, or if the backend recognizes it."""
        for each in leases:
            is_ours = local.wrote(Lease(each.attrs, *each.key)) or local.is_self(each.attrs, attrs)
            if is_ours and fits(config, each.key) and not is_same_node(each.attrs, attrs):
                self._written = each.attrs
                found = Lease(attrs, *each.key, expires=_expires(each, None))
                log.info("Keeping the lease %s of our former public IP: it is ours", found)
                return self.renew(found)
        return None

    def _lease_of(self, answer: RemoteAnswer) -> Lease:
        try:
            lease = wire.parse_lease(gojson.parse(accepted(answer).body))
        except (GoJsonError, Refused) as error:
            raise nonsense(str(error)) from None
        if not any(lease.key):
            raise nonsense("it gave a lease without a subnet")
        self._written, self._has_index = lease.attrs, bool(lease.index)
        return Lease(lease.attrs, *lease.key, expires=_expires(lease, answer.date_ns), asof=lease.index)

    def _without_own_index(self, event: Event) -> Event:
        """Remove the index from an event, so that our own write does not look newer than it is.

        Go flannel's server reports no index of a lease, and its cursor is that of the whole store.
        """
        if isinstance(event, Added) and not self._has_index and event.lease.attrs == self._written:
            return Added(structs.replace(event.lease, asof=0))
        return event

    @staticmethod
    def _expires_ns(lease: Lease) -> int | None:
        if lease.expires is None:
            return None
        return clock.wall_ns() + int((lease.expires - clock.now()) * 1e9)

    def _follow(
        self,
        target: str,
        events: Callable[[WatchResult], list[Event]],
        deliver: Deliver,
        alive: Callable[[], None],
        absent: Event | None = None,
    ) -> None:
        path = self._root + target

        def open_source(contact: Contact) -> _Source:
            return _Source(self._servers, path, events, alive, contact, absent)

        watch = ListWatch(open_source, path, back="the server is back", pace=self._pause)
        self._watches.run(watch, deliver, alive)


class _Source:
    """``Source`` of one target: a snapshot, then a sequence of long requests.

    ``absent`` is the event to deliver while the server has no such lease.
    """

    def __init__(
        self,
        servers: RemoteServers,
        target: str,
        events: Callable[[WatchResult], list[Event]],
        alive: Callable[[], None],
        contact: Contact,
        absent: Event | None,
    ) -> None:
        self._client = RemoteClient(servers)
        self._target = target
        self._events = events
        self._alive = alive
        self._contact = contact
        self._absent = absent
        self._is_absent = False
        self.cancel = self._client.cancel
        self.close = self._client.close

    def start(self, resume: str | None) -> tuple[list[Event], str | None]:
        del resume  # the server may have another store now
        result = self._client.ask("GET", self._target, understand=self._state)
        self._contact()
        if result is not None:
            return self._events(result), result.cursor
        was_absent, self._is_absent = self._is_absent, True
        return [] if was_absent or self._absent is None else [self._absent], None

    def changes(self, after: str) -> tuple[list[Event], str]:
        target = f"{self._target}?next={quote(after, safe='')}"
        try:
            result = self._client.ask("GET", target, None, self._alive, understand=_result)
        except Retryable as reason:
            # Servers end requests that wait, and forget cursors: only a list that fails is an outage.
            raise PossibleGap(reason.problem, reason.remedy) from None
        return self._events(result), result.cursor

    def _state(self, answer: RemoteAnswer) -> WatchResult | None:
        """Return the list in an answer; None if there is no such lease."""
        is_absent = self._absent is not None and answer.status != 200 and answer.body.startswith(_ABSENT)
        return None if is_absent else _result(answer)


def _result(answer: RemoteAnswer) -> WatchResult:
    try:
        return wire.parse_result(accepted(answer).body)
    except Refused as error:
        raise nonsense(error.problem) from None


def _config(answer: RemoteAnswer) -> Config:
    try:
        return parse(accepted(answer).body.decode())
    except UnicodeDecodeError:
        raise nonsense("the config is no text") from None


def _endpoints(answer: RemoteAnswer) -> dict[str, str]:
    try:
        return msgspec.json.decode(accepted(answer).body, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise nonsense(f"endpoints: {error}") from None


def _events(result: WatchResult) -> list[Event]:
    return [Added(_lease(each.lease, result)) if each.lease else Removed(each.key) for each in result.events]


def _lease(lease: WireLease, result: WatchResult) -> Lease:
    cursor = int(result.cursor) if result.cursor.isdecimal() and len(result.cursor) < 20 else 0
    asof = lease.index or cursor
    ends = _expires(lease, None)
    return Lease(lease.attrs, *lease.key, expires=ends, asof=asof, created=lease.created)


def _key_of(event: Event) -> LeaseKey | None:
    match event:
        case Added(lease):
            return lease.key
        case Removed(key):
            return key
    return None


def _expires(lease: WireLease, date_ns: int | None) -> float | None:
    """Return a lease's end on our clock. The server's clock gives the duration, as hosts' clocks differ."""
    if lease.expires_ns is None:
        return None
    return clock.now() + (lease.expires_ns - (date_ns or clock.wall_ns())) / 1e9
