"""What ``flanneld --cleanup`` finds and removes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import Daemon, own_command
from tests.netns.go_daemon import write_as_go
from tests.netns.test_several import claimed_by_nobody, in_container


def cleanup(node: Node, *flags: str) -> list[str]:
    done = node.run(*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup", *flags)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("flags", [[], ["--ip-masq"], ["--ip-masq", "--iptables-rules=v0.12"]])
def test_cleanup_removes_all_of_flannel_and_nothing_else(
    lab: Lab, backend: dict[str, str], flags: list[str]
) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    node, peer = lab.add_nodes(2)
    wait_for(lambda: not any(route["flags"] for route in node.routes()), what="the uplink to have a carrier")
    before = (node.routes(), node.run("iptables-save").stdout, node.link("flannel.1"))
    for each in (node, peer):
        each.start("--ip-blackhole-route", *flags)
        each.wait_ready()
    node.wait_for_route(peer.subnet())
    node.wait_for_log("Made our rules")
    node.stop()

    announced = cleanup(node, "--dry-run")
    assert node.wait_for_route(peer.subnet())
    removed = cleanup(node)
    assert [line.replace("would remove", "removed") for line in announced] == removed
    assert any(peer.subnet() in line for line in removed)
    assert any("rule" in line for line in removed)

    assert node.routes() == before[0]
    assert node.link("flannel.1") == before[2]
    assert not node.subnet_file.exists()
    assert "10.5." not in node.run("iptables-save").stdout
    assert "FLANNEL" not in node.run("iptables-save").stdout
    assert cleanup(node) == []


def test_a_cleanup_that_nobody_reads_goes_on_to_its_end(lab: Lab) -> None:
    node, _ = lab.cluster({"Type": "vxlan"})
    node.stop()
    words = shlex.join([*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup"])
    done = node.run("bash", "-c", f"{words} | true; exit ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert cleanup(node) == []


def test_the_routes_that_a_go_flanneld_left_are_found(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes(1)
    node.start()
    node.wait_ready()
    node.stop()
    node.namespace.ip(
        "route add 10.5.0.0/24 via 198.18.0.99 dev eth0", "route add 192.0.2.0/24 via 198.18.0.99 dev eth0"
    )
    assert not any("10.5.0.0/24" in line for line in cleanup(node, "--dry-run"))
    write_as_go(node)
    assert any(line.startswith("removed route 10.5.0.0/24") for line in cleanup(node))
    assert [route["dst"] for route in node.routes() if route.get("gateway") == "198.18.0.99"] == [
        "192.0.2.0/24"
    ]


def test_cleanup_reports_failed_removals_and_exits_nonzero(lab: Lab, tmp_path: Path) -> None:
    (node,) = lab.add_nodes(1)
    node.run("iptables-nft", "-N", "FLANNEL-FWD")
    broken = tmp_path / "iptables-nft-restore"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 4\n")
    broken.chmod(0o755)
    command = (*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup")
    done = node.run("env", f"PATH={tmp_path}:{os.environ['PATH']}", *command, check=False)
    assert done.returncode == 1
    assert "could not remove rules for IPv4: iptables-nft-restore" in done.stdout
    assert "out of order" in done.stdout
    assert node.run(*command).stdout == "removed rule iptables-nft: filter FLANNEL-FWD\n"


# ---- what runs, and what is whose -----------------------------------------------------------------


def refusal(node: Node, *flags: str) -> str:
    """What a cleanup says that refuses to do anything."""
    before, files = (node.routes(), node.link("flannel.1")), set(node.directory.iterdir())
    done = node.run(*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup", *flags, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert (node.routes(), node.link("flannel.1")) == before
    assert files <= set(node.directory.iterdir())
    return done.stderr


@pytest.mark.parametrize("flags", [[], ["--all"]])
def test_cleanup_refuses_while_a_daemon_runs(lab: Lab, backend: dict[str, str], flags: list[str]) -> None:
    node, peer = lab.cluster(backend)
    node.wait_for_route(peer.subnet())
    said = refusal(node, *flags)
    problem = f"flanneld: flanneld runs in this network namespace: process {node.pid}; stop it first: "
    assert said.startswith(problem)
    assert len(said.splitlines()) == 1
    assert node.running
    assert cleanup(node, "--dry-run")
    node.stop()
    assert cleanup(node, *flags)


@contextmanager
def other_program(node: Node, name: str, tmp_path: Path) -> Iterator[Daemon]:
    """Something that bears the name of Go's daemon, in this namespace."""
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    daemon = Daemon(node.namespace, [str(program), "60"], tmp_path / f"{name}.log")
    try:
        node.run("sh", "-c", f"until grep -q {name} /proc/{daemon.pid}/comm; do sleep 0.01; done")
        yield daemon
    finally:
        os.kill(daemon.pid, 9)
        daemon.wait(5)


@pytest.mark.parametrize("name", ["flanneld", "flanneld-amd64"])
def test_cleanup_refuses_while_a_go_daemon_runs(lab: Lab, name: str, tmp_path: Path) -> None:
    node, elsewhere = lab.cluster({"Type": "vxlan"})
    node.stop()
    with other_program(node, name, tmp_path) as daemon:
        assert f"process {daemon.pid}" in refusal(node)
    # That of another node, in a network namespace of its own, does not count.
    assert elsewhere.running
    assert cleanup(node)


def test_a_daemon_in_another_pid_namespace_is_known_by_its_lock(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    hidden = ["unshare", "--pid", "--fork", "--mount-proc", *own_command()]
    done = node.run(*hidden, f"--subnet-file={node.subnet_file}", "--cleanup", check=False)
    assert done.returncode == 1
    assert "a flanneld holds" in done.stderr
    assert node.subnet_file.exists()


@pytest.mark.parametrize("flags", [[], ["--all"]])
def test_cleanup_in_container_refuses_while_daemon_runs_on_host(lab: Lab, flags: list[str]) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, flags=["--ip-masq"])
    node.wait_for_route(peer.subnet())
    node.wait_for_log("Made our rules")
    # The container has neither the lock nor the record of the daemon, and would take the device for its own.
    copy = node.directory / "copy.env"
    shutil.copy(node.subnet_file, copy)
    command = in_container(*own_command(), f"--subnet-file={copy}", "--cleanup", *flags)
    before = node.kernel_state("flannel.1"), node.run("iptables", "-t", "nat", "-S").stdout
    done = node.run(*command, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    held = "a process in another PID namespace has VNI 1, a process"
    assert f"flanneld runs in this network namespace: {held}" in done.stderr
    assert (node.kernel_state("flannel.1"), node.run("iptables", "-t", "nat", "-S").stdout) == before
    node.kill()
    assert any("flannel.1" in line for line in node.run(*command).stdout.splitlines())
    assert node.link("flannel.1") is None


def test_cleanup_heeds_no_ordinary_user_with_a_daemons_claim(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    with claimed_by_nobody(node, "range 10.5.0.0/16", "VNI 1"):
        assert any("flannel.1" in line for line in cleanup(node))


@pytest.mark.parametrize("flags", [[], ["--all"]])
def test_only_the_network_of_the_subnet_file_is_removed_without_all(lab: Lab, flags: list[str]) -> None:
    """Of two daemons on one host, one leaves for good."""
    lab.etcd.set("/other/config", '{"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan", "VNI": 6}}')
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, flags=["--ip-masq", "--ip-blackhole-route"])
    other = Daemon(
        node.namespace,
        [
            *own_command(),
            f"--etcd-endpoints={lab.etcd.endpoint}",
            "--etcd-prefix=/other",
            f"--subnet-file={node.directory / 'other.env'}",
            "--ip-masq",
            "--ip-blackhole-route",
        ],
        node.directory / "other.log",
    )
    wait_for(lambda: "In sync with" in other.log(), what="the other daemon")
    wait_for(lambda: node.run("iptables-save").stdout.count("10.6.0.0") > 1, what="its rules")
    node.wait_for_log("Made our rules")
    assert other.end(signal.SIGTERM, 5).status == 0
    node.stop()

    def traces(network: str) -> bool:
        state = node.run("sh", "-c", "ip addr; ip route show table all; iptables-save").stdout
        return network in state

    assert traces("10.5.")
    assert traces("10.6.")
    said = cleanup(node, *flags)
    assert not traces("10.5.")
    assert traces("10.6.") is not bool(flags)
    assert any("left link flannel.6" in line for line in said) is not bool(flags)
    assert (node.link("flannel.6") is None) is bool(flags)
    assert (node.directory / "other.env").exists()
