"""The doctor finds nothing in a healthy network of any kind, idle or busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.faults.firewall import early
from tests.faults.world import (
    DIRECT,
    DUAL,
    HOST_GW,
    HOST_GW_DUAL,
    IPIP,
    IPSEC,
    LEGACY,
    MASQUERADE,
    NATIVE,
    NO_RULES,
    UDP,
    VXLAN,
    VXLAN_V3,
    WIREGUARD,
    Kind,
    World,
    kept_worlds,
    wait_until_healthy,
)
from tests.lab import Lab, Node
from tests.lab.kept import Kept
from tests.lab.lab import API
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_extension import HOST_GW as EXTENSION
from tests.netns.test_file_store import fleet
from tests.netns.test_remote import join, server
from tests.netns.test_seeing import flannelctl

#: Seconds between two pings of a busy network. ping(8) spins on a CPU below the kernel's tick of 4 ms.
_BUSY = 0.01
KINDS = {
    "vxlan": VXLAN,
    "vxlan, v3": VXLAN_V3,
    "vxlan, both families": DUAL,
    "vxlan, DirectRouting": DIRECT,
    "vxlan, iptables-legacy": LEGACY,
    "vxlan, nftables": NATIVE,
    "vxlan, masquerade": MASQUERADE,
    "vxlan, no rules": NO_RULES,
    "host-gw": HOST_GW,
    "host-gw, both families": HOST_GW_DUAL,
    "udp": UDP,
    "ipip": IPIP,
    "host-gw, v3": Kind({"Type": "host-gw"}, api="v3", flags=("--etcd-api=v3",)),
    "udp, v3": Kind({"Type": "udp"}, api="v3", flags=("--etcd-api=v3",)),
    "extension": Kind({"Type": "extension", **EXTENSION}),
    "wireguard": WIREGUARD,
    "wireguard, both families, v3": Kind(WIREGUARD.backend, DUAL_STACK, api="v3", flags=("--etcd-api=v3",)),
    "ipsec": IPSEC,
}
#: Kinds that take half a minute in the machine, and are much like another one.
SLOW = ("wireguard, both families, v3",)
#: What nodes drop that is sent to themselves. Without neighbour discovery there is no IPv6.
DROPPED = {
    "echoes": ("echo-request",),
    "answers, too": ("echo-request", "echo-reply", "time-exceeded", "destination-unreachable"),
}
#: Kinds in which nodes drop ICMP to themselves, too, and those of them that take long in the machine.
FILTERED = ("vxlan, both families", "host-gw, both families", "udp", "ipip", "wireguard")
SLOW_IF_FILTERED = ("ipip", "wireguard")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Kept[Kind, World]]:
    kept = kept_worlds()
    yield kept
    kept.close()


@pytest.mark.parametrize(
    "kind",
    [kind.marked(kind, name, *([pytest.mark.long] if name in SLOW else ())) for name, kind in KINDS.items()],
)
def test_doctor_finds_nothing_in_a_healthy_network_idle_or_busy(
    worlds: Kept[Kind, World], kind: Kind
) -> None:
    with worlds.get(kind) as world:
        assert findings(world) == []
        with ExitStack() as traffic:
            for node, other in zip(world.nodes, reversed(world.nodes), strict=True):
                traffic.enter_context(node.container().ping(other.container(), _BUSY))
            world.lab.etcd.write(100)
            assert findings(world) == []


def findings(world: World) -> list[str]:
    """Return what doctors find. Those who miss answers look twice: a busy host may not give them in time."""
    first = [(node, world.doctor(node)) for node in world.nodes]
    said = [
        world.doctor(node) if {each["check"] for each in seen.findings} == {"tunnel"} else seen
        for node, seen in first
    ]
    return [str(each) for each in said if str(each) != "status 0"]


def filtered(*names: str) -> list[Any]:
    return [
        KINDS[name].marked(KINDS[name], name, *([pytest.mark.long] if name in SLOW_IF_FILTERED else ()))
        for name in names
    ]


@pytest.mark.parametrize("kind", filtered(*FILTERED))
@pytest.mark.parametrize("dropped", DROPPED)
def test_doctor_finds_nothing_where_nodes_drop_icmp_and_pass_packets_on(
    worlds: Kept[Kind, World], kind: Kind, dropped: str
) -> None:
    with worlds.get(kind) as world:
        for node in world.nodes:
            for program, icmp in (("iptables-nft", "icmp"), ("ip6tables-nft", "icmpv6")):
                for each in DROPPED[dropped]:
                    node.run(program, "-A", "INPUT", "-p", icmp, f"--{icmp}-type", each, "-j", "DROP")
        assert findings(world) == []
        for node in world.nodes:
            for program in ("iptables-nft", "ip6tables-nft"):
                node.run(program, "-F", "INPUT")


#: A host that lets in little, runs Docker and a VPN, and filters by the reverse path; and its end.
STRICT_HOST = (
    "nft add table inet filter",
    "nft 'add chain inet filter input {{ type filter hook input priority 0; policy drop; }}'",
    *(
        f"nft 'add rule inet filter input {rule} accept'"
        for rule in (
            *("ct state established,related", "iif lo", "meta l4proto {{ icmp, ipv6-icmp, ipencap }}"),
            *("iifname flannel.1", "tcp dport 22", "udp dport {{ 8285, 8470, 8472 }}"),
        )
    ),
    "nft insert rule inet filter input iifname cni0 meta nfproto ipv4 drop",
    "iptables-nft -P FORWARD DROP; iptables-nft -N DOCKER; iptables-nft -N DOCKER-USER",
    "iptables-nft -A DOCKER-USER -j RETURN; iptables-nft -A FORWARD -j DOCKER-USER",
    "iptables-nft -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "iptables-nft -A FORWARD -o docker0 -j DOCKER; iptables-nft -A FORWARD -i docker0 -j ACCEPT",
    "iptables-nft -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
    "iptables-nft -t nat -A PREROUTING -p tcp -m addrtype --dst-type LOCAL -j DNAT --to 172.17.0.2",
    "iptables-nft -t mangle -A PREROUTING -i vpn0 -j MARK --set-mark 7",
    # The machine's kernel has no such table.
    "if nft add table bridge filter; then"
    " nft 'add chain bridge filter input {{ type filter hook input priority 0; }}';"
    " nft 'add rule bridge filter input iifname vnet0 drop'; fi",
    "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0",
    "ip link add vpn0 up type bridge; ip address add 10.200.0.2/24 dev vpn0",
    "ip route add 10.201.0.0/16 via 10.200.0.1; ip route add default via 10.200.0.1 table 100",
    "ip rule add to 203.0.113.0/24 lookup 100; ip rule add fwmark 7 lookup 100",
    "ip rule add not fwmark 51820 lookup 200; ip rule add lookup main suppress_prefixlength 0",
    "sysctl -w net.ipv4.conf.eth0.rp_filter=1",
)
STRICT_NO_MORE = (
    "nft delete table inet filter; nft delete table bridge filter || true",
    "iptables-nft -P FORWARD ACCEPT",
    "iptables-nft -t nat -D PREROUTING -p tcp -m addrtype --dst-type LOCAL -j DNAT --to 172.17.0.2",
    "iptables-nft -t mangle -D PREROUTING -i vpn0 -j MARK --set-mark 7",
    "iptables-nft -D FORWARD -j DOCKER-USER; iptables-nft -D FORWARD -i docker0 -j ACCEPT",
    "iptables-nft -D FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "iptables-nft -D FORWARD -o docker0 -j DOCKER; iptables-nft -F DOCKER-USER",
    "iptables-nft -X DOCKER; iptables-nft -X DOCKER-USER",
    "iptables-nft -t nat -D POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
    "ip rule del not fwmark 51820; ip rule del lookup main suppress_prefixlength 0",
    "ip rule del fwmark 7; ip rule del to 203.0.113.0/24; ip link del docker0; ip link del vpn0",
    "sysctl -w net.ipv4.conf.eth0.rp_filter=0",
)


@pytest.mark.parametrize("kind", filtered(*FILTERED[:-1], "vxlan, masquerade"))
def test_doctor_finds_nothing_on_a_strict_host_with_docker_and_a_vpn(
    worlds: Kept[Kind, World], kind: Kind
) -> None:
    with worlds.get(kind) as world:
        for node in world.nodes:
            world.run(*STRICT_HOST, on=node)
        world.wait_for_packets()
        assert findings(world) == []
        for node in world.nodes:
            world.run(*STRICT_NO_MORE, on=node)


def test_doctor_finds_nothing_where_each_container_must_keep_its_address(
    worlds: Kept[Kind, World],
) -> None:
    with worlds.get(VXLAN) as world:
        for number in (1, 2):
            address = world.node.container(number).address
            world.run(*early("ingress", f"veth{number}", f"ip saddr != {address} drop", f"c{number}"))
        world.wait_for_packets()
        assert findings(world) == []
        world.run("nft delete table netdev wall")


def from_server(lab: Lab, backend: dict[str, Any], stack: ExitStack) -> list[Node]:
    stack.enter_context(server(lab, API))
    return join(lab, backend, 2)


OTHERS: dict[str, Callable[[Lab, dict[str, Any], ExitStack], list[Node]]] = {
    "kubernetes": lambda lab, backend, _: lab.kube_cluster(backend),
    "file": lambda lab, backend, _: fleet(lab, backend, 2),
    "server": from_server,
}


@pytest.mark.parametrize("backend", ["vxlan", "host-gw"])
@pytest.mark.parametrize("store", OTHERS)
def test_doctor_finds_nothing_with_other_stores_idle_or_busy(lab: Lab, store: str, backend: str) -> None:
    with ExitStack() as stack:
        nodes = OTHERS[store](lab, {"Type": backend}, stack)
        connect(*nodes)
        for node in nodes:
            wait_until_healthy(node)
        assert_nothing_is_found(nodes)
        with nodes[0].container().ping(nodes[1].container(), _BUSY) as ping:
            ping.wait_for_replies()
            assert_nothing_is_found(nodes)


def test_doctor_finds_nothing_where_nodes_get_subnets_only(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "alloc"})
    for node in nodes:
        wait_until_healthy(node)
    assert_nothing_is_found(nodes)


def assert_nothing_is_found(nodes: Sequence[Node]) -> None:
    for node in nodes:
        done = flannelctl(node, "doctor", "--output=json")
        assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, []), done.stdout
