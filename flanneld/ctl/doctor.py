"""``flannelctl doctor``: read facts about this host, run the checks over them and show their findings."""

from __future__ import annotations

import errno
import os
import shlex
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from flanneld.backends.registry import described
from flanneld.backends.udp.control import may_configure
from flanneld.compat.glog import counted
from flanneld.ctl import compare, drops, inside, losses, neighbors, nodes
from flanneld.ctl.beyond import containers_of_peers, lost_ways
from flanneld.ctl.checks import (
    THEMES,
    Check,
    Facts,
    LackingFeature,
    cluster,
    containers,
    encryption,
    host,
    kernel,
    store,
)
from flanneld.ctl.compare import ActualState
from flanneld.ctl.losses import host_addresses
from flanneld.ctl.output import State, TextTable, in_lines
from flanneld.ctl.paths import BRIEFLY, PathToPeer, carriers, passing, sample, turned_away, with_losses
from flanneld.ctl.source import DataSource, Unknown
from flanneld.diagnostics.status import Status, known, resources
from flanneld.errors import Retryable
from flanneld.findings import Command, Finding, Severity
from flanneld.model import FAMILIES, Family
from flanneld.network import host_settings, interfaces, processes, survey
from flanneld.network.firewall.foreign import has_firewalld
from flanneld.network.firewall.netlink import has_guard
from flanneld.network.firewall.placing import PLACES, commands_of, stale_rules
from flanneld.network.firewall.placing import described as as_text
from flanneld.network.firewall.rules import RuleOwnership
from flanneld.network.host import HostView
from flanneld.network.host_settings import WrongSetting
from flanneld.network.rtnetlink import devices, links, traffic_control
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.rtnetlink.netlink import NetlinkSocket
from flanneld.runtime import clock, files
from flanneld.runtime.command import CommandRunner
from flanneld.state.resources import Link, Tun, Vxlan
from flanneld.subnet import subnet_file

#: Findings, each after the check that found it.
Findings = list[tuple[Check, Finding]]
#: The modules of checks. Of one theme, the checks and findings of the first come first.
_MODULES = (store, containers, encryption, host, kernel, cluster)
#: All checks, sorted by theme.
CHECKS = tuple(
    sorted(
        (each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)),
        key=lambda each: each.theme,
    )
)
#: Seconds for one command of a fix: a restart of the daemon waits for its start.
_FIX_TIME = 90.0
#: Checks that see effects: what another check finds may be the cause.
_SYMPTOMS = frozenset(
    {"container echoes", "tunnel", "probes", "port", "ready", "missing", "refused", "stale", "silent nodes"}
)
#: Checks whose finding may name the subnet of a silent peer, and those that count the silent ones.
_OF_ONE_PEER, _OF_SILENCE = (
    frozenset({"tunnel", "handshakes", "former subnet"}),
    frozenset({"tunnel", "probes"}),
)
#: By a rule of the cluster, checks of this host that see the same on all nodes.
_SEEN_FROM_HERE = {
    "shared MACs": {"contested"},
    "shared public IPs": {"public ip"},
    "unusable leases": {"contested", "refusals", "unsafe leases", "former subnet"},
}
#: Checks of packets that are lost for a reason which another check may find.
_EXPLAINED = (
    containers.container_echoes,
    containers.way_out,
    containers.router,
    containers.peers_containers,
)
#: By a check's name, its place behind the causes. That the daemon ended explains symptoms, and has a cause.
_RANKS = {"daemon": 1, **dict.fromkeys(_SYMPTOMS, 2)}


def examine(facts: Facts) -> Findings:
    """Return all findings: problems before hints, causes before symptoms, then by theme (pure)."""
    found = [(check, finding) for check in CHECKS for finding in check.look(facts)]
    if facts.limits[0]:  # what it tells is not about this host
        found = [each for each in found if each[0] is store.daemon]
    if any(_explains(*each) for each in found):
        found = [each for each in found if each[0] not in _EXPLAINED]
    return _ranked(found)


def _explains(check: Check, finding: Finding) -> bool:
    """Return True for a finding that may explain lost packets of containers (pure)."""
    return (
        finding.severity is Severity.PROBLEM
        and check.theme in "ABEG"
        and check not in (*_EXPLAINED, host.masquerade)
    )


def with_cluster(findings: Findings, found: list[cluster.Remark]) -> Findings:
    """Return the findings of this host and of the cluster: a silent node once, and never this one (pure)."""
    named = {finding.about for check, finding in findings if check.name in _OF_ONE_PEER}
    looked = {check.name for check, _ in findings}
    found = [
        each
        for each in found
        if looked.isdisjoint(_SEEN_FROM_HERE.get(each.rule.name, ()))
        and not (each.node.is_own and each.rule.name in ("silent nodes", "conditions"))
        and (each.rule.name != "silent nodes" or named.isdisjoint(each.node.subnets))
    ]
    if any(each.rule.name == "silent nodes" for each in found):  # that names all nodes at once
        findings = [each for each in findings if each[0].name not in _OF_SILENCE or each[1].about]
    return _ranked([*findings, *cluster.cluster_findings(found)])


def _ranked(found: Findings) -> Findings:
    return sorted(found, key=lambda each: (each[1].severity is Severity.HINT, _RANKS.get(each[0].name, 0)))


def fixes(findings: Findings) -> list[tuple[Command, ...]]:
    """Return the commands of each problem with a fix, each once; hints may be intended (pure)."""
    found = (finding for _, finding in findings if finding.severity is Severity.PROBLEM)
    return list(dict.fromkeys(each.remedy for each in found if not isinstance(each.remedy, str)))


def run_fixes(chosen: Iterable[tuple[Command, ...]]) -> list[tuple[Command, str]]:
    """Run the commands of each fix up to the first that fails. Return them, each with its failure."""
    runner, ran = CommandRunner(threading.Event()), []
    for commands in chosen:
        for each in commands:
            try:
                done = runner.run(each, timeout=_FIX_TIME)
                failure = done.errors.strip() or f"status {done.status}" if done.status else ""
            except Retryable as error:
                failure = str(error)
            ran.append((each, failure))
            if failure:
                break
    return ran


class DoctorReport(Struct, frozen=True):
    """Findings, what is not known, and the checks beside those of this host (``more``)."""

    findings: Findings
    unknown: Sequence[object] = ()
    more: Sequence[Check] = ()

    @classmethod
    def of(cls, source: DataSource, *, is_cluster: bool) -> DoctorReport:
        """Examine this host, and the cluster if asked to. Raises ``OSError``."""
        facts = gather(source)
        if not is_cluster:
            return cls(examine(facts), facts.unknown)
        stored = facts.stored if source.origin == "daemon" else UNSET
        nodes_seen, found = nodes.examine(source, stored)
        unknown = [*facts.unknown, *nodes.unanswered(nodes_seen, source)]
        return cls(with_cluster(examine(facts), found), unknown, cluster.CLUSTER_CHECKS)

    @property
    def problems(self) -> list[Finding]:
        return [finding for _, finding in self.findings if finding.severity is Severity.PROBLEM]

    @property
    def verdict(self) -> str:
        """Return the result in one line."""
        found = self.problems
        if found:
            more = f", and {counted(len(found) - 1, 'more problem')}" if len(found) > 1 else ""
            return f"Broken: {found[0].problem}{more}"
        return f"Healthy, with {counted(len(self.findings), 'hint')}" if self.findings else "Healthy"

    def tables(self) -> list[TextTable]:
        """Return the findings for a terminal."""
        problems = len(self.problems)
        checks, hints = len(CHECKS) + len(self.more), len(self.findings) - problems
        said = f"{checks} checks: {counted(problems, 'problem')}, {counted(hints, 'hint')}"
        return [
            in_lines([self.verdict]),
            *(TextTable((), list(_rows(check, finding))) for check, finding in self.findings),
            in_lines([*(f"not known: {why}" for why in self.unknown), said]),
        ]

    def plain(self) -> dict[str, Any]:
        """Return the findings as JSON: a fix as argument lists, or an advice as text."""
        return {
            "verdict": self.verdict,
            "checks": [
                {"theme": each.theme, "name": each.name, "meaning": each.meaning}
                for each in (*CHECKS, *self.more)
            ],
            "findings": [_plain(check, finding) for check, finding in self.findings],
            "not_known": list(map(str, self.unknown)),
        }


def _rows(check: Check, finding: Finding) -> Iterator[tuple[str, str]]:
    yield State.HINT if finding.severity is Severity.HINT else State.PROBLEM, finding.problem
    yield "check", f"{check.theme} {check.name}: {THEMES[check.theme]}"
    yield "evidence", finding.evidence
    yield "why", finding.why
    if isinstance(finding.remedy, str):
        yield "advice", finding.remedy
    else:
        yield from (("fix", shlex.join(each)) for each in finding.remedy)


def _plain(check: Check, finding: Finding) -> dict[str, Any]:
    is_advice = isinstance(finding.remedy, str)
    return {
        "theme": check.theme,
        "check": check.name,
        "severity": finding.severity,
        "about": finding.about,
        "problem": finding.problem,
        "evidence": finding.evidence,
        "why": finding.why,
        "fix": None if is_advice else finding.remedy,
        "advice": finding.remedy if is_advice else None,
    }


# ---- facts about this host ----------------------------------------------------------------------

_GC_THRESH = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")


def gather(source: DataSource) -> Facts:
    """Read the facts that can be read. Raises ``OSError`` if the kernel cannot be read at all."""
    told = source.status
    path = Path(source.options.subnet_file)
    found = compare.read(told)
    ours = [link for link in found.links if is_flannels(link)]
    addresses = tuple(host_addresses())
    devices = known(told.devices) or [link.name for link in ours]
    ways = inside.container_devices(told, addresses, devices)
    names = {link.index: link.name for link in found.links}
    lacks_segmentation, queues_used = _speed(told.uplink_name)
    lacking = encryption.lacking_objects(told) if source.origin == "store" else ()
    stored = nodes.stored_config(source) if source.origin == "daemon" else None
    facts = Facts(
        status=told,
        origin=source.origin,
        limits=_limits(source.pid),
        unknown=(*source.unknown, *([stored] if isinstance(stored, Unknown) else ())),
        subnet_file=str(path),
        has_subnet_file=path.exists(),
        previous=subnet_file.read(path),
        links=found.links,
        addresses=addresses,
        entries=(*compare.compare(told, found.left, found), *lacking),
        detours=tuple(compare.shadowing_routes(told, found, compare.route_lookup())),
        host=_host_findings(source),
        managed=tuple(_managed(ours)),
        firewalls=tuple(_firewalls()),
        is_guarded=any(map(has_guard, FAMILIES)),
        left_rules=tuple(_left_rules(told)),
        cni=tuple(host.cni_confs(host.CNI_DIRECTORY)),
        traffic={link.name: _traffic(link.name) for link in ours},
        port_owners=dict(_port_owners(told, found.links)),
        offload=dict(_offload(ours)),
        uplink_lacks_segmentation=lacks_segmentation,
        queues=queues_used,
        kernel=_kernel(),
        lacking=tuple(lacking_features(told, found)),
        charon=encryption.charon_of(told),
        gc_thresh=files.number(_GC_THRESH),
        etcd=store.ask_etcd(told),
        stored=None if isinstance(stored, Unknown) else stored,
        clock_is_synchronised=_clock_is_synchronised(),
        containers=tuple(inside.read_containers(told, found.links, {address for _, address in addresses})),
        pinned=tuple(
            neighbors.neighbors(HostView(), filter(None, map(found.link, {told.uplink_name, *ways.values()})))
        ),
    )
    return _with_rules(_with_probes(facts, nodes.port_of(source)), ways, names)


def _with_rules(facts: Facts, ways: Mapping[Family, str], names: Mapping[int, str]) -> Facts:
    """Return the facts with what rules and routes of this host do to packets."""
    told, bases = facts.status, drops.read_bases(facts.status)
    held = {(at.port, at.address.version): at.address for at in facts.containers}
    return replace(
        facts,
        containers=tuple(
            replace(each, dropped_by=drops.rules_about(each.address, told, ways, bases))
            if each.unanswered
            else each
            for each in facts.containers
        ),
        filtered=tuple(drops.read_drops(told, ways, bases, held)),
        exempting=tuple(drops.exempting_rules(told, ways, bases)),
        has_policies=drops.has_policies(bases),
        lost=tuple(losses.lost_packets(told, names, ways, lambda: bases)),
    )


def _limits(pid: int) -> tuple[int, str]:
    """Return the daemon's process if it is in another network namespace, else 0; and what it lacks."""
    lacks = "CAP_NET_ADMIN" if pid and not may_configure(pid) else ""
    with suppress(OSError):
        if not Path(f"/proc/{pid}/ns/net").samefile("/proc/thread-self/ns/net"):
            return pid, lacks
    return 0, lacks


def _with_probes(facts: Facts, port: int) -> Facts:
    """Return the facts with those that packets to a few peers show, and with the sessions after them.

    ``port`` is that of queries.
    """
    ways = {facts.status.uplink_name, *facts.devices, *(name for name, _ in facts.gateways)}
    ways.update(at.port for at in facts.containers)
    queues = {link.index: link.name for link in facts.links if link.name in ways}
    told = former = facts.status
    own = {ip.version: ip for _, ip in facts.addresses if any(ip in net for net in told.own_subnets)}
    before = traffic_control.queue_drops(queues)
    paths, now = tuple(_paths(told)), clock.wall()
    told = encryption.with_sessions(told, paths, now)
    refusing = frozenset(_refusing(told, paths))  # first: a kernel sends a few ICMP errors a second to a host
    passed = frozenset(passing(told, paths))
    silent = (each.target for each in paths if each.name == "underlay" and not each.carried)
    is_threaded = any(map(encryption.is_threaded, facts.devices))
    is_silent = any(each.carried is None for each in paths)
    facts = replace(facts, paths=paths)
    answered = {(at.path, at.address): at for at in ([] if is_silent else inside.answered(facts))}
    queued = traffic_control.queue_drops(queues) - before
    return replace(
        facts,
        status=told,
        now=now,
        containers=tuple(answered.get((each.path, each.address), each) for each in facts.containers),
        queued=queued,
        tc_filters=tuple(traffic_control.filters(queued, queues)),
        standing=tuple(encryption.standing(former, told)) if is_threaded else (),
        refusing=refusing,
        passing=passed,
        beyond=tuple(_beyond(told, paths, port)),
        lost_ways=tuple(lost_ways(sorted({network.version for network, _ in told.ranges}))),
        unresolved=dict(neighbors.unresolved(silent)),
        turned_away=tuple(turned_away(told, paths, own)),
        claims=tuple(neighbors.claims(told, paths, passed)),
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
    return files.number(where / "rx_packets"), files.number(where / "tx_packets")


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
            found = sample(told, survey.glance_at_mtu)
            answered = (each.target for each in found if each.carried is not None)
            yield from with_losses(found, survey.losses_of_sample(answered))


def _beyond(told: Status, paths: Collection[PathToPeer], port: int) -> Iterator[PathToPeer]:
    with suppress(OSError):
        yield from containers_of_peers(told, paths, port)


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


def _left_rules(told: Status) -> Iterator[host.LeftRules]:
    """Yield stale rules, as far as they are readable; none without a daemon whose own rules are in place."""
    firewall = known(told.firewall)
    is_placed = firewall and not firewall.not_in_place
    elsewhere = [place for place in PLACES if firewall and is_placed and place != firewall.place]
    for network, _ in told.ranges:
        for place in elsewhere:
            try:
                there, edits = stale_rules(place, network.version, RuleOwnership((network,)))
            except Retryable:
                continue
            if there and edits:
                lines = tuple(f"{there.name}: {line}" for line in as_text(edits))
                yield host.LeftRules(lines, tuple(commands_of(place, network.version, edits)))
