"""The external interface goes, comes back, changes its address: the overlay follows."""

from __future__ import annotations

from typing import Any

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import DUAL_STACK, SOON, connect

#: A connection to etcd from an address that has gone has to time out first.
TIMEOUT = SOON
DEFAULT_ROUTE = "route add default via 198.18.0.254"

#: How the kernel makes temporary addresses: preferred for 5 s, valid for 8, the next one 3 s after the last.
ROTATION = {
    "use_tempaddr": 2,
    "dad_transmits": 0,
    "regen_max_retry": 1,
    "temp_prefered_lft": 5,
    "temp_valid_lft": 8,
    "max_desync_factor": 0,
}


def overlay(node: Node) -> dict[str, Any]:
    """What the kernel holds for containers, whichever numbers its devices have."""
    found: dict[str, Any] = node.kernel_state("flannel.1")["flannel.1"]
    (found["link"] or {}).pop("ifindex", None)
    routes = [route for route in node.routes("eth0") if route["dst"].startswith("10.5.")]
    return {**found, "direct routes": routes}


def check_overlay_follows(node: Node, peer: Node, before: dict[str, Any]) -> None:
    wait_for(lambda: overlay(node) == before, SOON, "the overlay to be as it was")
    connect(node, peer)


def test_an_uplink_goes_down_and_up(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    before = overlay(node)
    with node.paused():
        node.namespace.ip("link set eth0 down", "link set eth0 up", DEFAULT_ROUTE)
    check_overlay_follows(node, peer, before)


def test_an_uplink_stays_down_for_a_while(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"})
    connect(node, peer)
    before = overlay(node)
    node.namespace.ip("link set eth0 down")
    wait_for(lambda: "The routes are not in place" in node.log(), what="the daemon to fail in vain")
    node.namespace.ip("link set eth0 up", DEFAULT_ROUTE)
    check_overlay_follows(node, peer, before)


def test_an_uplink_is_replaced_by_another_of_its_name(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    before = overlay(node)
    lease = lab.etcd.leases()[node.subnet()]
    node.namespace.ip("link del eth0")
    wait_for(lambda: "The uplink eth0 is unusable" in node.log(), SOON, "the loss to be noticed")
    lab.plug_in(node)
    check_overlay_follows(node, peer, before)
    assert lab.etcd.leases()[node.subnet()] == lease


def check_peer_follows(lab: Lab, node: Node, peer: Node, before: dict[str, Any]) -> None:
    """The node has a new address: the store and the peer must know it, containers must not notice."""

    def told() -> bool:
        return bool(lab.etcd.leases()[node.subnet()]["PublicIP"] == node.address)

    wait_for(told, TIMEOUT, "the lease to tell")

    def remade() -> bool:
        tunnel = node.link("flannel.1")
        return bool(tunnel and tunnel["linkinfo"]["info_data"]["local"] == node.address)

    if before["link"]:
        wait_for(remade, SOON, "a device with the new address")
        assert (node.link("flannel.1") or {})["address"] == before["link"]["address"]
        wait_for(lambda: [entry["dst"] for entry in peer.fdb("flannel.1")] == [node.address], SOON)
    else:
        wait_for(
            lambda: [route["gateway"] for route in overlay(peer)["direct routes"]] == [node.address], SOON
        )
    connect(node, peer)
    assert node.running


def test_a_new_address_replaces_the_old_one(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    before = overlay(node)
    node.address = "198.18.0.101"
    node.namespace.ip(
        "address del 198.18.0.1/24 dev eth0", "address add 198.18.0.101/24 dev eth0", DEFAULT_ROUTE
    )
    check_peer_follows(lab, node, peer, before)


def test_a_new_address_comes_before_the_old_one_goes(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"})
    connect(node, peer)
    before = overlay(node)
    node.address = "198.18.0.101"
    node.namespace.sysctl("net/ipv4/conf/eth0/promote_secondaries", 1)
    node.namespace.ip("address add 198.18.0.101/24 dev eth0")
    node.namespace.ip("address del 198.18.0.1/24 dev eth0")
    check_peer_follows(lab, node, peer, before)


def test_a_new_address_comes_long_after_the_old_one_went(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    before = overlay(node)
    node.address = "198.18.0.101"
    node.namespace.ip("address del 198.18.0.1/24 dev eth0")
    wait_for(lambda: "The uplink eth0 is unusable" in node.log(), SOON, "the loss to be noticed")
    with node.changes() as changes:
        node.namespace.ip("address add 198.18.0.101/24 dev eth0")
        changes.during(0.3)
    node.namespace.ip(DEFAULT_ROUTE)
    check_peer_follows(lab, node, peer, before)


def test_a_new_ipv6_address_is_followed(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend, **DUAL_STACK)
    connect(node, peer)
    node.namespace.ip("address del fd00:18::1/64 dev eth0", "address add fd00:18::101/64 dev eth0")
    (lease,) = (key for key in lab.etcd.leases() if key.startswith(node.subnet()))

    def followed() -> bool:
        ways = [row["dst"] for row in peer.fdb("flannel-v6.1")]
        ways += [row["gateway"] for row in peer.routes("eth0", 6) if row["dst"] == node.subnet(6)]
        return ways == ["fd00:18::101"] == [lab.etcd.leases()[lease]["PublicIPv6"]]

    wait_for(followed, SOON, "the peer to follow")
    connect(node, peer)


def test_temporary_ipv6_addresses_that_come_and_go_are_nobodys_business(lab: Lab) -> None:
    """The kernel makes them beside the lasting one, a new one every few seconds here (RFC 8981)."""
    node, peer = lab.add_nodes(2)
    for name, value in ROTATION.items():
        node.namespace.sysctl(f"net/ipv6/conf/eth0/{name}", value)
    address = f"{node.ipv6_address}/64 dev eth0"
    node.namespace.ip(f"address del {address}", f"address add {address} mngtmpaddr")
    wait_for(lambda: temporary(node), what="a temporary address")
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}, **DUAL_STACK})
    for each in (node, peer):
        each.start()
    for each in (node, peer):
        each.wait_ready(60)
    one, other = node.container(), peer.container()
    one.wait_for_reply(other.addresses[6], 60)
    leases = lab.etcd.leases()
    first = wait_for(lambda: temporary(node), what="a temporary address")
    with one.ping(other.addresses[6]) as ping:
        wait_for(lambda: temporary(node) and temporary(node).isdisjoint(first), 60, "another address")
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert {lease["PublicIPv6"] for lease in leases.values()} == {node.ipv6_address, peer.ipv6_address}
    assert lab.etcd.leases() == leases
    assert "The uplink is now" not in node.log()


def temporary(node: Node) -> set[str]:
    rows = node.namespace.json("ip", "-j", "-6", "address", "show", "dev", "eth0", "temporary")
    return {info["local"] for row in rows for info in row["addr_info"] if info}
