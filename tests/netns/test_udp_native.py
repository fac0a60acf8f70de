"""The native data plane between real TUN devices, over a real wire."""

from __future__ import annotations

import errno
import fcntl
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from flanneld.backends.udp.proxy import native
from flanneld.network import interfaces
from tests.lab import packets, wait_for
from tests.lab.packets import DONT_FRAGMENT, ICMP, UDP
from tests.netns.udp_plane import DEVICE
from tests.netns.udp_tunnel import (
    SIZES,
    End,
    Tunnel,
    add_tun,
    echo_over_tcp,
    echo_over_udp,
    open_socket,
    sniffer,
    tunnel,
)

UDP_SEGMENT = 103  # linux/udp.h


@pytest.fixture(scope="module", params=["all", "tso", "none"])
def offloaded(request: pytest.FixtureRequest) -> Iterator[Tunnel]:
    """A running pair for each amount of work that the kernel can leave to a plane; not to be changed."""
    with tunnel() as made:
        made.start(offloads=request.param)
        assert [end.tell("offloads") for end in made.ends] == [request.param] * 2
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    """A pair of a test's own, which runs."""
    with tunnel() as made:
        made.start()
        first, second = made.ends
        yield first, second


def ping(end: End, target: str, *options: str, patience: str = "30") -> str:
    done = end.container.run("ping", "-n", "-c", "1", "-W", patience, *options, target, check=False)
    return done.stdout + done.stderr


# ---- whatever the kernel can do ----


def test_tcp_arrives_as_it_was_sent(offloaded: Tunnel) -> None:
    first, second = (end.container for end in offloaded.ends)
    assert echo_over_tcp(first, second, 3 << 20)
    assert echo_over_tcp(second, first, 3 << 20)


def test_streams_beside_each_other_arrive_as_they_were_sent(offloaded: Tunnel) -> None:
    first, second = (end.container for end in offloaded.ends)
    results: list[bool] = []
    streams = [
        threading.Thread(target=lambda n=n: results.append(echo_over_tcp(first, second, 1 << 20, seed=n)))
        for n in range(3)
    ]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    assert results == [True] * 3


def test_datagrams_of_every_size_arrive(offloaded: Tunnel) -> None:
    first, second = (end.container for end in offloaded.ends)
    assert len(SIZES) == 78
    assert echo_over_udp(first, second, SIZES) == SIZES


def test_a_container_may_leave_segmentation_to_the_kernel(offloaded: Tunnel) -> None:
    first, second = (end.container for end in offloaded.ends)
    data = bytes(n % 251 for n in range(20 * 1200 + 77))
    with open_socket(second, socket.SOCK_DGRAM) as server, open_socket(first, socket.SOCK_DGRAM) as client:
        server.bind((second.address, 0))
        size = (1200).to_bytes(2, "little")
        client.sendmsg([data], [(socket.IPPROTO_UDP, UDP_SEGMENT, size)], 0, server.getsockname())
        assert b"".join(server.recv(65535) for _ in range(21)) == data


def test_the_largest_packet_passes_and_a_larger_one_is_refused_at_home(offloaded: Tunnel) -> None:
    first, second = offloaded.ends
    assert "1452 bytes from" in ping(first, second.container.address, "-M", "do", "-s", "1444")
    assert "mtu=1472" in ping(first, second.container.address, "-M", "do", "-s", "1445")
    assert "60008 bytes from" in ping(first, second.container.address, "-s", "60000")


def test_the_tunnel_takes_one_of_the_ttl_at_each_end(offloaded: Tunnel) -> None:
    first, second = offloaded.ends
    target = second.container.address
    before = [end.counter("ttl") for end in offloaded.ends]
    assert "From 10.5.1.1 icmp_seq=1 Time to live exceeded" in ping(first, target, "-t", "1")
    for silent in ("2", "3"):
        assert "0 received" in ping(first, target, "-t", silent, patience="0.5")
    assert "From 10.5.2.0 icmp_seq=1 Time to live exceeded" in ping(first, target, "-t", "4")
    assert "ttl=60" in ping(first, target, "-t", "5")
    assert [end.counter("ttl") - n for end, n in zip(offloaded.ends, before, strict=True)] == [1, 1]


# ---- the wire ----


def outer(capture: socket.socket, source: str) -> list[bytes]:
    """The packets of the tunnel that were seen so far."""
    capture.setblocking(False)
    found: list[bytes] = []
    while True:
        try:
            packet = capture.recv(65535)
        except BlockingIOError:
            return found
        if packet[9] == UDP and packet[12:16] == socket.inet_aton(source):
            found.append(packet)


def fragment_field(packet: bytes) -> int:
    return int.from_bytes(packet[6:8], "big")


def test_packets_within_the_path_mtu_carry_dont_fragment(pair: tuple[End, End]) -> None:
    first, second = pair
    with sniffer(second.node.namespace, "eth0") as capture:
        assert echo_over_tcp(first.container, second.container, 1 << 20)
        seen = outer(capture, first.node.address)
    assert max(len(packet) for packet in seen) > 1500  # The veth takes many in one.
    assert {fragment_field(packet) for packet in seen} == {DONT_FRAGMENT}


def test_a_way_with_a_smaller_mtu_gets_fragments(pair: tuple[End, End]) -> None:
    first, second = pair
    first.node.namespace.ip(f"route add {second.node.address}/32 dev eth0 mtu 1400")
    with sniffer(second.node.namespace, "eth0") as capture:
        assert "1452 bytes from" in ping(first, second.container.address, "-M", "do", "-s", "1444")
        seen = outer(capture, first.node.address)
    assert len(seen) == 2
    assert not any(fragment_field(packet) & DONT_FRAGMENT for packet in seen)
    assert echo_over_tcp(first.container, second.container, 1 << 20)
    assert echo_over_udp(first.container, second.container, SIZES) == SIZES
    assert first.counter("send_failed") == 0


def test_corrupted_packets_are_never_delivered(pair: tuple[End, End]) -> None:
    first, second = pair
    first.stop()
    assert first.start("corrupting") is None
    first.tell("set", second.subnet, second.node.address)
    assert echo_over_tcp(first.container, second.container, 1 << 20)
    assert first.counter("spoilt") > 5


# ---- peers ----


def deliver(first: End, second: End, patience: float) -> bool:
    """Does one of several datagrams arrive at the other container, whether that can answer or not?

    A device whose plane has just begun may lose the first ones.
    """
    with open_socket(second.container, socket.SOCK_DGRAM) as server:
        server.bind((second.container.address, 0))
        server.settimeout(0.1)
        end = time.monotonic() + patience
        with open_socket(first.container, socket.SOCK_DGRAM) as client:
            while time.monotonic() < end:
                client.sendto(b"hello", server.getsockname())
                with suppress(TimeoutError):
                    return server.recv(100) == b"hello"
    return False


@pytest.mark.parametrize("accept_any", [False, True])
def test_only_known_sources_may_send(pair: tuple[End, End], accept_any: bool) -> None:
    first, second = pair
    second.stop()
    second.start(accept_any=accept_any)
    second.tell("set", first.subnet, "198.18.0.99")
    assert deliver(first, second, 10 if accept_any else 0.5) == accept_any
    assert bool(second.counter("not_a_peer")) != accept_any


def test_a_peer_goes_and_comes_back(pair: tuple[End, End]) -> None:
    first, second = pair
    assert deliver(first, second, 10)
    first.tell("drop", second.subnet)
    first.tell("drop", second.subnet)
    assert not deliver(first, second, 0.5)
    assert first.counter("no_route") > 0
    first.tell("set", second.subnet, second.node.address)
    assert deliver(first, second, 10)


def test_peers_come_and_go_while_traffic_flows(pair: tuple[End, End]) -> None:
    first, second = pair
    results: list[bool] = []
    done = threading.Event()

    def send() -> None:
        while not done.is_set():
            results.append(echo_over_tcp(first.container, second.container, 1 << 20))

    stream = threading.Thread(target=send)
    stream.start()
    try:
        for number in range(200):
            for end, peer in ((first, second), (second, first)):
                end.tell("set", f"10.5.{100 + number % 100}.0/24", "198.18.0.99")
                end.tell("set", peer.subnet, peer.node.address)
                end.tell("drop", f"10.5.{100 + (number + 50) % 100}.0/24")
    finally:
        done.set()
        stream.join()
    assert results
    assert all(results)


@pytest.mark.parametrize("payload", [300, 3000])
def test_unreachable_packets_are_answered_with_valid_checksums(pair: tuple[End, End], payload: int) -> None:
    first, _ = pair
    with sniffer(first.node.namespace, DEVICE) as capture:
        with open_socket(first.container, socket.SOCK_DGRAM) as client:
            client.bind((first.container.address, 0))
            port = client.getsockname()[1]
            size = [(socket.IPPROTO_UDP, UDP_SEGMENT, (1000).to_bytes(2, "little"))] if payload > 1000 else []
            client.sendmsg([b"x" * payload], size, 0, ("10.5.99.1", 9))
        answer = next(packet for packet in iter(lambda: capture.recv(65535), None) if packet[9] == ICMP)
    assert packets.is_sound(answer)
    assert (answer[8], answer[4:8], answer[20:28]) == (8, bytes(4), b"\3\0" + answer[22:24] + bytes(4))
    assert answer[12:20] == bytes([10, 5, 1, 0]) + socket.inet_aton(first.container.address)
    quoted, datagram = answer[28:48], packets.udp(b"x" * min(payload, 1000), ports=(port, 9))
    sent = packets.finished(packets.ipv4(datagram, UDP, first.container.address, "10.5.99.1"))
    assert packets.with_ip_checksum(quoted) == quoted
    assert (quoted[12:], answer[48:]) == (sent[12:20], sent[20:28])


# ---- begin and end ----


def test_a_plane_follows_one_that_could_do_more_or_less(pair: tuple[End, End]) -> None:
    first, second = pair
    for offloads in ("none", "all", "tso", "none"):
        assert first.stop() is None
        assert first.start(offloads=offloads) is None
        first.tell("set", second.subnet, second.node.address)
        assert echo_over_tcp(first.container, second.container, 1 << 19)
        assert echo_over_tcp(second.container, first.container, 1 << 19)


def test_a_stop_needs_no_pause_in_the_traffic(pair: tuple[End, End]) -> None:
    first, second = pair
    done = threading.Event()

    def send(end: End, other: End) -> None:
        with open_socket(end.container, socket.SOCK_DGRAM) as client:
            while not done.is_set():
                client.sendto(b"x" * 1000, (other.container.address, 9))

    senders = [threading.Thread(target=send, args=ends) for ends in ((first, second), (second, first))]
    for sender in senders:
        sender.start()
    try:
        wait_for(lambda: first.counter("received_packets") > 100, 10, "the flood")
        assert first.stop() is None
    finally:
        done.set()
        for sender in senders:
            sender.join()


@pytest.mark.parametrize(
    ("request_number", "bits", "left"),
    [
        pytest.param(interfaces._TUNSETOFFLOAD, native._USO4, "tso", id="before Linux 6.2"),
        pytest.param(interfaces._TUNSETIFF, interfaces._IFF_VNET_HDR, "none", id="no vnet headers"),
    ],
)
def test_an_older_kernel_is_asked_for_less(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch, request_number: int, bits: int, left: str
) -> None:
    first, _ = pair
    first.stop()
    ask = fcntl.ioctl

    def ask_older(descriptor: Any, number: int, argument: Any) -> Any:
        flags = argument if isinstance(argument, int) else int.from_bytes(argument[16:18], sys.byteorder)
        if number == request_number and flags & bits:
            raise OSError(errno.EINVAL, "an older kernel does not know this")
        return ask(descriptor, number, argument)

    monkeypatch.setattr(fcntl, "ioctl", ask_older)
    with first.node.namespace.entered():
        device, offloads = native._attach(DEVICE, "all")
    device.close()
    assert offloads == left


def test_a_device_that_goes_ends_the_plane(pair: tuple[End, End]) -> None:
    first, _ = pair
    first.node.namespace.ip(f"link del {DEVICE}")
    assert first.tell("result") == "EBADFD"


def test_a_device_that_is_missing_is_not_made(pair: tuple[End, End]) -> None:
    first, second = pair
    first.stop()
    first.node.namespace.ip(f"link del {DEVICE}")
    assert first.start() == "ENODEV"
    assert first.node.link(DEVICE) is None
    add_tun(first.node.namespace, first.number)
    assert first.start() is None
    first.tell("set", second.subnet, second.node.address)
    assert deliver(first, second, 10)


def test_a_device_that_another_process_has_is_refused(pair: tuple[End, End]) -> None:
    first, second = pair
    other = End(first.node, first.number, first.container)
    second.stop()
    assert other.start(bind="127.0.0.1") == "EBUSY"
