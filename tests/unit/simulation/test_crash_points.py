"""A daemon that dies before or after any of its effects: each such moment of each story.

An effect is a write to the store, the kernel or a file. The daemon is started again after five seconds. At
every effect of any daemon, packets between pairs that the story leaves alone arrive, and others' objects
are as they were. With a backend that encrypts no packet leaves in the clear. Rules of the packet filter have
a story of their own, whose effects are commands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network
from itertools import permutations
from pathlib import Path

import pytest

from flanneld.backends import registry
from flanneld.network.firewall.rules import Edit, Purpose, Rules, claim, desired_rules
from tests.unit.network.firewall.test_edits import BOTH, FORMER, LOOK_ALIKES, NETS, OWN, V012
from tests.unit.network.firewall.test_tables import Memory, converge, table_of
from tests.unit.simulation import encrypting, node
from tests.unit.simulation.chaos import Chaos
from tests.unit.simulation.choices import Choices, every
from tests.unit.simulation.cluster import STORES, Cluster
from tests.unit.simulation.encrypting import is_in_the_clear
from tests.unit.simulation.node import SimulatedHost
from tests.unit.simulation.test_cluster import DAY, SETTLES, cluster_of
from tests.unit.simulation.world import Crash, World

#: Begins a story. Returns the daemon that may die, and the hosts that have traffic all the time.
Begin = Callable[[Cluster, Choices], tuple[SimulatedHost, tuple[int, ...]]]


def join(cluster: Cluster, choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """A node joins; the newcomer dies, or one that hears of it."""
    newcomer = cluster.add(4)
    return choices.pick((newcomer, cluster.hosts[1])), (1, 2, 3)


def renewal(cluster: Cluster, _choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """All leases are renewed."""
    return cluster.hosts[1], (1, 2, 3)


def move(cluster: Cluster, choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """A machine gets other addresses; its daemon dies, or that of a peer."""
    cluster.move(1, 0.05)
    return cluster.hosts[choices.pick((1, 2))], (2, 3)


def switch(cluster: Cluster, _choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """One daemon after the other is started again with another backend."""
    cluster.set_backend(SWITCHES[cluster.config.backend_type])
    return _restart_all(cluster), ()


def _restart_all(cluster: Cluster) -> SimulatedHost:
    """Restart the first daemon, and later the others."""
    cluster.hosts[1].ended(InterruptedError("restarted"))
    for number in (2, 3):
        restart = partial(cluster.hosts[number].ended, InterruptedError("restarted"))
        cluster.world.at(cluster.world.time + SETTLES, restart)
    return cluster.hosts[1]


def sweep(cluster: Cluster, _choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """A peer is removed while a daemon does not run, which sweeps at its start."""
    cluster.hosts[1].kill()
    cluster.remove(3)
    cluster.world.run(1.0)
    cluster.hosts[1].start()
    return cluster.hosts[1], (1, 2)


def failover(cluster: Cluster, choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """The store is lost while a node joins, and comes back without its history."""
    for store in cluster.stores:
        store.set_down(down=True)
        cluster.world.at(cluster.world.time + 4.0, partial(store.set_down, down=False))
        cluster.world.at(cluster.world.time + 4.0, store.compact)
    newcomer = cluster.add(4)
    return choices.pick((newcomer, cluster.hosts[1])), (1, 2, 3)


def removal(cluster: Cluster, _choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """A node is removed for good."""
    cluster.remove(3)
    return cluster.hosts[1], (1, 2)


#: The crash points of each story in all stores and with both backends: fewer would be a hole in this test.
STORIES: dict[Begin, int] = {
    join: 220,
    renewal: 16,
    move: 148,
    switch: 192,
    sweep: 68,
    failover: 220,
    removal: 32,
}


BACKENDS = ("vxlan", "host-gw")
#: Backend to which each one is switched. Without ``Backend.Also`` ipsec would leave its policies behind.
SWITCHES = {"vxlan": "host-gw", "host-gw": "vxlan", "wireguard": "ipsec"}


#: A subnet of the cluster's network that is no node's in these stories, but could be any moment.
FREE = IPv4Network("10.3.254.0/24")


def encrypt(cluster: Cluster, choices: Choices) -> tuple[SimulatedHost, tuple[int, ...]]:
    """One daemon after the other is started again with a backend that encrypts."""
    cluster.set_backend(choices.pick(encrypting.TYPES))
    return _restart_all(cluster), ()


def _name(begin: Begin) -> str:
    return begin.__name__


class Watch:
    """Watches a story, and kills its daemon where the choices say so, ``deaths`` times."""

    def __init__(self, cluster: Cluster, choices: Choices, deaths: int) -> None:
        self.wrong: list[str] = []
        #: Subnets of nodes, also former ones, and one that is nobody's.
        self.subnets = {FREE}
        #: Hosts and subnets to which packets did not leave unencrypted, and never may again.
        self.encrypted: set[tuple[SimulatedHost, IPv4Network]] = set()
        self.last_death = 0.0
        self._encrypts = False
        self._begins_to = False
        self._cluster = cluster
        self._choices = choices
        self._deaths = deaths
        self._healthy: tuple[int, ...] = ()

    def begin(self, begin: Begin, *, may_die: bool = True) -> None:
        victim, self._healthy = begin(self._cluster, self._choices)
        for host in self._cluster.hosts.values():
            host.on_effect = partial(self._at_effect, host, may_die=may_die and host is victim)

    def confine(self, *, begins_to: bool) -> None:
        """Let no packet leave in the clear. In a cluster that ``begins_to`` encrypt, none does so again."""
        self._encrypts, self._begins_to = True, begins_to
        for host in self._cluster.hosts.values():
            self.wrong += self.in_the_clear(host)

    def _at_effect(self, host: SimulatedHost, when: str, *, may_die: bool) -> None:
        self.wrong += (f"{host.name} {when}: {line}" for line in self._now_wrong(host))
        if self._encrypts:
            self.wrong += (f"{host.name} {when}: {line}" for line in self.in_the_clear(host))
        if may_die and self._deaths and self._choices.pick((False, True)):
            self._deaths -= 1
            self.last_death = self._cluster.world.time
            raise Crash(when)

    def _now_wrong(self, acting: SimulatedHost) -> Iterator[str]:
        hosts = self._cluster.hosts
        for one, other in permutations(self._healthy, 2):
            net = hosts[other].subnet_env[0]
            if net and self._cluster.send(hosts[one], net[9]) is not hosts[other]:
                yield f"a packet of {hosts[one].name} to {hosts[other].name} is lost"
        if acting.kernel.foreign() != acting.foreign:
            yield f"foreign objects are {acting.kernel.foreign()}, were {acting.foreign}"

    def in_the_clear(self, host: SimulatedHost) -> Iterator[str]:
        """Yield the subnets to which packets leave a host unencrypted, though they must not."""
        own = host.subnet_env[0]
        nets = [each.subnet_env[0] for each in self._cluster.hosts.values()]
        self.subnets.update(net for net in nets if isinstance(net, IPv4Network))
        for net in self.subnets - {own} if own else ():
            assert isinstance(own, IPv4Network)
            if not is_in_the_clear(host.kernel, own[9], net[9]):
                self.encrypted.add((host, net))
            elif not self._begins_to or (host, net) in self.encrypted:
                yield f"packets to {net} leave in the clear"


def tell(begin: Begin, store: str, backend: str, directory: Path, deaths: int, choices: Choices) -> None:
    world = World(0, logging.WARNING)
    with world.running():
        cluster = cluster_of(world, store, 3, directory, backend)
        world.run(SETTLES)
        subnets = {number: host.subnet_env for number, host in cluster.hosts.items()}
        watch = Watch(cluster, choices, deaths)
        if begin is encrypt or backend in encrypting.TYPES:
            watch.confine(begins_to=begin is encrypt)
        watch.begin(begin)
        world.run((2 if begin in (switch, encrypt) else 1) * SETTLES + 10.0 * deaths)
        while (left := watch.last_death + SETTLES - world.time) > 0:
            world.run(left)
        assert watch.wrong == []
        assert cluster.problems() == []
        if begin is encrypt:
            assert len(watch.encrypted) == len(cluster.hosts) * (len(watch.subnets) - 1)
        for number in subnets.keys() & cluster.hosts.keys():
            assert cluster.hosts[number].subnet_env == subnets[number]


def points_in(begin: Begin, store: str, backend: str, directory: Path, deaths: int) -> int:
    """Return the number of ways in which the story goes, but for those without a death."""
    without = 2 if begin in (join, move, failover, encrypt) else 1
    return every(partial(tell, begin, store, backend, directory, deaths)) - without


@pytest.fixture(autouse=True)
def renewals_are_due(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their story, nodes that started within five seconds renew their leases once all is quiet."""
    if "begin" in request.fixturenames and request.getfixturevalue("begin") is renewal:
        monkeypatch.setattr(node, "MARGIN", DAY - SETTLES - 6.0)


@pytest.mark.parametrize("begin", STORIES, ids=_name)
def test_daemon_that_dies_at_any_effect_recovers_and_costs_no_packet(
    begin: Begin, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    points = sum(points_in(begin, store, backend, tmp_path, 1) for store in STORES for backend in BACKENDS)
    record_property("crash points", points)
    assert points >= STORIES[begin]


#: Stories of a cluster that encrypts, and of one that begins to, with their crash points.
ENCRYPTED: dict[tuple[Begin, str], int] = {
    (join, "wireguard"): 42,
    (renewal, "wireguard"): 2,
    (move, "wireguard"): 6,
    (switch, "wireguard"): 60,
    (sweep, "wireguard"): 10,
    (failover, "wireguard"): 42,
    (removal, "wireguard"): 6,
    (join, "ipsec"): 80,
    (renewal, "ipsec"): 2,
    (move, "ipsec"): 42,
    (sweep, "ipsec"): 16,
    (failover, "ipsec"): 80,
    (removal, "ipsec"): 12,
    (encrypt, "vxlan"): 98,
    (encrypt, "host-gw"): 90,
}


@pytest.fixture
def encrypting_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in encrypting.BACKENDS.items():
        monkeypatch.setitem(registry.BUILT_IN, name, place)


@pytest.mark.usefixtures("encrypting_backends")
@pytest.mark.parametrize(
    ("begin", "backend"), ENCRYPTED, ids=lambda each: each if isinstance(each, str) else _name(each)
)
def test_daemon_that_dies_at_any_effect_lets_nothing_out_in_the_clear(
    begin: Begin, backend: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    points = points_in(begin, "v3", backend, tmp_path, 1)
    record_property("crash points", points)
    assert points >= ENCRYPTED[begin, backend]


def switch_in_phases(backend: str, deadly: int, directory: Path, choices: Choices) -> None:
    """A cluster begins to encrypt by ``Backend.Also``; a daemon dies in the phase of that number."""
    world = World(0, logging.WARNING)
    with world.running():
        cluster = cluster_of(world, "v3", 3, directory, "vxlan")
        world.run(SETTLES)
        watch = Watch(cluster, choices, deaths=1)
        watch.confine(begins_to=True)
        for phase, config in enumerate((("vxlan", backend), (backend, "vxlan"), (backend,)), 1):
            cluster.set_backend(*config)
            watch.begin(lambda cluster, _: (_restart_all(cluster), ()), may_die=phase == deadly)
            world.run(3 * SETTLES + 10.0)
            assert watch.wrong == []
            assert cluster.problems() == []
        assert len(watch.encrypted) == len(cluster.hosts) * (len(watch.subnets) - 1)


@pytest.mark.usefixtures("encrypting_backends")
@pytest.mark.parametrize(
    ("backend", "phase", "least"),
    [("wireguard", 2, 12), ("wireguard", 3, 12), ("ipsec", 2, 16), ("ipsec", 3, 32)],
)
def test_daemon_that_dies_in_a_phase_of_a_switch_lets_nothing_out_again(
    backend: str, phase: int, least: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    points = every(partial(switch_in_phases, backend, phase, tmp_path)) - 1
    record_property("crash points", points)
    assert points >= least


@pytest.mark.usefixtures("encrypting_backends")
@pytest.mark.parametrize("backend", encrypting.TYPES)
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 200))]
)
def test_troubled_cluster_lets_nothing_out_in_the_clear(backend: str, seed: int, tmp_path: Path) -> None:
    world = World(seed, logging.WARNING)
    with world.running():
        cluster = cluster_of(world, STORES[seed % len(STORES)], 5, tmp_path, backend)
        watch = Watch(cluster, Choices(), deaths=0)
        watch.confine(begins_to=False)
        cluster.on_effect = lambda host: watch.wrong.extend(watch.in_the_clear(host))
        Chaos(cluster).run(15)
        assert watch.wrong == []
        assert cluster.problems() == []


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("begin", STORIES, ids=_name)
def test_daemon_that_dies_twice_recovers_and_costs_no_packet(
    begin: Begin, store: str, backend: str, tmp_path: Path
) -> None:
    points_in(begin, store, backend, tmp_path, 2)


# ---- the packet filter -------------------------------------------------------------------------


class Commands(Memory):
    """Rules that commands change; the daemon may die before and after each."""

    def __init__(self, rules: Rules, at_effect: Callable[[], None]) -> None:
        super().__init__(rules)
        self._at_effect = at_effect

    def apply(self, edits: Sequence[Edit]) -> None:
        self._at_effect()
        super().apply(edits)
        self._at_effect()


#: Rules by what they are for: those of an earlier run, and those that are desired.
RULES: Mapping[str, Rules] = {
    "none": {},
    "own chains": OWN,
    "forwarding only": desired_rules("own-chains", NETS, Purpose(forward=True)),
    "v0.12": V012,
    "another network": desired_rules("own-chains", FORMER, BOTH),
}
DESIRED = ("none", "own chains", "forwarding only", "v0.12")


#: An operator's rules, none of which is one of flannel v0.12 word for word.
OTHERS = {chain: tuple(set(rules) - set(V012[chain])) for chain, rules in LOOK_ALIKES.items()}


def change_rules(choices: Choices) -> None:
    """The daemon is started with other options, or after another network."""
    name, other = choices.pick(list(RULES)), choices.pick(DESIRED)
    earlier, desired = RULES[name], RULES[other]
    deaths = 1
    kept = {
        (chain, rule) for chain, rules in earlier.items() for rule in rules if rule in desired.get(chain, ())
    }

    def at_effect() -> None:
        nonlocal deaths
        now = commands.rules
        for chain, others in OTHERS.items():
            assert [rule for rule in now.get(chain, ()) if rule in others] == list(others)
        assert all(rule in now.get(chain, ()) for chain, rule in kept)
        if deaths and choices.pick((False, True)):
            deaths -= 1
            raise Crash

    before = {chain: (*OTHERS.get(chain, ()), *earlier.get(chain, ())) for chain in {*OTHERS, *earlier}}
    commands = Commands(before, at_effect)
    mine = claim([NETS], FORMER if name == "another network" else NETS, masquerade=True, forward=True)
    for _ in range(2):
        table = table_of(commands, mine)
        with suppress(Crash):
            converge(table, *([table.desired(desired)] if desired else []))
    ours = {
        chain: [rule for rule in rules if rule not in OTHERS.get(chain, ())]
        for chain, rules in commands.rules.items()
    }
    assert {chain: rules for chain, rules in ours.items() if rules} == {
        chain: list(rules) for chain, rules in desired.items() if rules
    }


def test_daemon_that_dies_at_any_command_leaves_rules_that_its_next_run_corrects(
    record_property: Callable[[str, object], None],
) -> None:
    points = every(change_rules) - len(RULES) * len(DESIRED)
    record_property("crash points", points)
    assert points >= 50
