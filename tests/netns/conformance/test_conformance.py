"""What the reconciler expects of every table, shown for each on a real kernel."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flanneld
from flanneld.state.table import Table
from tests.conformance.suite import (
    PROPERTIES,
    Subject,
    a_reading_that_fails_changes_nothing,
    after_any_history_all_is_as_wanted,
)
from tests.lab.namespace import Namespace, batch, remove
from tests.netns.conformance.kernel import OfKernel
from tests.netns.conformance.subjects import EXEMPT, NEEDS, SUBJECTS

_numbers = itertools.count(1)
_METHODS = ("read", "put", "drop", "close")


@contextmanager
def host_of_one(name: str) -> Iterator[Subject]:
    """A namespace in which the block runs, with the table of this name."""
    namespace = Namespace(f"flc{os.getpid()}.{next(_numbers)}")
    batch(f"netns add {namespace.name}")
    try:
        with namespace.entered():
            namespace.ip(
                "link set lo up",
                "link add up0 type veth peer name up1",
                "link add other0 type vxlan id 9 local 192.0.2.1 dstport 4789 nolearning",
                *(f"link set {name} up" for name in ("up0", "up1", "other0")),
                "address add 192.0.2.1/24 dev up0",
                "address add fd77::1/64 dev up0 nodad",
                "link add vx4 type vxlan id 1 local 192.0.2.1 dev up0 dstport 8472 nolearning",
                "link add vx6 type vxlan id 1 local fd77::1 dev up0 dstport 8472 nolearning",
                "link set vx4 up",
                "link set vx6 up",
            )
            made = SUBJECTS[name](namespace)
            yield made
            made.close()
    finally:
        remove([namespace])


def marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.needs_kernel(NEEDS[name])) if name in NEEDS else name


@pytest.fixture(params=map(marked, SUBJECTS))
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One machine, many hosts: each should have a lock of its own."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    found: str = request.param
    return found


@pytest.fixture
def subject(name: str) -> Iterator[Subject]:
    with host_of_one(name) as made:
        yield made


def cases() -> Iterator[object]:
    """Yield each table with each property; where reading cannot fail, that is none."""
    for name, holds in itertools.product(SUBJECTS, PROPERTIES):
        if getattr(SUBJECTS[name], "can_be_blind", True) or holds is not a_reading_that_fails_changes_nothing:
            marks = [pytest.mark.needs_kernel(NEEDS[name])] if name in NEEDS else []
            yield pytest.param(name, holds, marks=marks, id=f"{holds.__name__}-{name}")


@pytest.mark.parametrize(("name", "holds"), [*cases()], indirect=["name"])
def test_table_is_one_as_the_reconciler_expects(subject: Subject, holds: Callable[[Subject], None]) -> None:
    holds(subject)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_any_history_all_is_as_wanted(name: str, data: st.DataObject) -> None:
    with host_of_one(name) as subject:
        after_any_history_all_is_as_wanted(subject, data)


def tables() -> Iterator[type]:
    """Yield the classes of the daemon that implement ``Table``."""
    for info in pkgutil.walk_packages(flanneld.__path__, "flanneld."):
        # Not the library of the udp proxy either, which ctypes loads.
        is_module = not info.name.endswith(("__main__", "._udp_pump"))
        module = importlib.import_module(info.name) if is_module else None
        for each in vars(module).values() if module else ():
            is_here = inspect.isclass(each) and each.__module__ == info.name
            # A base of several tables has no reading of its own.
            if is_here and all(callable(getattr(each, name, None)) for name in _METHODS):
                yield from [each] if each.read is not Table.read else ()


def table_of(subject: Callable[[Namespace], Subject]) -> type:
    """Return the class of a subject's table, as its method declares."""
    assert inspect.isclass(subject)
    assert issubclass(subject, Subject)
    make = subject.over if issubclass(subject, OfKernel) else subject.make
    found: type = get_type_hints(make)["return"]
    return found


def test_each_table_has_a_subject_or_a_reason() -> None:
    shown = {table_of(each) for each in SUBJECTS.values()}
    assert not shown & EXEMPT.keys()
    assert shown | EXEMPT.keys() == set(tables())
