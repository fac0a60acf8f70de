"""Survey: one message to each of many hosts at once, and the answers.

A thousand hosts take as long as one that is silent. Messages are sent in small batches and answers read in
between, because a thousand answers at once overflow a socket's buffer.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from flanneld.model import FAMILIES, Family, IPAddress
from flanneld.network.query import icmp_echo, message
from flanneld.network.query.message import HEADERS, ORDINARY, TOKEN_LENGTH, Query
from flanneld.runtime import clock, waits
from flanneld.runtime.randomness import random_bytes

_BATCH = 32
#: Calls for one message: as many ICMP errors may arrive between two of them.
_ATTEMPTS = 5
_LONGEST = 65535
#: linux/in.h and linux/in6.h: level and option that deliver ICMP errors with the message that caused them.
_RECVERR: dict[Family, tuple[int, int]] = {4: (socket.IPPROTO_IP, 11), 6: (socket.IPPROTO_IPV6, 25)}
#: linux/in.h and linux/in6.h: level, option and value for packets in one piece (IP_PMTUDISC_PROBE).
_WHOLE: dict[Family, tuple[int, int, int]] = {4: (socket.IPPROTO_IP, 10, 3), 6: (socket.IPPROTO_IPV6, 23, 3)}
#: linux/in.h and linux/in6.h: level and option that limit the hops (IP_TTL, IPV6_UNICAST_HOPS).
_HOPS: dict[Family, tuple[int, int]] = {4: (socket.IPPROTO_IP, 2), 6: (socket.IPPROTO_IPV6, 16)}
#: linux/errqueue.h, struct sock_extended_err: error, origin, and type of the message. 1 is this host itself.
_EXTENDED_ERROR, _LOCAL = struct.Struct("=IBB"), 1
#: Type of ICMP's time exceeded. The kernel makes EHOSTUNREACH of it, as of an unreachable host.
_TIME_EXCEEDED: dict[Family, int] = {4: 11, 6: 3}
_SO_NO_CHECK = 11
#: Longest wait in seconds before it is asked again whether the answers are still wanted.
_NAP = 0.2


class Echo(Struct, frozen=True, gc=False):
    """Echo request of ``size`` bytes, IP header included, that travels in one piece."""

    target: IPAddress
    size: int

    @property
    def version(self) -> Family:
        return self.target.version


class Reply(Struct, frozen=True, gc=False):
    """Outcome for one host: ``rtt`` in seconds until an answer with ``facts``, or the ``error`` that came.

    ``error`` is an errno out of an ICMP error: ECONNREFUSED if nothing listens at the port, ETIME if a
    router got the message with no hop left.
    """

    rtt: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: int = 0

    @property
    def is_refusal(self) -> bool:
        """Return True if the host is there and the port is closed."""
        return self.error == errno.ECONNREFUSED

    @property
    def arrived(self) -> bool:
        """Return True if the message reached the host, whatever it answered."""
        return self.rtt is not None or self.is_refusal


SILENCE = Reply()


Target = TypeVar("Target", IPAddress, Echo, IPAddress | Echo)
Asked = TypeVar("Asked", contravariant=True)


class Channel(Protocol[Asked]):
    """Socket for one kind of message and one family."""

    def fileno(self) -> int: ...

    def send(self, target: Asked, token: bytes) -> None:
        """Send a message. Raises ``OSError``."""
        ...

    def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
        """Yield token, facts and errno of all that has arrived, without waiting."""
        ...

    def close(self) -> None: ...


class EchoChannel:
    """ICMP echo requests. Those to a bare address have ``size`` bytes, IP header included.

    ``hops`` limits the routers on the way, if it is not 0.
    """

    def __init__(self, family: Family, size: int = 0, hops: int = 0) -> None:
        self._family = family
        self._size = size
        self._socket = icmp_echo.new_socket(family)
        self._socket.setblocking(False)
        self._socket.setsockopt(*_RECVERR[family], 1)
        self._socket.setsockopt(*_WHOLE[family])
        if hops:
            self._socket.setsockopt(*_HOPS[family], hops)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, target: IPAddress | Echo, token: bytes) -> None:
        echo = target if isinstance(target, Echo) else Echo(target, self._size)
        padding = bytes(max(0, echo.size - icmp_echo.HEADERS[self._family] - TOKEN_LENGTH))
        self._socket.sendto(icmp_echo.request(self._family, token + padding), (str(echo.target), 0))

    def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
        is_raw = self._socket.type == socket.SOCK_RAW
        for code, data in _errors(self._socket, self._family):
            yield icmp_echo.request_token(self._family, data)[:TOKEN_LENGTH], {}, code
        with suppress(OSError):  # nothing is left, or an ICMP error, which comes with the next call
            while True:
                token = icmp_echo.token_of(self._family, self._socket.recv(_LONGEST), with_header=is_raw)
                yield token[:TOKEN_LENGTH], {}, 0

    def close(self) -> None:
        self._socket.close()


class QueryChannel:
    """Queries to the nodes' daemons.

    Sizes are in bytes with the headers. ``unsummed`` are the query and the answer without checksums.
    """

    def __init__(
        self,
        family: Family,
        port: int,
        size: int = ORDINARY,
        answer_size: int = ORDINARY,
        *,
        unsummed: tuple[bool, bool] = (False, False),
    ) -> None:
        self._family = family
        self._port = port
        self._size = size - HEADERS[family]
        self._answer_size = max(0, answer_size - HEADERS[family])
        self._unsummed_answer = unsummed[1]
        domain = socket.AF_INET if family == 4 else socket.AF_INET6
        self._socket = socket.socket(domain, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(*_RECVERR[family], 1)
        self._socket.setsockopt(*_WHOLE[family])
        if unsummed[0]:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, target: IPAddress, token: bytes) -> None:
        query = Query(token, self._answer_size, self._unsummed_answer)
        self._socket.sendto(query.encode(self._size), (str(target), self._port))

    def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
        for code, data in _errors(self._socket, self._family):
            yield message.token_of(data), {}, code
        with suppress(OSError):  # nothing is left, or an ICMP error, which comes with the next call
            while True:
                said = message.decode_answer(self._socket.recv(_LONGEST))
                if said:
                    yield *said, 0

    def close(self) -> None:
        self._socket.close()


def _errors(sock: socket.socket, family: Family) -> Iterator[tuple[int, bytes]]:
    """Yield the ICMP errors that have arrived, each with our own message, as far as it came back."""
    with suppress(BlockingIOError):
        while True:
            data, notes, *_ = sock.recvmsg(_LONGEST, 512, socket.MSG_ERRQUEUE)
            for _, _, note in notes:
                code, origin, kind = _EXTENDED_ERROR.unpack_from(note)
                if origin != _LOCAL:
                    yield errno.ETIME if kind == _TIME_EXCEEDED[family] else code, data


def echoes(
    targets: Iterable[Target], within: float, tries: int = 2, is_wanted: Callable[[], bool] = lambda: True
) -> dict[Target, Reply]:
    """Return each host's reply to an ICMP echo; silent hosts are asked again. Raises ``OSError``."""
    return _per_family(targets, EchoChannel, within, tries, is_wanted)


def passing(targets: Iterable[IPAddress], hops: int, within: float, tries: int = 2) -> set[IPAddress]:
    """Return the targets whose packets the router ``hops`` hops away would pass on. Raises ``OSError``.

    It reports a message with no hop left, even if it filters what is sent to itself.
    """
    replies = _per_family(targets, lambda family: EchoChannel(family, hops=hops), within, tries)
    return {
        target for target, reply in replies.items() if reply.error == errno.ETIME or reply.rtt is not None
    }


def queries(targets: Iterable[IPAddress], port: int, within: float, tries: int = 2) -> dict[IPAddress, Reply]:
    """Return the reply of each host's daemon; silent ones are asked again. Raises ``OSError``."""
    return _per_family(targets, lambda family: QueryChannel(family, port), within, tries)


def _per_family(
    targets: Iterable[Target],
    open_channel: Callable[[Family], Channel[Target]],
    within: float,
    tries: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> dict[Target, Reply]:
    wanted = tuple(dict.fromkeys(targets))
    found: dict[Target, Reply] = {}
    for family in FAMILIES:
        some = [target for target in wanted if target.version == family]
        if some:
            with closing(open_channel(family)) as channel:
                found |= survey(channel, some, within, tries, is_wanted)
    return found


def survey(
    channel: Channel[Target],
    targets: Sequence[Target],
    within: float,
    tries: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> dict[Target, Reply]:
    """Ask all targets, and the silent ones again. Each try ends ``within`` seconds after its last message.

    It ends early once the answers are no longer wanted.
    """
    asked: dict[bytes, tuple[Target, float]] = {}
    replies: dict[Target, Reply] = {}

    def take() -> None:
        for token, facts, error in channel.receive():
            target, sent = asked.get(token, (None, 0.0))
            if target is not None and replies.get(target, SILENCE).rtt is None:
                replies[target] = Reply(None, {}, error) if error else Reply(clock.now() - sent, facts)

    for _ in range(tries):
        silent = [target for target in targets if target not in replies]
        for number, target in enumerate(silent, 1):
            token = random_bytes(TOKEN_LENGTH)
            asked[token] = (target, clock.now())
            code = _send(channel, target, token)
            if code:
                replies[target] = Reply(error=code)
            if number % _BATCH == 0:
                take()
        deadline = clock.now() + within
        while any(target not in replies for target in silent) and (left := deadline - clock.now()) > 0:
            if not is_wanted():
                break
            waits.readable(channel.fileno(), min(left, _NAP))
            take()
    return {target: replies.get(target, SILENCE) for target in targets}


def _send(channel: Channel[Target], target: Target, token: bytes) -> int:
    """Send a message. Return 0, or the errno of a local refusal.

    An ICMP error for an earlier message makes the next call on the socket fail, too, whose host is another
    one. So a failure counts only if it is repeated.
    """
    code = 0
    for _ in range(_ATTEMPTS):
        try:
            channel.send(target, token)
        except OSError as failure:
            code = failure.errno or errno.EIO
        else:
            return 0
    return 0 if code == errno.ECONNREFUSED else code


def ask(channel: Channel[IPAddress], target: IPAddress, within: float) -> Reply:
    """Ask one host once."""
    return survey(channel, [target], within, 1)[target]
