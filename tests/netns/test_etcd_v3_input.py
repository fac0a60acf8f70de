"""What an etcd of v3 may look like from outside: old, closed, forgetful, and with keys of all kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab, Node, Proxy, wait_for
from tests.lab.etcd import PORT, PREFIX
from tests.netns.pair import DUAL_STACK, connect

HOST_GW = {"Type": "host-gw"}
CONFIG = {"Network": "10.5.0.0/16", "SubnetMin": "10.5.100.0", "Backend": HOST_GW}
SOON = 10.0


@pytest.fixture
def api() -> str:
    return "v3"


def put_peer(lab: Lab, key: str = "10.5.1.0-24", **public: str) -> None:
    value = {"PublicIP": "198.18.0.201", "PublicIPv6": None, "BackendType": "host-gw", **public}
    lab.etcd.v3.put(f"{PREFIX}/subnets/{key}", json.dumps(value))


def complaints(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if not line.startswith("I")]


def peers(node: Node, family: int) -> set[tuple[str, str]]:
    """The subnets of the peers, and where they are."""
    rows = node.routes("eth0", family)
    return {(row["dst"], row["gateway"]) for row in rows if row["dst"].startswith(("10.5.", "fc00:5:"))}


# ---- how it is reached ----------------------------------------------------------------------------


def test_a_gateway_that_is_switched_off_for_a_while_costs_no_packet_and_no_news(lab: Lab) -> None:
    first, second = lab.cluster(HOST_GW, SubnetMin="10.5.100.0")
    connect(first, second)
    with first.container().ping(second.container()) as ping:
        lab.etcd.stop()
        lab.etcd.start("--enable-grpc-gateway=false")
        first.wait_for_log("Watching", SOON)
        lab.etcd.restart()
        put_peer(lab)
        first.wait_for_route("10.5.1.0/24", 2 * SOON)
        ping.wait_for_replies()
        assert ping.lost() == 0


@pytest.mark.parametrize("root", ["/v3beta", pytest.param("/v3alpha", marks=pytest.mark.long)])
def test_the_paths_of_older_versions_serve_as_well(lab: Lab, root: str) -> None:
    lab.etcd.put_config(CONFIG)
    with Proxy(lab.switch, (lab.etcd.address, 2400), (lab.etcd.address, PORT), root=root) as proxy:
        (node,) = lab.add_nodes()
        node.start("-etcd-api=v3", f"-etcd-endpoints={proxy.url}")
        node.wait_ready(SOON)
        put_peer(lab)
        node.wait_for_route("10.5.1.0/24", SOON)
        assert complaints(node) == []


def test_a_login_that_etcd_has_forgotten_is_made_again(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    lab.etcd.require_login("flannel", "secret")
    (node,) = lab.add_nodes()
    node.start("-etcd-username=flannel", "-etcd-password=secret")
    node.wait_ready(SOON)
    node.wait_for_log("In sync with", SOON)
    lab.etcd.restart()  # It keeps the logins in its memory, and they are short-lived anyhow.
    lab.etcd.log_in("secret")
    put_peer(lab)
    node.wait_for_route("10.5.1.0/24", 2 * SOON)
    lab.etcd.put_lease(node.subnet(), lab.etcd.leases()[node.subnet()], ttl=5)
    wait_for(lambda: (lab.etcd.lease(node.subnet()) or {})["ttl"] > 80000, what="a renewal")
    assert not any("password" in line for line in complaints(node))


# ---- what it holds --------------------------------------------------------------------------------

V4_ONLY = ("10.5.1.0-24", {"PublicIP": "198.18.0.201"})
V6_ONLY = ("0.0.0.0-0&fc00:5:0:2::-64", {"PublicIP": "0.0.0.0", "PublicIPv6": "fd00:18::202"})
DUAL = ("10.5.3.0-24&fc00:5:0:3::-64", {"PublicIP": "198.18.0.203", "PublicIPv6": "fd00:18::203"})
OURS: dict[int, set[tuple[str, str]]] = {
    4: {("10.5.1.0/24", "198.18.0.201"), ("10.5.3.0/24", "198.18.0.203")},
    6: {("fc00:5:0:2::/64", "fd00:18::202"), ("fc00:5:0:3::/64", "fd00:18::203")},
}


@pytest.mark.parametrize(
    ("families", "config"),
    [
        pytest.param((4,), {}, id="IPv4"),
        pytest.param((4, 6), DUAL_STACK, id="dual stack"),
        pytest.param((6,), {**DUAL_STACK, "EnableIPv4": False}, id="IPv6"),
    ],
)
def test_single_and_dual_stack_peers_share_their_common_family(
    lab: Lab, families: tuple[int, ...], config: dict[str, Any]
) -> None:
    (node,) = lab.cluster(HOST_GW, nodes=1, SubnetMin="10.5.100.0", IPv6SubnetMin="fc00:5:0:100::", **config)
    for key, public in (V4_ONLY, V6_ONLY, DUAL):
        put_peer(lab, key, **public)
    wanted = {family: OURS[family] if family in families else set() for family in (4, 6)}
    wait_for(lambda: {family: peers(node, family) for family in (4, 6)} == wanted, SOON, f"{wanted}")
    for key, _ in (V4_ONLY, V6_ONLY, DUAL):
        lab.etcd.v3.delete(f"{PREFIX}/subnets/{key}")
    wait_for(lambda: not peers(node, 4) | peers(node, 6), SOON, "the peers to go")
    assert node.running
