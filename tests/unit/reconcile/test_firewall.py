"""The firewall's worker over packet filters in memory: its first rules, repairs, and nodes to spare."""

from __future__ import annotations

import logging
import math
import threading
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from flanneld.errors import Fatal
from flanneld.model import IPAddress, IPNetwork
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.firewall.netlink import Removal
from flanneld.network.firewall.rules import Nets, Purpose, Style
from flanneld.reconcile.firewall import MOST_SPARED, Firewall
from tests.clock import Clock
from tests.unit.reconcile.simulated_filters import (
    BOTH,
    FORMER,
    FORWARD,
    FOUR,
    MASQUERADE,
    SIX,
    Filters,
    rules,
    running,
    settings,
    worker,
)

ONE, OTHER = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.9")


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch, daemon_clock: Clock) -> Filters:
    del daemon_clock
    return Filters(monkeypatch)


# ---- the first rules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("purpose", "told"),
    [
        pytest.param(MASQUERADE, ["Setting up masking rules with nft4, nft6 (why)"], id="masquerade"),
        pytest.param(
            FORWARD,
            ["Changing default FORWARD chain policy to ACCEPT for the network, with nft4, nft6 (why)"],
            id="forward",
        ),
    ],
)
def test_rules_of_each_family_are_set_and_told_of(
    filters: Filters, caplog: pytest.LogCaptureFixture, purpose: Purpose, told: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    made = worker(settings(purpose, (FOUR, SIX)))
    assert made.unsettled() == [4, 6]
    assert not made.has_swept()
    made.step(1000.0)
    assert filters.holds("nft", "own-chains", FOUR, purpose)
    assert filters.holds("nft", "own-chains", SIX, purpose)
    assert made.unsettled() == []
    assert made.has_swept()
    why = "(the only one installed)"
    beginnings = ("Setting", "Changing")
    assert [each for each in caplog.messages if each.startswith(beginnings)] == [
        each.replace("(why)", why) for each in told
    ]


def test_worker_without_a_purpose_has_nothing_to_do(filters: Filters) -> None:
    made = worker(settings(Purpose()))
    assert made.unsettled() == []
    made.step(1000.0)
    assert made.has_swept()
    assert filters.memories == {}


def test_host_without_iptables_cannot_masquerade(filters: Filters) -> None:
    filters.installed.clear()
    with pytest.raises(Fatal, match="cannot masquerade: neither iptables-nft-restore nor"):
        worker(settings(BOTH)).prepare(1000.0)


def test_host_without_iptables_goes_without_rules_to_forward(
    filters: Filters, caplog: pytest.LogCaptureFixture
) -> None:
    filters.installed.clear()
    made = worker(settings(FORWARD))
    made.prepare(1000.0)
    assert "No FORWARD rules: neither iptables-nft-restore nor" in caplog.text
    assert made.states() == []


def test_host_without_iptables_and_without_wishes_is_told_nothing(
    filters: Filters, caplog: pytest.LogCaptureFixture
) -> None:
    filters.installed.clear()
    worker(settings(Purpose(), former=(FORMER,))).prepare(1000.0)
    assert caplog.text == ""


# ---- the loop ------------------------------------------------------------------------------------


def test_removed_rules_are_restored_and_counted_by_driver_and_program(filters: Filters) -> None:
    made = running(settings(nets=(FOUR, SIX)))
    assert made.repairs == {("nft4", "unknown"): 0, ("nft6", "unknown"): 0}
    for by, now in (("iptables", 1010.0), ("", 1020.0), ("", 1030.0)):
        filters.at("nft").rules = {}
        filters.removals = {Removal(4, "nat", "POSTROUTING", by)}
        made.step(now)
        made.step(now + 1)
        assert filters.holds("nft", "own-chains")
    assert made.repairs == {("nft4", "unknown"): 2, ("nft4", "iptables"): 1, ("nft6", "unknown"): 0}


@pytest.mark.parametrize(
    ("resync", "pause"), [pytest.param(5.0, 5.0, id="resync"), pytest.param(0.1, 1.0, id="least")]
)
def test_legacy_tables_are_read_periodically(filters: Filters, resync: float, pause: float) -> None:
    filters.installed = {"legacy"}
    made = running(settings(resync=resync))
    filters.at("legacy").rules = {}
    assert made.step(1000.0 + pause - 0.1) == 1000.0 + pause
    assert filters.at("legacy").rules == {}
    made.step(1000.0 + pause)
    assert filters.holds("legacy", "own-chains")


def test_chain_that_drops_is_warned_of_once_after_the_rules_are_set(
    filters: Filters, caplog: pytest.LogCaptureFixture
) -> None:
    filters.dropping.append(BaseChain("nft", 4, "ip filter", "DOCKER", "forward", drops=True, chains={}))
    made = worker(settings(nets=(FOUR, SIX)))
    made.step(1000.0)
    assert "DOCKER" not in caplog.text
    for _ in range(3):
        made.step(1000.0)
    (line,) = (each for each in caplog.messages if "DOCKER" in each)
    assert line.startswith(
        "The chain DOCKER of table ip filter drops the network's packets unless it accepts"
    )
    assert "; run as root: iptables-nft -I DOCKER -s 10.5.0.0/16 -j ACCEPT; " in line


# ---- nodes to spare ------------------------------------------------------------------------------


def addresses(number: int) -> list[IPAddress]:
    """Return addresses of which no two make a larger network."""
    return [ip_address(f"192.0.{each // 100}.{2 * (each % 100)}") for each in range(number)]


def spares(filters: Filters, *spared: IPAddress | IPNetwork, nets: Nets = FOUR, place: str = "nft") -> bool:
    """Return True if exactly these destinations see the containers' addresses."""
    style: Style = "native" if place == "native" else "own-chains"
    return filters.holds(place, style, nets.sparing(map(ip_network, spared)), MASQUERADE)


def test_nodes_are_spared_soon_after_a_change_and_at_most_once_a_second(filters: Filters) -> None:
    nodes: list[IPAddress] = [ONE]
    made = running(settings(MASQUERADE), lambda: nodes)
    assert made.step(1000.0) == math.inf
    assert spares(filters)
    made.leases_changed()
    assert made.step(1000.0) == math.inf
    assert spares(filters, ONE)
    nodes.append(OTHER)
    made.leases_changed()
    assert made.step(1000.9) == 1001.0
    assert spares(filters, ONE)
    assert made.step(1001.0) == math.inf
    assert spares(filters, ONE, OTHER)
    nodes.clear()
    assert made.step(1010.0) == math.inf
    assert spares(filters, ONE, OTHER)


def test_each_family_spares_its_nodes(filters: Filters) -> None:
    six = ip_address("2001:db8::1")
    made = running(settings(MASQUERADE, (FOUR, SIX)), lambda: [ONE, six])
    made.leases_changed()
    made.step(1000.0)
    assert spares(filters, ONE)
    assert spares(filters, six, nets=SIX)


def test_spared_nodes_stay_spared_when_the_rules_are_restored(filters: Filters) -> None:
    made = running(settings(MASQUERADE), lambda: [ONE])
    made.leases_changed()
    made.step(1000.0)
    filters.at("nft").rules = {}
    filters.removals = {Removal()}
    made.step(1010.0)
    made.step(1011.0)
    assert spares(filters, ONE)


def test_nodes_of_an_earlier_run_are_spared_until_all_leases_are_known(filters: Filters) -> None:
    filters.at("nft").rules = rules("own-chains", FOUR.sparing([ip_network(OTHER)]), MASQUERADE)
    nodes: list[IPAddress] | None = None
    made = running(settings(MASQUERADE), lambda: nodes)
    assert spares(filters, OTHER)
    made.leases_changed()
    made.step(1000.0)
    assert spares(filters, OTHER)
    nodes = [ONE]
    made.leases_changed()
    made.step(1001.0)
    assert spares(filters, ONE)


def test_nodes_of_an_earlier_run_are_not_spared_where_nodes_are_not_asked_for(filters: Filters) -> None:
    filters.at("nft").rules = rules("own-chains", FOUR.sparing([ip_network(OTHER)]), MASQUERADE)
    made = running(settings(MASQUERADE))
    made.leases_changed()
    assert made.step(1000.0) == math.inf
    assert spares(filters)


def test_iptables_is_given_the_exceptions_of_the_config_when_the_nodes_are_too_many(filters: Filters) -> None:
    cloud = ip_network("198.51.100.0/24")
    nodes = addresses(MOST_SPARED - 1)
    made = running(settings(MASQUERADE, (FOUR.sparing([cloud]),)), lambda: nodes)
    made.leases_changed()
    made.step(1000.0)
    assert spares(filters, cloud, *nodes)
    assert made.problem == ""
    nodes = addresses(MOST_SPARED)
    made.leases_changed()
    made.step(1001.0)
    assert spares(filters, cloud)
    assert made.problem == (
        "nodes see this node's address in place of the containers': 257 MasqueradeExceptions, and iptables is"
        " given 256 at most; set EnableNFTables in the network config"
    )
    nodes.pop()
    made.leases_changed()
    made.step(1002.0)
    assert spares(filters, cloud, *nodes)
    assert made.problem == ""


def test_too_many_exceptions_of_one_family_leave_those_of_the_other(filters: Filters) -> None:
    many = [ip_network(each) for each in addresses(MOST_SPARED + 1)]
    few = [ip_network("2001:db8::/32")]
    made = running(settings(MASQUERADE, (FOUR.sparing(many), SIX.sparing(few))))
    assert spares(filters)
    assert spares(filters, *few, nets=SIX)
    assert "257 MasqueradeExceptions" in made.problem


def test_nftables_is_given_any_number_of_nodes(filters: Filters) -> None:
    nodes = addresses(MOST_SPARED + 1)
    made = running(settings(MASQUERADE, native=True), lambda: nodes)
    made.leases_changed()
    made.step(1000.0)
    assert spares(filters, *nodes, place="native")
    assert made.problem == ""


def test_leases_mean_nothing_to_a_worker_without_rules(filters: Filters) -> None:
    made = running(settings(Purpose()), lambda: [ONE])
    made.leases_changed()
    assert made.step(1000.0) == math.inf
    assert filters.memories == {}


@pytest.mark.parametrize("asks", [True, False], ids=["nodes are spared", "no node is spared"])
def test_changed_leases_end_the_wait_if_nodes_are_spared(filters: Filters, asks: bool) -> None:
    ended: list[str] = []

    class Waiting:
        def run(self) -> None:
            pass

        def cancel(self) -> None:
            ended.append("wait")

        def is_alive(self) -> None:
            pass

    del filters
    made = Firewall(
        settings(MASQUERADE),
        stop=threading.Event(),
        make_loop=lambda *_: Waiting(),
        nodes=(lambda: [ONE]) if asks else None,
    )
    made.leases_changed()
    assert bool(ended) is asks
