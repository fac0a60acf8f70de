"""Survey: one message to each of many hosts at once, and the answers.

A thousand hosts take as long as one that is silent. Messages are sent in small batches and answers read in
between, because a thousand answers at once overflow a socket's buffer.

The messages are queries (``flanneld.network.query``), ICMP echo (RFC 792, RFC 4443 section 4), also to find
the largest packet that a path carries, and messages to a port that a host may refuse, by ICMP or with a RST.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from flanneld.model import FAMILIES, Family, IPAddress
from flanneld.network.query import (
    ECHO_REPLY,
    HEADERS,
    ORDINARY,
    TOKEN_LENGTH,
    Query,
    decode_answer,
    echo_request,
    echo_token,
    requested_token,
    token_of,
)
from flanneld.network.socket_filters import pass_echo_replies
from flanneld.runtime import clock, waits
from flanneld.runtime.clock import random_bytes


def ping_socket(family: Family, identifier: int) -> socket.socket:
    """Return a ping socket if net.ipv4.ping_group_range permits it, else a raw one that is filtered alike."""
    domain = socket.AF_INET if family == 4 else socket.AF_INET6
    protocol = socket.IPPROTO_ICMP if family == 4 else socket.IPPROTO_ICMPV6
    try:
        return socket.socket(domain, socket.SOCK_DGRAM, protocol)
    except OSError:
        raw = socket.socket(domain, socket.SOCK_RAW, protocol)
        pass_echo_replies(raw, ECHO_REPLY[family], identifier)
        return raw


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
        """Return True if the message reached the host, which answered or refused it."""
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

    ``hops`` limits the routers on the way, if it is not 0. They are sent from ``source`` if there is one.
    """

    def __init__(self, family: Family, size: int = 0, hops: int = 0, source: IPAddress | None = None) -> None:
        self._family = family
        self._size = size
        # A new connection for the packet filters: new rules, as those of NAT, spare the packets of old ones.
        self._identifier = int.from_bytes(random_bytes(2), "big")
        self._socket = ping_socket(family, self._identifier)
        self._socket.setblocking(False)
        self._socket.setsockopt(*_RECVERR[family], 1)
        self._socket.setsockopt(*_WHOLE[family])
        if hops:
            self._socket.setsockopt(*_HOPS[family], hops)
        if source:
            self._socket.bind((str(source), 0))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, target: IPAddress | Echo, token: bytes) -> None:
        echo = target if isinstance(target, Echo) else Echo(target, self._size)
        padding = bytes(max(0, echo.size - HEADERS[self._family] - TOKEN_LENGTH))
        message = echo_request(self._family, token + padding, self._identifier)
        self._socket.sendto(message, (str(echo.target), 0))

    def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
        is_raw = self._socket.type == socket.SOCK_RAW
        for code, data in _errors(self._socket, self._family):
            yield requested_token(self._family, data)[:TOKEN_LENGTH], {}, code
        with suppress(OSError):  # nothing is left, or an ICMP error, which comes with the next call
            while True:
                token = echo_token(self._family, self._socket.recv(_LONGEST), with_header=is_raw)
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
            yield token_of(data), {}, code
        with suppress(OSError):  # nothing is left, or an ICMP error, which comes with the next call
            while True:
                said = decode_answer(self._socket.recv(_LONGEST))
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


def passing(
    targets: Iterable[IPAddress],
    hops: int,
    within: float,
    tries: int = 2,
    sources: Mapping[Family, IPAddress] = MappingProxyType({}),
    errors: Collection[int] = (errno.ETIME,),
) -> set[IPAddress]:
    """Return the targets that answer, or whose router ``hops`` hops away does. Raises ``OSError``.

    It reports a message with no hop left, even if it filters what is sent to itself. ``errors`` are the
    errnos of reports that count.
    """
    replies = _per_family(
        targets, lambda family: EchoChannel(family, hops=hops, source=sources.get(family)), within, tries
    )
    return {target for target, reply in replies.items() if reply.error in errors or reply.rtt is not None}


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
    """Send a message to each target, and again to the silent ones. Return their replies.

    Each try ends ``within`` seconds after its last message, and early once the answers are no longer wanted.
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
        take()  # on a busy host this process may sleep beyond the deadline, and the answers are there
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
    """Send one message to a host. Return the reply."""
    return survey(channel, [target], within, 1)[target]


#: tcpmux, at which nothing listens: a host that drops ICMP still refuses it, and so shows that it is reached.
_CLOSED = 1
#: Sockets at once; a process may have 1,024 descriptors.
_MOST = 500


def reached(targets: Iterable[IPAddress], within: float, hops: int = 0) -> set[IPAddress]:
    """Return the hosts that refuse TCP: packets get there and back. Of many the first 500 are asked."""
    return refused(((each, _CLOSED) for each in islice(targets, _MOST)), within, socket.SOCK_STREAM, hops)


def refused(
    targets: Iterable[tuple[IPAddress, int]], within: float, kind: int = socket.SOCK_DGRAM, hops: int = 0
) -> set[IPAddress]:
    """Send an empty datagram or SYN to each target; return the hosts that refuse it ``within`` seconds.

    An open port gives no answer, and neither does a filter that drops: only a refusal tells something.
    With one hop it comes from this host itself, or the next.
    """
    found: set[IPAddress] = set()
    waiting: dict[int, tuple[IPAddress, socket.socket]] = {}
    with ExitStack() as stack:
        for address, port in targets:
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            try:  # a kernel without IPv6 has no such sockets
                asker = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK))
                if hops:
                    asker.setsockopt(*_HOPS[address.version], hops)
                asker.connect((str(address), port))
                asker.send(b"")
            except BlockingIOError:  # TCP goes on connecting
                pass
            except ConnectionRefusedError:
                found.add(address)
                continue
            except OSError:
                continue
            waiting[asker.fileno()] = (address, asker)
        deadline, is_over = clock.now() + within, False
        while waiting and not is_over:
            left = deadline - clock.now()
            is_over = left <= 0  # one more look: on a busy host this process may sleep beyond the deadline
            for fd in waits.some_readable(waiting, max(0.0, left)):
                address, asker = waiting.pop(fd)
                try:
                    asker.recv(1)
                except ConnectionRefusedError:
                    found.add(address)
                except OSError:
                    continue
    return found


#: What every host takes in one piece (RFC 791, RFC 8200).
SMALLEST: dict[Family, int] = {4: 576, 6: 1280}
#: Sizes of one path that are asked at once: of 9,000 sizes three rounds find one.
_SIZES = 32
#: Seconds until a packet counts as lost: where a search is asked for, and where it is a look in passing.
_WITHIN, _BRIEFLY = 1.0, 0.3


#: A path by its number, and a size.
Sized = tuple[int, int]


def largest(
    ranges: Sequence[tuple[int, int]], carried: Callable[[list[Sized], bool], Collection[Sized]]
) -> list[int | None]:
    """Return for each path the largest size of its range that is carried, None if none is (pure).

    ``carried`` asks some sizes at once, with patience if it is told so: the smallest size that seemed to be
    lost is asked once more, and after an answer all further ones; and so is the largest, in case that only
    a limit of their rate dropped the others.
    """
    low, high = [least - 1 for least, _ in ranges], [most + 1 for _, most in ranges]
    is_patient = False
    while True:
        asked = [(path, size) for path in range(len(ranges)) for size in _between(low[path], high[path])]
        if not asked and not is_patient:
            is_patient = True
            whole = [(path, most) for path, (_, most) in enumerate(ranges) if high[path] <= most]
            asked = [*whole, *((path, high[path]) for path, most in whole if high[path] < most)]
        if not asked:
            break
        answered = carried(asked, is_patient)
        for path, (_, most) in enumerate(ranges):
            low[path] = max([low[path], *(size for at, size in answered if at == path)])
            lost = [size for at, size in asked if at == path and size > low[path]]
            high[path] = min([high[path] if low[path] < high[path] else most + 1, *lost])
    return [size if size >= least else None for size, (least, _) in zip(low, ranges, strict=True)]


def _between(low: int, high: int) -> list[int]:
    """Return some sizes between two, without these."""
    return sorted({*range(low + 1, high, (high - low) // _SIZES + 1), *range(max(low + 1, high - 1), high)})


def glance_at_mtu(questions: Sequence[tuple[IPAddress, int]]) -> list[int | None]:
    """Return for each target the wanted size if the path carries that, else a size that it carries.

    None stands for no answer at all. Every packet is sent at most twice. Raises ``OSError``.
    """
    pairs = [
        (Echo(target, min(SMALLEST[target.version], required)), Echo(target, required))
        for target, required in questions
    ]
    asked = {each for pair in pairs for each in pair}
    answered = _answered(asked, _BRIEFLY)
    # A busy node may take long; only what seems to be lost is waited for.
    answered |= _answered(asked - answered, _WITHIN)
    return [next((each.size for each in (full, least) if each in answered), None) for least, full in pairs]


def _answered(asked: Collection[Echo], within: float, tries: int = 1) -> set[Echo]:
    return {question for question, reply in echoes(asked, within, tries).items() if reply.rtt is not None}


#: Packets of one look for random losses.
SAMPLE = 10


def losses_of_sample(targets: Iterable[IPAddress]) -> dict[IPAddress, tuple[int, int]]:
    """Return for each target the lost ones of ``SAMPLE`` small packets: up to the last answer, and after it.

    A limit of the rate of ICMP drops the latter; others are lost at random. Raises ``OSError``.
    """
    sizes = {each: range(SMALLEST[each.version], SMALLEST[each.version] - SAMPLE, -1) for each in targets}
    asked = [Echo(each, sizes[each][number]) for number in range(SAMPLE) for each in sizes]
    answered, found = _answered(asked, _WITHIN), {}
    for target in sizes:
        arrived = [Echo(target, size) in answered for size in sizes[target]]
        after = arrived[::-1].index(True) if any(arrived) else SAMPLE
        found[target] = arrived.count(False) - after, after
    return found


def unanswered(target: IPAddress, largest: int) -> int:
    """Return how many of ``SAMPLE`` packets get no answer: small ones, and one of the ``largest`` size.

    A single one may be lost by chance, and is sent once more. Raises ``OSError``.
    """
    small = min(SMALLEST[target.version], largest - 1)
    asked = {Echo(target, size) for size in (largest, *range(small, small - SAMPLE + 1, -1))}
    lost = asked - _answered(asked, _WITHIN)
    if len(lost) == 1:
        lost -= _answered(lost, _WITHIN)
    return len(lost)


def path_mtus(questions: Sequence[tuple[IPAddress, int]]) -> list[int | None]:
    """Return for each target the path MTU, at most the wanted size; None if it does not answer.

    All are asked at once, which takes 2 s where larger packets vanish. Raises ``OSError``.
    """

    def carried(asked: list[Sized], is_patient: bool) -> set[Sized]:
        echoes_of = {each: Echo(questions[each[0]][0], each[1]) for each in asked}
        answered = _answered(set(echoes_of.values()), _WITHIN if is_patient else _BRIEFLY)
        return {each for each, echo in echoes_of.items() if echo in answered}

    ranges = [(min(SMALLEST[target.version], required), required) for target, required in questions]
    return largest(ranges, carried)
