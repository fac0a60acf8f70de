"""Each fault is put into a live network, found by the doctor, and healed as the doctor says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.doctor import examine
from tests.faults.fault import BEHIND, ONE_OF_MANY, PROBLEM, Fault
from tests.faults.table import FAULTS
from tests.faults.world import Diagnosis, Kind, World, commands, kept_worlds
from tests.lab import Node, wait_for
from tests.lab.kept import Kept
from tests.unit.ctl.test_checks import CASES

HEALTHY = "status 0"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Kept[Kind, World]]:
    kept = kept_worlds()
    yield kept
    kept.close()


def parameter(name: str) -> Any:
    fault = FAULTS[name]
    marks = [pytest.mark.needs_kernel(fault.needs)] if fault.needs else []
    return fault.kind.marked(name, name, *marks, *([pytest.mark.long] if fault.is_long else ()))


@pytest.mark.parametrize("name", [parameter(name) for name in FAULTS])
def test_doctor_names_cause_and_remedy_of(
    worlds: Kept[Kind, World], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    fault = FAULTS[name]
    with worlds.get(fault.kind) as world:
        world.look()
        world.run(*fault.harm)
        wait_for(
            lambda: fault.cuts in (None, world.is_cut()),
            what=f"packets {'lost' if fault.cuts else 'to flow'}",
        )
        # Side by side: a doctor that gets no answers mostly waits.
        with ThreadPoolExecutor(1) as other:
            seen = other.submit(see_from_peer, world, fault) if fault.cuts or fault.peer_sees else None
            found = diagnosed(world, fault)
            if seen is not None:
                seen.result()
        assert found.status == (fault.severity == PROBLEM)
        if not fault.harm:
            assert fault.advice in str(found)
            return
        heal(world, fault, found)
        if not fault.needs_more:
            world.wait_for_packets()
        world.run(*fault.after)
        world.wait_for_packets()
        for node in (world.node, world.peer):
            wait_for_health(world, node)


def diagnosed(world: World, fault: Fault) -> Diagnosis:
    """Return the right findings, once there are some: the daemon may take a moment to notice."""
    try:
        found = wait_for(lambda: diagnosis(world, fault), what="the diagnosis")
    except AssertionError:
        found = None
    if found is None:
        raise AssertionError(f"not found: {fault.says.format(**world.words)}; but:\n{world.last}")
    return found


def see_from_peer(world: World, fault: Fault) -> None:
    """See that the second node's doctor names the broken one, or that it finds nothing if it cannot."""
    names = [world.words[word] for word in ("node", "own_base", "own_base6") if word in world.words]
    checks = (fault.peer_sees or "tunnel").split(" or ")
    says = [fault.peer_says.format(**world.words)] if fault.peer_says else names

    def is_right() -> bool:
        said = world.doctor(world.peer)
        if fault.peer_blind == ONE_OF_MANY:
            return {each["check"] for each in said.findings} <= {BEHIND}
        return str(said) == HEALTHY if fault.peer_blind else said.is_seen(checks, says)

    try:
        wait_for(is_right)
    except AssertionError:
        raise AssertionError(f"{checks} of the peer do not say {says}:\n{world.doctor(world.peer)}") from None


def wait_for_health(world: World, node: Node) -> None:
    try:
        wait_for(lambda: str(world.doctor(node)) == HEALTHY)
    except AssertionError:
        raise AssertionError(f"still ill:\n{world.last}\n{node.log()}") from None


def diagnosis(world: World, fault: Fault) -> Diagnosis | None:
    """Return the findings if they name the fault."""
    said = world.doctor()
    says = fault.says.format(**world.words)
    right = [
        each
        for each in said.of(fault.check)
        if each["severity"] == fault.severity and says in f"{each['problem']}\n{each['evidence']}"
    ]
    return Diagnosis(said.status, right) if right else None


def heal(world: World, fault: Fault, found: Diagnosis) -> None:
    """Do what the doctor said."""
    if not fault.heal:
        assert all(each["fix"] for each in found.findings), str(found)
        world.run(*(step for each in found.findings for step in commands(each["fix"])))
        return
    advice = " ".join(each["advice"] or "" for each in found.findings)
    for step in [fault.advice] if fault.advice else fault.heal:
        assert not isinstance(step, str) or step.format(**world.words) in advice, advice
    world.run(*fault.heal)


def test_each_check_that_prints_a_fix_has_a_fault() -> None:
    findings = [found for cases in CASES.values() for facts in cases for found in examine(facts)]
    offered = {check.name for check, finding in findings if isinstance(finding.remedy, tuple)}
    assert offered == {fault.check for fault in FAULTS.values() if fault.harm and not fault.heal}


def test_faults_that_lose_packets_are_problems() -> None:
    assert {fault.severity for fault in FAULTS.values() if fault.cuts} == {PROBLEM}
