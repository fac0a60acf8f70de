"""A daemon that sees the store as it was: each of its reads, each order of two watches, and each way back.

These are the three stale views by which controllers of Kubernetes fail (Sieve, OSDI 2022): a replica that is
behind, events that come in another order, and a restart that reads an older state than the run before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.unit.simulation.choices import Choices, every
from tests.unit.simulation.cluster import STORES, Cluster
from tests.unit.simulation.node import RESTART, SimulatedHost
from tests.unit.simulation.test_cluster import SETTLES, cluster_of
from tests.unit.simulation.test_crash_points import Begin, Watch, failover, join, move, removal, sweep
from tests.unit.simulation.world import World

#: Changes that a stale read lacks.
AGES = (1, 2, 5)
#: Seconds for which a replica is behind after a restart, and by which an event is late.
BEHIND = 3.0
SOON, LATE = 0.001, 2.0


#: The ways of each story in all stores: fewer would be a hole in this test.
STORIES: dict[Begin, int] = {join: 154, sweep: 66, removal: 18, move: 84, failover: 308}


class Views:
    """Reads and events of a cluster, one of which is stale where the choices say so."""

    def __init__(self, cluster: Cluster, choices: Choices) -> None:
        self._choices = choices
        self._left = 1
        is_read = choices.pick((True, False))
        for store in cluster.stores:
            if is_read:
                store.age = lambda: int(self._pick(0, *AGES))
            else:
                store.delay = lambda: self._pick(SOON, LATE)

    def _pick(self, usual: float, *stale: float) -> float:
        chosen = self._choices.pick((usual, *stale)) if self._left else usual
        self._left -= chosen != usual
        return chosen


def restart(cluster: Cluster, choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """A daemon is restarted, and then reads from a replica that is behind.

    Peers that the replica lacks are not reached until the watch has told of them. Etcd's reads are quorum
    reads, so this is an API server with an old cache, or a store that breaks its word.
    """
    host, age = cluster.hosts[choices.pick((1, 2, 3))], choices.pick(range(1, 8))
    until = cluster.world.time + RESTART + BEHIND
    host.ended(InterruptedError("restarted"))
    for store in cluster.stores:
        store.age = lambda: age if cluster.world.time < until else 0
    return host, ()


def tell(begin: Begin, store: str, directory: Path, choices: Choices) -> None:
    world = World(0, logging.WARNING)
    with world.running():
        cluster = cluster_of(world, store, 3, directory)
        world.run(SETTLES)
        subnets = {number: host.subnet_env for number, host in cluster.hosts.items()}
        if begin is not restart:
            Views(cluster, choices)
        watch = Watch(cluster, choices, deaths=0)
        watch.begin(begin)
        world.run(SETTLES + RESTART + BEHIND)
        assert watch.wrong == []
        assert cluster.problems() == []
        for number in subnets.keys() & cluster.hosts.keys():
            assert cluster.hosts[number].subnet_env == subnets[number]


@pytest.mark.parametrize("begin", STORIES, ids=lambda begin: begin.__name__)
def test_stale_read_or_late_event_costs_no_packet(
    begin: Begin, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    views = sum(every(partial(tell, begin, store, tmp_path)) for store in STORES)
    record_property("stale views", views)
    assert views >= STORIES[begin]


@pytest.mark.parametrize("store", STORES)
def test_restart_before_a_replica_that_is_behind_ends_well(store: str, tmp_path: Path) -> None:
    assert every(partial(tell, restart, store, tmp_path)) == 21
