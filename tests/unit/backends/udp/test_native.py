"""The C data plane between two pairs of sockets: a local pair stands for the TUN, loopback for the wire."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flanneld.backends.udp.proxy import native
from flanneld.backends.udp.proxy.plane import COUNTERS
from tests.lab import packets, wait_for
from tests.lab.packets import ACK, CWR, DONT_FRAGMENT, FIN, ICMP, MORE_FRAGMENTS, PSH, TCP, UDP, Whole

C = Path(native.__file__).with_name("udp_pump")
OWN, PEER, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
TUN_ADDRESS = "10.5.1.0"
UDP_SEGMENT = 103  # linux/udp.h
IP_MTU_DISCOVER = 10  # linux/in.h

VNET_HEADER, MERGE_UDP, SEGMENT_SENDS, ACCEPT_ANY = 1, 2, 4, 8
ALL, TSO, NONE = VNET_HEADER | MERGE_UDP | SEGMENT_SENDS, VNET_HEADER | SEGMENT_SENDS, SEGMENT_SENDS


class Pump:
    """The library with both its descriptors replaced; in a ``with``, which starts no loop yet."""

    def __init__(self, features: int = ALL) -> None:
        self.library = native._library()
        self.features = features
        self.results: list[int] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self.tun, self._inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inner.setblocking(False)
        self.wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.wire.bind((OWN, 0))
        native._tune(self.wire.fileno())
        self.port = self.wire.getsockname()[1]
        self._handle = self.library.udp_pump_new(
            self._inner.fileno(), self.wire.fileno(), int(IPv4Address(TUN_ADDRESS)), self.port, self.features
        )
        self.sockets = {address: self._socket(address) for address in (PEER, STRANGER)}
        for end in (self.tun, *self.sockets.values()):
            end.settimeout(60)
        self.set_peer("10.5.2.0/24", PEER)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.library.udp_pump_free(self._handle)
        for end in (self.tun, self._inner, self.wire, *self.sockets.values()):
            end.close()

    def _socket(self, address: str) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        made.bind((address, self.port))
        return made

    def set_peer(self, subnet: str, endpoint: str) -> None:
        network = IPv4Network(subnet)
        number = int(network.network_address)
        end = int(IPv4Address(endpoint))
        assert self.library.udp_pump_set_peer(self._handle, number, network.prefixlen, end) == 0

    def drop_peer(self, subnet: str) -> None:
        network = IPv4Network(subnet)
        self.library.udp_pump_drop_peer(self._handle, int(network.network_address), network.prefixlen)

    def start(self, *loops: str) -> None:
        for loop in loops or ("from_tun", "from_wire"):
            run = getattr(self.library, f"udp_pump_{loop}")
            thread = threading.Thread(target=lambda run=run: self.results.append(run(self._handle)))
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self.library.udp_pump_stop(self._handle)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def counter_names(self) -> set[str]:
        return set(self._names().values())

    def counter(self, name: str) -> int:
        names = self._names()
        return sum(self.library.udp_pump_counter(self._handle, n) for n in names if names[n] == name)

    def _names(self) -> dict[int, str]:
        return {
            number: ctypes.string_at(self.library.udp_pump_counter_name(number)).decode()
            for number in range(self.library.udp_pump_counters())
            if self.library.udp_pump_counter_name(number)
        }

    def refuse_answers(self) -> None:
        """Let the TUN take packets from us, but nothing of the pump's."""
        self._inner.shutdown(socket.SHUT_WR)

    def wait_for_count(self, name: str, number: int = 1) -> None:
        wait_for(lambda: self.counter(name) == number, 10, f"{name} to be {number}")

    def outward(self, *wholes: Whole, to: str = PEER) -> list[bytes]:
        """Give packets to the TUN; what then arrives at a peer."""
        expected = sum(len(whole.cut()) for whole in wholes)
        for whole in wholes:
            self.tun.send(whole.encode() if self.features & VNET_HEADER else whole.packet)
        return [packets.settled(self.sockets[to].recv(65535)) for _ in range(expected)]

    def inward(self, datagrams: Sequence[bytes], source: str = PEER) -> list[Whole]:
        """Let all of that be there when the loop begins; what then comes out of the TUN, up to the last."""
        for datagram in datagrams:
            self.sockets[source].sendto(datagram, (OWN, self.port))
        self.start("from_wire")
        found: list[Whole] = []
        while sum(len(whole.cut()) for whole in found) < len(datagrams):
            found.append(self._decode(self.tun.recv(70000)))
        self.stop()
        assert self.counter("received_packets") == len(datagrams)
        assert self.counter("received_bytes") == sum(len(packet) for whole in found for packet in whole.cut())
        return found

    def _decode(self, data: bytes) -> Whole:
        return Whole.decode(data) if self.features & VNET_HEADER else Whole(data)


@pytest.fixture
def pump() -> Iterator[Pump]:
    with Pump() as pump:
        yield pump


def segment(number: int, size: int = 1000, **how: Any) -> bytes:
    """One of several consecutive TCP segments of one flow."""
    where = {key: how.pop(key) for key in ("ttl", "tos", "identification", "fragment") if key in how}
    how.setdefault("sequence", number * 1000)
    payload = random.Random(number).randbytes(size)
    return packets.finished(packets.ipv4(packets.tcp(payload, **how), TCP, **where))


def datagram(payload: bytes = b"x" * 100, **how: Any) -> bytes:
    return packets.finished(packets.ipv4(packets.udp(payload), UDP, **how))


def behind(number_of_hops: int, packet: bytes) -> bytes:
    for _ in range(number_of_hops):
        packet = packets.forwarded(packet)
    return packets.settled(packet)


# ---- building and loading ----


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    command = ["cc", "-std=gnu11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread"]
    done = subprocess.run(
        [*command, *sorted(map(str, C.glob("*.c"))), "-o", str(tmp_path / "pump.so")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_this_checkout_has_a_native_plane() -> None:
    assert native.available() is None


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "was not built"), (bytes(1000), "invalid ELF header")]
)
def test_without_a_usable_library_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / f"_udp_pump{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native._library.cache_clear()
    try:
        assert reason in (native.available() or "")
    finally:
        native._library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [pytest.param("cc", None, id="compiler"), pytest.param("/bin/false", "not built", id="none")],
)
def test_a_wheel_has_the_library_if_there_is_a_compiler(
    tmp_path: Path, compiler: str, reason: str | None
) -> None:
    root = C.parents[4]
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(
        root / "flanneld", source / "flanneld", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    command = [
        *pip,
        "--no-deps",
        "--no-compile",
        "--no-build-isolation",
        "--root-user-action=ignore",
        "--target",
        str(site),
        ".",
    ]
    subprocess.run(command, cwd=source, env={**os.environ, "CC": compiler}, check=True, capture_output=True)
    ask = "from flanneld.backends.udp.proxy import native; print(native.__file__); print(native.available())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ask],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    file, answer = done.stdout.splitlines()
    assert Path(file).is_relative_to(site)
    assert answer == "None" if reason is None else reason in answer
    assert not list(site.rglob("*.[ch]"))


# ---- from the TUN ----

PORTS = st.tuples(st.integers(0, 65535), st.integers(0, 65535))
TCP_OPTIONS = st.sampled_from((b"", b"\1\1\10\12" + bytes(8), bytes(40)))
IP_OPTIONS = st.sampled_from((b"", b"\1" * 4, bytes(40)))


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    """What a kernel hands over with all offloads on."""
    protocol = draw(st.sampled_from((TCP, UDP)))
    size = draw(st.one_of(st.integers(1, 3000), st.integers(1, 65000)))
    payload = random.Random(draw(st.integers(0, 1 << 32))).randbytes(size)
    many = draw(st.booleans())
    step = draw(st.integers(max(1, size // 80), 1432)) if many else 0
    if protocol == TCP:
        flags = draw(st.sampled_from((ACK, ACK | PSH, ACK | FIN, ACK | PSH | FIN | CWR)))
        sequence = draw(st.integers(0, (1 << 32) - 1))
        inner = packets.tcp(
            payload, ports=draw(PORTS), sequence=sequence, flags=flags, options=draw(TCP_OPTIONS)
        )
    else:
        inner = packets.udp(payload, ports=draw(PORTS))
    packet = packets.ipv4(
        inner, protocol, destination="10.5.2.9", options=draw(IP_OPTIONS),
        identification=draw(st.integers(0, 65535)), ttl=draw(st.integers(2, 255)),
        fragment=draw(st.sampled_from((0, DONT_FRAGMENT))),
    )  # fmt: skip
    return Whole(packet, step, unfinished=True)


@settings(max_examples=100)
@given(st.lists(wholes(), min_size=1, max_size=4))
def test_large_packets_are_segmented_as_by_a_card(given: list[Whole]) -> None:
    with Pump() as pump:
        pump.start("from_tun")
        expected = [behind(1, packet) for whole in given for packet in whole.cut()]
        assert pump.outward(*given) == expected
        pump.stop()
        assert pump.counter("sent_packets") == len(expected)
        assert pump.counter("sent_bytes") == sum(map(len, expected))


@pytest.mark.parametrize("features", [ALL, ALL & ~SEGMENT_SENDS, NONE, 0])
def test_plain_packets_of_one_size_and_of_others_arrive_in_order(features: int) -> None:
    sizes = [100] * 70 + [50, 100, 100, 1400, 1, 65000, 1400, 1400, 1399, 1400]
    given = [datagram(bytes([n]) * size) for n, size in enumerate(sizes)]
    with Pump(features) as pump:
        pump.start("from_tun")
        assert pump.outward(*map(Whole, given)) == [behind(1, packet) for packet in given]


def test_oversized_packets_are_counted_and_the_rest_pass(pump: Pump) -> None:
    pump.start("from_tun")
    pump.tun.send(Whole(packets.ipv4(bytes(65515), 99)).encode())
    assert pump.outward(Whole(datagram())) == [behind(1, datagram())]
    assert pump.counter("send_failed") == 1


@pytest.mark.parametrize("left", [0, 1])
def test_a_packet_from_the_tun_that_has_come_far_enough_ends_there(pump: Pump, left: int) -> None:
    pump.start("from_tun")
    pump.tun.send(Whole(datagram(ttl=left)).encode())
    assert pump.outward(Whole(datagram(ttl=2))) == [behind(1, datagram(ttl=2))]
    assert pump.counter("ttl") == 1


BAD_WHOLES = {
    "empty": b"",
    "half a vnet header": bytes(5),
    "no packet": bytes(10),
    "IPv6": bytes(10) + b"\x60" + bytes(39),
    "cut off": bytes(10) + datagram()[:-1],
    "a header of less than 20 bytes": bytes(10) + b"\x44" + datagram()[1:],
    "a length below that of the header": bytes(10) + datagram()[:2] + b"\0\x13" + datagram()[4:],
    "a checksum behind the end": b"\1\0\0\0\0\0\x14\0\xff\xff" + datagram(),
    "a checksum over nothing": b"\1\0\0\0\0\0\xff\xff\0\0" + datagram(),
    "segments of no size": b"\1\5\0\0\0\0\x14\0\6\0" + datagram(),
    "TCP that is UDP": b"\1\1\0\0\x64\0\x14\0\x10\0" + datagram(),
    "TCP without a header": b"\1\1\0\0\x64\0\x14\0\x10\0" + packets.ipv4(bytes(19), TCP),
    "TCP with a header of less than 20 bytes": b"\1\1\0\0\x64\0\x14\0\x10\0" + packets.ipv4(bytes(40), TCP),
    "TCP with a header that goes on": b"\1\1\0\0\x64\0\x14\0\x10\0"
    + packets.ipv4(bytes(12) + b"\xf0" + bytes(27), TCP),
    "an unknown kind": b"\1\3\0\0\x64\0\x14\0\x10\0" + datagram(),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BAD_WHOLES.items()])
def test_malformed_packets_are_dropped_and_the_rest_pass(pump: Pump, data: bytes) -> None:
    pump.start("from_tun")
    pump.tun.send(data)
    assert pump.outward(Whole(datagram())) == [behind(1, datagram())]
    assert pump.counter("malformed") == 1


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(Whole(datagram(destination="10.6.0.1")), id="finished"),
        pytest.param(Whole(datagram(destination="10.6.0.1"), unfinished=True), id="unfinished"),
        pytest.param(Whole(datagram(bytes(3000), destination="10.6.0.1"), 1000, True), id="many"),
        pytest.param(
            Whole(datagram(destination="10.6.0.1", options=b"\1" * 36), unfinished=True), id="options"
        ),
    ],
)
def test_a_packet_that_leads_nowhere_is_answered(pump: Pump, whole: Whole) -> None:
    pump.start("from_tun")
    pump.tun.send(whole.encode())
    answer = Whole.decode(pump.tun.recv(2000))
    (first, *_) = whole.cut()
    quote = first[: packets.header_length(first) + 8]
    icmp = b"\3\0\0\0\0\0\0\0" + quote
    assert answer == Whole(
        packets.finished(
            packets.ipv4(icmp, ICMP, TUN_ADDRESS, "10.5.1.2", ttl=8, identification=0, fragment=0)
        )
    )
    assert pump.counter("no_route") == 1


def test_an_answer_that_the_tun_refuses_is_counted_as_the_python_plane_counts_it(pump: Pump) -> None:
    pump.refuse_answers()
    pump.start("from_tun")
    pump.tun.send(Whole(datagram(destination="10.6.0.1")).encode())
    pump.wait_for_count("write_failed")
    assert pump.counter("send_failed") == 0


def test_both_planes_count_under_the_same_names(pump: Pump) -> None:
    assert pump.counter_names() == set(COUNTERS)


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(packets.ipv4(bytes(40), ICMP, destination="10.6.0.1"), id="ICMP"),
        pytest.param(packets.ipv4(bytes(40), UDP, destination="10.6.0.1", fragment=1), id="a later fragment"),
        pytest.param(
            packets.ipv4(bytes(40), UDP, destination="10.6.0.1", options=bytes(40)), id="all options"
        ),
        pytest.param(packets.ipv4(bytes(7), UDP, destination="10.6.0.1"), id="too short to be quoted"),
    ],
)
def test_such_a_packet_is_not_answered(pump: Pump, packet: bytes) -> None:
    pump.start("from_tun")
    other = datagram(destination="10.6.0.1")
    pump.tun.send(Whole(packet).encode())
    pump.tun.send(Whole(other).encode())
    assert other[:28] in pump.tun.recv(2000)
    assert pump.counter("no_route") == 2


# ---- from the wire ----


def without_id(packet: bytes) -> bytes:
    if packet[6] << 8 & DONT_FRAGMENT:
        packet = packets.with_ip_checksum(packet[:4] + bytes(2) + packet[6:])
    return packets.settled(packet)


def check_flows(sent: Sequence[bytes], found: Sequence[Whole]) -> None:
    """What came out, cut again, is in each flow what went in, in the same order.

    Only IDs are made anew, and only where nobody is to make fragments (RFC 6864).
    """

    def by_flow(some: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        flows = defaultdict(list)
        for packet in some:
            flows[packet[9:10] + packet[12:24]].append(without_id(packet))
        return flows

    assert by_flow([packet for whole in found for packet in whole.cut()]) == by_flow(sent)


def test_consecutive_segments_become_one(pump: Pump) -> None:
    given = [segment(n) for n in range(7)]
    (whole,) = pump.inward(given)
    assert (whole.segment, whole.unfinished) == (1000, True)
    check_flows([behind(1, packet) for packet in given], [whole])


def test_datagrams_of_one_size_become_one(pump: Pump) -> None:
    given = [datagram(bytes([n]) * size) for n, size in enumerate([500, 500, 500, 499])]
    (whole,) = pump.inward(given)
    check_flows([behind(1, packet) for packet in given], [whole])


@pytest.mark.parametrize(("features", "protocol"), [(TSO, UDP), (NONE, UDP), (NONE, TCP)])
def test_packets_are_not_merged_beyond_the_kernel_limits(features: int, protocol: int) -> None:
    given = [segment(n) if protocol == TCP else datagram(bytes([n]) * 500) for n in range(5)]
    with Pump(features) as pump:
        found = pump.inward(given)
    assert found == [Whole(packets.forwarded(packet)) for packet in given]


def flipped(packet: bytes, at: int) -> bytes:
    return packet[:at] + bytes([packet[at] ^ 1]) + packet[at + 1 :]


OTHERS = {
    "another type of service": segment(1, tos=4),
    "another TTL": segment(1, ttl=63),
    "another DF bit": segment(1, identification=8, fragment=0),
    "another acknowledgement": segment(1, ack=2),
    "another window": segment(1, window=501),
    "options": segment(1, options=b"\1" * 12),
    "a gap": segment(2),
    "a larger one": segment(1, size=1001),
    "no payload": segment(1, size=0),
    "the end": segment(1, flags=ACK | FIN),
    "a congestion mark": segment(1, flags=ACK | CWR),
    "a wrong payload": flipped(segment(1), 900),
    "a wrong checksum": flipped(segment(1), 36),
    "a wrong header": packets.forwarded(segment(1))[:4] + b"\5\5" + segment(1)[6:],
}


@pytest.mark.parametrize("other", [pytest.param(other, id=name) for name, other in OTHERS.items()])
def test_a_segment_that_differs_stays_by_itself_and_in_order(pump: Pump, other: bytes) -> None:
    found = pump.inward([segment(0), other])
    assert [whole.segment for whole in found] == [0, 0]
    assert found[0].packet == packets.forwarded(segment(0))
    assert found[1].packet[12:] == other[12:]
    assert packets.is_sound(found[1].packet) == packets.is_sound(other)


def test_segments_that_may_be_in_fragments_have_consecutive_ids(pump: Pump) -> None:
    numbers = (65534, 65535, 0, 2)
    given = [segment(n, identification=number, fragment=0) for n, number in enumerate(numbers)]
    found = pump.inward(given)
    assert [len(whole.cut()) for whole in found] == [3, 1]
    check_flows([behind(1, packet) for packet in given], found)


def test_a_push_ends_what_becomes_one(pump: Pump) -> None:
    given = [segment(n, flags=ACK | PSH if n == 2 else ACK) for n in range(5)]
    found = pump.inward(given)
    assert sorted(len(whole.cut()) for whole in found) == [2, 3]
    check_flows([behind(1, packet) for packet in given], found)


def test_fragments_and_other_protocols_are_not_overtaken(pump: Pump) -> None:
    between = [
        packets.ipv4(b"y" * 100, UDP, fragment=MORE_FRAGMENTS),
        packets.ipv4(b"z" * 100, UDP, fragment=13),
        packets.ipv4(b"w" * 100, ICMP),
        packets.ipv4(b"v" * 100, TCP, options=b"\1" * 4),
    ]
    given = [packet for n, other in enumerate(between) for packet in (segment(n), other)]
    assert [whole.packet for whole in pump.inward(given)] == [packets.forwarded(packet) for packet in given]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Segments of several flows, one among the other, some of them not as they should be."""
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    flows = draw(st.integers(1, 40))
    step = draw(st.integers(1, 1400))
    sequences = [chance.randrange(1 << 32) for _ in range(flows)]
    found = []
    for number in range(draw(st.integers(1, 250))):
        flow = chance.randrange(flows)
        size = chance.choice((step, step, step, step, max(1, step - 1), 1, step + 1))
        payload, ports = chance.randbytes(size), (flow, 80)
        if flow % 3:
            flags = chance.choice((ACK,) * 8 + (ACK | PSH, ACK | FIN))
            inner = packets.tcp(payload, ports=ports, sequence=sequences[flow], flags=flags)
            sequences[flow] = (sequences[flow] + size) % (1 << 32)
        else:
            inner = packets.udp(payload, ports=ports)
        fragment = chance.choice((DONT_FRAGMENT,) * 5 + (0,))
        packet = packets.finished(
            packets.ipv4(inner, TCP if flow % 3 else UDP, identification=number, fragment=fragment)
        )
        found.append(packet if chance.random() > 0.05 else flipped(packet, chance.randrange(24, len(packet))))
    return found


@settings(max_examples=60)
@given(streams())
def test_each_flow_arrives_as_it_was_and_in_order_corruption_included(given: list[bytes]) -> None:
    with Pump() as pump:
        found = pump.inward(given)
    check_flows([behind(1, packet) for packet in given], found)


@pytest.mark.parametrize("left", [0, 1])
def test_a_packet_from_the_wire_that_has_come_far_enough_ends_there(pump: Pump, left: int) -> None:
    pump.sockets[PEER].sendto(datagram(ttl=left), (OWN, pump.port))
    assert pump.inward([datagram(ttl=2)]) == [Whole(behind(1, datagram(ttl=2)))]
    assert pump.counter("ttl") == 1


def test_bytes_behind_a_packet_are_left_away(pump: Pump) -> None:
    assert pump.inward([datagram() + b"more"]) == [Whole(behind(1, datagram()))]


BAD_DATAGRAMS = {
    "empty": b"",
    "a byte": b"E",
    "19 bytes": datagram()[:19],
    "cut off": datagram()[:-1],
    "IPv6": b"\x60" + bytes(60),
    "zeros": bytes(60),
    "a header of less than 20 bytes": b"\x44" + datagram()[1:],
    "a header that goes on": b"\x4f" + datagram()[1:40],
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BAD_DATAGRAMS.items()])
def test_malformed_datagrams_are_dropped_and_the_rest_pass(pump: Pump, data: bytes) -> None:
    pump.sockets[PEER].sendto(data, (OWN, pump.port))
    assert pump.inward([datagram()]) == [Whole(behind(1, datagram()))]
    assert pump.counter("malformed") == 1


def test_many_datagrams_in_one_send_are_taken_apart(pump: Pump) -> None:
    given = [segment(n) for n in range(30)]
    size = len(given[0]).to_bytes(2, sys.byteorder)
    to = (OWN, pump.port)
    pump.sockets[PEER].sendmsg([b"".join(given)], [(socket.IPPROTO_UDP, UDP_SEGMENT, size)], 0, to)
    pump.start("from_wire")
    whole = Whole.decode(pump.tun.recv(70000))
    check_flows([behind(1, packet) for packet in given], [whole])


# ---- peers ----


def test_a_stranger_is_not_heard(pump: Pump) -> None:
    pump.start()
    for _ in range(3):
        pump.sockets[STRANGER].sendto(datagram(), (OWN, pump.port))
    pump.wait_for_count("not_a_peer", 3)
    pump.set_peer("10.5.3.0/24", STRANGER)
    pump.sockets[STRANGER].sendto(datagram(), (OWN, pump.port))
    assert pump.tun.recv(2000)
    pump.drop_peer("10.5.3.0/24")
    pump.sockets[STRANGER].sendto(datagram(), (OWN, pump.port))
    pump.wait_for_count("not_a_peer", 4)


def test_a_stranger_is_heard_if_anybody_may_send() -> None:
    with Pump(ALL | ACCEPT_ANY) as pump:
        assert pump.inward([datagram()], STRANGER) == [Whole(behind(1, datagram()))]


def test_an_endpoint_is_known_until_its_last_subnet_has_gone(pump: Pump) -> None:
    pump.set_peer("10.5.3.0/24", PEER)
    pump.set_peer("10.5.3.0/24", PEER)
    pump.drop_peer("10.5.2.0/24")
    pump.drop_peer("10.5.2.0/24")
    pump.start()
    pump.sockets[PEER].sendto(datagram(), (OWN, pump.port))
    assert pump.tun.recv(2000)
    pump.set_peer("10.5.3.0/24", STRANGER)
    pump.sockets[PEER].sendto(datagram(), (OWN, pump.port))
    pump.wait_for_count("not_a_peer")


SUBNETS = st.builds(
    lambda address, length: str(IPv4Network((address & (~0 << (32 - length)), length))),
    st.sampled_from([int(IPv4Address("10.5.0.0")) + n for n in (0, 1, 256, 257, 65536, 1 << 31)]),
    st.sampled_from((0, 1, 8, 15, 16, 24, 31, 32)),
)
TARGETS = (
    "10.5.0.0",
    "10.5.0.1",
    "10.5.1.0",
    "10.5.1.1",
    "10.6.0.0",
    "138.5.0.0",
    "0.0.0.0",
    "255.255.255.255",
)


@settings(max_examples=60)
@given(st.lists(st.tuples(SUBNETS, st.sampled_from((PEER, STRANGER, None))), max_size=12))
def test_the_longest_prefix_wins(changes: list[tuple[str, str | None]]) -> None:
    desired = {"10.5.2.0/24": PEER}
    with Pump() as pump:
        for subnet, endpoint in changes:
            if endpoint is None:
                pump.drop_peer(subnet)
                desired.pop(subnet, None)
            else:
                pump.set_peer(subnet, endpoint)
                desired[subnet] = endpoint
        pump.start("from_tun")
        missing = 0
        for target in TARGETS:
            matching = [subnet for subnet in desired if IPv4Address(target) in IPv4Network(subnet)]
            packet = datagram(destination=target)
            if matching:
                best = max(matching, key=lambda subnet: IPv4Network(subnet).prefixlen)
                assert pump.outward(Whole(packet), to=desired[best]) == [behind(1, packet)]
            else:
                pump.tun.send(Whole(packet).encode())
                assert packet[:28] in pump.tun.recv(2000)
                missing += 1
        assert pump.counter("no_route") == missing


def test_thousands_of_peers_come_and_go_under_traffic(pump: Pump) -> None:
    pump.start()
    subnets = [f"10.{100 + n // 256}.{n % 256}.0/24" for n in range(5000)]
    random.Random(1).shuffle(subnets)
    busy = threading.Event()

    def send() -> None:
        while not busy.is_set():
            with suppress(BlockingIOError):
                pump.outward(Whole(datagram()))
                pump.sockets[PEER].sendto(datagram(), (OWN, pump.port))
                pump.tun.recv(2000)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for subnet in subnets:
            pump.set_peer(subnet, STRANGER)
        for subnet in subnets[1:]:
            pump.drop_peer(subnet)
    finally:
        busy.set()
        sender.join()
    packet = datagram(destination=subnets[0].replace("0/24", "9"))
    assert pump.outward(Whole(packet), to=STRANGER) == [behind(1, packet)]
    assert pump.counter("not_a_peer") == pump.counter("no_route") == 0


# ---- the socket, and the end ----


@pytest.mark.parametrize(
    ("option", "size", "limit"),
    [(socket.SO_RCVBUF, 4 << 20, "rmem_max"), (socket.SO_SNDBUF, 1 << 20, "wmem_max")],
)
def test_the_socket_holds_a_lot_as_far_as_that_is_permitted(
    pump: Pump, option: int, size: int, limit: str
) -> None:
    permitted = int(Path("/proc/sys/net/core", limit).read_text())
    # The kernel counts double: half of it is for its own structures (socket(7)).
    assert pump.wire.getsockopt(socket.SOL_SOCKET, option) >= 2 * min(size, permitted)


def test_the_socket_is_left_as_it_was_found(pump: Pump) -> None:
    before = pump.wire.getsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER)
    pump.start("from_tun")
    pump.outward(Whole(datagram()))
    assert pump.wire.getsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER) != before
    pump.stop()
    assert pump.wire.getsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER) == before


def test_a_stop_ends_both_loops(pump: Pump) -> None:
    pump.start()
    pump.outward(Whole(datagram()))
    pump.stop()
    assert pump.results == [0, 0]


def test_a_stop_ends_loops_that_never_rest(pump: Pump) -> None:
    pump.start()
    done = threading.Event()
    whole = Whole(datagram()).encode()

    def flood(send: Callable[[], object]) -> None:
        while not done.is_set():
            with suppress(OSError):
                send()

    pump.tun.setblocking(False)
    floods = [
        threading.Thread(target=flood, args=(send,))
        for send in (
            lambda: pump.tun.send(whole),
            lambda: pump.sockets[PEER].sendto(datagram(), (OWN, pump.port)),
        )
    ]
    for thread in floods:
        thread.start()
    try:
        wait_for(lambda: pump.counter("sent_packets") > 100, 10, "the flood")
        pump.stop()
    finally:
        done.set()
        for thread in floods:
            thread.join()
    assert pump.results == [0, 0]


def test_a_loop_that_fails_ends_the_other_and_says_why(pump: Pump) -> None:
    pump.start("from_wire")
    os.dup2(os.open("/", os.O_RDONLY | os.O_CLOEXEC), pump._inner.fileno(), inheritable=False)
    pump.start("from_tun")
    pump._threads[0].join(10)
    pump._threads[1].join(10)
    assert sorted(pump.results) == [0, errno.EISDIR]


def test_options_of_the_library_have_its_numbers() -> None:
    words = re.search(r"enum { (VNET_HEADER.*) };", (C / "pump.h").read_text())
    assert words
    for word in words[1].split(", "):
        name, number = word.split(" = ")
        assert getattr(native, f"_{name}") == int(number)
