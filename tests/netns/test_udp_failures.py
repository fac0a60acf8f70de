"""The udp backend among strangers, and with a pump that does not do what it should."""

from __future__ import annotations

import errno
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from flanneld.backends.udp.client import ProxyClient
from flanneld.network import interfaces
from tests.lab import Lab, Node, wait_for
from tests.lab.namespace import suspend
from tests.netns.pair import connect
from tests.netns.test_capabilities import NOBODY
from tests.netns.test_cleanup import cleanup
from tests.netns.test_udp import TUN, pid_of, pump_of

#: Nobody, and root in a container that has the host's network: without the right to configure it.
STRANGERS = {
    "nobody": ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all"),
    "root": ("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
}
#: Tell the pump to end, to send all to one peer, and noise of the greatest length; then say how that ended.
TALK = """
import socket
for message in (b"Q", b"q", b"p" + bytes(4000 * 9), b"d" + bytes(9), b"l", b"x" * 65536):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect("\\0flannel-pump/flannel0")
        try:
            stranger.send(message)
            print(stranger.recv(65536))
        except ConnectionError:
            print(b"")
"""
#: Be there first, and say nothing.
POSE = """
import signal, socket
posing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
posing.bind("\\0flannel-pump/flannel0")
posing.listen()
print("there", flush=True)
signal.pause()
"""
#: Stand in line, more often than there are places; leave at once and come again.
CROWD = """
import socket, threading
def come_and_go():
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\\0flannel-pump/flannel0")
for _ in range(200):
    threading.Thread(target=come_and_go).start()
print("there", flush=True)
"""


@pytest.fixture
def nodes(lab: Lab) -> list[Node]:
    """Two nodes whose containers reach each other."""
    nodes = lab.cluster({"Type": "udp"})
    connect(*nodes)
    return nodes


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The command that makes another one that of a stranger."""
    return STRANGERS[request.param]


def test_the_pump_does_not_listen_to_strangers(nodes: list[Node], stranger: tuple[str, ...]) -> None:
    node, _ = nodes
    before = pump_of(node)
    assert node.run(*stranger, "/usr/bin/python3", "-c", TALK).stdout.split() == ["b''"] * 6
    assert pump_of(node) == before
    connect(*nodes)


@contextmanager
def running(node: Node, stranger: tuple[str, ...], program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A stranger's program, once it has said that it is under way."""
    file = node.directory / "stranger"
    with file.open("wb") as output:
        process = node.namespace.start(*stranger, "/usr/bin/python3", "-c", program, output=output)
    wait_for(file.read_text, what="the stranger to begin")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_stranger_with_the_pumps_name_is_told_of_and_keeps_nobody_from_anything(
    lab: Lab, stranger: tuple[str, ...]
) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "udp"}})
    node, peer = lab.add_nodes(2)
    peer.start()
    with running(node, stranger, POSE) as process:
        node.start()
        node.wait_ready(20)
        node.wait_for_log(
            "Another process poses as the udp proxy at @flannel-pump/flannel0; find it with: ss -xlp"
        )
        peer.wait_ready(20)
        connect(node, peer)
        before = pid_of(node)
        node.kill()
        node.start()
        node.wait_ready(20)
        assert pid_of(node) == before
        assert process.poll() is None
        assert "udp proxy of flannel0" in cleanup_after(node)
        assert pump_of(node) is None


def test_a_crowd_of_strangers_does_not_keep_the_daemon_from_the_pump(nodes: list[Node]) -> None:
    node, peer = nodes
    before = pid_of(node)
    with running(node, STRANGERS["nobody"], CROWD):
        for _ in range(5):  # each waits its turn
            pid = wait_for(lambda: (pump := pump_of(node)) and pump.pid, what="an answer of the pump")
            assert pid == before
        node.stop()
        node.start()
        node.wait_ready(20)
    assert pid_of(node) == before
    connect(node, peer)


def test_a_pump_that_hangs_is_replaced(nodes: list[Node]) -> None:
    node, peer = nodes
    before = pid_of(node)
    suspend(before)
    assert not node.container().reaches(peer.container(), 0.5)
    node.wait_for_log(f"Killed the udp proxy of {TUN}, process {before}: no answer for", 60)
    node.wait_for_log(f"Restored udp proxy of {TUN}", 30)
    assert pid_of(node) != before
    connect(node, peer)


def test_a_daemon_that_finds_a_pump_that_hangs_replaces_it(nodes: list[Node]) -> None:
    node, peer = nodes
    before = pid_of(node)
    node.kill()
    suspend(before)
    node.start()
    node.wait_ready(60)
    assert pid_of(node) != before
    connect(node, peer)


def test_a_pump_that_hangs_is_cleaned_up(nodes: list[Node]) -> None:
    node, _ = nodes
    before = pid_of(node)
    node.stop()
    with pidfd_of(before) as pidfd:
        suspend(before)
        assert f"removed udp proxy of {TUN}, which does not answer" in cleanup_after(node)
        assert has_ended(pidfd)
    assert node.link(TUN) is None


def test_a_pump_of_another_version_is_replaced_and_leaves_its_peers(nodes: list[Node]) -> None:
    node, peer = nodes
    pump = pump_of(node)
    assert pump
    node.stop()
    other = replace(pump.settings, version="0.0.0")
    with node.namespace.entered():
        ProxyClient(TUN).start(other)
    assert (before := pump_of(node))
    assert before.settings == other
    connect(node, peer)
    node.start()
    node.wait_ready(20)
    after = pump_of(node)
    assert after
    assert (after.settings, after.pid == before.pid) == (pump.settings, False)
    connect(node, peer)


@contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def cleanup_after(node: Node) -> str:
    """What a cleanup says that it did."""
    if node.running:
        node.stop()
    return "\n".join(cleanup(node))


def test_a_pump_whose_device_got_another_name_is_replaced(nodes: list[Node]) -> None:
    node, peer = nodes
    before = pid_of(node)
    node.namespace.ip(f"link set {TUN} down", f"link set {TUN} name other")
    node.wait_for_log("Restored udp proxy of flannel0", 30)
    assert pid_of(node) != before
    connect(node, peer)


def test_a_device_that_another_daemon_makes_at_the_same_time_is_left_to_it(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    with node.namespace.entered():
        interfaces.make(TUN)
        with pytest.raises(OSError, check=lambda failure: failure.errno == errno.EBUSY):
            interfaces.make(TUN)
