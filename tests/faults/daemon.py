"""Faults of the daemon and of its files."""

from __future__ import annotations

import os
import signal

from flanneld.network.rtnetlink.links import PORT_REMEDY
from tests.faults.fault import (
    NO_LEASE,
    Fault,
    kill,
    listener,
    no_listener,
    restart,
    start,
    start_in_vain,
    start_in_vain_with,
    stop,
)
from tests.faults.world import DUAL, HOST_GW, MASQUERADE, UDP, World
from tests.lab import own_command
from tests.lab.daemon import Daemon
from tests.lab.namespace import suspend

START = "systemctl start flanneld"


def lease_gone(world: World) -> None:
    world.node.stop()
    world.lab.etcd.delete_lease(world.node.subnet())


def lease_of_wrong0_deleted(world: World) -> None:
    for subnet, attributes in world.lab.etcd.leases().items():
        if attributes["PublicIP"] == "192.0.2.1":
            world.lab.etcd.delete_lease(subnet)


def start_without_privileges(world: World) -> None:
    """Start the daemon as in a container that was not given CAP_NET_ADMIN."""
    world.node.stop()
    command = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", *own_command()]
    world.node.start(*world.kind.flags, command=command)
    world.wait_for_answer()


def start_elsewhere(world: World) -> None:
    """Start the daemon as in a pod without the host's network: in the namespace of a container."""
    world.node.stop()
    files = {
        f"FLANNELD_{name}": str(world.node.directory / name.lower()) for name in ("STATE_DIR", "SECRET_DIR")
    }
    own = [f"--etcd-endpoints={world.lab.etcd.endpoint}", f"--subnet-file={world.node.subnet_file}"]
    inside = world.node.container(4).namespace
    world.elsewhere = Daemon(inside, [*own_command(), *own], world.node.directory / "elsewhere.log", files)
    world.wait_for_answer()


def return_home(world: World) -> None:
    inside = world.node.container(4)
    assert world.elsewhere is not None
    world.elsewhere.end(signal.SIGTERM, 20)
    for subnet, attributes in world.lab.etcd.leases().items():
        if attributes["PublicIP"] == inside.address:
            world.lab.etcd.delete_lease(subnet)
    inside.namespace.run("ip", "link", "del", "flannel.1")
    start(world)


def hang(world: World) -> None:
    suspend(world.node.pid)


def go_on(world: World) -> None:
    os.kill(world.node.pid, signal.SIGCONT)


FAULTS = {
    "daemon stopped": Fault(
        "daemon", "the daemon is not running", (stop,), cuts=False, heal=(start,), advice=START
    ),
    "daemon killed": Fault("daemon", "its log ends ", (kill,), cuts=False, heal=(start,), advice=START),
    "daemon that cannot start": Fault(
        "daemon",
        "its last error, ",
        (stop, start_in_vain_with("--iface=absent0")),
        cuts=False,
        heal=(start,),
        advice=START,
    ),
    "daemon without CAP_NET_ADMIN": Fault(
        "daemon",
        "the daemon lacks CAP_NET_ADMIN",
        (start_without_privileges,),
        cuts=False,
        heal=(start,),
        advice="securityContext.capabilities.add",
    ),
    "daemon in another network namespace": Fault(
        "daemon",
        "the daemon runs in another network namespace than this host",
        (start_elsewhere,),
        MASQUERADE,
        cuts=False,
        heal=(return_home,),
        advice="give its pod hostNetwork: true",
    ),
    "daemon hangs": Fault(
        "daemon",
        "the daemon hangs",
        (hang,),
        cuts=False,
        heal=(go_on,),
        advice="see the daemon's log",
    ),
    "daemon stopped, udp": Fault(
        "daemon", "the daemon is not running", (stop,), UDP, cuts=False, heal=(start,), advice=START
    ),
    "subnet.env deleted while the daemon is stopped": Fault(
        "subnet file",
        "there is no {subnet_file}",
        (stop, "rm {subnet_file}"),
        cuts=False,
        heal=(start,),
        advice="start the daemon",
    ),
    "subnet.env of another node": Fault(
        "subnet file",
        "{subnet_file} has another subnet than the lease",
        (stop, "sed -i 's|^FLANNEL_SUBNET=.*|FLANNEL_SUBNET=10.5.249.1/24|' {subnet_file}"),
        cuts=False,
        heal=(start,),
        advice="start the daemon",
    ),
    "subnet.env cannot be written": Fault(
        "ready",
        "subnet",
        ("rm {subnet_file}; mkdir -p {subnet_file}/in-the-way", restart()),
        cuts=False,
        heal=("rm -r {subnet_file}",),
        advice="choose another file",
        after=(restart(),),
    ),
    "lease gone while the daemon is stopped": Fault(
        "lease",
        "this node has no lease",
        (lease_gone,),
        heal=(start,),
        advice="start the daemon",
        peer_blind=NO_LEASE,
    ),
    "wrong -iface": Fault(
        "uplink choice",
        "packets to other nodes leave by eth0, and the daemon uses wrong0",
        (
            "ip link add wrong0 up type bridge; ip address add 192.0.2.1/24 dev wrong0",
            restart("--iface=wrong0"),
        ),
        cuts=None,
        heal=(start,),
        advice="-iface=eth0",
        after=("ip link del wrong0", lease_of_wrong0_deleted),
    ),
    "wrong -iface, host-gw": Fault(
        "uplink choice",
        "packets to other nodes leave by eth0, and the daemon uses wrong0",
        (
            "ip link add wrong0 up type bridge; ip address add 192.0.2.1/24 dev wrong0",
            restart("--iface=wrong0"),
        ),
        HOST_GW,
        cuts=False,
        heal=(start,),
        advice="-iface=eth0",
        after=("ip link del wrong0", lease_of_wrong0_deleted),
    ),
    "device deleted while the daemon is stopped": Fault(
        "devices",
        "flannel.1 is not there",
        (stop, "ip link del flannel.1"),
        heal=(start,),
        advice="start the daemon",
    ),
    "port of the device taken by another program": Fault(
        "devices",
        "(python3) has its UDP port",
        (stop, "ip link set flannel.1 down", listener(8472), start_in_vain),
        heal=(no_listener, start),
        advice=f"{PORT_REMEDY}; then start the daemon",
    ),
    "port of the device taken by a device of another kind": Fault(
        "devices",
        "the device other0 has its UDP port",
        (
            stop,
            "ip link set flannel.1 down; ip link add other0 up type vxlan external dstport 8472",
            start_in_vain,
        ),
        heal=("ip link set other0 down", start),
        advice=f"{PORT_REMEDY}; then start the daemon",
        after=("ip link del other0",),
    ),
    "port of the device taken, as the daemon said": Fault(
        "daemon",
        "(python3) has its UDP port",
        (stop, "ip link set flannel.1 down", listener(8472), start_in_vain),
        heal=(no_listener, start),
        advice=START,
    ),
    "device down while the daemon is stopped": Fault(
        "devices",
        "flannel.1 has up off",
        (stop, "ip link set flannel.1 down"),
        heal=(start,),
        advice="start the daemon",
    ),
    "device with another VNI while the daemon is stopped": Fault(
        "devices",
        "has vni 9, wanted 1",
        (
            stop,
            "ip link del flannel.1; ip link add flannel.1 address {own_mac} mtu 1450 up type vxlan"
            " id 9 dev eth0 local {node} dstport 8472 nolearning",
        ),
        heal=(start,),
        advice="start the daemon",
    ),
    "device with another port while the daemon is stopped": Fault(
        "devices",
        "has port 4789, wanted 8472",
        (
            stop,
            "ip link del flannel.1; ip link add flannel.1 address {own_mac} mtu 1450 up type vxlan"
            " id 1 dev eth0 local {node} dstport 4789 nolearning",
        ),
        heal=(start,),
        advice="start the daemon",
    ),
    "MAC changed while the daemon is stopped": Fault(
        "mac",
        "flannel.1 has another MAC than the one in our lease",
        (stop, "ip link set flannel.1 address 02:00:00:00:00:99"),
        heal=(start,),
        advice="start the daemon",
    ),
    "route deleted while the daemon is stopped": Fault(
        "missing", "route {subnet}", (stop, "ip route del {subnet}"), heal=(start,), advice="start the daemon"
    ),
    "IPv6 route deleted while the daemon is stopped": Fault(
        "missing",
        "route {subnet6}",
        (stop, "ip -6 route del {subnet6}"),
        DUAL,
        heal=(start,),
        advice="start the daemon",
    ),
    "route deleted while the daemon is stopped, host-gw": Fault(
        "missing",
        "route {subnet}",
        (stop, "ip route del {subnet}"),
        HOST_GW,
        heal=(start,),
        advice="start the daemon",
    ),
    "forwarding entry of another program while the daemon is stopped": Fault(
        "missing",
        "fdb {mac}",
        (stop, "bridge fdb replace {mac} dev flannel.1 dst 198.18.0.77 self permanent"),
        heal=(start,),
        advice="start the daemon",
    ),
    "neighbour of another program while the daemon is stopped": Fault(
        "missing",
        "neigh {base}",
        (stop, "ip neigh replace {base} lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent"),
        heal=(start,),
        advice="start the daemon",
    ),
    "route of a vanished peer while the daemon is stopped": Fault(
        "stale",
        "10.5.250.0/24",
        (stop, "ip route add 10.5.250.0/24 via 10.5.250.0 dev flannel.1 onlink"),
        cuts=False,
        heal=(start,),
        advice="start the daemon",
    ),
    "MTU of the device while the daemon is stopped": Fault(
        "devices",
        "has mtu 1400, wanted 1450",
        (stop, "ip link set flannel.1 mtu 1400"),
        cuts=False,
        after=(start,),
    ),
    "MTU of the TUN while the daemon is stopped": Fault(
        "devices",
        "has mtu 1400, wanted 1472",
        (stop, "ip link set flannel0 mtu 1400"),
        UDP,
        cuts=False,
        after=(start,),
    ),
    "learning while the daemon is stopped": Fault(
        "devices",
        "has learning on, wanted off",
        (stop, "ip link set flannel.1 type vxlan id 1 learning"),
        cuts=False,
        after=(start,),
    ),
}
