"""What is written to a real kernel and read back from it, where that is not plain."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest
from msgspec.structs import replace

from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import Behind, Domain
from flanneld.network.rtnetlink.kernel import Kernel, Monitor, Notification, ResourceChanged, ResourceRemoved
from flanneld.network.rtnetlink.links import PORT_REMEDY, at_port_of
from flanneld.network.rtnetlink.tables import tables
from flanneld.reconcile.reconciler import desired_by_table
from flanneld.state.desired import difference
from flanneld.state.resources import Address, FdbEntry, Neighbor, Resource, Route, Vxlan
from flanneld.state.table import Put, Report, Scope
from tests.lab.changes import Changes
from tests.lab.namespace import Namespace, batch, remove
from tests.lab.wait import wait_for

MAC = "02:00:00:00:00:07"
SUBNET, SUBNET_V6 = ip_network("10.1.7.0/24"), ip_network("fd00:0:0:7::/64")
DIRECT: list[Resource] = [
    Route(SUBNET, "up0", ip_address("192.0.2.7")),
    Route(SUBNET_V6, "up0", ip_address("fd77::7")),
]
TUNNELLED: list[Resource] = [
    Route(SUBNET, "vx4", ip_address("10.1.7.0"), onlink=True),
    Route(SUBNET_V6, "vx6", ip_address("fd00:0:0:7::"), onlink=True),
]
EVERYTHING: list[Resource] = [
    Address("vx4", ip_address("10.1.5.0")),
    Address("vx6", ip_address("fd00:0:0:5::")),
    Neighbor("vx4", ip_address("10.1.7.0"), MAC),
    Neighbor("vx6", ip_address("fd00:0:0:7::"), MAC),
    FdbEntry("vx4", MAC, ip_address("192.0.2.7")),
    FdbEntry("vx6", MAC, ip_address("fd77::7")),
    *TUNNELLED,
]
DOMAIN = Domain(
    uplink="up0",
    links=frozenset({"vx4", "vx6"}),
    ranges=((ip_network("10.1.0.0/16"), 24), (ip_network("fd00::/48"), 64)),
    bridging=frozenset({"vx4", "vx6"}),
)

_numbers = itertools.count(1)


@pytest.fixture
def empty() -> Iterator[Namespace]:
    """A namespace in which the test runs, as new as they come."""
    namespace = Namespace(f"flk{os.getpid()}.{next(_numbers)}")
    batch(f"netns add {namespace.name}")
    try:
        with namespace.entered():
            yield namespace
    finally:
        remove([namespace])


@pytest.fixture
def host(empty: Namespace) -> Namespace:
    """With an uplink, two devices of ours, and one of somebody else's."""
    empty.ip(
        "link set lo up",
        "link add up0 type veth peer name up1",
        "link add other0 type veth peer name other1",
        *(f"link set {name} up" for name in ("up0", "up1", "other0", "other1")),
        "address add 192.0.2.1/24 dev up0",
        "address add fd77::1/64 dev up0 nodad",
        "link add vx4 type vxlan id 1 local 192.0.2.1 dev up0 dstport 8472 nolearning",
        "link add vx6 type vxlan id 1 local fd77::1 dev up0 dstport 8472 nolearning",
        "link set vx4 up",
        "link set vx6 up",
    )

    def all_up() -> bool:
        links = empty.json("ip", "-j", "link", "show", "type", "veth")
        return {link["operstate"] for link in links} == {"UP"}

    # The kernel announces that in its own time, which would be a change in the middle of a test.
    wait_for(all_up, what="the links to come up")
    return empty


class Tables:
    """The kernel's tables, as the reconciler sees them."""

    def __init__(self) -> None:
        self.kernel = Kernel(DOMAIN)
        *_, self.routes = self.all = tables(self.kernel)

    def distance(self, resources: list[Resource]) -> tuple[list[Put], list[Resource]]:
        """What is to do so that our two devices hold just this."""
        made = [seen.make for name in DOMAIN.links if (seen := self.kernel.link(name))]
        wanted = desired_by_table([*made, *resources])
        puts, drops = list[Put](), list[Resource]()
        for table in self.all:
            mine = wanted.get(table.name, {})
            lacking, stale = difference(mine, table.read(Scope(mine)))
            puts += lacking
            drops += stale
        return puts, drops

    def converge(self, resources: list[Resource]) -> Report:
        puts, drops = self.distance(resources)
        return self.write(puts, drops)

    def write(self, puts: list[Put], drops: list[Resource]) -> Report:
        report = Report()
        for table in self.all:
            if mine := [put for put in puts if put.want.key[0] == table.name]:
                report.add(table.put(mine))
        for table in reversed(self.all):
            if lost := [resource for resource in drops if resource.key[0] == table.name]:
                report.add(table.drop(lost))
        return report


DONE: tuple[list[Put], list[Resource]] = ([], [])


@pytest.fixture
def kernel(host: Namespace) -> Tables:
    del host
    return Tables()


def drift(monitor: Monitor) -> list[Notification]:
    """What has been heard that touches ``EVERYTHING``."""
    names = {index: name for index, name in socket.if_nameindex() if name in ("up0", "vx4", "vx6")}
    wanted = {resource.key: resource for resource in EVERYTHING}
    news = monitor.read(names.get)
    seen = [item for item in news if isinstance(item, ResourceChanged)]
    changed = [item for item in seen if wanted.get(item.resource.key, item.resource) != item.resource]
    return [*changed, *(item for item in news if isinstance(item, ResourceRemoved) and item.key in wanted)]


def test_everything_is_read_back_as_it_was_written(kernel: Tables) -> None:
    report = kernel.converge(EVERYTHING)
    assert (report.made, report.removed, report.failed) == (EVERYTHING, [], [])
    assert kernel.distance(EVERYTHING) == DONE


def test_everything_can_be_removed_again(kernel: Tables) -> None:
    kernel.converge(EVERYTHING)
    assert len(kernel.converge([]).removed) == len(EVERYTHING)
    assert kernel.distance([]) == DONE


def test_a_route_moves_between_uplink_and_tunnel(kernel: Tables) -> None:
    for wanted in (DIRECT, TUNNELLED, DIRECT):
        assert kernel.converge(wanted).failed == []
        assert kernel.distance(wanted) == DONE


IN_THE_WAY = pytest.mark.parametrize("obstacle", ["{} dev other0", "blackhole {}", "{} dev up0"])
EITHER = pytest.mark.parametrize("wanted", [DIRECT, TUNNELLED], ids=["direct", "tunnelled"])


def main_table(host: Namespace) -> list[str]:
    """Return the routes without the kernel's own: that of a new device's link-local address comes late."""
    shown = (host.run("ip", f"-{family}", "route", "show").stdout for family in (4, 6))
    return [line for text in shown for line in text.splitlines() if "proto kernel" not in line]


@IN_THE_WAY
@EITHER
def test_foreign_route_that_took_the_place_of_ours_gives_way(
    host: Namespace, kernel: Tables, wanted: list[Resource], obstacle: str
) -> None:
    kernel.converge(wanted)
    host.ip(*(f"route replace {obstacle.format(net)}" for net in (SUBNET, SUBNET_V6)))
    assert kernel.converge(wanted).failed == []
    assert kernel.distance(wanted) == DONE


@IN_THE_WAY
@EITHER
def test_foreign_route_that_was_there_first_stays(
    host: Namespace, kernel: Tables, wanted: list[Resource], obstacle: str
) -> None:
    host.ip(*(f"route replace {obstacle.format(net)}" for net in (SUBNET, SUBNET_V6)))
    before = main_table(host)
    report = kernel.converge(wanted)
    assert (report.made, [failure.resource for failure in report.failed]) == ([], wanted)
    assert all("stands there and is not flannel's" in failure.reason for failure in report.failed)
    # Nor does news of a lease that came before it was seen do it any harm.
    report = kernel.write([Put(route) for route in wanted], [])
    assert [(failure.resource, failure.is_taken) for failure in report.failed] == [
        (route, True) for route in wanted
    ]
    assert main_table(host) == before


@EITHER
def test_connected_network_is_never_replaced_nor_put_behind(
    host: Namespace, kernel: Tables, wanted: list[Resource]
) -> None:
    kernel.converge(wanted[:1])
    host.ip(f"route delete {SUBNET}", "address add 10.1.7.1/24 dev other0")
    before = main_table(host)
    report = kernel.converge(wanted[:1])
    assert (report.made, [failure.resource for failure in report.failed]) == ([], wanted[:1])
    assert main_table(host) == before
    host.ip("route append 10.1.7.0/24 via 192.0.2.7 dev up0 proto 70")
    assert kernel.distance(DIRECT[:1]) == DONE


def test_a_route_that_cannot_be_made_is_reported_and_hinders_no_other(
    host: Namespace, kernel: Tables
) -> None:
    host.ip("route add fd00::/48 dev other0")
    report = kernel.converge(TUNNELLED)
    assert [failure.resource for failure in report.failed] == [TUNNELLED[1]]
    assert report.made == [TUNNELLED[0]]
    assert host.json("ip", "-j", "-6", "route", "show", "fd00::/48")


def test_a_second_route_to_a_subnet_is_left_alone(host: Namespace, kernel: Tables) -> None:
    kernel.converge(TUNNELLED)
    host.ip(f"route append {SUBNET} via 192.0.2.9")
    assert kernel.distance(TUNNELLED) == DONE


@pytest.mark.parametrize("wanted", [DIRECT, TUNNELLED], ids=["direct", "tunnelled"])
@pytest.mark.parametrize(
    "rival",
    [
        f"{SUBNET} via 192.0.2.9",
        f"{SUBNET} dev other0",
        f"blackhole {SUBNET}",
        f"{SUBNET} nexthop via 192.0.2.8 nexthop via 192.0.2.9",
    ],
)
def test_a_route_before_ours_ends_up_behind_it(
    host: Namespace, kernel: Tables, wanted: list[Resource], rival: str
) -> None:
    kernel.converge(wanted)
    alone = host.json("ip", "-j", "route", "show", str(SUBNET))
    host.ip(f"route prepend {rival}")
    assert [(put.want, type(put.was)) for put in kernel.distance(wanted)[0]] == [(wanted[0], Behind)]
    assert kernel.converge(wanted).made == [wanted[0]]
    assert kernel.distance(wanted) == DONE
    first, second = host.json("ip", "-j", "route", "show", str(SUBNET))
    assert [first] == alone != [second]


OF_ANOTHER_METRIC = (f"{SUBNET} via 192.0.2.7 metric 50", f"{SUBNET_V6} via fd77::7 metric 50")


@EITHER
def test_a_route_of_another_metric_stays_though_ours_leads_there_too(
    host: Namespace, kernel: Tables, wanted: list[Resource]
) -> None:
    before = main_table(host)
    kernel.converge(wanted)
    host.ip(*(f"route add {route}" for route in OF_ANOTHER_METRIC))
    assert kernel.distance(wanted) == DONE
    assert len(kernel.converge([]).removed) == len(wanted)
    host.ip(*(f"route del {route}" for route in OF_ANOTHER_METRIC))
    assert main_table(host) == before


def test_a_route_of_another_metric_stays_though_the_kernel_refuses_ours_because_of_it(
    host: Namespace, kernel: Tables
) -> None:
    """IPv6 takes no onlink gateway that another device has a route for."""
    kernel.converge(TUNNELLED)
    host.ip(*(f"route add {route}" for route in OF_ANOTHER_METRIC), f"route replace {SUBNET_V6} via fd77::7")
    for _ in range(2):
        (failure,) = kernel.converge(TUNNELLED).failed
        assert failure.resource == TUNNELLED[1]
        assert "ip route get fd00:0:0:7::" in failure.remedy
    host.ip(*(f"route del {route}" for route in OF_ANOTHER_METRIC))
    assert kernel.converge(TUNNELLED).failed == []
    assert kernel.distance(TUNNELLED) == DONE


@pytest.mark.parametrize("route", ["10.1.9.0/24 dev vx4", "fd00:0:0:9::/64 dev vx6"])
def test_stale_routes_of_any_scope_on_our_device_are_removed(
    host: Namespace, kernel: Tables, route: str
) -> None:
    host.ip(f"route add {route}")
    assert len(kernel.converge([]).removed) == 1
    assert kernel.distance([]) == DONE


# ---- protocol numbers of many routes ------------------------------------------------------------------


def through(device: str, number: int) -> list[Resource]:
    """Routes through a device, each with a gateway of its own."""
    nets = [ip_network(((10 << 24) + (1 << 16) + (index << 4), 28)) for index in range(number)]
    return [Route(net, device, net.network_address, onlink=True) for net in nets]


def protocols(host: Namespace, device: str) -> list[str]:
    """Return the number of each route; ``ip`` leaves that of ``boot`` out."""
    return [row.get("protocol", "3") for row in host.json("ip", "-j", "-N", "route", "show", "dev", device)]


MANY = through("vx4", 600)


def test_many_routes_of_our_device_have_many_protocol_numbers(host: Namespace, kernel: Tables) -> None:
    assert kernel.converge(MANY).failed == []
    assert len(set(protocols(host, "vx4"))) == 106
    assert kernel.distance(MANY) == DONE
    assert len(kernel.converge([]).removed) == len(MANY)
    assert protocols(host, "vx4") == []


@pytest.mark.parametrize("number", [1, 512])
def test_few_routes_have_gos_protocol_number(host: Namespace, kernel: Tables, number: int) -> None:
    kernel.converge(MANY[:number])
    assert set(protocols(host, "vx4")) == {"3"}


def test_numbers_do_not_vary_if_they_are_not_to(host: Namespace, kernel: Tables) -> None:
    *_, routes = tables(kernel.kernel, spread=False)
    assert routes.put([Put(route) for route in MANY]).failed == []
    assert set(protocols(host, "vx4")) == {"3"}


def test_a_route_is_never_rewritten_for_its_number(host: Namespace, kernel: Tables) -> None:
    """Routes from a time with fewer of them, or from a Go flanneld, stay as they are."""
    kernel.converge(MANY[:512])
    with Changes(host) as changes:
        assert kernel.converge(MANY).made == MANY[512:]
        assert changes.seen() == ["new route"] * (len(MANY) - 512)
    assert protocols(host, "vx4").count("3") == 512


def test_routes_of_an_earlier_runs_device_are_found_whatever_their_number(
    host: Namespace, kernel: Tables
) -> None:
    """By the sweep of a start, and by ``-cleanup``."""
    host.ip("link set vx4 down", "link set vx4 name flannel.7", "link set flannel.7 up")
    ours = replace(DOMAIN, links=frozenset({"flannel.7"}), ranges=((ip_network("10.1.0.0/16"), 28),))
    kernel.kernel.domain = ours
    kernel.converge(through("flannel.7", 600))
    host.ip("route add 10.1.254.0/28 dev flannel.7 proto static")  # an operator's
    later = Kernel(replace(ours, links=frozenset()))
    assert len(later.left_behind(later.domain)) == 600
    *_, routes = tables(later)
    stale = difference({}, routes.read(Scope({}, adopt=True)))[1]
    assert len(routes.drop(stale).removed) == 600
    assert protocols(host, "flannel.7") == ["4"]


@pytest.mark.parametrize(
    ("change", "is_drift"),
    [
        ("via 10.1.0.0 dev vx4 onlink", False),
        ("via 10.1.0.0 dev vx4 onlink proto 77", False),
        ("via 10.1.0.16 dev vx4 onlink", True),
        ("via 192.0.2.9 dev up0", True),
        ("via 10.1.0.0 dev vx4 onlink src 192.0.2.1", False),
        ("dev vx4", True),
    ],
)
def test_the_short_way_to_read_a_route_sees_drift_as_the_long_one(
    host: Namespace, kernel: Tables, change: str, *, is_drift: bool
) -> None:
    wanted = through("vx4", 3)
    kernel.converge(wanted)
    dumped = kernel.kernel.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(4))
    plain = [found for item in dumped if (found := rtnl.decode_plain_route(*item))]
    assert [found.key for found in plain] == [route.key for route in wanted]
    host.ip(f"route replace 10.1.0.0/28 {change}")
    assert [put.want for put in kernel.distance(wanted)[0]] == (wanted[:1] if is_drift else [])


def test_a_way_through_a_gateway_of_the_other_family_has_a_gateway(host: Namespace, kernel: Tables) -> None:
    host.ip("route add 198.51.100.0/24 via inet6 fd77::9 dev up0")
    way = kernel.kernel.look_up_route(ip_address("198.51.100.1"))
    assert way is not None
    assert way.gateway == ip_address("fd77::9")


def test_a_table_that_does_not_exist_yet_is_empty(empty: Namespace) -> None:
    del empty
    kernel = Kernel()
    assert (kernel.default_routes(4), kernel.default_routes(6)) == ([], [])


def test_process_with_the_port_of_a_device_is_named(kernel: Tables) -> None:
    link = with_port(kernel, 8473)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 8473))
        (failure,) = kernel.write([Put(link)], []).failed
    assert f": process {os.getpid()} (" in failure.reason
    assert failure.reason.endswith(") has its UDP port")
    assert failure.remedy == PORT_REMEDY
    assert kernel.write([Put(link)], []).failed == []


@pytest.mark.parametrize("flags", ["external", "id 7 gbp local 192.0.2.1", "gpe external"])
def test_device_that_keeps_the_port_for_itself_is_named(host: Namespace, kernel: Tables, flags: str) -> None:
    link = with_port(kernel, 8473)
    host.ip(f"link add thief up type vxlan {flags} dstport 8473")
    (failure,) = kernel.write([Put(link)], []).failed
    assert failure.reason.endswith("Address already in use: the device thief has its UDP port")
    host.ip("link set thief down")
    assert kernel.write([Put(link)], []).failed == []


def test_devices_that_are_alike_share_a_port(host: Namespace, kernel: Tables) -> None:
    link = with_port(kernel, 8473)
    host.ip("link add other up type vxlan id 7 local 192.0.2.1 dstport 8473")
    assert at_port_of(link, kernel.kernel.links()) == []
    assert kernel.write([Put(link)], []).failed == []


def with_port(kernel: Tables, port: int) -> Vxlan:
    """Return the device vx4 as it would be at another port."""
    link = kernel.kernel.link("vx4")
    assert link
    assert isinstance(link.make, Vxlan)
    return replace(link.make, port=port)


def test_a_device_that_is_in_the_way_is_named(host: Namespace, kernel: Tables) -> None:
    link = kernel.kernel.link("vx4")
    assert link
    assert isinstance(link.make, Vxlan)
    host.ip("link del vx4", "link add thief type vxlan id 1 local 192.0.2.1 dev up0 dstport 8472")
    (failure,) = kernel.write([Put(link.make)], []).failed
    assert "File exists: thief serves the same ends" in failure.reason
    assert "let the owner of thief give it up" in failure.remedy


def test_a_device_gets_its_name_back_with_all_that_it_has(host: Namespace, kernel: Tables) -> None:
    kernel.converge(EVERYTHING)
    link = kernel.kernel.link("vx4")
    assert link
    assert isinstance(link.make, Vxlan)
    before = host.json("ip", "-j", "neigh", "show", "dev", "vx4")
    host.ip("link set vx4 name other")
    report = kernel.write([Put(link.make)], [])
    assert (report.made, report.failed) == ([link.make], [])
    assert kernel.kernel.link("vx4") == link
    assert host.json("ip", "-j", "neigh", "show", "dev", "vx4") == before
    assert kernel.write([Put(link.make)], []).made == []


def test_a_device_that_is_gone_already_can_be_removed(empty: Namespace) -> None:
    del empty
    devices.drop("vx4")
    assert Kernel().link("vx4") is None


@pytest.mark.parametrize(
    "command",
    [
        f"route replace {SUBNET} dev other0",
        f"route replace {SUBNET_V6} dev other0",
        f"route replace blackhole {SUBNET}",
        f"route append {SUBNET_V6} via fd77::9 dev up0",
        f"route prepend {SUBNET} via 192.0.2.9",
        f"route prepend {SUBNET} nexthop via 192.0.2.8 nexthop via 192.0.2.9",
        f"route del {SUBNET}",
        f"neigh replace 10.1.7.0 dev vx4 lladdr {MAC} nud reachable",
        f"neigh replace 10.1.7.0 dev vx4 lladdr {MAC[:-1]}8 nud permanent",
        "neigh del fd00:0:0:7:: dev vx6",
    ],
)
def test_damage_by_others_is_news(host: Namespace, kernel: Tables, command: str) -> None:
    kernel.converge(EVERYTHING)
    monitor = Monitor(kernel.kernel.port)
    try:
        host.ip(command)
        wait_for(lambda: drift(monitor), what="news")
    finally:
        monitor.close()


def test_our_own_work_is_no_news(kernel: Tables) -> None:
    monitor = Monitor(kernel.kernel.port)
    try:
        kernel.converge(EVERYTHING)
        assert drift(monitor) == []
    finally:
        monitor.close()
