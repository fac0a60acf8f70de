"""What is not well with a daemon, part by part, and when it is told."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from queue import SimpleQueue

import pytest

from flanneld.diagnostics import conditions
from flanneld.errors import NoAnswer, Retryable
from flanneld.model import Lease, LeaseAttrs, Snapshot
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile.worker import Worker
from flanneld.runtime import clock
from flanneld.state.desired import Delta
from flanneld.state.permits import RemovalGuard, everything
from flanneld.state.resources import Route
from flanneld.state.table import Failure, Put
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable
from tests.clock import Clock
from tests.unit.diagnostics.stores import idle_node

DEADLINE = 30.0
SILENCE = NoAnswer("etcd does not answer (192.0.2.1:2379: connection refused)", "see that it runs")
ROUTE = Route(ip_network("10.5.2.0/24"), "flannel.1")


@pytest.fixture
def node() -> Node:
    return idle_node(Options())


def found(node: Node) -> list[str]:
    return [str(part) for part in conditions.unhealthy_parts(node)]


def test_a_store_that_does_not_answer_is_a_trouble_until_it_does(node: Node) -> None:
    assert found(node) == []
    node.store_counters.failed("renew", SILENCE)
    assert found(node) == [f"store: {SILENCE}"]
    node.store_counters.answered("renew")
    assert found(node) == []


def test_a_store_that_answered_no_request_and_then_tells_news_is_well(node: Node) -> None:
    node.store_counters.failed("renew", SILENCE)
    node.store_counters.told(1, 0)
    assert found(node) == []


@pytest.mark.parametrize(
    "reason",
    [
        Retryable("etcd answers, but has no network config at /coreos.com/network/config", "write it"),
        Retryable("no subnet from 10.5.0.0 to 10.5.255.0 is free, 256 are leased", "enlarge the network"),
        Retryable("etcd at 192.0.2.1:2379 refuses access (HTTP 401)", "check -etcd-username"),
    ],
)
def test_a_store_that_answers_with_a_refusal_is_not_said_to_be_silent(node: Node, reason: Retryable) -> None:
    node.store_counters.requests.observe(0.1)
    node.store_counters.failed("acquire", reason)
    assert found(node) == [f"store: {reason}"]
    assert node.store_is_up
    node.store_counters.failed("acquire", SILENCE)
    assert not node.store_is_up


def test_conditions_of_the_host_are_told_with_the_others(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file/subnet.env"
    host = node.host = Worker("host", [SubnetFileTable(path)], stop=threading.Event())

    def write() -> None:
        file = SubnetEnvFile.of(path, SubnetEnv((), (), 1450, ip_masq=True))
        host.send(Delta((Put(file),)), everything(), whole=True)
        host.step(clock.now())

    write()
    (told,) = found(node)
    assert told.startswith(f"subnet file: cannot write {path}: ")
    assert node.file_problem in told
    (tmp_path / "file").unlink()
    write()
    assert (found(node), node.file_problem) == ([], "")


def test_a_thread_that_is_late_is_one() -> None:
    late = idle_node(Options())
    late.tasks.heartbeat("reconciler", -1.0)
    assert "threads: reconciler has not reported" in found(late)


@pytest.mark.parametrize(("left", "is_one"), [(5.0, True), (1200.0, False), (math.inf, False)])
def test_a_lease_that_ends_soon_is_one(left: float, is_one: bool) -> None:
    lease = Lease(LeaseAttrs(), expires=clock.now() + left)
    assert bool(conditions._of_the_lease(lease, margin=3600.0)) is is_one
    assert conditions._of_the_lease(Lease(LeaseAttrs()), margin=3600.0) == ""


def test_a_lease_with_a_short_margin_may_be_as_short() -> None:
    lease = Lease(LeaseAttrs(), expires=clock.now() + 59.0)
    assert conditions._of_the_lease(lease, margin=60.0) == ""


def test_what_the_kernel_refuses_is_one_until_it_is_there() -> None:
    pending = {ROUTE.key: Failure(ROUTE, "File exists")}
    assert list(conditions._of_the_kernel(pending, contested=False)) == [f"refused: {ROUTE}: File exists"]
    assert list(conditions._of_the_kernel({}, contested=False)) == [""]


def test_repairs_without_end_are_one() -> None:
    assert list(filter(None, conditions._of_the_kernel({}, contested=True)))


def test_removals_that_are_held_back_are_one() -> None:
    removal_guard = RemovalGuard()
    assert conditions._of_the_removal_guard(removal_guard) == ""
    removal_guard.pass_on(Snapshot(()), [(IPv4Network((0x0A050000 + (n << 8), 24)), None) for n in range(12)])
    told = "held back: 12 of 12 peers are gone from the list of leases"
    assert conditions._of_the_removal_guard(removal_guard) == told
    assert removal_guard.holds_total == 1


def watching(node: Node, act: Callable[[], None], told: SimpleQueue[list[str]]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=conditions.watch, args=(node, stop, told.put))
    thread.start()
    try:
        act()
    finally:
        stop.set()
        thread.join(DEADLINE)


def test_what_lasts_is_told_once_and_its_end_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "LOOK", 0.01)
    monkeypatch.setattr(conditions, "LASTING", 0.03)
    told: SimpleQueue[list[str]] = SimpleQueue()

    def act() -> None:
        node.store_counters.failed("renew", SILENCE)
        assert told.get(timeout=DEADLINE) == [f"store: {SILENCE}"]
        node.store_counters.answered("renew")
        assert told.get(timeout=DEADLINE) == []

    watching(node, act, told)
    assert told.empty()


def test_what_has_only_begun_is_not_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticking(Clock):
        def now(self) -> float:
            self.time += 1.0
            return self.time

    def act() -> None:
        node.store_counters.failed("renew", SILENCE)
        assert told.get(timeout=DEADLINE) == [f"store: {SILENCE}"]
        assert ticking.time >= begin + conditions.LASTING

    monkeypatch.setattr(conditions, "LOOK", 0.01)
    told, ticking = SimpleQueue[list[str]](), Ticking()
    begin = ticking.time
    with clock.replaced(ticking):
        watching(node, act, told)
