"""Several daemons on one host, and the blackhole route."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from flanneld.runtime.process import PATIENCE
from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT, Daemon, own_command
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_capabilities import NOBODY


def blackholes(node: Node) -> list[dict[str, Any]]:
    return node.namespace.json("ip", "-j", "route", "show", "type", "blackhole")


def test_a_blackhole_lies_behind_every_other_route_and_heals(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    first, second = lab.add_nodes(2)
    for node in (first, second):
        node.start("--ip-blackhole-route")
        node.wait_ready()
    assert [(route["dst"], route["metric"]) for route in blackholes(first)] == [(first.subnet(), 65535)]
    first.container().wait_for_reply(second.container())
    second.container().wait_for_reply(first.container())

    first.run("ip", "route", "del", "blackhole", first.subnet(), "metric", "65535")
    wait_for(lambda: blackholes(first), 3, "the blackhole to come back")
    assert first.wait_for_log("Restored blackhole")

    assert first.stop().status == 0
    first.start()
    wait_for(lambda: not blackholes(first), 5, "the blackhole to go when it is not asked for")


def leads_twice_to(node: Node, peer: Node) -> bool:
    routes = [route for route in node.routes("eth0") if route["dst"].startswith("10.")]
    return [route["gateway"] for route in routes] == [peer.address] * 2


def test_two_daemons_with_host_gw_on_one_host_leave_each_other_alone(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    lab.etcd.set(
        "/other/config", '{"Network": "10.6.0.0/16", "SubnetLen": 24, "Backend": {"Type": "host-gw"}}'
    )
    nodes = lab.add_nodes(2)
    for node in nodes:
        node.start()
        node.wait_ready()
    other = [*own_command(), f"--etcd-endpoints={lab.etcd.endpoint}", "--etcd-prefix=/other"]
    daemons = [
        Daemon(
            node.namespace,
            [*other, f"--subnet-file={node.directory / 'other.env'}"],
            node.directory / "other.log",
            {},
        )
        for node in nodes
    ]
    try:
        for node, peer in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
            wait_for(partial(leads_twice_to, node, peer), 5, "a route of each network")
        repairs = [node.log().count("Removed ") for node in nodes]
    finally:
        ends = [daemon.end(signal.SIGTERM, 5) for daemon in daemons]
    assert [end.status for end in ends] == [0, 0]
    assert repairs == [0, 0]


# ---- one network, two daemons ----------------------------------------------------------------------

#: Claim what a daemon would claim.
CLAIM = """
import signal, socket, sys
sockets = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]
for each, claim in zip(sockets, sys.argv[1:]):
    each.bind("\\0flanneld/" + claim)
    each.listen()
print("there", flush=True)
signal.pause()
"""


def in_container(*command: str) -> list[str]:
    """Return a command in PID and mount namespaces of its own, with an empty /run."""
    script = 'mount -t tmpfs tmpfs /run && exec "$0" "$@"'
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, *command]


@contextmanager
def claimed_by_nobody(node: Node, *claims: str) -> Iterator[None]:
    """Have an ordinary user hold claims."""
    user = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    command = [*user, "/usr/bin/python3", "-c", CLAIM, *claims]
    stranger = Daemon(node.namespace, command, node.directory / "stranger.log")
    wait_for(lambda: "there" in stranger.log(), what=f"the stranger: {stranger.log()}")
    try:
        yield
    finally:
        stranger.end(signal.SIGKILL, 5)


def rival(node: Node, *flags: str, command: Sequence[str] = ()) -> Daemon:
    """Start another daemon with another subnet file."""
    file = f"--subnet-file={node.directory / 'rival' / 'subnet.env'}"
    own = [*(command or own_command()), f"--etcd-endpoints={node.endpoints}", file, *flags]
    return Daemon(node.namespace, own, node.directory / "rival.log", {})


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize(
    "place", [own_command, lambda: in_container(*own_command())], ids=["host", "container"]
)
def test_daemon_with_another_subnet_file_waits_for_the_network(
    lab: Lab, place: Callable[[], list[str]], how: signal.Signals
) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    before, leases = node.kernel_state("flannel.1", "eth0"), lab.etcd.leases()
    with node.container().ping(peer.container()) as ping, node.changes() as changes:
        second = rival(node, command=place())
        wait_for_line(second, "has range 10.5.0.0/16; stop it")
        assert changes.during(0.3) == []
        assert node.running
        assert lab.etcd.leases() == leases
        node.daemon.end(how, 5)
        wait_for_line(second, "In sync with")
        assert changes.during(0.3) == []
        assert ping.lost() == 0
    assert node.kernel_state("flannel.1", "eth0") == before
    assert second.log().count("Waiting for claims on this host") == 1
    second.end(signal.SIGKILL, 5)


@pytest.mark.long
def test_daemon_with_another_subnet_file_ends_after_its_wait_and_the_first_stays(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    before = lab.etcd.leases(), node.kernel_state("flannel.1")
    second = rival(node)
    assert second.wait(PATIENCE + 10).status == 1
    last = second.log().splitlines()[-1]
    assert f"another flanneld, process {node.pid}, has had range 10.5.0.0/16 for 30 s; stop it" in last
    assert node.running
    assert (lab.etcd.leases(), node.kernel_state("flannel.1")) == before


@pytest.mark.parametrize(
    ("config", "claim"),
    [
        ({"Network": "10.5.128.0/17", "Backend": {"Type": "host-gw"}}, "range 10.5.0.0/16"),
        ({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}}, "VNI 1"),
    ],
    ids=["part of the range", "the same VNI"],
)
@pytest.mark.parametrize("prefix", ["--etcd-prefix=/other", "--networks=other"], ids=["alone", "networks"])
def test_daemon_without_a_network_of_its_own_waits(
    lab: Lab, config: dict[str, Any], claim: str, prefix: str
) -> None:
    key = "/other/config" if "prefix" in prefix else "/coreos.com/network/other/config"
    lab.etcd.set(key, json.dumps(config))
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    second = rival(node, prefix, f"--subnet-dir={node.directory / 'networks'}")
    wait_for_line(second, f"another flanneld, process {node.pid}, has {claim}; stop it")
    node.kill()
    wait_for_line(second, "In sync with")
    assert second.end(signal.SIGTERM, 5).status == 0


def test_guard_of_the_tunnel_stays_that_of_the_first_daemon(lab: Lab) -> None:
    config = {"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan", "VNI": 2}}
    lab.etcd.set("/other/config", json.dumps(config))
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, flags=("--guard-tunnel",))
    wait_for(lambda: "flannel-guard" in node.run("nft", "list", "tables").stdout, what="the guard")
    second = rival(node, "--etcd-prefix=/other", "--guard-tunnel")
    wait_for_line(second, f"another flanneld, process {node.pid}, has flannel-guard; stop it")
    assert second.end(signal.SIGTERM, 5).status == 0
    for backend, flags in ((config["Backend"], ()), ({"Type": "host-gw"}, ("--guard-tunnel",))):
        lab.etcd.set("/other/config", json.dumps({**config, "Backend": backend}))
        second = rival(node, "--etcd-prefix=/other", *flags)
        wait_for_line(second, "In sync with")
        wait_for_line(second, "Changing default FORWARD chain policy")
        assert second.end(signal.SIGTERM, 5).status == 0
    assert "flannel-guard" in node.run("nft", "list", "tables").stdout


def test_ordinary_user_with_the_claims_keeps_no_daemon_from_them(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes(1)
    with claimed_by_nobody(node, "range 10.5.0.0/16", "VNI 1"):
        node.start()
        node.wait_ready()
        assert len(node.wait_for_log(f"of user {NOBODY}; only root and our user can have it")) == 2
        second = rival(node)
        wait_for_line(second, f"another flanneld, process {node.pid}, has ")
        assert second.end(signal.SIGTERM, 5).status == 0
        assert node.running


# ---- two of one identity --------------------------------------------------------------------------


def second_daemon(node: Node, *flags: str) -> Daemon:
    """Start another daemon with the same subnet file, as a DaemonSet's surge update does."""
    same = [*own_command(), f"--etcd-endpoints={node.endpoints}", f"--subnet-file={node.subnet_file}"]
    return Daemon(node.namespace, [*same, *flags], node.directory / "second.log", {})


def wait_for_line(daemon: Daemon, text: str) -> None:
    wait_for(lambda: text in daemon.log(), 10, f"the second daemon to say {text!r}")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_second_daemon_takes_over_when_the_first_ends(lab: Lab, how: signal.Signals) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    subnet, before = node.subnet(), node.kernel_state("flannel.1", "eth0")
    with node.container().ping(peer.container()) as ping, node.changes() as changes:
        second = second_daemon(node)
        wait_for_line(second, "waiting up to 30 s for it to end")
        assert changes.during(0.3) == []
        assert node.running
        node.daemon.end(how, 5)
        wait_for_line(second, "In sync with")
        assert changes.during(0.3) == []
        assert ping.lost() == 0
    assert node.subnet() == subnet
    assert node.kernel_state("flannel.1", "eth0") == before
    assert second.log().count("Another flanneld holds") == 1
    assert second.end(signal.SIGTERM, 5).status == 0


@pytest.mark.long
def test_a_second_daemon_ends_after_its_wait_and_the_first_stays(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    before = lab.etcd.leases(), node.kernel_state("flannel.1")
    second = second_daemon(node)
    assert second.wait(PATIENCE + 10).status == 1
    last = second.log().splitlines()[-1]
    assert f"another flanneld has held {node.subnet_file.with_name('flanneld.lock')} for 30 s" in last
    assert node.running
    assert (lab.etcd.leases(), node.kernel_state("flannel.1")) == before


def test_a_waiting_daemon_is_stopped_at_once(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    second = second_daemon(node)
    wait_for_line(second, "waiting up to 30 s")
    assert second.end(signal.SIGTERM, 5).status == 0
    assert node.running


def test_a_pump_that_outlives_its_daemon_holds_no_lock(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "udp"}, nodes=1)
    node.kill()
    node.start()
    node.wait_ready()
    assert "Another flanneld holds" not in node.log()


@pytest.mark.parametrize("stacks", [{}, DUAL_STACK], ids=["IPv4", "dual stack"])
def test_a_peer_with_the_mac_of_our_device_is_named(lab: Lab, stacks: dict[str, Any]) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, **stacks)
    family = 6 if stacks else 4
    device = "flannel-v6.1" if stacks else "flannel.1"
    mac = (node.link(device) or {})["address"]
    data = {4: {"VNI": 1, "VtepMAC": "02:00:00:00:00:07"}} | {family: {"VNI": 1, "VtepMAC": mac}}
    lease = {"PublicIP": "198.18.0.7", "BackendType": "vxlan", "BackendData": data[4]}
    if stacks:
        lease |= {"PublicIPv6": "fd00:18::7", "BackendV6Data": data[6]}
    key = "10.5.207.0/24" if not stacks else "10.5.207.0-24&fc00:5:0:207::-64"
    lab.etcd.put_lease(key, lease)
    node.wait_for_route("10.5.207.0/24")
    lines = node.wait_for_log(f"has the MAC {mac} of our own {device}")
    assert len(lines) == 1
    doctor = [str(ROOT / ".venv/bin/flannelctl"), "doctor", f"--subnet-file={node.subnet_file}"]
    done = node.run(*doctor, check=False)
    assert done.returncode == 1
    assert "shares the MAC of our own device" in done.stdout
    lab.etcd.delete_lease(key)
    wait_for(lambda: "of our own device" not in node.run(*doctor, check=False).stdout, 5, "it to go")
