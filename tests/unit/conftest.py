"""What many of these tests share: a clock, an etcd, and the end of what they open to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from flanneld.runtime.clock import replaced
from tests.clock import Clock
from tests.etcd_clients import opened
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import NEWER, LocalEtcd, running_etcd


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def daemon_clock(clock: Clock) -> Iterator[Clock]:
    """The same clock, in place of the daemon's."""
    with replaced(clock):
        yield clock


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture(scope="module")
def newer_etcd() -> Iterator[LocalEtcd]:
    with running_etcd(program=NEWER) as etcd:
        yield etcd


@pytest.fixture
def keys(etcd: LocalEtcd) -> V3Keys:
    return V3Keys(etcd.post)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Some set up the daemon's log: the tests after them want pytest's."""
    root = logging.getLogger()
    handlers, level = tuple(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)  # the loggers remember what another level lets through until this is called


@pytest.fixture(autouse=True)
def close_what_was_opened() -> Iterator[None]:
    yield
    opened.close()
