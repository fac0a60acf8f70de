"""Both data planes as a whole: a pair of sockets stands for the TUN, loopback for the wire."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest

from flanneld.backends.udp.proxy import native
from flanneld.backends.udp.proxy.native import NativePlane
from flanneld.backends.udp.proxy.plane import COUNTERS, Offer, Plane, PythonPlane, Wire, build, offers
from tests.lab import packets, wait_for
from tests.lab.packets import Whole

OWN, PEER, OTHER, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"
#: The kernel refuses to send there.
BROADCAST = "255.255.255.255"
TUN_ADDRESS = "10.5.1.0"
PEERS = {"10.5.2.0/24": PEER, "10.5.3.0/24": OTHER, "10.5.4.0/24": BROADCAST}
#: linux/if_tun.h, linux/udp.h
TUNSETIFF, TUNSETOFFLOAD, VNET_HEADER = 0x400454CA, 0x400454D0, 0x4000
CHECKSUMS, TSO4, TSO_ECN, USO4, USO6 = 0x01, 0x02, 0x08, 0x20, 0x40
UDP_GRO = 104

REAL_OPEN, REAL_IOCTL = os.open, fcntl.ioctl


class Tun:
    """A TUN device of a kernel that grants some offloads; ``end`` is the kernel's side of it."""

    #: An interface that each host has.
    name = "lo"

    def __init__(self, offloads: int) -> None:
        self.offloads = offloads
        self.refusal = errno.EINVAL
        self.has_vnet_header = False
        self.opened: list[int] = []
        self.end, self.inner = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for each in (self.end, self.inner):
            each.bind((OWN, 0))
        self.end.connect(self.inner.getsockname())
        self.inner.connect(self.end.getsockname())
        self.end.settimeout(60)

    def open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path != "/dev/net/tun":
            return REAL_OPEN(path, flags, *rest, **options)
        self.opened.append(os.dup(self.inner.fileno()))
        return self.opened[-1]

    def ioctl(self, fd: int, request: int, argument: Any = 0, *rest: Any) -> Any:
        if fd not in self.opened:
            return REAL_IOCTL(fd, request, argument, *rest)
        if request == TUNSETIFF:
            self.has_vnet_header = bool(int.from_bytes(argument[16:18], "little") & VNET_HEADER)
        elif request == TUNSETOFFLOAD and argument & ~self.offloads:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return 0

    def give(self, *given: bytes) -> None:
        """Route packets to the device."""
        for packet in given:
            self.end.send(Whole(packet).encode() if self.has_vnet_header else packet)

    def take(self) -> bytes:
        """Return the next packet that comes out of the device."""
        data = self.end.recv(65535)
        return Whole.decode(data).packet if self.has_vnet_header else data

    @property
    def is_held(self) -> bool:
        for fd in self.opened:
            with suppress(OSError):
                if os.path.samestat(os.fstat(fd), os.fstat(self.inner.fileno())):
                    return True
        return False

    def close(self) -> None:
        self.end.close()
        self.inner.close()


class Bench:
    """A data plane between its TUN and its wire, with the sockets of other nodes."""

    def __init__(self, tun: Tun, kind: type[PythonPlane | NativePlane], *, accept_any: bool = False) -> None:
        self.tun = tun
        self.wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.wire.bind((OWN, 0))
        port = self.wire.getsockname()[1]
        self.ends = Wire(tun.name, self.wire.fileno(), IPv4Address(TUN_ADDRESS), 1472, port, accept_any)
        self.plane: Plane = kind(self.ends)
        self.nodes: dict[str, socket.socket] = {}
        for address in (PEER, OTHER, STRANGER):
            self.nodes[address] = node = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            node.bind((address, port))
            node.settimeout(60)
        for subnet, endpoint in PEERS.items():
            self.plane.set_peer(IPv4Network(subnet), IPv4Address(endpoint))
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self.end()
        for each in (self.wire, *self.nodes.values()):
            each.close()

    def _run(self) -> None:
        try:
            self.plane.run()
        except OSError as failure:
            self.failures.append(failure)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def end(self) -> dict[str, int]:
        """Stop the plane, and return what it has counted, without zeros."""
        self.plane.stop()
        self.wait()
        return {name: number for name, number in self.plane.counters().items() if number}

    def send(self, *datagrams: bytes, source: str = PEER) -> None:
        """Send datagrams from another node."""
        for each in datagrams:
            self.nodes[source].sendto(each, self.wire.getsockname())

    def received(self, node: str, number: int = 1) -> list[bytes]:
        return [packets.settled(self.nodes[node].recv(65535)) for _ in range(number)]


def datagram(to: str = "10.5.2.2", size: int = 100, **how: Any) -> bytes:
    return packets.finished(packets.ipv4(packets.udp(bytes([size % 251]) * size), destination=to, **how))


def forwarded(packet: bytes) -> bytes:
    return packets.settled(packets.forwarded(packet))


@pytest.fixture
def tun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tun]:
    made = Tun(0)
    monkeypatch.setattr(os, "open", made.open)
    monkeypatch.setattr(fcntl, "ioctl", made.ioctl)
    yield made
    made.close()


@pytest.fixture(params=[PythonPlane, NativePlane], ids=["python", "native"])
def kind(request: pytest.FixtureRequest) -> type[PythonPlane | NativePlane]:
    found: type[PythonPlane | NativePlane] = request.param
    return found


@pytest.fixture
def bench(tun: Tun, kind: type[PythonPlane | NativePlane]) -> Iterator[Bench]:
    with Bench(tun, kind) as made:
        yield made


# ---- packets ---------------------------------------------------------------------------------------


def test_a_burst_reaches_its_peers_whole_and_in_order(bench: Bench) -> None:
    """There are more than go into one system call."""
    given = [datagram(f"10.5.{2 + number % 2}.2", number) for number in range(150)]
    bench.tun.give(*given)
    bench.start()
    expected = [forwarded(packet) for packet in given]
    assert bench.received(PEER, 75) == expected[::2]
    assert bench.received(OTHER, 75) == expected[1::2]
    assert bench.end() == {"sent_packets": 150, "sent_bytes": sum(map(len, given))}


def test_a_burst_from_peers_comes_out_whole_and_in_order(bench: Bench) -> None:
    given = [datagram(TUN_ADDRESS, number) for number in range(150)]
    bench.send(*given[:100])
    bench.send(*given[100:], source=OTHER)
    bench.start()
    assert [packets.settled(bench.tun.take()) for _ in given] == [forwarded(packet) for packet in given]
    assert bench.end() == {"received_packets": 150, "received_bytes": sum(map(len, given))}


@pytest.mark.parametrize(
    ("refused", "count"),
    [
        ([datagram(ttl=1)], "ttl"),
        ([b"\x60" + bytes(59)], "malformed"),
        ([packets.ipv4(bytes(20), packets.ICMP, destination="10.9.9.9")], "no_route"),
        ([datagram("10.5.4.2", 50)], "send_failed"),
        ([datagram("10.5.4.2", 50), datagram(ttl=1)], "send_failed"),
    ],
    ids=["at its last hop", "IPv6", "to no peer", "where the kernel sends nothing", "several"],
)
def test_packet_that_ends_at_this_node_holds_up_no_other(
    bench: Bench, refused: list[bytes], count: str
) -> None:
    first, last = datagram(size=10), datagram(size=1000)
    bench.tun.give(first, *refused, last)
    bench.start()
    assert bench.received(PEER, 2) == [forwarded(first), forwarded(last)]
    counts = bench.end()
    assert counts.pop(count) == 1
    assert counts.pop("ttl", 1) == 1
    assert counts == {"sent_packets": 2, "sent_bytes": len(first) + len(last)}


def test_sender_of_a_packet_to_no_peer_is_told(bench: Bench) -> None:
    lost = datagram("10.9.9.9")
    bench.tun.give(lost)
    bench.start()
    answer = bench.tun.take()
    assert (answer[20:22], answer[28:]) == (bytes([3, 0]), lost[:28])
    assert [str(IPv4Address(answer[at : at + 4])) for at in (12, 16)] == [TUN_ADDRESS, "10.5.1.2"]
    assert bench.end() == {"no_route": 1}


@pytest.mark.parametrize(
    ("refused", "source", "count"),
    [
        (datagram(ttl=1), PEER, "ttl"),
        (b"\x60" + bytes(59), PEER, "malformed"),
        (datagram()[:19], PEER, "malformed"),
        (datagram(), STRANGER, "not_a_peer"),
    ],
    ids=["at its last hop", "IPv6", "cut", "a stranger's"],
)
def test_datagram_that_is_not_for_the_tun_holds_up_no_other(
    bench: Bench, refused: bytes, source: str, count: str
) -> None:
    first, last = datagram(size=10), datagram(size=1000)
    bench.send(first)
    bench.send(refused, source=source)
    bench.send(last)
    bench.start()
    assert [packets.settled(bench.tun.take()) for _ in range(2)] == [forwarded(first), forwarded(last)]
    sizes = len(first) + len(last)
    assert bench.end() == {count: 1, "received_packets": 2, "received_bytes": sizes}


def test_a_stranger_is_heard_if_anybody_may_send(tun: Tun, kind: type[PythonPlane | NativePlane]) -> None:
    with Bench(tun, kind, accept_any=True) as bench:
        bench.send(datagram(), source=STRANGER)
        bench.start()
        assert packets.settled(tun.take()) == forwarded(datagram())
        assert "not_a_peer" not in bench.end()


def test_peers_come_and_go_while_packets_travel(bench: Bench) -> None:
    bench.start()
    bench.plane.set_peer(IPv4Network("10.5.5.0/24"), IPv4Address(STRANGER))
    bench.tun.give(datagram("10.5.5.5"))
    assert bench.received(STRANGER) == [forwarded(datagram("10.5.5.5"))]
    bench.send(datagram(), source=STRANGER)
    assert packets.settled(bench.tun.take()) == forwarded(datagram())
    bench.plane.drop_peer(IPv4Network("10.5.5.0/24"))
    bench.tun.give(datagram("10.5.5.5"))
    assert bench.tun.take()[20:22] == bytes([3, 0])
    bench.send(datagram(), source=STRANGER)
    wait_for(lambda: bench.plane.counters()["not_a_peer"], 60, "the stranger to be heard of")
    assert set(bench.plane.counters()) == set(COUNTERS)


def test_packets_that_the_tun_refuses_are_counted_and_the_rest_goes_on(bench: Bench) -> None:
    bench.tun.inner.shutdown(socket.SHUT_WR)
    bench.send(datagram())
    bench.start()
    wait_for(lambda: bench.plane.counters()["write_failed"], 60, "the refusal")
    bench.tun.give(datagram())
    assert bench.received(PEER) == [forwarded(datagram())]
    assert bench.end() == {"write_failed": 1, "sent_packets": 1, "sent_bytes": len(datagram())}


# ---- the end ---------------------------------------------------------------------------------------


def test_plane_holds_the_tun_until_it_is_stopped(bench: Bench) -> None:
    bench.start()
    bench.tun.give(datagram())
    assert bench.received(PEER)
    assert bench.tun.is_held
    bench.end()
    assert not bench.failures
    assert not bench.tun.is_held


def test_plane_that_was_stopped_before_it_runs_carries_nothing(bench: Bench) -> None:
    bench.plane.stop()
    bench.tun.give(datagram())
    bench.start()
    bench.wait()
    assert not bench.failures
    assert bench.end() == {}


def gone(*_: object) -> NoReturn:
    raise OSError(errno.EBADFD, os.strerror(errno.EBADFD))


@pytest.mark.parametrize("call", ["readv", "write"])
def test_python_plane_ends_with_its_device(tun: Tun, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with Bench(tun, PythonPlane) as bench:
        monkeypatch.setattr(os, call, gone)
        bench.send(datagram())
        bench.start()
        bench.wait()
        assert [getattr(each, "errno", None) for each in bench.failures] == [errno.EBADFD]
        assert not tun.is_held


def test_native_plane_ends_when_its_thread_is_interrupted(tun: Tun) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> NoReturn:
        raise Interrupted

    with Bench(tun, NativePlane) as bench:
        ended = threading.Event()
        forced: list[str] = []

        def end_it() -> None:
            tun.give(datagram())
            bench.received(PEER)
            os.kill(os.getpid(), signal.SIGUSR1)
            if not ended.wait(20):
                forced.append("it had to be stopped")
                bench.plane.stop()

        before = signal.signal(signal.SIGUSR1, interrupt)
        other = threading.Thread(target=end_it)
        other.start()
        try:
            with pytest.raises(Interrupted):
                bench.plane.run()
        finally:
            ended.set()
            other.join()
            signal.signal(signal.SIGUSR1, before)
        assert forced == []
        assert not tun.is_held


# ---- the native plane's offloads -------------------------------------------------------------------

ALL = CHECKSUMS | TSO4 | TSO_ECN | USO4 | USO6


def gro_of(bench: Bench) -> int:
    return bench.wire.getsockopt(socket.IPPROTO_UDP, UDP_GRO)


@pytest.mark.parametrize(
    ("granted", "level"),
    [(ALL, "all"), (ALL & ~USO6, "tso"), (CHECKSUMS | TSO4 | TSO_ECN, "tso"), (CHECKSUMS | TSO4, "none")],
)
def test_native_plane_asks_for_what_the_kernel_grants(tun: Tun, granted: int, level: str) -> None:
    tun.offloads = granted
    with Bench(tun, NativePlane) as bench:
        assert isinstance(bench.plane, NativePlane)
        assert bench.plane.offloads == level
        assert tun.has_vnet_header is (level != "none")
        bench.start()
        tun.give(datagram())
        assert bench.received(PEER) == [forwarded(datagram())]
        bench.send(datagram())
        assert packets.settled(tun.take()) == forwarded(datagram())


def test_device_that_another_process_has_is_asked_for_once(tun: Tun) -> None:
    tun.refusal = errno.EBUSY
    with pytest.raises(OSError, check=lambda failure: failure.errno == errno.EBUSY):
        Bench(tun, NativePlane)
    assert len(tun.opened) == 1
    assert not tun.is_held


def test_datagrams_come_merged_only_while_the_native_plane_has_the_socket(tun: Tun) -> None:
    with Bench(tun, NativePlane) as bench:
        assert gro_of(bench)
        bench.start()
        bench.end()
        assert not gro_of(bench)


def test_a_kernel_without_udp_offloads_suffices(tun: Tun) -> None:
    """It refuses their options as any kernel does on a socket of TCP."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as wire:
        assert native_plane_on(tun, wire).counters()["sent_packets"] == 0


def test_socket_that_refuses_options_for_another_reason_is_a_failure(tun: Tun) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire,
        pytest.raises(OSError, check=lambda failure: failure.errno == errno.EOPNOTSUPP),
    ):
        native_plane_on(tun, wire)


def native_plane_on(tun: Tun, wire: socket.socket) -> NativePlane:
    return NativePlane(Wire(tun.name, wire.fileno(), IPv4Address(TUN_ADDRESS), 1472, 1, False))


# ---- the choice ------------------------------------------------------------------------------------


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    native._library.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    yield
    native._library.cache_clear()


@pytest.mark.parametrize(
    ("data_plane", "planes"),
    [
        ("auto", [(NativePlane, "the faster one"), (PythonPlane, "nothing else works")]),
        ("native", [(NativePlane, "as DataPlane says")]),
        ("python", [(PythonPlane, "as DataPlane says")]),
    ],
)
def test_the_native_plane_comes_first_unless_the_network_config_says_otherwise(
    data_plane: str, planes: list[Offer]
) -> None:
    assert offers(data_plane) == planes


@pytest.mark.usefixtures("no_library")
def test_without_its_library_the_native_plane_is_not_offered() -> None:
    assert offers("python") == [(PythonPlane, "as DataPlane says")]
    ((kind, why),) = offers("auto")
    assert kind is PythonPlane
    library = f"_udp_pump{EXTENSION_SUFFIXES[0]}"
    assert re.fullmatch(f"no native one: {library} was not built; install flanneld again .*", why)
    with pytest.raises(OSError, match=r"no native data plane: .* was not built") as failed:
        offers("native")
    assert failed.value.errno == errno.ENOSYS


def failing(failure: OSError) -> Offer:
    def make(_: Wire) -> NoReturn:
        raise failure

    return make, "the best"


def working(bench: Bench) -> Offer:
    return lambda _: bench.plane, "the next"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(OSError(errno.EPERM, "not permitted"), "not permitted"), (OSError("no memory"), "no memory")],
)
def test_plane_that_fails_here_is_replaced_by_the_next_one(
    bench: Bench, failure: OSError, reason: str
) -> None:
    found = bench.plane, f"the better one fails: {reason}"
    assert build([failing(failure), working(bench)], bench.ends) == found
    assert build([working(bench), failing(failure)], bench.ends) == (bench.plane, "the next")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY])
def test_failure_that_the_next_plane_would_meet_too_is_raised(bench: Bench, code: int) -> None:
    """EBUSY: the device is held by another process, as for any plane."""
    failure = OSError(code, os.strerror(code))
    others = [working(bench)] if code == errno.EBUSY else []
    with pytest.raises(OSError, check=lambda raised: raised is failure):
        build([failing(failure), *others], bench.ends)
