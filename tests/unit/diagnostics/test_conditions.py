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
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.host_upkeep import HostUpkeep
from flanneld.errors import NoAnswer, Retryable
from flanneld.model import Lease, LeaseAttrs, Snapshot
from flanneld.options import Options
from flanneld.runtime import clock
from flanneld.runtime.logs import Events
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import Route
from flanneld.state.table import Failure
from flanneld.subnet.subnet_file import SubnetEnv
from tests.unit.diagnostics.stores import unasked_store

DEADLINE = 30.0
SILENCE = NoAnswer("etcd does not answer (192.0.2.1:2379: connection refused)", "see that it runs")
ROUTE = Route(ip_network("10.5.2.0/24"), "flannel.1")


@pytest.fixture
def components() -> Components:
    return Components(Options(), unasked_store(), Events(), overdue=list, missing=list)


def found(components: Components) -> list[str]:
    return [str(part) for part in conditions.unhealthy_parts(components)]


def test_a_store_that_does_not_answer_is_a_trouble_until_it_does(components: Components) -> None:
    assert found(components) == []
    components.store.failed("renew", SILENCE)
    assert found(components) == [f"store: {SILENCE}"]
    components.store.answered("renew")
    assert found(components) == []


def test_a_store_that_answered_no_request_and_then_tells_news_is_well(components: Components) -> None:
    components.store.failed("renew", SILENCE)
    components.store.told(1, 0)
    assert found(components) == []


@pytest.mark.parametrize(
    "reason",
    [
        Retryable("etcd answers, but has no network config at /coreos.com/network/config", "write it"),
        Retryable("no subnet from 10.5.0.0 to 10.5.255.0 is free, 256 are leased", "enlarge the network"),
        Retryable("etcd at 192.0.2.1:2379 refuses access (HTTP 401)", "check -etcd-username"),
    ],
)
def test_a_store_that_answers_with_a_refusal_is_not_said_to_be_silent(
    components: Components, reason: Retryable
) -> None:
    components.store.requests.observe(0.1)
    components.store.failed("acquire", reason)
    assert found(components) == [f"store: {reason}"]
    assert components.store_is_up
    components.store.failed("acquire", SILENCE)
    assert not components.store_is_up


def test_conditions_of_the_host_are_told_with_the_others(components: Components, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file/subnet.env"
    supervisor = Supervisor()
    host = HostUpkeep(
        path,
        (),
        str,
        stop=supervisor.stop,
        make_loop=supervisor.loop,
        keep_forwarding=False,
        on_write=lambda: None,
    )
    components.host = host
    host.write(SubnetEnv((), (), 1450, ip_masq=True))
    (told,) = found(components)
    assert told.startswith(f"subnet file: cannot write {path}: ")
    assert host.file_problem in told
    (tmp_path / "file").unlink()
    host.write(SubnetEnv((), (), 1450, ip_masq=True))
    assert (found(components), host.file_problem) == ([], "")


def test_a_thread_that_is_late_is_one() -> None:
    line = "reconciler has not reported for 61 s (promised 60 s)"
    late = Components(Options(), unasked_store(), Events(), overdue=lambda: [line], missing=list)
    assert "threads: reconciler has not reported" in found(late)


@pytest.mark.parametrize(("left", "number"), [(5.0, 1), (1200.0, 0), (math.inf, 0)])
def test_a_lease_that_ends_soon_is_one(left: float, number: int) -> None:
    lease = Lease(LeaseAttrs(), expires=clock.now() + left)
    assert len(list(conditions._of_the_lease(lease, margin=3600.0))) == number
    assert list(conditions._of_the_lease(Lease(LeaseAttrs()), margin=3600.0)) == []


def test_a_lease_with_a_short_margin_may_be_as_short() -> None:
    lease = Lease(LeaseAttrs(), expires=clock.now() + 59.0)
    assert list(conditions._of_the_lease(lease, margin=60.0)) == []


def test_what_the_kernel_refuses_is_one_until_it_is_there() -> None:
    pending = {ROUTE.key: Failure(ROUTE, "File exists")}
    assert list(conditions._of_the_kernel(pending, contested=False)) == [f"refused: {ROUTE}: File exists"]
    assert list(conditions._of_the_kernel({}, contested=False)) == []


def test_repairs_without_end_are_one() -> None:
    assert len(list(conditions._of_the_kernel({}, contested=True))) == 1


def test_removals_that_are_held_back_are_one() -> None:
    removal_guard = RemovalGuard()
    assert list(conditions._of_the_removal_guard(removal_guard)) == []
    removal_guard.pass_on(Snapshot(()), [(IPv4Network((0x0A050000 + (n << 8), 24)), None) for n in range(12)])
    assert list(conditions._of_the_removal_guard(removal_guard)) == [
        "held back: 12 of 12 peers are gone from the list of leases"
    ]
    assert removal_guard.holds_total == 1


def watching(components: Components, act: Callable[[], None], told: SimpleQueue[list[str]]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=conditions.watch, args=(components, stop, told.put))
    thread.start()
    try:
        act()
    finally:
        stop.set()
        thread.join(DEADLINE)


def test_what_lasts_is_told_once_and_its_end_too(
    components: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "LOOK", 0.01)
    monkeypatch.setattr(conditions, "LASTING", 0.03)
    told: SimpleQueue[list[str]] = SimpleQueue()

    def act() -> None:
        components.store.failed("renew", SILENCE)
        assert told.get(timeout=DEADLINE) == [f"store: {SILENCE}"]
        components.store.answered("renew")
        assert told.get(timeout=DEADLINE) == []

    watching(components, act, told)
    assert told.empty()
