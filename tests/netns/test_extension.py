"""The extension backend: commands of the network config make the network between real daemons."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import own_command
from tests.netns.test_cluster import connect
from tests.netns.test_seeing import findings, flannelctl

SOON = 20


def without_remove(backend: dict[str, str]) -> dict[str, str]:
    return {key: command for key, command in backend.items() if key != "SubnetRemoveCommand"}


#: Upstream's sample configs, word for word.
HOST_GW = {
    "Type": "extension",
    "SubnetAddCommand": "ip route add $SUBNET via $PUBLIC_IP",
    "SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP",
}
VXLAN = {
    "Type": "extension",
    "PreStartupCommand": (
        "export VNI=1; export IF_NAME=flannel-vxlan; ip link del $IF_NAME 2>/dev/null; ip link add $IF_NAME"
        " type vxlan id $VNI dstport 8472 nolearning && ip link set mtu 1450 dev $IF_NAME"
        " && cat /sys/class/net/$IF_NAME/address"
    ),
    "PostStartupCommand": (
        "export IF_NAME=flannel-vxlan; export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`;"
        " ip addr add $SUBNET_IP/32 dev $IF_NAME && ip link set $IF_NAME up"
    ),
    "ShutdownCommand": "export IF_NAME=flannel-vxlan; ip link del $IF_NAME",
    "SubnetAddCommand": (
        "export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; export IF_NAME=flannel-vxlan; read VTEP;"
        " ip route add $SUBNET nexthop via $SUBNET_IP dev $IF_NAME onlink && arp -s $SUBNET_IP $VTEP dev"
        " $IF_NAME && bridge fdb add $VTEP dev $IF_NAME self dst $PUBLIC_IP"
    ),
}
WIREGUARD = {
    "Type": "extension",
    "PreStartupCommand": "wg genkey | tee privatekey | wg pubkey",
    "PostStartupCommand": (
        "export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; ip link del flannel-wg 2>/dev/null; ip link add"
        " flannel-wg type wireguard && wg set flannel-wg listen-port 51820 private-key privatekey && ip"
        " addr add $SUBNET_IP/32 dev flannel-wg && ip link set flannel-wg up && ip route add $NETWORK"
        " dev flannel-wg"
    ),
    "ShutdownCommand": "ip link del flannel-wg",
    "SubnetAddCommand": (
        "read PUBLICKEY; wg set flannel-wg peer $PUBLICKEY endpoint $PUBLIC_IP:51820 allowed-ips $SUBNET"
    ),
    "SubnetRemoveCommand": "read PUBLICKEY; wg set flannel-wg peer $PUBLICKEY remove",
}
VXLAN_REMOVE = (
    "export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; export IF_NAME=flannel-vxlan; read VTEP;"
    " ip route del $SUBNET via $SUBNET_IP dev $IF_NAME; arp -i $IF_NAME -d $SUBNET_IP;"
    " bridge fdb del $VTEP dev $IF_NAME self dst $PUBLIC_IP"
)
#: Each sample with a SubnetRemoveCommand and without.
SAMPLES = {
    "host-gw": HOST_GW,
    "host-gw, no remove": without_remove(HOST_GW),
    "vxlan": VXLAN,
    "vxlan, remove": {**VXLAN, "SubnetRemoveCommand": VXLAN_REMOVE},
    "wireguard": WIREGUARD,
    "wireguard, no remove": without_remove(WIREGUARD),
}
NETWORK = "10.50.0.0/16"
#: A node takes one of the first hundred free subnets, so this one and the next are never its own.
PEER = "10.50.177.0/24"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file in which commands note that they ran."""
    return tmp_path / "notes"


def noting(notes: Path, what: str, then: str = "true") -> str:
    """Return a command that notes when it runs, with its variables and input."""
    shown = f'echo {what} "$SUBNET $PUBLIC_IP $(cat)"'
    return f"{shown} >> {shlex.quote(str(notes))}; {then}"


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


def awaited(notes: Path, *wanted: str) -> None:
    wait_for(lambda: lines(notes) == list(wanted), SOON, f"{wanted}; noted were {lines(notes)}")


def one_node(lab: Lab, backend: dict[str, Any], *flags: str) -> Node:
    (node,) = lab.cluster({"Type": "extension", **backend}, nodes=1, flags=flags, Network=NETWORK)
    return node


def add_peer(lab: Lab, data: object = "data", address: str = "198.18.0.77", subnet: str = PEER) -> None:
    value = {"PublicIP": address, "BackendType": "extension", "BackendData": data}
    lab.etcd.put_lease(subnet, value)


def start_again(node: Node, *flags: str) -> None:
    node.start(*flags)
    node.wait_ready()
    node.wait_for_log("In sync with")


def test_commands_of_the_host_gw_sample_connect_nodes_and_a_peer_that_leaves_is_removed(lab: Lab) -> None:
    first, second = lab.cluster(HOST_GW, Network=NETWORK)
    connect([first, second])
    assert second.stop().status == 0
    lab.etcd.delete_lease(second.subnet())
    first.wait_for_no_route(second.subnet())


def test_commands_of_the_vxlan_sample_connect_nodes_and_shutdown_removes_the_device(lab: Lab) -> None:
    first, second = lab.cluster(VXLAN, Network=NETWORK)
    connect([first, second])
    device = first.link("flannel-vxlan")
    assert device
    assert lab.etcd.leases()[first.subnet()]["BackendData"] == device["address"]
    assert first.stop().status == 0
    assert first.run("ip", "link", "show", "flannel-vxlan", check=False).returncode != 0


@pytest.mark.needs_kernel("wireguard")
def test_commands_of_the_wireguard_sample_connect_nodes_also_after_a_restart(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": WIREGUARD})
    nodes = lab.add_nodes(2)
    for node in nodes:
        monkeypatch.chdir(node.directory)  # the sample keeps its key in the daemon's directory
        node.start()
        node.wait_ready()
    connect(nodes)
    monkeypatch.chdir(nodes[0].directory)
    for end in (nodes[0].stop, nodes[0].kill):
        end()
        start_again(nodes[0])
        connect(nodes)


def sample(name: str) -> Any:
    marks = [pytest.mark.needs_kernel("wireguard")] if name.startswith("wireguard") else []
    if name == "wireguard, no remove":
        marks.append(pytest.mark.long)  # as vxlan's, but in the machine
    return pytest.param(SAMPLES[name], id=name, marks=marks)


@pytest.mark.parametrize("backend", [sample(name) for name in SAMPLES])
def test_sample_loses_no_packet_while_host_is_read_and_peers_come_and_go(
    lab: Lab, backend: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
    nodes = first, second, third = lab.add_nodes(3)

    def start(node: Node) -> None:
        monkeypatch.chdir(node.directory)  # the sample of wireguard keeps its key in the daemon's directory
        node.start()
        node.wait_ready()

    for node in (first, second):
        start(node)
    connect([first, second])
    with first.container().ping(second.container()) as ping:
        start(third)
        connect([first, third])
        for node in nodes:
            wait_for_reading_of_host(lab, node)
        assert third.stop().status == 0
        lab.etcd.delete_lease(third.subnet())
        first.wait_for_log(f"Subnet removed: {third.subnet()}")
        wait_for_reading_of_host(lab, first)
        ping.wait_for_replies()
        assert ping.lost() == 0
    for node in (first, second):
        assert [line for line in node.log().splitlines() if "Unsafe" in line and PEER not in line] == []
        wait_until_the_doctor_finds_nothing(node)
    if backend.keys() >= {"ShutdownCommand"} and "SubnetRemoveCommand" not in backend:
        # The device gets another MAC, and the peers' `ip route add` fails: so it does with Go's daemon.
        return
    monkeypatch.chdir(first.directory)
    for end in (first.stop, first.kill):
        end()
        start(first)
        connect([first, second])
        wait_for_reading_of_host(lab, first)
        connect([first, second])


def wait_until_the_doctor_finds_nothing(node: Node) -> None:
    wait_for(lambda: flannelctl(node, "status").returncode == 0, 60, "a healthy node")
    # A command that ran when its lease went is told until it has been undone.
    wait_for(lambda: "refused" not in findings(node), 60, "the refused peer to go with its lease")
    assert findings(node) == {}


def wait_for_reading_of_host(lab: Lab, node: Node) -> None:
    """Wait until a daemon has read the host's routes and addresses, and has decided by them."""
    said = node.log().count(f"Unsafe lease {PEER}")
    node.namespace.ip("address add 10.50.177.9/32 dev lo")
    add_peer(lab)
    wait_for(lambda: node.log().count(f"Unsafe lease {PEER}") > said, SOON, "the address to be an obstacle")
    lab.etcd.delete_lease(PEER)
    node.wait_for_log(f"Subnet removed: {PEER}")
    node.namespace.ip("address del 10.50.177.9/32 dev lo")


def test_a_cleanup_removes_what_commands_have_set_up(lab: Lab, tmp_path: Path) -> None:
    door = tmp_path / "door"
    backend = {**HOST_GW, "SubnetRemoveCommand": f"test -e {door} && {HOST_GW['SubnetRemoveCommand']}"}
    node = one_node(lab, backend)
    add_peer(lab)
    node.wait_for_route(PEER)
    node.stop()
    command = (*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup")
    peer, journal = f"extension peer {PEER} at 198.18.0.77", node.directory / "flanneld.extension"
    assert f"would remove {peer}" in node.run(*command, "--dry-run").stdout
    node.wait_for_route(PEER)
    failed = node.run(*command, check=False)
    assert (failed.returncode, f"could not remove {peer}" in failed.stdout) == (1, True)
    assert journal.exists(), "it is still to be undone"
    door.touch()
    assert f"removed {peer}\nremoved {journal}\n" in node.run(*command).stdout
    node.wait_for_no_route(PEER)
    assert not journal.exists()


def test_a_restart_runs_nothing_again_and_forgets_nothing(lab: Lab, notes: Path) -> None:
    node = one_node(
        lab,
        {"SubnetAddCommand": noting(notes, "add"), "SubnetRemoveCommand": noting(notes, "remove")},
    )
    add_peer(lab)
    added = f"add {PEER} 198.18.0.77 data"
    awaited(notes, added)
    for end in (node.stop, node.kill):
        end()
        start_again(node)
        assert lines(notes) == [added]
    node.stop()
    lab.etcd.delete_lease(PEER)
    start_again(node)
    awaited(notes, added, f"remove {PEER} 198.18.0.77 data")


def test_a_subnet_that_changes_hands_is_removed_before_it_is_added(lab: Lab, notes: Path) -> None:
    node = one_node(
        lab,
        {"SubnetAddCommand": noting(notes, "add"), "SubnetRemoveCommand": noting(notes, "remove")},
    )
    add_peer(lab)
    awaited(notes, f"add {PEER} 198.18.0.77 data")
    with node.paused():
        add_peer(lab, "other data", "198.18.0.78")
    awaited(
        notes,
        f"add {PEER} 198.18.0.77 data",
        f"remove {PEER} 198.18.0.77 data",
        f"add {PEER} 198.18.0.78 other data",
    )


def test_a_daemon_killed_while_a_command_runs_runs_it_again(lab: Lab, notes: Path, tmp_path: Path) -> None:
    wait = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.1; done"
    node = one_node(
        lab,
        {
            "SubnetAddCommand": noting(notes, "add", wait),
            "SubnetRemoveCommand": noting(notes, "remove"),
        },
    )
    add_peer(lab)
    added = f"add {PEER} 198.18.0.77 data"
    awaited(notes, added)
    node.kill()
    (tmp_path / "go").touch()
    start_again(node)
    awaited(notes, added, f"remove {PEER} 198.18.0.77 data", added)


def test_a_failing_command_is_named_and_tried_again_until_it_works(
    lab: Lab, notes: Path, tmp_path: Path
) -> None:
    command = noting(notes, "add", f"echo no door; test -e {tmp_path / 'door'}")
    node = one_node(lab, {"SubnetAddCommand": f"{command}; # PSK=hush", "SubnetRemoveCommand": "true"})
    add_peer(lab)
    (line,) = node.wait_for_log("are not in place")
    wanted = f"extension peer {PEER} at 198.18.0.77: SubnetAddCommand exited with status 1; it wrote: no door"
    assert wanted in line
    wait_for(lambda: len(lines(notes)) == 3, SOON, "the third run")
    assert lines(notes) == [f"add {PEER} 198.18.0.77 data"] * 3
    (tmp_path / "door").touch()
    node.wait_for_log("The peers set up by extension commands are in place")
    assert len(node.wait_for_log("are not in place")) == 1
    assert "hush" not in node.log()


def test_a_hanging_command_is_killed_and_holds_up_no_route(lab: Lab, notes: Path) -> None:
    backend = {"SubnetAddCommand": noting(notes, "add", "sleep 600"), "TimeLimitSeconds": 5}
    node = one_node(lab, backend, "--ip-blackhole-route")
    add_peer(lab)
    wait_for(lambda: lines(notes), SOON, "the command to begin")
    node.run("ip", "route", "del", "blackhole", node.subnet())
    node.wait_for_route(node.subnet(), 3)
    assert "did not end" not in node.log(), "the route came back while the command hung"
    node.wait_for_log(f"extension peer {PEER} at 198.18.0.77: SubnetAddCommand did not end within 5 s")
    add_peer(lab, address="198.18.0.78", subnet="10.50.178.0/24")
    wait_for(lambda: "add 10.50.178.0/24 198.18.0.78 data" in lines(notes), SOON, "the other peer's command")
    assert node.stop().status == 0, "a command that hangs does not hold up the end"


def test_a_peer_whose_check_fails_is_made_again(lab: Lab) -> None:
    check = "ip route show $SUBNET | grep -q via"
    first, second = lab.cluster({**HOST_GW, "CheckCommand": check}, Network=NETWORK)
    connect([first, second])
    first.run("ip", "route", "del", second.subnet())
    first.wait_for_route(second.subnet(), 70)
    first.wait_for_log(f"Restored extension peer {second.subnet()} at {second.address}")


def test_a_plan_runs_no_command(lab: Lab, notes: Path) -> None:
    keys = ("PreStartup", "PostStartup", "SubnetAdd", "SubnetRemove", "Check", "Shutdown")
    backend = {"Type": "extension", **{f"{key}Command": noting(notes, key) for key in keys}}
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
    add_peer(lab)
    (node,) = lab.add_nodes(1)
    plan = node.start("--iface=eth0", "--plan")
    wait_for(lambda: plan.status() is not None, SOON, "the plan to end")
    assert plan.status() == 0, node.log()
    assert f"# new: extension peer {PEER} at 198.18.0.77" in node.log()
    assert not lines(notes)
    assert not node.directory.joinpath("flanneld.extension").exists()


@pytest.mark.parametrize("key", ["PreStartupCommand", "PostStartupCommand"])
def test_a_start_fails_with_its_commands(lab: Lab, key: str) -> None:
    backend = {"Type": "extension", key: "echo no key; exit 3  # PSK=hush"}
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
    (node,) = lab.add_nodes(1)
    daemon = node.start()
    wait_for(lambda: daemon.status() is not None, SOON, "the start to fail")
    assert daemon.status() == 1
    assert f"{key} exited with status 3; it wrote: no key" in node.log()
    assert "hush" not in node.log()


def test_nodes_of_kubernetes_tell_each_other_what_prestartupcommand_wrote(lab: Lab, notes: Path) -> None:
    add = f"read DATA; echo $DATA >> {shlex.quote(str(notes))}; {HOST_GW['SubnetAddCommand']}"
    backend = {**HOST_GW, "PreStartupCommand": "ip -4 -br address show eth0", "SubnetAddCommand": add}
    first, second = lab.kube_cluster(backend)
    connect([first, second])
    for node in (first, second):
        assert any(f"{node.address}/24" in line for line in lines(notes))
