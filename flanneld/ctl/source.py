"""Sources of answers: the running daemon, else the store, else this host alone.

Each returns a status; the later ones contain less.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from flanneld import options
from flanneld.backends.registry import BUILT_IN, described
from flanneld.diagnostics.status import (
    EventStatus,
    LeaseStatus,
    NetworkStatus,
    NotUnderstood,
    RangeStatus,
    Status,
    StoreStatus,
    decoded,
    encoded,
    known,
    plain,
)
from flanneld.errors import Fatal, FlannelError
from flanneld.options import Options
from flanneld.runtime import clock, logs, waits
from flanneld.runtime.process import peer_of
from flanneld.subnet import subnet_file

#: Seconds after which a silent daemon counts as not running.
DAEMON_TIME = 5.0
#: Seconds for its whole answer: after them the daemon cuts a reader off.
_WHOLE_TIME = 30.0


class NothingKnown(FlannelError):
    """A command cannot answer, because no daemon and no store does."""


class SourcePart(StrEnum):
    """A source of answers that did not answer."""

    DAEMON = "daemon"
    STORE = "store"
    #: The dry run of a start: the store answered, and the daemon would exit.
    START = "start"
    #: A part of what the daemon says, which another version says otherwise.
    STATUS = "status"


class Unknown(Struct, frozen=True, gc=False):
    """A missing source of answers: ``part`` was not asked, or did not answer (``failed``).

    It ``hangs`` if it has taken the question. ``remedy`` is that of a start that fails.
    """

    part: SourcePart
    reason: str
    failed: bool = True
    hangs: bool = False
    remedy: str = ""

    def __str__(self) -> str:
        return self.reason


class DataSource(Struct, frozen=True, gc=False):
    """A status with its origin, ``daemon``, ``store`` or ``host``; ``unknown`` are the missing sources.

    ``said`` is the daemon's answer as it came, and ``pid`` its process, 0 if that is not seen from here.
    """

    origin: str
    status: Status
    unknown: tuple[Unknown, ...] = ()
    options: Options = field(default_factory=Options)
    said: bytes = b""
    pid: int = 0

    @property
    def is_understood(self) -> bool:
        """True unless another version's daemon says something otherwise."""
        return all(each.part is not SourcePart.STATUS for each in self.unknown)

    def document(self, but: Sequence[str] = ()) -> dict[str, Any]:
        """Return the status as JSON, ``but`` some keys; that of a daemon with all keys of its version."""
        told = plain(self.said or encoded(self.status))
        return {name: value for name, value in told.items() if name not in but}


def find_source(words: Sequence[str], environ: Mapping[str, str], socket_path: str = "") -> DataSource:
    """Return the answer of the daemon, else of the store, else of this host.

    ``words`` and ``environ`` are as for flanneld. Raises the errors of ``options.read``.
    """
    wanted = options.read(words, environ, program="flannelctl COMMAND")
    path = Path(socket_path) if socket_path else subnet_file.beside(Path(wanted.subnet_file), "sock")
    try:
        said, pid = ask(path, DAEMON_TIME)
        return _of_the_daemon(said, wanted, pid)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hangs = isinstance(error, TimeoutError)
        silent = Unknown(SourcePart.DAEMON, f"no daemon answers at {path}: {reason}", hangs=hangs)
    if not wanted.names_a_store:
        why = Unknown(SourcePart.STORE, "the store was not asked: give -etcd-endpoints", failed=False)
        return DataSource("host", _of_the_host(wanted), (silent, why), wanted)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        return DataSource("store", _of_the_store(wanted, environ), (silent,), wanted)
    except Fatal as error:
        ends = Unknown(SourcePart.START, f"flanneld cannot start: {error.problem}", remedy=error.remedy)
        return DataSource("host", _of_the_host(wanted), (silent, ends), wanted)
    except (FlannelError, OSError) as error:
        lost = Unknown(SourcePart.STORE, f"the store does not tell: {error}")
        return DataSource("host", _of_the_host(wanted), (silent, lost), wanted)


def ask(path: Path, within: float) -> tuple[bytes, int]:
    """Return the status of the daemon behind a socket, and its process as this PID namespace has it.

    Raises ``OSError``, which is ``TimeoutError`` after ``within`` seconds of silence.
    """
    deadline = clock.now() + _WHOLE_TIME
    said = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within)
        _connect(connection, path, within)
        pid, _ = peer_of(connection)
        while True:
            left = deadline - clock.now()
            if left <= 0:
                raise TimeoutError(f"no whole answer within {_WHOLE_TIME:g} s")
            connection.settimeout(min(left, within))
            piece = connection.recv(1 << 16)
            if not piece:
                return bytes(said), pid
            said += piece


def _connect(connection: socket.socket, path: Path, within: float) -> None:
    def attempt() -> bool:
        try:
            connection.connect(str(path))
        except BlockingIOError:  # the backlog is full
            return False
        return True

    if not waits.until(attempt, within=within, every=0.05):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _of_the_daemon(said: bytes, wanted: Options, pid: int = 0) -> DataSource:
    """Return the daemon's answer. Raises ``ValueError`` for anything else."""
    told, problems = decoded(said)
    with suppress(NotUnderstood):
        for each in told.backends - BUILT_IN.keys():
            described(each or "")  # a package registers its kinds of devices when it is loaded
    strange = (
        Unknown(
            SourcePart.STATUS,
            f"the daemon's status is not understood ({problem}); use the flannelctl of its version",
        )
        for problem in problems
    )
    return DataSource("daemon", told, tuple(strange), wanted, said, pid)


def _of_the_store(wanted: Options, environ: Mapping[str, str]) -> Status:
    from flanneld.diagnostics import describe
    from flanneld.diagnostics.plan import dry_run
    from flanneld.state.desired import LOCAL
    from flanneld.state.table import Failure
    from flanneld.subnet.opening import open_store

    store = open_store(wanted, environ)
    outcome = dry_run(wanted, store)
    local = outcome.view.desired.get(LOCAL, ())
    to_make = [*outcome.notes.puts.values(), *(link for link, _ in outcome.notes.devices.values())]
    lacking = {item.key: Failure(item, "the kernel lacks it") for item in to_make}
    return Status(
        store=StoreStatus(store.name, outcome.view.synced, cache=outcome.view.cached or None),
        synced=outcome.view.synced,
        network=describe.network(outcome.config),
        lease=describe.lease(outcome.own) if outcome.has_lease else None,
        uplink=describe.uplink(outcome.uplink),
        mtu=outcome.mtu,
        devices=tuple(sorted(outcome.domain.links)),
        local=tuple(describe.described(wish, lacking) for wish in local),
        peers=tuple(describe.peers_of(outcome.view, lacking)),
        events=history(Path(wanted.subnet_file)),
    )


def _of_the_host(wanted: Options) -> Status:
    previous = subnet_file.read(Path(wanted.subnet_file))
    subnets = tuple(str(net) for net in previous.subnets if net is not None)
    return Status(
        network=NetworkStatus(tuple(RangeStatus(str(net), length) for net, length in previous.ranges)),
        lease=LeaseStatus(subnets) if subnets else None,
        events=history(Path(wanted.subnet_file)),
    )


def history(path: Path) -> tuple[EventStatus, ...]:
    """Return the events that the daemon keeps in a file beside its subnet file."""
    left = logs.read_events(subnet_file.beside(path, "events"))
    return tuple(EventStatus(*event) for event in left)


def last_words(told: Status) -> str:
    """Return the last error of the daemon's last run, else the end of its log; empty if that is unknown."""
    events = known(told.events) or ()
    for each in reversed(events):
        if each.severity in ("E", "F"):
            return f"its last error, {clock.utc_text(each.time)}: {each.text}"
        if each.source == "main" and each.text.startswith("flanneld "):  # its first line
            break
    return f"its log ends {clock.utc_text(events[-1].time)}: {events[-1].text}" if events else ""
