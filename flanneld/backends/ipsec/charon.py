"""Client of charon's control socket: requests with a time limit, and events of its log."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import Self

from flanneld.backends.ipsec import vici
from flanneld.backends.ipsec.vici import PacketType, ReadSection, Section, ViciPacket
from flanneld.errors import Retryable, cause_of
from flanneld.runtime import clock

#: Default path of charon's socket, which upstream uses, too.
SOCKET = "/var/run/charon.vici"
#: Seconds for one request. charon answers within milliseconds; a busy machine takes longer.
TIME_LIMIT = 10.0
#: Items in the answer to one request, at most: there are a few for each peer.
_MOST_ITEMS = 200_000
#: Log events to read at a time.
_AT_A_TIME = 1000


class NoCharon(Retryable):
    """Error if no process listens on the control socket."""


class CharonHangs(Retryable):
    """Error if charon did not answer in time."""


class CharonRefused(Retryable):
    """Error if charon answered with a refusal."""


class ViciConnection:
    """Connection to charon. Raises ``NoCharon``, ``CharonHangs``, ``CharonRefused`` and ``Malformed``."""

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
    return NoCharon(f"charon is not reached: {cause_of(failure) or os.strerror(failure.errno or 0)}")
