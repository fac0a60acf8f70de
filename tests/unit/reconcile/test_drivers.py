"""How a backend's drivers are called: one by one or in bulk, and what it means to be vital."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any, ClassVar

import pytest

from flanneld.backends.contract import Driver, Host
from flanneld.backends.host_gw import HostGw
from flanneld.config import parse
from flanneld.errors import Retryable
from flanneld.model import Uplink
from flanneld.reconcile.drivers import Outside
from flanneld.runtime import clock
from flanneld.state.diff import Plan
from flanneld.state.resources import Key, Kind, Resource


@dataclass(frozen=True, slots=True)
class Lamp:
    kind: ClassVar[Kind] = Kind.OUTSIDE
    number: int

    @property
    def key(self) -> Key:
        return (self.kind, "lamp", self.number)


@dataclass(frozen=True, slots=True)
class Fuse:
    kind: ClassVar[Kind] = Kind.OUTSIDE
    number: int
    subnet: IPv4Network | None = None

    @property
    def key(self) -> Key:
        return (self.kind, "fuse", self.number)


@dataclass
class OneByOne:
    """Has the fuses; it is vital, and those that are ``broken`` cannot be made."""

    handles: type = Fuse
    calls: list[str] = field(default_factory=list)
    broken: tuple[int, ...] = ()
    descriptor: int = 5
    there: list[Resource] = field(default_factory=list)

    def read(self) -> Iterable[Resource]:
        return self.there

    def put(self, resource: Fuse) -> None:
        if resource.number in self.broken:
            raise Retryable("broken")
        self.calls.append(f"put {resource.number}")

    def drop(self, resource: Fuse) -> None:
        self.calls.append(f"drop {resource.number}")

    def close(self) -> None:
        self.calls.append("close")

    def fileno(self) -> int:
        return self.descriptor

    def news(self) -> None:
        self.calls.append("news")


@dataclass
class Bulk:
    """Has the lamps."""

    handles: type = Lamp
    calls: list[str] = field(default_factory=list)
    down: bool = False

    def read(self) -> Iterable[Resource]:
        return []

    def put(self, resource: Lamp) -> None:
        raise AssertionError(resource)

    drop = put

    def put_all(self, resources: Sequence[Lamp]) -> None:
        if self.down:
            raise Retryable("no power")
        self.calls.append(f"put {[lamp.number for lamp in resources]}")

    def drop_all(self, resources: Sequence[Lamp]) -> None:
        self.calls.append(f"drop {[lamp.number for lamp in resources]}")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Watched(Bulk):
    """May stop working without a word."""

    handles: type = Lamp
    next_look: float = 0.0
    works: bool = True
    looks: int = 0

    def look(self) -> bool:
        self.looks += 1
        return not self.works


def outside(*drivers: Driver) -> Outside:
    class WithDrivers(HostGw):
        def drivers(self) -> tuple[Driver, ...]:
            return drivers

    def nothing(_: Any) -> None:
        return None

    config = parse(json.dumps({"Network": "10.1.0.0/16", "Backend": {"Type": "host-gw"}}))
    return Outside(WithDrivers(config, Host(Uplink("eth0", 2, 1500), None, nothing, nothing, bytes)))


def state(*resources: Resource) -> dict[Key, Resource]:
    return {resource.key: resource for resource in resources}


def test_what_one_driver_takes_in_bulk_another_takes_one_by_one() -> None:
    fuses, lamps = OneByOne(), Bulk()
    steps = Plan((Lamp(1), Fuse(1), Lamp(2), Fuse(2)), (Lamp(3), Lamp(4), Fuse(3)))
    report = outside(fuses, lamps).apply(steps)
    assert fuses.calls == ["put 1", "put 2", "drop 3"]
    assert lamps.calls == ["put [1, 2]", "drop [3, 4]"]
    assert (len(report.made), len(report.removed), report.failed) == (4, 3, [])


def test_of_a_bulk_that_fails_nothing_counts_as_done() -> None:
    report = outside(Bulk(down=True)).apply(Plan((Lamp(1), Lamp(2))))
    assert report.made == []
    assert [str(failure.resource) for failure in report.failed] == ["Lamp(number=1)", "Lamp(number=2)"]


def test_nothing_to_do_is_no_call() -> None:
    lamps = Bulk()
    outside(lamps).apply(Plan())
    assert lamps.calls == []


def test_only_what_is_vital_is_missed() -> None:
    parts = outside(OneByOne(broken=(2,)), Bulk(down=True))
    report = parts.converge(state(Fuse(1), Fuse(2), Lamp(1)), sweep=True)
    assert [failure.resource for failure in report.failed] == [Fuse(2), Lamp(1)]
    assert [failure.resource for failure in parts.missing(report)] == [Fuse(2)]


def test_only_what_is_vital_is_listened_to_while_there_is_something_to_hear() -> None:
    fuses = OneByOne()
    assert outside(fuses, Bulk()).sources() == {5: fuses}
    assert outside(OneByOne(descriptor=-1), Bulk()).sources() == {}


def test_what_is_due_is_looked_at_and_only_that() -> None:
    now = clock.now()
    well, ill, later = (
        Watched(next_look=now - 1),
        Watched(Fuse, next_look=now - 1, works=False),
        Watched(next_look=now + 3600),
    )
    assert outside(well).look() is False
    assert outside(ill).look() is True
    assert outside(later).look() is False
    assert (well.looks, ill.looks, later.looks) == (1, 1, 0)
    assert outside(ill, later).next_look == now - 1
    assert outside(OneByOne()).next_look == math.inf


def test_what_leads_to_a_subnet_of_which_nothing_is_known_is_not_swept() -> None:
    lamps = OneByOne(
        there=[Fuse(1), Fuse(2, IPv4Network("10.1.6.0/24")), Fuse(3, IPv4Network("10.1.7.0/24"))]
    )
    parts = outside(lamps)
    parts.converge({}, sweep=False)
    assert lamps.calls == []
    parts.converge({}, sweep=True, unclear={IPv4Network("10.1.7.0/24")})
    assert lamps.calls == ["drop 1", "drop 2"]


def test_all_drivers_are_closed_once() -> None:
    fuses, lamps = OneByOne(), Bulk()
    parts = outside(fuses, lamps)
    parts.close()
    parts.close()
    assert (fuses.calls, lamps.calls) == (["close"], ["close"])


class Unclosable(OneByOne):
    def close(self) -> None:
        raise RuntimeError("jammed")


def test_a_driver_that_cannot_close_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    lamps = Bulk()
    outside(Unclosable(), lamps).close()
    assert lamps.calls == ["close"]
    assert "Unclosable could not clean up: jammed" in caplog.text


class WithSuccessor(Bulk):
    def hand_over(self) -> None:
        self.calls.append("hand over")


def test_a_driver_is_closed_for_its_successor_unless_it_can_do_better() -> None:
    fuses, lamps = OneByOne(), WithSuccessor()
    parts = outside(fuses, lamps)
    parts.hand_over()
    parts.close()
    assert (fuses.calls, lamps.calls) == (["close"], ["hand over"])


def test_drivers_made_before_one_that_cannot_be_made_are_closed() -> None:
    fuses = OneByOne()

    class Half:
        def drivers(self) -> Iterable[Driver]:
            yield fuses
            raise OSError("no power")

    with pytest.raises(OSError, match="no power"):
        Outside(Half())  # type: ignore[arg-type] # it has what is used
    assert fuses.calls == ["close"]
