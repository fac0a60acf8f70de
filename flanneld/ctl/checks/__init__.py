"""Checks of the doctor: each is a function from facts about this host to findings, and reads nothing.

What reads the facts of some checks stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from flanneld.diagnostics.status import PeerStatus, Status, known, resources
from flanneld.findings import Command, Finding
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.state.resources import Neighbor, Vxlan
from flanneld.subnet.subnet_file import Previous

if TYPE_CHECKING:
    from flanneld.config import Config
    from flanneld.ctl.beyond import LostWay
    from flanneld.ctl.checks.encryption import CharonState
    from flanneld.ctl.checks.host import CniFile, LeftRules
    from flanneld.ctl.checks.store import EtcdHealth
    from flanneld.ctl.compare import Comparison, ShadowingRoute
    from flanneld.ctl.drops import Drop
    from flanneld.ctl.inside import Container
    from flanneld.ctl.losses import Lost
    from flanneld.ctl.neighbors import Claim
    from flanneld.ctl.paths import PathToPeer
    from flanneld.ctl.source import Unknown
    from flanneld.model import IPAddress, IPNetwork
    from flanneld.network.host_settings import Topic, WrongSetting

#: Themes of users' typical problems with flannel.
THEMES = {
    "A": "devices and uplink",
    "B": "stale or missing objects",
    "C": "news of the peers",
    "D": "MAC addresses and device managers",
    "E": "the host's firewall and forwarding",
    "F": "subnet.env and bridges",
    "G": "containers on another subnet",
    "H": "the lease",
    "I": "the store",
    "J": "addresses",
    "K": "MTU and offload",
    "L": "the daemon itself",
    "M": "encryption",
    "N": "the cluster",
}


class LackingFeature(Struct, frozen=True, gc=False):
    """Feature that this kernel lacks, how that was seen, and the modules that have it."""

    name: str
    evidence: str
    modules: str


class Facts(Struct, frozen=True, gc=False):
    """Facts about this host; unknown ones are None or empty.

    Counters are in packets, times since the epoch.
    """

    status: Status = Status()
    origin: str = "host"
    unknown: tuple[Unknown, ...] = ()
    now: float = 0.0
    #: The daemon's process if it is in another network namespace, else 0; and a capability that it lacks.
    limits: tuple[int, str] = (0, "")
    subnet_file: str = ""
    has_subnet_file: bool = True
    #: State in the subnet file.
    previous: Previous = field(default_factory=Previous)
    links: tuple[SeenLink, ...] = ()
    #: Addresses of all interfaces, with the interface's name.
    addresses: tuple[tuple[str, IPAddress], ...] = ()
    #: Objects that are not as desired.
    entries: tuple[Comparison, ...] = ()
    detours: tuple[ShadowingRoute, ...] = ()
    host: tuple[WrongSetting, ...] = ()
    #: Devices managed by another program, with the program's name.
    managed: tuple[tuple[str, str], ...] = ()
    firewalls: tuple[str, ...] = ()
    is_guarded: bool = False
    left_rules: tuple[LeftRules, ...] = ()
    #: In the order in which container runtimes read them.
    cni: tuple[CniFile, ...] = ()
    #: Received and sent packets by flannel device.
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: By VXLAN device that is not up: what has its UDP port.
    port_owners: Mapping[str, str] = field(default_factory=dict)
    #: By VXLAN device: True if checksums are offloaded to it.
    offload: Mapping[str, bool] = field(default_factory=dict)
    #: True if the uplink could cut VXLAN's packets into segments and does not; its queues, used and possible.
    uplink_lacks_segmentation: bool = False
    queues: tuple[int, int] = (0, 0)
    #: First subnets of peers of WireGuard whose received bytes stand, while sent ones grow, in threaded NAPI.
    standing: tuple[str, ...] = ()
    kernel: tuple[int, int] = (0, 0)
    #: Features that the backend needs and this kernel lacks.
    lacking: tuple[LackingFeature, ...] = ()
    #: None without ipsec, or without permission to ask charon.
    charon: CharonState | None = None
    gc_thresh: int = 0
    #: Packets dropped while peers were probed, by interface and kind of queueing discipline.
    queued: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: Filters of tc on these interfaces, if a discipline with filters dropped packets.
    tc_filters: tuple[tuple[str, str], ...] = ()
    #: The store's network config now; None if it is not known.
    stored: Config | None = None
    #: None unless the store has a problem, and is an etcd that answers.
    etcd: EtcdHealth | None = None
    clock_is_synchronised: bool | None = None
    #: Paths to a few peers, each with the size that it carries.
    paths: tuple[PathToPeer, ...] = ()
    #: Paths to a container of each of these peers, as far as their daemons name one.
    beyond: tuple[PathToPeer, ...] = ()
    #: Default routes to a router that is not there.
    lost_ways: tuple[LostWay, ...] = ()
    #: Rules and policies that drop or change packets of the network.
    filtered: tuple[Drop, ...] = ()
    #: True if this host's packet filters enforce NetworkPolicies, which may isolate a container.
    has_policies: bool = False
    #: Packets that the kernel drops or misroutes.
    lost: tuple[Lost, ...] = ()
    containers: tuple[Container, ...] = ()
    #: Neighbours on the uplink and on bridges of containers whose MAC addresses are fixed by hand.
    pinned: tuple[Neighbor, ...] = ()
    #: Public IPs of silent nodes whose next hop answers neither ARP nor NDP, with that hop.
    unresolved: Mapping[str, str] = field(default_factory=dict)
    #: Rules that exempt packets of containers from masquerading: chain, rule, and the command to remove it.
    exempting: tuple[tuple[str, str, Command], ...] = ()
    #: Hosts that have our addresses, or those of nodes.
    claims: tuple[Claim, ...] = ()
    #: Public IPs of nodes that refuse the tunnel's UDP port.
    refusing: frozenset[str] = frozenset()
    #: Peers that answer, and packets of containers to which get lost without a tunnel, each with the sender,
    #: and True if the node answers this sender, too.
    turned_away: tuple[tuple[str, IPAddress, bool], ...] = ()
    #: Peers, each with a family, that answer no echo and pass packets on to their containers or refuse TCP.
    passing: frozenset[tuple[str, int]] = frozenset()

    def link(self, name: str) -> SeenLink | None:
        return next((each for each in self.links if each.name == name), None)

    def is_bridge(self, name: str) -> bool:
        link = self.link(name)
        return link is not None and link.make.make == "bridge"

    def has_ports(self, name: str) -> bool:
        """Return False for a bridge without ports, True for any other existing device."""
        link = self.link(name)
        if link is None or not self.is_bridge(name):
            return link is not None
        return any(each.master == link.index for each in self.links)

    def of_topic(self, topic: Topic) -> Iterator[Finding]:
        """Yield the findings of one topic that the daemon itself checks at startup."""
        return (each for each in self.host if each.about == topic)

    @property
    def is_lossy(self) -> bool:
        """True if packets of a path or of a container were lost, all or some."""
        return any(path.is_losing or path.carried != path.required for path in self.paths) or any(
            each.unanswered or not each.is_heard for each in self.containers
        )

    @property
    def networks(self) -> list[IPNetwork]:
        return [network for network, _ in self.status.ranges]

    @property
    def gateways(self) -> list[tuple[str, IPAddress]]:
        """The interfaces that lead to our containers, each with an address in our subnet."""
        ours, own = self.devices, self.status.own_subnets
        held = ((name, address) for name, address in self.addresses if name not in ours)
        return [(name, address) for name, address in held if any(address in net for net in own)]

    @property
    def own_macs(self) -> set[str]:
        """The MAC addresses in our lease, in lower case."""
        lease = known(self.status.lease)
        return {mac.lower() for mac in known(lease.macs) or ()} if lease else set()

    @property
    def vnis(self) -> set[int]:
        """The VNIs of our VXLAN devices."""
        return {link.vni for link in resources(self.status.local) if isinstance(link, Vxlan)}

    @property
    def peers(self) -> tuple[PeerStatus, ...]:
        return self.status.each_peer

    @property
    def devices(self) -> tuple[str, ...]:
        """Flannel's devices: the desired ones, else the existing ones."""
        wanted = known(self.status.devices)
        return wanted or tuple(link.name for link in self.links if is_flannels(link))


class Check(Struct, frozen=True):
    """A function over facts; ``meaning`` is the condition that it checks, in one line."""

    theme: str
    name: str
    meaning: str
    look: Callable[[Facts], Iterator[Finding]]


#: Items named in a finding, and findings of one kind, at most.
FEW = 3


def check(theme: str, name: str, meaning: str) -> Callable[[Callable[[Facts], Iterator[Finding]]], Check]:
    """Make a check of a function over facts; ``doctor.CHECKS`` finds it."""
    return lambda look: Check(theme, name, meaning, look)


def few(items: Sequence[object], separator: str = ", ") -> str:
    """Return the first items as text, and how many more there are."""
    shown = separator.join(map(str, items[:FEW]))
    return f"{shown}{separator}and {len(items) - FEW} more" if len(items) > FEW else shown


def see_first(facts: Facts) -> str:
    """Return what to look at before the network between the nodes is blamed."""
    doubtful = dict.fromkeys(each.rule or f"policy of {each.chain}" for each in facts.filtered if each.doubt)
    rules = f"this rule drops them: {few(list(doubtful), '; ')}" if doubtful else ""
    link, name = facts.link(facts.status.uplink_name), facts.status.uplink_name
    xdp = (
        f"the XDP program of {name} does: ip link set dev {name} {link.xdp} off" if link and link.xdp else ""
    )
    uplink = known(facts.status.uplink)
    announced = (
        f"{public}, to which other nodes send, leads to this host, which has {local}"
        for local, public in (zip(uplink.addresses, uplink.public_ips, strict=False) if uplink else ())
        if local != public
    )
    found = " or ".join(filter(None, (rules, xdp, *announced)))
    return f"see first whether {found}; else " if found else ""
