"""A cluster that moves from etcd's v2 API to v3 and back, while its containers talk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.etcd import PREFIX

OTHERS_LEASE = {"PublicIP": "198.18.0.200", "BackendType": "host-gw"}


def restart(node: Node, api: str) -> None:
    """As an operator does: stop, start with another -etcd-api, and go on when it is ready."""
    assert node.stop().status == 0
    node.start(f"-etcd-api={api}")
    node.wait_ready(20)


def migrate(lab: Lab, node: Node, *flags: str) -> list[str]:
    command = (*own_command(), f"-etcd-endpoints={lab.etcd.endpoint}", "-migrate-etcd-v2-to-v3", *flags)
    done = node.run(*command)
    assert done.stderr == ""
    return [line.replace(f"{PREFIX}/", "") for line in done.stdout.splitlines()]


@contextmanager
def nothing_lost(nodes: list[Node]) -> Iterator[None]:
    """Each node pings the next one all the time."""
    pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    for one, other in pairs:
        one.container().wait_for_reply(other.container(), 20)
    pings = [one.container().ping(other.container()) for one, other in pairs]
    try:
        yield
        for ping in pings:
            ping.wait_for_replies(deadline=20)
            assert ping.lost() == 0
    finally:
        for ping in pings:
            ping.__exit__(None, None, None)


def subnets_in(lab: Lab, api: str) -> set[str]:
    path = f"{PREFIX}/subnets"
    nodes = lab.etcd.v3.children(path) if api == "v3" else lab.etcd.children(path)
    return {node["key"].rpartition("/")[2].replace("-", "/") for node in nodes}


def connected(nodes: list[Node]) -> None:
    for one, other in itertools.permutations(nodes, 2):
        one.wait_for_route(other.subnet(), 20)
        one.container().wait_for_reply(other.container(), 20)


@pytest.mark.parametrize("backend_type", ["vxlan", pytest.param("host-gw", marks=pytest.mark.long)])
def test_a_cluster_moves_to_v3_and_back_without_losing_a_packet(lab: Lab, backend_type: str) -> None:
    nodes = lab.cluster({"Type": backend_type}, nodes=3, flags=["-etcd-api=v2"])
    subnets = [node.subnet() for node in nodes]
    with nothing_lost(nodes):
        for api in ("both", "v3", "both", "v2"):
            for node in nodes:
                restart(node, api)
                connected(nodes)  # also while some are there already and some are not
            if api == "both":
                assert subnets_in(lab, "v2") == subnets_in(lab, "v3") == set(subnets)
                migrate(lab, nodes[0])
        assert [node.subnet() for node in nodes] == subnets


def test_move_copies_unannounced_keys_once(lab: Lab) -> None:
    """A node that is away for a while, and a subnet that an operator has reserved."""
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, flags=["-etcd-api=both"], SubnetMin="10.5.100.0")
    own = f"subnets/{node.subnet().replace('/', '-')}"
    lab.etcd.put_lease("10.5.1.0/24", OTHERS_LEASE, ttl=3000)
    lab.etcd.put_lease("10.5.2.0/24", OTHERS_LEASE, ttl=None)
    announced = migrate(lab, node, "-dry-run")
    assert subnets_in(lab, "v3") == {node.subnet()}
    done = migrate(lab, node)
    assert {line.split(",")[0] for line in done} == {
        f"kept {own}", "copied subnets/10.5.1.0-24", "copied subnets/10.5.2.0-24", "copied config"
    }  # fmt: skip
    assert len(announced) == len(done)
    assert all(line.startswith(("would copy", "would keep")) for line in announced)
    left = (lab.etcd.v3.get(f"{PREFIX}/subnets/10.5.1.0-24") or {})["ttl"]
    assert 2000 < left <= 3000
    assert "ttl" not in (lab.etcd.v3.get(f"{PREFIX}/subnets/10.5.2.0-24") or {})
    assert all(line.startswith("kept") for line in migrate(lab, node))
    restart(node, "auto")
    assert f"kept {own}" in migrate(lab, node)
    assert "etcd v3 at" in node.wait_for_log("The network config is in")[0]
    for subnet in ("10.5.1.0/24", "10.5.2.0/24"):
        node.wait_for_route(subnet)


def test_migration_keeps_different_keys_in_v3_and_exits_nonzero(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    lab.etcd.put_lease("10.5.1.0/24", OTHERS_LEASE)
    key = f"{PREFIX}/subnets/10.5.1.0-24"
    theirs = json.dumps({**OTHERS_LEASE, "PublicIP": "198.18.0.201"})
    lab.etcd.v3.put(key, theirs)
    (node,) = lab.add_nodes()
    command = (*own_command(), f"-etcd-endpoints={lab.etcd.endpoint}", "-migrate-etcd-v2-to-v3")
    done = node.run(*command, check=False)
    assert done.returncode == 1
    assert f"could not copy {key}: v3 has another lease there, of 198.18.0.201" in done.stdout
    assert (lab.etcd.v3.get(key) or {})["value"] == theirs


def test_nodes_of_one_api_see_those_of_both_and_not_each_other(lab: Lab) -> None:
    config = {"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}
    lab.etcd.put_config(config)
    lab.etcd.v3.put(f"{PREFIX}/config", json.dumps(config))
    old, both, new = lab.add_nodes(3)
    for node, api in ((both, "both"), (old, "v2"), (new, "v3")):
        node.start(f"-etcd-api={api}")
        node.wait_ready(20)
    for one in (old, new):
        both.wait_for_route(one.subnet(), 20)
        one.wait_for_route(both.subnet(), 20)
        assert {route["dst"] for route in one.routes() if route["dst"].startswith("10.5.")} == {both.subnet()}


def test_a_peer_stays_until_it_is_gone_from_both(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, flags=["-etcd-api=both"], SubnetMin="10.5.100.0")
    key = f"{PREFIX}/subnets/10.5.1.0-24"
    lab.etcd.put_lease("10.5.1.0/24", OTHERS_LEASE)
    lab.etcd.v3.put(key, json.dumps(OTHERS_LEASE))
    node.wait_for_route("10.5.1.0/24")
    lab.etcd.delete_lease("10.5.1.0/24")
    lab.etcd.put_lease("10.5.2.0/24", OTHERS_LEASE)
    node.wait_for_route("10.5.2.0/24")
    assert node.wait_for_route("10.5.1.0/24")
    lab.etcd.v3.delete(key)
    node.wait_for_no_route("10.5.1.0/24")


def test_an_outage_of_etcd_is_survived_in_both(lab: Lab) -> None:
    first, second = lab.cluster({"Type": "host-gw"}, flags=["-etcd-api=both"], SubnetMin="10.5.100.0")
    first.wait_for_route(second.subnet())
    lab.etcd.restart()
    lab.etcd.put_lease("10.5.1.0/24", {**OTHERS_LEASE, "PublicIP": "198.18.0.201"})
    lab.etcd.v3.put(f"{PREFIX}/subnets/10.5.2.0-24", json.dumps(OTHERS_LEASE))
    for node in (first, second):
        for subnet in ("10.5.1.0/24", "10.5.2.0/24"):
            node.wait_for_route(subnet, 20)
    assert first.running
    assert second.running
    wait_for(lambda: subnets_in(lab, "v3") >= {first.subnet(), second.subnet()}, what="both leases")
