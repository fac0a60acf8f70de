"""Kernel settings that prevent forwarding: checked at startup, and forwarding every second.

Some settings are deliberately not checked:

- A FORWARD chain that drops is handled with the firewall.
- A strict ``rp_filter`` on our devices is harmless: packets from a peer or its containers have a route back
  there. Only a container that calls another node's own address without masquerading gets no answer.
- ``gc_thresh`` does not count permanent neighbours.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.findings import Command, Finding, Remedy, Severity, line
from flanneld.model import Family
from flanneld.runtime import clock
from flanneld.state.resources import Key, Kind
from flanneld.state.table import Failure, LastingTable, Put, Report, Scope, Seen

log = logging.getLogger(__name__)

_ROOT = Path("/proc/sys")
#: Settings are named by their path below /proc/sys: an interface's name may have dots in it.
FORWARDING: Mapping[Family, str] = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
BRIDGED: Mapping[Family, str] = {
    4: "net/bridge/bridge-nf-call-iptables",
    6: "net/bridge/bridge-nf-call-ip6tables",
}
_IPV6_OFF = "net/ipv6/conf/{}/disable_ipv6"
_ACCEPT_RA = "net/ipv6/conf/{}/accept_ra"
_STRICT, _LOOSE = 1, 2
#: Values of accept_ra: only without forwarding, or always.
_AS_A_HOST, _ALWAYS = 1, 2
# linux/route.h, linux/ipv6_route.h
_RTF_GATEWAY, _RTF_DEFAULT, _RTF_ADDRCONF = 0x2, 0x10000, 0x40000


class HostSettings(Struct, frozen=True, gc=False):
    """Facts for the decision. ``settings`` lacks what this kernel does not have or show.

    - ``services`` is True if containers use service addresses, as in Kubernetes.
    - ``advertised`` are the interfaces with an IPv6 default route from router advertisements.
    - ``elsewhere`` is the interface of the IPv4 default route, if no route through a gateway leaves by the
      uplink.
    """

    families: tuple[Family, ...]
    uplink: str
    settings: Mapping[str, int]
    services: bool = False
    advertised: tuple[str, ...] = ()
    elsewhere: str = ""
    #: False if IPv6 has no route to other networks, and that is not because this host does not forward.
    leads_out: bool = True
    #: Devices by which peers' packets may arrive while the answers leave by another device.
    either: tuple[str, ...] = ()


class Topic(StrEnum):
    """Setting of this host that a finding is about."""

    FORWARDING = "forwarding"
    IPV6 = "disable_ipv6"
    BRIDGES = "br_netfilter"
    REVERSE_PATH = "rp_filter"


class WrongSetting(Finding, frozen=True, gc=False):
    """A wrong setting, ``about`` its topic. A problem prevents the network from working.

    ``settings`` are the writes that the daemon may make itself, in this order; none if the operator must
    decide.
    """

    settings: tuple[tuple[str, int], ...] = ()


def _wrong(
    topic: Topic,
    what: str,
    why: str,
    fix: Command,
    settings: tuple[tuple[str, int], ...] = (),
    *,
    is_problem: bool = True,
) -> WrongSetting:
    # br_netfilter affects every bridge of this host, also those of other programs.
    remedy: Remedy = line((fix,)) if topic is Topic.BRIDGES else (fix,)
    severity = Severity.PROBLEM if is_problem else Severity.HINT
    return WrongSetting(what, "read from /proc/sys", why, remedy, topic, severity, settings)


def report(
    families: tuple[Family, ...], uplink: str, *, services: bool = False, either: tuple[str, ...] = ()
) -> None:
    """Correct the settings that the daemon may change, and log one line about each obstacle.

    Packets of a peer may arrive by a device in ``either`` while the answers leave by another device.
    """
    for finding in findings(read_facts(families, uplink, services=services, either=either)):
        if mend(finding):
            log.info("%s, so %s; mended by: %s", finding.problem, finding.why, finding.cure)
        elif finding.about != Topic.FORWARDING:  # that topic's table logs it
            level = logging.WARNING if finding.severity is Severity.PROBLEM else logging.INFO
            log.log(level, "%s, so %s; run as root: %s", finding.problem, finding.why, finding.cure)


class ForwardingSetting(Struct, frozen=True, gc=False):
    """Forwarding setting of the kernel for one family, switched on."""

    kind: ClassVar[Kind] = Kind.FILE
    family: Family

    @property
    def key(self) -> Key:
        return (KernelForwardingTable.name, self.family)

    def __str__(self) -> str:
        return f"forwarding of IPv{self.family}"


class KernelForwardingTable(LastingTable):
    """Reconciler table of the kernel's forwarding, which other programs may switch off.

    Reading a setting costs 10 us, so a check every second is cheaper than a socket for notifications. With
    ``keep`` it is switched on again, else the operator is informed.
    """

    name = "forwarding"
    what = "the kernel's settings"
    vital = False

    def __init__(self, families: tuple[Family, ...], uplink: Callable[[], str], *, keep: bool) -> None:
        super().__init__(clock.now)
        self.desired = tuple(ForwardingSetting(family) for family in families)
        self._families = families
        self._uplink = uplink
        self._keep = keep
        self._off: frozenset[Family] = frozenset()

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        self._off = self._read_off()
        yield from (Seen(each) for each in self.desired if each.family not in self._off)

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        facts = read_facts(self._families, self._uplink())
        for setting in (put.want for put in puts if isinstance(put.want, ForwardingSetting)):
            for finding in _no_forwarding(replace(facts, families=(setting.family,))):
                if self._keep and mend(finding):
                    report.made.append(setting)
                    report.details[setting.key] = f"another program had left {finding.problem}"
                else:
                    told = f"{finding.problem}: {finding.why}"
                    report.failed.append(Failure(setting, told, f"run as root: {finding.cure}"))
        self._off = self._read_off()
        return report

    def script(self, scope: Scope) -> Iterator[str]:
        """Yield the commands that switch forwarding on."""
        del scope
        facts = read_facts(self._families, self._uplink())
        yield from (finding.cure for finding in _no_forwarding(facts))

    def has_changed(self) -> bool:
        return self._read_off() != self._off

    def _read_off(self) -> frozenset[Family]:
        settings = _read(*(FORWARDING[family] for family in self._families))
        return frozenset(family for family in self._families if settings.get(FORWARDING[family]) == 0)


# ---- decisions ---------------------------------------------------------------------------------


def findings(facts: HostSettings) -> tuple[WrongSetting, ...]:
    """Return the wrong settings of this host (pure)."""
    return (
        *_no_forwarding(facts),
        *_no_routers(facts),
        *_no_ipv6(facts),
        *_bridge_without_firewall(facts),
        *_strict_uplink(facts),
        *_strict_switch(facts),
    )


def _no_forwarding(facts: HostSettings) -> Iterator[WrongSetting]:
    for family in facts.families:
        if facts.settings.get(FORWARDING[family]) == 0:
            settings = (*(_kept_advertisements(facts) if family == 6 else ()), (FORWARDING[family], 1))
            yield _wrong(
                Topic.FORWARDING,
                f"{_shown(FORWARDING[family])} is 0",
                f"this host passes no IPv{family} packets on, neither to its containers nor from them",
                sysctl(*settings),
                settings,
            )


def _no_routers(facts: HostSettings) -> Iterator[WrongSetting]:
    setting = _ACCEPT_RA.format(facts.uplink)
    if 6 in facts.families and not facts.leads_out and facts.settings.get(setting) == _AS_A_HOST:
        yield _wrong(
            Topic.FORWARDING,
            f"{facts.uplink} learns no IPv6 default route: {_shown(setting)} is 1, and this host forwards",
            "no IPv6 packet leaves for other networks, if routers advertise themselves",
            sysctl((setting, _ALWAYS)),
            is_problem=False,
        )


def _no_ipv6(facts: HostSettings) -> Iterator[WrongSetting]:
    setting = _IPV6_OFF.format(facts.uplink)
    if 6 in facts.families and facts.settings.get(setting) == 1:
        why = f"{facts.uplink} has no IPv6 address, and takes none"
        yield _wrong(Topic.IPV6, f"{_shown(setting)} is 1", why, sysctl((setting, 0)))


def _kept_advertisements(facts: HostSettings) -> Iterator[tuple[str, int]]:
    """Yield the accept_ra settings to change before forwarding is switched on.

    Otherwise the kernel would drop the default routes of router advertisements (Linux, ip-sysctl: accept_ra).
    """
    for interface in facts.advertised:
        setting = _ACCEPT_RA.format(interface)
        if facts.settings.get(setting) == _AS_A_HOST:
            yield setting, _ALWAYS


def _bridge_without_firewall(facts: HostSettings) -> Iterator[WrongSetting]:
    """Yield settings that keep replies on a bridge from being translated back.

    This also affects published ports, but only service addresses are used by every container.
    """
    why = "containers of this node do not reach each other through a service address or a published port"
    missing = [BRIDGED[family] for family in facts.families if BRIDGED[family] not in facts.settings]
    if missing:
        what = "the kernel module br_netfilter is not loaded (RHEL 10: package kernel-modules-extra)"
        yield _wrong(Topic.BRIDGES, what, why, ("modprobe", "br_netfilter"), is_problem=facts.services)
    off = [BRIDGED[family] for family in facts.families if facts.settings.get(BRIDGED[family]) == 0]
    for setting in off:
        command = sysctl((setting, 1))
        yield _wrong(Topic.BRIDGES, f"{_shown(setting)} is 0", why, command, is_problem=facts.services)


def _strict_uplink(facts: HostSettings) -> Iterator[WrongSetting]:
    """Yield a strict reverse path filter of the uplink.

    It drops packets that arrive on another interface than the reply would leave by. The larger of the
    interface's value and the one for all counts (Linux, ip-sysctl: rp_filter).
    """
    setting = f"net/ipv4/conf/{facts.uplink}/rp_filter"
    values = (facts.settings.get(setting, 0), facts.settings.get("net/ipv4/conf/all/rp_filter", 0))
    if 4 in facts.families and facts.elsewhere and max(values) == _STRICT:
        yield _wrong(
            Topic.REVERSE_PATH,
            f"{_shown(setting)} is strict while the default route leaves by {facts.elsewhere}",
            f"packets from nodes that are not on {facts.uplink}'s own network are dropped",
            sysctl((setting, _LOOSE)),
        )


def _strict_switch(facts: HostSettings) -> Iterator[WrongSetting]:
    """Yield strict reverse path filters: during a switch of backends a peer may send by the other one."""
    if 4 not in facts.families:
        return
    everywhere = facts.settings.get("net/ipv4/conf/all/rp_filter", 0)
    for name in facts.either:
        setting = f"net/ipv4/conf/{name}/rp_filter"
        if max(facts.settings.get(setting, 0), everywhere) == _STRICT:
            yield _wrong(
                Topic.REVERSE_PATH,
                f"{_shown(setting)} is strict while Backend.Also is in use",
                f"packets that come in by {name} from nodes in another phase of the switch are dropped",
                sysctl((setting, _LOOSE)),
            )


def sysctl(*settings: tuple[str, int]) -> Command:
    """Return the command that makes these settings, named by their paths."""
    return ("sysctl", "-w", *(f"{_shown(path)}={value}" for path, value in settings))


def _shown(path: str) -> str:
    """Return a path as sysctl(8) shows it: dots and slashes swapped."""
    return path.translate(str.maketrans("/.", "./"))


# ---- reading and writing ------------------------------------------------------------------------


def read_facts(
    families: tuple[Family, ...], uplink: str, *, services: bool = False, either: tuple[str, ...] = ()
) -> HostSettings:
    """Read the facts of this network namespace. Routes are read only if needed: there may be many."""
    paths = [table[family] for table in (FORWARDING, BRIDGED) for family in families]
    paths += [each.format(uplink) for each in (_IPV6_OFF, _ACCEPT_RA)]
    paths += [*(f"net/ipv4/conf/{name}/rp_filter" for name in ("all", uplink))]
    settings = _read(*paths)
    advertised: tuple[str, ...] = ()
    if settings.get(FORWARDING[6]) == 0:
        advertised = tuple(_advertised_defaults())
        settings |= _read(*map(_ACCEPT_RA.format, advertised))
    strict = any(settings.get(path) == _STRICT for path in paths[-2:])
    settings |= _read(*(f"net/ipv4/conf/{name}/rp_filter" for name in either))
    elsewhere = _elsewhere(uplink) if strict else ""
    leads_out = 6 not in families or settings.get(FORWARDING[6]) != 1 or _leads_out()
    return HostSettings(families, uplink, settings, services, advertised, elsewhere, leads_out, either)


def _read(*paths: str) -> dict[str, int]:
    found = {}
    for path in paths:
        try:
            found[path] = int((_ROOT / path).read_text())
        except (OSError, ValueError):
            continue  # A missing setting is not judged.
    return found


def _advertised_defaults() -> Iterator[str]:
    for fields in _table("/proc/self/net/ipv6_route"):
        flags, interface = int(fields[8], 16), fields[9]
        if flags & _RTF_DEFAULT and flags & _RTF_ADDRCONF:
            yield interface


def _leads_out() -> bool:
    """Return True if IPv6 has a route to other networks: to connect a UDP socket sends nothing."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.connect(("2001:db8::1", 9))  # an address that none has (RFC 3849)
    except OSError as failure:
        return failure.errno != errno.ENETUNREACH
    return True


def _elsewhere(uplink: str) -> str:
    default = ""
    for fields in _table("/proc/self/net/route"):
        interface, destination, _, flags = fields[:4]
        if interface == uplink and int(flags, 16) & _RTF_GATEWAY:
            return ""
        if int(destination, 16) == int(fields[7], 16) == 0:
            default = default or interface
    return default if default != uplink else ""


def _table(path: str) -> Iterator[list[str]]:
    try:
        with Path(path).open(encoding="ascii") as lines:
            for line in lines:
                if not line.startswith("Iface"):
                    yield line.split()
    except FileNotFoundError:
        return  # A kernel without this family.


def mend(finding: WrongSetting) -> bool:
    """Make the permitted writes. Return False if there are none, or if this host refuses them."""
    try:
        for path, value in finding.settings:
            (_ROOT / path).write_text(f"{value}\n")
    except OSError:
        return False
    return bool(finding.settings)
