"""From the flannel inside k3s to this daemon and back, under traffic. k3s itself does not run.

What its flannel leaves on a node is made by hand, after pkg/agent/flannel of k3s v1.35 and flannel v0.28.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.interop.mixed import own_part
from tests.kubernetes_objects import K3S_CNI_CONF, arguments, kustomize
from tests.lab import Lab, Node, wait_for
from tests.lab.kube_api.crowd import PREFIX
from tests.netns.cni_runtime import Runtime
from tests.netns.kube import SOON, notes, start

NETWORKS = {4: "10.42.0.0/16", 6: "fd42::/56"}
MULTICAST = {4: "224.0.0.0/4", 6: "ff00::/8"}
DEVICES = {4: "flannel.1", 6: "flannel-v6.1"}
NAMES = {
    4: ("backend-data", "public-ip", "FLANNEL_"),
    6: ("backend-v6-data", "public-ipv6", "FLANNEL_IPV6_"),
}
PROGRAMS = {4: "iptables", 6: "ip6tables"}
#: flannel's masquerade and forward rules, for ``iptables-restore``.
RULES = """\
*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s {subnet} -d {network} -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s {network} -d {subnet} -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s {network} -d {subnet} -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s {network} ! -d {multicast} -m comment --comment "flanneld masq" {masquerade}
-A FLANNEL-POSTRTG ! -s {network} -d {network} -m comment --comment "flanneld masq" {masquerade}
COMMIT
*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s {network} -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d {network} -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
"""
HOST_PORT = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}


def subnet(node: Node, family: int) -> str:
    return f"10.42.{node.number}.0/24" if family == 4 else f"fd42:0:0:{node.number}::/64"


def base(node: Node, family: int) -> str:
    return str(ip_network(subnet(node, family)).network_address)


def mac(node: Node, family: int) -> str:
    return f"02:42:00:00:{family:02x}:{node.number:02x}"


class K3sNode:
    """A node on which k3s's own flannel has run with vxlan, and then ended with its k3s.

    ``external`` is another address of the node, at which it is reached, as with ``flannel-external-ip``.
    """

    def __init__(self, lab: Lab, node: Node, families: tuple[int, ...], external: str = "") -> None:
        self.lab = lab
        self.node = node
        self.families = families
        self.public = {4: external or node.address, 6: node.ipv6_address}
        self.own_conflist = node.directory / "agent/etc/cni/net.d/10-flannel.conflist"
        self.own_conflist.parent.mkdir(parents=True)
        self.own_conflist.write_text(json.dumps(K3S_CNI_CONF))
        self.runtime = Runtime(node)
        self.runtime.use(K3S_CNI_CONF)
        announced = {"kube-subnet-manager": "true", "backend-type": "vxlan"}
        if external:
            node.namespace.ip(f"address add {external}/24 dev eth0")
            announced["public-ip-overwrite"] = external
        env = ""
        for family in families:
            self._make_device(family)
            self._make_rules(family)
            data, public, prefix = NAMES[family]
            announced |= {data: f'{{"VNI":1,"VtepMAC":"{mac(node, family)}"}}', public: self.public[family]}
            own = ip_network(subnet(node, family))
            env += f"{prefix}NETWORK={NETWORKS[family]}\n{prefix}SUBNET={own[1]}/{own.prefixlen}\n"
        node.subnet_file.write_text(f"{env}FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n")
        annotations = {PREFIX + name: value for name, value in announced.items()}
        annotations |= {"k3s.io/hostname": node.name, "k3s.io/internal-ip": node.address}
        lab.kube.add(node, *(subnet(node, family) for family in families), annotations=annotations)

    def _make_device(self, family: int) -> None:
        device = DEVICES[family]
        self.node.namespace.ip(
            f"link add {device} address {mac(self.node, family)} mtu 1450 type vxlan id 1 dev eth0"
            f" local {self.node.address if family == 4 else self.node.ipv6_address} dstport 8472 nolearning",
            f"address add {base(self.node, family)} dev {device}",
            f"link set {device} up",
        )

    def _make_rules(self, family: int) -> None:
        rules = RULES.format(
            network=NETWORKS[family],
            subnet=subnet(self.node, family),
            multicast=MULTICAST[family],
            masquerade="-j MASQUERADE --random-fully",
        )
        self.node.namespace.run(f"{PROGRAMS[family]}-restore", "--noflush", stdin=rules)

    def know(self, peer: K3sNode) -> None:
        """Make what leads to a peer."""
        for family in self.families:
            device, gateway, vtep = DEVICES[family], base(peer.node, family), mac(peer.node, family)
            self.node.namespace.ip(
                f"neighbor add {gateway} lladdr {vtep} dev {device} nud permanent",
                f"route add {subnet(peer.node, family)} via {gateway} dev {device} onlink",
            )
            where = ("dev", device, "dst", peer.public[family], "self", "permanent")
            self.node.run("bridge", "fdb", "add", vtep, *where)

    def start_daemon(self, flags: list[str]) -> dict[str, Any]:
        """Start it with the DaemonSet's flags and this node's files; return its CNI configuration."""
        conf = self.node.directory / "net.d/10-flannel.conflist"
        template = self.node.directory / "cni-conf.json"
        flannel, *others = K3S_CNI_CONF["plugins"]
        ipam = {"ipam": {"dataDir": str(self.runtime.reservations)}}
        template.write_text(json.dumps(K3S_CNI_CONF | {"plugins": [flannel | ipam, *others]}))
        own = [f"--cni-conf={conf}", f"--cni-template={template}", "--cni-bin=/usr/lib/cni"]
        start(self.lab, self.node, *flags, *own)
        self.node.wait_ready()
        self.node.wait_for_log("In sync with 1 peer")
        wait_for(conf.exists, SOON, "the CNI configuration")
        written: dict[str, Any] = json.loads(conf.read_text())
        return written

    def state(self) -> tuple[dict[str, Any], dict[str, str], list[str]]:
        """Devices, routes, neighbors, subnet.env, annotations and rules; none of them may change."""
        rules = [
            line
            for family in self.families
            for line in self.node.run(f"{PROGRAMS[family]}-save").stdout.splitlines()
            if "FLANNEL" in line
        ]
        return own_part(self.node), notes(self.lab, self.node), rules

    def host_ports(self) -> list[str]:
        rules = self.node.run("iptables-save", "-t", "nat").stdout.splitlines()
        return [line for line in rules if "--to-destination" in line]


def write_net_conf(lab: Lab, families: tuple[int, ...]) -> None:
    """Write the network config of k3s, which has all keys, whichever families are enabled."""
    net_conf = {
        "Network": NETWORKS[4],
        "EnableIPv6": 6 in families,
        "EnableIPv4": True,
        "IPv6Network": NETWORKS[6] if 6 in families else "::/0",
        "Backend": {"Type": "vxlan"},
    }
    (lab.directory / "net-conf.json").write_text(json.dumps(net_conf))


@pytest.mark.parametrize("families", [(4,), (4, 6)], ids=["ipv4", "dual-stack"])
def test_nodes_leave_the_flannel_of_k3s_and_return_without_loss(
    lab: Lab, families: tuple[int, ...], tmp_path: Path
) -> None:
    flags = arguments(kustomize("dist/k3s", tmp_path))
    write_net_conf(lab, families)
    first, second = lab.add_nodes(2)
    moved, other = nodes = [
        K3sNode(lab, first, families),
        K3sNode(lab, second, families, external="198.18.0.102"),
    ]
    moved.know(other)
    other.know(moved)
    runtime = moved.runtime
    old = runtime.add(1, portMappings=[HOST_PORT])
    kept, far = runtime.add(2), other.runtime.add(1)
    assert moved.host_ports()
    before = [each.state() for each in nodes]
    with ExitStack() as stack:
        pings = [stack.enter_context(kept.ping(far.addresses[family])) for family in families]
        for each, state in zip(nodes, before, strict=True):
            each.runtime.use(each.start_daemon(flags))
            assert each.state() == state
        runtime.delete(1)
        assert moved.host_ports() == []
        new = runtime.add(3)
        for family in families:
            new.wait_for_reply(far.addresses[family])
            new.wait_for_reply(kept.addresses[family])
        reserved = {*kept.addresses.values(), *new.addresses.values()}
        assert set(runtime.reserved()) == reserved
        assert reserved.isdisjoint(old.addresses.values())

        # Back: the daemon leaves all to the flannel of k3s, and pods come by its configuration again.
        for each, state in zip(nodes, before, strict=True):
            each.node.stop()
            assert each.state() == state
            each.runtime.use(json.loads(each.own_conflist.read_text()))
        for ping in pings:
            ping.wait_for_replies()
        assert [ping.lost() for ping in pings] == [0] * len(pings)
    runtime.delete(2)
    newest = runtime.add(4)
    newest.wait_for_reply(far)
    assert set(runtime.reserved()) == {*new.addresses.values(), *newest.addresses.values()}
