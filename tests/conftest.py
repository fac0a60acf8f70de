"""What all tests share: the laboratory, the option ``--long``, and daemons' logs in a failure's report."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

from tests.lab import Lab, Node

hypothesis.settings.register_profile("flanneld", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flanneld")

LOG_TAIL = 4000  # characters of each log


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes more than a few seconds; runs with --long only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
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
    return "v2"


@pytest.fixture
def lab(api: str) -> Iterator[Lab]:
    """A laboratory with an etcd and no nodes yet."""
    with Lab(api=api) as lab:
        yield lab


@pytest.fixture(params=["vxlan", "host-gw"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The ``Backend`` part of the network config."""
    return {"Type": request.param}
