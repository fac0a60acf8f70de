"""A cluster of the product's own code on a virtual clock: what must hold once it is quiet."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.reconcile import host_watch
from tests.unit.simulation import node
from tests.unit.simulation.chaos import QUIET, Chaos
from tests.unit.simulation.cluster import STORES, Cluster, ours
from tests.unit.simulation.etcd import PREFIX
from tests.unit.simulation.node import SimulatedHost
from tests.unit.simulation.world import World

DAY = 86400.0
FAMILIES = ("ipv4", "dual", "ipv6")
#: Seconds in which a cluster that is told all settles.
SETTLES = 20.0


def cluster_of(
    world: World, store: str, nodes: int, directory: Path, backend: str = "vxlan", families: str = "ipv4"
) -> Cluster:
    """Start some nodes within five seconds."""
    cluster = Cluster(world, store, directory, backend, families)
    for number in range(1, nodes + 1):
        world.at(world.time + 5 * world.random.random(), partial(cluster.add, number))
    world.run(5)
    return cluster


def troubled(
    seed: int, store: str, directory: Path, deeds: int = 40, nodes: int = 8
) -> tuple[World, Cluster]:
    """Trouble a cluster, whose backend and families are other ones with each seed."""
    world = World(seed)
    backend = "host-gw" if seed % 3 == 2 else "vxlan"
    # The keys of the v2 API name no IPv6 subnet.
    families = "ipv4" if store in ("v2", "both") else FAMILIES[seed % len(FAMILIES)]
    with world.running():
        cluster = cluster_of(world, store, nodes, directory, backend, families)
        Chaos(cluster).run(deeds)
    return world, cluster


@pytest.mark.parametrize(
    ("store", "nodes"),
    [("v3", 80), *(pytest.param(store, 200, marks=pytest.mark.long) for store in ("v2", "v3", "kube"))],
)
def test_many_nodes_live_through_a_day_of_leases(
    store: str, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_watch, "LOOK_PERIOD", DAY / 4)
    world = World(1, logging.WARNING)
    with world.running():
        cluster = cluster_of(world, store, nodes, tmp_path)
        cluster.set_audit(DAY / 4)
        world.run(SETTLES)
        assert cluster.problems() == []
        for number in (3, 50, nodes - 8):
            cluster.remove(number)
        for number in (7, nodes - 3):
            cluster.switch_off(number)
        for number in (nodes + 1, nodes + 2):
            cluster.add(number)
        world.run(SETTLES)
        # In etcd the lease of a dead node lasts a day. In Kubernetes an operator deletes its Node.
        assert cluster.lease_count() == len(cluster.hosts) + (0 if store == "kube" else 2)
        world.run(DAY / 24 if store == "kube" else DAY)
        assert cluster.problems() == []
        assert cluster.lease_count() == len(cluster.hosts) == nodes - 3
    assert [line for line in world.lines if " E " in line] == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("store", STORES)
def test_troubled_cluster_is_well_once_it_is_quiet(store: str, seed: int, tmp_path: Path) -> None:
    _, cluster = troubled(seed, store, tmp_path)
    assert cluster.problems() == []


@pytest.mark.parametrize(
    ("store", "seed"), [("both", 1967), ("both", 2112), ("both", 8777), ("v2", 919191607)]
)
def test_cluster_that_once_had_problems_has_none(store: str, seed: int, tmp_path: Path) -> None:
    """Machines moved, daemons restarted, and a store came back from a backup, in unlucky orders."""
    _, cluster = troubled(seed, store, tmp_path, deeds=15, nodes=5)
    assert cluster.problems() == []


@pytest.mark.parametrize("backend", ["vxlan", "host-gw"])
def test_machine_that_moved_twice_keeps_its_lease_if_v2_comes_back_from_before(
    backend: str, tmp_path: Path
) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, "both", 3, tmp_path, backend)
        world.run(SETTLES)
        host, subnets = cluster.hosts[1], cluster.hosts[1].subnet_env
        _, v2 = cluster.etcds
        before = v2.index
        for _ in range(2):
            cluster.move(1, 0.0)
            world.run(SETTLES)
        v2.set_down(down=True)
        v2.restore(v2.index - before)
        host.ended(InterruptedError("killed"))
        world.run(SETTLES)
        v2.set_down(down=False)
        world.run(SETTLES)
        assert cluster.problems() == []
        assert host.subnet_env == subnets


@pytest.mark.parametrize("store", ["v2", "v3"])
def test_lease_that_a_newcomer_took_while_its_watch_stalled_is_given_up(store: str, tmp_path: Path) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, store, 3, tmp_path)
        world.run(SETTLES)
        (etcd,) = cluster.etcds
        subnets = cluster.hosts[1].subnet_env
        assert isinstance(subnets[0], IPv4Network)
        key = next(each for each in etcd.leases() if _names(each, subnets[0]))
        etcd.delete(key)
        etcd.compact()
        for watcher in etcd.watchers:
            watcher.stalled_until = world.time + SETTLES if watcher.concerns(key) else 0.0
        cluster.add(4).subnet_env = subnets
        etcd.break_watches()
        world.run(QUIET)
        assert cluster.problems() == []
        assert cluster.hosts[4].subnet_env == subnets


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 60))
@pytest.mark.parametrize("store", STORES)
def test_troubled_cluster_is_well_once_it_is_quiet_with_more_seeds(
    store: str, seed: int, tmp_path: Path
) -> None:
    world, cluster = troubled(seed, store, tmp_path, deeds=100, nodes=12)
    assert cluster.problems() == []
    cluster.set_audit(DAY / 4)
    with world.running():
        world.run(DAY + QUIET)
    assert cluster.problems() == []
    assert cluster.lease_count() == len(cluster.hosts)


@pytest.mark.parametrize("store", STORES)
def test_restart_of_all_daemons_at_once_loses_no_packet_and_writes_nothing(
    store: str, tmp_path: Path
) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, store, 5, tmp_path)
        world.run(SETTLES)
        for host in cluster.hosts.values():
            host.ended(InterruptedError("killed"))
        addresses = [
            net.network_address + 1 for host in cluster.hosts.values() if (net := host.subnet_env[0])
        ]
        for _ in range(20):
            world.run(1)
            for host in cluster.hosts.values():
                assert all(cluster.send(host, address) for address in addresses)
        assert cluster.problems() == []
        processes = [host.process for host in cluster.hosts.values()]
        assert not any(table.writes for each in processes if each for table in each.tables.values())


@pytest.mark.parametrize("down", [0, 1], ids=["v3", "v2"])
def test_node_that_starts_without_one_api_and_moves_keeps_its_lease_in_both(
    down: int, tmp_path: Path
) -> None:
    world = World(2)
    with world.running():
        cluster = cluster_of(world, "both", 3, tmp_path)
        world.run(SETTLES)
        api = cluster.stores[down]
        api.set_down(down=True)
        cluster.hosts[1].ended(InterruptedError("killed"))
        world.run(SETTLES)
        cluster.move(1, 0.0)
        world.run(SETTLES)
        api.set_down(down=False)
        world.run(QUIET)
        assert cluster.problems() == []


def test_removals_wait_while_a_store_lacks_most_leases(tmp_path: Path) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, "v3", 15, tmp_path)
        world.run(SETTLES)
        host = cluster.hosts[1]
        before = len(ours(host))
        (etcd,) = cluster.etcds
        own = f"{host.subnet_env[0]}".replace("/", "-")
        lost = {key: etcd.keys.pop(key) for key in etcd.leases() if not key.endswith(own)}
        etcd.compact()
        etcd.break_watches()
        world.run(3)
        assert len(ours(host)) == before
        for node in lost.values():
            etcd.put(node.key, node.value, node.ttl)
        world.run(QUIET)
        assert cluster.problems() == []


@pytest.mark.parametrize("store", ["v2", "v3"])
@pytest.mark.parametrize("backend", ["vxlan", "host-gw"])
def test_overlapping_lease_cuts_off_no_node_and_is_followed_once_it_is_alone(
    store: str, backend: str, tmp_path: Path
) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, store, 5, tmp_path, backend)
        world.run(SETTLES)
        (etcd,) = cluster.etcds
        owner = cluster.hosts[3].subnet_env[0]
        assert isinstance(owner, IPv4Network)
        _, value = next(each for each in etcd.leases().items() if _names(each[0], owner))
        half, wide = next(owner.subnets()), owner.supernet(4)
        for net in (half, wide):
            etcd.put(f"{PREFIX}/subnets/{net}".replace(f"/{net.prefixlen}", f"-{net.prefixlen}"), value, DAY)
        world.run(SETTLES)
        others = [host for number, host in cluster.hosts.items() if number != 3]
        assert cluster.problems() == [f"{cluster.hosts[3].name} has 3 leases in {store}"]
        for host in others:
            assert not any(host.kernel.at(net) for net in (half, wide))
        cluster.remove(3)
        world.run(SETTLES)
        followed = [net for net in (half, wide) if others[0].kernel.at(net)]
        assert followed == [half] if any(_lies_in(host, wide) for host in others) else [wide]
        assert all([net for net in (half, wide) if host.kernel.at(net)] == followed for host in others)
        assert cluster.problems() == []


@pytest.mark.parametrize("store", ["v2", "v3", "both"])
@pytest.mark.parametrize("backend", ["vxlan", "host-gw"])
def test_lease_around_address_of_store_is_followed_by_no_node(
    store: str, backend: str, tmp_path: Path
) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, store, 3, tmp_path, backend)
        world.run(SETTLES)
        data = {"VtepMAC": "02:00:00:00:00:99"}
        told = {"PublicIP": "172.16.0.99", "BackendType": backend, "BackendData": data}
        for etcd in cluster.etcds:
            etcd.put(f"{PREFIX}/subnets/10.3.200.0-24", json.dumps(told), DAY)
        for number in (1, 2):
            cluster.hosts[number].ended(InterruptedError("killed"))
        cluster.add(4)
        cluster.move(3, 2.0)
        world.run(QUIET)
        assert cluster.problems() == []
        for host in cluster.hosts.values():
            route = host.kernel.route_to(IPv4Address("10.3.200.9"))
            assert (route and route.device, host.kernel.at(IPv4Network("10.3.200.0/24"))) == (node.UPLINK, [])


@pytest.mark.parametrize("store", ["v2", "v3"])
def test_two_nodes_that_a_restored_store_gave_one_lease_do_not_fight_for_ever(
    store: str, tmp_path: Path
) -> None:
    world = World(1)
    with world.running():
        cluster = cluster_of(world, store, 3, tmp_path)
        world.run(SETTLES)
        (etcd,) = cluster.etcds
        subnets = cluster.hosts[1].subnet_env
        assert isinstance(subnets[0], IPv4Network)
        key = next(each for each in etcd.leases() if _names(each, subnets[0]))
        for watcher in etcd.watchers:
            watcher.stalled_until = world.time + SETTLES if watcher.concerns(key) else 0.0
        etcd.restore(len(etcd.history))
        cluster.add(4).subnet_env = subnets
        world.run(SETTLES - 1.0)
        assert cluster.hosts[4].process
        assert cluster.hosts[4].process.lease
        world.run(QUIET)
        assert cluster.problems() == []


def _names(key: str, net: IPv4Network) -> bool:
    return key.endswith(f"/{net}".replace("/", "-").replace("-", "/", 1))


def _lies_in(host: SimulatedHost, net: IPv4Network) -> bool:
    own = host.subnet_env[0]
    return isinstance(own, IPv4Network) and own.subnet_of(net)


@pytest.mark.parametrize("store", STORES)
def test_same_seed_gives_the_same_log(store: str, tmp_path: Path) -> None:
    first, again, other = (troubled(seed, store, tmp_path, deeds=15, nodes=5)[0].lines for seed in (7, 7, 8))
    assert len(first) > 100
    assert first == again
    assert first != other


def test_same_seed_gives_the_same_log_in_another_process() -> None:
    logs = [
        subprocess.run(
            [sys.executable, "-m", "tests.unit.simulation", "log", "v3", "7"],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(logs[0]) > 1000
    assert logs[0] == logs[1]
