"""Crowds of connections that say nothing keep nobody from an answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.lab import Lab, Node
from tests.netns.test_seeing import HEALTH_PORT, flannelctl, settled

#: More than the server has room for.
CROWD = 90


@contextmanager
def crowd(source: Node, target: str, family: socket.AddressFamily) -> Iterator[None]:
    """Idle connections from a node to the health server."""
    with ExitStack() as idle:
        with source.namespace.entered():
            for _ in range(CROWD):
                connection = idle.enter_context(socket.socket(family))
                connection.settimeout(10)
                connection.connect((target, HEALTH_PORT))
        yield


def probe(source: Node, target: str) -> str:
    """What a kubelet or a load balancer hears, which waits for a second."""
    return source.run("curl", "-s", "-m", "1", f"http://{target}:{HEALTH_PORT}/healthz", check=False).stdout


@pytest.mark.parametrize("family", [4, 6])
def test_idle_connections_from_elsewhere_keep_no_probe_from_its_answer(lab: Lab, family: int) -> None:
    address = {4: "0.0.0.0", 6: "::"}[family]
    node, peer = settled(lab, f"--healthz-port={HEALTH_PORT}", f"--healthz-ip={address}")
    target, own = (node.address, "127.0.0.1") if family == 4 else (node.ipv6_address, "[::1]")
    shown = target if family == 4 else f"[{target}]"
    sockets = socket.AF_INET if family == 4 else socket.AF_INET6
    with crowd(peer, target, sockets):
        for _ in range(5):
            assert probe(node, own) == "flanneld is running"
            assert probe(node, shown) == "flanneld is running"
            assert probe(peer, shown) == "flanneld is running"


def test_readers_of_the_status_that_hang_keep_nobody_from_it(lab: Lab) -> None:
    node, _ = settled(lab)
    path = str(node.subnet_file.with_name("flanneld.sock"))
    with ExitStack() as hanging:
        for _ in range(10):
            hanging.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        done = flannelctl(node, "status")
    assert done.returncode == 0, done.stdout
