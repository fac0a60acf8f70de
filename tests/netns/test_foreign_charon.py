"""The ipsec backend beside a charon that another program has started, as a distribution's service does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from flanneld.backends.ipsec import charon
from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, charon_of, loaded, with_own_run
from tests.netns.test_ipsec import SOON, all_of, start, talk

pytestmark = pytest.mark.needs_kernel("esp")


class OtherProgram:
    """Program that runs charon on a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runs = 0
        self.start()

    def start(self) -> None:
        self._runs += 1
        with (self._node.directory / f"other-charon-{self._runs}.log").open("wb") as output:
            command = with_own_run(self._node, charon.find_charon())
            self.process: subprocess.Popen[bytes] = self._node.namespace.start(*command, output=output)
        wait_for(lambda: charon_of(self._node) == self.process.pid, SOON, "another program's charon")

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait()

    def is_ended(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Lab, Node, Node, OtherProgram]]:
    """Two nodes whose containers reach each other. The first one's charon is another program's."""
    with Lab() as lab:
        lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
        node, peer = lab.add_nodes(2)
        other = OtherProgram(node)
        try:
            for each in (node, peer):
                start(each)
                each.wait_ready()
            talk(node, peer)
            yield lab, node, peer, other
        finally:
            other.end()


Cluster = tuple[Lab, Node, Node, OtherProgram]


def test_it_is_used(cluster: Cluster) -> None:
    _, node, peer, other = cluster
    assert charon_of(node) == other.process.pid
    assert "Started charon" not in node.log()
    assert loaded(node) == all_of(node, peer)


def test_one_that_hangs_is_named_and_not_killed(cluster: Cluster) -> None:
    _, node, peer, other = cluster
    os.kill(other.process.pid, signal.SIGSTOP)
    node.wait_for_log("charon does not answer", SOON)
    os.kill(other.process.pid, signal.SIGCONT)
    wait_for(lambda: loaded(node) == all_of(node, peer), SOON, "charon to answer")
    assert not other.is_ended()
    assert charon_of(node) == other.process.pid
    assert "Killing charon" not in node.log()
    talk(node, peer)


def test_one_that_somebody_restarts_gets_keys_and_connections_again(cluster: Cluster) -> None:
    _, node, peer, other = cluster
    with node.paused():
        other.end()
        other.start()
        assert loaded(node) == ([], [])
    wait_for(lambda: loaded(node) == all_of(node, peer), SOON, "keys and connection to be loaded")
    assert charon_of(node) == other.process.pid
    talk(node, peer)


def test_none_is_ended(cluster: Cluster) -> None:
    """Neither by the end of the daemon, nor by its cleanup, nor by another backend."""
    lab, node, peer, other = cluster
    node.stop()
    own = (f"--etcd-endpoints={lab.etcd.endpoint}", f"--subnet-file={node.subnet_file}")
    assert "action block" in node.run(*with_own_run(node, *own_command(), *own, "--cleanup")).stdout
    assert not other.is_ended()
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "host-gw"}})
    start(node)
    node.wait_ready()
    node.wait_for_log("In sync with", SOON)
    node.stop()
    assert not other.is_ended()
    assert charon_of(node) == other.process.pid
    lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
    start(node)
    node.wait_ready()
    talk(node, peer)
