"""The model of a kernel holds, refuses and forgets as Linux does."""

from __future__ import annotations

from functools import cache
from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.network.rtnetlink.domain import Domain
from flanneld.state.resources import Address, FdbEntry, ForeignLink, Neighbor, Resource, Route, Vxlan
from flanneld.state.table import Claim, Put, Report, Scope
from tests.unit.simulation.kernel import Kernel, KernelError
from tests.unit.simulation.kernel_tables import KernelTable, by_table, tables

HERE, PEER = IPv4Address("172.16.0.1"), IPv4Address("172.16.0.2")
LINK = Vxlan("flannel.1", 1, 2, HERE, 8472, "02:00:00:00:00:01", 1450)
SUBNET = IPv4Network("10.0.7.0/24")
BASE = SUBNET.network_address
MAC = "02:00:00:00:00:02"
ROUTE = Route(SUBNET, "flannel.1", BASE, onlink=True)
ALL: tuple[Resource, ...] = (
    LINK,
    Address("flannel.1", BASE),
    Neighbor("flannel.1", BASE, MAC),
    FdbEntry("flannel.1", MAC, PEER),
    ROUTE,
)
FOREIGN = Route(SUBNET, "eth0", IPv4Address("172.16.0.9"))


@pytest.fixture
def kernel() -> Kernel:
    made = Kernel("eth0", (HERE, 16))
    made.domain = Domain("eth0", frozenset({LINK.name}), ((IPv4Network("10.0.0.0/14"), 24),))
    return made


@cache
def tables_of(kernel: Kernel) -> dict[str, KernelTable]:
    """Return the tables of one run."""
    return tables(kernel)


def put(kernel: Kernel, *resources: Resource, was: Resource | None = None) -> Report:
    report = Report()
    for name, desired in by_table(resources).items():
        report.add(tables_of(kernel)[name].put([Put(want, was) for want in desired.values()]))
    return report


def claims(table: KernelTable) -> dict[str, Claim]:
    desired = {LINK.key: LINK}
    return {str(seen.resource): seen.claim for seen in table.read(Scope(desired))}


def test_all_is_made_in_order_and_read_back_as_ours(kernel: Kernel) -> None:
    report = put(kernel, *ALL)
    assert (report.made, report.failed) == (list(ALL), [])
    for resource, table in zip(ALL, tables_of(kernel).values(), strict=True):
        assert claims(table)[str(resource)] is Claim.OURS


def test_without_its_device_nothing_is_made(kernel: Kernel) -> None:
    assert [failure.reason for failure in put(kernel, *ALL[1:]).failed] == ["No such device"] * 4


@pytest.mark.parametrize("resource", [ALL[1], ROUTE], ids=str)
def test_existing_object_is_not_created_again(kernel: Kernel, resource: Resource) -> None:
    put(kernel, *ALL)
    (failure,) = put(kernel, resource).failed
    assert (failure.reason, failure.is_taken) == ("File exists", True)


def test_with_a_device_goes_all_that_stands_on_it(kernel: Kernel) -> None:
    put(kernel, *ALL)
    kernel.delete_link(LINK.name)
    ours = {
        name: [claim for claim in claims(table).values() if claim is Claim.OURS]
        for name, table in tables_of(kernel).items()
    }
    assert ours == {name: [] for name in tables_of(kernel)}
    assert kernel.route_to(PEER) == Route(IPv4Network("172.16.0.0/16"), "eth0")


def test_device_that_is_down_has_no_routes_and_keeps_its_entries(kernel: Kernel) -> None:
    put(kernel, *ALL)
    kernel.set_down(LINK.name)
    assert kernel.route_to(BASE) is None
    assert len(kernel.neighbors) == len(kernel.fdb) == len(kernel.addresses(4)) - 1 == 1
    (seen,) = [
        seen for seen in tables_of(kernel)["links"].read(Scope({LINK.key: LINK})) if seen.claim is Claim.OURS
    ]
    assert seen.resource != LINK
    assert put(kernel, ROUTE).failed[0].reason == "Network is down"
    assert put(kernel, LINK, was=seen.resource).failed == []
    assert put(kernel, ROUTE).failed == []


def test_route_of_ours_is_replaced_and_that_of_others_is_not(kernel: Kernel) -> None:
    put(kernel, *ALL)
    other = Route(SUBNET, "eth0", PEER)
    assert put(kernel, other, was=ROUTE).failed == []
    assert kernel.route_to(BASE) == other
    kernel.delete_route(other)
    kernel.add_route(FOREIGN, 4)
    (failure,) = tables(kernel)["routes"].put([Put(ROUTE, FOREIGN, Claim.FOREIGN)]).failed
    assert "is not flannel's" in failure.reason
    assert kernel.route_to(BASE) == FOREIGN
    assert claims(tables_of(kernel)["routes"])[str(FOREIGN)] is Claim.FOREIGN


def test_prefix_has_several_routes_of_which_the_lowest_metric_counts(kernel: Kernel) -> None:
    put(kernel, LINK)
    kernel.add_route(FOREIGN, 4, 200)
    assert put(kernel, ROUTE).failed == []
    assert kernel.route_to(BASE) == ROUTE
    with pytest.raises(KernelError, match="File exists"):
        kernel.add_route(FOREIGN, 4, 200)
    tables_of(kernel)["routes"].drop([ROUTE])
    assert kernel.route_to(BASE) == FOREIGN


def test_longest_prefix_counts_before_the_metric(kernel: Kernel) -> None:
    longer = Route(IPv4Network("10.0.7.128/25"), "eth0", PEER)
    put(kernel, *ALL)
    kernel.add_route(longer, 4, 500)
    assert kernel.route_to(BASE + 1) == ROUTE
    assert kernel.route_to(BASE + 129) == longer


def test_gateway_that_is_on_no_link_is_refused_unless_onlink(kernel: Kernel) -> None:
    put(kernel, LINK)
    (failure,) = put(kernel, Route(SUBNET, "flannel.1", BASE)).failed
    assert failure.reason == "Network is unreachable"


def test_neighbours_and_entries_are_replaced(kernel: Kernel) -> None:
    put(kernel, *ALL)
    assert put(kernel, Neighbor("flannel.1", BASE, "02:00:00:00:00:03")).failed == []
    assert put(kernel, FdbEntry("flannel.1", MAC, HERE)).failed == []
    assert [each.mac for each in kernel.neighbors.values()] == ["02:00:00:00:00:03"]
    assert [each.remote for each in kernel.fdb.values()] == [HERE]


def test_device_of_another_kind_under_our_name_is_not_replaced(kernel: Kernel) -> None:
    foreign = ForeignLink(LINK.name, "dummy")
    kernel.add_link(foreign)
    assert put(kernel, LINK, was=foreign).failed[0].is_taken
    assert kernel.devices[LINK.name] == foreign


def test_dropping_what_is_gone_is_no_failure(kernel: Kernel) -> None:
    put(kernel, LINK)
    for resource, table in zip(ALL[1:], [*tables_of(kernel).values()][1:], strict=True):
        report = table.drop([resource])
        assert (report.removed, report.failed) == ([], [])
