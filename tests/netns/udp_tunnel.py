"""Two nodes with a TUN, a data plane and a container each, and what the containers say to each other."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.lab import Container, Lab, Namespace, Node
from tests.lab.daemon import ROOT
from tests.netns.udp_plane import DEVICE, MTU

ETH_P_IP = 0x0800
ECHO = 7001
#: The sizes at which things change, and others.
SIZES = [
    *(0, 1, 2, 3, 63, 64, 65, 1400, 1443, 1444, 1445, 1472, 2000, 2888, 3000, 9001, 30001, 65000),
    *(random.Random(4).randrange(1, 1445) for _ in range(60)),
]


@dataclass
class End:
    """A node, what carries its packets, and its container."""

    node: Node
    number: int
    container: Container
    process: subprocess.Popen[str] | None = None

    @property
    def subnet(self) -> str:
        return f"10.5.{self.number}.0/24"

    def start(self, plane: str = "native", **options: Any) -> str | None:
        """Start a plane; the name of the error if it fails to."""
        about = {"plane": plane, "bind": self.node.address, "address": f"10.5.{self.number}.0", **options}
        command = [sys.executable, "-m", "tests.netns.udp_plane", json.dumps(about)]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.node.namespace.name, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        failed: str | None = self._answer()["failed"]
        if failed:
            self.close()
        return failed

    def tell(self, *command: str) -> Any:
        assert self.process
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def counter(self, name: str) -> int:
        number: int = self.tell("counters")[name]
        return number

    def stop(self) -> str | None:
        """Stop the plane and its process; the name of the error that it ended with."""
        assert self.process
        assert self.process.stdin
        self.tell("stop")
        result: str | None = self.tell("result")
        self.close()
        return result

    def close(self) -> None:
        if self.process:
            with suppress(OSError):
                self.process.communicate(timeout=60)
            self.process = None

    def _answer(self) -> Any:
        assert self.process
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the process of the data plane has ended"
        return json.loads(line)


@dataclass
class Tunnel:
    lab: Lab
    ends: list[End] = field(default_factory=list)

    def start(self, **options: Any) -> None:
        """Start native planes that know each other, and wait until containers reach each other."""
        first, second = self.ends
        for end, peer in ((first, second), (second, first)):
            assert end.start(**options) is None
            end.tell("set", peer.subnet, peer.node.address)
        first.container.wait_for_reply(second.container, 10)


@contextmanager
def tunnel() -> Iterator[Tunnel]:
    """The nodes, without planes as yet."""
    with Lab() as lab:
        made = Tunnel(lab)
        try:
            for number, node in enumerate(lab.add_nodes(2), 1):
                add_tun(node.namespace, number)
                node.subnet_file.write_text(f"FLANNEL_SUBNET=10.5.{number}.1/24\nFLANNEL_MTU={MTU}\n")
                made.ends.append(End(node, number, node.container()))
            yield made
        finally:
            for end in made.ends:
                end.close()


def add_tun(namespace: Namespace, number: int) -> None:
    namespace.ip(
        f"tuntap add dev {DEVICE} mode tun",
        f"address add 10.5.{number}.0/32 dev {DEVICE}",
        f"link set {DEVICE} mtu {MTU} up",
        f"route add 10.5.0.0/16 dev {DEVICE}",
    )


def open_socket(where: Container, kind: int) -> socket.socket:
    with where.namespace.entered():
        made = socket.socket(socket.AF_INET, kind)
    made.settimeout(120)
    return made


def echo_over_tcp(first: Container, second: Container, size: int, seed: int = 1) -> bool:
    """Send random bytes in writes of odd sizes there and back; did the same come back?"""
    chance = random.Random(seed)
    data = chance.randbytes(size)
    with (
        open_socket(second, socket.SOCK_STREAM) as listener,
        open_socket(first, socket.SOCK_STREAM) as client,
    ):
        listener.bind((second.address, 0))
        listener.listen()
        server = threading.Thread(target=_echo, args=(listener,))
        server.start()
        client.connect(listener.getsockname())
        writer = threading.Thread(target=_write, args=(client, data, chance))
        writer.start()
        back = hashlib.sha256()
        while block := client.recv(1 << 16):
            back.update(block)
        for thread in (writer, server):
            thread.join()
    return back.digest() == hashlib.sha256(data).digest()


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.settimeout(120)
    with connection:
        while block := connection.recv(1 << 16):
            connection.sendall(block)


def _write(client: socket.socket, data: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(data):
        size = chance.choice((1, 13, 999, 1431, 1432, 5001, 65535, 200000))
        client.sendall(data[at : at + size])
        at += size
    client.shutdown(socket.SHUT_WR)


def echo_over_udp(first: Container, second: Container, sizes: list[int]) -> list[int]:
    """The sizes of those datagrams that came back as they were sent."""
    with open_socket(second, socket.SOCK_DGRAM) as server, open_socket(first, socket.SOCK_DGRAM) as client:
        server.bind((second.address, 0))
        client.connect(server.getsockname())
        return [size for size in sizes if any(_echo_one(client, server, size) for _ in range(3))]


def _echo_one(client: socket.socket, server: socket.socket, size: int) -> bool:
    data = random.Random(size).randbytes(size)
    for end in (client, server):
        end.settimeout(20)
    with suppress(TimeoutError):
        client.send(data)
        there, source = server.recvfrom(65535)
        server.sendto(there, source)
        return there == data and client.recv(65535) == data
    return False


def sniffer(namespace: Namespace, device: str) -> socket.socket:
    """Every IPv4 packet that comes and goes there."""
    with namespace.entered():
        # A socket made with a protocol gets the packets of all devices until it is bound.
        made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        made.bind((device, ETH_P_IP))
    made.settimeout(60)
    return made
