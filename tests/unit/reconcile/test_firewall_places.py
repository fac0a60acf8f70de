"""Where the firewall's rules are, and their removal elsewhere, on a host whose filters are in memory."""

from __future__ import annotations

import logging
import threading

import pytest

from flanneld.errors import Retryable
from flanneld.network.firewall import placing
from flanneld.network.firewall.placing import RulePlace
from flanneld.network.firewall.rules import Nets, Purpose, Rules, Style, desired_rules
from flanneld.reconcile.firewall import FirewallSettings, place_rules, retire
from tests.clock import Clock
from tests.unit.network.firewall.test_tables import Memory, Rejecting
from tests.unit.reconcile.simulated_filters import (
    BOTH,
    FORMER,
    FORWARD,
    FOUR,
    SIX,
    Filters,
    rules,
    running,
    settings,
    worker,
)


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch, daemon_clock: Clock) -> Filters:
    del daemon_clock
    return Filters(monkeypatch)


# ---- the place ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "refuses", "is_dry_run", "place", "reason"),
    [
        pytest.param(settings(), False, False, "nft", "the only one installed", id="iptables"),
        pytest.param(settings(), True, False, "native", "the kernel refuses iptables' rules", id="refused"),
        pytest.param(settings(), True, True, "nft", "the only one installed", id="a dry run tries nothing"),
        pytest.param(
            FirewallSettings((FOUR,), (), BOTH, flavour="nft"),
            True,
            False,
            "nft",
            "requested by -iptables-flavour",
            id="a flavour that is asked for is no matter of trials",
        ),
        pytest.param(
            settings(native=True),
            False,
            False,
            "native",
            "requested by EnableNFTables in the network config",
            id="nftables",
        ),
    ],
)
def test_place_of_the_rules(
    filters: Filters,
    wanted: FirewallSettings,
    refuses: bool,
    is_dry_run: bool,
    place: RulePlace,
    reason: str,
) -> None:
    filters.refuses_iptables = refuses
    placed = place_rules(wanted, threading.Event(), is_dry_run=is_dry_run)
    assert (placed.place, placed.reason) == (place, reason)
    style: Style = "native" if place == "native" else "own-chains"
    assert [dict(each.rules) for each in placed.desired] == [desired_rules(style, FOUR, BOTH)]


def test_rules_of_v012_are_set_where_iptables_has_them(filters: Filters) -> None:
    running(settings(style="v0.12"))
    assert filters.holds("nft", "v0.12")


def test_rules_in_nftables_have_one_style(filters: Filters) -> None:
    running(settings(style="v0.12", native=True))
    assert filters.holds("native", "native")


@pytest.mark.parametrize("place", ["legacy", "native"])
def test_rules_of_an_earlier_run_are_removed_from_other_places_after_the_new_ones_are_set(
    filters: Filters, place: RulePlace
) -> None:
    filters.at(place).rules = rules("native" if place == "native" else "own-chains", FOUR, BOTH)
    made = worker(settings())
    made.step(1000.0)
    assert filters.holds("nft", "own-chains")
    assert filters.are_empty(place)
    assert made.has_swept()
    assert [state.name for state in made.states()] == ["firewall-ipv4"]


def test_rules_of_an_earlier_run_stay_while_the_new_ones_are_refused(filters: Filters) -> None:
    filters.memories["nft", 4] = refusing = Rejecting(lambda _: True)
    filters.at("legacy").rules = rules("own-chains", FOUR, BOTH)
    made = worker(settings())
    made.step(1000.0)
    assert filters.holds("legacy", "own-chains")
    assert refusing.rules == {}
    assert made.unsettled() == [4]
    assert not made.has_swept()


def test_rules_of_a_family_that_has_no_network_now_are_removed_everywhere(filters: Filters) -> None:
    filters.at("nft", 6).rules = rules("own-chains", SIX, BOTH)
    filters.at("native", 6).rules = rules("native", SIX, BOTH)
    running(settings(former=(SIX,)))
    assert filters.are_empty("nft", 6)
    assert filters.are_empty("native", 6)


def test_rules_of_a_former_network_are_removed_without_new_ones(filters: Filters) -> None:
    filters.at("nft").rules = rules("own-chains", FORMER, BOTH)
    made = running(settings(Purpose(), former=(FORMER,)))
    assert filters.are_empty("nft")
    assert made.has_swept()


def test_iptables_legacy_restore_serves_where_the_library_does_not(
    filters: Filters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    filters.installed = {"legacy"}
    running(settings(nets=(FOUR, SIX)))
    assert filters.holds("legacy", "own-chains", FOUR)
    assert filters.holds("legacy", "own-chains", SIX)
    assert caplog.messages.count("Using iptables-legacy-restore: no library; install it") == 1


# ---- removal -------------------------------------------------------------------------------------


def everywhere(filters: Filters, nets: Nets) -> None:
    for place in placing.PLACES:
        style: Style = "native" if place == "native" else "own-chains"
        filters.at(place, nets.family).rules = rules(style, nets, FORWARD)


def test_all_rules_of_flannel_are_removed_from_every_place(filters: Filters) -> None:
    for nets in (FORMER, SIX):
        everywhere(filters, nets)
    removed, failures = retire()
    assert failures == []
    for name in ("nft4", "nft6", "legacy4", "legacy6"):
        assert f"{name}: filter FLANNEL-FWD" in removed
        assert f'{name}: filter FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD' in removed
    assert {"native4: flannel-ipv4 forward", "native6: flannel-ipv6 forward"} <= {*removed}
    assert not any(rules for each in filters.memories.values() for rules in each.rules.values())


def test_dry_run_tells_of_the_rules_that_would_be_removed(filters: Filters) -> None:
    everywhere(filters, FORMER)
    assert "nft4: filter FLANNEL-FWD" in retire(dry_run=True)[0]
    assert filters.holds("nft", "own-chains", FORMER, FORWARD)


def test_of_former_networks_only_their_rules_are_removed_if_not_everything_is(filters: Filters) -> None:
    everywhere(filters, FOUR)
    former = [(FORMER.network, FORMER.subnet)]
    assert retire(former, everything=False) == ([], [])
    assert filters.holds("nft", "own-chains", FOUR, FORWARD)
    everywhere(filters, FORMER)
    removed, _ = retire(former, everything=False)
    assert len(removed) == 5
    assert filters.are_empty("nft")


def test_unmarked_rules_are_removed_if_the_former_network_is_known(filters: Filters) -> None:
    filters.at("nft").rules = rules("v0.12", FORMER, BOTH)
    assert retire() == ([], [])
    removed, _ = retire([(FORMER.network, FORMER.subnet)])
    assert len(removed) == 6
    assert filters.are_empty("nft")


def test_place_that_cannot_be_read_is_named_and_the_others_are_cleared(filters: Filters) -> None:
    class Busy(Memory):
        def read(self) -> Rules:
            raise Retryable("the lock is taken", "try again")

    everywhere(filters, FORMER)
    filters.memories["nft", 4] = Busy({})
    removed, failures = retire()
    assert failures == ["rules for IPv4: the lock is taken; try again"]
    assert {each.partition(":")[0] for each in removed} == {"legacy4", "native4"}
