"""Clusters whose nodes get their leases from a server of ours, over a real etcd and a real kernel."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.credentials import make_certificates
from tests.lab.daemon import Daemon, own_command
from tests.lab.lab import ADDRESS, NETWORK
from tests.netns.apis import both_apis

PORT = 8888
BACKENDS: list[dict[str, Any]] = [{"Type": "vxlan"}, {"Type": "host-gw"}]
backends = pytest.mark.parametrize("kind", BACKENDS, ids=["vxlan", "host-gw"])
REMOTE = f"--remote={ADDRESS}:{PORT}"


def serve(lab: Lab, api: str, port: int, *more: str) -> Daemon:
    """Start a server beside etcd and wait until it listens."""
    flags = [f"--listen={ADDRESS}:{port}", f"--etcd-endpoints={lab.etcd.endpoint}", f"--etcd-api={api}"]
    daemon = Daemon(lab.switch, [*own_command(), *flags, *more], lab.directory / f"server-{port}.log")
    wait_for(lambda: "running as server" in daemon.log(), what="the server to listen")
    return daemon


@contextmanager
def server(lab: Lab, api: str, port: int = PORT, *more: str) -> Iterator[Daemon]:
    daemon = serve(lab, api, port, *more)
    try:
        yield daemon
    finally:
        if daemon.status() is None:
            daemon.end(signal.SIGKILL, 10)


def join(lab: Lab, kind: dict[str, Any], nodes: int, remote: str = REMOTE) -> list[Node]:
    """Write the network config and start nodes that know the server only."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": kind})
    started = lab.add_nodes(nodes)
    for node in started:
        node.start(remote, "--etcd-endpoints=http://127.0.0.1:1")
    for node in started:
        node.wait_ready()
    return started


def connect(nodes: list[Node]) -> None:
    for one, other in itertools.permutations(nodes, 2):
        one.container().wait_for_reply(other.container())


@both_apis
@backends
def test_three_nodes_reach_each_other_while_the_server_is_killed_and_restarted(
    api: str, kind: dict[str, Any]
) -> None:
    with Lab(api=api) as lab, server(lab, api) as first:
        nodes = join(lab, kind, 3)
        connect(nodes)
        assert set(lab.etcd.leases()) == {node.subnet() for node in nodes}
        with nodes[0].container().ping(nodes[1].container()) as ping:
            ping.wait_for_replies()
            first.end(signal.SIGKILL, 10)
            nodes[0].wait_for_log("no flannel server answers")
            with server(lab, api):
                late = lab.add_nodes(1)[0]
                late.start(REMOTE)
                late.wait_ready()
                connect([nodes[0], nodes[2], late])
                ping.wait_for_replies()
                assert ping.lost() == 0
                lab.etcd.delete_lease(late.subnet())
                nodes[0].wait_for_no_route(late.subnet())


@both_apis
def test_a_second_server_takes_over(api: str) -> None:
    with Lab(api=api) as lab, server(lab, api) as first, server(lab, api, PORT + 1):
        nodes = join(lab, {"Type": "host-gw"}, 2, f"{REMOTE},{ADDRESS}:{PORT + 1}")
        connect(nodes)
        first.end(signal.SIGKILL, 10)
        late = lab.add_nodes(1)[0]
        late.start(f"--remote={ADDRESS}:{PORT + 1}")
        late.wait_ready()
        connect([*nodes, late])


def test_a_node_that_uses_etcd_itself_shares_the_network() -> None:
    with Lab(api="v2") as lab, server(lab, "v2"):
        remote = join(lab, {"Type": "vxlan"}, 1)
        connect([*remote, *lab.cluster({"Type": "vxlan"}, nodes=1)])


def test_server_ends_at_once_with_0_and_without_a_lease() -> None:
    with Lab(api="v2") as lab, server(lab, "v2") as daemon:
        nodes = join(lab, {"Type": "host-gw"}, 1)
        # A node's watch would have kept the server for minutes.
        assert daemon.end(signal.SIGTERM, 20).status == 0
        assert list(lab.etcd.leases()) == [nodes[0].subnet()]


def test_a_taken_address_ends_the_server_with_1() -> None:
    with Lab(api="v2") as lab, server(lab, "v2"):
        flags = [f"--listen={ADDRESS}:{PORT}", f"--etcd-endpoints={lab.etcd.endpoint}"]
        other = Daemon(lab.switch, [*own_command(), *flags], lab.directory / "other.log")
        assert other.wait(20).status == 1
        assert f"Error listening on {ADDRESS}:{PORT}: address already in use" in other.log()


def test_nodes_with_certificates_share_a_network_and_others_get_nothing() -> None:
    with Lab(api="v3") as lab:
        folder = lab.directory / "tls"
        folder.mkdir()
        make_certificates(folder, ADDRESS)
        authority = f"--remote-cafile={folder / 'ca.crt'}"
        with server(lab, "v3", PORT, authority, *pair_of(folder, "server")):
            lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
            one, other, stranger = lab.add_nodes(3)
            for node in (one, other):
                node.start(REMOTE, authority, *pair_of(folder, "admin"))
            stranger.start(REMOTE, authority)
            for node in (one, other):
                node.wait_ready()
            connect([one, other])
            stranger.wait_for_log("no flannel server answers")
            assert set(lab.etcd.leases()) == {one.subnet(), other.subnet()}


def pair_of(folder: Path, name: str) -> list[str]:
    return [f"--remote-certfile={folder / name}.crt", f"--remote-keyfile={folder / name}.key"]


def test_server_takes_its_socket_from_systemd() -> None:
    with Lab(api="v2") as lab:
        flags = ["--listen=fd://", f"--etcd-endpoints={lab.etcd.endpoint}", "--etcd-api=v2"]
        command = ["systemd-socket-activate", f"--listen={ADDRESS}:{PORT}", *own_command(), *flags]
        activated = Daemon(lab.switch, command, lab.directory / "server.log")
        try:
            connect(join(lab, {"Type": "host-gw"}, 2))
            assert "running as server" in activated.log()
            assert activated.end(signal.SIGTERM, 5).status == 0
        finally:
            if activated.status() is None:
                activated.end(signal.SIGKILL, 10)


def test_health_of_a_server_is_that_of_its_watch() -> None:
    with Lab(api="v2") as lab, server(lab, "v2", PORT, "--healthz-port=8889"):
        url = f"http://{ADDRESS}:8889"

        def status(page: str) -> str:
            words = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{url}/{page}")
            return lab.switch.run(*words, check=False).stdout

        join(lab, {"Type": "host-gw"}, 1)
        assert [status(page) for page in ("healthz", "readyz", "metrics")] == ["200"] * 3
        lab.etcd.stop()
        wait_for(lambda: status("readyz") == "503", what="the server to miss etcd")
        assert status("healthz") == "200"
        lab.etcd.start()
        wait_for(lambda: status("readyz") == "200", what="the server to find etcd again")


def test_plan_asks_the_server_and_writes_nothing() -> None:
    with Lab(api="v2") as lab, server(lab, "v2"):
        (running,) = join(lab, {"Type": "host-gw"}, 1)
        (planned,) = lab.add_nodes(1)
        plan = planned.namespace.run(*own_command(), "--plan", REMOTE, f"--subnet-file={planned.subnet_file}")
        assert f"ip route replace {running.subnet()} via {running.address} " in plan.stdout
        assert list(lab.etcd.leases()) == [running.subnet()]
