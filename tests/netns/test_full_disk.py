"""Disks that are full to the last byte: the network works, and what could not be written is written later."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.small_disk import FILL, FILLER, SmallDisk
from tests.netns.strangers import ABOVE_STRANGERS, PATIENT, Stranger, wait_for_just
from tests.netns.test_conditions import ready_page, service_status
from tests.netns.test_reports import HEAD
from tests.netns.test_seeing import HEALTH_PORT

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}, **ABOVE_STRANGERS}
#: Pings in a second or two, in which whoever tries again and again has done so.
SOME_TIME = 100
#: What tells that a daemon tries in vain.
COMPLAINT = "No space left on device"
#: By default Python's own buffer takes what the disk does not.
LOST = re.compile(r"^\.\.\. (\d+) lines? of the log (?:is|are) lost: there was no room\n", re.MULTILINE)
BUFFERED = {"PYTHONUNBUFFERED": ""}


def env(subnet: str, mtu: int) -> str:
    """The whole of subnet.env."""
    lines = ("FLANNEL_NETWORK=10.5.0.0/16", f"FLANNEL_SUBNET={subnet}", f"FLANNEL_MTU={mtu}")
    return "\n".join((*lines, "FLANNEL_IPMASQ=false", ""))


def start(node: Node, disk: SmallDisk, preparation: str) -> None:
    """Start a daemon whose subnet.env is there, and look at it there."""
    node.start(
        f"--subnet-file={disk.directory}/subnet.env",
        f"--healthz-port={HEALTH_PORT}",
        command=disk.command(preparation),
    )
    node.subnet_file = disk.seen / "subnet.env"


def wait_for_content(file: Path, before: str | None, after: str) -> None:
    """Wait until a file says something else, and see that it never says anything but the one or the other."""

    def is_replaced() -> bool:
        content = file.read_text() if file.exists() else None
        assert content in (before, after)
        return content == after

    wait_for(is_replaced, PATIENT, f"{file} to be written")


@pytest.mark.parametrize(
    "earlier", [None, env("10.5.177.1/24", 1400)], ids=["without", "with an earlier one"]
)
def test_subnet_env_that_has_no_room_at_the_start_is_written_once_it_has(
    lab: Lab, earlier: str | None
) -> None:
    lab.etcd.put_config(CONFIG)
    node, peer = lab.add_nodes(2)
    peer.start()
    peer.wait_ready(PATIENT)
    disk = SmallDisk(node)
    if earlier:
        (node.directory / "earlier").write_text(earlier)
    bring = f"cp {node.directory}/earlier subnet.env" if earlier else "true"
    start(node, disk, f"{bring} && {FILL}")
    node.wait_for_route(peer.subnet(), PATIENT)
    wait_for(lambda: COMPLAINT in service_status(node), PATIENT, "STATUS= to say what is missing")
    assert not node.service_manager.ready()
    page = ready_page(node)
    assert page.startswith("flanneld is not ready yet\n")
    assert f"cannot write {disk.directory}/subnet.env: {COMPLAINT}" in page
    (subnet,) = set(lab.etcd.leases()) - {peer.subnet()}
    gateway = subnet.replace("0/24", "1")
    bridge = "link add cni0 type bridge", "link set cni0 up", f"address add {gateway}/24 dev cni0"
    node.namespace.ip(*bridge)
    peer.container().wait_for_reply(gateway, PATIENT)
    with peer.container().ping(gateway) as ping:
        ping.wait_for_replies(SOME_TIME, PATIENT)
        disk.wait_for_files(FILLER, *(["subnet.env"] if earlier else []))
        assert len(node.wait_for_log(COMPLAINT)) == 2  # once of each file
        disk.make_room()
        wait_for_content(node.subnet_file, earlier, env(f"{gateway}/24", 1450))
        wait_for(node.service_manager.ready, PATIENT, "the daemon to become ready")
        wait_for(lambda: COMPLAINT not in service_status(node), PATIENT, "STATUS= to forget it")
        assert ready_page(node).startswith("flanneld is ready\n")
        assert ping.lost() == 0
    disk.wait_for_files("subnet.env", "flanneld.state")
    assert not earlier or subnet == "10.5.177.0/24"
    assert len(node.wait_for_log(COMPLAINT)) == 2  # once of each file
    assert len(node.wait_for_log(f"Wrote subnet file to {disk.directory}/subnet.env")) == 1


def test_subnet_env_that_has_no_room_when_it_changes_is_written_once_it_has(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    node, peer = lab.add_nodes(2)
    peer.start()
    peer.wait_ready(PATIENT)
    disk = SmallDisk(node)
    start(node, disk, "true")
    wait_for(node.service_manager.ready, PATIENT, "the daemon to become ready")
    before = node.subnet_file.read_text()
    assert before == env(node.env()["FLANNEL_SUBNET"], 1450)
    node.container().wait_for_reply(peer.container(), PATIENT)
    disk.fill()
    with node.container().ping(peer.container()) as ping:
        node.namespace.ip("link set eth0 mtu 1400")
        node.wait_for_log(COMPLAINT, PATIENT)
        ping.wait_for_replies(SOME_TIME, PATIENT)
        assert node.subnet_file.read_text() == before
        Stranger(7).come(lab)
        wait_for_just(node, [Stranger(7)])
        disk.make_room()
        wait_for_content(node.subnet_file, before, env(node.env()["FLANNEL_SUBNET"], 1350))
        assert ping.lost() == 0
    disk.wait_for_files("subnet.env", "flanneld.state")
    assert len(node.wait_for_log(COMPLAINT)) == 1


def test_the_nodes_of_kubernetes_are_saved_once_there_is_room(lab: Lab) -> None:
    (peer,) = lab.kube_cluster({"Type": "vxlan"}, nodes=1)
    node, disk = start_in_kubernetes(lab)
    node.container().wait_for_reply(peer.container(), PATIENT)
    with node.container().ping(peer.container()) as ping:
        node.wait_for_log(COMPLAINT, PATIENT)
        ping.wait_for_replies(SOME_TIME, PATIENT)
        disk.wait_for_files(FILLER)
        disk.make_room()
        disk.wait_for_files("kube-nodes.json")
        assert ping.lost() == 0
    saved = json.loads((disk.seen / "kube-nodes.json").read_text())
    assert {each["name"] for each in saved["nodes"]} == {node.name, peer.name}
    assert len(node.wait_for_log(COMPLAINT)) == 1


def start_in_kubernetes(lab: Lab) -> tuple[Node, SmallDisk]:
    """One more node, whose state directory has no room."""
    (node,) = lab.add_nodes()
    disk = SmallDisk(node)
    lab.kube.add(node)
    flags = (
        *lab.kube.flags(),
        f"--net-config-path={lab.directory}/net-conf.json",
        f"--state-dir={disk.directory}",
    )
    node.start(*flags, command=disk.command(FILL), environment={"NODE_NAME": node.name})
    node.wait_ready(PATIENT)
    return node, disk


def tells_of_leases_again(disk: SmallDisk) -> bool:
    """Return True if the log has a line about one lease, or about those of a second, after what was lost."""
    text = (disk.seen / "log").read_text()
    lost = LOST.search(text)
    return lost is not None and re.search(r"\] (Subnet added|Leases): ", text[lost.end() :]) is not None


def test_a_log_that_takes_no_more_costs_nothing_else(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    node, peer = lab.add_nodes(2)
    peer.start()
    disk = SmallDisk(node)
    node.start(command=disk.command(redirection="2>log"), environment=BUFFERED)
    for each in (node, peer):
        each.wait_ready(PATIENT)
    node.container().wait_for_reply(peer.container(), PATIENT)
    disk.fill()
    with node.container().ping(peer.container()) as ping:
        many = [Stranger(number) for number in range(50)]
        # Each of those with another backend has a line of its own: more than fit into the file's last block.
        for stranger in (*(Stranger(number, backend="host-gw") for number in range(100, 200)), *many):
            stranger.come(lab)
        wait_for_just(node, many)
        many[7].damage(node)
        wait_for_just(node, many)
        disk.make_room()
        last = Stranger(50)
        last.come(lab)
        wait_for(lambda: tells_of_leases_again(disk), PATIENT, "the log to go on")
        before, lost, after = LOST.split((disk.seen / "log").read_text())
        # Of the line that met the end of the disk there is a part.
        lines = [*before.splitlines()[:-1], *after.splitlines()]
        assert [line for line in lines if not HEAD.match(line)] == []
        assert int(lost) > 0
        disk.fill()
        last.go(lab)
        wait_for_just(node, many)
        assert node.stop().status == 0
        assert ping.lost() == 0
