"""Faults of packet filters."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.fault import BEHIND, HINT, ONE_OF_MANY, Fault, on_peer
from tests.faults.world import (
    DUAL,
    HOST_GW,
    HOST_GW_DUAL,
    IPIP,
    LEGACY,
    MASQUERADE,
    NATIVE,
    NO_RULES,
    NO_RULES_DUAL,
    UDP,
    VXLAN_V3,
)
from tests.unit.network.firewall.test_rules import GOLDEN

#: Rules of an earlier run.
OWN_CHAINS = GOLDEN / "own-chains-both-ipv4.txt"
LEFT = "rules of flannel are in a place that the daemon does not use"
WALL = "nft add table inet wall"
NO_WALL = ("nft delete table inet wall",)
FROM_PEERS, TO_PEERS = "UDP 8472 from its peers", "UDP 8472 to its peers"
TO_CONTAINERS = "packets of other nodes to its containers"
FROM_CONTAINERS = "packets of its containers to other nodes"


def chain(hook: str, policy: str, *rules: str, priority: int = 0) -> tuple[str, ...]:
    """Return the commands that make a native chain with rules."""
    made = (
        f"nft 'add chain inet wall c {{{{ type filter hook {hook} priority {priority}; policy {policy}; }}}}'"
    )
    return (WALL, made, *(f"nft 'add rule inet wall c {rule}'" for rule in rules))


#: Rule that gives the tunnel's packets to another port.
TAKES_PORT = "-p udp --dport 8472 -j REDIRECT --to-ports 9"
#: Rule that keeps packets to other networks as they are.
NOT_TRANSLATED = "POSTROUTING -s 10.0.0.0/8 -o eth0 -j ACCEPT"
NO_BRIDGED = ("nft delete table bridge wall",)


def bridged(hook: str, rule: str) -> tuple[str, ...]:
    """Return the commands that make a chain of a bridge with a rule."""
    made = f"nft 'add chain bridge wall c {{{{ type filter hook {hook} priority 0; }}}}'"
    return ("nft add table bridge wall", made, f"nft 'add rule bridge wall c {rule}'")


def early(hook: str, device: str, rule: str, name: str = "c") -> tuple[str, ...]:
    """Return the commands that make a chain of a device with a rule."""
    made = f"nft 'add chain netdev wall {name} {{{{ type filter hook {hook} device {device} priority 0; }}}}'"
    return ("nft add table netdev wall", made, f"nft 'add rule netdev wall {name} {rule}'")


def flushed(table: str, name: str, program: str = "iptables-nft") -> tuple[str, ...]:
    return (f"{program} -t {table} -P {name} ACCEPT; {program} -t {table} -F {name}",)


FAULTS = {
    "INPUT drops the port": Fault(
        "filters",
        FROM_PEERS,
        ("iptables-nft -A INPUT -p udp --dport 8472 -j DROP",),
        after=flushed("filter", "INPUT"),
    ),
    "INPUT drops the port, legacy": Fault(
        "filters",
        FROM_PEERS,
        ("iptables-legacy -A INPUT -i eth0 -p udp -m udp --dport 8472 -j DROP",),
        after=flushed("filter", "INPUT", "iptables-legacy"),
    ),
    "INPUT rejects all UDP but DNS": Fault(
        "filters",
        FROM_PEERS,
        ("iptables-nft -A INPUT -i eth+ -p udp -m multiport ! --dports 53,67:68 -j REJECT",),
        after=flushed("filter", "INPUT"),
    ),
    "INPUT policy": Fault(
        "filters",
        FROM_PEERS,
        (
            "iptables-nft -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "iptables-nft -A INPUT -p icmp -j ACCEPT; iptables-nft -A INPUT -p tcp -j ACCEPT",
            "iptables-nft -P INPUT DROP",
        ),
        after=flushed("filter", "INPUT"),
    ),
    "INPUT drops in a chain of its own": Fault(
        "filters",
        FROM_PEERS,
        (
            "iptables-nft -N strict; iptables-nft -A strict -s 198.18.0.0/15 -j DROP",
            "iptables-nft -A INPUT ! -i lo -p udp -g strict",
        ),
        after=(*flushed("filter", "INPUT"), "iptables-nft -F strict; iptables-nft -X strict"),
    ),
    "raw table drops": Fault(
        "filters",
        FROM_PEERS,
        ("iptables-nft -t raw -A PREROUTING -p udp --dport 8472 -j DROP",),
        after=flushed("raw", "PREROUTING"),
    ),
    "OUTPUT drops the port": Fault(
        "filters",
        TO_PEERS,
        ("iptables-nft -A OUTPUT -o eth0 -p udp --dport 8472 -j DROP",),
        after=flushed("filter", "OUTPUT"),
    ),
    "OUTPUT rejects one peer": Fault(
        "filters",
        TO_PEERS,
        ("iptables-nft -A OUTPUT -d {peer} -p udp -j REJECT",),
        after=flushed("filter", "OUTPUT"),
    ),
    "mangle POSTROUTING drops": Fault(
        "filters",
        TO_PEERS,
        ("iptables-nft -t mangle -A POSTROUTING -p 17 --dport 8000:9000 -j DROP",),
        after=flushed("mangle", "POSTROUTING"),
    ),
    "FORWARD rejects what comes from the device": Fault(
        "filters",
        TO_CONTAINERS,
        ("iptables-nft -I FORWARD -i flannel.1 -j REJECT",),
        after=flushed("filter", "FORWARD"),
        peer_sees=BEHIND,
    ),
    "FORWARD drops what leaves by the device": Fault(
        "filters",
        FROM_CONTAINERS,
        ("iptables-nft -I FORWARD -o flannel.1 -j DROP",),
        after=flushed("filter", "FORWARD"),
        peer_sees=BEHIND,
    ),
    "FORWARD drops one peer": Fault(
        "filters",
        FROM_CONTAINERS,
        ("iptables-nft -I FORWARD -d {subnet} -j DROP",),
        after=flushed("filter", "FORWARD"),
        peer_sees=BEHIND,
    ),
    "FORWARD drops new connections, legacy": Fault(
        "filters",
        "its containers",
        ("iptables-legacy -I FORWARD -m state --state NEW -j DROP",),
        after=flushed("filter", "FORWARD", "iptables-legacy"),
        peer_sees=BEHIND,
    ),
    "FORWARD drops one peer, host-gw": Fault(
        "filters",
        FROM_CONTAINERS,
        ("iptables-nft -I FORWARD -d {subnet} -j DROP",),
        HOST_GW,
        after=flushed("filter", "FORWARD"),
        peer_blind="it drops packets of containers, and none of the node",
    ),
    "nftables input policy": Fault(
        "filters",
        FROM_PEERS,
        chain(
            "input",
            "drop",
            'iifname vmap {{ "lo" : accept }}',
            "ct state vmap {{ established : accept, related : accept, invalid : drop }}",
            "meta l4proto {{ icmp, tcp }} accept",
        ),
        after=NO_WALL,
    ),
    "nftables input policy beside rules for other packets": Fault(
        "filters",
        FROM_PEERS,
        chain(
            "input",
            "drop",
            "ct state established,related accept",
            "icmp type {{ echo-request, destination-unreachable }} limit rate 20/second accept",
            "meta pkttype {{ broadcast, multicast }} accept",
            "udp sport 53 accept",
            "meta l4proto tcp accept",
        ),
        after=NO_WALL,
    ),
    "nftables input rule with a set": Fault(
        "filters",
        FROM_PEERS,
        chain("input", "accept", "ip saddr 198.18.0.0/16 udp dport {{ 4789, 8000-8999 }} counter drop"),
        after=NO_WALL,
    ),
    "nftables prerouting drops": Fault(
        "filters",
        FROM_PEERS,
        chain("prerouting", "accept", "iif eth0 udp dport 8472 drop", priority=-300),
        after=NO_WALL,
    ),
    "nftables output rejects": Fault(
        "filters",
        TO_PEERS,
        chain("output", "accept", "oifname eth0 udp dport 8472 reject"),
        after=NO_WALL,
    ),
    "nftables forward drops new connections": Fault(
        "filters",
        "its containers",
        chain("forward", "accept", 'iifname "flannel*" ct state new drop'),
        after=NO_WALL,
        peer_sees=BEHIND,
    ),
    "ingress hook drops": Fault(
        "filters",
        FROM_PEERS,
        early("ingress", "eth0", "udp dport 8472 drop"),
        after=("nft delete table netdev wall",),
    ),
    "egress hook drops": Fault(
        "filters",
        TO_PEERS,
        early("egress", "eth0", "udp dport 8472 drop"),
        after=("nft delete table netdev wall",),
    ),
    "ingress hook of a container's port drops": Fault(
        "filters",
        FROM_CONTAINERS,
        early("ingress", "veth1", "ip daddr {base}/24 drop"),
        after=("nft delete table netdev wall",),
        peer_blind=ONE_OF_MANY,
    ),
    "bridge family drops what comes from a container": Fault(
        "filters",
        FROM_CONTAINERS,
        bridged("input", "iifname veth1 ip daddr {base}/24 drop"),
        after=NO_BRIDGED,
        peer_blind=ONE_OF_MANY,
    ),
    "bridge family drops what goes to a container": Fault(
        "filters",
        TO_CONTAINERS,
        bridged("output", "oifname veth1 ip protocol {{ icmp, tcp }} drop"),
        after=NO_BRIDGED,
        peer_blind=ONE_OF_MANY,
    ),
    "port of the tunnel redirected": Fault(
        "filters",
        f"this node redirects {FROM_PEERS}",
        (f"iptables-nft -t nat -I PREROUTING {TAKES_PORT}",),
        VXLAN_V3,  # connections keep their translation: no other fault there has rules of nat
        after=flushed("nat", "PREROUTING"),
        needs_more="a connection keeps its translation until it is idle",
    ),
    "another program redirects TCP of containers": Fault(
        "filters",
        f"this node redirects TCP {FROM_CONTAINERS}",
        (
            "nft add table inet proxy",
            "nft 'add chain inet proxy c {{ type nat hook prerouting priority -100; }}'",
            "nft 'add rule inet proxy c iifname cni0 meta l4proto tcp dnat ip to 127.0.0.1:15001'",
        ),
        cuts=False,
        after=("nft delete table inet proxy",),
    ),
    "answers to ARP dropped": Fault(
        "tunnel",
        "no answer to ARP or NDP from",
        (
            "nft add table arp wall",
            "nft 'add chain arp wall c {{ type filter hook input priority 0; }}'",
            "nft add rule arp wall c arp operation reply drop; ip neigh flush dev eth0",
        ),
        cuts=None,
        heal=("nft delete table arp wall",),
        advice="nft list ruleset arp",
    ),
    "packets with no hop left": Fault(
        "filters",
        FROM_CONTAINERS,
        chain("forward", "accept", "ip ttl set 1"),
        after=NO_WALL,
        peer_blind="packets get as far as the nodes",
    ),
    "IPv6 of all nodes dropped": Fault(
        "filters",
        FROM_PEERS,
        chain("input", "accept", "ip6 saddr fd00:18::/64 drop"),
        DUAL,
        after=NO_WALL,
        peer_says="no answer from 1 peer over IPv6, neither from the node nor through the tunnel",
    ),
    "neighbour discovery dropped": Fault(
        "filters",
        "neighbour discovery (ICMPv6) of its peers",
        (
            "ip6tables-nft -A INPUT -p icmpv6 --icmpv6-type neighbour-solicitation -j DROP",
            "ip6tables-nft -A INPUT -p icmpv6 --icmpv6-type neighbour-advertisement -j DROP",
            "ip -6 neigh flush dev eth0",
        ),
        DUAL,
        cuts=None,
        after=flushed("filter", "INPUT", "ip6tables-nft"),
    ),
    "exemption from NAT before the daemon's rules": Fault(
        "masquerade",
        "-A POSTROUTING -s 10.0.0.0/8 -o eth0 -j ACCEPT: it is before the daemon's rules",
        (f"iptables-nft -t nat -I {NOT_TRANSLATED}",),
        MASQUERADE,
        cuts=False,
        heal=(f"iptables-nft -t nat -D {NOT_TRANSLATED}",),
    ),
    "INPUT drops the port, IPv6": Fault(
        "filters",
        FROM_PEERS,
        ("ip6tables-nft -A INPUT -p udp --dport 8472 -j DROP",),
        DUAL,
        after=flushed("filter", "INPUT", "ip6tables-nft"),
    ),
    "FORWARD rejects what comes from the device, IPv6": Fault(
        "filters",
        TO_CONTAINERS,
        ("ip6tables-nft -I FORWARD -i flannel-v6.1 -j REJECT",),
        DUAL,
        after=flushed("filter", "FORWARD", "ip6tables-nft"),
        peer_sees=BEHIND,
    ),
    "INPUT passes protocol 94, which is named ipip": Fault(
        "filters",
        "IP protocol 4 from its peers",
        chain(
            "input",
            "accept",
            "iifname eth0 ip protocol {{ icmp, tcp, udp, 94 }} accept",
            "iifname eth0 meta nfproto ipv4 drop",
        ),
        IPIP,
        after=NO_WALL,
    ),
    "INPUT drops the port, udp": Fault(
        "filters",
        "UDP 8285 from its peers",
        ("iptables-nft -A INPUT -p udp --dport 8285 -j DROP",),
        UDP,
        after=flushed("filter", "INPUT"),
    ),
    "FORWARD policy": Fault(
        "filters",
        "chain FORWARD of table ip filter",
        ("iptables-nft -P FORWARD DROP",),
        NO_RULES,
        after=flushed("filter", "FORWARD"),
        peer_sees=BEHIND,
    ),
    "FORWARD policy, legacy": Fault(
        "filters",
        "(legacy)",
        ("iptables-legacy -P FORWARD DROP",),
        NO_RULES,
        after=flushed("filter", "FORWARD", "iptables-legacy"),
        peer_sees=BEHIND,
    ),
    "FORWARD policy, IPv6": Fault(
        "filters",
        "table ip6 filter",
        ("ip6tables-nft -P FORWARD DROP",),
        NO_RULES_DUAL,
        after=flushed("filter", "FORWARD", "ip6tables-nft"),
        peer_sees=BEHIND,
    ),
    "FORWARD refuses all": Fault(
        "filters",
        "-A FORWARD -j REJECT",
        ("iptables-nft -I FORWARD -j REJECT",),
        NO_RULES,
        after=flushed("filter", "FORWARD"),
        peer_sees=BEHIND,
    ),
    "nftables forward policy": Fault(
        "filters",
        "table inet wall",
        chain("forward", "drop"),
        NO_RULES,
        after=NO_WALL,
        peer_sees=BEHIND,
    ),
    "nftables forward policy beside tables of our own": Fault(
        "filters",
        "table inet wall",
        chain("forward", "drop"),
        NATIVE,
        after=NO_WALL,
        peer_sees=BEHIND,
    ),
    "rules left in iptables-legacy": Fault(
        "left rules", LEFT, (f"iptables-legacy-restore {OWN_CHAINS}",), cuts=False
    ),
    "rules left in iptables-nft": Fault(
        "left rules",
        LEFT,
        (f"iptables-nft-restore {OWN_CHAINS}",),
        LEGACY,
        cuts=False,
    ),
    "rules left in nftables": Fault("left rules", LEFT, (f"nft -f {GOLDEN}/native-ipv4.nft",), cuts=False),
    "another program masquerades the containers": Fault(
        "filters",
        "-A POSTROUTING -s {own} ! -o cni0 -j MASQUERADE",
        ("iptables-nft -t nat -A POSTROUTING -s {own} ! -o cni0 -j MASQUERADE",),
        MASQUERADE,
        cuts=False,
        severity=HINT,
        heal=("iptables-nft -t nat -D POSTROUTING -s {own} ! -o cni0 -j MASQUERADE",),
        advice="iptables-nft -t nat -I POSTROUTING -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN",
    ),
    "another program masquerades the containers, nftables": Fault(
        "filters",
        'oifname != "lo" masquerade',
        (
            WALL,
            "nft 'add chain inet wall c {{ type nat hook postrouting priority 90; }}'",
            "nft 'add rule inet wall c oifname != \"lo\" masquerade'",
        ),
        DUAL,
        cuts=False,
        severity=HINT,
        heal=NO_WALL,
        advice="nft insert rule inet wall c ip6 saddr fc00:5::/48 ip6 daddr fc00:5::/48 return",
    ),
    "queue that no program reads": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        ("iptables-nft -A INPUT -p udp --dport 8472 -j NFQUEUE --queue-num 7",),
        heal=flushed("filter", "INPUT"),
        advice="see first whether this rule drops them: -A INPUT -p udp -m udp --dport 8472 -j NFQUEUE",
    ),
    "limit of the tunnel's packets": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (
            "iptables-nft -A INPUT -p udp --dport 8472 -m limit --limit 1/hour --limit-burst 1 -j ACCEPT",
            "iptables-nft -A INPUT -p udp --dport 8472 -j DROP",
        ),
        heal=flushed("filter", "INPUT"),
        advice="see first whether this rule drops them: -A INPUT -p udp -m udp --dport 8472 -j DROP",
    ),
    "network policy for a container": Fault(
        "filters",
        "-A KUBE-POD-FW-X",
        (
            "iptables-nft -N KUBE-POD-FW-X; iptables-nft -I FORWARD -d {container_ip} -j KUBE-POD-FW-X",
            "iptables-nft -A KUBE-POD-FW-X -p tcp -m mark ! --mark 0x10000/0x10000 -j REJECT",
        ),
        cuts=False,
        severity=HINT,
        heal=(
            "iptables-nft -D FORWARD -d {container_ip} -j KUBE-POD-FW-X",
            "iptables-nft -F KUBE-POD-FW-X; iptables-nft -X KUBE-POD-FW-X",
        ),
        advice="kubectl get networkpolicy --all-namespaces",
    ),
    "rule that drops every third packet": Fault(
        "path",
        "to peers with losses, whatever the size of packets",
        chain("input", "accept", "udp dport 8472 numgen inc mod 3 0 drop"),
        cuts=None,
        heal=NO_WALL,
        advice="see first whether this rule drops them: udp dport 8472 numgen inc mod 3 0 drop",
        peer_sees="path",
        peer_says="tunnel to {own_base}: ",
    ),
    "rule that drops large packets": Fault(
        "path",
        "the tunnel to {base} does not carry 1450 bytes",
        (*chain("output", "accept"), "nft add rule inet wall c udp dport 8472 udp length 1000-9000 drop"),
        cuts=False,
        heal=NO_WALL,
        advice="see first whether this rule drops them: udp dport 8472 udp length 1000-9000 drop",
        peer_sees="path",
    ),
    "INPUT of the peer drops the port": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (on_peer("iptables-nft -A INPUT -p udp --dport 8472 -j DROP"),),
        heal=(on_peer("iptables-nft -F INPUT"),),
        advice="run flannelctl doctor there",
        peer_sees="filters",
        peer_says="UDP 8472 from its peers",
    ),
}
FAULTS["neighbour discovery dropped, host-gw"] = replace(
    FAULTS["neighbour discovery dropped"], kind=HOST_GW_DUAL
)
