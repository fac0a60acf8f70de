"""Whatever happens to a node in whichever order, its kernel ends as it should be.

Hypothesis draws histories: leases come, go and turn into nonsense, somebody tampers with the kernel and the
packet filter, the daemon is killed, stopped and started at any moment, etcd is started anew or forgets, and
the way there is bad. When all is quiet again, the kernel must hold what ``histories.wanted`` computes from
the leases, others' objects must be untouched and our subnet ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.netns.histories.ground import Ground
from tests.netns.histories.of_peers import OfPeers
from tests.netns.histories.of_the_daemon import OfTheDaemon
from tests.netns.histories.of_the_store import OfTheStore
from tests.netns.histories.of_vandals import OfVandals
from tests.netns.histories.setting import SETTINGS, Setting


class Histories(OfPeers, OfTheStore, OfVandals, OfTheDaemon):
    """All that may happen."""


def _marked(setting: Setting) -> Any:
    """What this host's kernel lacks takes place in a virtual machine."""
    features = {"ipip": "ipip", "wireguard": "wireguard", "ipsec": "esp"}
    marks = [pytest.mark.needs_kernel(features[setting.type])] if setting.type in features else []
    if setting.name == "ipip-direct":
        marks.append(pytest.mark.long)  # takes long in there, and is much like vxlan-direct
    return pytest.param(setting, marks=marks, id=setting.name)


@pytest.fixture(params=map(_marked, SETTINGS))
def setting(request: pytest.FixtureRequest) -> Setting:
    return cast("Setting", request.param)


@pytest.fixture
def ground(
    setting: Setting, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ground]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))  # one for each host
    with Ground(setting, is_patient=request.node.get_closest_marker("long") is not None) as ground:
        yield ground


def check(ground: Ground, start: int, histories: int, steps: int) -> None:
    """Draw so many histories. None is made smaller: what happens depends on the moment, too."""
    how = settings(
        max_examples=histories,
        stateful_step_count=steps,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(cast("Any", seed(start)(lambda: Histories(ground))), settings=how)
    except Exception as error:
        story = "\n".join(ground.steps)
        raise AssertionError(
            f"{ground.failure or error}\n--hypothesis-seed={start}:\n{story}"
        ) from ground.failure


def test_after_some_histories_the_kernel_is_as_it_should_be(ground: Ground) -> None:
    check(ground, start=20261121, histories=2, steps=14)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_after_many_histories_the_kernel_is_as_it_should_be(
    ground: Ground, pytestconfig: pytest.Config, number: int
) -> None:
    """With the seed that ``--hypothesis-seed`` gives, and those after it, else with others each time.

    Six tests can run beside each other.
    """
    given = int(pytestconfig.getoption("--hypothesis-seed") or random.randrange(1 << 32))
    check(ground, start=given + number, histories=10, steps=40)
