"""charon, strongSwan's daemon for keys: client of its control socket, and its process.

Requests have a time limit; a connection of its own gets the events of its log. The process outlives the
daemon: this module looks it up, starts it, recognises it in the next run, and ends it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flanneld.backends.ipsec import vici
from flanneld.backends.ipsec.vici import PacketType, ReadSection, Section, ViciPacket
from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.network.processes import CHARON_PID_FILE
from flanneld.runtime import clock, waits

if TYPE_CHECKING:
    from flanneld.runtime.command import LastingProcess

#: Default path of charon's socket, which upstream uses, too.
SOCKET = "/var/run/charon.vici"
#: Seconds for one request. charon answers within milliseconds; a busy machine takes longer.
TIME_LIMIT = 10.0
#: Items in the answer to one request, at most: there are a few for each peer.
_MOST_ITEMS = 200_000
#: Log events to read at a time.
_AT_A_TIME = 1000
#: Paths used by distributions, in upstream's order, tried after PATH.
FOLDERS = ("/usr/lib/strongswan", "/usr/lib/ipsec", "/usr/libexec/strongswan", "/usr/libexec/ipsec")
#: Variable in the environment of a charon that a daemon has started: a digest of the settings then.
_MARK = "FLANNELD_CHARON"
#: Seconds for charon to notify its peers of its end, then until a killed process is gone; and between checks.
_END_LIMIT, _KILL_LIMIT, _LOOK = 2.0, 5.0, 0.01
#: Bytes of its output to read at a time.
_OUTPUT = 64 << 10
#: Variables of our environment that charon gets: others may contain passwords.
_PASSED = ("PATH", "LANG", "LD_LIBRARY_PATH", "STRONGSWAN_CONF", "LEAK_DETECTIVE_DISABLE", "TZ")


class NoCharon(Retryable):
    """Error if no process listens on the control socket."""


class CharonHangs(Retryable):
    """Error if charon did not answer in time."""


class CharonRefused(Retryable):
    """Error if charon answered with a refusal."""


class ViciConnection:
    """Connection to charon. Raises ``NoCharon``, ``CharonHangs``, ``CharonRefused`` and ``MalformedVici``."""

    def __init__(self, path: str = SOCKET, time_limit: float = TIME_LIMIT) -> None:
        self._time_limit = time_limit
        self._deadline = clock.now() + time_limit
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(time_limit)
            self._socket.connect(path)
        except OSError as failure:
            self._socket.close()
            raise _failure(failure) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, command: str, message: Section | None = None) -> ReadSection:
        """Make a request and return the answer. Raises ``CharonRefused`` for a refusal."""
        self._begin(PacketType.REQUEST, command, message)
        answer = self._receive()
        if answer.kind is not PacketType.RESPONSE:
            raise CharonRefused(f"charon does not know {command}", "use strongSwan 5.6 or later")
        if vici.text(answer.message, "success") == "no":
            reason = vici.text(answer.message, "errmsg") or "it gives no reason"
            raise CharonRefused(f"charon refused {command}: {reason}", "see what it logs")
        return answer.message

    def listing(self, command: str, event: str) -> Iterator[ReadSection]:
        """Make a request that is answered by one event per item. Yield the events."""
        self._expect(PacketType.REGISTER, event)
        self._begin(PacketType.REQUEST, command)
        for _ in range(_MOST_ITEMS):
            answer = self._receive()
            if answer.kind is not PacketType.EVENT:
                break
            if answer.name == event:
                yield answer.message
        else:
            raise vici.MalformedVici("a list without an end")
        if answer.kind is not PacketType.RESPONSE:
            raise CharonRefused(f"charon does not know {command}", "use strongSwan 5.6 or later")
        self._expect(PacketType.UNREGISTER, event)

    def _expect(self, kind: PacketType, event: str) -> None:
        self._begin(kind, event)
        while (answer := self._receive()).kind is PacketType.EVENT:
            pass
        if answer.kind is not PacketType.CONFIRM:
            raise CharonRefused(f"charon does not know the event {event}", "use strongSwan 5.6 or later")

    def _begin(self, kind: PacketType, name: str, message: Section | None = None) -> None:
        self._deadline = clock.now() + self._time_limit
        try:
            self._socket.settimeout(self._time_limit)
            self._socket.sendall(vici.pack(kind, name, message))
        except OSError as failure:
            raise _failure(failure) from None

    def _receive(self) -> ViciPacket:
        return vici.unpack(self._take(vici.length_of(self._take(4))))

    def _take(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            left = self._deadline - clock.now()
            try:
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                piece = self._socket.recv(length - len(data))
            except OSError as failure:
                raise _failure(failure) from None
            if not piece:
                raise NoCharon("charon closed the connection")
            data += piece
        return bytes(data)


class CharonEvents(ViciConnection):
    """Connection that receives charon's log events, and notices its exit. It never blocks once it is made."""

    def __init__(self, path: str = SOCKET) -> None:
        super().__init__(path)
        self._received = bytearray()
        try:
            self._expect(PacketType.REGISTER, "log")
        except BaseException:
            self.close()
            raise
        self._socket.setblocking(False)

    def heard(self) -> Iterator[ReadSection]:
        """Yield charon's new log lines. Raises ``NoCharon`` once it has exited."""
        for _ in range(_AT_A_TIME):
            try:
                piece = self._socket.recv(vici.LONGEST_PACKET)
            except BlockingIOError:
                return
            except OSError as failure:
                raise _failure(failure) from None
            if not piece:
                raise NoCharon("charon has ended")
            self._received += piece
            yield from self._packets()

    def _packets(self) -> Iterator[ReadSection]:
        while len(self._received) >= 4:
            end = 4 + vici.length_of(bytes(self._received[:4]))
            if len(self._received) < end:
                return
            packet = vici.unpack(bytes(self._received[4:end]))
            del self._received[:end]
            if packet.kind is PacketType.EVENT:
                yield packet.message


def ask(path: str, command: str, message: Section | None = None) -> ReadSection:
    """Make one request on a connection of its own."""
    with closing(ViciConnection(path)) as charon:
        return charon.ask(command, message)


def _failure(failure: OSError) -> Retryable:
    if isinstance(failure, TimeoutError | BlockingIOError):
        return CharonHangs("charon does not answer", "see what it does")
    return NoCharon(f"charon is not reached: {cause_of(failure)}")


def find_charon() -> str:
    """Return charon's path. Raises ``Fatal`` if it is not installed."""
    import shutil  # other backends only look for a charon that runs

    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
    found = shutil.which("charon", path=path)
    if found is None:
        problem = f"charon is neither in PATH nor in {', '.join(FOLDERS)}"
        remedy = (
            "install strongSwan with its VICI plug-in; on Debian: apt-get install strongswan-charon"
            " strongswan-swanctl libstrongswan-standard-plugins"
        )
        raise Fatal(problem, remedy)
    return found


def running_charon() -> int:
    """Return the pid of a charon that a daemon of this host has started, 0 if there is none."""
    with suppress(OSError, ValueError):
        pid = int(CHARON_PID_FILE.read_text())
        return pid if _mark_of(pid) is not None else 0
    return 0


class CharonProcess:
    """charon as started by this run or an earlier one. ``mark`` is a digest of the present settings.

    Its output before the first answer is kept to report why it does not start.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._pid = 0
        self._child: LastingProcess | None = None
        self._output = -1

    @property
    def pid(self) -> int:
        """Return its pid, 0 if it does not run."""
        if self._child is not None and self._child.pid == self._pid:
            # A child that ends loses its environment first. Until it is reaped, no other charon starts.
            return self._pid if self._child.status is None else 0
        return self._pid if self._pid and _mark_of(self._pid) is not None else 0

    @property
    def status(self) -> int | None:
        """Return its exit status, or the negative number of the signal that ended it; None if unknown."""
        return self._child.status if self._child else None

    def find_running(self) -> None:
        """Look for a charon of an earlier run, unless ours runs."""
        self._pid = self.pid or running_charon()

    def is_outdated(self) -> bool:
        """Return True if it runs with other settings, or an upgrade has replaced its program."""
        pid = self.pid
        if not pid:
            return False
        with suppress(OSError):
            if str(Path(f"/proc/{pid}/exe").readlink()).endswith(" (deleted)"):
                return True
        return _mark_of(pid) != self._mark

    def start(self) -> None:
        """Start it. Raises ``Fatal`` if it is not installed, ``Retryable`` if it does not start."""
        from flanneld.runtime.command import LastingProcess

        path = find_charon()
        _remove_stale_pid_file()
        output = self._new_output()
        environment = {name: value for name, value in os.environ.items() if name in _PASSED}
        try:
            self._child = LastingProcess([path], environment | {_MARK: self._mark}, output)
        except OSError as failure:
            raise Retryable(f"charon does not start: {cause_of(failure)}") from None
        finally:
            os.close(output)
        self._pid = self._child.pid

    def output(self) -> str:
        """Return the last line of output since the last call; empty without one."""
        data = b""
        with suppress(BlockingIOError):
            while self._output >= 0 and (piece := os.read(self._output, _OUTPUT)):
                data = piece
        lines = data.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _new_output(self) -> int:
        """Return the write end of a pipe that never blocks charon: excess output is lost.

        charon buffers up to 4 KiB of its output, even in mid-line. So our log does not use it.
        """
        self.close()
        self._output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return output

    def kill(self) -> None:
        """Send SIGKILL if it runs, without a notice to its peers."""
        if _send(self.pid, signal.SIGKILL):
            waits.until(self._is_over, within=_KILL_LIMIT, every=_LOOK)

    def end(self) -> None:
        """Send SIGTERM, so that charon ends its SAs; kill it if it is still there after 2 s."""
        if _send(self.pid, signal.SIGTERM) and not waits.until(self._is_over, within=_END_LIMIT, every=_LOOK):
            self.kill()

    def close(self) -> None:
        """Release the pipe. The process goes on: charon ignores SIGPIPE."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _is_over(self) -> bool:
        return self.pid == 0


def end_running(pid: int) -> bool:
    """Send SIGTERM to a charon that ``running_charon`` has found. Return False if it cannot be sent."""
    return _mark_of(pid) is None or _send(pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> bool:
    with suppress(OSError):
        if pid:
            os.kill(pid, number)
            return True
    return False


def _mark_of(pid: int) -> str | None:
    """Return the mark in a process's environment; None without one, and for a process that has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == _MARK.encode():
                return value.decode(errors="replace")
    return None


def _remove_stale_pid_file() -> None:
    """Remove the pid file if its pid now belongs to another program, as after a container's restart."""
    with suppress(OSError, ValueError):
        pid = int(CHARON_PID_FILE.read_text())
        with suppress(FileNotFoundError):
            if "charon" in Path(f"/proc/{pid}/comm").read_text():
                return
        CHARON_PID_FILE.unlink()
