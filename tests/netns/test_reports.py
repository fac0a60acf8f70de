"""What the daemon says: its log, to the service manager, to health checks, and what it never says."""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import signal
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tests.lab import Lab, Node, own_command, wait_for

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}
PEER = {"PublicIP": "198.18.0.200", "BackendType": "host-gw"}
HEALTH_PORT = 8471

#: glog's head of a line: severity, date, time, process, place.
HEAD = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} ([ \d]{7}) [\w.]+:\d+\] \S")
#: linux/fcntl.h
F_SETPIPE_SZ = 1031


def wait_for_a_read(lab: Lab) -> None:
    """Wait until a daemon has looked for the config once more."""
    before = lab.etcd.gets()
    wait_for(lambda: lab.etcd.gets() > before, what="a read of the config")


def add_peer(lab: Lab, node: Node) -> None:
    """Add a lease and wait until the daemon has dealt with it."""
    lab.etcd.put_lease("10.5.200.0/24", PEER)
    node.wait_for_route("10.5.200.0/24")


# ---- the log -----------------------------------------------------------------------------------


def test_each_line_of_the_log_is_glogs(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    node.start("-v=10")
    wait_for_a_read(lab)
    lab.etcd.put_config(CONFIG)
    node.wait_ready(10)
    lab.etcd.set("subnets/10.5.201.0-24", '{\n"PublicIP"\n\n: "no\nsense"')
    add_peer(lab, node)
    pid = f"{node.pid:>7}"
    assert node.stop().status == 0
    lines = node.log().splitlines()
    heads = [HEAD.match(line) for line in lines]
    assert [line for line, head in zip(lines, heads, strict=True) if not head] == []
    assert {head[1] for head in heads if head} == {pid}
    assert {line[0] for line in lines} == {"I", "W"}


def test_nothing_is_ever_printed_on_standard_output(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    output = node.directory / "stdout"
    node.start("-v=10", command=["sh", "-c", f'exec "$@" >{output}', "sh", *own_command()])
    wait_for_a_read(lab)
    lab.etcd.put_config(CONFIG)
    node.wait_ready(10)
    add_peer(lab, node)
    assert node.stop().status == 0
    assert output.read_text() == ""
    assert node.log()


@pytest.mark.parametrize("password", ["right-4711", "wrong-4711"])
def test_the_password_is_neither_in_the_log_nor_in_the_command_line(lab: Lab, password: str) -> None:
    lab.etcd.put_config(CONFIG)
    lab.etcd.require_login("flannel", "right-4711")
    (node,) = lab.add_nodes()
    secrets = {"FLANNELD_ETCD_USERNAME": "flannel", "FLANNELD_ETCD_PASSWORD": password}
    node.start("-v=10", environment=secrets)
    if password.startswith("right"):
        node.wait_ready()
    else:
        node.wait_for_log("-etcd-password")
    command_line = Path(f"/proc/{node.pid}/cmdline").read_text()
    assert node.stop().status == 0
    for secret in (password, b64encode(f"flannel:{password}".encode()).decode()):
        assert secret not in node.log()
        assert secret not in command_line


class UnreadLog:
    """A daemon's log that nobody reads: once ``fill`` was called, no line finds room."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "unread"
        os.mkfifo(self._path)

    @property
    def command(self) -> list[str]:
        """The daemon that writes there."""
        return ["sh", "-c", f'exec "$@" 2>{self._path}', "sh", *own_command()]

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR)
        fcntl.fcntl(self._file, F_SETPIPE_SZ, 4096)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self) -> None:
        # Opened anew, so that the daemon's own end stays one that blocks.
        file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(file, b"#")
        os.close(file)

    def read(self) -> str:
        """What is there to be read, at least something."""
        return os.read(self._file, 4096).decode()


def test_a_log_that_nobody_reads_holds_up_nothing(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    with UnreadLog(node.directory) as log:
        node.start(command=log.command)
        node.wait_ready()
        log.fill()
        add_peer(lab, node)
        lab.etcd.put_lease("10.5.201.0/24", PEER)
        node.wait_for_route("10.5.201.0/24")
        log.read()
        lab.etcd.put_lease("10.5.202.0/24", PEER)
        node.wait_for_route("10.5.202.0/24")
        wait_for(lambda: "of the log are lost" in log.read(), what="the number of lost lines")
        assert node.stop().status == 0


def test_a_second_sigterm_kills_a_daemon_that_hangs(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    hanging = node.directory / "ca.pem"
    os.mkfifo(hanging)  # nobody writes to it, so opening it never returns
    node.start(f"-etcd-cafile={hanging}")
    wait_for(lambda: catches(node.pid, signal.SIGTERM), what="the daemon to handle signals")
    os.kill(node.pid, signal.SIGTERM)
    node.wait_for_log("stopping: got SIGTERM")
    assert node.running
    assert node.stop().status == -signal.SIGTERM


def catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert caught
    return bool(int(caught[1], 16) >> (number - 1) & 1)


# ---- the service manager -----------------------------------------------------------------------


def test_the_service_manager_hears_what_it_needs(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    manager = node.service_manager

    def wait_until_heard(*messages: str) -> list[str]:
        """Wait for messages that begin so, in this order."""

        def heard() -> list[str]:
            found = iter(manager.heard())
            return [next((m for m in found if m.startswith(message)), "") for message in messages]

        wait_for(lambda: all(heard()), what=f"{messages}; heard: {manager.heard()}")
        return heard()

    # What is sent while the test is busy elsewhere has to find room in the socket.
    node.start(environment={"WATCHDOG_USEC": "1000000"})
    manager = node.service_manager
    (waiting,) = wait_until_heard("STATUS=")
    assert "config" in waiting
    assert not manager.ready()
    lab.etcd.put_config(CONFIG)
    wait_until_heard("READY=1")
    assert node.env()
    status, *_ = wait_until_heard("STATUS=host-gw", "READY=1", *["WATCHDOG=1"] * 3)
    assert node.subnet() in status
    node.stop()
    wait_until_heard("READY=1", "WATCHDOG=1", "STOPPING=1")
    assert manager.heard()[-1] == "STOPPING=1"


def test_a_watchdog_that_nobody_asked_for_is_not_fed(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    add_peer(lab, node)
    node.service_manager.silent(0.5)
    assert "WATCHDOG=1" not in node.service_manager.heard()


# ---- health checks -----------------------------------------------------------------------------


def ask(node: Node, path: str) -> tuple[int, str]:
    """Status and body of an answer of the health server."""
    connection = http.client.HTTPConnection("127.0.0.1", HEALTH_PORT, timeout=60)
    with node.namespace.entered():
        connection.connect()
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def wait_until_it_listens(node: Node) -> None:
    def listens() -> str:
        return node.run("ss", "-Htln", "sport", "=", str(HEALTH_PORT)).stdout

    wait_for(listens, what="the health server to listen")


def test_health_and_readiness_are_told_over_http(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    node.start("-healthz-ip=127.0.0.1", f"-healthz-port={HEALTH_PORT}")
    wait_until_it_listens(node)
    assert ask(node, "/healthz") == (200, "flanneld is running")
    status, body = ask(node, "/readyz")
    assert (status, body.splitlines()[0]) == (503, "flanneld is not ready yet")
    lab.etcd.put_config(CONFIG)
    wait_for(lambda: ask(node, "/readyz") == (200, "flanneld is ready"), what="readiness")
    assert node.env()
    assert ask(node, "/healthz") == (200, "flanneld is running")
    assert ask(node, "/")[0] == 404


#: A backend of another package that hangs at a peer as long as a file is there. All that the daemon itself
#: waits for is limited to less than a missed heartbeat.
STUCK = """
import os
import time

from flanneld.backends.host_gw import HostGw


class Backend(HostGw):
    def peer(self, own, lease):
        while os.path.exists(os.environ["STUCK_WHILE"]):
            time.sleep(0.1)
        return super().peer(own, lease)
"""


def install(package: Path) -> None:
    """Put the stuck backend into a directory as an installer does."""
    (package / "stuck.py").write_text(STUCK)
    info = package / "stuck-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flanneld.backends]\nstuck = stuck:Backend\n")


@pytest.mark.long
def test_a_task_that_hangs_shows_in_the_health_and_starves_the_watchdog(lab: Lab) -> None:
    lab.etcd.put_config({**CONFIG, "Backend": {"Type": "stuck"}})
    (node,) = lab.add_nodes()
    install(node.directory)
    block = node.directory / "block"
    variables = {"PYTHONPATH": str(node.directory), "STUCK_WHILE": str(block)}
    node.start(f"-healthz-port={HEALTH_PORT}", environment=variables | {"WATCHDOG_USEC": "200000"})
    node.wait_ready()
    assert node.service_manager.fed(30)
    block.touch()
    lab.etcd.put_lease("10.5.200.0/24", PEER)
    # The watchdog has to be read all the time: its messages would block the daemon.
    wait_for(lambda: node.service_manager.heard() and ask(node, "/healthz")[0] == 500, 150, "bad health")
    assert "reconciler" in ask(node, "/healthz")[1]
    assert not node.service_manager.fed(1)
    block.unlink()
    node.wait_for_route("10.5.200.0/24")
    assert node.service_manager.fed(30)
    assert ask(node, "/healthz") == (200, "flanneld is running")
