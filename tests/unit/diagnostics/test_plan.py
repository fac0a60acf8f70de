"""The plan: what a table in a dry run reads and records, and the lines that an operator gets of that."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from flanneld.diagnostics.plan import Notes, Outcome, kernel_lines
from flanneld.errors import Retryable
from flanneld.model import Uplink
from flanneld.network.rtnetlink.domain import Behind, Domain
from flanneld.state.resources import Address, Key, Link, Resource, Route, Vxlan
from flanneld.state.table import Put, Report, Scope, Seen
from tests.unit.reconcile.simulated_table import SimulatedTable, Thing

DEVICE = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, "02:00:00:00:00:01", 1450)
OWN = Address("flannel.1", IPv4Address("10.5.1.0"))
TWO, THREE = (
    Route(IPv4Network(f"10.5.{number}.0/24"), "flannel.1", IPv4Address(f"10.5.{number}.0"))
    for number in (2, 3)
)
OUTCOME = cast(
    "Outcome",
    SimpleNamespace(
        uplink=Uplink("eth0", 2, 1500, IPv4Address("192.0.2.1")),
        domain=Domain(uplink="eth0", links=frozenset({"flannel.1"}), ranges=()),
        spread=False,
    ),
)


def table(name: str, *held: Resource, unreadable: str = "") -> SimulatedTable:
    made = SimulatedTable(name)
    made.held = {each.key: Seen(each) for each in held}
    made.unreadable = unreadable
    return made


def lines(notes: Notes, *, local: bool) -> list[str]:
    return list(
        kernel_lines(cast("Outcome", SimpleNamespace(**{**vars(OUTCOME), "notes": notes})), local=local)
    )


def test_devices_and_addresses_come_first_then_what_goes_and_what_leads_to_peers() -> None:
    notes = Notes()
    links, addresses, routes = (table(name) for name in ("links", "addresses", "routes"))
    notes.take(links).put([Put(DEVICE)])
    notes.take(addresses).put([Put(OWN)])
    recording = notes.take(routes)
    assert recording.put([Put(TWO)]) == recording.drop([THREE]) == Report()
    assert not recording.vital
    *made, address = lines(notes, local=True)
    assert made[0].startswith("ip link add flannel.1 ")
    assert address == "ip address replace 10.5.1.0/32 dev flannel.1"
    assert lines(notes, local=False) == [
        "ip route del 10.5.3.0/24 via 10.5.3.0 dev flannel.1",
        "ip route replace 10.5.2.0/24 via 10.5.2.0 dev flannel.1",
    ]
    assert [each.writes for each in (links, addresses, routes)] == [[], [], []]


def test_route_behind_another_one_comes_to_the_front() -> None:
    notes = Notes()
    notes.take(table("routes")).put([Put(TWO, was=Behind(TWO))])
    assert notes.puts == {}
    assert lines(notes, local=False) != []
    assert all("10.5.2.0/24" in line for line in lines(notes, local=False))


@pytest.mark.parametrize(
    ("was", "remains"),
    [
        pytest.param(replace(DEVICE, vni=2), False, id="another VNI"),
        pytest.param(replace(DEVICE, mtu=1400), True, id="another MTU"),
        pytest.param(None, True, id="no device"),
    ],
)
def test_what_is_on_a_device_that_is_replaced_counts_as_lost(was: Link | None, remains: bool) -> None:
    notes = Notes()
    notes.take(table("links")).put([Put(DEVICE, was=was)])
    seen = notes.take(table("routes", TWO)).read(Scope({}))
    assert [each.resource for each in seen] == ([TWO] if remains else [])


class Explaining(SimulatedTable):
    """A table that tells its calls, but for one resource that it cannot tell of."""

    def explain(self, put: Put, /) -> str:
        if put.want.key[1] == "silent":
            raise Retryable("no answer")
        return f"PUT /{put.want.key[1]}"


class Settings(Thing, frozen=True, gc=False):
    """A thing whose value does not show."""

    def __str__(self) -> str:
        return f"settings {self.name}"


@pytest.mark.parametrize(
    ("want", "held", "line"),
    [
        pytest.param(Thing("a", 1), None, "# new: thing a=1", id="new"),
        pytest.param(
            Thing("a", 1), Thing("a", 0), "# changed: thing a=1 in place of thing a=0", id="changed"
        ),
        pytest.param(
            Settings("a", 1),
            Settings("a", 0),
            "# changed: settings a, with other settings than it has",
            id="changed in what does not show",
        ),
    ],
)
def test_change_outside_the_kernel_is_a_comment(want: Thing, held: Thing | None, line: str) -> None:
    for kind, calls in ((SimulatedTable, ""), (Explaining, ": PUT /a")):
        notes, made = Notes(), kind("things")
        made.held = {held.key: Seen(held)} if held else dict[Key, Seen]()
        recording = notes.take(made)
        assert [each.resource for each in recording.read(Scope({}))] == ([held] if held else [])
        recording.put([Put(want)])
        assert lines(notes, local=False) == [line + calls]
        assert lines(notes, local=True) == []
        assert made.writes == []


def test_what_goes_outside_the_kernel_and_calls_that_cannot_be_told() -> None:
    notes = Notes()
    recording = notes.take(Explaining("things"))
    recording.drop([Thing("b")])
    recording.put([Put(Thing("silent"))])
    assert lines(notes, local=False) == ["# no more: thing b=0", "# new: thing silent=0"]


def test_table_outside_the_kernel_may_be_silent_and_the_kernel_may_not() -> None:
    assert list(Notes().take(table("things", Thing("a"), unreadable="no answer")).read(Scope({}))) == []
    with pytest.raises(Retryable, match="no answer"):
        list(Notes().take(table("routes", TWO, unreadable="no answer")).read(Scope({})))
