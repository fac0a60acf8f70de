"""A lease around the store's own address cuts no node off; a store inside the network stays reached."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import Daemon, own_command
from tests.lab.etcd import PORT
from tests.netns.apis import both_apis
from tests.netns.kube import start as start_node
from tests.netns.kube import write_net_conf
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
families = pytest.mark.parametrize("family", [4, 6])


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
        # Without nodad an IPv6 address is tentative for a moment, and etcd cannot bind to it.
        lab.switch.ip(f"address add {address} dev lo{' nodad' if family == 6 else ''}")
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
@families
def test_lease_around_store_behind_default_gateway_is_not_followed(lab: Lab, family: int) -> None:
    both = (4, 6)[: 1 if family == 4 else 2]
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, STORE[family], **(DUAL_STACK if family == 6 else {}))
    lab.etcd.put_lease(key(AROUND, both), lease("vxlan"))
    node.wait_for_log(f"{STORE[family]} is an address of the store; move")
    hears_of_changes(lab, node, both)
    assert not led_to(node, AROUND[family])
    assert node.log().count("Unsafe lease") == 1


@families
def test_lease_in_connected_network_of_store_is_not_followed(lab: Lab, family: int) -> None:
    store, node_address = {4: ("10.77.0.9/16", "10.77.1.1/16"), 6: ("fd77:0:0:5::9/48", "fd77:0:0:1::1/48")}[
        family
    ]
    address = store.partition("/")[0]
    lab.switch.ip(f"address add {store} dev br0")
    listen_on(lab, lab.etcd.address, address)
    six = {"EnableIPv6": True, "IPv6Network": "fd77::/32", "IPv6SubnetMin": "fd77:0:100::"}
    four = {"Network": "10.0.0.0/8", "SubnetMin": "10.100.0.0"}
    lab.etcd.put_config({**four, **(six if family == 6 else {}), "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes()
    node.namespace.ip(f"address add {node_address} dev eth0")
    node.start(f"--etcd-endpoints={url(address)}", "--iface=eth0", f"--public-ip={node.address}")
    node.wait_ready()
    first, second = {
        4: ({4: "10.77.0.0/24"}, {4: "10.77.2.0/24"}),
        6: ({4: "10.88.0.0/24", 6: "fd77:0:0:5::/64"}, {4: "10.88.2.0/24", 6: "fd77:0:0:2::/64"}),
    }[family]
    lab.etcd.put_lease(key(first, tuple(first)), lease("host-gw"))
    node.wait_for_log(f"{address} is an address of the store; move")
    lab.etcd.put_lease(key(second, tuple(second)), lease("host-gw"))
    wait_until_led(node, second[family])
    assert not led_to(node, first[family])


def test_lease_around_unused_endpoint_is_not_followed(lab: Lab) -> None:
    """Nobody listens there; when somebody does, the nodes shall reach it."""
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address, STORE[4])
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
    hears_of_changes(lab, node)


def test_new_lease_avoids_addresses_of_store(lab: Lab) -> None:
    """Of 41 subnets one has no endpoint in it."""
    endpoints = [f"10.5.{number}.9" for number in range(100, 140)]
    lab.switch.ip(*(f"address add {each}/32 dev lo" for each in endpoints))
    ends = {"SubnetMin": "10.5.100.0", "SubnetMax": "10.5.140.0"}
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address, *endpoints, **ends)
    assert node.subnet() == "10.5.140.0/24"


def test_new_lease_avoids_addresses_of_stores_named_by_host(lab: Lab) -> None:
    """The names are looked up while the first requests are under way."""
    lookup = "lambda host, *_, **__: [(2, 1, 6, '', (str(host).strip(\"b'\").partition('.')[2], 2379))]"
    code = f"import socket; socket.getaddrinfo = {lookup}; from flanneld.__main__ import main; main()"
    hosts = [f"10.5.{number}.9" for number in range(100, 140)]
    lab.switch.ip(*(f"address add {each}/32 dev lo" for each in hosts))
    ends = {"SubnetMin": "10.5.100.0", "SubnetMax": "10.5.140.0"}
    lab.etcd.put_config({**CONFIG, **ends, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    endpoints = ",".join(f"http://store.{each}:{PORT}" for each in (lab.etcd.address, *hosts))
    node.start(f"--etcd-endpoints={endpoints}", command=[sys.executable, "-c", code])
    node.wait_ready()
    assert node.subnet() == "10.5.140.0/24"


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


@families
def test_restart_of_node_that_is_cut_off_finds_store_by_trial(
    lab: Lab, backend: dict[str, Any], family: int
) -> None:
    both = (4, 6)[: 1 if family == 4 else 2]
    lab.etcd.put_lease(key(AROUND, both), lease(backend["Type"]))
    move_into_network(lab)
    node = start(lab, backend, lab.etcd.address, **(DUAL_STACK if family == 6 else {}))
    wait_until_led(node, AROUND[family])
    node.stop()
    start_again(node, STORE[family])
    assert f"Store answers without that route: its address {STORE[family]} is outside" in node.log()
    node.wait_for_log(f"{STORE[family]} is an address of the store; move")
    hears_of_changes(lab, node, both, backend["Type"])
    assert not led_to(node, AROUND[family])


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
    node.wait_for_log(f"Store unreachable without that route, too, at its address {STORE[4]}")
    assert led_to(node, AROUND[4]) == before
    node.stop()
    node.start(f"--etcd-endpoints={url(STORE[4])}")
    node.wait_for_log("etcd does not answer")
    assert "trying without that route" not in node.log()
    assert led_to(node, AROUND[4]) == before


def test_route_of_host_to_the_same_subnet_as_a_lease_keeps_the_store_reached(lab: Lab) -> None:
    """The metric of ours would be lower than that of the host's."""
    move_into_network(lab)
    lab.etcd.put_config({**CONFIG, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    node.namespace.ip(f"route add {AROUND[4]} via 198.18.0.254 metric 100")
    start_again(node, STORE[4])
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    node.wait_for_log(f"{STORE[4]} is an address of the store; move")
    hears_of_changes(lab, node)
    assert not any(route["dev"] == "flannel.1" for route in led_to(node, AROUND[4]))


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
    one, other = lab.cluster(backend, **CONFIG)
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
        # On a busy machine a late answer calls for a trial, which must not change what is followed.
        assert "Unsafe" not in other.logs()
        assert "is outside the network" not in other.logs()


# ---- other stores, several networks, and the plan ---------------------------------------------------


def serve_nodes_at(lab: Lab, address: str) -> None:
    """Move the API server to an address. Its nodes stay the same."""
    lab.kube.stop()
    lab.kube.address = address
    lab.kube.start()


def start_in_kubernetes(lab: Lab, node: Node, *flags: str) -> None:
    start_node(lab, node, *flags)
    node.wait_ready()


@pytest.mark.parametrize("has_saved_nodes", [False, True], ids=["", "saved nodes"])
def test_restart_of_node_that_is_cut_off_from_api_server_finds_it_by_trial(
    lab: Lab, has_saved_nodes: bool
) -> None:
    (node,) = lab.add_nodes()
    saved = node.directory / "saved"
    saved.mkdir()
    flags = [f"--state-dir={saved}"] if has_saved_nodes else []
    write_net_conf(lab, {"Type": "vxlan"})
    lab.kube.add(node)
    lab.kube.control.put_peer("n77", AROUND[4], "198.18.0.77", "vxlan", {"VtepMAC": "02:00:00:00:00:77"})
    start_in_kubernetes(lab, node, *flags)
    wait_until_led(node, AROUND[4])
    if has_saved_nodes:
        nodes = saved / "kube-nodes.json"
        wait_for(lambda: nodes.exists() and "n77" in nodes.read_text(), what="the nodes to be saved")
    node.stop()
    move_into_network(lab)
    serve_nodes_at(lab, STORE[4])
    start_in_kubernetes(lab, node, *flags)
    node.wait_for_log(f"Store answers without that route: its address {STORE[4]} is outside", LOOK)
    lab.kube.control.put_peer("n56", HARMLESS[4], "198.18.0.56", "vxlan", {"VtepMAC": "02:00:00:00:00:56"})
    wait_until_led(node, HARMLESS[4])
    assert not led_to(node, AROUND[4])


def test_node_around_api_server_is_not_followed(lab: Lab) -> None:
    move_into_network(lab)
    (node,) = lab.add_nodes()
    write_net_conf(lab, {"Type": "vxlan"})
    serve_nodes_at(lab, STORE[4])
    lab.kube.add(node)
    start_in_kubernetes(lab, node)
    lab.kube.control.put_peer("n77", AROUND[4], "198.18.0.77", "vxlan", {"VtepMAC": "02:00:00:00:00:77"})
    node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
    assert not led_to(node, AROUND[4])


def test_lease_around_lease_server_is_not_followed(lab: Lab) -> None:
    move_into_network(lab)
    lab.etcd.put_config({**CONFIG, "Backend": {"Type": "vxlan"}})
    flags = [
        f"--listen={STORE[4]}:8888",
        f"--etcd-endpoints={lab.etcd.endpoint}",
        f"--etcd-api={lab.etcd.api}",
    ]
    daemon = Daemon(lab.switch, [*own_command(), *flags], lab.directory / "server.log")
    try:
        wait_for(lambda: "running as server" in daemon.log(), what="the server to listen")
        (node,) = lab.add_nodes()
        node.start(f"--remote={STORE[4]}:8888")
        node.wait_ready()
        lab.etcd.put_lease(AROUND[4], lease("vxlan"))
        node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
        hears_of_changes(lab, node)
    finally:
        daemon.end(signal.SIGKILL, 10)


def test_each_of_several_networks_protects_the_store_inside_it(lab: Lab) -> None:
    move_into_network(lab)
    lab.etcd.set("/coreos.com/network/blue/config", json.dumps({**CONFIG, "Backend": {"Type": "vxlan"}}))
    red = {"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan", "VNI": 6}}
    lab.etcd.set("/coreos.com/network/red/config", json.dumps(red))
    (node,) = lab.add_nodes()
    node.start(
        f"--etcd-endpoints={url(STORE[4])}",
        "--networks=blue,red",
        f"--subnet-dir={node.directory / 'networks'}",
    )
    node.wait_for_log("Ready: blue, red")
    for number, name in ((5, "blue"), (6, "red")):
        told = json.dumps(lease("vxlan", mac=f"02:00:00:00:00:0{number}"))
        lab.etcd.set(f"/coreos.com/network/{name}/subnets/10.{number}.77.0-24", told)
    node.wait_for_log(f"Unsafe lease {AROUND[4]}: {STORE[4]} is an address of the store")
    node.wait_for_route("10.6.77.0/24")
    assert not led_to(node, AROUND[4])
    assert node.log().count("Unsafe lease") == 1


def test_plan_has_no_route_around_the_store_and_tries_nothing(lab: Lab) -> None:
    move_into_network(lab)
    node = start(lab, {"Type": "vxlan"}, lab.etcd.address)
    lab.etcd.put_lease(AROUND[4], lease("vxlan"))
    wait_until_led(node, AROUND[4])
    node.stop()
    command = [*own_command(), f"--etcd-endpoints={url(STORE[4])}", f"--subnet-file={node.subnet_file}"]
    with node.changes() as changes:
        assert node.run(*command, "--plan", check=False).returncode == 1
        assert changes.seen() == []
    node.namespace.ip(f"route delete {AROUND[4]}")
    planned = node.run(*command, "--plan").stdout
    assert AROUND[4] not in planned
