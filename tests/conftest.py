"""What all tests share: the laboratory, which tests run where, and daemons' logs in a failure's report."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import hermetic, order, report
from tests.lab import Lab, Node
from tests.lab.forks import FORKS
from tests.lab.lab import API
from tests.vm.machine import INSIDE, lacks

# A busy machine is no reason to fail. The same examples each time: a failure belongs to the change that
# it comes with. With --long new ones are looked for, and ten times as many.
hypothesis.settings.register_profile(
    "flanneld",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("flanneld"), derandomize=False, max_examples=1000
)
hypothesis.settings.register_profile(
    "mutation",
    hypothesis.settings.get_profile("flanneld"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("flanneld")

LOG_TAIL = 4000  # characters of each log


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each file's tests take, for their order",
    )
    parser.addoption(
        "--claims",
        type=Path,
        metavar="FOLDER",
        help="run files that no other run with this folder has begun",
    )
    parser.addoption(
        "--needs-kernel",
        choices=["with", "without", "only"],
        default="with",
        help="run the tests marked needs_kernel with all others, leave them out, or run no others",
    )
    parser.addoption(
        "--lacks", metavar="FEATURES", help="what needs_kernel is about, if not any feature: ipip,esp"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(hermetic)
    config.pluginmanager.register(report)
    config.pluginmanager.register(report.Failures(config))
    if config.getoption("--long"):
        hypothesis.settings.load_profile("long")
        os.environ[FORKS] = "0"
    config.addinivalue_line("markers", "long: takes more than a few seconds; runs with --long only")
    config.addinivalue_line("markers", "shares(network): runs beside those of its file that share it")
    config.addinivalue_line("markers", "needs_kernel(feature): fails on a kernel without it; see tests/vm")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spend no time on garbage: ten thousand tests stay, and each collection would look through them all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = {"with": None, "without": True, "only": False}[config.getoption("--needs-kernel")]
    lacks_here = (config.getoption("--lacks") or "").split(",")

    def needs_other_kernel(item: pytest.Item) -> bool:
        needs = [mark.args[0] for mark in item.iter_markers("needs_kernel")]
        return any(feature in lacks_here for feature in needs) if config.getoption("--lacks") else bool(needs)

    here = [item for item in items if needs_other_kernel(item) is not elsewhere]
    wanted = [item for item in here if config.getoption("--long") or not item.get_closest_marker("long")]
    report.not_run(config, "tests marked long; add --long", len(here) - len(wanted))
    by_name = {item.nodeid: item for item in wanted}
    shared = {item.nodeid: mark.args[0] for item in wanted for mark in item.iter_markers("shares")}
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    durations = order.recorded("machine" if INSIDE in os.environ else "host")
    names = order.dealt(order.together(list(by_name), shared), workers, durations)
    chosen = [by_name[name] for name in names]
    config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what is not claimed by another process, if there are others; see pytest's own loop."""
    folder = session.config.getoption("--claims")
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    tests = order.claimed(session.items, folder, _claim)
    item = next(tests, None)
    while item is not None:
        following = next(tests, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        item = following
    return True


def _claim(item: pytest.Item) -> str:
    """Return what is claimed with a test: its file, whose tests share fixtures, unless it takes long."""
    return item.nodeid if item.get_closest_marker("long") else order.file_of(item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_kernel"):
        if lacks(*mark.args):
            pytest.fail(
                f"this kernel has no {mark.args[0]}; run the test in the test machine: "
                f".venv/bin/python -m tests.vm.machine .venv/bin/python -m pytest '{item.nodeid}'",
                pytrace=False,
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # pytest-xdist sends reports as UTF-8, which has no lone surrogates; examples for parsers have some.
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    if report.when == "call" and report.failed:
        for node in _nodes(getattr(item, "funcargs", {})):
            report.sections.append((f"log of the daemon on {node.name}", node.logs()[-LOG_TAIL:]))
    return report


def _nodes(fixtures: dict[str, Any]) -> Iterator[Node]:
    """The nodes of a test's laboratory, be it a fixture of its own or part of one."""
    for fixture in fixtures.values():
        lab = getattr(fixture, "lab", fixture)
        if isinstance(lab, Lab):
            yield from lab.nodes


@pytest.fixture
def api() -> str:
    """The API of etcd in which the network is; ``@pytest.mark.parametrize`` it for others."""
    return API


@pytest.fixture
def lab(api: str) -> Iterator[Lab]:
    """A laboratory with an etcd and no nodes yet."""
    with Lab(api=api) as lab:
        yield lab


@pytest.fixture(params=["vxlan", "host-gw"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The ``Backend`` part of the network config, for both families."""
    return {"Type": request.param}


@pytest.fixture(params=["vxlan", "host-gw", pytest.param("ipip", marks=pytest.mark.needs_kernel("ipip"))])
def ipv4_backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same, with those that carry IPv4 only."""
    return {"Type": request.param}
