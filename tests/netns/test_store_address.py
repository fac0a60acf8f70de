"""A lease around the store's own address cuts no node off; a store inside the network stays reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import PORT
from tests.netns.apis import both_apis
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_host_networks import key, lease, led_to, wait_until_led

#: Addresses of etcd inside the networks, behind the nodes' default gateways.
STORE = {4: "10.5.77.9", 6: "fc00:5:0:77::9"}
#: A lease around them, and a harmless one.
AROUND = {4: "10.5.77.0/24", 6: "fc00:5:0:77::/64"}
HARMLESS = {4: "10.5.56.0/24", 6: "fc00:5:0:56::/64"}
#: No node gets a subnet below.
CONFIG: dict[str, Any] = {
    "Network": "10.5.0.0/16",
    "SubnetMin": "10.5.100.0",
    "IPv6SubnetMin": "fc00:5:0:100::",
}
#: Seconds between two looks at the host, and more: only then a lost store is noticed.
LOOK = 45.0


def url(address: str) -> str:
    return f"http://[{address}]:{PORT}" if ":" in address else f"http://{address}:{PORT}"


def listen_on(lab: Lab, *addresses: str) -> None:
    """Have etcd listen on just these addresses."""
    lab.etcd.stop()
    urls = ",".join(map(url, addresses))
    lab.etcd.launch(f"--listen-client-urls={urls}")
    for address in addresses:
        health = ("curl", "-s", f"{url(address)}/health")
        wait_for(lambda ask=health: "true" in lab.switch.run(*ask, check=False).stdout, 30)  # type: ignore[misc]


def move_into_network(lab: Lab) -> None:
    """Have etcd listen on addresses inside the networks as well."""
    for family, address in STORE.items():
        lab.switch.ip(f"address add {address}/{32 if family == 4 else 128} dev lo")
    listen_on(lab, lab.etcd.address, *STORE.values())


def start(lab: Lab, backend: dict[str, Any], *endpoints: str, **config: Any) -> Node:
    lab.etcd.put_config({**CONFIG, "Backend": backend, **config})
    (node,) = lab.add_nodes()
    start_again(node, *endpoints)
    return node


def start_again(node: Node, *endpoints: str) -> None:
    node.start(f"--etcd-endpoints={','.join(map(url, endpoints))}")
    node.wait_ready()
    node.wait_for_log("In sync with")


def hears_of_changes(lab: Lab, node: Node, families: tuple[int, ...] = (4,), backend: str = "vxlan") -> None:
    """See that the node follows a new lease and forgets it: it reaches the store."""
    lab.etcd.put_lease(key(HARMLESS, families), lease(backend, mac="02:00:00:00:00:78"))
    wait_until_led(node, *(HARMLESS[family] for family in families))
    lab.etcd.delete_lease(key(HARMLESS, families))
    wait_for(lambda: not led_to(node, HARMLESS[4]), what="the ways to go")


@both_apis
@pytest.mark.parametrize("families", [(4,), (4, 6)], ids=["IPv4", "dual stack"])
def test_lease_around_store_behind_default_gateway_is_not_followed(
    lab: Lab, families: tuple[int, ...]
) -> None:
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, STORE[families[-1]], **(DUAL_STACK if 6 in families else {}))
    lab.etcd.put_lease(key(AROUND, families), lease("vxlan"))
    node.wait_for_log(f"{STORE[families[-1]]} is an address of the store; move")
    hears_of_changes(lab, node, families)
    assert not led_to(node, AROUND[families[-1]])
    assert node.log().count("Unsafe lease") == 1


def test_lease_in_connected_network_of_store_is_not_followed(lab: Lab) -> None:
    lab.switch.ip("address add 10.77.0.9/16 dev br0")
    listen_on(lab, lab.etcd.address, "10.77.0.9")
    lab.etcd.put_config({"Network": "10.0.0.0/8", "SubnetMin": "10.100.0.0", "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes()
    node.namespace.ip("address add 10.77.1.1/16 dev eth0")
    node.start(f"--etcd-endpoints={url('10.77.0.9')}")
    node.wait_ready()
    lab.etcd.put_lease("10.77.0.0/24", lease("host-gw"))
    node.wait_for_log("Unsafe lease 10.77.0.0/24: 10.77.0.9 is an address of the store")
    lab.etcd.put_lease("10.77.2.0/24", lease("host-gw"))
    wait_until_led(node, "10.77.2.0/24")
    assert not led_to(node, "10.77.0.0/24")


def test_lease_around_unused_endpoint_is_not_followed(lab: Lab) -> None:
    """Nobody listens there; when somebody does, the nodes shall reach it."""
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address, STORE[4])
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
    hears_of_changes(lab, node)


def test_new_lease_avoids_address_of_store(lab: Lab) -> None:
    move_into_network(lab)
    ends = {"SubnetMin": "10.5.77.0", "SubnetMax": "10.5.78.0"}
    node = start(lab, {"Type": "vxlan"}, STORE[4], **ends)
    assert node.subnet() == "10.5.78.0/24"


def test_route_of_host_to_store_keeps_lease_around_it(lab: Lab) -> None:
    """Its route has precedence over the lease's, so nothing is lost."""
    move_into_network(lab)
    lab.etcd.put_config({**CONFIG, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    node.namespace.ip(f"route add {STORE[4]} via 198.18.0.254")
    start_again(node, STORE[4])
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    wait_until_led(node, AROUND[4])
    hears_of_changes(lab, node)


@pytest.mark.parametrize("backend", [{"Type": "vxlan"}, {"Type": "host-gw"}], ids=["vxlan", "host-gw"])
def test_restart_of_node_that_is_cut_off_finds_store_by_trial(lab: Lab, backend: dict[str, Any]) -> None:
    lab.etcd.put_lease(AROUND[4], lease(backend["Type"]))
    move_into_network(lab)
    node = start(lab, backend, lab.etcd.address)
    wait_until_led(node, AROUND[4])
    node.stop()
    start_again(node, STORE[4])
    assert f"Store answers without that route: its address {STORE[4]} is outside" in node.log()
    node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
    hears_of_changes(lab, node, backend=backend["Type"])
    assert not led_to(node, AROUND[4])


def test_node_that_is_cut_off_finds_store_by_trial(lab: Lab) -> None:
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address)
    wait_until_led(node, AROUND[4])
    node.stop()
    # The way to the second endpoint is flannel's now, and the first one is about to end.
    start_again(node, lab.etcd.address, STORE[4])
    wait_until_led(node, AROUND[4])
    listen_on(lab, STORE[4])
    node.wait_for_log(f"Store answers without that route: its address {STORE[4]} is outside", LOOK)
    assert not led_to(node, AROUND[4])
    assert node.log().count("trying without that route") == 1


def test_trial_without_answer_restores_the_route_and_is_not_repeated(lab: Lab) -> None:
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address)
    wait_until_led(node, AROUND[4])
    node.stop()
    before = led_to(node, AROUND[4])
    lab.etcd.stop()
    node.start(f"--etcd-endpoints={url(STORE[4])}")
    node.wait_for_log(f"Store unreachable without that route, too: its address is {STORE[4]}")
    assert led_to(node, AROUND[4]) == before
    node.stop()
    node.start(f"--etcd-endpoints={url(STORE[4])}")
    node.wait_for_log("Waiting for the network config")
    assert "trying without that route" not in node.log()
    assert led_to(node, AROUND[4]) == before


def test_saved_address_of_store_withdraws_route_of_another_daemon(lab: Lab) -> None:
    """A Go daemon ran in between, and followed the lease."""
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address, STORE[4])
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    node.wait_for_log(f"Unsafe lease {AROUND[4]}")
    node.stop()
    (saved,) = json.loads((node.directory / "flanneld.state").read_text())["store_addresses"]
    assert (saved["address"], saved["is_outside"]) == (STORE[4], True)
    node.namespace.ip(f"route add {AROUND[4]} via 10.5.77.0 dev flannel.1 onlink")
    start_again(node, lab.etcd.address, STORE[4])
    node.wait_for_no_route(AROUND[4])


@contextmanager
def store_in_overlay(lab: Lab, node: Node, address: str) -> Iterator[None]:
    """Have etcd answer at an overlay address of a node."""
    command = ("gateway", "start", f"--listen-addr={address}:{PORT}")
    with (lab.directory / "gateway.log").open("wb") as log:
        process = node.namespace.start("etcd", *command, f"--endpoints={lab.etcd.address}:{PORT}", output=log)
    try:
        yield
    finally:
        process.kill()


def test_store_inside_network_stays_reached(lab: Lab, backend: dict[str, Any]) -> None:
    one, other = lab.cluster(backend)
    connect(one, other)
    inside = one.env()["FLANNEL_SUBNET"].partition("/")[0]
    with store_in_overlay(lab, one, inside):
        for _ in range(2):
            other.stop()
            start_again(other, inside)
            connect(one, other)
            lab.etcd.put_lease(HARMLESS[4], lease(backend["Type"], mac="02:00:00:00:00:78"))
            wait_until_led(other, HARMLESS[4])
            lab.etcd.delete_lease(HARMLESS[4])
            other.wait_for_no_route(HARMLESS[4])
        assert "Unsafe" not in other.logs()
        assert "trying without" not in other.logs()
