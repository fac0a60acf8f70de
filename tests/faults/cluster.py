"""Faults that several nodes have together: leases, addresses, ports."""

from __future__ import annotations

from typing import Any

from flanneld.ctl.checks.kernel import NEW_MAC
from flanneld.errors import LEASES_END
from tests.faults.fault import HINT, Fault, on_peer, ready, restart, restarted_with, start, stop
from tests.faults.world import DUAL, HOST_GW, HOST_GW_ROUTED, Step, World
from tests.lab import wait_for
from tests.netns.test_seeing import answer


def lease(subnet: str, public_ip: str, mac: str = "02:00:00:00:00:99", **changes: Any) -> Step:
    """Return the step that writes the lease of another node, with braces filled in."""

    def act(world: World) -> None:
        data = {"VNI": 1, "VtepMAC": mac.format(**world.words)} | changes.pop("data", {})
        attributes = {
            "PublicIP": public_ip.format(**world.words),
            "BackendType": "vxlan",
            "BackendData": data,
        }
        world.lab.etcd.put_lease(subnet, attributes | changes)
        world.wait_for_peer(subnet)

    return act


def taken(world: World) -> None:
    """Give the lease to another node while ours has had it for a moment only."""
    restart()(world)
    world.node.wait_ready()
    data = {"VNI": 1, "VtepMAC": "02:00:00:00:00:99"}
    attributes = {"PublicIP": "198.18.0.203", "BackendType": "vxlan", "BackendData": data}
    world.lab.etcd.put_lease(world.words["own"], attributes)


def returned(world: World) -> None:
    world.lab.etcd.delete_lease(world.words["own"])
    start(world)


def gone(subnet: str) -> Step:
    return lambda world: world.lab.etcd.delete_lease(subnet)


def with_mac(mac: str, number: int = 3) -> Step:
    """Return the step that gives a node, the third by default, another MAC address."""

    def act(world: World) -> None:
        world.run(f"ip link set dev eth0 address {mac}", on=world.nodes[number - 1])
        for node in world.nodes:
            node.run("ip", "neigh", "flush", "dev", "eth0")

    return act


def peer_without_device(world: World) -> None:
    world.peer.stop()
    world.peer.run("ip", "link", "del", "flannel.1")


def peer_started(world: World) -> None:
    world.start(world.peer)
    world.peer.wait_ready()


def moved(world: World) -> None:
    """Start the node with another public IP, and without what would prove that its lease is its own."""
    world.node.stop()
    world.node.subnet_file.with_name("flanneld.state").unlink()
    world.run(f"ip address add {MOVED}/24 dev eth0")
    restart(f"--public-ip={MOVED}")(world)
    world.node.wait_ready()


def moved_back(world: World) -> None:
    world.node.stop()
    for subnet, attributes in world.lab.etcd.leases().items():
        if attributes["PublicIP"] == MOVED:
            world.lab.etcd.delete_lease(subnet)
    world.run(f"ip address del {MOVED}/24 dev eth0")
    start(world)


def another_config(**settings: Any) -> Step:
    """Return the step that changes the network config, and restarts the second node only."""

    def act(world: World) -> None:
        world.put_config(**settings)
        world.peer.stop()
        peer_started(world)

    return act


def all_restarted(world: World) -> None:
    world.put_config()
    for node in world.nodes:
        node.stop()
        world.start(node)
    for node in world.nodes:
        node.wait_ready()


def device_made(world: World) -> None:
    wait_for(lambda: world.node.link("flannel.1"), what="the device")


def peer_probed(world: World) -> None:
    """Wait until the daemon has probed the peer in vain."""

    def is_silent() -> bool:
        probes = [peer.get("probe") for peer in answer(world.node, "peers")["peers"]]
        return any(probe and probe["rtt"] is None for probe in probes)

    wait_for(is_silent, 20, "a probe without an answer")


OTHER = "10.5.203.0/24"
MOVED = "198.18.0.150"
WALL = "ip netns exec {switch} nft add table netdev wall"
UNPLUGGED = "ip netns exec {switch} ip link set {peer_port} down"
PLUGGED = "ip netns exec {switch} ip link set {peer_port} up"
NO_WALL = "ip netns exec {switch} nft delete table netdev wall"
FAULTS = {
    "two nodes with one MAC address": Fault(
        "duplicate addresses",
        "have one MAC address",
        (with_mac("02:18:00:00:00:02"),),
        cuts=None,
        heal=(with_mac("02:18:00:00:00:03"),),
        advice="ip link set dev ITS_DEVICE address NEW",
    ),
    "node with the MAC address of this one": Fault(
        "duplicate addresses",
        "{peer} and this host have one MAC address",
        (with_mac("02:18:00:00:00:01", 2),),
        heal=(with_mac("02:18:00:00:00:02", 2),),
        advice="ip link set dev ITS_DEVICE address NEW",
        peer_sees="duplicate addresses or tunnel",
    ),
    "switch that passes only addresses of nodes, host-gw": Fault(
        "tunnel",
        "packets of containers to 2 peers get lost, and those of nodes do not",
        (
            "ip netns exec {switch} nft add table bridge cloud",
            "ip netns exec {switch} nft"
            " 'add chain bridge cloud c {{ type filter hook prerouting priority 0; }}'",
            "ip netns exec {switch} nft add rule bridge cloud c ip saddr 10.5.0.0/16 drop",
        ),
        HOST_GW,
        heal=("ip netns exec {switch} nft delete table bridge cloud",),
        advice="--no-source-dest-check",
    ),
    "node that does not report packets for its containers, host-gw": Fault(
        "tunnel",
        "packets of containers to 1 peer may get lost, and those of nodes do not",
        (on_peer("iptables-nft -A OUTPUT -p icmp --icmp-type time-exceeded -j DROP"),),
        HOST_GW,
        cuts=False,
        severity=HINT,
        heal=(on_peer("iptables-nft -F OUTPUT"),),
        advice="run flannelctl doctor there",
    ),
    "two leases with one public IP": Fault(
        "public ip",
        "the public IP {peer} is used twice",
        (lease(OTHER, "{peer}"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=LEASES_END,
    ),
    "lease with our public IP": Fault(
        "public ip",
        "the public IP {node} is used twice",
        (lease(OTHER, "{node}"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=LEASES_END,
    ),
    "node without an IPv6 address": Fault(
        "public ip",
        "eth0 had only this IPv6 address",
        (stop, "ip -6 address flush dev eth0 scope global", restart()),
        DUAL,
        heal=("ip address add {node6}/64 dev eth0",),
        advice="ip address add ADDRESS/64 dev eth0; the daemon follows by itself",
        peer_sees="refusals",
        peer_says="announces fe80:",
    ),
    "two leases with one MAC": Fault(
        "contested",
        "shares the MAC of",
        (lease(OTHER, "198.18.0.203", "{mac}"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=NEW_MAC,
    ),
    "lease with our MAC": Fault(
        "contested",
        "10.5.203.0/24 (198.18.0.203) shares the MAC of our own device",
        (lease(OTHER, "198.18.0.203", "{own_mac}"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=NEW_MAC,
    ),
    "lease with another VNI": Fault(
        "segment",
        "has VNI 7, this one 1",
        (lease(OTHER, "198.18.0.203", data={"VNI": 7}),),
        cuts=False,
        heal=(gone(OTHER),),
        advice="restart flanneld on the node",
    ),
    "lease outside the network": Fault(
        "refusals",
        "10.6.3.0/24",
        (lease("10.6.3.0/24", "198.18.0.203"),),
        cuts=False,
        heal=(gone("10.6.3.0/24"),),
        advice=LEASES_END,
    ),
    "lease of another backend": Fault(
        "refusals",
        OTHER,
        (lease(OTHER, "198.18.0.203", BackendType="host-gw"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=LEASES_END,
    ),
    "lease without a MAC": Fault(
        "refusals",
        OTHER,
        (lease(OTHER, "198.18.0.203", "no MAC"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=LEASES_END,
    ),
    "lease of a node that is gone": Fault(
        "tunnel",
        "no answer from 1 peer",
        (lease(OTHER, "198.18.0.203"),),
        cuts=False,
        heal=(gone(OTHER),),
        advice=f"flannelctl lease delete {OTHER}",
    ),
    "lease that another node takes": Fault(
        "lease",
        "another node writes itself into our lease {own}",
        (taken,),
        heal=(returned,),
        advice="give each node its own address with --public-ip",
    ),
    "another public IP, and nothing that proves the lease": Fault(
        "former subnet",
        "cni0 is on {own}",
        (moved,),
        heal=(moved_back,),
        advice="ip address flush dev cni0",
    ),
    "bridge in our subnet and in that of another node": Fault(
        "former subnet",
        "cni0 is on {subnet}",
        ("ip address add {lan}/24 dev cni0",),
        heal=("ip address del {lan}/24 dev cni0",),
    ),
    "LAN inside a peer's subnet": Fault(
        "unsafe leases",
        "the lease {subnet} would harm this host",
        ("ip link add lan0 up type bridge; ip address add {lan}/25 dev lan0",),
        heal=("ip link del lan0",),
        advice="other addresses",
    ),
    "LAN inside a peer's subnet, host-gw": Fault(
        "unsafe leases",
        "the lease {subnet} would harm this host",
        ("ip link add lan0 up type bridge; ip address add {lan}/25 dev lan0",),
        HOST_GW,
        heal=("ip link del lan0",),
        advice="other addresses",
    ),
    "peer behind a gateway, host-gw": Fault(
        "off link",
        "{routed} is not on the network of eth0",
        (),
        HOST_GW_ROUTED,
        cuts=False,
        advice="vxlan",
    ),
    "peer without a device": Fault(
        "tunnel",
        "the node refuses our UDP port",
        (peer_without_device,),
        heal=(peer_started,),
        advice="see that flannel runs there",
        peer_sees="devices",
        peer_says="flannel.1 is not there",
    ),
    "port dropped on the way from one peer": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (
            WALL,
            "ip netns exec {switch} nft 'add chain netdev wall c"
            ' {{ type filter hook ingress device "{peer_port}" priority 0; }}\'',
            "ip netns exec {switch} nft add rule netdev wall c"
            " ip saddr {peer} ip daddr {node} udp dport 8472 drop",
        ),
        heal=(NO_WALL,),
        advice="let the network between pass UDP 8472",
    ),
    "peer's uplink unplugged": Fault(
        "tunnel",
        "no answer from 1 peer, neither from the node nor through the tunnel",
        (UNPLUGGED,),
        heal=(PLUGGED,),
        advice="run flannelctl doctor there",
    ),
    "peer's uplink unplugged, host-gw": Fault(
        "tunnel",
        "no answer from 1 peer",
        (UNPLUGGED,),
        HOST_GW,
        heal=(PLUGGED,),
        advice="run flannelctl doctor there",
    ),
    "peer's uplink unplugged, and peers are probed": Fault(
        "probes",
        "1 peer did not answer the last ICMP echo",
        (restart("--peer-probes=600"), UNPLUGGED, peer_probed),
        heal=(PLUGGED, start),
        advice="see whether the peer runs",
    ),
    "wrong checksums in the packets of one peer": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (
            on_peer("ethtool -K eth0 tx off"),
            WALL,
            "ip netns exec {switch} nft 'add chain netdev wall c"
            ' {{ type filter hook ingress device "{peer_port}" priority 0; }}\'',
            "ip netns exec {switch} nft add rule netdev wall c udp dport 8472 udp checksum set 0xdead",
        ),
        heal=(NO_WALL, on_peer("ethtool -K eth0 tx on")),
        advice="ethtool -K flannel.1 tx-checksum-ip-generic off",
    ),
    "port dropped on the way to this node, ever since its device was made": Fault(
        "port",
        "nothing ever came in through flannel.1",
        (
            WALL,
            "ip netns exec {switch} nft 'add chain netdev wall c"
            ' {{ type filter hook egress device "{port}" priority 0; }}\'',
            "ip netns exec {switch} nft add rule netdev wall c udp dport 8472 drop",
            "ip link del flannel.1",
            device_made,
            "ip netns exec {container} ping -c 25 -i 0.01 -W 0.1 {base} || true",
        ),
        heal=(NO_WALL,),
        advice="let in UDP port 8472",
    ),
    "another Backend.Port on one node": Fault(
        "tunnel",
        "the node refuses our UDP port",
        (restarted_with(Port=8473), ready),
        heal=(start,),
        advice="the same Backend.Port",
    ),
    "another Backend.VNI, and a node that was not restarted": Fault(
        "config",
        "VNI 1, the store has 2",
        (another_config(VNI=2),),
        heal=(start,),
        advice="restart flanneld here",
        after=(all_restarted,),
        peer_sees="segment",
    ),
    "another Backend.MTU, and a node that was not restarted": Fault(
        "config",
        "MTU 1450, the store has Backend.MTU 1400",
        (another_config(MTU=1400),),
        cuts=False,
        heal=(start,),
        advice="restart flanneld here",
        after=(all_restarted,),
    ),
    "another Backend.VNI on one node": Fault(
        "segment",
        "has VNI 1, this one 2",
        (restarted_with(VNI=2), ready),
        heal=(start,),
        advice="restart flanneld on the node whose VNI is not Backend.VNI",
        peer_sees="segment",
    ),
}
