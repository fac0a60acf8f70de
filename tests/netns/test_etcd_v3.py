"""Whole nodes with their leases in etcd's v3 API, where it differs from v2."""

from __future__ import annotations

import itertools
import json
import signal
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import PREFIX
from tests.netns.gateway import gateway, used_ports
from tests.netns.pair import DUAL_STACK, connect

IPV6_ONLY: dict[str, Any] = {**DUAL_STACK, "EnableIPv4": False}
#: etcd takes so many operations in one transaction.
MOST = 100


@pytest.fixture
def api() -> str:
    return "v3"


def peer_routes(node: Node) -> set[str]:
    return {route["dst"] for route in node.routes() if route["dst"].startswith("10.")}


def host_gw(number: int) -> str:
    return json.dumps({"PublicIP": f"198.18.0.{number}", "PublicIPv6": None, "BackendType": "host-gw"})


def subnets(first: int, count: int) -> list[str]:
    """So many /24 from 10.<first>.0.0 on."""
    return [f"10.{first + number // 256}.{number % 256}.0/24" for number in range(count)]


def key(subnet: str) -> str:
    return f"{PREFIX}/subnets/{subnet.replace('/', '-')}"


def big_cluster(lab: Lab) -> Node:
    (node,) = lab.cluster(
        {"Type": "host-gw"}, nodes=1, Network="10.0.0.0/8", SubnetLen=24, SubnetMin="10.90.0.0"
    )
    return node


def test_keys_that_are_written_back_to_back_lose_nothing(lab: Lab) -> None:
    node = big_cluster(lab)
    wanted = subnets(20, 200)
    for subnet in wanted:
        lab.etcd.v3.put(key(subnet), host_gw(200))
    wait_for(lambda: peer_routes(node) == set(wanted), 10, "200 routes")


def test_a_thousand_leases_that_go_at_once_are_all_gone(lab: Lab) -> None:
    node = big_cluster(lab)
    wanted = subnets(20, 1000)
    for begin in range(0, len(wanted), MOST):
        lab.etcd.v3.put_all({key(subnet): host_gw(200) for subnet in wanted[begin : begin + MOST]})
    wait_for(lambda: len(peer_routes(node)) == len(wanted), 20, "1000 routes")
    # Not our own, 10.90 and so on.
    lab.etcd.v3.delete_span(f"{PREFIX}/subnets/10.2", f"{PREFIX}/subnets/10.3")
    wait_for(lambda: not peer_routes(node), 20, "no routes")
    assert node.running


@pytest.mark.parametrize("stack", [DUAL_STACK, IPV6_ONLY], ids=["dual stack", "IPv6 only"])
def test_leases_with_ipv6_are_those_of_later_versions(lab: Lab, stack: dict[str, Any]) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, **stack)
    connect(node, peer)
    name = f"{'0.0.0.0-0' if stack is IPV6_ONLY else node.subnet()}&{node.subnet(6)}".replace("/", "-")
    value = json.loads((lab.etcd.get(f"subnets/{name}") or {})["value"])
    assert list(value) == [
        "PublicIP", "PublicIPv6", "BackendType",
        *(["BackendData"] if stack is DUAL_STACK else []), "BackendV6Data",
    ]  # fmt: skip
    assert value["PublicIP"] == ("0.0.0.0" if stack is IPV6_ONLY else node.address)
    assert value["PublicIPv6"] == node.ipv6_address


@pytest.mark.long  # Most of that is spent waiting; tests/unit/subnet/etcd/test_cluster.py waits for less.
@pytest.mark.parametrize("transport", ["json", "grpc"])
def test_an_endpoint_that_hangs_is_left_within_half_a_minute(lab: Lab, transport: str) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes()
    with gateway(lab, 2391) as first, gateway(lab, 2392) as second:
        urls = ",".join(f"http://{lab.etcd.address}:{p}" for p in (2391, 2392))
        node.start(f"-etcd-endpoints={urls}", f"-etcd-transport={transport}")
        node.wait_ready()
        wait_for(lambda: len(used_ports(node)) == 1, what="one endpoint in use")
        (port,) = used_ports(node)
        (first if port == 2391 else second).send_signal(signal.SIGSTOP)
        lab.etcd.put_lease("10.5.0.0/24", json.loads(host_gw(200)))
        node.wait_for_route("10.5.0.0/24", 30)


def test_a_daemon_over_grpc_comes_through_an_outage_and_leaves_in_time(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, flags=["-etcd-transport=grpc"])
    lab.etcd.stop()
    node.wait_for_log("Watching", 30)
    lab.etcd.start()
    lab.etcd.put_lease("10.5.0.0/24", json.loads(host_gw(200)))
    node.wait_for_route("10.5.0.0/24", 30)
    assert node.wait_for_log("etcd is back", 30)
    assert node.stop().status == 0


def test_a_config_in_both_apis_is_that_of_v3(lab: Lab) -> None:
    config = {"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}}
    lab.etcd.request("PUT", f"/v2/keys{PREFIX}/config", {"value": json.dumps(config)})
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    assert node.subnet().startswith("10.5.")
    assert len(node.wait_for_log("-etcd-api=v2")) == 1
    node.stop()
    node.start("-etcd-api=v2")
    node.wait_ready()
    assert node.subnet().startswith("10.6.")


def test_ttl_of_other_leases_is_never_requested(lab: Lab) -> None:
    """Go flanneld asks twice for each peer, one request after the other."""
    numbers = itertools.count(1)
    for _ in range(50):
        lab.etcd.put_lease(f"10.5.{next(numbers)}.0/24", json.loads(host_gw(200)))
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    wait_for(lambda: len(peer_routes(node)) == 50, what="50 routes")
    assert asked(lab, "LeaseTimeToLive") <= 2  # for our own lease


def asked(lab: Lab, method: str) -> int:
    """How many requests of a kind etcd has had."""
    text = lab.etcd.text("/metrics")
    lines = [
        line for line in text.splitlines() if "grpc_server_started_total" in line and f'"{method}"' in line
    ]
    return sum(int(float(line.split()[-1])) for line in lines)
