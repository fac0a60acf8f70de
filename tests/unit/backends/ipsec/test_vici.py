"""VICI: what is packed is read back, and whatever else comes is refused in bounded time and space."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.ipsec import vici
from flanneld.backends.ipsec.charon import CharonEvents, CharonHangs, CharonRefused, NoCharon, ViciConnection
from flanneld.backends.ipsec.vici import MalformedVici, PacketType, ViciPacket
from tests.unit.mutations import tampered_bytes

names = st.text(max_size=8)
values = st.recursive(
    st.binary(max_size=20) | st.lists(st.binary(max_size=8), max_size=3),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=10,
)
sections = st.dictionaries(names, values, max_size=4)
EXAMPLE: Any = {"a": {"b": {"c": ["d", "e"]}, "f": "g" * 300}, "h": "", "i": []}
PACKED = [
    vici.pack(kind, "list-sa", EXAMPLE)
    for kind in (PacketType.EVENT, PacketType.RESPONSE, PacketType.CONFIRM)
]


@given(st.sampled_from(PacketType), names, sections)
def test_packed_value_is_read_back(kind: PacketType, name: str, section: Any) -> None:
    packed = vici.pack(kind, name, section)
    assert vici.length_of(packed[:4]) == len(packed) - 4
    has_name = kind in (PacketType.REQUEST, PacketType.REGISTER, PacketType.UNREGISTER, PacketType.EVENT)
    assert vici.unpack(packed[4:]) == ViciPacket(kind, name if has_name else "", section)


def test_the_documented_example_is_packed_as_documented() -> None:
    """strongSwan's README of the plug-in: version with a section, a list and a value in it."""
    assert vici.pack(PacketType.REQUEST, "version") == b"\0\0\0\x09\0\x07version"
    section: Any = {"key1": "value1", "section1": {"sub": {"key2": "v2"}, "list1": ["item1"]}}
    assert vici.pack(PacketType.RESPONSE, "", section)[5:] == (
        b"\3\4key1\0\6value1\1\x08section1\1\3sub\3\4key2\0\2v2\2\4\5list1\5\0\5item1\6\2"
    )


@given(st.binary(max_size=200) | tampered_bytes([each[4:] for each in PACKED]))
def test_no_tampered_packet_is_more_than_malformed(data: bytes) -> None:
    with suppress(MalformedVici):
        vici.unpack(data)


def nested(depth: int) -> bytes:
    return b"\1" + b"\1\1a" * depth + b"\2" * depth


def test_sections_are_bounded_in_depth() -> None:
    assert vici.unpack(nested(15)).kind is PacketType.RESPONSE
    for depth in (16, 100_000):
        with pytest.raises(MalformedVici):
            vici.unpack(nested(depth))


def test_packet_may_be_as_long_as_charon_s_longest() -> None:
    """strongSwan's ``VICI_MESSAGE_SIZE_MAX`` is 512 KiB."""
    assert vici.length_of(b"\0\x08\0\0") == 512 * 1024
    with pytest.raises(MalformedVici, match="a packet of 524289 bytes"):
        vici.length_of(b"\0\x08\0\x01")


@pytest.mark.parametrize("length", [0, vici.LONGEST_PACKET + 1, 2**32 - 1])
def test_lengths_are_bounded(length: int) -> None:
    with pytest.raises(MalformedVici):
        vici.length_of(length.to_bytes(4))


def test_oversized_value_is_refused() -> None:
    for section in ({"a" * 256: "b"}, {"a": "b" * 65536}, {str(n): "b" * 60000 for n in range(9)}):
        with pytest.raises(ValueError, match="longer"):
            vici.pack(PacketType.REQUEST, "load-conn", section)


def test_values_of_a_wrong_kind_count_as_absent() -> None:
    section: Any = {"text": b"7", "list": [b"8"], "section": {}}
    assert [vici.number(section, name) for name in section] == [7, 0, 0]
    assert vici.texts(section, "text") == []
    assert vici.text(section, "list") == ""
    assert vici.number({"n": b"9" * 5000}, "n") == 0


# ---- the client ------------------------------------------------------------------------------------

Answer = Callable[[socket.socket], None]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Callable[[Answer], str]]:
    """Returns the path of a socket at which one connection is answered as asked for."""
    path = str(tmp_path / "vici")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    threads: list[threading.Thread] = []

    def listen(answer: Answer) -> str:
        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                answer(connection)

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        return path

    yield listen
    for thread in threads:
        thread.join()
    server.close()


def response(**message: str) -> bytes:
    return vici.pack(PacketType.RESPONSE, "", message)


def test_answers_are_read_however_they_are_cut(listening: Callable[[Answer], str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        for byte in response(success="yes", daemon="charon"):
            connection.sendall(bytes([byte]))

    with ViciConnection(listening(answer)) as charon:
        assert charon.ask("version")["daemon"] == b"charon"


def test_a_refusal_tells_charons_reason(listening: Callable[[Answer], str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(response(success="no", errmsg="unknown proposal"))

    with ViciConnection(listening(answer)) as charon, pytest.raises(CharonRefused, match="unknown proposal"):
        charon.ask("load-conn")


def test_silence_ends_with_the_time_limit(listening: Callable[[Answer], str]) -> None:
    """Also if a byte comes from time to time."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"\0\0\1\0")
        while connection.recv(1000):
            connection.sendall(b"\1")

    with ViciConnection(listening(answer), time_limit=0.1) as charon, pytest.raises(CharonHangs):
        charon.ask("version")


def test_a_lost_connection_is_told(listening: Callable[[Answer], str], tmp_path: Path) -> None:
    def read_and_close(connection: socket.socket) -> None:
        connection.recv(1000)

    with ViciConnection(listening(read_and_close)) as charon, pytest.raises(NoCharon):
        charon.ask("version")
    with pytest.raises(NoCharon):
        ViciConnection(str(tmp_path / "nobody"))


def test_a_list_ends_with_its_response(listening: Callable[[Answer], str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(vici.pack(PacketType.CONFIRM))
        connection.recv(1000)
        for number in "12":
            connection.sendall(vici.pack(PacketType.EVENT, "list-sa", {"number": number}))
        connection.sendall(vici.pack(PacketType.EVENT, "another", {}) + response())
        connection.recv(1000)
        connection.sendall(vici.pack(PacketType.CONFIRM))

    with ViciConnection(listening(answer)) as charon:
        found = [each["number"] for each in charon.listing("list-sas", "list-sa")]
    assert found == [b"1", b"2"]


def test_news_are_heard_until_the_end(listening: Callable[[Answer], str]) -> None:
    events = b"".join(vici.pack(PacketType.EVENT, "log", {"msg": number}) for number in "123")

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(vici.pack(PacketType.CONFIRM) + events)

    news = CharonEvents(listening(answer))
    heard: list[object] = []

    def hear() -> None:
        while True:
            for each in news.heard():
                heard.append(each["msg"])  # noqa: PERF401  what came before the end counts

    with pytest.raises(NoCharon):
        hear()
    assert heard == [b"1", b"2", b"3"]
    news.close()
