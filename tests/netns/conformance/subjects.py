"""Tables under test, each on a host of its own: what is wanted of it, and what others do to it."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from flanneld.backends.extension import tables as extension
from flanneld.backends.extension.commands import Command
from flanneld.backends.extension.commands import Commands as ExtensionCommands
from flanneld.backends.extension.journal import Journal
from flanneld.backends.extension.resources import PeerSetup
from flanneld.backends.udp.client import Client
from flanneld.backends.udp.resources import Pump, PumpPeer
from flanneld.backends.udp.tables import PumpPeerTable, PumpTable
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.resources import AllowedIp, DeviceKey, Peer
from flanneld.backends.wireguard.table_peers import WireGuardTable
from flanneld.diagnostics.host_checks import ForwardingTable
from flanneld.network.firewall.command import Commands
from flanneld.network.firewall.nftables.netlink import Removals
from flanneld.network.firewall.plan import claim
from flanneld.network.firewall.rules import Nets, Purpose, Style, wanted
from flanneld.network.firewall.sweep import Place, driver
from flanneld.network.firewall.tables import RulesTable
from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.tables import (
    AddressTable,
    FdbTable,
    LinkTable,
    NeighborTable,
    RouteTable,
)
from flanneld.runtime.command_runner import CommandRunner
from flanneld.state.resources import (
    Address,
    FdbEntry,
    Link,
    Neighbor,
    Resource,
    Route,
    Tun,
    Vxlan,
    WireGuard,
)
from flanneld.state.table import Put, Table
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable
from tests.conformance.suite import Subject
from tests.lab.namespace import Namespace

MACS = ("02:00:00:00:00:07", "02:00:00:00:00:08")
OURS = frozenset({"vx4", "vx6"})
DOMAIN = Domain(
    uplink="up0",
    links=OURS,
    ranges=((ip_network("10.1.0.0/16"), 24), (ip_network("fd00::/48"), 64)),
    bridging=OURS,
)


class OnHost(Subject):
    """A table on a host that has an uplink, two VXLAN devices of ours, and one of somebody else's."""

    #: A command that shows what others made.
    shows_foreign: str = "true"
    #: Commands that take away what others put where ours should be.
    clears: Sequence[str] = ()

    def __init__(self, host: Namespace) -> None:
        self.host = host

    def do(self, command: str, *, check: bool = True) -> str:
        return self.host.run("sh", "-c", command, check=check).stdout

    def show_foreign(self) -> str:
        return self.do(self.shows_foreign)

    def clear(self) -> None:
        for command in self.clears:
            self.do(command)


# ---- the kernel ---------------------------------------------------------------------------------


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


class Links(OfKernel):
    drifts = (
        "ip link set vx4 down",
        "ip link set vx4 mtu 1400",
        "ip link set vx6 address 02:00:00:00:00:99",
        "ip link set vx4 type vxlan learning",
        "ip link del vx6",
        "ip link set vx4 name other",
    )
    foreign = ("ip link add br7 type bridge", "ip link set other0 mtu 1300")
    shows_foreign = "ip -o link show dev br7; ip -o link show dev other0; ip -o link show dev up0"

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        kernel = Kernel(DOMAIN)
        made = [seen.make for name in sorted(OURS) if (seen := kernel.link(name))]
        self.resources = [each for each in made if isinstance(each, Vxlan)]

    def over(self, kernel: Kernel) -> Table:
        def left() -> list[Link]:
            """Devices that an earlier run of ours is known to have made."""
            seen = (kernel.link(name) for name in sorted(OURS))
            return [each.make for each in seen if each and isinstance(each.make, Vxlan)]

        return LinkTable(kernel, left)


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

    def over(self, kernel: Kernel) -> Table:
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

    def over(self, kernel: Kernel) -> Table:
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

    def over(self, kernel: Kernel) -> Table:
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

    def over(self, kernel: Kernel) -> Table:
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


# ---- the packet filter --------------------------------------------------------------------------


class OfFirewall(OnHost):
    """One family's rules in one place."""

    place: ClassVar[Place]
    style: ClassVar[Style] = "own-chains"
    _nets = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))
    _purpose = Purpose(masquerade=True, forward=True, random=True)

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self.resources = [self._table().wanted]

    def make(self) -> Table:
        return self._table()

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        del table
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def _table(self) -> RulesTable:
        return RulesTable(
            4,
            self.place,
            driver(self.place, 4, Commands(threading.Event())),
            wanted(self.style, self._nets, self._purpose),
            claim([self._nets], None, masquerade=True, forward=True),
            removals=None if self.place == "legacy" else Removals(),
            audit=1.0,
        )


class NftRules(OfFirewall):
    place = "nft"
    drifts = (
        "iptables-nft -F FLANNEL-FWD",
        "iptables-nft -t nat -F",
        "iptables-nft -t nat -D FLANNEL-POSTRTG 1",
        "nft flush ruleset",
    )
    foreign = (
        "iptables-nft -A FORWARD -s 192.0.2.9 -j DROP",
        "iptables-nft -t nat -A POSTROUTING -s 192.0.2.9 -j MASQUERADE",
    )
    shows_foreign = "iptables-nft-save | grep 192.0.2.9"


class LegacyRules(OfFirewall):
    place = "legacy"
    drifts = (
        "iptables-legacy -F FLANNEL-FWD",
        "iptables-legacy -t nat -F",
        "iptables-legacy -t nat -D FLANNEL-POSTRTG 1",
    )
    foreign = (
        "iptables-legacy -A FORWARD -s 192.0.2.9 -j DROP",
        "iptables-legacy -t nat -A POSTROUTING -s 192.0.2.9 -j MASQUERADE",
    )
    shows_foreign = "iptables-legacy-save | grep 192.0.2.9"


class NativeRules(OfFirewall):
    place = "native"
    style = "native"

    @contextmanager
    def blind(self, _table: Table) -> Iterator[None]:
        os.seteuid(65534)  # libnftables has its socket, and may use it only with CAP_NET_ADMIN
        try:
            yield
        finally:
            os.seteuid(0)

    drifts = ("nft delete table ip flannel-ipv4", "nft flush table ip flannel-ipv4", "nft flush ruleset")
    foreign = (
        "nft add table ip other",
        "nft add chain ip other c",
        "nft add rule ip other c ip saddr 192.0.2.9 drop",
    )
    shows_foreign = "nft list table ip other"


# ---- a process ----------------------------------------------------------------------------------


class PumpPeers(OnHost):
    """The peers of a packet pump, a process on the host."""

    tun = "flannel0"
    resources = (
        PumpPeer("flannel0", IPv4Network("10.1.7.0/24"), IPv4Address("192.0.2.7")),
        PumpPeer("flannel0", IPv4Network("10.1.8.0/24"), IPv4Address("192.0.2.8")),
        PumpPeer("flannel0", IPv4Network("10.1.9.0/24"), IPv4Address("192.0.2.9")),
    )

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        devices.put(Tun(self.tun, 1400), None)
        self._pump = PumpTable(Client(self.tun))
        wanted = Pump(self.tun, IPv4Address("192.0.2.1"), 8285, IPv4Address("10.1.5.0"), 1400, wish="python")
        assert self._pump.put([Put(wanted)]).failed == []

    def make(self) -> Table:
        return PumpPeerTable(Client(self.tun), self.tun)

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        del table
        self._pump.drop(())
        yield

    def close(self) -> None:
        self._pump.drop(())
        self._pump.close(remove=False)


# ---- what outlives the daemon --------------------------------------------------------------------


class SubnetFile(OnHost):
    """The file from which container runtimes take this node's subnet."""

    lasts = writes_anew = True
    can_be_blind = False

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        self._path = Path(self._directory.name) / "subnet.env"
        network, subnet = IPv4Network("10.1.0.0/16"), IPv4Network("10.1.5.0/24")
        self.resources = [SubnetEnvFile.of(self._path, SubnetEnv((network,), (subnet,), 1450, ip_masq=True))]
        self.drifts = (
            f"rm {self._path}",
            f"echo FLANNEL_MTU=9000 >>{self._path}",
            f"echo FLANNEL_MTU=9000 >{self._path}.new; mv {self._path}.new {self._path}",
            f"ln -sf /dev/null {self._path}",
        )
        self.foreign = (f"echo FLANNEL_MTU=1400 >{self._directory.name}/blue.env",)
        self.shows_foreign = f"cat {self._directory.name}/blue.env"

    def make(self) -> Table:
        return SubnetFileTable(self._path)

    def close(self) -> None:
        self._directory.cleanup()


class Forwarding(OnHost):
    """The kernel's switch of each family."""

    lasts = True
    can_be_blind = False
    drifts = ("sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv6.conf.all.forwarding=0")

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self.resources = self._table().wanted

    def make(self) -> Table:
        return self._table()

    def _table(self) -> ForwardingTable:
        return ForwardingTable((4, 6), lambda: "up0", keep=True)


# ---- tables of backends ---------------------------------------------------------------------------


class ExtensionPeers(OnHost):
    """What the commands of the extension backend have set up: here a file for each peer."""

    can_be_blind = False
    resources = tuple(
        PeerSetup(IPv4Network(f"10.1.{number}.0/24"), None, IPv4Address(f"192.0.2.{number}"), None, "data")
        for number in (7, 8, 9)
    )

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        self._peers = f"{self._directory.name}/peer-"
        self.drifts = (f"rm {self._peers}192.0.2.7", f"rm {self._peers}192.0.2.8 {self._peers}192.0.2.9")
        self.foreign = (f"touch {self._peers}192.0.2.66",)
        self.shows_foreign = f"ls {self._peers}192.0.2.66"
        # Each reading checks all peers.
        self._checks = patch.object(extension, "_CHECK_PERIOD", 0.0)
        self._checks.start()

    def make(self) -> Table:
        return extension.PeerTable(
            Command("SubnetAddCommand", f"cat >{self._peers}$PUBLIC_IP"),
            Command("SubnetRemoveCommand", f"rm -f {self._peers}$PUBLIC_IP"),
            Command("CheckCommand", f"[ -e {self._peers}$PUBLIC_IP ]"),
            ExtensionCommands(CommandRunner(threading.Event()).run, 20.0),
            Journal(Path(self._directory.name) / "journal", lambda: "base"),
        )

    def close(self) -> None:
        self._checks.stop()
        self._directory.cleanup()


class WireGuardPeers(OnHost):
    """Key, peers and allowed IPs of a WireGuard device."""

    can_be_blind = False
    device = "flannel-wg"

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        devices.put(WireGuard(self.device, 1420), None)
        own, *others = (keys.private_key(bytes([number]) * 32) for number in (1, 7, 8))
        self._key = DeviceKey(self.device, own, keys.public_key(own), 51820)
        publics = [keys.public_key(each) for each in others]
        self._peers = [
            Peer(self.device, public, ip_address(f"192.0.2.{number}"), 51820, keepalive=25)
            for number, public in zip((7, 8), publics, strict=True)
        ]
        nets = [
            AllowedIp(self.device, ip_network(net), public)
            for net, public in zip(("10.1.7.0/24", "fd00:0:0:8::/64"), publics, strict=True)
        ]
        self.resources = (*nets, self._key, *self._peers)
        seventh, eighth = map(keys.text_of, publics)
        stranger = keys.text_of(keys.public_key(keys.private_key(bytes([9]) * 32)))
        self.drifts = tuple(
            f"wg set {self.device} {change}"
            for change in (
                f"peer {seventh} remove",
                "listen-port 51999",
                "fwmark 7",
                f"peer {seventh} endpoint 192.0.2.99:51820",
                f"peer {eighth} persistent-keepalive 0",
                f"peer {eighth} allowed-ips 10.1.99.0/24",
                f"peer {eighth} allowed-ips fd00:0:0:8::/64,10.1.7.0/24",
                f"peer {stranger} allowed-ips 10.1.66.0/24",
            )
        )
        self.foreign = ("ip link add wg7 type wireguard",)
        self.shows_foreign = "ip -o link show dev wg7"

    def sensible(self, part: Sequence[Resource]) -> Sequence[Resource]:
        """The key always; what a peer may send only with the peer."""
        peers = {each.public_key for each in part if isinstance(each, Peer)}
        return [
            self._key,
            *(
                each
                for each in part
                if isinstance(each, Peer) or (isinstance(each, AllowedIp) and each.public_key in peers)
            ),
        ]

    def make(self) -> Table:
        return WireGuardTable([self.device])


#: Which of them need a feature of the kernel that only some hosts have.
NEEDS = {"WireGuard": "wireguard"}

SUBJECTS: dict[str, Callable[[Namespace], Subject]] = {
    "links": Links,
    "addresses": Addresses,
    "neighbors": Neighbors,
    "fdb": Fdb,
    "tunnelled routes": TunnelledRoutes,
    "direct routes": DirectRoutes,
    "rules with iptables-nft": NftRules,
    "rules with iptables-legacy": LegacyRules,
    "rules with nftables": NativeRules,
    "peers of the packet pump": PumpPeers,
    "subnet.env": SubnetFile,
    "forwarding": Forwarding,
    "peers of the extension backend": ExtensionPeers,
    "WireGuard": WireGuardPeers,
}
