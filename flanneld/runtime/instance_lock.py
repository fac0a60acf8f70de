"""Locks against a second daemon: of one subnet file, and of what only one daemon of a host can have.

The kernel releases them when the process ends in any way. Child processes do not inherit them: the udp proxy
outlives the daemon.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from flanneld.errors import Cancelled, Fatal, Retryable, cause_of
from flanneld.runtime import clock
from flanneld.runtime.complaints import Once
from flanneld.runtime.randomness import random_bytes

log = logging.getLogger(__name__)

#: Seconds. In a DaemonSet's surge update the old pod has 30 s to end, and takes less than one.
PATIENCE = 30.0
#: Seconds between attempts.
_PAUSE = 0.1
#: Seconds between two calls of ``HostClaims.drain``, at most.
DRAIN = 1.0
#: Beginning of the abstract names of claims.
CLAIM_PREFIX = "flanneld/"
#: linux/net.h, __SO_ACCEPTCON: flags of a listening socket in /proc/net/unix.
_LISTENS = "00010000"
#: linux/socket.h, struct ucred: pid, uid, gid.
_UCRED = struct.Struct("=iII")


class InstanceLock:
    """Exclusive lock on ``path``, held until ``close`` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def wait(
        self, stop: threading.Event, within: float = PATIENCE, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take the lock, waiting for another daemon to end; ``tell`` gets one line about it.

        Raises ``Fatal`` after ``within`` seconds, ``Cancelled`` on a stop. If the file cannot be created, as
        on a read-only file system, there is no lock.
        """
        deadline = clock.now() + within
        is_said = False
        while not self.try_take():
            if clock.now() >= deadline:
                raise Fatal(
                    f"another flanneld has held {self._path} for {within:g} s",
                    f"stop it (find it with: fuser {self._path}), or give this one its own -subnet-file",
                )
            if not is_said:
                line = f"Another flanneld holds {self._path}: waiting up to {within:g} s for it to end"
                log.warning("%s", line)
                tell(line)
                is_said = True
            if stop.wait(_PAUSE):
                raise Cancelled

    def try_take(self, *, create: bool = True) -> bool:
        """Take the lock now. Return False if another process holds it, True also if the file cannot exist."""
        while True:
            try:
                if create:
                    self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * create, 0o600)
            except FileNotFoundError:
                return True
            except OSError as error:
                log.warning("No lock at %s against a second daemon: %s", self._path, error.strerror)
                return True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                log.warning("No lock at %s against a second daemon: %s", self._path, error.strerror)
                return True
            if _is_at(self._path, descriptor):
                self._descriptor = descriptor
                return True
            os.close(descriptor)  # -cleanup removed it between our open and our lock

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


class Holder(Struct, frozen=True, gc=False):
    """Process that has a claim; ``pid`` is 0 if it is in another PID namespace."""

    claim: str
    pid: int
    uid: int

    @property
    def counts(self) -> bool:
        """Return False for an ordinary user, who may bind any name."""
        return self.uid in (0, os.geteuid())

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "a process in another PID namespace"


class HostClaims:
    """Claims of this process to what only one daemon of a host can have: one abstract socket for each.

    Abstract names belong to a network namespace, as devices, routes, ports and rules do. So they show a
    daemon in another container as well, whatever its PID and mount namespaces. The kernel releases them when
    the process ends, also after kill -9. Any user can bind a name: only root's processes and those of our
    user count (SO_PEERCRED, unix(7)). If another user has the usual name, we append a random number. A user
    who fills our queue of connections again and again hides us, and that is all.

    Go's daemons have no such sockets. ``within`` is the time in seconds to wait for another daemon to end.
    """

    def __init__(self, within: float = math.inf) -> None:
        self._within = within
        self._deadline: float | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._once = Once()

    def take(self, wanted: Sequence[str], clash: Callable[[str, str], bool]) -> None:
        """Take all claims, or none. ``clash`` says if two exclude each other.

        Raises ``Retryable`` while another process has one, ``Fatal`` once it has been so for too long.
        """
        self.close()
        try:
            found = map(self._bind, wanted)
            holder = next(filter(None, found), None) or next(self._rivals(wanted, clash), None)
        except OSError as failure:
            self.close()
            log.warning("No claims against a second daemon on this host: %s", cause_of(failure))
            return
        if holder is None:
            self._deadline = None
            return
        self.close()
        now = clock.now()
        self._deadline = now + self._within if self._deadline is None else self._deadline
        is_over = now >= self._deadline
        has = f"has had {holder.claim} for {self._within:g} s" if is_over else f"has {holder.claim}"
        raise (Fatal if is_over else Retryable)(
            f"another flanneld, {holder}, {has}",
            f"stop it (find it with: ss -xlp | grep {CLAIM_PREFIX}), or give this one a network of its own",
        )

    def drain(self) -> None:
        """Drop the connections of processes that asked who we are: the kernel queues a limited number."""
        for each in self._sockets.values():
            with suppress(OSError):
                while True:
                    each.accept()[0].close()

    def close(self) -> None:
        """Release all claims."""
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def _bind(self, claim: str) -> Holder | None:
        """Bind the name of a claim. Return its holder instead if that counts. Raises ``OSError``."""
        own, name = socket.socket(socket.AF_UNIX), CLAIM_PREFIX + claim
        own.setblocking(False)
        try:
            own.bind(f"\0{name}")
        except OSError as failure:
            holder = _holder(name) if failure.errno == errno.EADDRINUSE else None
            if failure.errno != errno.EADDRINUSE or (holder and holder.counts):
                own.close()
                if holder:
                    return holder
                raise
            who = f"{holder} of user {holder.uid}" if holder else "a socket that answers nobody"
            self._once.warn(
                log, claim, f"Ignored a claim to {claim}: {who}; only root and our user can have it"
            )
            name = f"{name}#{random_bytes(8).hex()}"
            own.bind(f"\0{name}")
        own.listen(socket.SOMAXCONN)
        self._sockets[name] = own
        return None

    def _rivals(self, wanted: Sequence[str], clash: Callable[[str, str], bool]) -> Iterator[Holder]:
        return holders(
            lambda name, claim: name not in self._sockets and any(clash(claim, own) for own in wanted)
        )


def holders(concerns: Callable[[str, str], bool] = lambda _name, _claim: True) -> Iterator[Holder]:
    """Yield the holders of claims in this network namespace that count.

    ``concerns`` chooses by a socket's name and its claim. Raises ``OSError``.
    """
    for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines():
        # num, reference count, protocol, flags, type, state, inode, name; connections have the name, too.
        columns = line.split(maxsplit=7)
        name = columns[-1].removeprefix("@") if columns[3:4] == [_LISTENS] else ""
        if name.startswith(CLAIM_PREFIX) and concerns(name, _claim_of(name)):
            holder = _holder(name)
            if holder is not None and holder.counts:
                yield holder


def is_claimed(claim: str) -> bool:
    """Return True if a process in this network namespace has a claim that counts."""
    with suppress(OSError):
        return any(holders(lambda _, found: found == claim))
    return False


def _claim_of(name: str) -> str:
    return name.removeprefix(CLAIM_PREFIX).partition("#")[0]


def _holder(name: str) -> Holder | None:
    """Return the process that listens at a name; None if it is gone, or its queue is full."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.setblocking(False)
        try:
            asker.connect(f"\0{name}")
        except OSError:
            return None
        credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    return Holder(_claim_of(name), pid, uid)
