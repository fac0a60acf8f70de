"""Faults in what a node does with packets that it passes on, and what its containers do with their own."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.containers import INSIDE
from tests.faults.fault import BEHIND, HINT, ONE_OF_MANY, Fault, ready, restart, start
from tests.faults.firewall import FROM_CONTAINERS, NO_WALL, TO_PEERS, WALL, chain
from tests.faults.world import DUAL, HOST_GW, MASQUERADE, UDP, VXLAN, Kind, Step, World
from tests.lab import wait_for

BETWEEN = "packets between {container_ip} and other nodes get lost"
SEE_FIRST = "see first whether this rule drops them: "
ON_ROUTER = "ip netns exec {switch} "
NO_FORWARD = ("iptables-nft -F FORWARD",)
#: Chain before routing whose rules change packets' headers.
RAW = (WALL, "nft 'add chain inet wall c {{ type filter hook prerouting priority -300; }}'")


def dropping(rule: str, *more: str) -> Fault:
    """Return the fault of a rule of nftables that drops forwarded packets, as it cannot be told which."""
    return Fault(
        "container echoes",
        BETWEEN,
        (*chain("forward", "accept", rule), *more),
        heal=NO_WALL,
        advice=f"{SEE_FIRST}{rule}",
        peer_sees=BEHIND,
    )


def dropping_by(match: str) -> Fault:
    """Return the fault of a rule of iptables that drops forwarded packets by an extension's match."""
    rule = f"FORWARD -m {match} -j DROP"
    return replace(
        dropping(""), harm=(f"iptables-nft -I {rule}",), heal=NO_FORWARD, advice=f"{SEE_FIRST}-A {rule}"
    )


def container_mac(world: World) -> None:
    """Drop packets by the MAC address of the container."""
    (link,) = world.node.container().namespace.json("ip", "-j", "link", "show", "dev", "eth0")
    world.run(f"iptables-nft -I FORWARD -m mac --mac-source {link['address']} -j DROP")


def former_policy(world: World) -> None:
    """Leave the rules of a policy controller that is gone, for an address that a new container has."""
    world.words["third_ip"] = address = world.node.container(3).address
    world.run(
        "iptables-nft -N KUBE-POD-FW-FORMER; iptables-nft -A KUBE-POD-FW-FORMER -j REJECT",
        f"iptables-nft -I FORWARD -s {address} -j KUBE-POD-FW-FORMER",
        f"iptables-nft -I FORWARD -d {address} -j KUBE-POD-FW-FORMER",
    )


def seen_well(world: World) -> None:
    assert str(world.doctor()) == "status 0", world.last


def well_again(world: World) -> None:
    wait_for(lambda: str(world.doctor()) == "status 0", what="a doctor that finds nothing")


def container_of_peer(mtu: int) -> Step:
    """Return the step that gives the peer's container another MTU."""
    change = ("ip", "link", "set", "dev", "eth0", "mtu", str(mtu))
    return lambda world: world.peer.container().namespace.run(*change)


def enclosed(*harm: Step, heal: tuple[Step, ...], advice: str) -> Fault:
    """Return the fault of containers without answers from outside, where a router reports packets."""
    return Fault(
        "way out",
        "{container_ip} gets no answer from outside the cluster, and this host does",
        (
            ON_ROUTER + "sysctl -qw net.ipv4.ip_forward=1",
            ON_ROUTER + "ip link add out0 up type bridge",
            ON_ROUTER + "ip address add 203.0.113.2/24 dev out0",
            seen_well,
            *harm,
        ),
        MASQUERADE,
        cuts=False,
        severity=HINT,
        heal=(*heal, well_again),
        advice=advice,
        after=(ON_ROUTER + "ip link del out0", ON_ROUTER + "sysctl -qw net.ipv4.ip_forward=0"),
    )


def leading_nowhere(
    says: str, *harm: Step, kind: Kind = VXLAN, heal: str, advice: str = "", after: tuple[str, ...] = ()
) -> Fault:
    """Return the fault of a default route to a router that is not there."""
    return Fault(
        "router",
        says,
        harm,
        kind,
        cuts=False,
        severity=HINT,
        heal=(heal,),
        advice=advice or heal,
        after=after,
    )


FAULTS = {
    "default route to a router that is not there": leading_nowhere(
        "198.18.0.77 answers no ARP, and the route is default dev eth0",
        "ip route replace default via 198.18.0.77",
        heal="ip route replace default via {gateway}",
        advice="see whether that router runs",
    ),
    "IPv6 default route to a router that is not there": leading_nowhere(
        "fd00:18::77 answers no neighbour discovery, and the route is default dev eth0",
        "ip -6 route replace default via fd00:18::77",
        kind=DUAL,
        heal="ip -6 route replace default via fd00:18::fe",
        advice="see whether that router runs",
    ),
    "routes of a VPN that has ended": leading_nowhere(
        "nothing ever came in by tun9, and the route is 128.0.0.0/1 dev tun9",
        "ip tuntap add tun9 mode tun; ip link set tun9 up",
        "ip route add 0.0.0.0/1 dev tun9; ip route add 128.0.0.0/1 dev tun9",
        heal="ip route del 128.0.0.0/1 dev tun9",
        after=("ip link del tun9",),
    ),
    "rules of a VPN that has ended": leading_nowhere(
        "nothing ever came in by tun9, and the route is default dev tun9",
        "ip tuntap add tun9 mode tun; ip link set tun9 up; ip route add default dev tun9 table 51820",
        "ip rule add not fwmark 51820 lookup 51820; ip rule add lookup main suppress_prefixlength 0",
        heal="ip rule del not fwmark 51820; ip rule del lookup main suppress_prefixlength 0",
        advice="see ip rule, too",
        after=("ip link del tun9",),
    ),
    "start without -ip-masq": enclosed(
        restart("--ip-masq=false"), ready, heal=(start,), advice="start flanneld with -ip-masq"
    ),
    "rule that drops what containers send outside": enclosed(
        "iptables-nft -I FORWARD -i cni0 ! -d 10.5.0.0/16 -j DROP",
        heal=("iptables-nft -D FORWARD -i cni0 ! -d 10.5.0.0/16 -j DROP",),
        advice="see the rules of nat and forward",
    ),
    "limit of all UDP": Fault(
        "path",
        "paths to peers with losses, whatever the size of packets",
        (
            "iptables-nft -I INPUT 1 -p udp -m limit --limit 2/second --limit-burst 4 -j ACCEPT",
            "iptables-nft -I INPUT 2 -p udp -j DROP",
        ),
        UDP,
        cuts=None,
        heal=("iptables-nft -D INPUT 1; iptables-nft -D INPUT 1",),
        advice=f"{SEE_FIRST}-A INPUT -p udp -j DROP",
    ),
    "container of a peer with a small MTU": Fault(
        BEHIND,
        "answers packets of 576 bytes, and none of 1450",
        (container_of_peer(1400),),
        cuts=False,
        severity=HINT,
        heal=(container_of_peer(1450),),
        advice="run flannelctl doctor there; a container with another MTU is recreated",
    ),
    "rule that drops forwarded packets at random": replace(
        dropping("numgen inc mod 2 0 drop"), cuts=None, peer_sees=""
    ),
    "rule that drops large forwarded packets": replace(
        dropping("meta length > 1000 drop"), cuts=False, peer_sees="", is_long=True
    ),
    "limit of forwarded packets": replace(
        dropping("limit rate over 1/minute burst 1 packets drop"), cuts=None, peer_sees="", is_long=True
    ),
    "rule by the port of a bridge": replace(
        dropping_by("physdev --physdev-in veth1"), peer_sees="", peer_blind=ONE_OF_MANY
    ),
    "rule by hops": replace(dropping_by("ttl --ttl-lt 64"), is_long=True),
    "rule by a container's MAC address": replace(
        dropping_by("mac"),
        harm=(container_mac,),
        peer_sees="",
        peer_blind=ONE_OF_MANY,
        advice=f"{SEE_FIRST}-A FORWARD -m mac --mac-source ",
        is_long=True,
    ),
    "rule that drops forwarded packets, host-gw": replace(
        dropping("numgen inc mod 1 0 drop"), kind=HOST_GW, is_long=True
    ),
    "rules of a former policy controller": Fault(
        "container echoes",
        "dropped by chain FORWARD of table ip filter: -A KUBE-POD-FW-FORMER -j REJECT",
        (former_policy,),
        cuts=False,
        severity=HINT,
        heal=(
            "iptables-nft -D FORWARD -s {third_ip} -j KUBE-POD-FW-FORMER",
            "iptables-nft -D FORWARD -d {third_ip} -j KUBE-POD-FW-FORMER",
        ),
        advice="remove it, unless a NetworkPolicy means it",
        after=("iptables-nft -F KUBE-POD-FW-FORMER; iptables-nft -X KUBE-POD-FW-FORMER",),
    ),
    "rule that writes another receiver": Fault(
        "filters",
        FROM_CONTAINERS,
        (*RAW, "nft 'add rule inet wall c iifname cni0 ip daddr {subnet} ip daddr set 203.0.113.1'"),
        after=NO_WALL,
        peer_sees=BEHIND,
    ),
    "rule that writes another port": Fault(
        "filters",
        f"redirects {TO_PEERS}",
        chain("output", "accept", "udp dport 8472 udp dport set 9999"),
        after=NO_WALL,
        is_long=True,
    ),
    "senders translated to an address of nobody": Fault(
        "filters",
        "-A POSTROUTING -s {own} -j SNAT --to-source 203.0.113.7",
        (
            "iptables-nft -t nat -A POSTROUTING -s 203.0.113.0/24 -j MASQUERADE",
            seen_well,  # its echoes are connections now, and rules of nat spare those
            "iptables-nft -t nat -I POSTROUTING -s {own} -j SNAT --to-source 203.0.113.7",
        ),
        heal=("iptables-nft -t nat -D POSTROUTING -s {own} -j SNAT --to-source 203.0.113.7",),
        advice="iptables-nft -t nat -I POSTROUTING -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN",
        after=("iptables-nft -t nat -D POSTROUTING -s 203.0.113.0/24 -j MASQUERADE",),
        peer_blind="answers of its containers keep their senders",
    ),
    "rule by the tunnel's port": Fault(
        "lookups",
        "from all ipproto udp dport 8472 prohibit diverts packets to other nodes",
        ("ip rule add ipproto udp dport 8472 prohibit priority 80",),
        heal=("ip rule del priority 80",),
        advice="ip rule del priority 80",
    ),
    "rule by ICMP": Fault(
        "lookups",
        "from all iif cni0 ipproto icmp prohibit diverts packets of its containers",
        ("ip rule add iif cni0 ipproto icmp prohibit priority 55",),
        after=("ip rule del priority 54; ip rule del priority 55",),
        peer_blind="its containers refuse TCP",
        is_long=True,
    ),
    "rules of a container drop what it sends to another node": Fault(
        "container echoes",
        BETWEEN,
        (
            INSIDE + "nft add table inet own",
            INSIDE + "nft 'add chain inet own c {{ type filter hook output priority 0; }}'",
            INSIDE + "nft add rule inet own c ip daddr {subnet} drop",
        ),
        heal=(INSIDE + "nft delete table inet own",),
        advice="see its own rules: nsenter --net=/run/netns/{container} nft list ruleset",
        peer_blind=ONE_OF_MANY,
    ),
    "route of a container by another container": Fault(
        "container routes",
        "{container_ip} in /run/netns/{container}: 10.5.0.0/16 dev eth0",
        (INSIDE + "ip route add 10.5.0.0/16 via {own_nobody}",),
        peer_blind=ONE_OF_MANY,
    ),
    "route to nowhere in a container": Fault(
        "container routes",
        "{container_ip} in /run/netns/{container}: unreachable {subnet}",
        (INSIDE + "ip route add unreachable {subnet}",),
        peer_blind=ONE_OF_MANY,
    ),
    "policy rule of a container for its own address": Fault(
        "container routes",
        "{container_ip} in /run/netns/{container}",
        (
            INSIDE + "ip route add default dev lo table 99",
            INSIDE + "ip rule add from {container_ip} lookup 99 priority 20",
        ),
        heal=(INSIDE + "ip rule del priority 20",),
        advice="nsenter --net=/run/netns/{container} ip rule del priority 20",
        after=(INSIDE + "ip route flush table 99",),
        peer_blind=ONE_OF_MANY,
    ),
    "IPv6 packets of a container with one hop": Fault(
        "container routes",
        "{container_ip6} in /run/netns/{container}",
        (INSIDE + "sysctl -w net.ipv6.conf.eth0.hop_limit=1",),
        DUAL,
        peer_blind=ONE_OF_MANY,
    ),
    "address of another node on lo": Fault(
        "unsafe leases",
        "it announces {peer}, an address of this host",
        ("ip address add {peer}/32 dev lo",),
        heal=("ip address del {peer} dev lo",),
        advice="if this address belongs to that node: ip address del {peer} dev lo",
    ),
}
