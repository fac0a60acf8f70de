"""A watch of the JSON gateway: an HTTP answer that does not end, in whatever pieces it comes."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.subnet.etcd.carriers import GatewayStream
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers
from flanneld.subnet.failover import ServerFailed
from tests.lab.listener import Listener
from tests.unit.mutations import tampered_bytes

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n"


class Etcd:
    """A server that says what a test has it say: bytes, None ends the connection."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._listener = Listener(self._serve, ("127.0.0.1", 0))

    def __enter__(self) -> Self:
        self._listener.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._answers.put(None)
        self._listener.__exit__(*failure)

    def say(self, *answers: bytes | None) -> None:
        for answer in answers:
            self._answers.put(answer)

    @contextmanager
    def watched(self, read: float = 60.0) -> Iterator[GatewayStream]:
        servers = Servers(EtcdOptions((self._listener.url,)))
        stream = GatewayStream(servers, EtcdTimeouts(read=read), {})
        try:
            stream.open(servers.current, {"x": 1}, "token")
            yield stream
        finally:
            stream.close()

    def _serve(self, connection: socket.socket) -> None:
        request = b""
        while not request.endswith(b"}"):
            request += connection.recv(65536)
        self.asked.put(request)
        while (answer := self._answers.get()) is not None:
            connection.sendall(answer)


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    with Etcd() as etcd:
        yield etcd


def line(number: int) -> bytes:
    return b'{"result":{"TTL":"%d"}}\n' % number


def chunks(data: bytes, size: int = 1 << 16, note: bytes = b"") -> bytes:
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), note, piece) for piece in pieces)


def numbers(stream: GatewayStream, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [each.TTL for each in stream.read(60, count - len(found))]
    return found


@pytest.mark.parametrize(
    ("head", "coded"),
    [
        (CHUNKED, lambda data: chunks(data, 9)),
        (CHUNKED, lambda data: chunks(data, 64, b";note")),
        (PLAIN, lambda data: data),
    ],
    ids=["chunks", "extensions", "plain"],
)
def test_lines_come_one_by_one_and_silence_is_no_end(etcd: Etcd, head: bytes, coded: object) -> None:
    assert callable(coded)
    etcd.say(head + coded(line(1) + b"\n" + line(2)))
    with etcd.watched() as stream:
        request = etcd.asked.get(timeout=60)
        assert request.startswith(b"POST /v3/watch HTTP/1.1\r\n")
        assert b"\r\nAuthorization: token\r\n" in request
        assert b"\r\nGrpc-Metadata-hasleader: true\r\n" in request
        assert json.loads(request.partition(b"\r\n\r\n")[2]) == {"x": 1}
        assert numbers(stream, 2) == [1, 2]
        assert not stream.read(0.01)
        etcd.say(coded(line(3)), None)
        assert numbers(stream, 1) == [3]
        with pytest.raises(ServerFailed):
            stream.read(60)


@given(st.lists(st.integers(0, 400), max_size=8))
def test_lines_are_put_together_wherever_they_were_cut(cuts: list[int]) -> None:
    data = CHUNKED + chunks(b"".join(map(line, range(5))), 17)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with Etcd() as etcd:
        etcd.say(*(data[low:high] for low, high in itertools.pairwise(bounds)))
        with etcd.watched() as stream:
            assert numbers(stream, 5) == list(range(5))


@pytest.mark.parametrize("last", [line(7), line(7).rstrip()], ids=["whole", "without its end"])
def test_last_line_is_heard_though_the_end_comes_with_it(etcd: Etcd, last: bytes) -> None:
    etcd.say(CHUNKED + chunks(last) + b"0\r\n\r\n")
    with etcd.watched() as stream:
        assert numbers(stream, 1) == [7]
        with pytest.raises(ServerFailed):
            stream.read(60)


def test_silence_in_the_middle_of_a_line_loses_nothing(etcd: Etcd) -> None:
    data = CHUNKED + chunks(line(8))
    etcd.say(data[:-10])
    with etcd.watched() as stream:
        assert not stream.read(0.01)
        etcd.say(data[-10:])
        assert numbers(stream, 1) == [8]


def test_stall_is_told_with_the_time_limit_though_nobody_waits(etcd: Etcd) -> None:
    etcd.say(CHUNKED + chunks(line(1)) + b"1")
    with etcd.watched(read=0.5) as stream:
        assert numbers(stream, 1) == [1]
        with pytest.raises(ServerFailed, match=r"no answer within 0\.5 s"):
            stream.read(0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "does not speak HTTP"),
        (b"x" * 70_000, "does not speak HTTP"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "HTTP 503 to a watch"),
    ],
)
def test_invalid_answer_to_a_watch_is_reported(etcd: Etcd, answer: bytes, said: str) -> None:
    etcd.say(answer, None)
    with pytest.raises(ServerFailed, match=said), etcd.watched():
        pass


@pytest.mark.parametrize("data", [b"nonsense\r\n", b"-5\r\n", b"1" * 70_000, b"1;" + b"x" * 70_000 + b"\r\n"])
def test_invalid_chunk_is_an_error(etcd: Etcd, data: bytes) -> None:
    etcd.say(CHUNKED + data, None)
    with etcd.watched() as stream, pytest.raises(ServerFailed):
        stream.read(60)


@given(tampered_bytes([CHUNKED + chunks(line(1)) * 2, CHUNKED + chunks(line(1)) * 2 + b"0\r\n\r\n"]))
@example(CHUNKED + b'17\r\n{"\x80esult":{"TTL":"1"}}\n\r\n')
def test_tampered_stream_gives_objects_until_it_ends(data: bytes) -> None:
    def hear_all(etcd: Etcd) -> None:
        with etcd.watched() as stream:
            while stream.read(60):
                pass

    with Etcd() as etcd:
        etcd.say(data, None)
        with pytest.raises((ServerFailed, Retryable)):
            hear_all(etcd)


def test_line_without_end_is_refused_before_it_fills_the_memory(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flanneld.runtime.sockets.http_connection.LONGEST_LINE", 1000)
    etcd.say(CHUNKED + b"1000\r\n" + b"x" * 2000)
    with etcd.watched() as stream, pytest.raises(Retryable, match="without end"):
        stream.read(60)


def test_tiny_chunks_take_no_time(etcd: Etcd) -> None:
    padding = b" " * 50_000
    etcd.say(CHUNKED + chunks(padding + line(9), 1))
    begin = time.process_time()
    with etcd.watched() as stream:
        assert numbers(stream, 1) == [9]
    assert time.process_time() - begin < 4.0


def test_cut_ends_a_wait_at_once(etcd: Etcd) -> None:
    etcd.say(CHUNKED)
    with etcd.watched() as stream:
        threading.Timer(0.05, stream.cancel).start()
        begin = time.monotonic()
        with pytest.raises(ServerFailed):
            stream.read(60)
        assert time.monotonic() - begin < 10
