"""Wanted objects beside those that the kernel holds, compared by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl import compare as comparison
from flanneld.ctl.compare import (
    ActualState,
    Comparison,
    Difference,
    Outside,
    compare,
    described,
    desired_objects,
    outside,
)
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.netlink import DumpInterrupted
from flanneld.state.resources import FdbEntry, ForeignLink, Resource, Route, Vxlan
from flanneld.state.table import Scope, Seen
from tests.unit.ctl.documents import object_of, status_of

MAC = "02:00:00:00:00:01"
DEVICE = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, MAC, 1450)
ROUTE = Route(IPv4Network("10.5.2.0/24"), "flannel.1", IPv4Address("10.5.2.0"), onlink=True)
FDB = FdbEntry("flannel.1", MAC, IPv4Address("192.0.2.2"))
LINKS = (SeenLink(2, "eth0", MAC, 1500, True, ForeignLink("eth0", "a plain interface")),)


def document(*objects: Resource, conflicts: Sequence[str] = ()) -> dict[str, Any]:
    peer = {
        "subnets": ["10.5.2.0/24"],
        "conflicts": conflicts,
        "objects": [object_of(each) for each in objects],
    }
    return {"local": [object_of(DEVICE)], "peers": [peer]}


def compared(document: dict[str, Any], found: ActualState) -> list[Comparison]:
    told = status_of(document)
    return compare(told, desired_objects(told), found)


def states(told: dict[str, Any], *there: Resource, foreign: Sequence[Resource] = ()) -> dict[Resource, str]:
    objects = {**dict.fromkeys(there, True), **dict.fromkeys(foreign, False)}
    return {entry.value: entry.state for entry in compared(told, ActualState(objects, LINKS))}


def test_what_is_there_as_wanted_is_ok() -> None:
    wanted: dict[Resource, str] = {DEVICE: "ok", ROUTE: "ok", FDB: "ok"}
    assert states(document(ROUTE, FDB), DEVICE, ROUTE, FDB) == wanted


def test_what_is_not_there_is_missing_and_what_is_not_wanted_is_told() -> None:
    stale = replace(ROUTE, destination=IPv4Network("10.5.9.0/24"))
    wanted: dict[Resource, str] = {DEVICE: "ok", ROUTE: "missing", stale: "not wanted"}
    assert states(document(ROUTE), DEVICE, stale) == wanted


@pytest.mark.parametrize(("is_there", "state"), [(True, "ok"), (False, "missing")])
def test_object_outside_the_kernel_is_as_the_daemon_tells(is_there: bool, state: str) -> None:
    told = document()
    plain = {"kind": "rule", "text": "masquerading", "value": None, "in_kernel": is_there, "table": "nft"}
    told["local"].append(plain)
    (found,) = outside(status_of(told))
    assert (found.value, found.state) == (Outside("masquerading", "nft"), state)


def test_an_entry_that_leads_to_another_port_is_not_the_wanted_one() -> None:
    assert states(document(FDB), DEVICE, replace(FDB, has_overrides=True))[FDB] == "different"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"port": 8473}, Difference("port", "8473", "8472")),
        ({"parent": 7}, Difference("parent", "interface 7", "eth0")),
        ({"learning": True}, Difference("learning", "on", "off")),
        ({"gbp": True}, Difference("gbp", "on", "off")),
        ({"up": False}, Difference("up", "off", "on")),
        ({"mtu": 1400}, Difference("mtu", "1400", "1450")),
        ({"vni": 2}, Difference("vni", "2", "1")),
        ({"mac": "02:00:00:00:00:99"}, Difference("mac", "02:00:00:00:00:99", MAC)),
        ({"local": IPv4Address("192.0.2.9")}, Difference("local", "192.0.2.9", "192.0.2.1")),
    ],
    ids=lambda each: each.name if isinstance(each, Difference) else "",
)
def test_each_property_of_a_device_that_differs_is_named(
    change: dict[str, Any], difference: Difference
) -> None:
    found = ActualState({replace(DEVICE, **change): True}, LINKS)
    (entry,) = compared({"local": [object_of(DEVICE)], "peers": []}, found)
    assert (entry.state, entry.differences) == ("different", (difference,))
    assert described(entry)["differences"][0]["property"] == difference.name


def test_a_device_of_another_kind_is_named_with_its_kind() -> None:
    found = ActualState({ForeignLink("flannel.1", "a device of kind bridge", "bridge"): True}, LINKS)
    (entry,) = compared({"local": [object_of(DEVICE)], "peers": []}, found)
    assert entry.differences == (Difference("kind", "a device of kind bridge", "vxlan"),)


def test_a_route_of_others_is_neither_ours_nor_left_over() -> None:
    other = replace(ROUTE, device="eth0", onlink=False)
    wanted: dict[Resource, str] = {DEVICE: "ok", ROUTE: "missing"}
    assert states(document(ROUTE), DEVICE, foreign=[other]) == wanted


def test_an_object_that_another_lease_has_won_is_not_missing() -> None:
    assert states(document(FDB, conflicts=["10.5.3.0/24"]), DEVICE) == {DEVICE: "ok"}


def test_without_the_wanted_objects_all_of_ours_is_just_found() -> None:
    assert states({}, ROUTE, foreign=[FDB]) == {ROUTE: "found"}


class Unsteady:
    """Table that changes while it is read, a number of times."""

    name = "routes"

    def __init__(self, changes: int) -> None:
        self.changes = changes

    def read(self, _: Scope) -> Iterator[Seen]:
        yield Seen(ROUTE)
        self.changes -= 1
        if self.changes >= 0:
            raise DumpInterrupted


def test_table_that_changes_while_a_daemon_starts_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = status_of(document(ROUTE))
    monkeypatch.setattr(comparison, "tables", lambda _: [Unsteady(4)])
    assert ROUTE in comparison.read(told).objects
    monkeypatch.setattr(comparison, "tables", lambda _: [Unsteady(5)])
    with pytest.raises(DumpInterrupted):
        comparison.read(told)
