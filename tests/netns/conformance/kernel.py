"""The kernel's tables under test: what is wanted of each, and what others do to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address, ip_network

from msgspec.structs import replace

from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.tables import (
    AddressTable,
    FdbTable,
    LinkTable,
    NeighborTable,
    RouteTable,
)
from flanneld.state.resources import (
    Address,
    Blackhole,
    Dummy,
    FdbEntry,
    Ipip,
    Link,
    Neighbor,
    Route,
    Tun,
    Vxlan,
    WireGuard,
)
from flanneld.state.table import Table
from tests.lab.namespace import Namespace
from tests.netns.conformance.host import OnHost

MACS = ("02:00:00:00:00:07", "02:00:00:00:00:08")
OURS = frozenset({"vx4", "vx6"})
DOMAIN = Domain(
    uplink="up0",
    links=OURS,
    ranges=((ip_network("10.1.0.0/16"), 24), (ip_network("fd00::/48"), 64)),
    bridging=OURS,
)


class OfKernel(OnHost):
    """What the tables of rtnetlink have in common."""

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._kernels: dict[int, Kernel] = {}

    def over(self, kernel: Kernel) -> Table:
        """Make the table of this kernel."""
        raise NotImplementedError

    def make(self) -> Table:
        kernel = Kernel(DOMAIN)
        table = self.over(kernel)
        self._kernels[id(table)] = kernel
        return table

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        self._kernels[id(table)]._socket.close()
        yield


class OfLinks(OfKernel):
    """Devices of ours."""

    resources: Sequence[Link]
    foreign = ("ip link add br7 type bridge", "ip link set other0 mtu 1300")
    shows_foreign = "ip -o link show dev br7; ip -o link show dev other0; ip -o link show dev up0"

    def over(self, kernel: Kernel) -> LinkTable:
        def left() -> list[Link]:
            """Devices that an earlier run of ours is known to have made."""
            ours = [(kernel.link(each.name), each.make) for each in self.resources]
            return [
                seen.make
                for seen, kind in ours
                if seen and isinstance(seen.make, Link) and seen.make.make == kind
            ]

        return LinkTable(kernel, left)


class Links(OfLinks):
    drifts = (
        "ip link set vx4 down",
        "ip link set vx4 mtu 1400",
        "ip link set vx6 address 02:00:00:00:00:99",
        "ip link set vx4 type vxlan learning",
        "ip link del vx6",
        "ip link set vx4 name other",
        "ethtool -K vx6 tx-checksum-ip-generic on",
    )

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        kernel = Kernel(DOMAIN)
        made = [seen.make for name in sorted(OURS) if (seen := kernel.link(name))]
        found = [each for each in made if isinstance(each, Vxlan)]
        host.run("ethtool", "-K", "vx6", "tx-checksum-ip-generic", "off")
        self.resources = [replace(each, cpu_checksums=each.name == "vx6") for each in found]


class TunLink(OfLinks):
    resources = (Tun("flannel0", 1472),)
    drifts = ("ip link set flannel0 mtu 1400", "ip link set flannel0 down", "ip link del flannel0")


class DummyLink(OfLinks):
    resources = (Dummy("flannel-ipsec", 1423),)
    drifts = (
        "ip link set flannel-ipsec mtu 1400",
        "ip link set flannel-ipsec down",
        "ip link del flannel-ipsec",
    )


class IpipLink(OfLinks):
    resources = (Ipip("flannel.ipip", ip_address("192.0.2.1"), 1480),)
    drifts = (
        "ip link set flannel.ipip mtu 1400",
        "ip link set flannel.ipip down",
        "ip link set flannel.ipip type ipip local 192.0.2.99",
        "ip link del flannel.ipip",
    )


class WireGuardLink(OfLinks):
    resources = (WireGuard("flannel-wg", 1420),)
    drifts = (
        "ip link set flannel-wg mtu 1400",
        "ip link set flannel-wg down",
        "ip link del flannel-wg",
    )


class Addresses(OfKernel):
    resources = (
        Address("vx4", ip_address("10.1.5.0")),
        Address("vx6", ip_address("fd00:0:0:5::")),
    )
    drifts = (
        "ip address del 10.1.5.0/32 dev vx4",
        "ip address del fd00:0:0:5::/128 dev vx6",
        "ip address add 10.1.99.0/32 dev vx4",
    )
    foreign = (
        "ip address add 192.0.2.77/32 dev vx4",
        "ip address add 10.1.5.9/32 dev other0",
        "ip address add 10.1.66.0/28 dev vx6",
    )
    shows_foreign = "ip -o address show | grep -E '192.0.2.77|10.1.5.9|10.1.66' | sed 's/valid_lft.*//'"

    def over(self, kernel: Kernel) -> AddressTable:
        return AddressTable(kernel)


class Neighbors(OfKernel):
    resources = (
        Neighbor("vx4", ip_address("10.1.7.0"), MACS[0]),
        Neighbor("vx4", ip_address("10.1.8.0"), MACS[1]),
        Neighbor("vx6", ip_address("fd00:0:0:7::"), MACS[0]),
    )
    drifts = (
        "ip neigh del 10.1.7.0 dev vx4",
        f"ip neigh replace 10.1.7.0 dev vx4 lladdr {MACS[1]} nud permanent",
        f"ip neigh replace fd00:0:0:7:: dev vx6 lladdr {MACS[0]} nud reachable",
        f"ip neigh add 10.1.99.0 dev vx4 lladdr {MACS[0]} nud permanent",
    )
    foreign = (f"ip neigh add 192.0.2.9 dev up0 lladdr {MACS[0]} nud permanent",)
    shows_foreign = "ip neigh show dev up0 nud permanent"

    def over(self, kernel: Kernel) -> NeighborTable:
        return NeighborTable(kernel, {})


class Fdb(OfKernel):
    resources = (
        FdbEntry("vx4", MACS[0], ip_address("192.0.2.7")),
        FdbEntry("vx4", MACS[1], ip_address("192.0.2.8")),
        FdbEntry("vx6", MACS[0], ip_address("fd77::7")),
    )
    drifts = (
        f"bridge fdb del {MACS[0]} dev vx4",
        f"bridge fdb replace {MACS[0]} dev vx4 dst 192.0.2.99",
        f"bridge fdb replace {MACS[0]} dev vx6 dst fd77::7 port 4789",
        "bridge fdb add 02:00:00:00:00:99 dev vx4 dst 192.0.2.9",
    )
    foreign = ("bridge fdb add 02:00:00:00:00:55 dev other0 dst 192.0.2.9",)
    shows_foreign = "bridge fdb show dev other0 | grep 55"

    def over(self, kernel: Kernel) -> FdbTable:
        return FdbTable(kernel)


class Routes(OfKernel):
    clears = (
        "for net in 10.1.7.0/24 10.1.8.0/24; do"
        " ip route flush exact $net via 192.0.2.9; ip route flush exact $net dev other0;"
        " ip route flush exact $net type blackhole; done",
        "ip -6 route flush exact fd00:0:0:7::/64 dev other0",
    )
    foreign = (
        "ip route add 10.9.0.0/24 via 192.0.2.9",
        "ip route add 10.1.44.0/24 via 192.0.2.9",
        "ip route add 10.1.7.0/24 via 192.0.2.9 metric 50",
        "ip route add fd00:0:0:44::/64 dev other0",
    )
    shows_foreign = (
        "ip route show 10.9.0.0/24; ip route show 10.1.44.0/24; ip route show 10.1.7.0/24 metric 50;"
        " ip -6 route show fd00:0:0:44::/64; ip route show dev other0; ip route show proto kernel"
    )

    def over(self, kernel: Kernel) -> RouteTable:
        return RouteTable(kernel, {})


class TunnelledRoutes(Routes):
    resources = (
        Route(ip_network("10.1.7.0/24"), "vx4", ip_address("10.1.7.0"), onlink=True),
        Route(ip_network("10.1.8.0/24"), "vx4", ip_address("10.1.8.0"), onlink=True),
        Route(ip_network("fd00:0:0:7::/64"), "vx6", ip_address("fd00:0:0:7::"), onlink=True),
    )
    drifts = (
        "ip route del 10.1.7.0/24",
        "ip route replace 10.1.7.0/24 dev other0",
        "ip route replace blackhole 10.1.8.0/24",
        "ip route prepend 10.1.8.0/24 via 192.0.2.9",
        "ip -6 route del fd00:0:0:7::/64",
        "ip -6 route replace fd00:0:0:7::/64 dev other0",
        "ip route add 10.1.99.0/24 dev vx4",
    )


class DirectRoutes(Routes):
    resources = (
        Route(ip_network("10.1.7.0/24"), "up0", ip_address("192.0.2.7")),
        Route(ip_network("10.1.8.0/24"), "up0", ip_address("192.0.2.8")),
        Route(ip_network("fd00:0:0:7::/64"), "up0", ip_address("fd77::7")),
    )
    drifts = (
        "ip route del 10.1.7.0/24",
        "ip route replace 10.1.7.0/24 via 192.0.2.9",
        "ip route prepend 10.1.8.0/24 via 192.0.2.9",
        "ip -6 route replace fd00:0:0:7::/64 dev other0",
        "ip route add 10.1.99.0/24 via 192.0.2.9 proto 70",
    )


class GuardRoutes(Routes):
    """Routes that drop what no other route of ours takes: an encrypted network has them."""

    resources = (
        Blackhole(ip_network("10.1.0.0/16"), unreachable=True),
        Blackhole(ip_network("fd00::/48"), unreachable=True),
    )
    drifts = (
        "ip route del unreachable 10.1.0.0/16 metric 65535",
        "ip route replace blackhole 10.1.0.0/16 metric 65535 proto 70",
        "ip -6 route del fd00::/48 metric 65535",
        "ip route add unreachable 10.1.64.0/20 metric 65535 proto 70",
    )
