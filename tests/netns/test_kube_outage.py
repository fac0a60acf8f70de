"""The API server goes away, hangs, or lets nobody in: no packet is lost, and no news is missed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lab import Fault, Lab, Node, own_command, wait_for
from tests.lab.kube import TOKEN
from tests.netns.kube import (
    HEALTH_PORT,
    SOON,
    complaints,
    notes,
    overlay_routes,
    readiness,
    start,
    write_net_conf,
)
from tests.netns.pair import connect
from tests.netns.test_seeing import answer

VXLAN = {"Type": "vxlan"}
PEER = ("n9", "10.5.9.0/24", "198.18.0.9")
NEWCOMER = ("n8", "10.5.8.0/24", "198.18.0.8")
#: Daemons wait up to 40 s between two attempts at a server that answers with errors.
RECONNECTED = 45.0
#: They notice within 4 s that a server is there again; then they list all nodes.
RETURN = 8.0
#: Seconds of silence after which a daemon reads all again: stopping and starting a real server take longer.
RESTORING = 2.5
#: Seconds after which pauses that grow all the time would be at 13 to 26 s.
OUTAGE = 20
SILENCE = 120.0


def put_peer(lab: Lab, backend: str) -> None:
    data = {"VtepMAC": "02:00:00:00:00:09"} if backend == "vxlan" else None
    lab.kube.control.put_peer(*PEER, backend, data)


def said_of_the_api_server(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if "API server" in line]


# ---- while it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend_type", "seconds"),
    [
        ("vxlan", 4),
        pytest.param("vxlan", 60, marks=pytest.mark.long),
        pytest.param("host-gw", 60, marks=pytest.mark.long),
    ],
)
def test_an_outage_of_the_api_server_costs_no_packet_no_news_and_few_words(
    lab: Lab, backend_type: str, seconds: int
) -> None:
    first, second, third = lab.kube_cluster({"Type": backend_type}, nodes=3)
    connect(first, second)
    connect(first, third)
    before = len(said_of_the_api_server(first))
    with first.container().ping(second.container()) as ping:
        lab.kube.kill()
        ping.wait_for_replies(seconds * 50, 2 * seconds + SOON)
        lab.kube.start()
        put_peer(lab, backend_type)
        lab.kube.control.delete_node(third.name)
        first.wait_for_route(PEER[1], RECONNECTED)
        first.wait_for_no_route(third.subnet(), SOON)
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert len(said_of_the_api_server(first)) - before <= 6


def test_an_api_server_that_hangs_costs_no_packet_and_no_news(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    with first.container().ping(second.container()) as ping:
        with lab.kube.frozen():
            ping.wait_for_replies(100)
        put_peer(lab, "vxlan")
        first.wait_for_route(PEER[1], SOON)
        assert ping.lost() == 0


def test_changes_lost_with_the_history_are_noticed(lab: Lab) -> None:
    first, second, third = lab.kube_cluster({"Type": "host-gw"}, nodes=3)
    first.wait_for_route(third.subnet(), SOON)
    first.wait_for_route(second.subnet(), SOON)
    lab.kube.kill()
    lab.kube.start()
    lab.kube.control.delete_node(third.name)
    lab.kube.control.jump(5000)
    lab.kube.control.compact()
    put_peer(lab, "host-gw")
    wait_for(lambda: overlay_routes(first) == {second.subnet(), PEER[1]}, RECONNECTED)


def test_a_deletion_during_a_long_outage_is_followed_soon_after_it(lab: Lab) -> None:
    """The history is gone by then, so that a watch would be answered with 410."""
    first, second, third = lab.kube_cluster({"Type": "host-gw"}, nodes=3)
    for node in (second, third):
        connect(first, node)
    with first.container().ping(second.container()) as ping:
        lab.kube.kill()
        ping.wait_for_replies(OUTAGE * 50, 2 * OUTAGE + SOON)
        lab.kube.start()
        lab.kube.control.delete_node(third.name)
        lab.kube.control.compact()
        first.wait_for_no_route(third.subnet(), RETURN)
        ping.wait_for_replies()
        assert ping.lost() == 0


@pytest.mark.parametrize("versions", [0, 5000], ids=["behind", "overtaken"])
def test_a_store_that_was_restored_from_a_backup_is_read_again(lab: Lab, versions: int) -> None:
    """Whether its version is lower than the one that the daemon knows, or has overtaken it meanwhile."""
    first, second, third = lab.kube_cluster({"Type": "host-gw"}, nodes=3)
    for node in (second, third):
        first.wait_for_route(node.subnet(), SOON)
    # The last write of a node that starts. One that came after the peer would be read after the silence.
    wait_for(lambda: all(lab.kube.control.condition(each.name) for each in (first, second, third)))
    lab.kube.back_up()
    lab.kube.control.jump(1000)
    put_peer(lab, "host-gw")
    first.wait_for_route(PEER[1], SOON)
    with first.paused():
        silent_since = time.monotonic()
        lab.kube.kill()
        lab.kube.restore()
        lab.kube.start()
        lab.kube.control.delete_node(third.name)
        lab.kube.control.put_peer(*NEWCOMER, "host-gw")
        lab.kube.control.jump(versions)
        wait_for(lambda: time.monotonic() > silent_since + RESTORING, what="a silence as of a real restore")
    wait_for(lambda: overlay_routes(first) == {second.subnet(), NEWCOMER[1]}, RETURN)


def test_an_api_server_that_forgot_all_nodes_takes_no_peer_along(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    with first.container().ping(second.container()) as ping:
        lab.kube.kill()
        lab.kube.forget()
        lab.kube.start("--version=100000")
        lab.kube.control.compact()
        # Not the log: it may have spoken of the outage already, and has a line a minute.
        wait_for(lambda: "lacks our own node" in str(answer(first, "status")), RECONNECTED)
        ping.wait_for_replies()
        assert ping.lost() == 0
    for node in (first, second):
        lab.kube.add(node)
    wait_for(lambda: all(notes(lab, node) for node in (first, second)), RECONNECTED)
    connect(second, first)


@pytest.mark.parametrize(
    "status", [403, 500, *(pytest.param(status, marks=pytest.mark.long) for status in (401, 429))]
)
def test_a_refused_watch_is_waited_out(lab: Lab, status: int) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    lab.kube.control.add_fault(Fault("watch", status=status, times=4))
    lab.kube.control.close_connections()
    put_peer(lab, "vxlan")
    first.wait_for_route(PEER[1], RECONNECTED)
    assert overlay_routes(first) == {second.subnet(), PEER[1]}
    assert len(complaints(first)) <= 2


# ---- while it starts ------------------------------------------------------------------------------


def started_without_rights(lab: Lab) -> Node:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    lab.kube.control.put_token("nobody", "nobody", "nobody")
    kubeconfig = lab.kube.kubeconfig(lab.directory / "kubeconfig", "nobody")
    start(
        lab, node, f"--kubeconfig-file={kubeconfig}", f"-healthz-port={HEALTH_PORT}", "-healthz-ip=127.0.0.1"
    )
    return node


def test_missing_rights_are_waited_for_with_a_clear_reason(lab: Lab) -> None:
    node = started_without_rights(lab)
    wait_for(lambda: "403: nodes is forbidden" in readiness(node)[1], SOON)
    wait_for(lambda: any("403" in line for line in node.service_manager.heard()), SOON)
    lab.kube.kubeconfig(lab.directory / "kubeconfig", TOKEN)
    node.wait_ready()
    wait_for(lambda: readiness(node) == (200, "flanneld is ready"), SOON)
    assert len(complaints(node)) == 1


def test_an_api_server_that_comes_late_is_waited_for(lab: Lab) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    lab.kube.kill()
    start(lab, node)
    node.wait_for_log("does not answer (connection refused)", SOON)
    assert node.stop().status == 0
    start(lab, node)
    node.wait_for_log("does not answer (connection refused)", SOON)
    lab.kube.start()
    assert node.wait_ready()["FLANNEL_SUBNET"] == "10.5.1.1/24"


def test_a_daemon_that_waits_for_a_silent_api_server_stops_at_once(lab: Lab) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    lab.kube.control.add_fault(Fault("list", delay=SILENCE))
    start(lab, node)
    wait_for(lambda: lab.kube.control.requests(), SOON)
    status, seconds = node.stop()
    assert status == 0
    assert seconds < SILENCE / 2


# ---- with the nodes last known on disk ------------------------------------------------------------


def saved(directory: Path) -> list[str]:
    file = directory / "kube-nodes.json"
    return sorted(node["name"] for node in json.loads(file.read_text())["nodes"]) if file.exists() else []


def nodes_that_were_saved(
    lab: Lab, backend: Mapping[str, object], number: int, *flags: str
) -> tuple[Path, list[Node]]:
    """Start nodes, the first with these flags, and wait until it has saved all; return them and where."""
    write_net_conf(lab, backend)
    directory = lab.directory / "state"
    directory.mkdir()
    nodes = lab.add_nodes(number)
    for node in nodes:
        lab.kube.add(node)
        start(lab, node, *([f"--state-dir={directory}", *flags] if node is nodes[0] else []))
    for node in nodes:
        node.wait_ready()
    wait_for(lambda: saved(directory) == [node.name for node in nodes], 20)
    return directory, nodes


def peers_of(node: Node) -> dict[str, str]:
    """The public IP of each peer by its MAC."""
    return {entry["mac"]: entry["dst"] for entry in node.fdb("flannel.1")}


def test_with_saved_nodes_a_host_that_boots_without_api_server_joins_the_network(lab: Lab) -> None:
    directory, (first, second, third) = nodes_that_were_saved(lab, VXLAN, 3)
    for node in (second, third):
        connect(first, node)
    before, mac = peers_of(first), (first.link("flannel.1") or {})["address"]
    lab.kube.kill()
    first.kill()
    first.run("ip", "link", "del", "flannel.1")
    first.subnet_file.unlink()
    start(lab, first, f"--state-dir={directory}")
    assert first.wait_ready()["FLANNEL_SUBNET"] == "10.5.1.1/24"
    first.container().wait_for_reply(second.container())
    wait_for(lambda: peers_of(first) == before, SOON, "all peers")
    assert (first.link("flannel.1") or {})["address"] == mac
    lab.kube.start()
    lab.kube.control.delete_node(third.name)
    first.wait_for_no_route("10.5.3.0/24", RECONNECTED)
    first.container().wait_for_reply(second.container())
    first.stop()
    first.run(*own_command(), "-cleanup", f"-state-dir={directory}", f"-subnet-file={first.subnet_file}")
    assert saved(directory) == []


@pytest.mark.needs_kernel("wireguard")
def test_saved_nodes_let_this_node_change_its_own_device_and_nothing_of_a_peer(lab: Lab) -> None:
    directory, (first, second) = nodes_that_were_saved(lab, {"Type": "wireguard"}, 2)
    connect(first, second)
    (peer,) = first.run("wg", "show", "flannel-wg", "peers").stdout.split()
    lab.kube.kill()
    first.kill()
    first.run("wg", "set", "flannel-wg", "peer", peer, "persistent-keepalive", "7")
    write_net_conf(lab, {"Type": "wireguard", "ListenPort": 51900})
    start(lab, first, f"--state-dir={directory}")
    first.wait_for_log("Using the nodes saved in")
    port = ("wg", "show", "flannel-wg", "listen-port")
    wait_for(lambda: first.run(*port).stdout.strip() == "51900", SOON, "the port of the network config")
    first.wait_ready()
    assert first.run("wg", "show", "flannel-wg", "persistent-keepalive").stdout.split() == [peer, "7"]
    lab.kube.start()
    keepalive = ("wg", "show", "flannel-wg", "persistent-keepalive")
    wait_for(lambda: first.run(*keepalive).stdout.split() == [peer, "off"], RECONNECTED, "the store's peer")
    first.container().wait_for_reply(second.container())


@pytest.mark.parametrize("fault", [Fault("list", status=503, times=0), Fault("list", delay=SILENCE, times=0)])
def test_with_saved_nodes_a_host_joins_though_the_api_server_fails_half_way(lab: Lab, fault: Fault) -> None:
    """It tells the booting host its own node, and lists the others no more."""
    directory, (first, second) = nodes_that_were_saved(lab, VXLAN, 2)
    first.kill()
    first.run("ip", "link", "del", "flannel.1")
    first.subnet_file.unlink()
    second.kill()
    lab.kube.control.add_fault(Fault("list"))  # none: our own node is told
    lab.kube.control.add_fault(fault)
    start(lab, first, f"--state-dir={directory}")
    first.wait_for_log("Using the nodes saved in")
    first.container().wait_for_reply(second.container())
    lab.kube.control.delete_node(second.name)
    assert is_led_to(first, second)
    lab.kube.control.clear_faults()
    first.wait_for_no_route("10.5.2.0/24", RECONNECTED)


# ---- with a file that is not up to date -----------------------------------------------------------

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def is_led_to(node: Node, peer: Node) -> bool:
    return peer.subnet() in overlay_routes(node)


def edit(directory: Path, name: str, **notes: str) -> None:
    """Have the file say something else of a node than it did."""
    file = directory / "kube-nodes.json"
    content = json.loads(file.read_text())
    (node,) = (each for each in content["nodes"] if each["name"] == name)
    node["annotations"] |= {key.replace("_", "-"): value for key, value in notes.items()}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("why", "backend_type"),
    [
        ("put back", "vxlan"),
        ("could not be saved", "host-gw"),
        ("wrong", "vxlan"),
        pytest.param("put back", "host-gw", marks=pytest.mark.long),
        pytest.param("could not be saved", "vxlan", marks=pytest.mark.long),
        pytest.param("wrong", "host-gw", marks=pytest.mark.long),
    ],
)
def test_a_restart_without_api_server_keeps_what_an_old_file_does_not_know(
    lab: Lab, why: str, backend_type: str
) -> None:
    """n3 has joined since the file was saved, and n2 has changed its address and MAC."""
    health = (f"-healthz-port={HEALTH_PORT}", "-healthz-ip=127.0.0.1")
    directory, (first, second) = nodes_that_were_saved(lab, {"Type": backend_type}, 2, *health)
    flags = (f"--state-dir={directory}", *health)
    (third,) = lab.add_nodes()
    if why == "could not be saved":
        first.stop()
        start(lab, first, *flags, command=["sh", "-c", READ_ONLY, str(directory), *own_command()])
    old = (directory / "kube-nodes.json").read_text()
    lab.kube.add(third)
    start(lab, third)
    third.wait_ready()
    for node in (second, third):
        connect(first, node)
    if why == "could not be saved":
        first.wait_for_log("Cannot save the nodes", 20)
    to_second = first.container().ping(second.container())
    to_third = first.container().ping(third.container())
    with to_second, to_third:
        lab.kube.kill()
        first.stop()
        (directory / "kube-nodes.json").write_text(old)
        if why == "wrong":
            edit(
                directory,
                "n2",
                public_ip="198.18.0.77",
                backend_data='{"VNI":1,"VtepMAC":"02:00:00:00:00:77"}',
            )
        assert "del" not in plan_without_server(lab, first, directory)
        start(lab, first, *flags)
        first.wait_ready()
        wait_for(lambda: readiness(first)[0] == 200, SOON)
        check_that_it_says_so(first, directory)
        for ping in (to_second, to_third):
            ping.wait_for_replies(100)
            assert ping.lost() == 0
    assert is_led_to(first, third)
    lab.kube.start()
    wait_for(lambda: readiness(first) == (200, "flanneld is ready"), RETURN)
    wait_for(lambda: "STATUS" in (told := first.service_manager.heard()[-1]) and "taken" not in told, SOON)
    lab.kube.control.delete_node(third.name)
    first.wait_for_no_route(third.subnet(), SOON)
    connect(first, second)


def plan_without_server(lab: Lab, node: Node, directory: Path) -> str:
    """What a start would do while the API server is away."""
    flags = [*lab.kube.flags(), f"--net-config-path={lab.directory / 'net-conf.json'}"]
    command = [
        *own_command(),
        "--plan",
        f"--subnet-file={node.subnet_file}",
        f"--state-dir={directory}",
        *flags,
    ]
    return node.run(*command, variables={"NODE_NAME": node.name}).stdout


def check_that_it_says_so(node: Node, directory: Path) -> None:
    """A node that is ready with leases out of a cache does not hide that."""
    caveat = f"leases: taken from the nodes saved in {directory}/kube-nodes.json at "
    first_line, second_line = readiness(node)[1].splitlines()
    assert first_line == "flanneld is ready"
    assert second_line.startswith(caveat)
    wait_for(lambda: any(caveat in line for line in node.service_manager.heard()), SOON)
    assert answer(node, "status")["store"]["cache"].startswith("the nodes saved in ")
    assert len(node.wait_for_log("removing and replacing nothing until the store answers")) == 1
