"""Getting a lease, keeping it and losing it, with a real etcd and whoever else wants one."""

from __future__ import annotations

import os
import signal

import pytest

from flanneld.subnet.lease_keeper import PROBATION
from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.etcd import TTL
from tests.lab.namespace import suspend
from tests.netns.apis import both_apis
from tests.netns.pair import DUAL_STACK

HOST_GW = {"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}


def put_reservation(lab: Lab, node: Node, subnet: str) -> None:
    lab.etcd.put_lease(subnet, {"PublicIP": node.address, "BackendType": "host-gw"}, ttl=None)


def wait_for_routes(node: Node, subnets: set[str]) -> None:
    def there() -> bool:
        return subnets <= {route["dst"] for route in node.routes()}

    wait_for(there, what=f"the routes on {node.name}")


def ttl(lab: Lab, node: Node) -> int | None:
    """Of the node's lease, None for a reservation."""
    lease = lab.etcd.lease(node.subnet())
    assert lease
    return lease.get("ttl")


# ---- getting it --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [10, pytest.param(30, marks=pytest.mark.long)])
def test_nodes_that_ask_at_the_same_moment_get_a_subnet_each(lab: Lab, number: int) -> None:
    nodes = lab.add_nodes(number)
    for node in nodes:
        # Their start costs seconds of processor time, which other tests may need more.
        node.start(command=["nice", *own_command()])
    for node in nodes:
        node.wait_for_log("Couldn't fetch network config", 120)
        suspend(node.pid)
    lab.etcd.put_config({**HOST_GW, "SubnetMin": "10.5.1.0", "SubnetMax": f"10.5.{number}.0"})
    for node in nodes:
        os.kill(node.pid, signal.SIGCONT)
    for node in nodes:
        node.wait_ready(120)
    everything = {f"10.5.{third}.0/24" for third in range(1, number + 1)}
    assert {node.subnet() for node in nodes} == everything
    for node in nodes:
        wait_for_routes(node, everything - {node.subnet()})


def test_a_full_range_is_complained_about_once_until_a_subnet_is_free(lab: Lab) -> None:
    lab.etcd.put_config({**HOST_GW, "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.2.0"})
    for number in (1, 2):
        lab.etcd.put_lease(f"10.5.{number}.0/24", {"PublicIP": f"198.18.0.{100 + number}"})
    (node,) = lab.add_nodes()
    node.start()
    node.wait_for_log("Waiting for a lease")
    before = lab.etcd.gets()
    wait_for(lambda: lab.etcd.gets() >= before + 4, what="two more tries")
    (complaint,) = node.wait_for_log("Waiting for a lease")
    for word in ("10.5.1.0", "10.5.2.0", "enlarge the network in /coreos.com/network/config"):
        assert word in complaint
    lab.etcd.delete_lease("10.5.2.0/24")
    node.wait_ready(10)
    assert node.subnet() == "10.5.2.0/24"


@both_apis
def test_a_new_subnet_avoids_the_networks_of_the_host(lab: Lab, backend: dict[str, str]) -> None:
    ranges = {
        **DUAL_STACK,
        "SubnetMin": "10.5.1.0",
        "SubnetMax": "10.5.2.0",
        "IPv6SubnetMin": "fc00:5:0:1::",
        "IPv6SubnetMax": "fc00:5:0:2::",
    }
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend, **ranges})
    (node,) = lab.add_nodes(1)
    node.namespace.ip(
        "link add docker0 type bridge",
        "link set docker0 up",
        "address add 10.5.1.129/25 dev docker0",
        "address add fc00:5:0:2::1/64 dev docker0 nodad",
    )
    connected = node.routes("docker0")
    node.start()
    node.wait_ready()
    assert (node.subnet(4), node.subnet(6)) == ("10.5.2.0/24", "fc00:5:0:1::/64")
    # A lease that is ours stays, whatever the host has later.
    node.stop()
    node.namespace.ip("address add 10.5.2.129/25 dev docker0")
    node.start()
    node.wait_ready()
    assert node.subnet(4) == "10.5.2.0/24"
    assert connected[0] in node.routes("docker0")


def test_a_network_of_the_host_is_chosen_if_no_other_is_free(lab: Lab) -> None:
    lab.etcd.put_config({**HOST_GW, "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0"})
    (node,) = lab.add_nodes(1)
    node.namespace.ip(
        "link add docker0 type bridge", "link set docker0 up", "address add 10.5.1.1/24 dev docker0"
    )
    node.start()
    node.wait_ready()
    assert node.subnet() == "10.5.1.0/24"


def test_a_subnet_that_another_node_has_taken_meanwhile_is_not_taken_back(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    lost = node.subnet()
    node.stop()
    stranger = {"PublicIP": "198.18.0.200", "BackendType": "host-gw"}
    lab.etcd.delete_lease(lost)
    lab.etcd.put_lease(lost, stranger)
    node.start()
    node.wait_ready()
    assert node.subnet() != lost
    assert lab.etcd.leases()[lost] == stranger
    node.wait_for_route(lost)


# ---- keeping it --------------------------------------------------------------------------------


@both_apis
def test_a_lease_about_to_end_is_renewed(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    lease = lab.etcd.leases()[node.subnet()]
    lab.etcd.put_lease(node.subnet(), lease, ttl=60)
    wait_for(lambda: (ttl(lab, node) or 0) > TTL - 600, what="a full term again")
    assert lab.etcd.leases() == {node.subnet(): lease}
    assert node.running


def test_a_lease_is_renewed_as_early_as_the_margin_says(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, flags=["-subnet-lease-renew-margin=120"])
    lab.etcd.put_lease(node.subnet(), lab.etcd.leases()[node.subnet()], ttl=7198)
    wait_for(lambda: (ttl(lab, node) or 0) > TTL - 600, what="a full term again")


@both_apis
def test_a_lease_with_time_left_is_left_alone(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    lab.etcd.put_lease(node.subnet(), lab.etcd.leases()[node.subnet()], ttl=7200)
    written = lab.etcd.lease(node.subnet())
    lab.etcd.put_lease("10.5.0.0/24", {"PublicIP": "198.18.0.200", "BackendType": "host-gw"})
    node.wait_for_route("10.5.0.0/24")
    now = lab.etcd.lease(node.subnet())
    assert written
    assert now
    assert now["modifiedIndex"] == written["modifiedIndex"]


@both_apis
def test_a_reservation_stays_one_over_restarts_and_renewals(lab: Lab) -> None:
    lab.etcd.put_config(HOST_GW)
    (node,) = lab.add_nodes()
    put_reservation(lab, node, "10.5.77.0/24")
    for _ in range(2):
        node.start()
        node.wait_ready()
        assert node.subnet() == "10.5.77.0/24"
        assert ttl(lab, node) is None
        node.stop()
    node.start()
    node.wait_ready()
    # Another address of its own makes a node write its lease anew.
    node.namespace.ip(
        f"address del {node.address}/24 dev eth0",
        "address add 198.18.0.99/24 dev eth0",
        f"route add default via {lab.etcd.address}",
    )

    def told() -> bool:
        return bool(lab.etcd.leases()["10.5.77.0/24"]["PublicIP"] == "198.18.0.99")

    # A connection from an address that has gone has to time out first.
    wait_for(told, 10, "the new address")
    assert ttl(lab, node) is None


@both_apis
def test_a_lease_that_is_made_a_reservation_while_in_use_stays_one(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    put_reservation(lab, node, node.subnet())
    written = (lab.etcd.lease(node.subnet()) or {})["modifiedIndex"]
    lab.etcd.put_lease("10.5.0.0/24", {"PublicIP": "198.18.0.200", "BackendType": "host-gw"})
    node.wait_for_route("10.5.0.0/24")
    assert (lab.etcd.lease(node.subnet()) or {})["modifiedIndex"] == written
    node.stop()
    node.start()
    node.wait_ready()
    assert ttl(lab, node) is None


# ---- losing it ---------------------------------------------------------------------------------


@both_apis
def test_a_node_whose_lease_was_deleted_ends_and_gets_the_same_again(lab: Lab) -> None:
    node, other = lab.cluster({"Type": "vxlan"})
    node.wait_for_route(other.subnet())
    subnet, before = node.subnet(), node.kernel_state("flannel.1")
    lab.etcd.delete_lease(subnet)
    assert node.daemon.wait(20).status == 0
    assert len(node.wait_for_log(f"Lease has been revoked. Shutting down daemon. It was {subnet}")) == 1
    other.wait_for_no_route(subnet)
    node.start()
    node.wait_ready()
    assert node.subnet() == subnet
    wait_for(lambda: node.kernel_state("flannel.1") == before, what="the kernel to be as it was")
    other.wait_for_route(subnet)


def check_yielded(node: Node) -> None:
    """Has the daemon ended with one message that says what to do?"""
    assert node.daemon.wait(10).status == 1
    said = [line for line in node.log().splitlines() if line[0] in "EF"]
    assert "--public-ip" in said[0]
    assert len(said) <= 2


@pytest.mark.parametrize("api", ["v3", pytest.param("v2", marks=pytest.mark.long)])
def test_a_newcomer_with_the_public_ip_of_an_older_node_yields(lab: Lab) -> None:
    older, peer = lab.cluster({"Type": "vxlan"})
    inside = older.container(), peer.container()
    inside[0].wait_for_reply(inside[1])
    lease = lab.etcd.leases()[older.subnet()]
    (newcomer,) = lab.add_nodes()
    with inside[0].ping(inside[1]) as ping:
        # A node younger than that would yield itself.
        ping.wait_for_replies(int(PROBATION * 50) + 25, 30)
        newcomer.start("-iface=eth0", f"-public-ip={older.address}")
        check_yielded(newcomer)
        wait_for(lambda: lab.etcd.leases()[older.subnet()] == lease, what="the older node's lease")
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert len(older.wait_for_log("--public-ip")) == 1
    assert older.running
    assert lab.etcd.leases().keys() == {older.subnet(), peer.subnet()}


@pytest.mark.long
@pytest.mark.parametrize("had_a_device", [False, True], ids=["fresh", "with-a-device-of-its-own"])
def test_one_of_two_new_nodes_with_one_public_ip_yields(lab: Lab, had_a_device: bool) -> None:
    (first,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    (second,) = lab.cluster({"Type": "vxlan"}, nodes=1) if had_a_device else lab.add_nodes()
    if had_a_device:
        second.stop()
        lab.etcd.delete_lease(second.subnet())
    second.start("-iface=eth0", f"-public-ip={first.address}")
    wait_for(lambda: not (first.running and second.running), 15, "one of the two to end")
    loser, winner = (first, second) if second.running else (second, first)
    check_yielded(loser)
    assert winner.running
    assert list(lab.etcd.leases()) == [winner.subnet()]
