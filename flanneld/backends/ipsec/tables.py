"""Reconciler tables of charon: its process, this run's or one that is left over, and its configuration.

The configuration is a key for each node's address, and a connection for each peer. charon reports the names
of keys and connections, and addresses and subnets of connections. Nothing else can be read back, least of
all keys. So everything that this run has not loaded itself is loaded again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network

from flanneld.backends.contract import MakeCall
from flanneld.backends.ipsec import charon
from flanneld.backends.ipsec.charon import CharonEvents, CharonHangs, CharonProcess, CharonRefused, NoCharon
from flanneld.backends.ipsec.charon import ViciConnection as Control
from flanneld.backends.ipsec.resources import (
    CHARON,
    CONNECTIONS,
    Charon,
    ConnectionSas,
    IkeConnection,
    SharedKey,
    by_connection,
    connection_of,
    owner_of,
    session_of,
)
from flanneld.backends.ipsec.vici import MalformedVici, ReadSection, sections, text, texts
from flanneld.compat.glog import V, counted
from flanneld.errors import Retryable
from flanneld.model import Secret, lies_in
from flanneld.network.xfrm import POLICIES
from flanneld.network.xfrm_table import Associations
from flanneld.runtime import clock, waits
from flanneld.runtime.logs import Once
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Changes, Failure, Put, Report, Scope, Seen, Table, TunnelSession

log = logging.getLogger(__name__)

#: Calls to charon block, so they have a thread apart from the kernel's tables.
WORKER = "charon"
#: Seconds between two reads of each table. After two reads without SAs a peer is called again.
_AUDIT = 10.0
#: Seconds for charon to start, and between two checks of its start.
_START_LIMIT, _START_LOOK = 20.0, 0.05
#: Seconds for a check that charon answers, and for any other call. A stop of the daemon cuts both.
_LOOK_LIMIT, _CALL_LIMIT = 2 * charon.TIME_LIMIT, 60.0
#: Seconds of loading at a time; the rest follows after the next read.
_ROUND = 5.0
#: Seconds after which the first request to a peer is ended if it has no answer, and at most until the next
#: one. charon would repeat it after 4 s (strongswan.conf(5), retransmit_timeout).
_UNANSWERED = 3.0
#: Texts in charon's log that explain a failed negotiation, each with its remedy.
_FAILURES = {
    "AUTHENTICATION_FAILED": "give all nodes one PSK",
    "MAC mismatched": "give all nodes one PSK",
    "no shared key found": "give all nodes one PSK",
    "NO_PROPOSAL_CHOSEN": "give all nodes one ESPProposal, of algorithms that each of them has",
    "no acceptable proposal found": "give all nodes one ESPProposal, of algorithms that each of them has",
}


class CharonTable(Table):
    """Table that starts charon and keeps it running; ``note`` gets each line of its log.

    charon outlives the daemon, so a restart interrupts no SA. The next run uses it if ``mark``, a digest of
    the settings, is the same, and replaces it otherwise. ``call`` makes the calls that may block.
    """

    name = CHARON
    what = "the processes of charon"
    worker = WORKER
    audit = _AUDIT

    def __init__(self, note: Callable[[ReadSection], None], mark: str, call: MakeCall) -> None:
        self._note = note
        self._call = call
        self._process = CharonProcess(mark)
        self._news: CharonEvents | None = None
        #: True until charon was read once: it may be an earlier run's.
        self._is_new = True
        #: True after charon's end: the next one has none of our keys and connections.
        self._is_lost = False
        #: Reason to replace a charon that still runs.
        self._hangs = self._outdated = ""

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield charon if it answers. Raises ``CharonHangs`` for another program's that does not.

        One to be replaced counts as absent, as does one after a loss, so that its keys and connections are
        loaded again.
        """
        del scope
        yield from self._call("charon", self._look, _LOOK_LIMIT)

    def _look(self) -> list[Seen]:
        self._process.find_running()
        if self._is_lost:
            return []
        try:
            self._hear()
            charon.ask(charon.SOCKET, "version")
            self._process.output()
        except NoCharon:
            self._lose()
            return []
        except (CharonHangs, MalformedVici) as problem:
            if not self._process.pid:
                raise
            self._hangs = problem.problem
            self._lose()
            return []
        if self._is_new and self._process.is_outdated():
            self._outdated = "it has other settings, or its program was replaced"
            self._lose()
            return []
        self._is_new = False
        return [Seen(Charon())]

    def put(self, puts: Sequence[Put]) -> Report:
        """Start charon unless one runs. Raises ``Fatal`` if it is not installed."""
        return self._call("the start of charon", partial(self._put, puts), _CALL_LIMIT)

    def _put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            try:
                self._find_or_start()
                report.made.append(put.want)
            except Retryable as problem:
                report.failed.append(Failure(put.want, problem.problem, problem.remedy))
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Release charon's socket. It goes on, with its keys and connections, unless ``remove``."""
        if self._news is not None:
            self._news.close()
            self._news = None
        if remove:
            self._process.end()
        self._process.close()

    # ---- notifications -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._news.fileno() if self._news else -1

    def changes(self) -> list[Changes]:
        """Pass on charon's log lines. Return a change if it has ended."""
        if self._news is None:
            return []
        try:
            for line in self._news.heard():
                log.log(V(1), "charon [%s] %s", text(line, "group"), text(line, "msg"))
                self._note(line)
        except (NoCharon, MalformedVici):
            self._lose()
            return [Changes()]
        return []

    # ---- the process -------------------------------------------------------------------------------

    def _find_or_start(self) -> None:
        self._end_replaced()
        try:
            self._hear()
        except NoCharon:
            self._start()
        else:
            log.info("Using a charon that runs already, %s", self._version())
        self._is_lost = self._is_new = False

    def _end_replaced(self) -> None:
        """End a charon that is to be replaced. One that hangs is killed."""
        if self._hangs:
            log.warning("Killing charon, process %d: %s", self._process.pid, self._hangs)
            self._process.kill()
        elif self._outdated:
            log.info("Ending charon, process %d: %s", self._process.pid, self._outdated)
            self._process.end()
        self._hangs = self._outdated = ""

    def _start(self) -> None:
        """Start charon, unless one of an earlier run is just starting or ending."""
        if not self._process.pid:
            if self._process.status is not None:
                log.warning("charon ended with status %d: starting it again", self._process.status)
            self._process.start()
        if not waits.until(self._has_started, within=_START_LIMIT, every=_START_LOOK):
            self._process.kill()
            raise Retryable(f"charon does not answer at {charon.SOCKET}", "see what it logs")
        if not self._news:
            status = self._process.status
            how = "" if status is None else f" with status {status}"
            raise Retryable(f"charon ended at its start{how}", "see what it logs")
        log.info("Started charon, process %d, %s", self._process.pid, self._version())

    def _has_started(self) -> bool:
        """Return True if charon answers, or has ended."""
        try:
            self._hear()
        except (NoCharon, CharonRefused):
            return not self._process.pid
        return True

    def _hear(self) -> None:
        self._news = self._news or CharonEvents(charon.SOCKET)

    def _lose(self) -> None:
        self._is_lost = True
        if self._news is not None:
            self._news.close()
            self._news = None

    def _version(self) -> str:
        answer = charon.ask(charon.SOCKET, "version")
        return f"strongSwan {text(answer, 'version')}"


class StaleCharonTable(Table):
    """Table of the charon that an earlier run has started. It only removes."""

    name = CHARON
    what = "the processes of charon"
    vital = False

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        if charon.running_charon():
            yield Seen(Charon())

    def put(self, puts: Sequence[Put]) -> Report:
        raise NotImplementedError

    def drop(self, found: Sequence[Resource]) -> Report:
        """Send SIGTERM without waiting for the end: charon ends the SAs that it has negotiated."""
        charon.end_running(charon.running_charon())
        return Report(removed=list(found))


def stale_charon() -> Iterator[Table]:
    """Yield a table if an earlier run has left a charon. The ipsec backend's table takes its place."""
    if charon.running_charon():
        yield StaleCharonTable()


class ConnectionTable(Table):
    """Table of keys, and of connections inside ``network``. Used by one thread, except ``sessions``.

    ``call`` makes the calls that may block.
    """

    name = CONNECTIONS
    what = "charon's keys and connections"
    worker = WORKER
    vital = False
    needs = frozenset({CHARON, POLICIES})
    audit = _AUDIT

    def __init__(self, network: IPv4Network, call: MakeCall, path: str = charon.SOCKET) -> None:
        self._network = network
        self._call = call
        self._path = path
        self._kernel = Associations()
        #: Keys and connections that this run has loaded.
        self._loaded: dict[Key, Resource] = {}
        self._sessions: tuple[TunnelSession, ...] = ()
        #: Connections without SAs at the last read.
        self._idle: set[str] = set()
        #: Time until which a peer may answer the first request, by connection.
        self._answer_by: dict[str, float] = {}
        self.next_look = math.inf
        #: Reason why the last negotiation with a peer failed, by connection.
        self._reasons: dict[str, str] = {}
        self._once = Once()

    def sessions(self) -> tuple[TunnelSession, ...]:
        """Return the session with each peer as of the last read. May be called from any thread."""
        return self._sessions

    # ---- reading -----------------------------------------------------------------------------------

    def read(self, scope: Scope) -> Iterable[Seen]:
        return self._call("charon's list", partial(self._read, scope), _CALL_LIMIT)

    def _read(self, scope: Scope) -> list[Seen]:
        with Control(self._path) as control:
            connections = [
                item
                for event in control.listing("list-conns", "list-conn")
                for item in sections(event).items()
            ]
            keys = texts(control.ask("get-shared"), "keys")
            listed = [*control.listing("list-sas", "list-sa")]
            found = by_connection(listed, self._kernel.spis())
            seen = [*self._keys(keys), *self._connections(connections)]
            desired = [each for each in scope.desired.values() if isinstance(each, IkeConnection)]
            self._look_after(desired, found, {each.key for each in seen}, control)
        now = clock.wall()
        self._sessions = tuple(
            session_of(each, found.get(each.name), now, self._reasons.get(each.name, "")) for each in desired
        )
        return list(map(Seen, seen))

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
            yield known if isinstance(known, IkeConnection) and _is_as(known, content) else unknown

    def _look_after(
        self,
        desired: Iterable[IkeConnection],
        found: dict[str, ConnectionSas],
        loaded: set[Key],
        control: Control,
    ) -> None:
        """Initiate SAs for peers without one at two reads; charon itself gives up in some cases."""
        now = clock.now()
        idle = set()
        replaced = 0
        for each in desired:
            sas = found.get(each.name, ConnectionSas())
            if sas.lost:
                # A dry run has loaded nothing, so it changes nothing.
                replaced += each.key in self._loaded and _replace(sas.lost, control)
            elif sas.children:
                if each.key in self._loaded:
                    _hang_up(sas.unanswered, control)
                self._reasons.pop(each.name, None)
                if self._once.clear(each.name):
                    log.info("IKE with %s for %s succeeds again", each.remote, each.peer)
            elif each.key in loaded and not sas.is_negotiating:
                idle.add(each.name)
                if each.name in self._idle:
                    self._call_again(each, control)
            elif sas.unanswered and self._answer_by.get(each.name, math.inf) <= now:
                _hang_up(sas.unanswered, control)
                idle.add(each.name)
                self.next_look = now + _UNANSWERED
        self._idle = idle
        self._answer_by = {name: end for name, end in self._answer_by.items() if end > now}
        self.next_look = min([self.next_look, *self._answer_by.values()])
        if replaced:
            log.warning("Negotiating %s again: another program removed them", counted(replaced, "lost SA"))

    def _call_again(self, connection: IkeConnection, control: Control) -> None:
        reason = self._reasons.get(connection.name)
        if reason:
            text = f"IKE with {connection.remote} for {connection.peer} fails: {reason}"
            self._once.warn(log, connection.name, text)
        with suppress(CharonRefused):
            control.ask("initiate", {"ike": connection.name, "child": connection.child, "timeout": "-1"})

    def note(self, line: ReadSection) -> None:
        """Keep the reason of a failed negotiation. A peer that has not loaded its connection refuses, too."""
        message, name = text(line, "msg"), text(line, "ikesa-name")
        remedy = next((_FAILURES[part] for part in _FAILURES if part in message), "")
        if remedy and connection_of(name) is not None:
            self._reasons[name] = f"{message}; {remedy}"

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> Report:
        """Load keys first, then connections, for the time of one round."""
        return self._call("loading keys into charon", partial(self._put, puts), _CALL_LIMIT)

    def _put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        end = clock.now() + _ROUND
        with Control(self._path) as control:
            for put in sorted(puts, key=lambda each: isinstance(each.want, IkeConnection)):
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
            case IkeConnection():
                if isinstance(known, IkeConnection) and known != want:
                    _unload(control, known)  # Its SAs were negotiated with other settings.
                control.ask("load-conn", want.message())
                self._answer_by[want.name] = end = clock.now() + _UNANSWERED
                self.next_look = min(self.next_look, end)
        self._loaded[want.key] = want

    def drop(self, found: Sequence[Resource]) -> Report:
        """Unload connections and terminate their SAs, then unload keys."""
        return self._call("unloading keys from charon", partial(self._drop, found), _CALL_LIMIT)

    def _drop(self, found: Sequence[Resource]) -> Report:
        with Control(self._path) as control:
            for each in sorted(found, key=lambda each: isinstance(each, SharedKey)):
                self._loaded.pop(each.key, None)
                match each:
                    case IkeConnection():
                        _unload(control, each)
                        self._once.clear(each.name)
                        self._reasons.pop(each.name, None)
                    case SharedKey():
                        with suppress(CharonRefused):  # already gone
                            control.ask("unload-shared", {"id": each.name})
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Unload nothing: charon goes on without the daemon, and so does the traffic."""
        del remove
        self._kernel.close()

    # ---- notifications -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._kernel.fileno()

    def changes(self) -> list[Changes]:
        """Return a change if another program has flushed the kernel's SAs, which charon does not notice."""
        return [Changes()] if self._kernel.were_flushed() else []

    def look(self) -> bool:
        """Return True some seconds after a connection was loaded, or a request was ended."""
        is_due = clock.now() >= self.next_look
        if is_due:
            self.next_look = math.inf
        return is_due


def _replace(lost: Iterable[ReadSection], control: Control) -> int:
    """Have charon negotiate new SAs in place of lost ones. Return their number."""
    count = 0
    for child in lost:
        with suppress(CharonRefused):  # already replaced
            control.ask("rekey", {"child-id": text(child, "uniqueid")})
            count += 1
    return count


def _hang_up(unanswered: Iterable[str], control: Control) -> None:
    """End our requests before charon repeats them.

    A node calls a new peer before that one's charon can answer, and the peer calls as soon as it can. If it
    also answered, there would be more SAs, and it would send through them some milliseconds before this node
    has them.
    """
    for number in unanswered:
        with suppress(CharonRefused):  # answered or given up meanwhile
            control.ask("terminate", {"ike-id": number, "force": "yes", "timeout": "-1"})


def _unload(control: Control, connection: IkeConnection) -> None:
    """Unload a connection, then end its SAs, so that charon does not renegotiate. Both may be gone."""
    for command, message in (
        ("unload-conn", {"name": connection.name}),
        ("terminate", {"ike": connection.name, "force": "yes", "timeout": "-1"}),
    ):
        with suppress(CharonRefused):
            control.ask(command, message)


def _is_as(known: IkeConnection, found: ReadSection) -> bool:
    """Return True if the readable part of a connection matches."""
    child = sections(sections(found).get("children", {})).get(known.child)
    return (
        child is not None
        and texts(found, "local_addrs") == [str(known.local)]
        and texts(found, "remote_addrs") == [str(known.remote)]
        and texts(child, "local-ts") == [str(known.own)]
        and texts(child, "remote-ts") == [str(known.peer)]
    )
