"""What stands in the way of forwarding, decided from facts alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from flanneld.findings import Severity
from flanneld.network.host_settings import HostSettings, WrongSetting, findings, mend

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
