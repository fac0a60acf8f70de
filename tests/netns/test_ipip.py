"""The ipip backend on a kernel that has it: one tunnel device, and a route to each peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab import Exit, Lab, Node, wait_for
from tests.netns.pair import DUAL_STACK
from tests.netns.stream import check_stream

pytestmark = pytest.mark.needs_kernel("ipip")

DEVICE = "flannel.ipip"
NETWORK = "10.5.0.0/16"


def base(node: Node) -> str:
    return node.subnet().removesuffix("/24")


def routes(node: Node) -> list[dict[str, Any]]:
    """What leads into the cluster's network, but for the containers of the node itself."""
    found = (row for row in node.routes() if row["dst"].startswith("10.5.") and row["dev"] != "cni0")
    return sorted(found, key=lambda row: str(row["dst"]))


def tunnel(peer: Node) -> dict[str, Any]:
    return {"dst": peer.subnet(), "gateway": peer.address, "dev": DEVICE, "flags": ["onlink"]}


def held(node: Node) -> dict[str, Any]:
    """What the kernel holds for the overlay, whichever number the device has."""
    rows = node.namespace.json("ip", "-j", "-d", "address", "show", "dev", DEVICE)
    return {"devices": [row | {"ifindex": 0} for row in rows], "routes": routes(node)}


def number(node: Node) -> int:
    """What the kernel gives to each new device anew."""
    return int((node.link(DEVICE) or {"ifindex": 0})["ifindex"])


def ends(node: Node) -> tuple[str, str] | None:
    """The device's own address and that of its peer, None while there is no device."""
    info = (node.link(DEVICE) or {}).get("linkinfo", {}).get("info_data")
    return (info["local"], info["remote"]) if info else None


def connect(nodes: list[Node]) -> None:
    for one, other in itertools.permutations(nodes, 2):
        one.container().wait_for_reply(other.container())


def restart(node: Node) -> None:
    node.start()
    node.wait_ready()
    node.wait_for_log("In sync with")


@pytest.fixture(scope="module")
def network() -> Iterator[Lab]:
    """Three nodes whose containers reach each other; each test mends what it broke."""
    with Lab() as lab:
        connect(lab.cluster({"Type": "ipip"}, nodes=3))
        yield lab


@pytest.fixture
def node(network: Lab) -> Iterator[Node]:
    """The node that suffers; it must be as good as before at the end."""
    node, *peers = network.nodes
    assert node.running
    before = held(node)
    yield node
    assert held(node) == before
    assert node.container().reaches(peers[0].container())


@pytest.fixture
def peer(network: Lab) -> Node:
    return network.nodes[1]


# ---- what there is --------------------------------------------------------------------------------


def test_one_device_and_a_route_to_each_peer_are_all_it_takes(network: Lab) -> None:
    for node in network.nodes:
        link = node.link(DEVICE) or {}
        assert link["linkinfo"]["info_kind"] == "ipip"
        assert {"UP", "LOWER_UP"} <= set(link["flags"])
        assert link["mtu"] == 1480
        info = link["linkinfo"]["info_data"]
        assert (info["local"], info["remote"], info["ttl"], info["pmtudisc"]) == (
            node.address,
            "any",
            0,
            False,
        )
        assert node.addresses(DEVICE) == [f"{base(node)}/32"]
        peers = sorted((each for each in network.nodes if each is not node), key=Node.subnet)
        assert routes(node) == [tunnel(each) for each in peers]
        assert network.etcd.leases()[node.subnet()] == {"PublicIP": node.address, "BackendType": "ipip"}
        assert node.env()["FLANNEL_MTU"] == "1480"


def test_the_device_that_comes_with_the_kernels_module_is_left_alone(network: Lab) -> None:
    for node in network.nodes:
        assert "UP" not in (node.link("tunl0") or {"flags": []})["flags"]
        assert node.addresses("tunl0") == []


def test_a_stream_arrives_as_it_was_sent(network: Lab) -> None:
    for one, other in itertools.permutations(network.nodes[:2]):
        check_stream(one.container(), other.container())


def test_a_packet_of_the_mtu_goes_undivided_and_a_larger_one_in_parts(node: Node, peer: Node) -> None:
    def ping(bytes_inside: int, *options: str, patience: str = "30") -> bool:
        size = str(bytes_inside - 28)  # the headers of IPv4 and ICMP
        words = ("ping", "-n", "-c", "1", "-W", patience, "-s", size, *options, peer.container().address)
        return node.container().run(*words, check=False).returncode == 0

    assert ping(1480, "-M", "do")
    assert not ping(1481, "-M", "do")
    assert ping(4000, "-M", "dont")


# ---- while it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "logged"),
    [
        pytest.param(["link del {device}"], "Restored link {device}", id="a deleted device"),
        pytest.param(
            ["link set {device} down", "link set {device} up"],
            "Restored route",
            id="a device set down and up",
        ),
        pytest.param(["link set {device} down"], "Restored link {device}", id="a device set down"),
        pytest.param(["link set {device} mtu 1400"], "{device} has mtu 1400, wanted 1480", id="another MTU"),
        pytest.param(
            ["link set {device} type ipip local 198.18.0.77 remote any"],
            "{device} has local 198.18.0.77, wanted 198.18.0.1",
            id="another local address",
        ),
        pytest.param(
            ["link del {device}", "link add {device} type bridge"],
            "{device} is a device of kind bridge",
            id="a device of another kind",
        ),
        pytest.param(
            ["route flush dev {device}", "address flush dev {device} scope global"],
            "Restored address",
            id="routes and address flushed",
        ),
        pytest.param(["route add 10.5.0.0/24 dev {device}"], "Removed ", id="one more route"),
    ],
)
def test_changes_of_the_tunnel_are_repaired(node: Node, commands: list[str], logged: str) -> None:
    if "Another program keeps changing the devices" in node.log():  # then repairs are counted, not named
        node.stop()
        restart(node)
    before, heard = held(node), len(node.log())
    with node.paused():
        node.namespace.ip(*(command.format(device=DEVICE) for command in commands))
        assert held(node) != before
    wait_for(lambda: held(node) == before, what="the tunnel to be as it was")
    wait_for(lambda: logged.format(device=DEVICE) in node.log()[heard:], what=f"the log to say {logged}")


@pytest.mark.parametrize("end", [Node.stop, Node.kill], ids=["SIGTERM", "SIGKILL"])
def test_a_restart_loses_no_packet(node: Node, peer: Node, end: Callable[[Node], Exit]) -> None:
    before = number(node)
    with (
        node.container().ping(peer.container()) as there,
        peer.container().ping(node.container()) as back,
    ):
        end(node)
        there.wait_for_replies()
        restart(node)
        there.wait_for_replies()
        back.wait_for_replies()
        assert (there.lost(), back.lost()) == (0, 0)
    assert number(node) == before


def test_a_new_address_of_the_uplink_moves_the_tunnel(network: Lab) -> None:
    node, peer = network.nodes[2], network.nodes[1]

    def move(address: str) -> None:
        old, node.address = node.address, address
        node.namespace.ip(
            f"address del {old}/24 dev eth0",
            f"address add {address}/24 dev eth0",
            "route add default via 198.18.0.254",
        )
        wait_for(lambda: tunnel(node) in routes(peer), what="the peer to follow")
        wait_for(lambda: ends(node) == (address, "any"), what="the tunnel to follow")
        node.container().wait_for_reply(peer.container())
        peer.container().wait_for_reply(node.container())

    home = node.address
    move("198.18.0.103")
    move(home)


# ---- what is there at the start -------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["local 198.18.0.77", "local 198.18.0.1 remote 198.18.0.2"])
def test_a_tunnel_with_other_ends_is_made_anew(node: Node, ends: str) -> None:
    node.stop()
    node.namespace.ip(f"link del {DEVICE}", f"link add {DEVICE} type ipip {ends}")
    restart(node)
    assert f"{DEVICE} has " in node.log()


def test_a_device_of_another_kind_is_left_to_its_owner(node: Node) -> None:
    node.stop()
    node.namespace.ip(f"link del {DEVICE}", f"link add {DEVICE} type bridge")
    before = node.kernel_state(DEVICE)
    node.start()
    assert node.daemon.wait(10).status == 1
    assert f"{DEVICE} is a device of kind bridge" in node.log()
    assert node.kernel_state(DEVICE) == before
    advice = f"ip link set {DEVICE} down; ip link set {DEVICE} name OTHER"
    assert f"give it another name: {advice}" in node.log()
    node.run("sh", "-ec", advice)
    restart(node)


def test_another_tunnel_between_the_same_ends_is_left_and_told_of(node: Node) -> None:
    node.stop()
    node.namespace.ip(f"link set {DEVICE} down", f"link set {DEVICE} name other")
    node.start()
    assert node.daemon.wait(10).status == 1
    assert "other serves the same ends; let the owner of other give it up" in node.log()
    node.namespace.ip("link del other")
    restart(node)


# ---- DirectRouting --------------------------------------------------------------------------------


def direct(peer: Node, device: str = "eth0") -> dict[str, Any]:
    return {
        "dst": peer.subnet(),
        "gateway": peer.address,
        "dev": device,
        "protocol": "70",
        "flags": ["onlink"],
    }


@pytest.fixture(scope="module")
def routed() -> Iterator[Lab]:
    """Two nodes on one link, and one behind a router, with DirectRouting."""
    with Lab() as lab:
        configure(lab, DirectRouting=True)
        for node in [*lab.add_nodes(2), *lab.add_nodes(1, routed=True)]:
            node.start()
        for node in lab.nodes:
            node.wait_ready()
        connect(lab.nodes)
        yield lab


def configure(lab: Lab, **options: Any) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "ipip", **options}})


def wait_for_ways(node: Node, *ways: dict[str, Any]) -> None:
    wanted = sorted(ways, key=lambda row: str(row["dst"]))
    wait_for(lambda: routes(node) == wanted, what=f"the routes of {node.name} to be {wanted}")


def test_only_a_peer_behind_a_router_is_reached_through_the_tunnel(routed: Lab) -> None:
    first, second, far = routed.nodes
    wait_for_ways(first, direct(second), tunnel(far))
    wait_for_ways(second, direct(first), tunnel(far))
    wait_for_ways(far, tunnel(first), tunnel(second))


def test_a_peer_that_moves_to_our_link_and_away_leaves_nothing_behind(routed: Lab) -> None:
    first, second, far = routed.nodes
    lease, home = routed.etcd.leases()[far.subnet()], far.address
    far.stop()
    far.address = "198.18.0.77"
    routed.etcd.put_lease(far.subnet(), {**lease, "PublicIP": far.address})
    wait_for_ways(first, direct(second), direct(far))
    far.address = home
    routed.etcd.put_lease(far.subnet(), lease)
    wait_for_ways(first, direct(second), tunnel(far))
    restart(far)


def test_a_link_that_is_shared_from_now_on_is_used(routed: Lab) -> None:
    first, second, far = routed.nodes
    first.namespace.ip(
        f"link add eth1 type veth peer name second netns {routed.switch.name}",
        "address add 198.19.0.100/24 dev eth1",
        "link set eth1 up",
    )
    routed.switch.ip("link set second master br1 up")
    wait_for_ways(first, direct(second), direct(far, "eth1"))
    first.container().wait_for_reply(far.container())
    first.namespace.ip("link del eth1")
    wait_for_ways(first, direct(second), tunnel(far))
    first.container().wait_for_reply(far.container())


def test_direct_routing_turned_off_and_on_leaves_no_route_of_the_other_kind(routed: Lab) -> None:
    first, second, far = routed.nodes
    first.stop()
    configure(routed)
    restart(first)
    wait_for_ways(first, tunnel(second), tunnel(far))
    first.container().wait_for_reply(second.container())
    first.stop()
    configure(routed, DirectRouting=True)
    restart(first)
    wait_for_ways(first, direct(second), tunnel(far))
    first.container().wait_for_reply(second.container())


# ---- the others -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", ["vxlan", *(pytest.param(other, marks=pytest.mark.long) for other in ("host-gw", "udp"))]
)
def test_the_other_backends_work_on_this_kernel_too(lab: Lab, other: str) -> None:
    nodes = lab.cluster({"Type": other})
    connect(nodes)
    check_stream(nodes[0].container(), nodes[1].container())


def test_dual_stack_network_is_served_in_ipv4(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "ipip"}, **DUAL_STACK)
    connect(nodes)
    for node, peer in itertools.permutations(nodes, 2):
        assert routes(node) == [tunnel(peer)]
        assert "FLANNEL_IPV6_SUBNET" in node.env()
        assert "ipip carries no IPv6: no routes lead" in node.log()
