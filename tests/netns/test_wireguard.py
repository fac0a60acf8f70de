"""The WireGuard backend in whole clusters: who talks to whom, and that nothing leaves a node in the clear."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.lab import NETWORK
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.traffic import Sniffer, Stream

pytestmark = pytest.mark.needs_kernel("wireguard")

DEVICE, DEVICE_V6 = "flannel-wg", "flannel-wg-v6"
WIREGUARD = {"Type": "wireguard", "PSK": "ZmxhbmVsZCBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="}


def start(node: Node, *flags: str) -> None:
    key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
    node.start(*flags, environment=key)


def cluster(
    lab: Lab, nodes: int = 2, *flags: str, backend: Mapping[str, Any] = WIREGUARD, **config: Any
) -> list[Node]:
    """Start nodes whose containers reach each other."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": dict(backend), **config})
    started = lab.add_nodes(nodes)
    for node in started:
        start(node, *flags)
    for node in started:
        node.wait_ready()
    for one, other in itertools.permutations(started, 2):
        connect(one, other)
    return started


def restart(node: Node) -> None:
    start(node)
    node.wait_ready()
    node.wait_for_log("In sync with")


def routes(node: Node, family: int = 4) -> set[tuple[str, str]]:
    """The type and device, and destination of each route into the network, but for that of the containers."""
    found = node.namespace.json("ip", "-j", "-d", f"-{family}", "route", "show", "table", "main")
    network = ("10.5.", "fc00:5:")
    return {
        (str(row["dst"]), str(row["type"] if row["type"] != "unicast" else row["dev"]))
        for row in found
        if str(row["dst"]).startswith(network) and row.get("dev") != "cni0" and "/" in str(row["dst"])
    }


@pytest.fixture(scope="module")
def network() -> Iterator[Lab]:
    """Three nodes whose containers reach each other."""
    with Lab() as lab:
        cluster(lab, 3)
        yield lab


# ---- what there is --------------------------------------------------------------------------------


def test_a_node_has_a_device_with_guard_and_routes(network: Lab) -> None:
    node, *peers = network.nodes
    base = node.subnet().removesuffix("/24")
    assert node.addresses(DEVICE) == [f"{base}/32"]
    assert (node.link(DEVICE) or {})["mtu"] == 1420
    assert node.env()["FLANNEL_MTU"] == "1420"
    assert routes(node) == {
        (NETWORK, "unreachable"),
        *((peer.subnet(), DEVICE) for peer in peers),
    }
    lease = network.etcd.leases()[node.subnet()]
    assert lease["BackendType"] == "wireguard"
    assert lease["BackendData"]["Port"] == 51820
    key_file = node.directory / "wgkey"
    assert key_file.stat().st_mode & 0o777 == 0o400
    assert len(key_file.read_bytes()) == 44


def test_what_is_for_no_node_is_answered_as_unreachable(network: Lab) -> None:
    node, *_ = network.nodes
    done = node.container().run("ping", "-n", "-c", "1", "-W", "2", "10.5.254.9", check=False)
    assert "Destination Host Unreachable" in done.stdout


def test_secrets_are_in_no_log(network: Lab) -> None:
    for node in network.nodes:
        assert WIREGUARD["PSK"] not in node.logs()
        assert (node.directory / "wgkey").read_text() not in node.logs()


@pytest.mark.parametrize("end", [Node.stop, Node.kill], ids=["SIGTERM", "SIGKILL"])
def test_a_restart_loses_no_packet(network: Lab, end: Any) -> None:
    node, peer, _ = network.nodes
    index = (node.link(DEVICE) or {})["ifindex"]
    with node.container().ping(peer.container()) as out, peer.container().ping(node.container()) as back:
        out.wait_for_replies()
        end(node)
        restart(node)
        out.wait_for_replies()
        back.wait_for_replies()
        assert (out.lost(), back.lost()) == (0, 0)
    assert (node.link(DEVICE) or {})["ifindex"] == index


@pytest.mark.parametrize(
    "damage",
    [
        f"ip link del {DEVICE}",
        f"ip link set {DEVICE} down",
        f"ip address flush dev {DEVICE}",
        f"ip route flush dev {DEVICE}",
        f"ip route del unreachable {NETWORK} metric 65535",
    ],
)
def test_damage_is_repaired(network: Lab, damage: str) -> None:
    node, *peers = network.nodes
    before = (routes(node), node.addresses(DEVICE))
    with node.paused():
        node.run(*damage.split())
        assert (routes(node), node.addresses(DEVICE)) != before or damage.startswith("ip link set")
    wait_for(lambda: (routes(node), node.addresses(DEVICE)) == before, 10, "all to be as it was")
    for peer in peers:
        node.container().wait_for_reply(peer.container())
        peer.container().wait_for_reply(node.container())


# ---- families and modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["separate", "auto", "ipv4", "ipv6"])
def test_both_families_work_in_each_mode(lab: Lab, mode: str) -> None:
    node, peer = cluster(lab, backend={**WIREGUARD, "Mode": mode}, **DUAL_STACK)
    separate = mode == "separate"
    assert bool(node.link(DEVICE_V6)) == separate
    assert routes(node, 6) == {
        ("fc00:5::/48", "unreachable"),
        (peer.subnet(6), DEVICE_V6 if separate else DEVICE),
    }


# ---- never in the clear ---------------------------------------------------------------------------


class Underlay:
    """Counts packets of containers that are readable on a node's external interface."""

    def __init__(self, node: Node, peer: Node, directory: Path) -> None:
        self.target = peer.container().address
        self._sniffer = Sniffer(node.namespace, "eth0")
        self._stream = Stream(node.container().namespace, self.target, directory / "stream.log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.stop()
        self._sniffer.close()

    def plain(self, seconds: float = 0.3) -> int:
        return len(self._sniffer.listen(seconds))


@pytest.mark.parametrize("flags", [(), ("--ip-masq",)], ids=["", "masquerading"])
def test_nothing_leaves_in_the_clear(lab: Lab, tmp_path: Path, flags: tuple[str, ...]) -> None:
    node, peer = cluster(lab, 2, *flags)
    with Underlay(node, peer, tmp_path) as underlay:
        assert underlay.plain() == 0
        node.kill()
        assert underlay.plain() == 0
        # Without the daemon nothing makes the device again, and the guard stays.
        node.namespace.ip(f"link del {DEVICE}")
        assert underlay.plain() == 0
        start(node, *flags)
        node.wait_ready()
        node.container().wait_for_reply(peer.container())
        assert underlay.plain() == 0
        lab.etcd.delete_lease(peer.subnet())
        node.wait_for_no_route(peer.subnet())
        assert underlay.plain() == 0
        # Without the guard it would: that is what the capture can see.
        with node.paused():
            node.run("ip", "route", "del", "unreachable", NETWORK, "metric", "65535")
            assert underlay.plain() > 0
        wait_for(lambda: underlay.plain(0.1) == underlay.plain(0.2), 10, "the guard to be back")


@pytest.mark.parametrize("former", ["vxlan", "host-gw"])
def test_switch_from_many_peers_in_the_clear_leaves_none_of_their_routes(
    lab: Lab, tmp_path: Path, former: str
) -> None:
    """Elsewhere so many removals are held back. Nodes that still run the former backend are not reached."""
    node, peer = lab.cluster({"Type": former})
    connect(node, peer)
    for number in range(200, 225):
        lease: dict[str, Any] = {"PublicIP": f"198.18.0.{number}", "BackendType": former}
        if former == "vxlan":
            lease["BackendData"] = {"VNI": 1, "VtepMAC": f"02:00:00:00:01:{number - 200:02x}"}
        lab.etcd.put_lease(f"10.5.{number}.0/24", lease)
    node.wait_for_route("10.5.224.0/24")
    node.stop()
    lab.etcd.put_config({"Network": NETWORK, "Backend": WIREGUARD})
    start(node)
    node.wait_ready()
    assert routes(node) == {(NETWORK, "unreachable")}
    with Underlay(node, peer, tmp_path) as underlay:
        assert underlay.plain() == 0
        peer.stop()
        start(peer)
        peer.wait_ready()
        connect(node, peer)
        connect(peer, node)
        assert underlay.plain() == 0
