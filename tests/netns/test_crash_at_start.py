"""A daemon is killed, as by kill -9, at many moments of its start, one start after the other, under ping."""

from __future__ import annotations

import sys

import pytest

from tests.lab import Lab, wait_for
from tests.netns.pair import connect, state

#: The daemon, which dies at its Nth system call of those that an audit hook of Python sees and that are no
#: imports. About a hundred make it ready.
PROGRAM = """
import os, signal, sys

left = int(sys.argv.pop(1))

def on_event(event, args):
    global left
    if event.partition(".")[0] in ("os", "socket", "subprocess", "fcntl") or (
        event == "open" and not str(args[0]).endswith((".py", ".pyc", ".so"))
    ):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

from flanneld.main import main

sys.addaudithook(on_event)
main()
"""


@pytest.mark.parametrize(("step", "least"), [(20, 4), pytest.param(1, 50, marks=pytest.mark.long)])
def test_daemon_that_is_killed_at_any_moment_of_its_start_costs_no_packet(
    lab: Lab, step: int, least: int
) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    before, subnet = state(node), node.subnet()
    node.kill()
    moments = 0
    with node.container().ping(peer.container()) as ping:
        for moment in range(1, 100_000, step):
            node.start(command=[sys.executable, "-c", PROGRAM, str(moment)])
            wait_for(lambda: not node.running or node.service_manager.ready(), 60, "its end or readiness")
            if node.running:
                break
            moments += 1
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert moments >= least
    wait_for(lambda: state(node) == before, 20, "the same objects as before")
    assert node.subnet() == subnet
