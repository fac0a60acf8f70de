"""Facts about this host, read for the checks of ``flannelctl doctor``."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from flanneld.backends.registry import described
from flanneld.ctl import compare, drops, losses, nodes
from flanneld.ctl.checks import Facts, LackingFeature
from flanneld.ctl.checks.containers import Container, container_devices
from flanneld.ctl.checks.encryption import (
    charon_of,
    is_threaded,
    lacking_objects,
    standing,
    with_sessions,
)
from flanneld.ctl.checks.others import CniFile, LeftRules
from flanneld.ctl.checks.store import ask_etcd
from flanneld.ctl.compare import ActualState
from flanneld.ctl.losses import host_addresses, number
from flanneld.ctl.paths import BRIEFLY, PathToPeer, carriers, container_of, passing, sample
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import Status, known, resources
from flanneld.errors import Retryable
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork
from flanneld.network import host_settings, interfaces, processes, survey
from flanneld.network.firewall.edits import RuleOwnership
from flanneld.network.firewall.foreign import has_firewalld
from flanneld.network.firewall.netlink import has_guard
from flanneld.network.firewall.placing import PLACES, commands_of, stale_rules
from flanneld.network.firewall.placing import described as as_text
from flanneld.network.host import HostView, entered, named_namespaces, number_of
from flanneld.network.host_settings import WrongSetting
from flanneld.network.rtnetlink import devices, links, traffic_control
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.rtnetlink.messages import RTN_UNICAST, mac_text
from flanneld.network.rtnetlink.netlink import NetlinkSocket
from flanneld.runtime import clock, files
from flanneld.state.resources import Link, Tun, Vxlan
from flanneld.subnet import subnet_file

_GC_THRESH = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
#: Namespaces looked at, at most: a node has 110 pods, if Kubernetes is not told otherwise.
_MANY = 256
#: Files of a bridge's port: option of bridge(8), and the values with which it does not pass all packets on.
#: States are disabled and blocking (linux/if_bridge.h).
_PORT = {"state": ("state", "04"), "unicast_flood": ("flood", "0"), "learning": ("learning", "0")}
#: struct __fdb_entry (linux/if_bridge.h): MAC address, port, 1 for an address of the bridge itself.
_FDB_ENTRY = struct.Struct("=6sxB8x")
#: Directory and suffixes of CNI configs; runtimes use the first by name (libcni, ConfFiles).
_CNI_DIRECTORY = "/etc/cni/net.d"
_CNI_SUFFIXES = (".conf", ".conflist", ".json")


def gather(source: DataSource) -> Facts:
    """Read the facts that can be read. Raises ``OSError`` if the kernel cannot be read at all."""
    told = source.status
    path = Path(source.options.subnet_file)
    desired = compare.desired_objects(told)
    found = compare.read(told, desired)
    ours = [link for link in found.links if is_flannels(link)]
    addresses = tuple(host_addresses())
    devices = known(told.devices) or [link.name for link in ours]
    ways = container_devices(told, addresses, devices)
    names = {link.index: link.name for link in found.links}
    ways_out = {told.uplink_name, *devices, *ways.values()}
    queues = {index: name for index, name in names.items() if name in ways_out}
    before = traffic_control.queue_drops(queues)
    paths, now = tuple(_paths(told)), clock.wall()
    queued = traffic_control.queue_drops(queues) - before
    former, told = told, with_sessions(told, paths, now)
    bases = drops.read_bases(told)
    passed = frozenset(passing(told, paths))
    lacks_segmentation, queues_used = _speed(told.uplink_name)
    lacking = lacking_objects(told) if source.origin == "store" else ()
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
        entries=(*compare.compare(told, desired, found, but_ok=True), *lacking),
        detours=tuple(compare.shadowing_routes(told, found, compare.route_lookup())),
        host=_host_findings(source),
        managed=tuple(_managed(ours)),
        firewalls=tuple(_firewalls()),
        is_guarded=any(map(has_guard, FAMILIES)),
        left_rules=tuple(_left_rules(told)),
        cni=tuple(cni_confs(Path(_CNI_DIRECTORY))),
        traffic={link.name: _traffic(link.name) for link in ours},
        port_owners=dict(_port_owners(told, found.links)),
        offload=dict(_offload(ours)),
        uplink_lacks_segmentation=lacks_segmentation,
        queues=queues_used,
        standing=tuple(standing(former, told)) if any(map(is_threaded, devices)) else (),
        kernel=_kernel(),
        lacking=tuple(lacking_features(told, found)),
        charon=charon_of(told),
        gc_thresh=number(_GC_THRESH),
        etcd=ask_etcd(told),
        queued=queued,
        tc_filters=tuple(traffic_control.filters(queued, queues)),
        stored=nodes.stored_config(source) if source.origin == "daemon" else None,
        clock_is_synchronised=_clock_is_synchronised(),
        paths=paths,
        filtered=tuple(drops.read_drops(told, ways, bases)),
        translated=tuple(drops.read_translations(told, ways, bases)),
        lost=tuple(losses.lost_packets(told, names, ways, lambda: bases)),
        containers=tuple(read_containers(told, found.links, {address for _, address in addresses})),
        pinned=tuple(
            losses.permanent(HostView(), filter(None, map(found.link, {told.uplink_name, *ways.values()})))
        ),
        unresolved=dict(
            losses.unresolved(each.target for each in paths if each.name == "underlay" and not each.carried)
        ),
        refusing=frozenset(_refusing(told, paths)),
        passing=passed,
        claims=tuple(losses.claims(told, paths, passed)),
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


def _refusing(told: Status, paths: Collection[PathToPeer]) -> Iterator[str]:
    """Yield the public IPs of the nodes behind a silent tunnel that refuse its UDP port."""
    silent = {path.peer for path in paths if path.name == "tunnel" and path.carried is None}
    asked = [
        (node, each.peer_port)
        for peer in (told.each_peer if silent else ())
        if peer.subnets[0] in silent
        for each in carriers(told, peer)
        if each.protocol == "udp" and each.peer_port
        for node in peer.addresses
        if node.version == each.family
    ]
    yield from map(str, survey.refused(dict.fromkeys(asked), BRIEFLY))


def _host_findings(source: DataSource) -> tuple[WrongSetting, ...]:
    told = source.status
    families = tuple(network.version for network, _ in told.ranges) or FAMILIES[:1]
    services = known(told.kube_subnet_mgr)
    services = source.options.kube_subnet_mgr if services is None else services
    return host_settings.findings(host_settings.read_facts(families, told.uplink_name, services=services))


def _managed(ours: list[SeenLink]) -> Iterator[tuple[str, str]]:
    """Yield our devices that other programs manage, according to those programs' files in /run."""
    for link in ours:
        if "managed=true" in files.text(Path(f"/run/NetworkManager/devices/{link.index}")).split():
            yield link.name, "NetworkManager"
        state = files.text(Path(f"/run/systemd/netif/links/{link.index}"))
        if "ADMIN_STATE=configured" in state or "ADMIN_STATE=configuring" in state:
            yield link.name, "systemd-networkd"


def _firewalls() -> Iterator[str]:
    if has_firewalld():
        yield "firewalld"
    if "ENABLED=yes" in files.text(Path("/etc/ufw/ufw.conf")):
        yield "ufw"


def _traffic(name: str) -> tuple[int, int]:
    where = Path(f"/sys/class/net/{name}/statistics")
    return number(where / "rx_packets"), number(where / "tx_packets")


def _offload(ours: list[SeenLink]) -> Iterator[tuple[str, bool]]:
    """Yield our devices with their checksum offload."""
    for link in ours:
        with suppress(OSError):
            yield link.name, interfaces.offloads_checksums(link.name)


def _speed(uplink: str) -> tuple[bool, tuple[int, int]]:
    """Return if the uplink leaves segmentation of VXLAN to the CPU, and its queues; nothing if unreadable.

    More queues than CPUs are of no use.
    """
    lacks, queues = False, (0, 0)
    with suppress(OSError):
        lacks = interfaces.lacks_feature(uplink, "tx-udp_tnl-segmentation")
    with suppress(OSError):
        used, possible = interfaces.channels(uplink)
        queues = used, min(possible, os.cpu_count() or 1)
    return lacks, queues


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


# ---- other programs, and containers -------------------------------------------------------------


def read_containers(
    told: Status, host_links: Collection[SeenLink], host_addresses: Collection[IPAddress]
) -> list[Container]:
    """Return the containers in named namespaces; none without the permission to enter those.

    A host may have other namespaces with such addresses: only an end of a veth pair of ours counts.
    """
    networks = [network for network, _ in told.ranges]
    subnets = {net.version: net for peer in told.each_peer for net in peer.networks}
    targets = {family: container_of(subnet) for family, subnet in subnets.items()}
    ends: dict[int, dict[int, SeenLink]] = {}
    names = {link.index: link.name for link in host_links}
    for link in host_links:
        if link.make.make == "veth" and link.namespace >= 0:
            ends.setdefault(link.namespace, {})[link.link] = link
    found: list[tuple[Container, SeenLink]] = []
    host = HostView()
    for path in islice(named_namespaces() if networks and targets and ends else (), _MANY):
        with suppress(OSError):
            indexes = ends.get(number_of(host, path))
            if indexes:
                with entered(path):
                    found += _inside(path, HostView(), networks, targets, indexes, host_addresses)
    return [_of_this_host(each, host, names) for each in found]


def _of_this_host(seen: tuple[Container, SeenLink], host: HostView, names: Mapping[int, str]) -> Container:
    """Return a container with what this host tells of it: the way to it, and its end of the veth pair."""
    each, end = seen
    port, bridge = Path(f"/sys/class/net/{end.name}/brport"), names.get(end.master, end.name)
    values = ((option, files.text(port / name).strip(), bad) for name, (option, bad) in _PORT.items())
    off = tuple(option for option, value, bad in values if value and value in bad)
    return replace(
        each,
        reached_by=_device_to(host, each.address, names),
        attached_to=bridge,
        port=end.name,
        port_mtu=end.mtu,
        off=off,
        is_learnt=not off or each.mac in _learnt(bridge),
    )


def _learnt(bridge: str) -> set[str]:
    """Return the MAC addresses whose port a bridge knows."""
    try:
        table = Path(f"/sys/class/net/{bridge}/brforward").read_bytes()
    except OSError:
        return set()
    return {mac_text(mac) for mac, is_own in _FDB_ENTRY.iter_unpack(table) if not is_own}


def _device_to(host: HostView, address: IPAddress, names: Mapping[int, str]) -> str:
    way = host.look_up_route(address)
    return names.get(way.index, "") if way is not None and way.kind == RTN_UNICAST else ""


def _inside(
    path: Path,
    view: HostView,
    networks: Collection[IPNetwork],
    targets: Mapping[Family, IPAddress],
    ends: Mapping[int, SeenLink],
    host_addresses: Collection[IPAddress],
) -> Iterator[tuple[Container, SeenLink]]:
    links = {link.index: link for link in view.links() if link.index in ends}
    pinned = {link.name: tuple(losses.permanent(view, [link])) for link in links.values()}
    for family in FAMILIES:
        for seen in view.addresses(family) if family in targets else ():
            link = links.get(seen.index)
            if link is not None and any(seen.address in net for net in networks):
                way = view.look_up_route(targets[family])
                is_routed = way is not None and way.kind == RTN_UNICAST
                if way is not None and way.gateway is not None and not way.gateway.is_link_local:
                    is_routed = is_routed and way.gateway in host_addresses
                is_routed = is_routed and link.up
                yield (
                    Container(
                        str(path),
                        link.name,
                        seen.address,
                        is_routed,
                        link.mtu,
                        is_up=link.up,
                        mac=link.mac,
                        pinned=pinned[link.name],
                    ),
                    ends[link.index],
                )


def _left_rules(told: Status) -> Iterator[LeftRules]:
    """Yield stale rules, as far as they are readable; none without a daemon that names its own place."""
    firewall = known(told.firewall)
    others = [place for place in PLACES if firewall and place != firewall.place]
    for network, _ in told.ranges:
        for place in others:
            try:
                there, edits = stale_rules(place, network.version, RuleOwnership((network,)))
            except Retryable:
                continue
            if there and edits:
                lines = tuple(f"{there.name}: {line}" for line in as_text(edits))
                yield LeftRules(lines, tuple(commands_of(place, network.version, edits)))


def cni_confs(directory: Path) -> Iterator[CniFile]:
    """Yield the CNI configs in the order of container runtimes. Invalid files are skipped."""
    for path in sorted(directory.glob("*")):
        if path.suffix in _CNI_SUFFIXES and (types := _types(path)):
            yield CniFile(str(path), types)


def _types(path: Path) -> tuple[str, ...]:
    try:
        conf = json.loads(path.read_bytes())
        return tuple(str(each["type"]) for each in conf.get("plugins", [conf]))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ()
