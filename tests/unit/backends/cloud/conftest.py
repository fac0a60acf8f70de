"""Fixtures for the backends for clouds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.runtime import clock as runtime_clock
from tests.clock import Clock
from tests.unit.backends.cloud.bench import KINDS, Bench, bench


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The backend's type; ``parametrize`` it for some of them."""
    return str(request.param)


@pytest.fixture
def cloud(kind: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with runtime_clock.replaced(clock), bench(kind, clock, tmp_path, monkeypatch) as made:
        yield made
