"""A node that gets another public IP, and its clones: whose lease it is."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from flanneld.subnet.lease_keeper import PROBATION
from tests.lab import Lab, Node, wait_for
from tests.netns.hardware import on_hardware
from tests.netns.pair import DUAL_STACK, SOON, connect

UUID, OTHER_UUID = "4c4c4544-0042-3510-8051-b7c04f4d3232", "4c4c4544-0042-3510-8051-b7c04f4d3233"
#: The subnet file's neighbours of a machine's disk that is copied.
FILES = ("subnet.env", "flanneld.state")

apis = pytest.mark.parametrize("api", ["v2", "v3"])


def new_address(node: Node) -> str:
    """Give a node a second address, at which others reach it, too."""
    address = f"198.18.0.{100 + node.number}"
    node.namespace.ip(f"address add {address}/24 dev eth0")
    return address


def restart(node: Node, *flags: str, product_uuid: str = UUID) -> None:
    if node.running:
        node.stop()
    node.start(*flags, command=on_hardware(product_uuid))
    node.wait_ready()


def public_ip(lab: Lab, subnet: str) -> str | None:
    lease = lab.etcd.leases().get(subnet)
    return lease and lease["PublicIP"]


def pair(lab: Lab, backend: dict[str, Any], *flags: str, **config: Any) -> tuple[Node, Node]:
    """A node on hardware of its own, and a peer."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend, **config})
    node, peer = lab.add_nodes(2)
    restart(node, *flags)
    restart(peer, *flags, product_uuid=OTHER_UUID)
    return node, peer


@pytest.mark.parametrize(
    ("api", "flags"),
    [("v2", []), ("v3", []), ("v3", ["-etcd-api=both"])],
    ids=["v2", "v3", "both"],
)
def test_a_node_with_another_public_ip_keeps_its_lease(
    lab: Lab, ipv4_backend: dict[str, Any], flags: list[str]
) -> None:
    node, peer = pair(lab, ipv4_backend, *flags)
    connect(node, peer)
    subnet, address = node.subnet(), new_address(node)
    restart(node, *flags, f"-public-ip={address}")
    assert node.subnet() == subnet
    assert public_ip(lab, subnet) == address
    assert lab.etcd.leases().keys() == {subnet, peer.subnet()}
    assert len(node.wait_for_log(f"Keeping the lease {subnet} of our former public IP {node.address}")) == 1
    connect(node, peer)
    connect(peer, node)
    # And back, with no contest in between.
    restart(node, *flags)
    assert node.subnet() == subnet
    assert public_ip(lab, subnet) == node.address
    connect(node, peer)


def test_a_node_with_udp_keeps_its_lease(lab: Lab) -> None:
    """Its lease is just the public IP."""
    node, peer = pair(lab, {"Type": "udp"})
    connect(node, peer)
    subnet, address = node.subnet(), new_address(node)
    restart(node, "-iface=eth0", f"-public-ip={address}")
    assert node.subnet() == subnet
    assert public_ip(lab, subnet) == address


def test_a_node_of_both_families_keeps_its_lease(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = pair(lab, backend, **DUAL_STACK)
    subnets, address = (node.subnet(4), node.subnet(6)), new_address(node)
    restart(node, f"-public-ip={address}")
    assert (node.subnet(4), node.subnet(6)) == subnets
    connect(node, peer)


def test_a_lease_whose_device_is_gone_keeps_its_mac(lab: Lab) -> None:
    node, _ = pair(lab, {"Type": "vxlan"})
    lease = lab.etcd.leases()[node.subnet()]
    node.stop()
    node.run("ip", "link", "delete", "flannel.1")
    moved = f"-public-ip={new_address(node)}"
    assert f"ip link add flannel.1 address {lease['BackendData']['VtepMAC']} " in plan(lab, node, moved)
    restart(node, moved)
    assert lab.etcd.leases()[node.subnet()]["BackendData"] == lease["BackendData"]


def plan(lab: Lab, node: Node, *flags: str) -> str:
    """Return what ``-plan`` prints on the node's hardware."""
    store = (f"--etcd-endpoints={lab.etcd.endpoint}", f"--subnet-file={node.subnet_file}")
    return node.run(*on_hardware(UUID), *store, "--plan", *flags).stdout


@apis
@pytest.mark.parametrize("lacking", ["state file", "uuid", "attributes"])
def test_unproven_old_lease_stays_and_its_key_is_named(lab: Lab, lacking: str) -> None:
    node, _ = pair(lab, {"Type": "vxlan"})
    lost = node.subnet()
    if lacking == "state file":
        node.stop()
        node.subnet_file.with_name("flanneld.state").unlink()
    if lacking == "attributes":
        node.stop()
        lease = lab.etcd.leases()[lost]
        data = {**lease["BackendData"], "VtepMAC": "02:00:00:00:00:99"}
        lab.etcd.put_lease(lost, {**lease, "BackendData": data})
    before = lab.etcd.leases()[lost]
    uuid = OTHER_UUID if lacking == "uuid" else UUID
    restart(node, f"-public-ip={new_address(node)}", product_uuid=uuid)
    assert node.subnet() != lost
    assert lab.etcd.leases()[lost] == before
    assert announced_mac(lab, node) != before["BackendData"]["VtepMAC"]
    key = f"/coreos.com/network/subnets/{lost.replace('/', '-')}"
    (line,) = node.wait_for_log(f"{key} (public IP {node.address})")
    assert "it ends by itself" in line


@apis
@pytest.mark.parametrize("same", ["mac", "uuid"])
def test_a_clone_does_not_take_the_lease_of_its_model(lab: Lab, backend: dict[str, Any], same: str) -> None:
    """The clone has the model's files; both have 10.0.2.15, as every Vagrant box has."""
    model, peer = pair(lab, backend)
    connect(model, peer)
    (clone,) = lab.add_nodes(1)
    for node in (model, clone):
        node.namespace.ip(
            "link add vagrant0 type bridge", "link set vagrant0 up", "address add 10.0.2.15/24 dev vagrant0"
        )
    model.stop()
    restart(model, "-iface=eth0", f"-public-ip={model.address}")
    for name in FILES:
        shutil.copy(model.directory / name, clone.directory / name)
    if same == "mac":
        mac = (model.link("eth0") or {})["address"]
        clone.namespace.ip(f"link set eth0 address {mac}")
    before = lab.etcd.leases()
    model.stop()  # A contest would hide what the clone takes for its own.
    restart(
        clone,
        "-iface=eth0",
        f"-public-ip={clone.address}",
        product_uuid=UUID if same == "uuid" else OTHER_UUID,
    )
    assert clone.subnet() != model.subnet()
    assert {subnet: lab.etcd.leases()[subnet] for subnet in before} == before


@apis
def test_a_contest_that_was_lost_is_not_tried_again(lab: Lab) -> None:
    """While a node was away another one has got its address, and its lease with that."""
    node, _ = pair(lab, {"Type": "host-gw"})
    subnet = node.subnet()
    node.stop()
    (heir,) = lab.add_nodes(1)
    node.namespace.ip(f"address del {node.address}/24 dev eth0")
    heir.namespace.ip(f"address add {node.address}/24 dev eth0")
    address = new_address(node)
    node.namespace.ip(f"route add default via {lab.etcd.address}")
    restart(heir, f"-public-ip={node.address}", product_uuid=OTHER_UUID)
    assert heir.subnet() == subnet
    with heir.container().ping(heir.env()["FLANNEL_SUBNET"].split("/")[0]) as ping:
        # A daemon younger than that would yield itself.
        ping.wait_for_replies(int(PROBATION * 50) + 25, 30)
    node.start(f"-public-ip={address}", command=on_hardware(UUID))
    assert node.daemon.wait(PROBATION + 10).status == 1
    assert node.wait_for_log("yielding to it")
    wait_for(lambda: public_ip(lab, subnet) == node.address, SOON, "the heir to put its lease right")
    contests = heir.log().count("keeping it")
    restart(node, f"-public-ip={address}")
    assert node.subnet() != subnet
    assert public_ip(lab, subnet) == node.address
    assert heir.log().count("keeping it") == contests


def test_a_record_that_cannot_be_written_proves_nothing(lab: Lab) -> None:
    """The outcome of a contest could not be recorded."""
    node, _ = pair(lab, {"Type": "host-gw"})
    subnet = node.subnet()
    node.stop()
    read_only = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    command = ["sh", "-c", read_only, "sh", str(node.directory), *on_hardware(UUID)]
    node.start(f"-public-ip={new_address(node)}", command=command)
    node.wait_for_log("In sync with")
    assert len(node.wait_for_log("Cannot write the state file")) == 1
    assert public_ip(lab, subnet) == node.address
    (line,) = node.wait_for_log("Our subnet is")
    assert subnet not in line


def announced_mac(lab: Lab, node: Node) -> str:
    """Return the MAC in a node's lease, which is that of its device."""
    mac = lab.etcd.leases()[node.subnet()]["BackendData"]["VtepMAC"]
    assert mac == (node.link("flannel.1") or {})["address"]
    return str(mac)


@apis
def test_joining_clone_takes_a_mac_of_its_own_before_it_announces_one(lab: Lab) -> None:
    model, peer = lab.cluster({"Type": "vxlan"})
    (clone,) = lab.add_nodes(1)
    mac = announced_mac(lab, model)
    device = f"link add flannel.1 address {mac} type vxlan id 1 dev eth0 local {clone.address} dstport 8472"
    clone.namespace.ip(f"{device} nolearning", "link set flannel.1 up")
    clone.start()
    clone.wait_ready()
    assert len(clone.wait_for_log(f"flannel.1 does not keep the MAC {mac}: another node's lease has it")) == 1
    own = announced_mac(lab, clone)
    assert own != mac
    assert "both claim" not in peer.log() + model.log()
    for one, other in ((peer, clone), (clone, model), (peer, model)):
        connect(one, other)
    # What a node has announced stays, whoever announces the same afterwards.
    for node, kept in ((model, mac), (clone, own)):
        copied = {"PublicIP": "198.18.0.77", "BackendType": "vxlan", "BackendData": {"VtepMAC": kept}}
        lab.etcd.put_lease("10.5.0.0/24", copied)
        node.stop()
        node.start()
        node.wait_ready()
        assert announced_mac(lab, node) == kept


def test_device_with_another_mac_keeps_it_and_is_reached(lab: Lab) -> None:
    """What the doctor advises on a clone, which has the MAC of its model."""
    peer, clone = lab.cluster({"Type": "vxlan"})
    subnet, mac = clone.subnet(), "02:00:00:00:00:77"
    clone.stop()
    clone.namespace.ip(f"link set flannel.1 address {mac}")
    clone.start()
    wait_for(lambda: lab.etcd.leases()[subnet]["BackendData"]["VtepMAC"] == mac, what="the new MAC")
    peer.container().wait_for_reply(clone.container())
    assert (clone.subnet(), (clone.link("flannel.1") or {})["address"]) == (subnet, mac)
