"""Faults of the kernel's settings, routes, rules and devices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tests.faults.fault import (
    BEHIND,
    HINT,
    ONE_OF_MANY,
    Fault,
    configured,
    nothing_missing,
    on_peer,
    restart,
    start,
    start_in_vain,
    stop,
    without_kind,
)
from tests.faults.world import DUAL, HOST_GW, UDP, VXLAN_ROUTED, Step, World
from tests.lab.namespace import Namespace, batch, remove

#: A route that would take answers to the peer elsewhere. The tunnel's own packets are bound to the uplink.
SECOND = ("ip link add other0 up type bridge; ip route add {peer} dev other0",)
ROUTE_TOO = "the check uplink choice names the route to the other interface"
NO_SECOND = ("sysctl -w net.ipv4.conf.eth0.rp_filter=0; ip link del other0",)


def unsupported(kind: str) -> Fault:
    """Return the fault of a backend chosen for a kernel that lacks its kind of device."""
    return Fault(
        "kernel support",
        f"this kernel has no {kind}",
        (stop, without_kind(kind), configured(Type=kind), start_in_vain),
        heal=(configured(), start),
        advice="set another Backend.Type in the network config",
        after=(nothing_missing,),
        peer_sees="refusals",
    )


#: Classic BPF that drops all packets, and those of UDP: it compares the byte at 23 of the frame.
ALL, ONLY_UDP = (
    f"bpf direct-action bytecode '{program}'"
    for program in ("1,6 0 0 2,", "4,48 0 0 23,21 0 1 17,6 0 0 2,6 0 0 4294967295,")
)


def filtered(device: str, way: str, test: str, discipline: str = "clsact", needs: str = "") -> Fault:
    """Return the fault of a filter of tc that drops packets. ``test`` is its kind and what follows."""
    name = f"{way} pref 7 {test.split()[0]}"
    return Fault(
        "traffic control",
        f"the traffic control of {device} drops packets: {name}",
        (
            f"tc qdisc add dev {device} {discipline}",
            f"tc filter add dev {device} {way} pref 7 {test}",
        ),
        heal=(f"tc filter del dev {device} {name}",),
        after=(f"tc qdisc del dev {device} {discipline}",),
        needs=needs,
    )


def policed(device: str, way: str, test: str, discipline: str = "clsact") -> Fault:
    """Return the fault of a policer of packets that match: each is over its rate."""
    action = "action police rate 8kbit burst 20 conform-exceed drop"
    return filtered(device, way, f"{test} {action}", discipline, needs="police")


def shaped(device: str) -> Fault:
    """Return the fault of a queue that drops all packets."""
    return Fault(
        "traffic control",
        f"the traffic control of {device} drops packets: tbf",
        (f"tc qdisc add dev {device} root tbf rate 8kbit burst 20 limit 200",),
        heal=(f"tc qdisc del dev {device} root",),
        peer_sees=BEHIND,
    )


def twin(address: str, *calls: str) -> Step:
    """Return the step that gives another host of the underlay an address, and has it call others by ARP."""

    def act(world: World) -> None:
        switch = world.lab.switch
        host = Namespace(f"{switch.name}-twin")
        batch(f"netns add {host.name}")
        switch.ip(f"link add twin type veth peer name eth0 netns {host.name}", "link set twin master br0 up")
        host.ip("link set eth0 up", f"address add {address.format(**world.words)} dev eth0 nodad")
        for each in calls:
            again = f"while sleep 0.05; do ip neigh flush dev eth0; ping -c 1 -W 0.1 {each}; done"
            with Path(os.devnull).open("wb") as output:
                host.start("sh", "-c", again.format(**world.words), output=output)

    return act


def no_twin(world: World) -> None:
    remove([Namespace(f"{world.lab.switch.name}-twin")])
    for node in world.nodes:  # they would send there for up to 45 s
        node.run("ip", "neigh", "flush", "dev", "eth0")


#: Attaches a program of XDP that drops all (RTM_SETLINK with IFLA_XDP; BPF_PROG_LOAD: r0 = XDP_DROP; exit).
DROPS_ALL = """
import ctypes, socket, struct
code = ctypes.create_string_buffer(bytes.fromhex("b700000001000000 9500000000000000"))
words = ctypes.create_string_buffer(b"GPL")
load = struct.pack("IIQQ", 6, 2, ctypes.addressof(code), ctypes.addressof(words)) + bytes(24)
program = ctypes.CDLL(None).syscall(321, 5, ctypes.create_string_buffer(load), len(load))
xdp = struct.pack("HHiHHI", 8, 1, program, 8, 3, 2)
link = struct.pack("BxHiIIHH", 0, 0, socket.if_nametoindex("eth0"), 0, 0, 20, 43 | 1 << 15) + xdp
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
    kernel.send(struct.pack("IHHII", 16 + len(link), 19, 5, 1, 0) + link)
    assert struct.unpack_from("i", kernel.recv(4096), 16) == (0,)
"""


def xdp(world: World) -> None:
    world.node.run("python3", "-c", DROPS_ALL)


SET_ANEW = "ip address del {node6}/64 dev eth0; ip address add {node6}/64 dev eth0"


def undone_twice(world: World) -> None:
    """Delete a route, and again once the daemon has restored it."""
    for _ in range(2):
        world.node.wait_for_route(world.words["subnet"])
        world.run("ip route del {subnet}")
    world.node.wait_for_route(world.words["subnet"])


FAULTS = {
    "kernel without ipip": unsupported("ipip"),
    "kernel without WireGuard": unsupported("wireguard"),
    "kernel without VXLAN": Fault(
        "kernel support",
        "this kernel has no vxlan",
        (stop, "ip link del flannel.1", without_kind("vxlan"), start_in_vain),
        heal=(nothing_missing, start),
        advice="modprobe -a vxlan, then start flanneld",
    ),
    "forwarding off": Fault(
        "forwarding",
        "net.ipv4.ip_forward is 0",
        ("sysctl -w net.ipv4.ip_forward=0",),
        peer_sees=BEHIND,
    ),
    "forwarding off, host-gw": Fault(
        "forwarding",
        "net.ipv4.ip_forward is 0",
        ("sysctl -w net.ipv4.ip_forward=0",),
        HOST_GW,
    ),
    "forwarding off, IPv6": Fault(
        "forwarding",
        "net.ipv6.conf.all.forwarding is 0",
        ("sysctl -w net.ipv6.conf.all.forwarding=0",),
        DUAL,
        peer_sees=BEHIND,
    ),
    "IPv6 off on the uplink": Fault(
        "uplink",
        "net.ipv6.conf.eth0.disable_ipv6 is 1",
        ("sysctl -w net.ipv6.conf.eth0.disable_ipv6=1",),
        DUAL,
        heal=(
            "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; ip -6 address add {node6}/64 dev eth0 nodad",
            "ip -6 route add default via fd00:18::fe",
        ),
        advice="sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; then give eth0 its addresses back: {node6}",
    ),
    "INPUT drops the port of one family, and the other is silent": Fault(
        "tunnel",
        "{base} behind the tunnel does not",
        (
            "ip6tables-nft -A INPUT -p udp --dport 8472 -j DROP",
            on_peer("iptables-nft -A INPUT -p udp --dport 8472 -j DROP"),
        ),
        DUAL,
        heal=("ip6tables-nft -F INPUT", on_peer("iptables-nft -F INPUT")),
        advice="run flannelctl doctor there",
        peer_sees="filters",
        peer_says="UDP 8472 from its peers",
    ),
    "shaper that drops all": replace(shaped("flannel.1"), peer_sees=""),
    "shaper of the containers' bridge": shaped("cni0"),
    "shaper of a container's port": replace(shaped("veth1"), peer_sees="", peer_blind=ONE_OF_MANY),
    "router advertisements ignored": Fault(
        "forwarding",
        "eth0 learns no IPv6 default route",
        ("ip -6 route del default; sysctl -w net.ipv6.conf.eth0.accept_ra=1",),
        DUAL,
        cuts=False,
        severity=HINT,
        after=("ip -6 route add default via fd00:18::fe dev eth0; sysctl -w net.ipv6.conf.eth0.accept_ra=1",),
    ),
    "shaper that drops large packets": Fault(
        "traffic control",
        "the traffic control of eth0 drops packets: tbf",
        ("tc qdisc add dev eth0 root tbf rate 100mbit burst 1200 limit 100k",),
        cuts=False,
        heal=("tc qdisc del dev eth0 root",),
    ),
    "filter of tc that drops what leaves": filtered("eth0", "egress", ONLY_UDP),
    "filter of tc that drops what comes in": filtered("eth0", "ingress", ONLY_UDP),
    "filter of tc on the device": filtered("flannel.1", "ingress", ALL),
    "policer of what leaves": policed("eth0", "egress", "u32 match ip protocol 17 0xff"),
    "policer of what comes in": replace(
        policed("eth0", "ingress", "u32 match ip protocol 17 0xff", "ingress"), is_long=True
    ),
    "policer of all on the device": replace(policed("flannel.1", "ingress", "matchall"), is_long=True),
    "forwarding off for the device": Fault(
        "lookups",
        "flannel.1 does not forward",
        ("sysctl -w net.ipv4.conf.flannel/1.forwarding=0",),
        peer_sees=BEHIND,
    ),
    "forwarding off for the bridge": Fault(
        "lookups",
        "cni0 does not forward",
        ("sysctl -w net.ipv4.conf.cni0.forwarding=0",),
        peer_sees=BEHIND,
    ),
    "strict reverse path filter, answers leave by another interface": Fault(
        "lookups",
        "the reverse path filter of eth0 drops packets from other nodes",
        (*SECOND, "sysctl -w net.ipv4.conf.eth0.rp_filter=1"),
        after=NO_SECOND,
        needs_more=ROUTE_TOO,
    ),
    "strict reverse path filter for all, answers leave by another interface": Fault(
        "lookups",
        "the reverse path filter of eth0",
        (*SECOND, "sysctl -w net.ipv4.conf.all.rp_filter=1"),
        after=("sysctl -w net.ipv4.conf.all.rp_filter=0", *NO_SECOND),
        needs_more=ROUTE_TOO,
    ),
    "strict reverse path filter, default route elsewhere": Fault(
        "reverse path",
        "net.ipv4.conf.eth0.rp_filter is strict while the default route leaves by other0",
        (
            "ip link add other0 up type bridge; ip address add 192.0.2.2/24 dev other0",
            "ip route replace default via 192.0.2.1 dev other0; sysctl -w net.ipv4.conf.eth0.rp_filter=1",
        ),
        cuts=False,
        after=(*NO_SECOND, "ip route replace default via {gateway}"),
    ),
    "rule by source": Fault(
        "lookups",
        "from 10.5.0.0/16 lookup 100",
        ("ip rule add from 10.5.0.0/16 lookup 100 priority 1000; ip route add blackhole default table 100",),
        after=("ip rule del priority 999; ip rule del priority 1000; ip route flush table 100",),
    ),
    "rule by source that leads to a router that is not there": Fault(
        "lookups",
        "the policy rule 512: from {node}/32 lookup 1001 diverts packets to other nodes",
        (
            "ip route add default via 198.18.0.77 dev eth0 table 1001",
            "ip rule add from {node} lookup 1001 priority 512",
        ),
        heal=("ip rule del priority 512",),
        advice="remove it: ip rule del priority 512",
        after=("ip route flush table 1001",),
    ),
    "rule by interface": Fault(
        "lookups",
        "iif cni0 lookup 100",
        ("ip rule add iif cni0 lookup 100; ip route add default via {gateway} table 100",),
        after=("ip rule del to 10.5.0.0/16; ip rule del iif cni0; ip route flush table 100",),
        peer_sees=BEHIND,
    ),
    "rule by destination": Fault(
        "lookups",
        "to {subnet} lookup 100",
        ("ip rule add to {subnet} lookup 100; ip route add default via {gateway} table 100",),
        after=("ip rule del to 10.5.0.0/16; ip rule del to {subnet}; ip route flush table 100",),
    ),
    "rule by mark": Fault(
        "lookups",
        "fwmark 0x7/0xffffffff lookup 100 diverts packets of its containers",
        (
            "iptables-nft -t mangle -A PREROUTING -i cni0 -j MARK --set-mark 7",
            "ip link add other0 up type bridge; ip route add default dev other0 table 100",
            "ip rule add fwmark 7 lookup 100 priority 100",
        ),
        heal=("ip rule del priority 100",),
        advice="spare the network and the nodes' addresses, or remove it: ip rule del priority 100",
        after=("ip link del other0; iptables-nft -t mangle -F PREROUTING",),
        peer_sees=BEHIND,
    ),
    "rule by protocol": Fault(
        "lookups",
        "from all ipproto udp lookup 100 diverts packets to other nodes",
        (
            "ip link add other0 up type bridge; ip route add default dev other0 table 100",
            "ip rule add ipproto udp lookup 100 priority 100",
        ),
        heal=("ip rule del priority 100",),
        advice="remove it: ip rule del priority 100",
        after=("ip link del other0",),
    ),
    "rule for all but a mark": Fault(
        "lookups",
        "not from all fwmark 0x7/0xffffffff lookup 100 diverts packets of its containers",
        (
            "ip link add other0 up type bridge; ip route add {subnet} dev other0 table 100",
            "ip rule add not fwmark 7 lookup 100 priority 100",
        ),
        after=("ip rule del priority 100; ip rule del priority 99; ip link del other0",),
    ),
    "rule by mark, for the tunnel": Fault(
        "lookups",
        "fwmark 0x7/0xffffffff lookup 100 diverts packets to other nodes",
        (
            "iptables-nft -t mangle -A OUTPUT -p udp --dport 8472 -j MARK --set-mark 7",
            "ip link add other0 up type bridge; ip route add default dev other0 table 100",
            "ip rule add fwmark 7 lookup 100 priority 100",
        ),
        heal=("ip rule del priority 100",),
        after=("ip link del other0; iptables-nft -t mangle -F OUTPUT",),
    ),
    "another host has the address of the node": Fault(
        "duplicate addresses",
        "another host has our address {node}",
        (twin("{node}/24", "{peer}"),),
        heal=(no_twin,),
        advice="on the wrong host: ip address del {node} dev ITS_DEVICE",
        peer_sees="duplicate addresses",
    ),
    "another host has the address of the node, IPv6": Fault(
        "duplicate addresses",
        "ip address show dev eth0: dadfailed",
        (
            twin("{node6}/64"),
            f"sysctl -w net.ipv6.conf.eth0.accept_dad=1; {SET_ANEW}",
        ),
        DUAL,
        heal=(no_twin, SET_ANEW),
        advice=SET_ANEW,
        after=("sysctl -w net.ipv6.conf.eth0.accept_dad=0; ip route replace default via fd00:18::fe",),
    ),
    "uplink that answers no ARP request": Fault(
        "lookups",
        "eth0 answers no ARP request",
        ("sysctl -w net.ipv4.conf.eth0.arp_ignore=8",),
        cuts=None,
    ),
    "uplink that asks for no neighbour": Fault(
        "lookups", "eth0 answers no ARP request", ("ip link set eth0 arp off",)
    ),
    "program of XDP that drops all": Fault(
        "tunnel",
        "no answer from 2 peers",
        (xdp,),
        heal=("ip link set dev eth0 xdpgeneric off",),
        advice="see first whether the XDP program of eth0 does: ip link set dev eth0 xdpgeneric off",
    ),
    "uplink in a bridge": Fault(
        "uplink",
        "eth0 is a port of other0",
        ("ip link add other0 up type bridge; ip link set eth0 master other0; ip neigh flush dev eth0",),
        heal=("ip link set eth0 nomaster",),
        after=("ip link del other0",),
    ),
    "IPv6 off on the device": Fault(
        "refused",
        "the kernel refuses address {own_base6}/128 dev flannel-v6.1",
        ("sysctl -w net.ipv6.conf.flannel-v6/1.disable_ipv6=1",),
        DUAL,
        heal=("sysctl -w net.ipv6.conf.flannel-v6/1.disable_ipv6=0",),
    ),
    "loopback down": Fault("devices", "lo is down", ("ip link set lo down",), cuts=False),
    "second interface in the nodes' network": Fault(
        "uplink choice",
        "packets to other nodes leave by other0",
        ("ip link add other0 up type bridge; ip route prepend 198.18.0.0/24 dev other0",),
        DUAL,
        heal=("ip link del other0",),
        advice="remove the route, or give it a metric: ip route show dev other0",
    ),
    "rule by source, IPv6": Fault(
        "lookups",
        "from fc00:5::/48 lookup 100",
        ("ip -6 rule add from fc00:5::/48 lookup 100; ip -6 route add unreachable default table 100",),
        DUAL,
        after=(
            "ip -6 rule del to fc00:5::/48; ip -6 rule del from fc00:5::/48; ip -6 route flush table 100",
        ),
    ),
    "rule by source, host-gw": Fault(
        "lookups",
        "from {own} lookup 100",
        ("ip rule add from {own} lookup 100; ip route add prohibit default table 100",),
        HOST_GW,
        after=("ip rule del to 10.5.0.0/16; ip rule del from {own}; ip route flush table 100",),
        peer_sees=BEHIND,
    ),
    "rule to the main table removed": Fault(
        "lookups",
        "no policy rule leads packets to other nodes to the main table",
        ("ip rule del lookup main",),
    ),
    "rule against a node": Fault(
        "lookups",
        "to {peer}/32 blackhole",
        ("ip rule add to {peer} blackhole priority 77",),
        heal=("ip rule del priority 77",),
    ),
    "blackhole inside a peer's subnet": Fault(
        "detours",
        "blackhole {base}/25",
        ("ip route add blackhole {base}/25",),
        heal=("ip route del blackhole {base}/25",),
    ),
    "unreachable inside a peer's subnet, host-gw": Fault(
        "detours",
        "unreachable {base}/25",
        ("ip route add unreachable {base}/25",),
        HOST_GW,
        heal=("ip route del unreachable {base}/25",),
    ),
    "more specific route of another program": Fault(
        "detours",
        "{base}/25 dev eth0",
        ("ip route add {base}/25 via {gateway} dev eth0",),
        heal=("ip route del {base}/25 dev eth0",),
    ),
    "more specific route of another program, IPv6": Fault(
        "detours",
        "{base6}/65 dev eth0",
        ("ip -6 route add {base6}/65 dev eth0",),
        DUAL,
        heal=("ip -6 route del {base6}/65 dev eth0",),
    ),
    "more specific route of another program, udp": Fault(
        "detours",
        "{base}/25 dev eth0",
        ("ip route add {base}/25 via {gateway} dev eth0",),
        UDP,
        heal=("ip route del {base}/25 dev eth0",),
    ),
    "local route of another program, IPv6": Fault(
        "unsafe leases",
        "lo has {subnet6}",
        ("ip -6 route add local {subnet6} dev lo",),
        DUAL,
        heal=("ip route del local {subnet6} dev lo",),
        advice="if it is not needed, and no address of lo is in it: ip route del local {subnet6} dev lo",
        is_long=True,  # the daemon learns of it by its audit
    ),
    "default route deleted, a peer behind the router": Fault(
        "lookups",
        "{routed} from {node}: the kernel drops it: Network is unreachable",
        ("ip route del default",),
        VXLAN_ROUTED,
        cuts=False,
        heal=("ip route add default via {gateway} dev eth0",),
        advice="ip route add default via ROUTER dev eth0",
    ),
    "prefix of the uplink too long, host-gw": Fault(
        "unsafe leases",
        "a broadcast or network address of this host's link",
        ("ip address add {node}/30 dev eth0; ip address del {node}/24 dev eth0",),
        HOST_GW,
        cuts=False,
        heal=(
            "ip address add {node}/24 dev eth0; ip address del {node}/30 dev eth0",
            "ip route replace default via {gateway}",
            "ip neigh flush dev eth0 nud noarp",
        ),
        advice="then del this, and ip neigh flush dev eth0 nud noarp",
    ),
    "blackhole for a node": Fault(
        "lookups",
        "this node loses packets to other nodes",
        ("ip route add blackhole {peer}",),
        heal=("ip route del blackhole {peer}",),
    ),
    "blackhole for our containers": Fault(
        "lookups",
        "this node loses packets of other nodes to its containers",
        ("ip route add blackhole {own_base}/25",),
        heal=("ip route del blackhole {own_base}/25",),
        peer_sees=BEHIND,
    ),
    "route to a node by a router that is not there": Fault(
        "tunnel",
        "no answer to ARP or NDP from 198.18.0.77",
        ("ip route add {peer} via 198.18.0.77 dev eth0 onlink",),
        heal=("ip route del {peer}",),
        advice="ip route get {peer}",
    ),
    "segmentation of VXLAN's packets left to the CPU": Fault(
        "speed",
        "eth0 leaves the segmentation of VXLAN's packets to the CPU",
        ("ethtool -K eth0 tx-udp_tnl-segmentation off",),
        cuts=False,
        severity=HINT,
        heal=("ethtool -K eth0 tx-udp_tnl-segmentation on",),
    ),
    "wrong permanent neighbour for a node": Fault(
        "pinned neighbours",
        "{peer}",
        ("ip neigh replace {peer} lladdr 02:00:00:00:00:99 dev eth0 nud permanent",),
    ),
    "uplink down": Fault(
        "uplink",
        "the uplink eth0 is down",
        ("ip link set eth0 down",),
        after=("ip route replace default via {gateway}",),
    ),
    "uplink down, host-gw": Fault(
        "uplink",
        "the uplink eth0 is down",
        ("ip link set eth0 down",),
        HOST_GW,
        after=("ip route replace default via {gateway}",),
    ),
    "path MTU smaller than the uplink's": Fault(
        "path",
        "the tunnel to {base} does not carry 1450 bytes",
        ("ip netns exec {switch} ip link set {peer_port} mtu 1400",),
        cuts=False,
        heal=("ip netns exec {switch} ip link set {peer_port} mtu 1500",),
        advice="flannelctl netcheck {base}",
        peer_sees="path",
    ),
    "MTU of the uplink lowered": Fault(
        "containers",
        "cni0 has the MTU 1450, the network allows 1350",
        ("ip link set eth0 mtu 1400",),
        cuts=False,
        after=("ip link set eth0 mtu 1500; ip link set cni0 mtu 1450",),
        peer_sees="path",
    ),
    "uplink too small for IPv6 inside": Fault(
        "device",
        "flannel-v6.1 has the MTU 1430, too large for eth0 with 1280",
        ("ip link set eth0 mtu 1280",),
        DUAL,
        cuts=False,
        heal=("ip link set eth0 mtu 1500",),
        advice="ip link set dev eth0 mtu 1350 at least",
    ),
    "uplink smaller than the device allows, while the daemon is stopped": Fault(
        "device",
        "flannel.1 has the MTU 1450, too large for eth0 with 1400",
        (stop, "ip link set eth0 mtu 1400"),
        cuts=False,
        heal=("ip link set eth0 mtu 1500", start),
        advice="raise the MTU of eth0",
    ),
    "device of an earlier configuration": Fault(
        "left devices",
        "flannel.9 is left from an earlier configuration",
        (
            "ip link add flannel.9 up type vxlan id 9 dev eth0 local {node} dstport 8479 nolearning",
            "ip address add 10.5.249.0/32 dev flannel.9",
        ),
        cuts=False,
        heal=("ip address flush dev flannel.9; ip link set flannel.9 down",),
        after=("ip link delete flannel.9",),
    ),
    "bridged packets pass the firewall by": Fault(
        "bridges",
        "net.bridge.bridge-nf-call-iptables is 0",
        ("sysctl -w net.bridge.bridge-nf-call-iptables=0",),
        cuts=False,
        severity=HINT,
        heal=("sysctl -w net.bridge.bridge-nf-call-iptables=1",),
    ),
    "another program deletes the route twice": Fault(
        "fights",
        "another program keeps changing its objects",
        (undone_twice,),
        cuts=False,
        heal=(restart(),),
        advice="exclude flannel* there",
    ),
}
