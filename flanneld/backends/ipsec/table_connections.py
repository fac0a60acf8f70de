"""Table of what charon has to know: the key of each node's address, and a connection for each peer.

charon tells the names of keys and connections, and addresses and subnets of the latter. The rest, keys above
all, cannot be read back: what this run has not loaded itself is loaded again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Network

from flanneld.backends.ipsec import charon
from flanneld.backends.ipsec.charon import CharonRefused
from flanneld.backends.ipsec.charon import Connection as Control
from flanneld.backends.ipsec.resources import (
    CHARON,
    CONNECTIONS,
    Connection,
    SharedKey,
    connection_of,
    owner_of,
)
from flanneld.backends.ipsec.sessions import Found, by_connection, session_of
from flanneld.backends.ipsec.table_charon import WORKER
from flanneld.backends.ipsec.vici import ReadSection, sections, text, texts
from flanneld.compat.glog import Once
from flanneld.model import Secret, lies_in
from flanneld.network.xfrm.policy import POLICIES
from flanneld.runtime import clock
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Key, Resource
from flanneld.state.sessions import Session
from flanneld.state.table import Put, Scope, Seen

log = logging.getLogger(__name__)

#: Seconds between two readings; a peer without SAs is called again at the second that finds none.
_AUDIT = 10.0
#: Seconds of loading at a time; the rest comes after the next reading.
_ROUND = 5.0
#: Parts of charon's log that name the reason why a negotiation fails, and what to do about it.
_FAILURES = {
    "AUTHENTICATION_FAILED": "give all nodes one PSK",
    "MAC mismatched": "give all nodes one PSK",
    "no shared key found": "give all nodes one PSK",
    "NO_PROPOSAL_CHOSEN": "give all nodes one ESPProposal, of algorithms that each of them has",
    "no acceptable proposal found": "give all nodes one ESPProposal, of algorithms that each of them has",
}


class ConnectionTable:
    """Keys, and connections inside ``network``. Used by one thread, but for ``sessions``."""

    name = CONNECTIONS
    what = "charon's keys and connections"
    worker = WORKER
    vital = False
    needs = frozenset({CHARON, POLICIES})
    audit: float | None = _AUDIT

    def __init__(self, network: IPv4Network, path: str = charon.SOCKET) -> None:
        self._network = network
        self._path = path
        #: What this run has loaded.
        self._loaded: dict[Key, Resource] = {}
        self._sessions: tuple[Session, ...] = ()
        #: Connections that the last reading found without SAs.
        self._idle: set[str] = set()
        #: Why the last negotiation with a peer failed, by connection.
        self._reasons: dict[str, str] = {}
        self._once = Once()

    def sessions(self) -> tuple[Session, ...]:
        """Return the state of each peer as of the last reading. From any thread."""
        return self._sessions

    # ---- reading -----------------------------------------------------------------------------------

    def read(self, scope: Scope) -> Iterator[Seen]:
        with Control(self._path) as control:
            connections = [
                item
                for event in control.listing("list-conns", "list-conn")
                for item in sections(event).items()
            ]
            keys = texts(control.ask("get-shared"), "keys")
            found = by_connection(control.listing("list-sas", "list-sa"))
            seen = [*self._keys(keys), *self._connections(connections)]
            wanted = [each for each in scope.wanted.values() if isinstance(each, Connection)]
            self._look_after(wanted, found, {each.key for each in seen}, control)
        self._sessions = tuple(session_of(each, found.get(each.name), clock.wall()) for each in wanted)
        return map(Seen, seen)

    def _keys(self, names: Iterable[str]) -> Iterator[Resource]:
        for name in names:
            owner = owner_of(name)
            if owner is not None:
                unknown = SharedKey(owner, Secret(b""))
                yield self._loaded.get(unknown.key, unknown)

    def _connections(self, found: Iterable[tuple[str, ReadSection]]) -> Iterator[Resource]:
        for name, content in found:
            unknown = connection_of(name)
            if unknown is None or not lies_in(unknown.peer, self._network):
                continue
            known = self._loaded.get(unknown.key)
            yield known if isinstance(known, Connection) and _is_as(known, content) else unknown

    def _look_after(
        self, wanted: Iterable[Connection], found: dict[str, Found], loaded: set[Key], control: Control
    ) -> None:
        """Call peers that have had no SA for two readings; charon itself gives up in some cases."""
        idle = set()
        for each in wanted:
            sas = found.get(each.name, Found())
            if sas.children:
                self._reasons.pop(each.name, None)
                if self._once.clear(each.name):
                    log.info("IKE with %s for %s succeeds again", each.remote, each.peer)
            elif each.key in loaded and not sas.is_negotiating:
                idle.add(each.name)
                if each.name in self._idle:
                    self._call_again(each, control)
        self._idle = idle

    def _call_again(self, connection: Connection, control: Control) -> None:
        reason = self._reasons.get(connection.name)
        if reason:
            text = f"IKE with {connection.remote} for {connection.peer} fails: {reason}"
            self._once.warn(log, connection.name, text)
        with suppress(CharonRefused):
            control.ask("initiate", {"ike": connection.name, "child": connection.child, "timeout": "-1"})

    def note(self, line: ReadSection) -> None:
        """Keep why a negotiation fails. A peer that is yet to load its connection refuses us, too."""
        message, name = text(line, "msg"), text(line, "ikesa-name")
        remedy = next((_FAILURES[part] for part in _FAILURES if part in message), "")
        if remedy and connection_of(name) is not None:
            self._reasons[name] = f"{message}; {remedy}"

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> Report:
        """Load keys first, then connections, as many as a round has time for."""
        report = Report()
        end = clock.now() + _ROUND
        with Control(self._path) as control:
            for put in sorted(puts, key=lambda each: isinstance(each.want, Connection)):
                if clock.now() > end:
                    report.pending.append(put.want)
                    continue
                try:
                    self._load(control, put)
                except (CharonRefused, ValueError) as problem:
                    report.failed.append(Failure(put.want, str(problem)))
                else:
                    report.made.append(put.want)
        return report

    def _load(self, control: Control, put: Put) -> None:
        want, known = put.want, self._loaded.pop(put.want.key, None)
        match want:
            case SharedKey():
                control.ask("load-shared", want.message())
            case Connection():
                if isinstance(known, Connection) and known != want:
                    _unload(control, known)  # Its SAs are those of other settings.
                control.ask("load-conn", want.message())
        self._loaded[want.key] = want

    def drop(self, found: Sequence[Resource]) -> Report:
        """Unload connections and terminate their SAs, then unload keys."""
        with Control(self._path) as control:
            for each in sorted(found, key=lambda each: isinstance(each, SharedKey)):
                self._loaded.pop(each.key, None)
                match each:
                    case Connection():
                        _unload(control, each)
                        self._once.clear(each.name)
                        self._reasons.pop(each.name, None)
                    case SharedKey():
                        with suppress(CharonRefused):  # It is gone already.
                            control.ask("unload-shared", {"id": each.name})
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Unload nothing: with a charon of others packets go on without the daemon."""


def _unload(control: Control, connection: Connection) -> None:
    """Unload a connection first, so that charon does not negotiate its SAs again. Both may be gone."""
    for command, message in (
        ("unload-conn", {"name": connection.name}),
        ("terminate", {"ike": connection.name, "force": "yes", "timeout": "-1"}),
    ):
        with suppress(CharonRefused):
            control.ask(command, message)


def _is_as(known: Connection, found: ReadSection) -> bool:
    """Compare the part of a connection that charon tells."""
    child = sections(sections(found).get("children", {})).get(known.child)
    return (
        child is not None
        and texts(found, "local_addrs") == [str(known.local)]
        and texts(found, "remote_addrs") == [str(known.remote)]
        and texts(child, "local-ts") == [str(known.own)]
        and texts(child, "remote-ts") == [str(known.peer)]
    )
