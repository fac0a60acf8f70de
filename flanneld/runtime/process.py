"""This process: streams, descriptors, interpreter; its service manager; locks against a second daemon.

The service manager is notified by systemd's protocol (sd_notify(3), sd_watchdog_enabled(3)). Locks are on one
subnet file, and on what only one daemon of a host can have. The kernel releases them when the process ends in
any way. Child processes do not inherit them: the udp proxy outlives the daemon.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import math
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from flanneld.compat.flags import quoted
from flanneld.errors import Cancelled, Fatal, Retryable, cause_of
from flanneld.runtime import clock
from flanneld.runtime.clock import random_bytes
from flanneld.runtime.logs import Once

log = logging.getLogger(__name__)

#: File descriptors needed: the daemon holds 15, a request or a command takes 10 more.
_NEEDED = 64
#: File descriptors of a daemon with 64 networks, 20 each, and the connections of its servers.
_WANTED = 4096
#: Seconds until a running thread yields. An event passes two threads to the kernel, so Python's 5 ms are too
#: long.
_SWITCH_INTERVAL = 0.0001
#: The same for each of several networks. All threads that wait for the interpreter wake after each interval,
#: which takes CPU time from the one that runs: docs/adr/0012-several-networks.md has figures.
_SWITCH_INTERVAL_OF_NETWORK = 0.0004


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: otherwise a socket could get their number, and the log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # Python sets them to None for streams closed at start.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def ensure_descriptors() -> None:
    """Raise the soft limit of file descriptors if it is low. Raises ``Fatal`` if the hard limit is, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _WANTED:
        return
    wanted = _WANTED if hard == unlimited else min(_WANTED, hard)
    if wanted < _NEEDED:
        raise Fatal(
            f"this process may have {wanted} file descriptors, and flanneld needs {_NEEDED}",
            "raise the limit: ulimit -n, or LimitNOFILE= of the service",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tune_interpreter() -> None:
    """Shorten the thread switch interval, and exempt all modules from garbage collection."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()


def share_interpreter(networks: int) -> None:
    """Set the thread switch interval of this process by the number of its networks."""
    sys.setswitchinterval(max(_SWITCH_INTERVAL, networks * _SWITCH_INTERVAL_OF_NETWORK))


def trim_memory() -> None:
    """Return unused memory of the C library's heap to the kernel, where the library can (malloc_trim(3)).

    Lists of all leases and dumps of the kernel's tables leave a heap that is large and mostly empty.
    """
    from ctypes import CDLL  # rarely needed, and takes 1 MiB

    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


#: Seconds: limit for a service manager that does not read.
SEND_TIME = 0.5
#: Characters of a status. systemd takes no message above 4096 bytes.
STATUS_LENGTH = 1000


class Notifier:
    """Notifier of the service manager; does nothing without $NOTIFY_SOCKET.

    No call raises: a message that cannot be sent is lost, and the first loss is logged.
    """

    def __init__(self) -> None:
        self._complained = False
        self._status = ""
        #: True until the service manager has been told that we are ready.
        self._owes_ready = False

    def ready(self) -> None:
        self._owes_ready = not self._send("READY=1")

    def try_again(self) -> None:
        """Send ``ready`` again if it was lost: without it the service manager ends this daemon in time."""
        if self._owes_ready:
            self.ready()

    def status(self, text: str) -> None:
        """Send one line for ``systemctl status``. Non-ASCII text is escaped: sdnotify would lose it."""
        line = " ".join(text.split()).encode("unicode_escape").decode("ascii")[:STATUS_LENGTH]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        """Send a message. Return False if it is lost."""
        if not os.environ.get("NOTIFY_SOCKET"):
            return True
        try:
            from sdnotify import SystemdNotifier

            # One connection per message, so that a restart of the receiver does no harm.
            manager = SystemdNotifier(debug=True)
            with manager.socket:
                manager.socket.settimeout(SEND_TIME)
                manager.notify(message)
        except (ImportError, OSError) as error:
            self._complain(message, error)
            return False
        return True

    def _complain(self, message: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            address = os.environ.get("NOTIFY_SOCKET")
            log.warning("cannot send %s to the service manager at %s: %s", message, address, error)


def watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Return half the watchdog timeout of the service manager in seconds, None if it has none."""
    usec = environ.get("WATCHDOG_USEC", "")
    if not usec or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (usec.isascii() and usec.isdigit() and len(usec) <= 20 and int(usec) > 0):
        log.warning("no watchdog: WATCHDOG_USEC is %s, which is no number of microseconds", quoted(usec))
        return None
    return min(int(usec) / 2_000_000, threading.TIMEOUT_MAX)


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
        return Holder(_claim_of(name), *peer_of(asker))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid of the process that listens, 0 if it is in another PID namespace, and its user."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
