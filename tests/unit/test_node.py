"""The life of one node on a simulated host: what it starts, what the service manager hears, how it ends."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from flanneld.diagnostics.observation import Observation
from flanneld.effects import Effects
from flanneld.node import Node, Phase, alone
from flanneld.reconcile.counters import counted
from flanneld.reconcile.probes import MTU_TASK
from flanneld.runtime.process import Notifier
from flanneld.runtime.supervisor import nothing
from flanneld.state.table import Put, Report
from tests.local_etcd import free_port
from tests.unit.reconcile.test_encryption import PAST
from tests.unit.simulation.cluster import Cluster
from tests.unit.simulation.node import Process, SimulatedHost, SimulatedSubnetFile, SimulatedTasks
from tests.unit.simulation.world import World

#: Tasks that have no loop, and so run until the stop.
ENDLESS = frozenset({"conditions", "health server", "prober", "status socket"})
#: Seconds for which a node serves.
SERVES = 10


class Manager(Notifier):
    """A service manager that remembers what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def ready(self) -> None:
        self.heard.append("READY")

    def status(self, text: str) -> None:
        self.heard.append(text)

    def watchdog(self) -> None:
        self.heard.append("WATCHDOG")

    def stopping(self) -> None:
        self.heard.append("STOPPING")


class Tasks(SimulatedTasks):
    """Tasks of a node that is stopped after a while. Those without a loop are run only then."""

    def __init__(self, world: World, late: Sequence[str]) -> None:
        super().__init__()
        self.started: list[str] = []
        self.busy: list[str] = []
        self._world = world
        self._late = list(late)
        self._endless: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def start(self, name: str, run: Callable[[], None], cancel: Callable[[], None] = nothing, /) -> None:
        self.started.append(name)
        if name in ENDLESS:
            self._endless.append((run, cancel))
        elif name != "closer":
            super().start(name, run, cancel)

    def overdue(self) -> list[str]:
        return self.busy

    def wait(self, *ticks: tuple[Callable[[], None], float]) -> None:
        for _ in range(SERVES):
            self._world.pause(self.stop, 1.0)
            for tick, _ in ticks:
                tick()

    def shutdown(self) -> list[str]:
        for run, cancel in self._endless:
            cancel()
            run()
        return self._late


class StubbornSubnetFile(SimulatedSubnetFile):
    """A subnet.env that a full disk takes only after some attempts."""

    def __init__(self, process: Process, refusals: int) -> None:
        super().__init__(process)
        self.is_closed = False
        self._refusals = refusals

    def close(self, *, remove: bool) -> None:
        super().close(remove=remove)
        self.is_closed = True

    def put(self, puts: Sequence[Put]) -> Report:
        if self._refusals:
            self._refusals -= 1
            raise OSError(28, "No space left on device")
        return super().put(puts)


class Daemon(Process):
    """One run of the daemon, from its start to its stop."""

    def __init__(self, host: SimulatedHost, folder: Path, plan: Plan) -> None:
        self.manager = Manager()
        self.tasks = Tasks(host.world, plan.late)
        self.exit_status: int | None = None
        self.subnet_file = StubbornSubnetFile(self, plan.refusals)
        self._folder = folder
        self._plan = plan
        super().__init__(host)

    def _make_effects(self) -> Effects:
        self._options = replace(
            self._options, subnet_file=str(self._folder / "subnet.env"), **self._plan.options
        )
        return replace(
            super()._make_effects(),
            tasks=self.tasks,
            notifier=self._plan.notifier or self.manager,
            file_table=lambda *_: self.subnet_file,
            watchdog=1.0,
        )

    def _start(self, now: float) -> float:
        del now
        store, beside = counted(self._store), self._plan.beside
        node = self._node = self._begun = Node(self._options, self._effects, store, beside=beside)
        self.exit_status = node.serve((lambda: self._plan.tick(node, self), 1.0))
        return math.inf

    @property
    def lines(self) -> list[str]:
        """What was logged."""
        return [line.partition(": ")[2] for line in self.world.lines]


class Plan(Struct, frozen=True):
    """What is special about a run. ``refusals`` is how often subnet.env cannot be written."""

    options: Mapping[str, object] = {}
    beside: Callable[[Node, Phase], None] = alone
    #: Called each second.
    tick: Callable[[Node, Daemon], None] = lambda _node, _daemon: None
    late: Sequence[str] = ()
    refusals: int = 0
    #: In place of the one that remembers.
    notifier: Notifier | None = None


def lived(folder: Path, plan: Plan | None = None, backend: str = "vxlan") -> Daemon:
    """Run a daemon from its start to its stop."""
    world = World(1)
    with world.running():
        host = Cluster(world, "v3", folder, backend).add(1)
        host.kill()
        host.process = daemon = Daemon(host, folder, plan or Plan())
        world.run(1.0)
    return daemon


STATE = "vxlan: subnet 10.0.98.0/24 through eth0"


def test_service_manager_hears_once_that_a_node_is_ready_and_each_second_that_it_is_well(
    tmp_path: Path,
) -> None:
    daemon = lived(tmp_path)
    heard = [line for line in daemon.manager.heard if line != STATE]
    assert heard == ["READY", *["WATCHDOG"] * SERVES, "STOPPING"]
    assert daemon.manager.heard[0] == STATE
    assert daemon.exit_status == 0


def test_node_with_a_task_that_is_overdue_leaves_its_end_to_the_service_manager(tmp_path: Path) -> None:
    def tick(_node: Node, daemon: Daemon) -> None:
        daemon.tasks.busy = ["reconciler is overdue for 60 s"]

    assert lived(tmp_path, Plan(tick=tick)).manager.heard.count("WATCHDOG") == 0


def test_task_that_fails_is_in_the_exit_status(tmp_path: Path) -> None:
    def tick(_node: Node, daemon: Daemon) -> None:
        daemon.tasks.failure = ZeroDivisionError()

    assert lived(tmp_path, Plan(tick=tick)).exit_status == 1


def test_node_is_ready_only_once_subnet_env_is_written(tmp_path: Path) -> None:
    missing: list[list[str]] = []

    def beside(node: Node, _phase: Phase) -> None:
        if node.member is not None:
            missing.append(node.missing())

    def tick(node: Node, _daemon: Daemon) -> None:
        if len(missing) == 1:
            node.tell(["store: silent"])
        missing.append(node.missing())

    daemon = lived(tmp_path, Plan(refusals=3, beside=beside, tick=tick))
    heard = [line for line in daemon.manager.heard if line != "WATCHDOG"]
    assert heard == [
        f"{STATE}; No space left on device",
        f"{STATE}; store: silent",
        f"{STATE}; store: silent",
        "READY",
        "STOPPING",
    ]
    full = ["No space left on device"]
    assert missing == [[*full, "the peers are not known yet"], *[full] * 6, *[[]] * 5]


def test_node_is_ready_only_once_its_encryption_is_not_bypassed(tmp_path: Path) -> None:
    missing: list[list[str]] = []

    def beside(node: Node, _phase: Phase) -> None:
        if node.controller is not None:
            node.controller.encryption.look([PAST], {})

    def tick(node: Node, _daemon: Daemon) -> None:
        assert node.controller is not None
        missing.append(node.missing())
        node.controller.encryption.look([], {})

    heard = [line for line in lived(tmp_path, Plan(beside=beside, tick=tick)).manager.heard if line != STATE]
    assert heard == ["WATCHDOG", "READY", *["WATCHDOG"] * (SERVES - 1), "STOPPING"]
    assert [len(each) for each in missing] == [1] + [0] * (SERVES - 1)
    assert "packets may leave unencrypted" in missing[0][0]


def test_service_manager_that_was_away_hears_later_that_the_node_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        seconds = iter(range(SERVES))

        def tick(_node: Node, _daemon: Daemon) -> None:
            if next(seconds) == 1:
                manager.bind(str(tmp_path / "notify"))

        lived(tmp_path, Plan(notifier=Notifier(), tick=tick))
        assert [manager.recv(99) for _ in range(3)] == [b"WATCHDOG=1", b"READY=1", b"WATCHDOG=1"]


def test_conditions_are_told_to_the_service_manager_and_while_they_last_to_those_beside(
    tmp_path: Path,
) -> None:
    troubles = iter([["store: silent", "lease: late"], []])
    seen: list[tuple[Phase, bool]] = []

    def tick(node: Node, _daemon: Daemon) -> None:
        if (told := next(troubles, None)) is not None:
            node.tell(told)

    def beside(node: Node, phase: Phase) -> None:
        seen.append((phase, node.controller is not None))

    heard = lived(tmp_path, Plan(tick=tick, beside=beside)).manager.heard
    assert heard[-SERVES - 3 :][:4] == [f"{STATE}; store: silent; lease: late", "WATCHDOG", STATE, "WATCHDOG"]
    assert seen == [(Phase.BEGINS, False), (Phase.SERVES, True), (Phase.WAITS, True)]


def test_task_that_does_not_end_is_told_and_keeps_what_it_works_on(tmp_path: Path) -> None:
    late, ended = lived(tmp_path, Plan(late=["host"])), lived(tmp_path)
    assert [line for line in late.lines if "stop in time" in line] == ["W host did not stop in time"]
    assert not any("stop in time" in line for line in ended.lines)
    assert (late.subnet_file.is_closed, ended.subnet_file.is_closed) == (False, True)


@pytest.mark.parametrize(("backend", "is_watched"), [("vxlan", True), ("alloc", False)])
def test_leases_are_watched_for_a_backend_with_peers(tmp_path: Path, backend: str, is_watched: bool) -> None:
    missing: list[list[str]] = []
    daemon = lived(tmp_path, Plan(tick=lambda node, _: missing.append(node.missing())), backend)
    assert ("lease watch" in daemon.tasks.started) is is_watched
    assert "own lease watch" in daemon.tasks.started
    assert missing == [[]] * SERVES


ALWAYS = {"conditions", "status socket"}


@pytest.mark.parametrize(
    ("backend", "options", "expected", "told"),
    [
        pytest.param("vxlan", {}, set(), "", id="none by default"),
        pytest.param("vxlan", {"peer_probes": 1}, {"prober"}, "", id="probes"),
        pytest.param("vxlan", {"follow_path_mtu": True}, {MTU_TASK}, "", id="path MTU of a tunnel"),
        pytest.param(
            "host-gw",
            {"follow_path_mtu": True},
            set(),
            "-follow-path-mtu has no effect: host-gw has no tunnel",
            id="path MTU without a tunnel",
        ),
        pytest.param("vxlan", {"answer_port": 8473}, {"responder"}, "", id="answers"),
        pytest.param(
            "vxlan",
            {"public_name": "node.example"},
            set(),
            '-public-name has no effect: it is for wireguard with "Mesh": true',
            id="a name without a mesh",
        ),
    ],
)
def test_observers_start_as_the_options_ask(
    tmp_path: Path, backend: str, options: Mapping[str, object], expected: set[str], told: str
) -> None:
    plain = lived(tmp_path, backend=backend)
    daemon = lived(tmp_path, Plan(options, beside=Observation()), backend)
    assert set(daemon.tasks.started) - set(plain.tasks.started) == ALWAYS | expected
    assert len(daemon.tasks.started) == len(set(daemon.tasks.started))
    assert [line for line in daemon.lines if "no effect" in line] == ([f"W {told}"] if told else [])


def test_health_server_is_there_before_the_start_has_an_end(tmp_path: Path) -> None:
    port = free_port()
    daemon = lived(tmp_path, Plan({"healthz_ip": "127.0.0.1", "healthz_port": port}, beside=Observation()))
    assert daemon.tasks.started[:2] == ["closer", "health server"]
