"""An HTTP answer that does not end, in whatever pieces it comes."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from http.client import HTTPException

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.subnet.etcd.v3.stream import Chunks, Stream

URL = "http://etcd:2379/v3/watch"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the socket of its server."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        yield Stream(ours), theirs


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_chunks_are_put_together_wherever_they_were_cut(pieces: list[bytes], cuts: list[int]) -> None:
    coded = b"".join(b"%x;note\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    bounds = [0, *sorted(min(cut, len(coded)) for cut in cuts), len(coded)]
    chunks = Chunks()
    got = b"".join(chunks.feed(coded[low:high]) for low, high in itertools.pairwise(bounds))
    assert got == b"".join(pieces)


@pytest.mark.parametrize("data", [b"nonsense\r\n", b"-5\r\n", b"1" * 70_000])
def test_what_is_no_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(HTTPException):
        Chunks().feed(data)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (CHUNKED, b'4\r\n{"a"\r\n11\r\n:1}\n\n{"b":2}\n{"c"\r\n4\r\n:3}\n\r\n'),
        (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n", b'{"a":1}\n\n{"b":2}\n{"c":3}\n'),
    ],
)
def test_lines_come_one_by_one(ends: tuple[Stream, socket.socket], head: bytes, body: bytes) -> None:
    stream, etcd = ends
    etcd.sendall(head + body)
    stream.post(URL, {"X-Token": "t"}, '{"x":1}')
    assert etcd.recv(4096) == (
        b"POST /v3/watch HTTP/1.1\r\nHost: etcd:2379\r\nContent-Length: 7\r\nX-Token: t\r\n\r\n" + b'{"x":1}'
    )
    assert [stream.line(60) for _ in range(3)] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    assert stream.line(0.01) is None
    etcd.close()
    with pytest.raises(ConnectionResetError):
        stream.line(60)


@pytest.mark.parametrize("end", [b'8\r\n{"e":1}\n\r\n0\r\n\r\n', b'7\r\n{"e":1}\r\n0\r\n\r\n'])
def test_the_last_line_is_heard_though_the_end_comes_with_it(
    ends: tuple[Stream, socket.socket], end: bytes
) -> None:
    stream, etcd = ends
    etcd.sendall(CHUNKED + end)
    stream.post(URL, {}, "")
    assert stream.line(60) == b'{"e":1}'
    with pytest.raises(HTTPException, match="ended"):
        stream.line(60)


def test_silence_in_the_middle_of_a_line_loses_nothing(ends: tuple[Stream, socket.socket]) -> None:
    stream, etcd = ends
    etcd.sendall(CHUNKED + b"a\r\n12345")
    stream.post(URL, {}, "")
    assert stream.line(0.01) is None
    etcd.sendall(b"678\n\n\r\n")
    assert stream.line(60) == b"12345678"


@pytest.mark.parametrize("head", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_does_not_speak_http_is_told(ends: tuple[Stream, socket.socket], head: bytes) -> None:
    stream, etcd = ends
    etcd.sendall(head)
    with pytest.raises(HTTPException, match="BadStatusLine"):
        stream.post(URL, {}, "")
