"""The WireGuard backend in whole clusters: who talks to whom, and that nothing leaves a node in the clear."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from flanneld.network.genetlink import WireGuardDevices
from flanneld.network.rtnetlink.netlink import NLM_F_REQUEST, NetlinkSocket, message
from tests.lab import Lab, Node, Ping, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.kube import HEALTH_PORT, readiness
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_seeing import answer, findings
from tests.netns.traffic import Sniffer, Stream

pytestmark = pytest.mark.needs_kernel("wireguard")

#: linux/netlink.h NETLINK_NETFILTER.
_NETFILTER = 12
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


def test_packets_for_no_node_are_answered_as_unreachable(network: Lab) -> None:
    node, *_ = network.nodes
    done = node.container().run("ping", "-n", "-c", "1", "-W", "2", "10.5.254.9", check=False)
    assert "Destination Host Unreachable" in done.stdout


def test_secrets_are_in_no_log(network: Lab) -> None:
    for node in network.nodes:
        assert WIREGUARD["PSK"] not in node.logs()
        assert (node.directory / "wgkey").read_text() not in node.logs()


def test_sessions_are_seen(network: Lab) -> None:
    node, *peers = network.nodes
    for peer in peers:
        connect(node, peer)
    # A change of the device has the table read at once, which else is every 30 s.
    node.namespace.ip(f"link set {DEVICE} txqueuelen 999")

    def sessions() -> dict[str, dict[str, Any]]:
        known = answer(node, "peers")["peers"]
        return {each["subnet"]: each for peer in known for each in peer.get("sessions", ())}

    wait_for(lambda: {each["state"] for each in sessions().values()} == {"established"}, 60, "sessions")
    found = sessions()
    assert set(found) == {peer.subnet() for peer in peers}
    for peer in peers:
        session = found[peer.subnet()]
        assert session["endpoint"] == f"{peer.address}:51820"
        assert session["handshake"] > 0
        assert min(session["rx_bytes"], session["tx_bytes"]) > 0
    hops = {hop["hop"]: hop["state"] for hop in answer(node, "trace", peers[0].container().address)["hops"]}
    assert hops == dict.fromkeys(("lease", "route", "device", "session", "uplink"), "ok")
    assert "handshakes" not in findings(node)


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


@pytest.mark.parametrize(
    "mode", ["separate", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("auto", "ipv4", "ipv6"))]
)
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


@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.long), ("--ip-masq",)], ids=["", "masquerading"]
)
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
        wait_for(lambda: (NETWORK, "unreachable") in routes(node), 10, "the guard to be back")
        seen = underlay.plain()  # With what left before the guard was back.
        assert underlay.plain() == seen


@pytest.mark.parametrize("former", ["vxlan", pytest.param("host-gw", marks=pytest.mark.long)])
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


# ---- behind NAT -----------------------------------------------------------------------------------


def translate(lab: Lab, publics: Mapping[Node, str], ports: Mapping[Node, int] | None = None) -> None:
    """Have the switch give nodes' packets public addresses, and pass on the replies.

    What comes for a port is forwarded to its node, also from another node behind the same address.
    """
    forwards = [
        f"ip daddr {publics[node]} udp dport {port} dnat to {node.address}:{port}"
        for node, port in (ports or {}).items()
    ]
    rules = (
        "flush ruleset",  # in one step: a packet between two would show the peer the node's own address
        "table ip nat {",
        "chain pre {",
        "type nat hook prerouting priority -100;",
        *forwards,
        "}",
        "chain post {",
        "type nat hook postrouting priority 100;",
        *(f"ip saddr {node.address} oifname != lo snat to {public}" for node, public in publics.items()),
        "}",
        "}",
    )
    lab.switch.run("nft", "-f", "-", stdin="\n".join(rules) + "\n")
    # linux/netfilter/nfnetlink_conntrack.h, IPCTNL_MSG_CT_DELETE: forget all connections.
    with lab.switch.entered(), closing(NetlinkSocket(protocol=_NETFILTER)) as kernel:
        assert list(kernel.write([message(1 << 8 | 2, NLM_F_REQUEST, bytes(4))])) == [[]]


def endpoint(node: Node, peer: Node) -> str:
    """Return the address at which a node calls another one now."""
    with node.namespace.entered(), closing(WireGuardDevices()) as devices:
        device = devices.read(DEVICE)
    assert device is not None
    subnets = {str(net): each.endpoint for each in device.peers for net in each.allowed_ips}
    found = subnets[peer.subnet()]
    return str(found[0]) if found else ""


def test_a_node_behind_nat_whose_address_changes_is_reached(lab: Lab) -> None:
    """It calls first, and nothing is forwarded to it: keepalive keeps the way open in both directions."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**WIREGUARD, "PersistentKeepaliveInterval": 1}})
    (peer,) = lab.add_nodes()
    (node,) = lab.add_nodes(routed=True)
    publics = ("198.18.0.201", "198.18.0.202")
    lab.switch.ip(*(f"address add {public}/24 dev br0" for public in publics))
    translate(lab, {node: publics[0]})
    start(peer)
    start(node, "--iface=eth0", f"--public-ip={publics[0]}")
    for each in (peer, node):
        each.wait_ready()
    connect(node, peer)
    connect(peer, node)
    assert lab.etcd.leases()[node.subnet()]["PublicIP"] == endpoint(peer, node) == publics[0]
    translate(lab, {node: publics[1]})
    connect(peer, node)
    connect(node, peer)
    assert endpoint(peer, node) == publics[1]
    assert "Restored peer" not in peer.log()


def test_three_sites_behind_nat_talk_and_one_may_move(lab: Lab) -> None:
    """Two nodes share a public address, each with a forwarded port; the last is reached since it calls.

    All pairs talk within 5 s, and again within 3 s after the move. It is the others that ping the node that
    moves: only its keepalive tells them where it is. The 5 s count once all leases are read: a handshake that
    comes before is lost, and is repeated after 5 to 5.33 s (REKEY_TIMEOUT, drivers/net/wireguard/messages.h).
    """
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**WIREGUARD, "PersistentKeepaliveInterval": 1}})
    nodes = lab.add_nodes(4, routed=True)
    one, neighbour, second, mobile = nodes
    shared, other, first_home, next_home = (f"198.18.0.{number}" for number in range(201, 205))
    for public in (shared, other, first_home, next_home):
        lab.switch.ip(f"address add {public}/24 dev br0")
    publics = {one: shared, neighbour: shared, second: other, mobile: first_home}
    ports = {one: 51820, neighbour: 51830, second: 51820}
    translate(lab, publics, ports)
    for node in nodes:
        start(node, "--iface=eth0", f"--public-ip={publics[node]}", f"--wireguard-port={ports.get(node, 0)}")
    for node in nodes:
        node.wait_ready(60)
    wait_for(lambda: all(len(peers_of(node)) == len(nodes) - 1 for node in nodes), 5, "all leases")
    pairs = list(itertools.combinations([node.container() for node in nodes], 2))
    with ExitStack() as stack:
        pings = [stack.enter_context(one.ping(other, 0.2)) for one, other in pairs]
        wait_for_replies(pings)
        outages = [ping.longest_outage() for ping in pings]
    assert max(outages) <= 5, outages
    with ExitStack() as stack:
        pings = [stack.enter_context(one.ping(other, 0.2)) for one, other in pairs]
        wait_for_replies(pings)
        assert len(lab.etcd.leases()) == len(nodes)
        assert lab.etcd.leases()[neighbour.subnet()]["BackendData"]["Port"] == ports[neighbour]
        translate(lab, {**publics, mobile: next_home}, ports)
        wait_for(lambda: {endpoint(node, mobile) for node in nodes[:3]} == {next_home}, 60, "the move")
        wait_for_replies(pings)
        outages = [ping.longest_outage() for ping in pings]
    assert max(outages) <= 3, outages
    assert len(lab.etcd.leases()) == len(nodes)


def wait_for_replies(pings: Iterable[Ping]) -> None:
    for ping in pings:
        ping.wait_for_replies(deadline=20)


# ---- keys -----------------------------------------------------------------------------------------


def test_a_peer_that_returns_with_another_key_is_reached(lab: Lab) -> None:
    node, peer = cluster(lab)
    former = lab.etcd.leases()[peer.subnet()]["BackendData"]["PublicKey"]
    peer.stop()
    (peer.directory / "wgkey").unlink()
    start(peer)
    peer.wait_ready()
    connect(node, peer)
    connect(peer, node)
    assert lab.etcd.leases()[peer.subnet()]["BackendData"]["PublicKey"] != former
    assert former not in {key for key, _ in peers_of(node)}


def test_a_machine_cloned_with_its_key_is_named(lab: Lab) -> None:
    """The clone takes the lease for its own, by the key. Which of both keeps it is the lease keeper's."""
    (node,) = cluster(lab, 1)
    (clone,) = lab.add_nodes()
    (clone.directory / "wgkey").write_text((node.directory / "wgkey").read_text())
    (clone.directory / "wgkey").chmod(0o400)
    start(clone)
    node.wait_for_log("on a clone remove copied key files", 60)


def test_two_nodes_with_one_key_are_named_by_a_third(lab: Lab) -> None:
    """As clones on Kubernetes, where each node has a lease of its own. The lower subnet has the key."""
    clone = "10.5.254.0/24"
    node, peer = cluster(lab, SubnetMax="10.5.200.0")
    lab.etcd.put_lease(clone, lab.etcd.leases()[peer.subnet()] | {"PublicIP": "198.18.0.201"})
    assert node.wait_for_log(f"{peer.subnet()} and {clone} both claim")
    known = {each["subnets"][0]: each for each in answer(node, "peers")["peers"]}
    assert {subnet: each["state"] for subnet, each in known.items()} == {
        peer.subnet(): "contested",
        clone: "contested",
    }
    advice = [each["advice"] for each in answer(node, "doctor")["findings"] if each["check"] == "contested"]
    assert ["remove the key file" in each for each in advice] == [True]  # a pair is one finding
    assert endpoint(node, peer) == peer.address
    connect(node, peer)
    assert "announces our own public key" in peer.log()
    lab.etcd.delete_lease(clone)
    wait_for(
        lambda: [each["state"] for each in answer(node, "peers")["peers"]] == ["in the kernel"],
        10,
        "one claim",
    )


@contextmanager
def clock_set_back(seconds: float) -> Iterator[None]:
    """Set back the clock of the whole machine."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() - seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


@pytest.mark.long
@pytest.mark.needs_kernel("own-clock")
def test_a_node_whose_clock_was_set_back_is_named_until_its_peer_calls(lab: Lab) -> None:
    """A peer takes no handshake with an earlier time than the last one from that node.

    The new device knows of no earlier time, so it takes the peer's. Only that of the node is refused.
    """
    node, peer = cluster(lab)
    lengths = itertools.count(900)

    def log() -> str:
        # A change of the device has the table read at once, which else is every 30 s.
        node.namespace.ip(f"link set {DEVICE} txqueuelen {next(lengths)}")
        return node.log()

    with clock_set_back(3600):
        before = (node.link(DEVICE) or {})["ifindex"]
        node.namespace.ip(f"link del {DEVICE}")
        wait_for(lambda: (node.link(DEVICE) or {}).get("ifindex", before) != before, 20, "another device")
        with node.container().ping(peer.container(), 1) as ping:
            wait_for(lambda: "No handshake via" in log(), 60, "the log to name the peer")
            (silence,) = (
                each for each in answer(node, "doctor")["findings"] if each["check"] == "handshakes"
            )
            assert "no clock was set back" in silence["advice"]
            assert answer(node, "peers")["peers"][0]["sessions"][0]["state"] == "silent"
            assert ping.replies() == set()
        connect(peer, node)
        connect(node, peer)
        wait_for(lambda: f"Handshakes via {DEVICE} succeed again" in log(), 60, "the log to say so")
        assert "handshakes" not in findings(node)
    connect(node, peer)


@pytest.mark.long
def test_a_peer_with_another_psk_is_named(lab: Lab) -> None:
    """A session lasts until it ends; the peers have never had one here."""
    other = {**WIREGUARD, "PSK": "YW5vdGhlciBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="}
    node, peer = lab.add_nodes(2)
    for each, backend in ((node, WIREGUARD), (peer, other)):
        lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
        start(each)
        each.wait_ready()
    node.wait_for_route(peer.subnet())
    with node.container().ping(peer.container(), 1):
        wait_for(lambda: "No handshake via" in node.log(), 300, "the log to name the peer")
        assert "handshakes" in findings(node)
        troubles = answer(node, "status")["health"]["conditions"]
    assert [each["part"] for each in troubles] == ["sessions"]


def peers_of(node: Node) -> set[tuple[str, str]]:
    """Return public key and allowed IPs of each peer in the kernel."""
    lines = node.run("wg", "show", DEVICE, "allowed-ips").stdout.splitlines()
    return {(line.split("\t")[0], line.split("\t")[1]) for line in lines}


# ---- the tools ------------------------------------------------------------------------------------


def tool(lab: Lab, node: Node, *flags: str) -> str:
    command = [*own_command(), f"--etcd-endpoints={lab.etcd.endpoint}", f"--subnet-file={node.subnet_file}"]
    return node.run(*command, *flags, variables={"WIREGUARD_KEY_FILE": f"{node.directory / 'wgkey'}"}).stdout


def test_plan_and_cleanup_know_what_there_is(lab: Lab) -> None:
    node, _ = cluster(lab)
    assert tool(lab, node, "--plan") == ""
    node.stop()
    node.namespace.ip(f"route del unreachable {NETWORK} metric 65535")
    planned = tool(lab, node, "--plan")
    assert f"ip route replace unreachable {NETWORK} proto 70 metric 65535" in planned
    for secret in (str(WIREGUARD["PSK"]), (node.directory / "wgkey").read_text()):
        assert secret not in planned
    assert DEVICE in tool(lab, node, "--cleanup")
    assert node.link(DEVICE) is None
    assert routes(node) == set()


# ---- past the tunnel ------------------------------------------------------------------------------


def test_a_route_past_the_tunnel_keeps_the_node_from_ready_and_stays(lab: Lab) -> None:
    """Half of a peer's subnet leaves the host by another program's route, which is more specific."""
    health = f"--healthz-port={HEALTH_PORT}"
    node, peer = cluster(lab, 2, health)
    half = peer.subnet().removesuffix("/24") + "/25"
    past = ("via", peer.address, "dev", "eth0")
    wait_for(lambda: readiness(node)[0] == 200, 20, "the node to be ready")
    node.namespace.ip(f"route add {half} {' '.join(past)}")
    wait_for(lambda: readiness(node)[0] == 503, 20, "the node not to be ready")
    assert f"ip route delete {half} {' '.join(past)}" in node.log()
    node.stop()
    start(node, health)
    wait_for(lambda: "Encryption bypassed" in node.log(), 20, "the route to be named")
    wait_for(
        lambda: (half, "eth0") in routes(node) and readiness(node)[0] == 503, 20, "the route to be there"
    )
    node.namespace.ip(f"route del {half}")
    wait_for(lambda: readiness(node)[0] == 200, 20, "the node to be ready again")
