"""Wireguard nodes behind NATs of each kind find each other, with the kernel's WireGuard and nftables."""

from __future__ import annotations

import itertools
import re
import shlex
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.backend import private_key_of
from flanneld.backends.wireguard.mesh import NAT_KEEPALIVE, name_of
from flanneld.backends.wireguard.rotation import SEARCH_KEEPALIVE
from flanneld.network.genetlink import SeenPeer, WireGuardDevices
from flanneld.subnet.etcd.keys import key_of
from tests.lab import Lab, Node, wait_for
from tests.lab.lab import NETWORK
from tests.lab.namespace import Namespace, batch
from tests.netns.test_seeing import answer, flannelctl
from tests.netns.wall_clock import WallClock

pytestmark = pytest.mark.needs_kernel("wireguard")

DEVICE = "flannel-wg"
GUIDE = Path(__file__).parents[2] / "docs" / "encryption.md"
#: Seconds in which all that can meet have met.
WITHIN = 30
PUBLIC, FULL_CONE, RESTRICTED, SYMMETRIC = "public", "full cone", "port-restricted", "symmetric"
#: What each kind of NAT does to UDP. Without the drop of what nobody asked for, a router would keep a
#: packet's ports for itself, and give the answer of the node behind it another one.
RULES = {
    FULL_CONE: ("iifname wan udp dport 51820 dnat to 192.168.1.2", "masquerade"),
    RESTRICTED: ("", "masquerade"),
    SYMMETRIC: ("", "masquerade fully-random"),
}
ETH_P_ALL = 3


class Site:
    """A router with NAT, and the nodes behind it. All sites have the same private addresses."""

    def __init__(self, lab: Lab, number: int, kind: str) -> None:
        self.router = Namespace(f"{lab.name}-r{number}")
        self.kind = kind
        self._hosts = itertools.count(2)
        batch(f"netns add {self.router.name}")
        self.router.sysctl("net/ipv4/ip_forward", 1)
        self.router.ip(
            "link set lo up",
            f"link add wan type veth peer name r{number} netns {lab.switch.name}",
            f"address add 198.18.0.{100 + number}/24 dev wan",
            "link set wan up",
            "link add lan type bridge",
            "address add 192.168.1.1/24 dev lan",
            "link set lan up",
        )
        lab.switch.ip(f"link set r{number} master br0 up")
        mapped, source = RULES[kind]
        self.router.run(
            "nft", "-f", "-",
            stdin=f"""
                table ip nat {{
                    chain pre {{ type nat hook prerouting priority -100; {mapped}; }}
                    chain post {{ type nat hook postrouting priority 100; oifname wan {source}; }}
                    chain own {{ type filter hook input priority 0; iifname wan meta l4proto udp drop; }}
                }}""",
        )  # fmt: skip

    def reboot(self) -> None:
        """Forget all mappings."""
        # The kernel drops the masqueraded connections of an interface that goes down.
        self.router.ip("link set wan down", "link set wan up")

    def take(self, node: Node, address: str = "") -> None:
        """Move a node's uplink behind the router."""
        address = address or f"192.168.1.{next(self._hosts)}"
        node.namespace.ip("link del eth0")
        node.namespace.ip(
            f"link add eth0 type veth peer name {node.name} netns {self.router.name}",
            f"address add {address}/24 dev eth0",
            "link set eth0 up",
            "route add default via 192.168.1.1",
        )
        self.router.ip(f"link set {node.name} master lan up")


def start(node: Node, **environment: str) -> None:
    node.start(environment={"WIREGUARD_KEY_FILE": str(node.directory / "wgkey"), **environment})


class Network:
    """Nodes of a mesh, each with its kind of site."""

    def __init__(self, lab: Lab, kinds: Iterable[str], *, shared: int = 0, **config: object) -> None:
        """Start a node at each site, and ``shared`` more at the last one."""
        self.lab = lab
        lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "wireguard", "Mesh": True}, **config})
        self.sites: list[Site] = []
        self.kinds: dict[Node, str] = {}
        self.at: dict[Node, Site] = {}
        for number, kind in enumerate(kinds, 1):
            (node,) = lab.add_nodes()
            self.kinds[node] = kind
            if kind != PUBLIC:
                self.sites.append(Site(lab, number, kind))
                self._place(node, self.sites[-1])
        for _ in range(shared):
            (node,) = lab.add_nodes()
            self._place(node, self.sites[-1])
        for node in lab.nodes:
            start(node)
        for node in lab.nodes:
            node.wait_ready(60)

    def _place(self, node: Node, site: Site) -> None:
        site.take(node)
        self.kinds[node], self.at[node] = site.kind, site

    def pairs(self, nodes: Iterable[Node]) -> list[tuple[Node, Node]]:
        """The pairs that can meet."""
        unable = ({SYMMETRIC}, {SYMMETRIC, RESTRICTED})
        return [
            (one, other)
            for one, other in itertools.permutations(nodes, 2)
            if {self.kinds[one], self.kinds[other]} not in unable
            or (one in self.at and self.at[one] is self.at.get(other))
        ]

    def wait_until_met(self, *nodes: Node, within: float = WITHIN) -> None:
        waiting = self.pairs(nodes or self.lab.nodes)

        def left() -> bool:
            waiting[:] = [(one, other) for one, other in waiting if not reaches(one, other)]
            return not waiting

        try:
            wait_for(left, within)
        except AssertionError:
            named = [f"{one.name} ({self.kinds[one]}) -> {other.name}" for one, other in waiting]
            raise AssertionError("\n".join([*named, *(each.log() for each in waiting[0])])) from None


def overlay(node: Node) -> str:
    return node.subnet().removesuffix("/24")


def reaches(one: Node, other: Node) -> bool:
    return one.run("ping", "-n", "-c", "1", "-W", "1", overlay(other), check=False).returncode == 0


def sessions(node: Node) -> dict[str, SeenPeer]:
    """The peers of a node's device, by their subnet."""
    with node.namespace.entered():
        reader = WireGuardDevices()
    try:
        device = reader.read(DEVICE)
    finally:
        reader.close()
    assert device is not None
    return {str(net): peer for peer in device.peers for net in peer.allowed_ips}


@contextmanager
def nothing_in_the_clear(lab: Lab) -> Iterator[None]:
    """See every packet on the switch; none has an address of the network in its outer header."""
    with lab.switch.entered():
        seen = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
    with seen:
        seen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        seen.setblocking(False)
        yield
        packets = 0
        while True:
            try:
                data = seen.recv(64)
            except BlockingIOError:
                break
            packets += 1
            if data[:1] and data[0] >> 4 == 4:
                assert bytes((10, 5)) not in (data[12:14], data[16:18]), data.hex()
        assert packets


@pytest.fixture(scope="module")
def small() -> Iterator[Network]:
    """A public node, and two sites of one private address behind NATs that only let answers in."""
    with Lab() as lab, nothing_in_the_clear(lab):
        network = Network(lab, [PUBLIC, RESTRICTED, RESTRICTED])
        network.wait_until_met()
        yield network


def test_nodes_behind_two_nats_talk_directly_after_a_cold_start(small: Network) -> None:
    _, one, other = small.lab.nodes
    found = sessions(one)[other.subnet()]
    assert found.endpoint is not None
    assert str(found.endpoint[0]) == "198.18.0.103"


def test_endpoints_are_in_no_lease(small: Network) -> None:
    leases = small.lab.etcd.leases()
    assert {str(each["PublicIP"]) for each in leases.values()} == {"198.18.0.1", "192.168.1.2"}
    assert all(set(each["BackendData"]) == {"PublicKey", "Port"} for each in leases.values())


def machine_restart(node: Node) -> None:
    """Start a node as after a reboot: its device and so all its sessions are gone."""
    node.stop()
    node.namespace.ip(f"link del {DEVICE}")
    start(node)
    node.wait_ready(60)


@pytest.mark.long
def test_all_pairs_that_can_meet_meet_again_after_each_upset() -> None:
    """Cold start, restart of each machine, reboot of each NAT, death of a public node."""
    with Lab() as lab, nothing_in_the_clear(lab):
        network = Network(lab, [PUBLIC, PUBLIC, FULL_CONE, SYMMETRIC, RESTRICTED, RESTRICTED], shared=1)
        network.wait_until_met()
        for node in lab.nodes:
            machine_restart(node)
            network.wait_until_met()
        for site in network.sites:
            site.reboot()
            network.wait_until_met()
        for node in lab.nodes[1:3]:
            node.stop()
            start(node)
            node.wait_ready(60)
            network.wait_until_met()
        dead, *rest = lab.nodes
        dead.kill()
        dead.namespace.ip("link set eth0 down")
        network.wait_until_met(*rest)


@pytest.mark.long
def test_node_behind_a_symmetric_nat_says_so_and_meets_those_that_can_be_reached() -> None:
    with Lab() as lab:
        network = Network(lab, [PUBLIC, PUBLIC, FULL_CONE, SYMMETRIC, RESTRICTED])
        network.wait_until_met()
        _, _, _, node, other = lab.nodes

        def conditions() -> dict[str, Any]:
            found = answer(node, "status")["health"]["conditions"]
            return {each["part"]: each["problem"] for each in found}

        wait_for(lambda: "forward UDP port 51820" in conditions().get("mesh", ""), 90, "the condition")
        assert not reaches(node, other)


def test_restart_of_the_daemon_keeps_sessions_of_nodes_behind_nats(small: Network) -> None:
    _, node, peer = small.lab.nodes
    before = sessions(node)[peer.subnet()]
    node.stop()
    start(node)
    node.wait_ready(60)
    assert reaches(node, peer)
    after = sessions(node)[peer.subnet()]
    assert (after.endpoint, after.last_handshake) == (before.endpoint, before.last_handshake)


@pytest.mark.parametrize("address", ["192.168.1.9", pytest.param("192.168.1.2", marks=pytest.mark.long)])
def test_node_that_moved_behind_another_nat_is_met_by_peers_whose_nats_let_only_answers_in(
    address: str,
) -> None:
    """Also with the address that it had: then its lease says nothing, and data without an answer do."""
    with Lab() as lab, nothing_in_the_clear(lab):
        network = Network(lab, [PUBLIC, RESTRICTED, RESTRICTED, SYMMETRIC])
        network.wait_until_met()
        node = lab.nodes[1]
        there = Site(lab, 9, RESTRICTED)
        there.take(node, address)
        network.at[node] = there
        network.wait_until_met()


def announced(lab: Lab, node: Node) -> tuple[int, str]:
    """A node's endpoints in the store, and the number of the write."""
    key = (node.directory / "wgkey").read_bytes()
    name = name_of(keys.public_key(private_key_of(key)))
    path = f"endpoints/{key_of(name, lab.etcd.api)}"
    found: dict[str, Any] = wait_for(lambda: lab.etcd.get(path) or {}, 60, "the first announcement")
    return found["modifiedIndex"], found["value"]


def commands(places: dict[str, str]) -> list[list[str]]:
    """The commands of the guide to two sites, with the addresses and files of a test."""
    section = GUIDE.read_text().split("### Two sites")[1].split("\n### ")[0]
    for written, there in places.items():
        section = section.replace(written, there)
    found = re.findall(r"(?m)^    (flannel(?:d|ctl) .*)$", re.sub(r"\\\n +", "", section))
    return [shlex.split(each.partition(" >")[0], comments=True)[1:] for each in found]


def test_two_sites_with_one_forwarded_port_are_one_network_by_the_commands_of_the_guide() -> None:
    with Lab(has_etcd=False) as lab, nothing_in_the_clear(lab):
        first, other = lab.add_nodes(2)
        sites = [Site(lab, 1, FULL_CONE), Site(lab, 2, RESTRICTED)]
        for node, site in zip((first, other), sites, strict=True):
            site.take(node)
        sites[0].router.run("nft", "add rule ip nat pre iifname wan tcp dport 8888 dnat to 192.168.1.2")
        token = first.directory / "token"
        places = {
            "203.0.113.5": "198.18.0.101",
            "198.51.100.9": "198.18.0.102",
            "/var/lib/flannel": str(first.directory),
            "/etc/flannel/token": str(token),
        }
        serve, create, join, peers = commands(places)
        for node, flags in ((first, serve), (other, join)):
            key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
            node.start(*flags, f"--state-dir={node.directory}", environment=key)
            node.wait_ready(60)
            if node is first:
                token.touch(0o600)
                token.write_text(flannelctl(first, *create).stdout)
        wait_for(lambda: reaches(other, first) and reaches(first, other), WITHIN)
        listed = flannelctl(other, *peers).stdout
        assert first.subnet() in listed
        assert "198.18.0.101" in listed


def test_node_that_was_suspended_announces_itself_and_calls_its_peers_at_once(tmp_path: Path) -> None:
    """The NAT before it has forgotten it meanwhile, and so lets no packet of a peer in."""
    with Lab() as lab, nothing_in_the_clear(lab):
        network = Network(lab, [PUBLIC, RESTRICTED])
        public, node = lab.nodes
        clock = WallClock(tmp_path)
        node.stop()
        start(node, **clock.environment)
        node.wait_ready(60)
        network.wait_until_met()
        # Peers have told it where they see it.
        wait_for(lambda: "198.18.0.102:" in announced(lab, node)[1], 60, "the endpoint outside the NAT")
        wait_for(lambda: sessions(node)[public.subnet()].keepalive == NAT_KEEPALIVE, 60, "NAT's keepalive")
        before = announced(lab, node)
        network.sites[0].reboot()
        clock.put(0, slept=60)
        node.wait_for_log("This node has moved, or was suspended", 60)
        wait_for(lambda: sessions(node)[public.subnet()].keepalive == SEARCH_KEEPALIVE, 60, "the packets")
        wait_for(lambda: reaches(public, node), WITHIN)
        wait_for(lambda: announced(lab, node)[0] > before[0], 60, "the announcement")
        wait_for(lambda: announced(lab, node)[1] == before[1], 60, "the endpoint outside the NAT again")


def test_ping_goes_on_with_a_new_ipv6_prefix_on_the_uplink() -> None:
    ranges: dict[str, Any] = {"EnableIPv6": True, "IPv6Network": "fd05::/48", "IPv6SubnetLen": 64}
    with Lab() as lab:
        network = Network(lab, [PUBLIC, PUBLIC], **ranges)
        node, peer = lab.nodes
        network.wait_until_met()
        target = node.env()["FLANNEL_IPV6_SUBNET"].replace("::1/64", "::")

        def is_reached() -> bool:
            return peer.run("ping", "-n", "-c", "1", "-W", "1", target, check=False).returncode == 0

        wait_for(is_reached, WITHIN)
        new = "fd99::9"
        lab.switch.ip("address add fd99::ffff/64 dev br0")
        peer.namespace.ip("address add fd99::8/64 dev eth0")
        node.namespace.ip(f"address del {node.ipv6_address}/64 dev eth0", f"address add {new}/64 dev eth0")
        node.wait_for_log("This node has moved", 60)
        wait_for(lambda: f"[{new}]:51821" in announced(lab, node)[1], 60, "the new endpoint")
        wait_for(is_reached, WITHIN)
        wait_for(lambda: str(lab.etcd.leases()).count(new) == 1, 60, "the new address in the lease")


def test_ping_goes_on_in_the_same_session_after_the_uplinks_address_has_changed() -> None:
    with Lab() as lab, nothing_in_the_clear(lab):
        network = Network(lab, [PUBLIC, RESTRICTED])
        network.wait_until_met()
        public, node = lab.nodes
        before = sessions(node)[public.subnet()]
        with node.container().ping(public.container()) as ping:
            ping.wait_for_replies()
            node.namespace.ip(
                "address del 192.168.1.2/24 dev eth0",
                "address add 192.168.1.9/24 dev eth0",
                "route replace default via 192.168.1.1",
            )
            node.wait_for_log("This node has moved", 60)
            ping.wait_for_replies(deadline=WITHIN)
            ping.stop()
        after = sessions(node)[public.subnet()]
        shaken = after.last_handshake - before.last_handshake
        assert not shaken or shaken > 115
        wait_for(lambda: str(lab.etcd.leases()).count("192.168.1.9") == 1, 60, "the new address in the lease")
