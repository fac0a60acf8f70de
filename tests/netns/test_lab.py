"""The laboratory itself: what the other tests take for granted."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.lab import CommandError, EtcdError, Lab, Node, own_command, wait_for
from tests.lab.daemon import ROOT
from tests.lab.forks import OWN_UUID, exact
from tests.lab.namespace import inhabitants, named
from tests.lab.wait import PATIENCE
from tests.netns.charons import with_own_run

#: A daemon as small as can be: writes subnet.env where it is told, and waits.
STAND_IN = (
    sys.executable,
    "-c",
    "import sys, time, pathlib\n"
    "file = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--subnet-file='))\n"
    "pathlib.Path(file).write_text('FLANNEL_NETWORK=10.5.0.0/16\\nFLANNEL_SUBNET=10.5.7.1/24\\n'\n"
    "                              'FLANNEL_IPV6_SUBNET=fc00:5:0:7::1/64\\nFLANNEL_MTU=1450\\n')\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n",
)


def root_links() -> str:
    return subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout


def test_nodes_reach_each_other_and_etcd_in_both_families(lab: Lab) -> None:
    first, second = lab.add_nodes(2)
    for target in (second.address, second.ipv6_address, lab.etcd.address):
        first.run("ping", "-n", "-c", "1", "-W", "30", target)
    assert first.routes("eth0")[0]["gateway"] == lab.etcd.address
    assert (first.link("eth0") or {})["mtu"] == 1500


def facts(node: Node) -> dict[str, Any]:
    """Return what others see of the daemon of a node."""
    process = Path("/proc", str(node.pid))
    return {
        **{name: str((process / name).readlink()) for name in ("cwd", "exe", "ns/net", "fd/0", "fd/2")},
        "arguments": (process / "cmdline").read_text().split("\0"),
        "name": (process / "comm").read_text(),
        "parent": re.findall(r"PPid:\s(\d+)", (process / "status").read_text()),
        "devices": sorted(path.name for path in (process / "root/sys/class").glob("net/*")),
        "run": sorted(path.name for path in (process / "root/run").iterdir()),
        "firmware": [path.read_text() for path in (process / "root/sys/class").glob("dmi/id/product_uuid")],
    }


@pytest.mark.parametrize(
    "wrapped",
    [lambda _, *command: command, with_own_run, lambda _, *command: (*OWN_UUID, "4c4c4544", *command)],
    ids=["", "its own /run", "its own UUID"],
)
def test_forked_daemon_is_like_one_that_was_started(lab: Lab, wrapped: Callable[..., Sequence[str]]) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes()
    seen = []
    for start in (nullcontext, exact):
        with start():
            node.start("--v=2", command=wrapped(node, *own_command()))
        node.wait_ready()
        seen.append(facts(node))
        assert node.daemon.end(signal.SIGINT, 20).status == 0
    forked, started = seen
    assert forked.pop("fd/2").replace("daemon-1", "daemon-2") == started.pop("fd/2")
    assert forked == started
    assert started["parent"] == [str(os.getpid())]


def test_forked_program_says_what_one_says_that_was_started(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    said = []
    for start in (nullcontext, exact):
        with start():
            done = node.run(*own_command(), "-no-such-flag", check=False)
            said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]
    assert said[0][0] == 2


def test_the_network_of_the_host_is_left_alone() -> None:
    before = root_links()
    with Lab(nodes=1) as lab:
        assert root_links() == before
        assert lab.nodes[0].link("eth0")
    assert root_links() == before


def test_two_labs_stand_side_by_side(lab: Lab) -> None:
    with Lab(nodes=1) as other:
        (node,) = lab.add_nodes(1)
        other.etcd.set("/whose", "other")
        assert lab.etcd.get("/whose") is None
        assert node.address == other.nodes[0].address
    assert lab.etcd.healthy()
    assert node.namespace.exists()


def test_a_closed_lab_leaves_nothing() -> None:
    with Lab(nodes=2) as lab:
        lab.nodes[0].start(command=STAND_IN)
        lab.nodes[0].wait_ready()
        lab.nodes[0].container()
        pids = inhabitants(named(lab.name))
        assert len(pids) == 2  # etcd and the daemon
    assert named(lab.name) == []
    assert not lab.directory.exists()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_next_run_removes_the_namespaces_of_a_killed_one() -> None:
    script = (
        "import os\nfrom tests.lab import Lab\n"
        "with Lab(1) as lab:\n    print(lab.name, flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    left = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert left.returncode == -signal.SIGKILL, left.stderr
    name = left.stdout.strip()
    # Another lab that starts in parallel may already have done it, so only the end is looked at.
    with Lab():
        assert named(f"{name}-") == []


def test_etcd_keeps_its_data_over_a_restart_and_a_kill(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16"})
    for how in (signal.SIGTERM, signal.SIGKILL):
        lab.etcd.restart(how)
        assert json.loads((lab.etcd.get("config") or {})["value"]) == {"Network": "10.5.0.0/16"}


def test_etcd_away_is_seen_as_away(lab: Lab) -> None:
    lab.etcd.stop()
    assert not lab.etcd.healthy()
    with pytest.raises(OSError, match="refused"):
        lab.etcd.get("config")


def test_etcd_keys_are_written_listed_and_deleted(lab: Lab) -> None:
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.7"})
    lab.etcd.put_lease("10.5.8.0/24", {"PublicIP": "198.18.0.8"}, ttl=None)
    assert lab.etcd.leases() == {
        "10.5.7.0/24": {"PublicIP": "198.18.0.7"},
        "10.5.8.0/24": {"PublicIP": "198.18.0.8"},
    }
    assert 86000 < (lab.etcd.lease("10.5.7.0/24") or {})["ttl"] <= 86400
    assert "ttl" not in (lab.etcd.lease("10.5.8.0/24") or {})
    lab.etcd.delete_lease("10.5.7.0/24")
    assert list(lab.etcd.leases()) == ["10.5.8.0/24"]
    lab.etcd.mkdir("/empty")
    assert lab.etcd.children("/empty") == []
    with pytest.raises(EtcdError, match="Key not found"):
        lab.etcd.delete_lease("10.5.7.0/24")


def test_a_daemon_is_started_watched_and_ended(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    node.start(command=STAND_IN)
    assert node.wait_ready()["FLANNEL_MTU"] == "1450"
    assert node.subnet() == "10.5.7.0/24"
    assert node.subnet(6) == "fc00:5:0:7::/64"
    assert Path(f"/proc/{node.pid}/cmdline").read_bytes().startswith(os.fsencode(sys.executable))
    wait_for(lambda: node.log() == "ready\n", what="the log")
    status, seconds = node.stop()
    assert status == -signal.SIGTERM
    assert 0 < seconds < PATIENCE
    node.start(command=STAND_IN)
    node.wait_ready()
    assert node.kill().status == -signal.SIGKILL


def test_a_daemon_that_dies_is_not_waited_for(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    node.start(command=(sys.executable, "-c", "raise SystemExit('no such luck')"))
    ended = r"the daemon ended: 1; its log:\nno such luck"
    with pytest.raises(AssertionError, match=ended):
        node.wait_ready(30)
    with pytest.raises(AssertionError, match=ended):
        node.wait_for_log("ready", 1e6)


def test_wait_ends_when_a_daemon_aborts_meanwhile(lab: Lab) -> None:
    """None of the waits says which daemon it is about."""
    node, other = lab.add_nodes(2)
    for each in (node, other):
        each.start(command=STAND_IN)
        each.wait_ready()

    def never() -> bool:
        if node.running:
            os.kill(node.pid, signal.SIGABRT)
        return False

    with pytest.raises(AssertionError, match=rf"a miracle cannot come[^$]*status -{signal.SIGABRT}:\nready"):
        wait_for(never, 1e6, "a miracle")
    # What was dead before is no surprise, nor is what the test ends.
    assert wait_for(lambda: other.running and other.stop(), 1e6)
    wait_for(lambda: not other.running, 1e6)


def test_service_manager_keeps_what_nobody_reads(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.setblocking(False)
        for number in range(100):
            daemon.sendto(f"STATUS={number}".encode(), str(node.service_manager.path))
        daemon.sendto(b"READY=1", str(node.service_manager.path))
    assert node.service_manager.ready()
    assert len(node.service_manager.heard()) == 101


def test_containers_reach_each_other_and_their_gateway(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    node.start(command=STAND_IN)
    node.wait_ready()
    first, second = node.container(1), node.container(2)
    assert (first.address, second.address) == ("10.5.7.2", "10.5.7.3")
    for target in (second, "10.5.7.1", "fc00:5:0:7::3", node.address):
        first.wait_for_reply(target)
    assert not first.reaches("10.5.7.99", patience=0.1)


def test_a_ping_counts_exactly_what_is_lost(lab: Lab) -> None:
    first, second = lab.add_nodes(2)
    first.start(command=STAND_IN)
    first.wait_ready()
    container = first.container()
    second.namespace.ip(f"route add 10.5.7.0/24 via {first.address}")
    with container.ping(second.address) as unbroken, container.ping(second.address) as broken:
        broken.wait_for_replies(5)
        answered = len(unbroken.replies())
        assert unbroken.lost() == 0
        assert unbroken.sent() >= answered
        second.namespace.ip("route del 10.5.7.0/24")
        wait_for(lambda: not container.reaches(second.address, 0.5), what="the ping to fail")
        second.namespace.ip(f"route add 10.5.7.0/24 via {first.address}")
        broken.wait_for_replies(5)
        missing = set(range(1, broken.sent() + 1)) - broken.replies()
        assert broken.lost() == len(missing) > 0


def test_a_ping_into_the_void_has_lost_everything(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    node.start(command=STAND_IN)
    node.wait_ready()
    with node.container().ping("203.0.113.1") as ping:
        assert ping.lost() == ping.sent() > 0


def test_a_device_that_is_not_there_has_nothing(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    state = node.kernel_state("flannel.1")["flannel.1"]
    assert not any(state.values())


def test_a_failed_command_says_why(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    with pytest.raises(CommandError, match="Nexthop has invalid gateway"):
        node.run("ip", "route", "add", "192.0.2.0/24", "via", "203.0.113.1")


def test_waiting_in_vain_names_what_for_and_the_last_value() -> None:
    waited = 0.01 * PATIENCE
    with pytest.raises(AssertionError, match=rf"waited {waited:g} s in vain for rain; last value: \[\]"):
        wait_for(list, 0.01, "rain")
