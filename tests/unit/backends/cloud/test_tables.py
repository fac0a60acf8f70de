"""The tables over any cloud: whose each route is, when it counts as made, and what is told of refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.cloud.contract import (
    ApiCall,
    Cloud,
    CloudError,
    CloudNode,
    CloudRoute,
    CloudTableEntry,
    ErrorKind,
    Forwarding,
    Health,
)
from flanneld.backends.cloud.record import Record
from flanneld.backends.cloud.routes import CloudForwardingTable, CloudRoutes
from flanneld.config import parse
from flanneld.errors import Retryable
from flanneld.state.table import Claim, Put, Report, Scope
from tests.clock import Clock

OURS = "192.0.2.1"
NODE = CloudNode(("rtb-1", "rtb-2"), "hop-1", "i-1")
SUBNET, FORMER = IPv4Network("10.5.1.0/24"), IPv4Network("10.5.7.0/24")
WANT = CloudRoute(SUBNET, OURS)
RANGE = parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "pond"}}').ranges[0]


class Pond(Cloud):
    """A cloud that makes what it is told, unless it refuses."""

    def __init__(self) -> None:
        self.routes: list[CloudTableEntry] = []
        self.gone_hops: set[str] = set()
        self.refusal: CloudError | None = None
        self.asked: list[str] = []
        self.node = NODE

    def place(self, address: IPv4Address) -> CloudNode:
        assert str(address) == OURS
        self.asked.append("place")
        if self.refusal:
            raise self.refusal
        return self.node

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        assert place == self.node
        return list(self.routes)

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        assert place == self.node
        return [each for each in entries if each.hop in self.gone_hops]

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        self.asked.append(str(call))
        if self.refusal:
            raise self.refusal
        return {}

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        assert place == self.node
        return [ApiCall("Replace" if was else "Create", {"of": entry.table, "via": entry.hop})]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        return [ApiCall("Delete", {"of": str(entry.destination)})]


def entry(
    hop: str = "hop-1", net: IPv4Network = SUBNET, health: Health = Health.ACTIVE, table: str = "rtb-1"
) -> CloudTableEntry:
    return CloudTableEntry(table, net, hop, health)


@pytest.fixture
def pond() -> Pond:
    return Pond()


@pytest.fixture
def table(pond: Pond, tmp_path: Path, daemon_clock: Clock) -> CloudRoutes:
    del daemon_clock
    return CloudRoutes(pond, RANGE, Record(tmp_path / "flanneld.cloud", "pond"))


def read(table: CloudRoutes, *wanted: CloudRoute) -> dict[str, tuple[str, Claim]]:
    """Return the next hop and the owner of each destination, with its table if that has a name."""
    seen = table.read(Scope({each.key: each for each in wanted or (WANT,)}))
    found = [(each.resource, each.claim) for each in seen]
    return {
        f"{each.destination} {each.table}".strip(): (each.via, claim)
        for each, claim in found
        if isinstance(each, CloudRoute)
    }


def failure(report: Report) -> str:
    (found,) = report.failed
    return f"{found.reason}; {found.remedy}"


def test_cloud_is_not_asked_where_nothing_is_wanted(pond: Pond, table: CloudRoutes) -> None:
    assert table.read(Scope({})) == []
    assert pond.asked == []


@pytest.mark.parametrize(
    ("route", "gone", "seen"),
    [
        (entry(), set(), (OURS, Claim.OURS)),
        (entry(health=Health.DEAD), set(), ("hop-1, dead", Claim.OURS)),
        (entry(health=Health.PENDING), set(), (OURS, Claim.OURS)),
        (entry(net=FORMER), set(), (OURS, Claim.OURS)),
        (entry(net=IPv4Network("10.5.64.0/18")), set(), (OURS, Claim.FOREIGN)),
        (entry("hop-2"), set(), ("hop-2", Claim.FOREIGN)),
        (entry("hop-2"), {"hop-2"}, ("hop-2", Claim.LEFT)),
        (entry("hop-2", FORMER), {"hop-2"}, ("hop-2", Claim.LEFT)),
        (entry("hop-2", IPv4Network("10.5.64.0/18")), {"hop-2"}, ("hop-2", Claim.FOREIGN)),
    ],
    ids=[
        "ours", "ours and dead", "ours and pending", "our former one", "ours of another size",
        "a living node's in our place", "a dead node's in our place", "a dead node's",
        "a dead node's of another size",
    ],
)  # fmt: skip
def test_owner_of_a_route_is_told_by_its_hop_and_size(
    pond: Pond, table: CloudRoutes, route: CloudTableEntry, gone: set[str], seen: tuple[str, Claim]
) -> None:
    pond.routes, pond.gone_hops = [route], gone
    assert read(table) == {str(route.destination): seen}


def test_routes_outside_the_network_are_not_seen(pond: Pond, table: CloudRoutes) -> None:
    pond.routes = [entry(net=IPv4Network("10.6.1.0/24")), entry(net=IPv4Network("10.0.0.0/8"))]
    assert read(table) == {}


def test_of_two_routes_to_one_destination_ours_counts(pond: Pond, table: CloudRoutes) -> None:
    for order in (1, -1):
        pond.routes = [entry("hop-2"), entry()][::order]
        assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}


def test_tables_are_told_apart_where_the_config_names_them(pond: Pond, table: CloudRoutes) -> None:
    wanted = [CloudRoute(SUBNET, OURS, name) for name in NODE.tables]
    pond.routes = [entry(), entry("hop-2", table="rtb-2")]
    assert read(table, *wanted) == {
        f"{SUBNET} rtb-1": (OURS, Claim.OURS),
        f"{SUBNET} rtb-2": ("hop-2", Claim.FOREIGN),
    }
    assert table.put([Put(CloudRoute(SUBNET, OURS, "rtb-3"))]).made
    assert pond.asked[-1] == "Create of=rtb-3 via=hop-1"


def test_route_that_stays_pending_is_told_after_100_s(
    pond: Pond, table: CloudRoutes, daemon_clock: Clock
) -> None:
    pond.routes = [entry(health=Health.PENDING)]
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}
    assert table.next_look == daemon_clock.time + 5
    assert table.look()
    assert table.next_look == math.inf
    daemon_clock.time += 99
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}
    daemon_clock.time += 1
    was = CloudRoute(SUBNET, "hop-1, pending")
    assert read(table) == {str(SUBNET): (was.via, Claim.OURS)}
    assert failure(table.put([Put(WANT, was, Claim.OURS)])) == (
        "the cloud has not made it within 100 s; see what its console says of the route table"
    )
    pond.routes = [entry()]
    read(table)
    pond.routes = [entry(health=Health.PENDING)]
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}


def test_route_is_made_replaced_or_left(pond: Pond, table: CloudRoutes, daemon_clock: Clock) -> None:
    report = table.put([Put(WANT)])
    assert (report.made, report.details) == ([WANT], {WANT.key: "Create"})
    assert pond.asked == ["place", "Create of=rtb-1 via=hop-1"]
    pond.routes, pond.gone_hops = [entry("hop-2")], {"hop-2"}
    was = CloudRoute(SUBNET, "hop-2")
    read(table)
    assert table.explain(Put(WANT, was, Claim.LEFT)) == "Replace of=rtb-1 via=hop-1"
    assert table.put([Put(WANT, was, Claim.LEFT)]).details == {WANT.key: "Replace, it led to hop-2"}
    blocked = "a route of rtb-1 leads 10.5.1.0/24 to hop-2, which exists"
    assert table.explain(Put(WANT, was, Claim.FOREIGN)) == f"none, {blocked}"
    assert failure(table.put([Put(WANT, was, Claim.FOREIGN)])).startswith(f"{blocked}; if that is no node")
    daemon_clock.time += 10
    pond.routes = [entry()]
    read(table)
    asked = len(pond.asked)
    assert table.put([Put(WANT, WANT)]).details == {WANT.key: "it leads to this node already"}
    assert len(pond.asked) == asked


def test_own_write_counts_for_a_minute_though_no_read_shows_it(
    pond: Pond, table: CloudRoutes, daemon_clock: Clock
) -> None:
    table.put([Put(WANT)])
    assert table.next_look == daemon_clock.time + 5
    daemon_clock.time += 59
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}
    daemon_clock.time += 1
    assert read(table) == {}
    pond.routes = [entry(net=FORMER)]
    read(table)
    former = CloudRoute(FORMER, OURS)
    report = table.drop([former])
    assert (report.removed, report.details) == ([former], {former.key: "Delete, hop-1 is gone"})
    assert read(table) == {}
    daemon_clock.time += 60
    assert read(table) == {str(FORMER): (OURS, Claim.OURS)}


def test_another_node_s_route_beats_our_write(pond: Pond, table: CloudRoutes) -> None:
    table.put([Put(WANT)])
    pond.routes = [entry("hop-2")]
    assert read(table) == {str(SUBNET): ("hop-2", Claim.FOREIGN)}
    pond.gone_hops = {"hop-2"}
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}


@pytest.mark.parametrize(("kind", "holds_readings"), [(ErrorKind.THROTTLED, True), (ErrorKind.DENIED, False)])
def test_refused_change_is_held_back_and_a_throttled_one_holds_readings(
    pond: Pond, table: CloudRoutes, daemon_clock: Clock, kind: ErrorKind, holds_readings: bool
) -> None:
    pond.refusal = CloudError(kind, "not now", "wait")
    assert failure(table.put([Put(WANT)])) == "not now; wait"
    pond.refusal = None
    assert failure(table.put([Put(WANT)])) == "not now; wait"
    if holds_readings:
        with pytest.raises(Retryable, match="not now"):
            read(table)
    else:
        read(table)
    daemon_clock.time += 4
    assert table.put([Put(WANT)]).made == [WANT]
    assert read(table) == {str(SUBNET): (OURS, Claim.OURS)}


@pytest.mark.parametrize(
    ("kind", "readings"),
    [
        (ErrorKind.THROTTLED, 1),
        (ErrorKind.DENIED, 1),
        (ErrorKind.CREDENTIALS, 1),
        (ErrorKind.NO_TABLE, 1),
        (ErrorKind.OTHER, 2),
    ],
)
def test_refused_reading_is_not_repeated_at_once_and_one_without_an_answer_is(
    pond: Pond, table: CloudRoutes, daemon_clock: Clock, kind: ErrorKind, readings: int
) -> None:
    pond.refusal = CloudError(kind, "not now")
    for _ in range(2):
        with pytest.raises(Retryable, match="not now"):
            read(table)
    assert len(pond.asked) == readings
    pond.refusal = None
    daemon_clock.time += 4
    assert read(table) == {}


def test_removal_of_what_is_gone_already_succeeds(pond: Pond, table: CloudRoutes) -> None:
    pond.routes = [entry(net=FORMER)]
    read(table)
    pond.refusal = CloudError(ErrorKind.ABSENT, "no such route")
    former = CloudRoute(FORMER, OURS)
    assert table.drop([former]).removed == [former]
    asked = len(pond.asked)
    unknown = CloudRoute(IPv4Network("10.5.8.0/24"), OURS)
    assert table.drop([unknown]).removed == [unknown]
    assert len(pond.asked) == asked


# ---- forwarding ------------------------------------------------------------------------------------


class Filtering(Pond):
    """A cloud that drops packets of containers until it is told otherwise."""

    filters_addresses = True

    def forwarding_calls(self, place: CloudNode) -> list[ApiCall]:
        return [ApiCall("Forward", {"at": place.hop})]

    def forwarding_remedy(self, place: CloudNode) -> str:
        return f"switch it on for {place.instance}"


WISH = Forwarding(IPv4Address(OURS))


@pytest.mark.usefixtures("daemon_clock")
def test_permission_to_forward_is_read_and_given() -> None:
    pond = Filtering()
    pond.node = CloudNode(("rtb-1",), "hop-1", "i-1", forwards=False)
    table = CloudForwardingTable(pond)
    assert table.explain(Put(WISH)) == ""
    found = table.read(Scope({WISH.key: WISH}))
    assert [each.resource for each in found] == [Forwarding(WISH.address, allowed=False)]
    assert table.explain(Put(WISH)) == "Forward at=hop-1"
    assert table.put([Put(WISH)]).made == [WISH]
    assert pond.asked == ["place", "Forward at=hop-1"]
    assert table.drop([WISH]).removed == [WISH]
    assert pond.asked == ["place", "Forward at=hop-1"]


@pytest.mark.parametrize(
    ("kind", "refusal", "text"),
    [
        (Filtering, CloudError(ErrorKind.DENIED, "denied"), ": denied; switch it on for i-1"),
        (Pond, None, "; "),
    ],
    ids=["refused", "for the operator only"],
)
def test_permission_that_cannot_be_given_is_told_and_asked_for_later(
    kind: type[Any], refusal: CloudError | None, text: str, daemon_clock: Clock
) -> None:
    pond = kind()
    table = CloudForwardingTable(pond)
    table.read(Scope({WISH.key: WISH}))
    pond.refusal = refusal
    expected = f"the cloud drops packets of containers at i-1{text}"
    assert failure(table.put([Put(WISH)])) == expected
    asked = len(pond.asked)
    assert failure(table.put([Put(WISH)])) == expected
    assert len(pond.asked) == asked
    pond.refusal = None
    daemon_clock.time += 4
    assert bool(table.put([Put(WISH)]).made) is (kind is Filtering)
