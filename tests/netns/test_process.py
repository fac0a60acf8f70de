"""The daemon as a process: the words it takes, what it waits for, what it holds and how it ends."""

from __future__ import annotations

import operator
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.lab import Impostor, Lab, Node, own_command, wait_for
from tests.lab.forks import exact

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}
PEER = {"PublicIP": "198.18.0.200", "BackendType": "host-gw"}


@pytest.fixture(scope="module", autouse=True)
def _exact() -> Iterator[None]:
    with exact():
        yield


@pytest.fixture(scope="module")
def host() -> Iterator[Node]:
    """One node for all tests whose daemon ends before it does anything."""
    with Lab(nodes=1) as lab:
        yield lab.nodes[0]


def run(node: Node, *flags: str, **variables: str) -> CompletedProcess[str]:
    """Run a daemon that is to end by itself."""
    return node.run(*own_command(), *flags, check=False, variables=variables)


def complaints(log: str) -> list[str]:
    """All lines of a log but those of mere information."""
    return [line for line in log.splitlines() if not line.startswith("I")]


# ---- the words it takes ------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["-version", "--version", "-version=true"])
def test_the_version_is_told_on_standard_error(host: Node, word: str) -> None:
    done = run(host, word)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"\S+\n", done.stderr)


@pytest.mark.parametrize("word", ["-help", "--help", "-h"])
def test_help_is_given_on_standard_output(host: Node, word: str) -> None:
    done = run(host, word)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
    assert "\n  -etcd-endpoints " in done.stdout


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["-no-such-flag"], "flag provided but not defined: -no-such-flag"),
        (["-v=loud"], 'invalid value "loud" for flag -v: parse error'),
        (["-iface"], "flag needs an argument: -iface"),
    ],
)
def test_a_mistake_is_named_and_followed_by_the_usage(host: Node, flags: list[str], reason: str) -> None:
    done = run(host, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{reason}\nUsage: ")
    assert "\n  -etcd-endpoints " in done.stderr


@pytest.mark.parametrize(
    ("backend", "flags", "words"),
    [
        ("host-gw", ["-subnet-lease-renew-margin=0"], ["-subnet-lease-renew-margin", "1 to 1439"]),
        ("host-gw", ["-subnet-lease-renew-margin=1440"], ["-subnet-lease-renew-margin", "1 to 1439"]),
        ("host-gw", ["-iface=eth7"], ["eth7", "--iface"]),
        ("host-gw", ["-etcd-cafile=/no/such/ca.pem"], ["/no/such/ca.pem", "-etcd-cafile"]),
        ("host-gw", ["-healthz-port=8471", "-healthz-ip=192.0.2.9"], ["192.0.2.9", "-healthz-ip"]),
        ("host-gw", ["-iface=eth0", "-public-ip=192.0.2.9"], ["192.0.2.9", "--public-ip"]),
        ("host-gw", ["-kube-subnet-mgr"], ["NODE_NAME", "POD_NAME"]),
        ("carrier-pigeon", [], ["carrier-pigeon", "Backend.Type", "host-gw", "vxlan"]),
    ],
)
def test_unusable_config_ends_with_one_message_and_its_remedy(
    lab: Lab, backend: str, flags: list[str], words: list[str]
) -> None:
    lab.etcd.put_config({**CONFIG, "Backend": {"Type": backend}})
    (node,) = lab.add_nodes()
    done = run(node, f"-etcd-endpoints={lab.etcd.endpoint}", f"-subnet-file={node.subnet_file}", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    (message,) = complaints(done.stderr)
    assert [word for word in words if word not in message] == []
    assert lab.etcd.leases() == {}


# ---- what it waits for -------------------------------------------------------------------------


def test_an_interface_that_comes_later_is_picked_up(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    node.start("-iface=eth7", "-iface-wait=300")
    node.wait_for_log("Waiting for an external interface")
    node.namespace.ip("link add eth7 type bridge", "address add 192.0.2.7/24 dev eth7", "link set eth7 up")
    node.wait_ready()
    assert lab.etcd.leases()[node.subnet()]["PublicIP"] == "192.0.2.7"
    assert len(node.wait_for_log("Waiting for an external interface")) == 1


def test_an_interface_that_never_comes_is_not_waited_for_for_ever(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    node.start("-iface=eth7", "-iface-wait=1")
    assert node.daemon.wait(20).status == 1
    *_, last = node.log().splitlines()
    assert last.startswith("F")
    assert "eth7" in last


def test_a_config_is_waited_for_without_chatter_and_picked_up(lab: Lab) -> None:
    def wait_for_two_reads() -> None:
        # etcd counts each read of its majority twice.
        before = lab.etcd.gets()
        wait_for(lambda: lab.etcd.gets() >= before + 4, what="two more reads of the config")

    (node,) = lab.add_nodes()
    node.start()
    wait_for_two_reads()
    lab.etcd.set("config", '{"Network": "10.5.0.0/16", "SubnetLen": 12}')
    node.wait_for_log("SubnetLen 12")
    wait_for_two_reads()
    missing, bad = complaints(node.log())
    assert "no network config" in missing
    assert "SubnetLen 12" in bad
    lab.etcd.put_config(CONFIG)
    node.wait_ready()
    assert complaints(node.log()) == [missing, bad]


def test_a_subnet_file_that_cannot_be_written_costs_no_more_than_being_ready(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    node.start("-subnet-file=/proc/nowhere/subnet.env")
    lab.etcd.put_lease("10.5.200.0/24", PEER)
    node.wait_for_route("10.5.200.0/24")
    node.wait_for_log("No status socket")
    node.wait_for_log("/proc/nowhere/subnet.env: ")
    assert ["/proc/nowhere/" in message for message in complaints(node.log())] == [True, True, True]
    assert not node.service_manager.ready()
    assert node.stop().status == 0


# ---- what it holds -----------------------------------------------------------------------------


def test_fifty_events_leave_no_thread_and_no_descriptor_behind(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)

    def come_and_go(times: int) -> None:
        for _ in range(times):
            lab.etcd.put_lease("10.5.200.0/24", PEER)
            node.wait_for_route("10.5.200.0/24")
            lab.etcd.delete_lease("10.5.200.0/24")
            node.wait_for_no_route("10.5.200.0/24")

    node.wait_for_log("rules with")
    come_and_go(1)
    before = held(node.pid)
    come_and_go(25)
    # A thread that works for the moment may have something open, but not 25 of them.
    wait_for(lambda: all(map(operator.le, held(node.pid), before)), what=f"no more than {before}")


def held(pid: int) -> tuple[int, int]:
    """Threads and file descriptors."""
    process = Path(f"/proc/{pid}")
    return len([*(process / "task").iterdir()]), len([*(process / "fd").iterdir()])


# ---- how it ends -------------------------------------------------------------------------------


#: A daemon that would wait for ten minutes where another gives up after a few seconds.
PATIENT = (
    sys.executable,
    "-c",
    "from flanneld.runtime.supervisor import Supervisor\n"
    "from flanneld.subnet.etcd import api_choice\n"
    "patient = api_choice.EtcdTimeouts(*(600.0,) * 6)\n"
    "api_choice.EtcdTimeouts = lambda: patient\n"
    "Supervisor.shutdown.__defaults__ = (600.0,)\n"
    "from flanneld.main import main\n"
    "main()\n",
)


def in_a_blocked_watch(lab: Lab, node: Node, _stack: ExitStack) -> None:
    lab.etcd.put_config(CONFIG)
    node.start(command=PATIENT)
    node.wait_ready()
    lab.etcd.put_lease("10.5.200.0/24", PEER)
    node.wait_for_route("10.5.200.0/24")
    wait_for(lambda: lab.etcd.request("GET", "/v2/stats/store")["watchers"] == 2, what="two watches")


def with_etcd_frozen_in_a_steady_state(lab: Lab, node: Node, stack: ExitStack) -> None:
    in_a_blocked_watch(lab, node, stack)
    stack.enter_context(lab.etcd.frozen())


def with_etcd_frozen_at_the_start(lab: Lab, node: Node, stack: ExitStack) -> None:
    stack.enter_context(lab.etcd.frozen())
    node.start(command=PATIENT)
    wait_for_connection(node, "established")


def with_a_mute_server(lab: Lab, node: Node, stack: ExitStack) -> None:
    lab.etcd.stop()
    server = stack.enter_context(Impostor(lab.switch, lab.etcd.address))
    node.start(command=PATIENT)
    wait_for(lambda: server.asked, what="a request")


def with_etcd_out_of_reach(_lab: Lab, node: Node, _stack: ExitStack) -> None:
    node.start("-etcd-endpoints=http://198.18.0.199:2379", command=PATIENT)
    wait_for_connection(node, "syn-sent")


def waiting_for_a_config(lab: Lab, node: Node, _stack: ExitStack) -> None:
    before = lab.etcd.gets()
    node.start(command=PATIENT)
    wait_for(lambda: lab.etcd.gets() > before, what="a read of the config")


def waiting_for_an_interface(lab: Lab, node: Node, _stack: ExitStack) -> None:
    lab.etcd.put_config(CONFIG)
    node.start("-iface=eth7", "-iface-wait=600", command=PATIENT)
    node.wait_for_log("Waiting for an external interface")


def waiting_for_a_free_subnet(lab: Lab, node: Node, _stack: ExitStack) -> None:
    lab.etcd.put_config({**CONFIG, "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0"})
    lab.etcd.put_lease("10.5.1.0/24", PEER)
    node.start(command=PATIENT)
    node.wait_for_log("Waiting for a lease")


def wait_for_connection(node: Node, state: str) -> None:
    wait_for(
        lambda: node.run("ss", "-Htn", "state", state, "dport", "=", "2379").stdout,
        what=f"a connection that is {state}",
    )


@pytest.mark.parametrize(
    "situation",
    [
        in_a_blocked_watch,
        with_etcd_frozen_in_a_steady_state,
        with_etcd_frozen_at_the_start,
        with_a_mute_server,
        with_etcd_out_of_reach,
        waiting_for_a_config,
        waiting_for_an_interface,
        waiting_for_a_free_subnet,
    ],
)
def test_sigterm_ends_with_0_and_waits_for_nothing(
    lab: Lab, situation: Callable[[Lab, Node, ExitStack], None]
) -> None:
    (node,) = lab.add_nodes()
    with ExitStack() as stack:
        situation(lab, node, stack)
        assert node.stop().status == 0


def test_sigint_is_as_good_as_sigterm(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    assert node.daemon.end(signal.SIGINT, 5).status == 0
