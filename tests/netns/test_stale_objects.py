"""What an earlier run left: kept while it may be needed, gone once the leases say that it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT, own_command
from tests.netns.apis import both_apis
from tests.netns.go_daemon import write_as_go
from tests.netns.pair import DUAL_STACK, SOON, connect

#: As a Go flanneld leaves its routes; 10.5.0.0/24 is a subnet that no node can have.
LEFT_BY_GO = "route add 10.5.0.0/24 via 198.18.0.99 dev eth0"

#: What flannel never makes. The subnets are below the lowest that a node may have in this test.
FOREIGN = [
    "route add 192.0.2.0/24 via 198.18.0.99",
    "route add 10.5.0.0/25 via 198.18.0.99",
    "route add 10.5.2.0/23 via 198.18.0.99",
    "route add 10.5.4.0/24 dev eth0",
    "route add 10.5.5.0/24 via 198.18.0.99 proto static",
    "route add 10.5.6.0/24 via 198.18.0.99 metric 50",
    "route add blackhole 10.5.7.0/24",
]


def traces(node: Node, peer: Node) -> list[dict[str, Any]]:
    """What in a node's kernel leads to a peer's subnet or to its VTEP."""
    inside = peer.subnet().removesuffix("0/24")
    return [
        *(route for route in node.routes() if route["dst"].startswith(inside)),
        *(entry for entry in node.neighbors("flannel.1") if entry["dst"].startswith(inside)),
        *(entry for entry in node.fdb("flannel.1") if entry["dst"] == peer.address),
    ]


def in_sync(node: Node) -> bool:
    return "In sync with" in node.log()


def start(node: Node) -> None:
    node.start()
    node.wait_ready()
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")


def destinations(node: Node, device: str = "") -> set[str]:
    return {route["dst"] for route in node.routes(device)}


# ---- peers that went while nobody looked ----------------------------------------------------------


@both_apis
def test_next_start_removes_objects_of_a_vanished_peer(lab: Lab, backend: dict[str, Any]) -> None:
    node, stays, gone = lab.cluster(backend, nodes=3)
    connect(node, stays)
    connect(node, gone)
    node.kill()
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    assert len(traces(node, gone)) == (3 if backend["Type"] == "vxlan" else 1)
    with node.container().ping(stays.container()) as ping:
        start(node)
        assert traces(node, gone) == []
        assert ping.lost() == 0


def test_nothing_is_removed_while_the_store_does_not_answer(lab: Lab, backend: dict[str, Any]) -> None:
    node, stays, gone = lab.cluster(backend, nodes=3)
    connect(node, stays)
    connect(node, gone)
    node.kill()
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    wait_for(lambda: not traces(stays, gone), what="the news to arrive")
    before = node.kernel_state("flannel.1", "eth0")
    lab.etcd.stop()
    with node.container().ping(stays.container()) as ping, node.changes() as changes:
        node.start()
        wait_for(
            lambda: "Couldn't fetch network config" in node.log(), what="the daemon to find that etcd is away"
        )
        assert changes.during(1) == []
        assert node.kernel_state("flannel.1", "eth0") == before
        lab.etcd.start()
        node.wait_ready()
        wait_for(lambda: not traces(node, gone), what="the first snapshot")
        assert ping.lost() == 0


def test_a_restart_changes_nothing(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    before = node.kernel_state("flannel.1", "eth0")
    with node.changes() as changes:
        node.stop()
        start(node)
        assert changes.during(0.3) == []
    assert node.kernel_state("flannel.1", "eth0") == before


# ---- routes without our mark ----------------------------------------------------------------------


def test_an_unmarked_route_to_a_vanished_peer_is_removed_once(lab: Lab) -> None:
    """Only at the start: what comes later was put there by an operator."""
    node, peer = lab.cluster({"Type": "host-gw"})
    connect(node, peer)
    node.stop()
    node.namespace.ip(LEFT_BY_GO)
    write_as_go(node)
    start(node)
    assert "10.5.0.0/24" not in destinations(node)
    assert len(node.wait_for_log("Removed, left by an earlier run: route 10.5.0.0/24 via 198.18.0.99")) == 1
    with node.paused():
        node.namespace.ip(LEFT_BY_GO, f"route del {peer.subnet()}")
    wait_for(lambda: peer.subnet() in destinations(node), SOON, "another look at all routes")
    assert "10.5.0.0/24" in destinations(node)
    node.stop()
    start(node)
    assert "10.5.0.0/24" in destinations(node)


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_route_made_by_hand_stays_at_a_restart_unless_another_flanneld_ran(lab: Lab, state: str) -> None:
    """Without a record of our last run it may be Go's."""
    by_hand = {4: "10.5.0.0/24", 6: "fc00:5::/64"}
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, **DUAL_STACK)
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")
    node.stop()
    node.namespace.ip(LEFT_BY_GO, f"route add {by_hand[6]} via fd00:18::99 dev eth0 proto boot")
    if state == "lost":
        node.subnet_file.with_name("flanneld.state").unlink()
    start(node)
    for family, subnet in by_hand.items():
        there = any(route["dst"] == subnet for route in node.routes("eth0", family))
        assert there is (state == "kept"), subnet


def test_routes_of_another_flanneld_are_adopted_until_they_were_swept_once(lab: Lab) -> None:
    """The removal removal guard holds the first sweep, and the daemon is killed meanwhile."""
    left = [f"10.5.{number}.0/24" for number in range(12)]
    network = {"Network": "10.5.0.0/16", "SubnetMin": "10.5.128.0", "Backend": {"Type": "host-gw"}}
    lab.etcd.put_config(network)
    (node,) = lab.add_nodes(1)
    node.namespace.ip(*(f"route add {subnet} via 198.18.0.99 dev eth0" for subnet in left))
    write_as_go(node)
    start(node)
    assert set(left) <= destinations(node)
    node.kill()
    node.start("-removal-guard=false")
    node.wait_ready()
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")
    assert not set(left) & destinations(node)
    node.wait_for_log("Removed, left by an earlier run: 2 more objects")
    assert len(node.wait_for_log("Removed, left by an earlier run: ")) == 11
    assert node.wait_for_log("Removed, left by an earlier run: 2 more objects")


def test_an_unmarked_route_to_a_peer_is_adopted(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"})
    node.stop()
    node.namespace.ip(f"route replace {peer.subnet()} via {peer.address} dev eth0 proto boot")
    write_as_go(node)
    with node.changes() as changes:
        start(node)
        assert changes.during(0.3) == []
    lab.etcd.delete_lease(peer.subnet())
    wait_for(lambda: not traces(node, peer), SOON, "the route to go with the lease")


def test_a_route_that_was_adopted_goes_with_its_lease_at_any_later_start(lab: Lab) -> None:
    """It is right, and so never written again to be marked."""
    node, peer = lab.cluster({"Type": "host-gw"})
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")
    node.stop()
    node.namespace.ip(f"route replace {peer.subnet()} via {peer.address} dev eth0 proto boot")
    write_as_go(node)
    for _ in range(2):
        start(node)
        assert node.wait_for_route(peer.subnet()).get("protocol", "boot") == "boot"
        node.stop()
    node.namespace.ip(LEFT_BY_GO)
    peer.stop()
    lab.etcd.delete_lease(peer.subnet())
    start(node)
    assert peer.subnet() not in destinations(node)
    assert "10.5.0.0/24" in destinations(node)


def test_routes_that_flannel_never_makes_stay(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    network = {"Network": "10.5.0.0/16", "SubnetMin": "10.5.128.0", "Backend": {"Type": "host-gw"}}
    lab.etcd.put_config(network)
    node.namespace.ip(*FOREIGN)
    write_as_go(node)
    before = node.routes()
    node.namespace.ip(LEFT_BY_GO)
    start(node)
    assert node.routes() == before


# ---- peers that moved -----------------------------------------------------------------------------


def leading_to(node: Node, subnet: str) -> dict[str, Any]:
    """All that a node's kernel has about one peer, the only one."""
    return {
        "routes": [row.get("gateway") for row in node.routes() if row["dst"] == subnet],
        "neighbors": {row["dst"]: row["lladdr"] for row in node.neighbors("flannel.1")},
        "fdb": {row["mac"]: row["dst"] for row in node.fdb("flannel.1")},
    }


@pytest.mark.parametrize("restart", [False, True], ids=["while we run", "while we are away"])
@pytest.mark.parametrize(
    ("public_ip", "mac"),
    [
        pytest.param("198.18.0.7", "02:00:00:00:00:09", id="another MAC"),
        pytest.param("198.18.0.9", "02:00:00:00:00:07", id="another address"),
        pytest.param("198.18.0.9", "02:00:00:00:00:09", id="another machine"),
    ],
)
def test_a_peer_that_moved_leaves_nothing_behind(lab: Lab, restart: bool, public_ip: str, mac: str) -> None:
    def attributes(public_ip: str, mac: str) -> dict[str, Any]:
        return {"PublicIP": public_ip, "BackendType": "vxlan", "BackendData": {"VtepMAC": mac}}

    def led_to(public_ip: str, mac: str) -> bool:
        neighbors = {"10.5.7.0": mac}
        wanted = {"routes": ["10.5.7.0"], "neighbors": neighbors, "fdb": {mac: public_ip}}
        return leading_to(node, "10.5.7.0/24") == wanted

    lab.etcd.put_lease("10.5.7.0/24", attributes("198.18.0.7", "02:00:00:00:00:07"))
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    wait_for(lambda: led_to("198.18.0.7", "02:00:00:00:00:07"), SOON, "the peer")
    if restart:
        node.kill()
    lab.etcd.put_lease("10.5.7.0/24", attributes(public_ip, mac))
    if restart:
        start(node)
    wait_for(lambda: led_to(public_ip, mac), SOON, "the peer at its new place")


def test_a_peer_gateway_that_moved_is_followed(lab: Lab) -> None:
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.7", "BackendType": "host-gw"})
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    wait_for(lambda: leading_to(node, "10.5.7.0/24")["routes"] == ["198.18.0.7"], SOON, "the peer")
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.9", "BackendType": "host-gw"})
    wait_for(lambda: leading_to(node, "10.5.7.0/24")["routes"] == ["198.18.0.9"], SOON, "the new gateway")


# ---- another backend, another segment -------------------------------------------------------------


def switch(lab: Lab, nodes: list[Node], backend: dict[str, Any]) -> None:
    """Restart all nodes with another backend; the last node never comes back."""
    *staying, gone = nodes
    for node in nodes:
        node.stop()
    lab.etcd.delete_lease(gone.subnet())
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    for node in staying:
        node.start()
    wait_for(lambda: all(map(in_sync, staying)), SOON, "the first snapshots")


def test_host_gw_leaves_no_route_of_vxlan(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "vxlan"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "host-gw"})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "eth0"), SOON, "the direct route")
    assert gone.subnet() not in destinations(node)
    assert node.routes("flannel.1") == []
    connect(node, peer)


def test_vxlan_leaves_no_route_of_host_gw(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "host-gw"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "vxlan"})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "flannel.1"), SOON, "the tunnel to the peer")
    assert gone.subnet() not in destinations(node)
    assert peer.subnet() not in destinations(node, "eth0")
    connect(node, peer)


def test_another_segment_leaves_no_route_of_the_old_one(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "vxlan"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "vxlan", "VNI": 2})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "flannel.2"), SOON, "the tunnel to the peer")
    assert gone.subnet() not in destinations(node)
    assert node.routes("flannel.1") == []
    connect(node, peer)


# ---- devices of an earlier configuration ----------------------------------------------------------

VNI_7 = {"Type": "vxlan", "VNI": 7}

#: What ran before, what runs now, and the devices that only the former has, each with its family.
SWITCHES = [
    pytest.param({"Type": "vxlan"}, VNI_7, {"flannel.1": 4, "flannel-v6.1": 6}, id="another VNI"),
    pytest.param({"Type": "vxlan"}, {"Type": "host-gw"}, {"flannel.1": 4, "flannel-v6.1": 6}, id="host-gw"),
    pytest.param({"Type": "udp"}, {"Type": "vxlan"}, {"flannel0": 4}, id="udp to vxlan"),
    pytest.param(
        {"Type": "ipip"},
        {"Type": "vxlan"},
        {"flannel.ipip": 4},
        id="ipip to vxlan",
        marks=pytest.mark.needs_kernel("ipip"),
    ),
]


def state_file(node: Node) -> Path:
    return node.subnet_file.with_name("flanneld.state")


def reconfigure(lab: Lab, node: Node, backend: dict[str, Any], **config: Any) -> None:
    """Restart a node's daemon with another backend."""
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend, **config})
    start(node)


@both_apis
@pytest.mark.parametrize(("before", "now", "devices"), SWITCHES)
def test_devices_of_an_earlier_configuration_are_swept(
    lab: Lab, before: dict[str, Any], now: dict[str, Any], devices: dict[str, int]
) -> None:
    stacks = DUAL_STACK if 6 in devices.values() else {}
    (node,) = lab.cluster(before, nodes=1, **stacks)
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")
    assert all(node.link(device) for device in devices)
    reconfigure(lab, node, now, **stacks)
    wait_for(lambda: not any(map(node.link, devices)), SOON, "the devices to go")
    for device in devices:
        assert len(node.wait_for_log(f"Removed, left by an earlier run: link {device} ")) == 1


def test_a_plan_names_the_devices_that_a_start_sweeps(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": VNI_7})
    record = state_file(node).read_bytes()
    own = (f"--etcd-endpoints={lab.etcd.endpoint}", f"--subnet-file={node.subnet_file}")
    planned = node.run(*own_command(), *own, "-plan").stdout.splitlines()
    assert "ip link del flannel.1" in planned
    assert node.link("flannel.1")
    assert state_file(node).read_bytes() == record


@pytest.mark.parametrize("plane", ["native", "python"])
def test_the_pump_of_udp_goes_with_its_device(lab: Lab, plane: str) -> None:
    (node,) = lab.cluster({"Type": "udp", "DataPlane": plane}, nodes=1)
    (line,) = node.wait_for_log(f"Using the {plane} data plane")
    pump = Path("/proc", line.rpartition("process ")[2])
    assert "flanneld.backends.udp.proxy" in (pump / "cmdline").read_text()
    reconfigure(lab, node, {"Type": "vxlan"})
    wait_for(lambda: not pump.exists(), SOON, "the pump to end")


def test_the_old_device_goes_when_the_routes_through_the_new_one_are_in(lab: Lab) -> None:
    lab.etcd.put_lease(
        "10.5.7.0/24",
        {"PublicIP": "198.18.0.7", "BackendType": "vxlan", "BackendData": {"VtepMAC": "02:00:00:00:00:07"}},
    )
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.wait_for_route("10.5.7.0/24")
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": VNI_7})
    with node.changes() as changes:
        start(node)
        wait_for(lambda: node.link("flannel.1") is None, SOON, "the old device to go")
        seen = changes.seen()
    assert seen.index("new route") < seen.index("link flannel.1 gone"), seen


@pytest.mark.parametrize("lost", ["state file", "boot"])
def test_a_device_without_a_record_of_this_boot_is_left_and_named(lab: Lab, lost: str) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    if lost == "boot":
        state = json.loads(state_file(node).read_text())
        state_file(node).write_text(json.dumps({**state, "boot_id": "another"}))
    else:
        state_file(node).unlink()
    reconfigure(lab, node, VNI_7)
    assert len(node.wait_for_log("Left alone: flannel.1 has an address in our network")) == 1
    assert node.link("flannel.1")
    node.wait_ready()
    done = node.run(
        str(ROOT / ".venv/bin/flannelctl"), "doctor", f"--subnet-file={node.subnet_file}", check=False
    )
    assert done.returncode == 1
    advice = "ip address flush dev flannel.1; ip link set flannel.1 down"
    assert advice in done.stdout
    node.run("sh", "-ec", advice)
    done = node.run(
        str(ROOT / ".venv/bin/flannelctl"), "doctor", f"--subnet-file={node.subnet_file}", check=False
    )
    assert "flannel.1" not in done.stdout


@pytest.mark.parametrize("change", ["made anew", "another daemon's"])
def test_a_device_that_is_not_the_recorded_one_stays(lab: Lab, change: str) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    name = "flannel.1" if change == "made anew" else "flannel.9"
    if change == "made anew":
        node.namespace.ip("link delete flannel.1")
    node.namespace.ip(f"link add {name} type vxlan id 9 local {node.address} dstport 4789")
    reconfigure(lab, node, VNI_7)
    wait_for(lambda: node.link("flannel.7"), SOON, "the new device")
    assert node.link(name)
    assert f"Left alone: {name}" not in node.log()
    # Nor does the next run, whose record no longer has it.
    node.stop()
    start(node)
    assert node.link(name)


def test_address_in_the_former_network_goes_and_an_operators_stays(lab: Lab) -> None:
    """Go's daemon refuses a device with two addresses."""
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    node.run("ip", "address", "add", "192.0.2.1/32", "dev", "flannel.1")
    lab.etcd.put_config({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}})
    start(node)
    own = node.subnet().replace("/24", "/32")
    assert own.startswith("10.6.")
    wait_for(lambda: set(node.addresses("flannel.1")) == {own, "192.0.2.1/32"}, SOON, "the old one to go")


#: The daemon, which dies as it is about to write subnet.env, or once it has, and before the sweep.
DIES_EARLY = """
import os, signal, sys

moment, is_written = sys.argv.pop(1), False

def on_event(event, args):
    global is_written
    is_now = event == "os.rename" and str(args[1]).endswith("subnet.env")
    if is_written or (is_now and moment == "before"):
        os.kill(os.getpid(), signal.SIGKILL)
    is_written = is_now

from flanneld.main import main

sys.addaudithook(on_event)
main()
"""


@pytest.mark.parametrize("dies", ["never", "before", "after"])
def test_objects_of_former_networks_go_also_after_a_run_that_died_before_the_sweep(
    lab: Lab, dies: str
) -> None:
    flags = ["--ip-masq", "--ip-blackhole-route"]
    node, peer = lab.cluster({"Type": "vxlan", "DirectRouting": True}, flags=flags)
    of_peer = peer.subnet()
    node.wait_for_route(of_peer)
    for each in (node, peer):
        each.stop()
    if dies != "never":
        lab.etcd.put_config({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan"}})
        node.start(*flags, command=[sys.executable, "-c", DIES_EARLY, dies])
        wait_for(lambda: not node.running, what="its end")
        assert node.env()["FLANNEL_NETWORK"] == ("10.5.0.0/16" if dies == "before" else "10.6.0.0/16")
    lab.etcd.put_config({"Network": "10.7.0.0/16", "Backend": {"Type": "vxlan"}})
    node.start(*flags)
    node.wait_ready()
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")

    def left() -> list[str]:
        routes = [route["dst"] for route in node.routes()]
        rules = node.run("iptables-save").stdout.split()
        found = (*routes, *node.addresses("flannel.1"), *rules)
        return [each for each in found if each.startswith(("10.5.", "10.6."))]

    wait_for(lambda: left() == [of_peer], SOON, f"objects of former networks to go: {left()}")
    assert node.subnet() in destinations(node)
    # The peer does not know the new network yet.
    lab.etcd.delete_lease(of_peer)
    wait_for(lambda: left() == [], SOON, "the route to go with the lease")
    known = [["10.7.0.0/16", node.subnet()]]
    wait_for(lambda: json.loads(state_file(node).read_text())["former"] == known, what="the record to forget")


def test_a_sweep_that_is_repeated_leaves_what_an_operator_has_made_meanwhile(lab: Lab) -> None:
    """The first one adopts routes that look like Go's. The next one comes with the end of a former lease."""
    node, peer = lab.cluster({"Type": "host-gw"})
    of_peer = peer.subnet()
    node.wait_for_route(of_peer)
    for each in (node, peer):
        each.stop()
    write_as_go(node)
    lab.etcd.put_config({"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}})
    start(node)
    wait_for(
        lambda: not json.loads(state_file(node).read_text())["adopts"], SOON, "the end of the first sweep"
    )
    by_hand = LEFT_BY_GO.replace("10.5", "10.6")
    node.namespace.ip(by_hand)
    assert of_peer in destinations(node)
    lab.etcd.delete_lease(of_peer)
    node.wait_for_no_route(of_peer, SOON)
    assert "10.6.0.0/24" in destinations(node)


def test_routes_of_a_family_that_the_network_no_longer_has_go(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"}, **DUAL_STACK)
    former = peer.subnet(6)
    wait_for(lambda: former in {each["dst"] for each in node.routes(family=6)}, what="the route to a peer")
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    start(node)
    node.wait_for_no_route(former, SOON, family=6)


#: The daemon, which dies once it has made devices, and before it records which.
DIES_WITH_DEVICES = """
import json, os, signal, sys

def on_event(event, args):
    if event == "os.rename" and str(args[1]).endswith("flanneld.state"):
        with open(args[0]) as file:
            if any(each["index"] for each in json.load(file)["devices"]):
                os.kill(os.getpid(), signal.SIGKILL)

from flanneld.main import main

sys.addaudithook(on_event)
main()
"""


def test_devices_of_a_run_that_died_before_it_recorded_them_are_swept(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes(1)
    node.start(command=[sys.executable, "-c", DIES_WITH_DEVICES])
    wait_for(lambda: not node.running, what="its end")
    assert node.link("flannel.1")
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": VNI_7})
    start(node)
    wait_for(lambda: node.link("flannel.1") is None, SOON, "the device to go")
    assert node.link("flannel.7")


def test_devices_are_kept_on_record_until_they_were_swept(lab: Lab) -> None:
    """A daemon that ends before it knows the peers leaves the sweep to the next one."""
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": VNI_7})
    node.start()
    wait_for(lambda: node.link("flannel.7"), SOON, "the new device")
    node.kill()
    recorded = {each["name"] for each in json.loads(state_file(node).read_text())["devices"]}
    assert "flannel.1" in recorded or node.link("flannel.1") is None
    start(node)
    wait_for(lambda: node.link("flannel.1") is None, SOON, "the old device to go")
