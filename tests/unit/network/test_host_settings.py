"""What stands in the way of forwarding, decided from facts, and the facts as the kernel's files tell them."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from msgspec.structs import replace

from flanneld.findings import Severity
from flanneld.model import FAMILIES, Family
from flanneld.network.host_settings import (
    ForwardingSetting,
    HostSettings,
    KernelForwardingTable,
    Topic,
    WrongSetting,
    findings,
    mend,
    read_facts,
    report,
)
from flanneld.state.table import Failure, Put, Scope, Seen

GOOD: Mapping[str, int] = {
    "net/ipv4/ip_forward": 1,
    "net/ipv6/conf/all/forwarding": 1,
    "net/bridge/bridge-nf-call-iptables": 1,
    "net/bridge/bridge-nf-call-ip6tables": 1,
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/eth0/rp_filter": 2,
}
FACTS = HostSettings(families=(4, 6), uplink="eth0", settings=GOOD, services=True)


def only(facts: HostSettings) -> WrongSetting:
    (finding,) = findings(facts)
    return finding


def but(facts: HostSettings = FACTS, **settings: int) -> HostSettings:
    """``facts`` with other settings, each named by its last two parts with ``_`` between them."""
    paths = {"_".join(path.split("/")[-2:]).replace("-", "_"): path for path in facts.settings}
    return replace(
        facts, settings={**facts.settings, **{paths[key]: value for key, value in settings.items()}}
    )


def without(*parts: str) -> HostSettings:
    kept = {path: value for path, value in GOOD.items() if not any(part in path for part in parts)}
    return replace(FACTS, settings=kept)


def test_nothing_is_found_on_a_host_that_is_in_order() -> None:
    assert findings(FACTS) == ()


def test_a_host_that_does_not_forward_ipv4_may_be_mended() -> None:
    finding = only(but(ipv4_ip_forward=0))
    assert finding.problem == "net.ipv4.ip_forward is 0"
    assert "IPv4" in finding.why
    assert finding.cure == "sysctl -w net.ipv4.ip_forward=1"
    assert finding.settings == (("net/ipv4/ip_forward", 1),)


def test_a_host_that_does_not_forward_ipv6_may_be_mended() -> None:
    finding = only(but(all_forwarding=0))
    assert finding.problem == "net.ipv6.conf.all.forwarding is 0"
    assert finding.settings == (("net/ipv6/conf/all/forwarding", 1),)


@pytest.mark.parametrize(("family", "other"), [(4, {"all_forwarding": 0}), (6, {"ipv4_ip_forward": 0})])
def test_a_family_that_the_network_does_not_use_is_of_no_concern(family: int, other: dict[str, int]) -> None:
    facts = replace(FACTS, families=(family,))
    assert findings(but(facts, **other)) == ()


def test_a_default_route_from_router_advertisements_is_kept_before_forwarding_begins() -> None:
    settings = {**GOOD, "net/ipv6/conf/all/forwarding": 0, "net/ipv6/conf/eth0.7/accept_ra": 1}
    finding = only(replace(FACTS, settings=settings, advertised=("eth0.7",)))
    assert finding.settings == (
        ("net/ipv6/conf/eth0.7/accept_ra", 2),
        ("net/ipv6/conf/all/forwarding", 1),
    )
    assert finding.cure == "sysctl -w net.ipv6.conf.eth0/7.accept_ra=2 net.ipv6.conf.all.forwarding=1"


@pytest.mark.parametrize("accept_ra", [0, 2])
def test_router_advertisements_that_do_not_depend_on_forwarding_are_left_alone(accept_ra: int) -> None:
    settings = {**GOOD, "net/ipv6/conf/all/forwarding": 0, "net/ipv6/conf/eth0/accept_ra": accept_ra}
    finding = only(replace(FACTS, settings=settings, advertised=("eth0",)))
    assert finding.settings == (("net/ipv6/conf/all/forwarding", 1),)


@pytest.mark.parametrize(
    ("families", "leads_out", "accept_ra", "is_told"),
    [
        ((4, 6), False, 1, True),
        ((6,), False, 1, True),
        ((4,), False, 1, False),
        ((4, 6), True, 1, False),
        ((4, 6), False, 0, False),
        ((4, 6), False, 2, False),
    ],
    ids=["both", "IPv6", "IPv4", "it has a route", "takes none", "takes them always"],
)
def test_an_uplink_that_learns_no_default_route_while_this_host_forwards_is_a_hint(
    families: tuple[Family, ...], leads_out: bool, accept_ra: int, is_told: bool
) -> None:
    settings = {**GOOD, "net/ipv6/conf/eth0.7/accept_ra": accept_ra, "net/ipv6/conf/eth0/accept_ra": 0}
    facts = replace(FACTS, families=families, uplink="eth0.7", settings=settings, leads_out=leads_out)
    problem = (
        "eth0.7 learns no IPv6 default route: net.ipv6.conf.eth0/7.accept_ra is 1, and this host forwards"
    )
    why = "no IPv6 packet leaves for other networks, if routers advertise themselves"
    fix = ("sysctl", "-w", "net.ipv6.conf.eth0/7.accept_ra=2")
    hint = WrongSetting(problem, "read from /proc/sys", why, (fix,), Topic.FORWARDING, Severity.HINT)
    assert findings(facts) == (hint,) * is_told


def test_a_missing_br_netfilter_is_for_the_operator_to_load() -> None:
    finding = only(without("bridge"))
    assert "br_netfilter" in finding.problem
    assert "service address" in finding.why
    assert (finding.cure, finding.settings) == ("modprobe br_netfilter", ())


def test_a_bridge_that_bypasses_the_firewall_is_for_the_operator_to_change() -> None:
    finding = only(but(bridge_bridge_nf_call_ip6tables=0))
    assert finding.problem == "net.bridge.bridge-nf-call-ip6tables is 0"
    assert finding.cure == "sysctl -w net.bridge.bridge-nf-call-ip6tables=1"
    assert finding.settings == ()


@pytest.mark.parametrize("services", [True, False])
def test_a_bridge_that_bypasses_the_firewall_is_grave_only_where_containers_use_services(
    services: bool,
) -> None:
    expected = Severity.PROBLEM if services else Severity.HINT
    for facts in (without("bridge"), but(bridge_bridge_nf_call_iptables=0)):
        assert only(replace(facts, services=services)).severity is expected


@pytest.mark.parametrize(
    ("everywhere", "uplink", "strict"),
    [(0, 1, True), (1, 0, True), (1, 2, False), (2, 1, False), (0, 0, False)],
)
def test_a_strict_uplink_is_reported_when_the_default_route_leads_elsewhere(
    everywhere: int, uplink: int, strict: bool
) -> None:
    facts = replace(but(all_rp_filter=everywhere, eth0_rp_filter=uplink), elsewhere="eth1")
    assert [finding.cure for finding in findings(facts)] == (
        ["sysctl -w net.ipv4.conf.eth0.rp_filter=2"] if strict else []
    )


def test_a_strict_uplink_does_no_harm_when_all_traffic_leaves_by_it() -> None:
    assert findings(but(eth0_rp_filter=1)) == ()


@pytest.mark.parametrize(
    ("everywhere", "device", "strict"), [(0, 1, True), (1, 0, True), (1, 2, False), (0, 0, False)]
)
def test_a_strict_device_is_named_while_the_cluster_switches(
    everywhere: int, device: int, strict: bool
) -> None:
    facts = replace(but(all_rp_filter=everywhere), either=("flannel-wg",))
    facts = replace(facts, settings={**facts.settings, "net/ipv4/conf/flannel-wg/rp_filter": device})
    assert [finding.cure for finding in findings(facts)] == (
        ["sysctl -w net.ipv4.conf.flannel-wg.rp_filter=2"] if strict else []
    )


def test_a_strict_uplink_does_not_filter_ipv6() -> None:
    assert findings(replace(but(eth0_rp_filter=1), elsewhere="eth1", families=(6,))) == ()


def test_what_the_kernel_does_not_show_is_no_finding() -> None:
    assert findings(without("forward", "rp_filter")) == ()


def test_what_only_the_operator_may_do_is_not_mended() -> None:
    assert mend(only(without("bridge"))) is False


def test_a_setting_that_cannot_be_written_is_not_mended() -> None:
    assert mend(WrongSetting("", "", "", "", settings=(("net/ipv4/no/such/setting", 1),))) is False


# ---- reading and writing -------------------------------------------------------------------------


class Udp:
    """Stands in for a socket of UDP, which the kernel connects if it has a route."""

    asked: ClassVar[list[tuple[Any, ...]]] = []
    error = 0

    def __init__(self, *kind: int) -> None:
        self.asked.append(kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        self.asked.append(target)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /proc: a host in order, whose settings can be read and written."""
    monkeypatch.setattr(socket, "socket", Udp)
    opens: Callable[..., Any] = Path.open

    def elsewhere(path: Path, *given: Any, **options: Any) -> Any:
        is_there = path.parts[:2] == ("/", "proc")
        return opens(tmp_path.joinpath(*path.parts[2:]) if is_there else path, *given, **options)

    for setting, value in GOOD.items():
        write(tmp_path, f"sys/{setting}", str(value))
    monkeypatch.setattr(Path, "open", elsewhere)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def route(interface: str, destination: int = 0, gateway: int = 0, flags: int = 1, mask: int = 0) -> str:
    return f"{interface}\t{destination:08X}\t{gateway:08X}\t{flags:04X}\t0\t0\t0\t{mask:08X}\t0\t0\t0"


def advertised(interface: str, flags: int) -> str:
    nothing = "0" * 32
    return f"{nothing} 00 {nothing} 00 {nothing} 00000400 00000001 00000000 {flags:08x} {interface}"


def test_facts_are_what_the_kernel_has_and_shows(proc: Path) -> None:
    write(proc, "sys/net/ipv6/conf/eth0/disable_ipv6", "1")
    write(proc, "sys/net/ipv6/conf/eth0/accept_ra", "2")
    write(proc, "sys/net/ipv4/conf/flannel.1/rp_filter", "1")
    found = read_facts(FAMILIES, "eth0", services=True, either=("flannel.1", "gone"))
    more = {
        "net/ipv6/conf/eth0/disable_ipv6": 1,
        "net/ipv6/conf/eth0/accept_ra": 2,
        "net/ipv4/conf/flannel.1/rp_filter": 1,
    }
    assert found == replace(FACTS, settings={**GOOD, **more}, either=("flannel.1", "gone"))
    (proc / "sys/net/ipv4/ip_forward").unlink()
    write(proc, "sys/net/bridge/bridge-nf-call-iptables", "no number")
    found = read_facts((4,), "eth0")
    assert sorted(found.settings) == [
        "net/ipv4/conf/all/rp_filter",
        "net/ipv4/conf/eth0/rp_filter",
        "net/ipv6/conf/eth0/accept_ra",
        "net/ipv6/conf/eth0/disable_ipv6",
    ]
    assert not found.services


DEFAULT, BY_ADVERTISEMENT, UP = 0x10000, 0x40000, 0x1


def test_interfaces_with_an_advertised_default_route_are_looked_for_without_forwarding(proc: Path) -> None:
    write(
        proc,
        "self/net/ipv6_route",
        "\n".join(
            (
                advertised("eth0", DEFAULT | BY_ADVERTISEMENT | UP),
                advertised("eth1", DEFAULT | UP),
                advertised("eth2", BY_ADVERTISEMENT | UP),
                advertised("eth3", DEFAULT | BY_ADVERTISEMENT),
            )
        ),
    )
    write(proc, "sys/net/ipv6/conf/eth3/accept_ra", "1")
    assert read_facts(FAMILIES, "eth0").advertised == ()
    write(proc, "sys/net/ipv6/conf/all/forwarding", "0")
    found = read_facts(FAMILIES, "eth0")
    assert found.advertised == ("eth0", "eth3")
    assert found.settings["net/ipv6/conf/eth3/accept_ra"] == 1
    (proc / "self/net/ipv6_route").unlink()
    assert read_facts(FAMILIES, "eth0").advertised == ()


@pytest.mark.parametrize(
    ("families", "forwarding", "error", "leads_out", "is_asked"),
    [
        ((4, 6), "1", 0, True, True),
        ((6,), "1", errno.ENETUNREACH, False, True),
        ((4, 6), "1", errno.EADDRNOTAVAIL, True, True),
        ((4, 6), "0", errno.ENETUNREACH, True, False),
        ((4, 6), "no number", errno.ENETUNREACH, True, False),
        ((4,), "1", errno.ENETUNREACH, True, False),
    ],
    ids=["a route", "none", "another error", "no forwarding", "unknown", "IPv4"],
)
def test_ipv6_route_to_other_networks_is_looked_up_while_this_host_forwards(
    families: tuple[Family, ...],
    forwarding: str,
    error: int,
    leads_out: bool,
    is_asked: bool,
    proc: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Udp, "asked", asked)
    monkeypatch.setattr(Udp, "error", error)
    write(proc, "sys/net/ipv6/conf/all/forwarding", forwarding)
    assert read_facts(families, "eth0").leads_out is leads_out
    kind = (socket.AF_INET6, socket.SOCK_DGRAM)
    assert asked == ([kind, ("2001:db8::1", 9)] if is_asked else [])


GATEWAY = 0x3


@pytest.mark.parametrize(
    ("routes", "elsewhere"),
    [
        ([], ""),
        ([route("eth1", flags=GATEWAY)], "eth1"),
        ([route("eth2", flags=GATEWAY), route("eth1", flags=GATEWAY)], "eth2"),
        ([route("eth1", flags=GATEWAY), route("eth0", 0x0A, 0x01, GATEWAY, 0xFF)], ""),
        ([route("eth1", flags=GATEWAY), route("eth0", 0x0A, mask=0xFF)], "eth1"),
        ([route("eth0")], ""),
        ([route("eth1", 0x0A, 0x01, GATEWAY, 0xFF)], ""),
        ([route("eth1", 0, 0x01, GATEWAY, 0x80)], ""),
        ([route("eth1", 0x80, 0x01, GATEWAY, 0)], ""),
    ],
)
@pytest.mark.parametrize("strict", ["all", "eth0"])
def test_default_route_elsewhere_matters_to_a_strict_uplink(
    strict: str, routes: list[str], elsewhere: str, proc: Path
) -> None:
    write(proc, "self/net/route", "\n".join(("Iface\tDestination\tGateway\tFlags", *routes)))
    for setting in ("disable_ipv6", "accept_ra"):
        write(proc, f"sys/net/ipv6/conf/eth0/{setting}", "1")
    assert read_facts((4,), "eth0").elsewhere == ""
    write(proc, f"sys/net/ipv4/conf/{strict}/rp_filter", "1")
    assert read_facts((4,), "eth0").elsewhere == elsewhere


IPV4, IPV6 = ForwardingSetting(4), ForwardingSetting(6)


def forwarding_off(proc: Path) -> None:
    write(proc, "sys/net/ipv4/ip_forward", "0")
    write(proc, "sys/net/ipv6/conf/all/forwarding", "0")
    write(proc, "self/net/ipv6_route", advertised("eth0", DEFAULT | BY_ADVERTISEMENT))
    write(proc, "sys/net/ipv6/conf/eth0/accept_ra", "1")


def test_forwarding_is_switched_on_again_if_that_is_wished(proc: Path) -> None:
    table = KernelForwardingTable(FAMILIES, lambda: "eth0", keep=True)
    scope = Scope({each.key: each for each in table.desired})
    assert list(table.read(scope)) == [Seen(IPV4), Seen(IPV6)]
    assert not table.has_changed()
    forwarding_off(proc)
    assert table.has_changed()
    assert list(table.read(scope)) == []
    assert not table.has_changed()
    assert list(table.script(scope)) == [
        "sysctl -w net.ipv4.ip_forward=1",
        "sysctl -w net.ipv6.conf.eth0.accept_ra=2 net.ipv6.conf.all.forwarding=1",
    ]
    made = table.put([Put(IPV4), Put(IPV6)])
    assert (made.made, made.failed) == ([IPV4, IPV6], [])
    assert made.details[IPV4.key] == "another program had left net.ipv4.ip_forward is 0"
    assert (proc / "sys/net/ipv6/conf/eth0/accept_ra").read_text() == "2\n"
    assert list(table.read(scope)) == [Seen(IPV4), Seen(IPV6)]
    assert not table.put([Put(IPV4)])


def test_forwarding_that_is_not_kept_is_told(proc: Path) -> None:
    forwarding_off(proc)
    table = KernelForwardingTable((4,), lambda: "eth0", keep=False)
    told = table.put([Put(IPV4)])
    why = "this host passes no IPv4 packets on, neither to its containers nor from them"
    remedy = "run as root: sysctl -w net.ipv4.ip_forward=1"
    assert told.failed == [Failure(IPV4, f"net.ipv4.ip_forward is 0: {why}", remedy)]
    assert (told.made, table.has_changed()) == ([], False)
    assert (proc / "sys/net/ipv4/ip_forward").read_text() == "0\n"
    assert [str(each) for each in table.desired] == ["forwarding of IPv4"]


def test_report_mends_what_it_may_and_tells_the_rest(proc: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    forwarding_off(proc)
    write(proc, "sys/net/bridge/bridge-nf-call-iptables", "0")
    write(proc, "sys/net/ipv4/conf/flannel.1/rp_filter", "1")
    report((4,), "eth0", either=("flannel.1",))
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "INFO", "WARNING"]
    assert told[0][1].endswith("; mended by: sysctl -w net.ipv4.ip_forward=1")
    assert told[1][1].endswith("; run as root: sysctl -w net.bridge.bridge-nf-call-iptables=1")
    assert (proc / "sys/net/ipv4/ip_forward").read_text() == "1\n"
