"""Facts about this host for the checks of ``flannelctl doctor``."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from flanneld.backends.registry import described
from flanneld.config import Config
from flanneld.ctl import compare, lookups, nodes
from flanneld.ctl.checks import containers, encryption, packets, stale_objects
from flanneld.ctl.checks.containers import Container
from flanneld.ctl.checks.encryption import CharonState
from flanneld.ctl.checks.packets import Drop, Translation
from flanneld.ctl.checks.stale_objects import CniFile, LeftRules
from flanneld.ctl.checks.store import EtcdHealth, ask_etcd
from flanneld.ctl.compare import ActualState, Comparison, ShadowingRoute
from flanneld.ctl.lookups import Lost
from flanneld.ctl.path_mtu import PathToPeer, sample
from flanneld.ctl.source import DataSource, Unknown
from flanneld.diagnostics.status import PeerStatus, Status, known, resources
from flanneld.model import FAMILIES, IPAddress, IPNetwork
from flanneld.network import host_settings, interfaces, processes, survey
from flanneld.network.firewall.foreign import has_firewalld
from flanneld.network.firewall.netlink import has_guard
from flanneld.network.host_settings import WrongSetting as HostFinding
from flanneld.network.rtnetlink import devices, links
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.rtnetlink.netlink import NetlinkSocket
from flanneld.runtime import clock
from flanneld.state.resources import Link, Tun, Vxlan
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import Previous

_GC_THRESH = "/proc/sys/net/ipv4/neigh/default/gc_thresh3"
#: Seconds for a node to refuse a port, or a packet with no hop left.
_BRIEFLY = 0.3
#: Hops to the kernel of a peer: with udp the proxies of both nodes take one each.
_HOPS, _HOPS_UDP = 1, 3


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
    subnet_file: str = ""
    has_subnet_file: bool = True
    #: State in the subnet file.
    previous: Previous = field(default_factory=Previous)
    links: tuple[SeenLink, ...] = ()
    #: Addresses of all interfaces, with the interface's name.
    addresses: tuple[tuple[str, IPAddress], ...] = ()
    entries: tuple[Comparison, ...] = ()
    detours: tuple[ShadowingRoute, ...] = ()
    host: tuple[HostFinding, ...] = ()
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
    kernel: tuple[int, int] = (0, 0)
    #: Features that the backend needs and this kernel lacks.
    lacking: tuple[LackingFeature, ...] = ()
    #: None without ipsec, or without permission to ask charon.
    charon: CharonState | None = None
    gc_thresh: int = 0
    #: Packets dropped while peers were probed, by interface and kind of queueing discipline.
    queued: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: The store's network config now; None if it is not known.
    stored: Config | None = None
    #: None unless the store has a problem, and is an etcd that answers.
    etcd: EtcdHealth | None = None
    clock_is_synchronised: bool | None = None
    #: Paths to a few peers, each with the size that it carries.
    paths: tuple[PathToPeer, ...] = ()
    #: Rules and policies that drop packets of the network.
    filtered: tuple[Drop, ...] = ()
    #: Rules that masquerade packets between containers.
    translated: tuple[Translation, ...] = ()
    #: Packets that the kernel drops or misroutes.
    lost: tuple[Lost, ...] = ()
    containers: tuple[Container, ...] = ()
    #: Permanent neighbours on the uplink that are peers: address, MAC, device.
    pinned: tuple[tuple[str, str, str], ...] = ()
    #: Public IPs of nodes that refuse the tunnel's UDP port.
    refusing: frozenset[str] = frozenset()
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

    @property
    def networks(self) -> list[IPNetwork]:
        return [network for network, _ in self.status.ranges]

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


def gather(source: DataSource) -> Facts:
    """Read the facts.

    Unreadable ones are left out. Raises ``OSError`` if the kernel cannot be read at all.
    """
    told = source.status
    path = Path(source.options.subnet_file)
    desired = compare.desired_objects(told)
    found = compare.read(told, desired)
    ours = [link for link in found.links if is_flannels(link)]
    addresses = tuple(lookups.host_addresses())
    devices = known(told.devices) or [link.name for link in ours]
    ways = containers.container_devices(told, addresses, devices)
    names = {link.index: link.name for link in found.links}
    ways_out = {told.uplink_name, *devices, *ways.values()}
    queues = {index: name for index, name in names.items() if name in ways_out}
    before = packets.queue_drops(queues)
    paths, now = tuple(_paths(told)), clock.wall()
    told = encryption.with_sessions(told, paths, now)
    return Facts(
        status=told,
        origin=source.origin,
        unknown=source.unknown,
        now=now,
        subnet_file=str(path),
        has_subnet_file=path.exists(),
        previous=subnet_file.read(path),
        links=found.links,
        addresses=addresses,
        entries=(*compare.compare(told, desired, found), *_outside(source)),
        detours=tuple(compare.shadowing_routes(told, found, compare.lookups())),
        host=_host_findings(source),
        managed=tuple(_managed(ours)),
        firewalls=tuple(_firewalls()),
        is_guarded=any(map(has_guard, FAMILIES)),
        left_rules=tuple(stale_objects.read_left_rules(told)),
        cni=tuple(stale_objects.cni_confs(Path(stale_objects.CNI_DIRECTORY))),
        traffic={link.name: _traffic(link.name) for link in ours},
        port_owners=dict(_port_owners(told, found.links)),
        offload=dict(_offload(ours)),
        kernel=_kernel(),
        lacking=tuple(lacking_features(told, found)),
        charon=encryption.charon_of(told),
        gc_thresh=lookups.number(_GC_THRESH),
        etcd=ask_etcd(told),
        queued=packets.queue_drops(queues) - before,
        stored=nodes.stored_config(source) if source.origin == "daemon" else None,
        clock_is_synchronised=_clock_is_synchronised(),
        paths=paths,
        filtered=tuple(packets.read_drops(told, ways)),
        translated=tuple(packets.read_translations(told, ways)),
        lost=tuple(lookups.lost_packets(told, names, ways)),
        containers=tuple(
            containers.read_containers(told, found.links, {address for _, address in addresses})
        ),
        pinned=tuple(lookups.pinned(told, {link.name: link.index for link in found.links})),
        refusing=frozenset(_refusing(told, paths)),
        passing=frozenset(_passing(told, paths)),
    )


def lacking_features(told: Status, found: ActualState) -> Iterator[LackingFeature]:
    """Yield the missing features. Only for a missing device the kernel is asked whether it can make it."""
    wanted = [link for link in resources(told.local) if isinstance(link, Link)]
    missing = {link.make: link for link in wanted if found.link(link.name) is None}
    for kind, link in missing.items():
        if kind != Tun.make and devices.lacks(kind):
            yield LackingFeature(kind, f"it cannot make a device of this kind; wanted: {link}", kind)
    for each in (each for kind in told.backends for each in described(kind or "").kernel_features):
        try:
            NetlinkSocket(protocol=each.protocol).close()
        except OSError as failure:
            if failure.errno == errno.EPROTONOSUPPORT:
                reason = "it does not know the netlink protocol for it"
                yield LackingFeature(each.name, reason, each.modules)


def _outside(source: DataSource) -> Iterator[Comparison]:
    """Yield what the kernel lacks for encryption. A daemon that runs puts that back, or names a refusal."""
    for each in compare.outside(source.status) if source.origin == "store" else ():
        if each.state == "missing" and each.value.key[0] in encryption.KERNEL_TABLES:
            yield each


def _refusing(told: Status, paths: Collection[PathToPeer]) -> Iterator[str]:
    """Yield the public IPs of the nodes behind a silent tunnel that refuse its UDP port."""
    silent = {path.peer for path in paths if path.name == "tunnel" and path.carried is None}
    asked = [
        (node, each.peer_port)
        for peer in (told.each_peer if silent else ())
        if peer.subnets[0] in silent
        for each in lookups.carriers(told, peer)
        if each.protocol == "udp" and each.peer_port
        for node in peer.addresses
        if node.version == each.family
    ]
    yield from map(str, survey.refused(dict.fromkeys(asked), _BRIEFLY))


def _passing(told: Status, paths: Collection[PathToPeer]) -> Iterator[tuple[str, int]]:
    """Yield the silent peers that pass packets on, or refuse TCP: a filter here or there drops ICMP."""
    silent = {path.peer for path in paths if path.carried is None}
    tunnels = {(path.peer, path.target.version) for path in paths if path.name == "tunnel"}
    ends = {
        path.target: (path.peer, path.target.version)
        for path in paths
        if path.carried is None and (path.name == "tunnel" or (path.peer, path.target.version) not in tunnels)
    }
    yield from map(ends.__getitem__, survey.reached(ends, _BRIEFLY))
    asked = {
        lookups.container_of(net): (peer.subnets[0], net.version)
        for peer in (told.each_peer if silent else ())
        if peer.subnets[0] in silent
        for net in peer.networks
    }
    is_udp = told.backend == "udp"
    with suppress(OSError):
        for target in survey.passing(asked, _HOPS_UDP if is_udp else _HOPS, _BRIEFLY):
            yield asked[target]


def _host_findings(source: DataSource) -> tuple[HostFinding, ...]:
    told = source.status
    families = tuple(network.version for network, _ in told.ranges) or FAMILIES[:1]
    services = known(told.kube_subnet_mgr)
    services = source.options.kube_subnet_mgr if services is None else services
    return host_settings.findings(host_settings.read_facts(families, told.uplink_name, services=services))


def _managed(ours: list[SeenLink]) -> Iterator[tuple[str, str]]:
    """Yield our devices that other programs manage, according to those programs' files in /run."""
    for link in ours:
        if "managed=true" in _text(Path(f"/run/NetworkManager/devices/{link.index}")).split():
            yield link.name, "NetworkManager"
        state = _text(Path(f"/run/systemd/netif/links/{link.index}"))
        if "ADMIN_STATE=configured" in state or "ADMIN_STATE=configuring" in state:
            yield link.name, "systemd-networkd"


def _firewalls() -> Iterator[str]:
    if has_firewalld():
        yield "firewalld"
    if "ENABLED=yes" in _text(Path("/etc/ufw/ufw.conf")):
        yield "ufw"


def _traffic(name: str) -> tuple[int, int]:
    where = Path(f"/sys/class/net/{name}/statistics")
    return lookups.number(where / "rx_packets"), lookups.number(where / "tx_packets")


def _offload(ours: list[SeenLink]) -> Iterator[tuple[str, bool]]:
    """Yield our devices with their checksum offload."""
    for link in ours:
        with suppress(OSError):
            yield link.name, interfaces.offloads_checksums(link.name)


def _paths(told: Status) -> Iterator[PathToPeer]:
    """Yield the paths to a few peers; none if this process may not send ICMP."""
    if known(told.uplink) and known(told.mtu):
        with suppress(OSError):
            yield from sample(told, survey.glance_at_mtu)


def _port_owners(told: Status, present: Sequence[SeenLink]) -> Iterator[tuple[str, str]]:
    """Yield the VXLAN devices that are not up because something else has their port."""
    up = {link.name for link in present if link.up}
    for link in resources(told.local):
        if isinstance(link, Vxlan) and link.name not in up:
            owner = processes.find_owner(link.port, devices=links.at_port_of(link, present))
            if owner:
                yield link.name, owner


def _kernel() -> tuple[int, int]:
    major, minor, *_ = [*os.uname().release.split("-")[0].split("."), "0", "0"]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _clock_is_synchronised() -> bool | None:
    """Return True if the clock is synchronised, None if unknown."""
    if Path("/run/systemd/timesync").is_dir():
        return Path("/run/systemd/timesync/synchronized").exists()
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
