"""Faults between the network and the containers of a node."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.fault import HINT, ONE_OF_MANY, Fault
from tests.faults.firewall import NO_BRIDGED, bridged
from tests.faults.world import DUAL, HOST_GW, World
from tests.lab.namespace import Namespace

INSIDE = "ip netns exec {container} "

LOST = "packets between {container_ip} and this host get lost"
STRANGE_MAC = "02:00:00:00:00:99"


def unheard(harm: tuple[str, ...], *heal: str, advice: str = "") -> Fault:
    """Return the fault of something that drops packets between a container and this host."""
    return Fault("container echoes", LOST, harm, heal=heal, advice=advice)


def renumber(container: Namespace, address: str) -> None:
    container.run("sh", "-c", "ip address flush dev eth0; ip link set eth0 up")
    container.run("ip", "address", "add", address, "dev", "eth0")


def same_address(world: World) -> None:
    """Make a second container with the address of the first."""
    second, first = world.node.container(2).namespace, world.node.container().address
    second.run(
        "sh", "-c", f"ip address flush dev eth0; ip link set eth0 up; ip address add {first}/24 dev eth0"
    )
    second.run("ping", "-c", "1", "-W", "0.3", "-I", "eth0", world.words["own_ip"], check=False)


def same_mac(world: World) -> None:
    """Make a third container with the MAC address of the first: other faults renumber the second."""
    second = world.node.container(3).namespace
    (link,) = world.node.container().namespace.json("ip", "-j", "link", "show", "dev", "eth0")
    second.run("ip", "link", "set", "dev", "eth0", "address", link["address"])


def other_mac(world: World) -> None:
    world.node.container(3).namespace.run("ip", "link", "set", "dev", "eth0", "address", "02:00:00:00:00:98")


def second_gone(world: World) -> None:
    second = world.node.container(2).namespace
    second.run("sh", "-c", "ip address flush dev eth0; ip link set eth0 down")
    world.run("ip neigh flush dev cni0")


def gateway_address(world: World) -> None:
    """Make a second container with the address of the bridge."""
    renumber(world.node.container(2).namespace, world.words["own_gateway"])


IN_CONTAINERS = {
    "rules of a container drop what it sends": unheard(
        (
            INSIDE + "nft add table inet own",
            INSIDE + "nft 'add chain inet own c {{ type filter hook output priority 0; policy drop; }}'",
        ),
        INSIDE + "nft delete table inet own",
        advice="nft list ruleset; nsenter --net=/run/netns/{container} iptables-save",
    ),
    "rules of a container redirect TCP to a proxy that does not run": Fault(
        "container echoes",
        "TCP of {container_ip} for other nodes is refused before it leaves the container",
        (INSIDE + "iptables-nft -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 15001",),
        cuts=False,
        severity=HINT,
        heal=(INSIDE + "iptables-nft -t nat -F OUTPUT",),
        advice="start what listens there, or recreate the container",
    ),
    "rules of a container drop what it gets": unheard(
        (INSIDE + "iptables-nft -P INPUT DROP",),
        INSIDE + "iptables-nft -P INPUT ACCEPT",
        advice="nsenter --net=/run/netns/{container} iptables-save",
    ),
    "filter of tc at a container's port": unheard(
        (
            "tc qdisc add dev veth1 clsact",
            "tc filter add dev veth1 ingress pref 7 bpf direct-action bytecode '1,6 0 0 2,'",
        ),
        "tc qdisc del dev veth1 clsact",
        advice="tc -s filter show dev veth1 ingress",
    ),
    "bridge family drops ARP of containers": unheard(
        (
            *bridged("input", "ether type arp drop"),
            INSIDE + "ip neigh flush dev eth0; ip neigh flush dev cni0",
        ),
        *NO_BRIDGED,
        advice="nft list ruleset",
    ),
    "check of a container's sender by a former MAC address": unheard(
        bridged("prerouting", f"iifname veth1 ether saddr != {STRANGE_MAC} drop"),
        *NO_BRIDGED,
        advice="nft list ruleset",
    ),
    "entry of the bridge that leads to another port": unheard(
        (
            "ip link add other0 up type veth peer name other1; ip link set other0 master cni0",
            "bridge fdb replace $(" + INSIDE + "cat /sys/class/net/eth0/address)"
            " dev other0 master static sticky",
        ),
        "ip link del other0",
        advice="bridge fdb show br cni0",
    ),
    "route of a container by another interface": Fault(
        "container routes",
        "{container_ip} in /run/netns/{container}: 10.5.0.0/16 dev eth1",
        (INSIDE + "ip link add eth1 up type bridge; " + INSIDE + "ip route add 10.5.0.0/16 dev eth1",),
        after=(INSIDE + "ip link del eth1",),
    ),
    "container with IPv6 off": Fault(
        "container addresses",
        "eth0 in /run/netns/{container} has {container_ip} only, cni0 has {own_ip6}",
        (INSIDE + "sysctl -w net.ipv6.conf.eth0.disable_ipv6=1",),
        DUAL,
        heal=(
            INSIDE + "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0",
            INSIDE + "ip address add {container_address6} dev eth0 nodad",
            INSIDE + "ip -6 route replace default via {own_ip6} dev eth0",
        ),
        cuts=None,
        severity=HINT,
        advice="sysctl net.ipv6.conf.eth0.disable_ipv6 must be 0",
    ),
    "container with the MAC of its bridge": Fault(
        "container addresses",
        "1 container with the MAC address 02:00:00:00:00:97 on cni0 of this host",
        (
            INSIDE + "ip link set dev eth0 address 02:00:00:00:00:97",
            "ip link set dev cni0 address 02:00:00:00:00:97",
        ),
        heal=(
            INSIDE + "ip link set dev eth0 address 02:00:00:00:00:96",
            "ip link set dev cni0 address 02:00:00:00:00:95",
        ),
        advice="recreate all of them",
        peer_blind=ONE_OF_MANY,
    ),
    "two containers with one MAC": Fault(
        "container addresses",
        "2 containers with the MAC address ",
        (same_mac,),
        cuts=None,
        heal=(other_mac,),
        advice="recreate all of them but one, with no MAC address fixed",
    ),
    "packets of a container with one hop": Fault(
        "container routes",
        "1 container whose packets may take 1 hop only",
        (INSIDE + "sysctl -qw net.ipv4.ip_default_ttl=1",),
        peer_blind=ONE_OF_MANY,
    ),
    "two containers with one address": Fault(
        "container addresses",
        "2 containers with the address {container_ip}",
        (same_address,),
        cuts=None,
        heal=(second_gone,),
        advice="recreate all of them but one",
    ),
    "container with the address of the bridge": Fault(
        "container addresses",
        "1 container with the address {own_ip} of this host",
        (gateway_address,),
        cuts=None,
        heal=(second_gone,),
        advice="recreate all of them, with no MAC address fixed",
    ),
    "bridge deleted": Fault("bridge address", "there is no cni0", ("ip link del cni0",), DUAL),
    "default route by a router that is not this host, IPv6": Fault(
        "container routes",
        "default via fe80::99 dev eth0",
        (INSIDE + "ip -6 route add default via fe80::99 dev eth0 metric 512",),
        DUAL,
    ),
    "no default route": Fault(
        "container routes", "1 container without a route", (INSIDE + "ip route del default",)
    ),
    "no default route, host-gw": Fault(
        "container routes", "1 container without a route", (INSIDE + "ip route del default",), HOST_GW
    ),
    "no default route, IPv6": Fault(
        "container routes", "1 container without a route", (INSIDE + "ip -6 route del default",), DUAL
    ),
    "default route to nobody": Fault(
        "container routes",
        "1 container without a route",
        (INSIDE + "ip route replace default via {own_nobody} dev eth0",),
    ),
    "container with the prefix of the network": Fault(
        "container routes",
        "1 container with a wider prefix than our subnet",
        (
            INSIDE + "ip address add {wide} dev eth0",
            INSIDE + "ip address del {container_address} dev eth0",
        ),
    ),
    "container with the prefix of the network, IPv6": Fault(
        "container routes",
        "1 container with a wider prefix than our subnet",
        (
            INSIDE + "ip address del {container_address6} dev eth0",
            INSIDE + "ip address add {container_ip6}/48 dev eth0 nodad",
        ),
        DUAL,
    ),
    "blackhole in the container": Fault(
        "container routes",
        "1 container without a route",
        (INSIDE + "ip route replace blackhole default",),
    ),
    "interface of a container down": Fault(
        "container routes", "1 container without a route", (INSIDE + "ip link set eth0 down",)
    ),
    "port of the bridge disabled": Fault(
        "bridge port",
        "the bridge passes no packets to veth1",
        ("bridge link set dev veth1 state 0",),
    ),
    "port to which the bridge floods nothing, and of which it learns nothing": Fault(
        "bridge port",
        "bridge -d link show dev veth1: flood off, learning off",
        ("bridge link set dev veth1 flood off learning off; ip link set veth1 type bridge_slave fdb_flush",),
    ),
    "port to which the bridge floods no broadcasts": Fault(
        "bridge port",
        "veth1, a container's port, has bcast_flood off",
        ("bridge link set dev veth1 bcast_flood off",),
        cuts=False,
        severity=HINT,
    ),
    "port to which the bridge floods nothing": Fault(
        "bridge port",
        "veth1, a container's port, has flood off",
        ("bridge link set dev veth1 flood off",),
        cuts=False,
        severity=HINT,
    ),
    "wrong permanent neighbour in a container": Fault(
        "pinned neighbours",
        "the MAC address of {own_ip} is fixed by hand: 02:00:00:00:00:99",
        (INSIDE + "ip neigh replace {own_ip} lladdr 02:00:00:00:00:99 dev eth0 nud permanent",),
    ),
    "wrong permanent neighbour in a container, IPv6": Fault(
        "pinned neighbours",
        "02:00:00:00:00:99",
        (INSIDE + "ip neigh replace {own_ip6} lladdr 02:00:00:00:00:99 dev eth0 nud permanent",),
        DUAL,
    ),
    "wrong permanent neighbour for a container": Fault(
        "pinned neighbours",
        "dev cni0 lladdr 02:00:00:00:00:99 PERMANENT",
        ("ip neigh replace {container_ip} lladdr 02:00:00:00:00:99 dev cni0 nud permanent",),
    ),
    "veth pair with a smaller MTU at this host's end": Fault(
        "containers",
        "1 container whose veth pair has a smaller MTU at one end",
        ("ip link set veth1 mtu 1400",),
        cuts=False,
        after=("ip link set cni0 mtu 1450",),
    ),
    "veth pair with a smaller MTU inside": Fault(
        "containers",
        ": 1400; veth1: 1450",
        (INSIDE + "ip link set eth0 mtu 1400",),
        cuts=False,
    ),
    "port of the bridge down": Fault("bridge port", "veth1 is down", ("ip link set veth1 down",)),
    "bridge without address": Fault(
        "bridge address",
        "no interface leads to the containers on cni0",
        ("ip address flush dev cni0",),
    ),
    "route of this host to a container by another interface": Fault(
        "bridge address",
        "{container_ip} in /run/netns/{container}: packets leave by eth0",
        ("ip route add {container_ip} dev eth0",),
        heal=("ip route del {container_ip}/32 dev eth0",),
    ),
    "route to the bridge deleted": Fault(
        "bridge address",
        "no interface leads to the containers on cni0",
        ("ip route del {own} dev cni0",),
    ),
    "bridge with an address and no subnet": Fault(
        "bridge address",
        "no interface leads to the containers on cni0",
        ("ip address flush dev cni0; ip address add {own_ip}/32 dev cni0",),
        after=("ip address flush dev cni0; ip address add {own_gateway} dev cni0",),
    ),
    "policy rule inside a container": Fault(
        "container routes",
        "1 container without a route",
        (
            INSIDE
            + "ip rule add lookup 77 priority 5; "
            + INSIDE
            + "ip route add unreachable default table 77",
        ),
        heal=(INSIDE + "ip rule del priority 5",),
        advice="nsenter --net=/run/netns/{container} ip rule del priority 5",
        after=(INSIDE + "ip route flush table 77",),
    ),
    "bridge without IPv6": Fault(
        "bridge address",
        "no interface leads to the containers on cni0",
        ("sysctl -w net.ipv6.conf.cni0.disable_ipv6=1",),
        DUAL,
    ),
    "container off its bridge": Fault(
        "attachment",
        "veth1 is no port of cni0",
        ("ip link set veth1 nomaster",),
    ),
    "bridge down": Fault(
        "bridge down",
        "cni0 is down",
        ("ip link set cni0 down",),
    ),
    "bridge with the MTU of Ethernet": Fault(
        "containers",
        "cni0 has the MTU 1500, the network allows 1450",
        ("ip link set cni0 mtu 1500",),
        cuts=False,
    ),
    "addresses of another CNI config": Fault(
        "bridge subnet",
        "cni0 has 10.88.0.1, too, which is outside the cluster network",
        ("ip address add 10.88.0.1/16 dev cni0",),
        cuts=False,
        severity=HINT,
        heal=("ip address del 10.88.0.1/16 dev cni0",),
        advice="take the address from cni0",
    ),
    "container with the MTU of Ethernet": Fault(
        "containers",
        "1 container with a larger MTU than the network allows, 1450",
        (INSIDE + "ip link set eth0 mtu 1500",),
        cuts=False,
        severity=HINT,
    ),
    "bridge outside the network": Fault(
        "other bridge",
        "cni0 has 172.17.0.1, which is outside the cluster network",
        (
            "ip address flush dev cni0; ip address add 172.17.0.1/16 dev cni0",
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add 172.17.0.2/16 dev eth0; "
            + INSIDE
            + "ip route add default via 172.17.0.1",
        ),
        heal=(
            "ip address flush dev cni0; ip address add {own_gateway} dev cni0",
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add {container_address} dev eth0; "
            + INSIDE
            + "ip route add default via {own_ip}",
        ),
        advice="restart the containers",
    ),
    "bridge in the subnet of another node": Fault(
        "bridge subnet",
        "cni0 has 10.5.249.1, which is not in our subnet",
        (
            "ip address flush dev cni0; ip address add 10.5.249.1/24 dev cni0",
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add 10.5.249.2/24 dev eth0; "
            + INSIDE
            + "ip route add default via 10.5.249.1",
        ),
        heal=(
            "ip address flush dev cni0; ip address add {own_gateway} dev cni0",
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add {container_address} dev eth0; "
            + INSIDE
            + "ip route add default via {own_ip}",
        ),
        advice="restart its containers",
    ),
    "container with the address of another node": Fault(
        "container addresses",
        "1 container with an address outside our subnet",
        (
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add 10.5.249.2/24 dev eth0; "
            + INSIDE
            + "ip route add default via {own_ip} dev eth0 onlink",
        ),
        heal=(
            INSIDE + "ip address flush dev eth0 scope global",
            INSIDE
            + "ip address add {container_address} dev eth0; "
            + INSIDE
            + "ip route add default via {own_ip}",
        ),
        advice="recreate these containers",
    ),
}
FAULTS = {
    name: replace(fault, peer_blind=ONE_OF_MANY * bool(fault.cuts)) for name, fault in IN_CONTAINERS.items()
}
