"""Tables of the kernel's objects: what is made of its messages, and what it is told."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, ip_address, ip_network

import pytest

from flanneld.network import host
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import MANY, SPREAD, Behind, Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.tables import AddressTable, FdbTable, NeighborTable, RouteTable, tables
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    Blackhole,
    FdbEntry,
    Neighbor,
    Resource,
    RivalRoute,
    Route,
)
from flanneld.state.table import Claim, Failure, Put, Scope, Seen
from tests.unit.network.stand_ins import (
    BLACKHOLE,
    UNREACHABLE,
    FakeSocket,
    address,
    name_of,
    neighbor,
    route,
)

DOMAIN = Domain(
    "eth0",
    frozenset({"flannel.1", "gone"}),
    ((ip_network("10.1.0.0/16"), 24), (ip_network("fd01::/48"), 64)),
    bridging=frozenset({"flannel.1"}),
)
KERNELS, STATIC = 2, 4
MAC, OTHER_MAC = "02:00:00:00:00:06", "02:00:00:00:00:07"


@pytest.fixture
def netlink(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    found = FakeSocket()

    def named(index: int) -> str:
        if (name := name_of(index)) is None:
            raise OSError(errno.ENXIO, "No such device or address")
        return name

    monkeypatch.setattr(host, "NetlinkSocket", found)
    monkeypatch.setattr(socket, "if_nametoindex", found.index_of)
    monkeypatch.setattr(socket, "if_indextoname", named)
    return found


def scope(*desired: Resource, adopt: bool = False) -> Scope:
    return Scope({each.key: each for each in desired}, adopt)


# ---- addresses and entries -----------------------------------------------------------------------


def test_host_addresses_on_our_devices_are_ours_inside_the_network(netlink: FakeSocket) -> None:
    netlink.objects = {
        (rtnl.RTM_GETADDR, 2): [
            address("flannel.1", "10.1.5.0", 32),
            address("flannel.1", "192.0.2.9", 32),
            address("flannel.1", "10.1.5.1", 24),
            address("eth0", "10.1.5.2", 32),
        ],
        (rtnl.RTM_GETADDR, 10): [
            address("flannel.1", "fd01::5", 128),
            address("flannel.1", "fe80::5", 64),
        ],
    }
    assert list(AddressTable(Kernel(DOMAIN)).read(scope())) == [
        Seen(Address("flannel.1", ip_address("10.1.5.0"))),
        Seen(Address("flannel.1", ip_address("192.0.2.9")), Claim.FOREIGN),
        Seen(Address("flannel.1", ip_address("fd01::5"))),
    ]


NEIGHBOR = Neighbor("flannel.1", ip_address("10.1.6.0"), MAC)
NEIGHBOR6 = Neighbor("flannel.1", ip_address("fd01:0:0:6::"), MAC)
ENTRY = FdbEntry("flannel.1", MAC, ip_address("192.0.2.6"))


@pytest.mark.parametrize("desired", [[], [NEIGHBOR], [NEIGHBOR6]])
def test_permanent_neighbours_of_our_devices_are_read(desired: list[Resource], netlink: FakeSocket) -> None:
    netlink.objects = {
        (rtnl.RTM_GETNEIGH, 2): [
            neighbor("flannel.1", "10.1.6.0", MAC),
            neighbor("flannel.1", "10.1.7.0", OTHER_MAC),
            neighbor("flannel.1", "10.1.8.0", MAC, state=2),
            neighbor("eth0", "10.1.9.0", MAC),
        ],
        (rtnl.RTM_GETNEIGH, 10): [neighbor("flannel.1", "fd01:0:0:6::", MAC)],
    }
    other = Neighbor("flannel.1", ip_address("10.1.7.0"), OTHER_MAC)
    found = list(NeighborTable(Kernel(DOMAIN), {}).read(scope(*desired)))
    assert found == [Seen(NEIGHBOR), Seen(other), Seen(NEIGHBOR6)]


@pytest.mark.parametrize("number", [5, 7])
def test_entry_with_another_end_is_read_as_it_is(number: int, netlink: FakeSocket) -> None:
    mac, remote = f"02:00:00:00:00:{number:02x}", ip_address(f"192.0.2.{number}")
    netlink.objects = {
        (rtnl.RTM_GETNEIGH, 2): [neighbor("flannel.1", "10.1.6.0", mac)],
        (rtnl.RTM_GETNEIGH, 7): [neighbor("flannel.1", str(remote), MAC, family=7)],
    }
    (found,) = NeighborTable(Kernel(DOMAIN), {}).read(scope(NEIGHBOR))
    assert found == Seen(Neighbor("flannel.1", ip_address("10.1.6.0"), mac))
    (entry,) = FdbTable(Kernel(DOMAIN)).read(scope(ENTRY))
    assert entry == Seen(FdbEntry("flannel.1", MAC, remote))


def test_forwarding_entries_are_read_of_devices_that_have_them(netlink: FakeSocket) -> None:
    netlink.objects = {(rtnl.RTM_GETNEIGH, 7): [neighbor("flannel.1", "192.0.2.6", MAC, family=7)]}
    (found,) = FdbTable(Kernel(DOMAIN)).read(scope(ENTRY))
    assert found.resource is ENTRY
    assert list(FdbTable(Kernel(DOMAIN)).read(scope())) == [Seen(ENTRY)]
    plain = Domain("eth0", DOMAIN.links, DOMAIN.ranges)
    assert list(FdbTable(Kernel(plain)).read(scope(ENTRY))) == []


def test_what_the_kernel_refuses_is_told_and_what_has_gone_is_removed(netlink: FakeSocket) -> None:
    table = AddressTable(Kernel(DOMAIN))
    made, refused = Address("flannel.1", ip_address("10.1.5.0")), Address("gone", ip_address("10.1.5.0"))
    report = table.put([Put(made), Put(refused)])
    assert report.made == [made]
    assert report.failed == [Failure(refused, "No such device", errno=errno.ENODEV)]
    for code in (errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENODEV):
        netlink.refusals = [{0: code}]
        report = table.drop([made])
        assert (report.removed, report.failed) == ([], [])
    netlink.refusals = [{0: errno.EPERM}]
    report = table.drop([made, refused])
    assert report.failed == [Failure(made, "Operation not permitted", errno=errno.EPERM)]
    assert netlink.written[:2] == ["replace address 10.1.5.0", "remove address 10.1.5.0"]


# ---- routes --------------------------------------------------------------------------------------

NET, NET6 = ip_network("10.1.6.0/24"), ip_network("fd01:0:0:6::/64")
WANTED = Route(NET, "flannel.1", ip_address("10.1.6.0"), onlink=True)
WANTED6 = Route(NET6, "flannel.1", ip_address("fd01:0:0:6::"), onlink=True)
GUARD = Blackhole(ip_network("10.1.0.0/16"))


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        (route("10.1.6.0/24", "flannel.1", "10.1.6.0", onlink=True), Seen(WANTED)),
        (route("10.1.6.0/24", "flannel.1", "10.1.6.0", SPREAD[0], onlink=True), Seen(WANTED)),
        (route("10.1.6.0/24", "flannel.1", "10.1.6.0", KERNELS, onlink=True), Seen(WANTED, Claim.FOREIGN)),
        (
            route("10.1.6.0/24", "flannel.1", "10.1.6.0"),
            Seen(Route(NET, "flannel.1", ip_address("10.1.6.0"))),
        ),
        (
            route("10.1.6.0/24", "flannel.1", "10.1.6.1", onlink=True),
            Seen(Route(NET, "flannel.1", ip_address("10.1.6.1"), onlink=True)),
        ),
        (route("10.1.6.0/24", "flannel.1"), Seen(Route(NET, "flannel.1"))),
        (route("10.1.6.0/24", "cni0"), Seen(Route(NET, "cni0"), Claim.FOREIGN)),
        (
            route("10.1.6.0/24", "eth1", "192.0.2.9", STATIC),
            Seen(Route(NET, "eth1", ip_address("192.0.2.9")), Claim.FOREIGN),
        ),
        (
            route("10.1.6.0/24", "cni0", None, KERNELS),
            Seen(RivalRoute(WANTED.key, is_connected=True), Claim.FOREIGN),
        ),
        (
            route("10.1.6.0/24", "", None, STATIC, kind=UNREACHABLE),
            Seen(RivalRoute(WANTED.key), Claim.FOREIGN),
        ),
        (route("10.1.6.0/24", "flannel.1", "10.1.6.0", metric=100), None),
        (
            route("10.1.7.0/24", "eth0", "192.0.2.7"),
            Seen(Route(ip_network("10.1.7.0/24"), "eth0", ip_address("192.0.2.7")), Claim.FOREIGN),
        ),
        (
            route("10.1.7.0/24", "eth1", "192.0.2.7", PROTO_FLANNEL),
            Seen(Route(ip_network("10.1.7.0/24"), "eth1", ip_address("192.0.2.7"))),
        ),
        (
            route("10.2.7.0/24", "eth1", "192.0.2.7", PROTO_FLANNEL),
            Seen(Route(ip_network("10.2.7.0/24"), "eth1", ip_address("192.0.2.7")), Claim.FOREIGN),
        ),
        (route("10.1.7.0/24", "eth1", "192.0.2.7"), None),
        (route("10.1.7.0/24", "flannel.9", "10.1.7.0"), None),
        (route("10.1.0.0/16", "", None, PROTO_FLANNEL, kind=BLACKHOLE, metric=65535), Seen(GUARD)),
        (
            route("10.2.0.0/16", "", None, PROTO_FLANNEL, kind=BLACKHOLE, metric=65535),
            Seen(Blackhole(ip_network("10.2.0.0/16")), Claim.FOREIGN),
        ),
        (route("10.1.0.0/16", "", None, STATIC, kind=BLACKHOLE, metric=65535), None),
        (route("fd01:0:0:6::/64", "flannel.1", "fd01:0:0:6::", onlink=True), Seen(WANTED6)),
    ],
)
def test_route_is_ours_or_stands_where_ours_should_be_or_is_no_matter(
    found: bytes, seen: Seen | None, netlink: FakeSocket
) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, found[0]] = [found]
    table = RouteTable(Kernel(DOMAIN), {})
    assert list(table.read(scope(WANTED, WANTED6))) == ([seen] if seen else [])


@pytest.mark.parametrize(
    ("found", "is_adopted"),
    [
        (route("10.1.7.0/24", "flannel.9", "10.1.7.0"), True),
        (route("10.1.7.0/24", "flannel.9", "10.1.7.0", SPREAD[7]), True),
        (route("10.1.7.0/24", "flannel.9", "10.1.7.0", STATIC), False),
        (route("10.1.7.0/24", "eth1", "192.0.2.7"), False),
        (route("10.1.7.0/24", "flannel.9", "10.1.7.0", metric=5), False),
    ],
)
def test_routes_that_another_backend_left_are_adopted(
    found: bytes, is_adopted: bool, netlink: FakeSocket
) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [found]
    table = RouteTable(Kernel(DOMAIN), {})
    assert list(table.read(scope(WANTED))) == []
    left = Route(ip_network("10.1.7.0/24"), "flannel.9", ip_address("10.1.7.0"))
    assert list(table.read(scope(WANTED, adopt=True))) == ([Seen(left)] if is_adopted else [])


def test_routes_through_a_device_of_desired_ones_are_read(netlink: FakeSocket) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [route("10.1.7.0/24", "eth1", "192.0.2.7")]
    other = Route(ip_network("10.1.7.0/24"), "eth1", ip_address("192.0.2.7"))
    desired = scope(Route(NET, "eth1", ip_address("192.0.2.6")))
    assert list(RouteTable(Kernel(DOMAIN), {}).read(desired)) == [Seen(other, Claim.FOREIGN)]


def test_route_without_a_gateway_is_not_one_with_a_gateway(netlink: FakeSocket) -> None:
    netlink.objects[rtnl.RTM_GETROUTE, 2] = [route("10.1.6.0/24", "flannel.1", "10.1.6.0", onlink=True)]
    desired = scope(Route(NET, "flannel.1"))
    assert list(RouteTable(Kernel(DOMAIN), {}).read(desired)) == [Seen(WANTED)]


WRONG = Route(NET, "flannel.1", ip_address("10.1.6.9"), onlink=True)
CONNECTED = RivalRoute(WANTED.key, is_connected=True)


def known(netlink: FakeSocket, *routes: Route) -> RouteTable:
    """A table that made these routes."""
    table = RouteTable(Kernel(DOMAIN), {})
    assert table.put([Put(each) for each in routes]).made == list(routes)
    netlink.written.clear()
    return table


@pytest.mark.parametrize(
    ("put", "is_known", "written"),
    [
        (Put(WANTED), False, [f"add {WANTED}"]),
        (Put(WANTED, WRONG, Claim.OURS), True, [f"replace {WANTED}"]),
        (Put(WANTED, WRONG), False, [f"add {WANTED}"]),
        (Put(WANTED, CONNECTED), True, [f"add {WANTED}"]),
        (Put(WANTED, Behind(WANTED), Claim.OURS), True, [f"remove {WANTED}", f"put in front {WANTED}"]),
        (Put(WANTED, WRONG, Claim.FOREIGN), False, []),
        (Put(WANTED, CONNECTED, Claim.FOREIGN), True, []),
    ],
)
def test_route_replaces_ours_and_no_others(
    put: Put, is_known: bool, written: list[str], netlink: FakeSocket
) -> None:
    table = known(netlink, *([WANTED] if is_known else []))
    report = table.put([put])
    assert netlink.written == written
    assert report.made == ([WANTED] if written else [])
    reason = f"{put.was} stands there and is not flannel's"
    remedy = "remove that route if nothing needs it, or choose another Network"
    assert report.failed == ([] if written else [Failure(WANTED, reason, remedy)])


def test_precedence_of_several_routes_is_told_in_one_line(
    netlink: FakeSocket, caplog: pytest.LogCaptureFixture
) -> None:
    others = [Route(ip_network(f"10.1.{n}.0/24"), "flannel.1", ip_address(f"10.1.{n}.0")) for n in (7, 8, 9)]
    table = known(netlink, *others)
    table.put([Put(others[0], Behind(others[0]))])
    table.put([Put(each, Behind(each)) for each in others])
    assert [record.getMessage() for record in caplog.records] == [
        "Restored the precedence of our route to 10.1.7.0/24 over another route",
        "Restored the precedence of our route to 10.1.7.0/24 and 2 more over another route",
    ]


SEE = "see `ip route get fd01:0:0:6::`: if it names another device, remove that route"


@pytest.mark.parametrize(
    ("wanted", "code", "is_taken", "remedy"),
    [
        (WANTED, errno.EEXIST, True, ""),
        (WANTED, errno.EINVAL, True, ""),
        (WANTED, errno.EPERM, False, ""),
        (WANTED6, errno.EINVAL, True, SEE),
        (WANTED6, errno.EEXIST, True, ""),
        (WANTED6, errno.ENOBUFS, False, ""),
    ],
)
def test_new_route_that_is_refused_may_have_a_rival(
    wanted: Route, code: int, is_taken: bool, remedy: str, netlink: FakeSocket
) -> None:
    netlink.refusals = [{}, {1: code}]
    table = known(netlink, Route(ip_network("10.1.9.0/24"), "flannel.1"))
    other = Route(ip_network("10.1.7.0/24"), "flannel.1")
    report = table.put([Put(other), Put(wanted)])
    assert report.made == [other]
    (failure,) = report.failed
    assert (failure.resource, failure.is_taken, failure.errno) == (wanted, is_taken, code)
    assert failure.remedy == remedy
    netlink.written.clear()
    table.drop([wanted, other])  # the refused one is not ours
    assert netlink.written == [f"remove {other}"]


def test_route_whose_neighbour_was_refused_waits_for_it(netlink: FakeSocket) -> None:
    *_, neighbors, _, routes = tables(Kernel(DOMAIN))
    netlink.refusals = [{0: errno.ENOBUFS}]
    assert neighbors.put([Put(NEIGHBOR)]).failed
    netlink.written.clear()
    other = Route(ip_network("10.1.7.0/24"), "flannel.1")
    report = routes.put([Put(WANTED), Put(other)])
    assert (report.made, report.failed) == ([other], [Failure(WANTED, "No buffer space available")])
    assert netlink.written == [f"add {other}"]
    assert neighbors.put([Put(NEIGHBOR)]).made == [NEIGHBOR]
    assert routes.put([Put(WANTED)]).made == [WANTED]


WRONG6 = Route(NET6, "flannel.1", ip_address("fd01:0:0:6::9"), onlink=True)


@pytest.mark.parametrize(
    ("was", "code", "again", "is_made", "written"),
    [
        (WRONG6, 0, {}, True, [f"replace {WANTED6}"]),
        (WRONG6, errno.EPERM, {}, False, [f"replace {WANTED6}"]),
        (WRONG6, errno.EINVAL, {}, True, [f"replace {WANTED6}", f"remove {WRONG6}", f"replace {WANTED6}"]),
        (
            WRONG6,
            errno.EINVAL,
            {0: errno.EINVAL},
            False,
            [f"replace {WANTED6}", f"remove {WRONG6}", f"replace {WANTED6}"],
        ),
        (
            RivalRoute(WANTED6.key),
            errno.EINVAL,
            {},
            True,
            [f"replace {WANTED6}", f"remove {Route(NET6, 'any')}", f"replace {WANTED6}"],
        ),
    ],
)
def test_route_that_ipv6_cannot_replace_is_removed_first(
    was: Resource, code: int, again: dict[int, int], is_made: bool, written: list[str], netlink: FakeSocket
) -> None:
    table = known(netlink, WANTED, WANTED6)
    netlink.refusals = [{1: code} if code else {}, {}, {}, again]
    report = table.put([Put(WANTED, WRONG), Put(WANTED6, was)])
    assert [each for each in netlink.written if each != f"replace {WANTED}"] == written
    assert report.made == ([WANTED, WANTED6] if is_made else [WANTED])
    assert [each.resource for each in report.failed] == ([] if is_made else [WANTED6])


def test_route_of_ipv4_that_is_refused_is_not_removed(netlink: FakeSocket) -> None:
    table = known(netlink, WANTED)
    netlink.refusals = [{0: errno.EINVAL}]
    assert table.put([Put(WANTED, WRONG)]).failed
    assert netlink.written == [f"replace {WANTED}"]


def test_only_routes_of_ours_are_removed_and_refused_ones_stay_ours(netlink: FakeSocket) -> None:
    table = known(netlink, WANTED, WANTED6)
    netlink.refusals = [{1: errno.EPERM}]
    others = Route(ip_network("10.1.7.0/24"), "eth1")
    report = table.drop([WANTED, others, WANTED6])
    assert (report.removed, [each.resource for each in report.failed]) == ([WANTED], [WANTED6])
    netlink.written.clear()
    table.drop([WANTED, others, WANTED6])
    assert netlink.written == [f"remove {WANTED6}"]


def subnets(count: int) -> Sequence[Route]:
    nets = list(IPv4Network("10.1.0.0/16").subnets(new_prefix=28))[:count]
    return [Route(net, "flannel.1", net.network_address) for net in nets]


@pytest.mark.parametrize(
    ("count", "spread", "varies"),
    [(3, True, False), (MANY, True, False), (MANY + 1, True, True), (MANY + 1, False, False)],
)
def test_numbers_of_many_routes_vary(count: int, spread: bool, varies: bool, netlink: FakeSocket) -> None:
    table = RouteTable(Kernel(DOMAIN), {}, spread=spread)
    table.put([Put(each) for each in subnets(count)])
    assert set(netlink.protocols) == (set(SPREAD) if varies else {PROTO_BOOT})


def test_routes_that_are_there_count_among_the_many(netlink: FakeSocket) -> None:
    *_, table = tables(Kernel(DOMAIN))
    some = subnets(MANY + 1)
    table.put([Put(each) for each in some[:-1]])
    netlink.protocols.clear()
    table.put([Put(some[-1])])
    assert netlink.protocols[0] in SPREAD
