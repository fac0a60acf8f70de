"""Containers of peers: which of those that a daemon names are asked, and which one stands for all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

import pytest

from flanneld.ctl.beyond import containers_of_peers
from flanneld.ctl.paths import PathToPeer
from flanneld.network.query import answer, decode
from tests.unit.ctl.documents import status_of

#: What the nodes of three subnets of loopback name: every address of loopback answers, and none of 240/4.
NAMED = {
    "127.0.5.0": ["127.0.5.0", "127.0.6.9", "127.0.5.9"],
    "127.0.6.0": ["nonsense", "240.0.6.8", "127.0.6.9"],
    "127.0.7.0": ["240.0.7.8", "240.0.7.9"],
}
STATUS = status_of(
    {
        "schema": 2,
        "mtu": 1450,
        "peers": [
            {"subnets": [f"127.0.{number}.0/24", f"240.0.{number}.0/24"], "public_ips": [f"192.0.2.{number}"]}
            for number in (5, 6, 7)
        ],
    }
)


class Daemons:
    """The daemons of some nodes, which answer queries at one port of their addresses."""

    def __init__(self, named: Mapping[str, list[str]]) -> None:
        self.asked: list[str] = []
        self.port = 0
        self._sockets = [self._listen(address) for address in named]
        for sock, names in zip(self._sockets, named.values(), strict=True):
            threading.Thread(target=self._serve, args=(sock, names), daemon=True).start()

    def _listen(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((address, self.port))
        self.port = sock.getsockname()[1]
        return sock

    def _serve(self, sock: socket.socket, names: list[str]) -> None:
        while True:
            data, asker = sock.recvfrom(65535)
            query = decode(data)
            if query is None:
                return
            self.asked.append(sock.getsockname()[0])
            sock.sendto(answer(query, {"containers": names}), asker)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for each in self._sockets:
                sock.sendto(b"", each.getsockname())


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    made = Daemons(NAMED)
    yield made
    made.close()


def path(name: str, target: str, peer: int, carried: int | None = 1450) -> PathToPeer:
    return PathToPeer(name, ip_address(target), 1450, carried, f"127.0.{peer}.0/24")


def tunnels(*peers: int) -> list[PathToPeer]:
    return [path("tunnel", f"127.0.{peer}.0", peer) for peer in peers]


def test_one_container_stands_for_all_of_its_node(daemons: Daemons) -> None:
    found = containers_of_peers(STATUS, tunnels(5, 6, 7), daemons.port)
    assert [(each.name, str(each.target), each.peer, each.required, each.carried) for each in found] == [
        ("container", "127.0.5.9", "127.0.5.0/24", 1450, 1450),
        ("container", "127.0.6.9", "127.0.6.0/24", 1450, 1450),
        ("container", "240.0.7.8", "127.0.7.0/24", 1450, None),
    ]


@pytest.mark.parametrize(
    ("paths", "asked"),
    [
        ([path("underlay", "127.0.5.0", 5)], ["127.0.5.0"]),
        ([path("underlay", "127.0.6.0", 5), *tunnels(5)], ["127.0.5.0"]),
        ([path("underlay", "192.0.2.5", 5, None), *tunnels(5)], []),
        ([path("underlay", "192.0.2.5", 5), path("tunnel", "127.0.5.0", 5, None)], []),
        ([], []),
    ],
    ids=["no tunnel", "by the tunnel", "node is silent", "tunnel is silent", "no path"],
)
def test_node_is_asked_at_its_end_of_the_network_if_all_its_paths_answer(
    daemons: Daemons, paths: list[PathToPeer], asked: list[str]
) -> None:
    list(containers_of_peers(STATUS, paths, daemons.port))
    assert daemons.asked == asked
