"""A host whose packet filters are in memory, for the firewall's worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from ipaddress import IPv4Network, IPv6Network

import pytest

from flanneld.model import IPAddress
from flanneld.network.firewall import placing, tables
from flanneld.network.firewall.driver import Driver, Unavailable
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.firewall.iptables import Flavour
from flanneld.network.firewall.netlink import Removal
from flanneld.network.firewall.placing import IptablesFacts
from flanneld.network.firewall.rules import Nets, Purpose, Rules, Style, desired_rules
from flanneld.reconcile import firewall
from flanneld.reconcile.firewall import Firewall, FirewallSettings
from flanneld.runtime.supervisor import Supervisor
from tests.unit.network.firewall.test_tables import Memory

FOUR = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))
SIX = Nets(IPv6Network("fc00:5::/48"), IPv6Network("fc00:5:0:72::/64"))
FORMER = Nets(IPv4Network("10.9.0.0/16"), IPv4Network("10.9.3.0/24"))
FORWARD, MASQUERADE = Purpose(forward=True), Purpose(masquerade=True)
BOTH = Purpose(masquerade=True, forward=True)


def rules(style: Style, nets: Nets = FOUR, purpose: Purpose = BOTH) -> Rules:
    """Return the chains that are there with these rules."""
    return {chain: each for chain, each in desired_rules(style, nets, purpose).items() if each}


def settings(
    purpose: Purpose = BOTH,
    nets: tuple[Nets, ...] = (FOUR,),
    former: tuple[Nets, ...] = (),
    *,
    style: Style = "own-chains",
    native: bool = False,
    resync: float = 5.0,
) -> FirewallSettings:
    return FirewallSettings(nets, former, purpose, style, native=native, resync=resync)


class Filters:
    """The packet filters of a host in memory, and what others do to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memories: dict[tuple[str, int], Memory] = {}
        self.installed: set[Flavour] = {"nft"}
        #: What the kernel will tell of next.
        self.removals: set[Removal] = set()
        #: True if the kernel refuses iptables' rules.
        self.refuses_iptables = False
        self.dropping: list[BaseChain] = []
        monkeypatch.setattr(placing, "look", lambda _: IptablesFacts(frozenset(self.installed)))
        monkeypatch.setattr(placing, "must_be_native", lambda *_: self.refuses_iptables)
        monkeypatch.setattr(firewall, "PythonIptables", self._refuse)
        monkeypatch.setattr(
            firewall, "forward_drops", lambda net, _: self.dropping if net.version == 4 else []
        )
        monkeypatch.setattr(firewall, "has_guard", lambda _: False)
        monkeypatch.setattr(tables, "Removals", lambda: self)
        for module in (firewall, placing, tables):
            monkeypatch.setattr(module, "driver", lambda place, family, _: self.at(place, family))
        for module in (placing, tables):
            monkeypatch.setattr(module, "may_hold", lambda place, family, _: (place, family) in self.memories)

    def at(self, place: str, family: int = 4) -> Memory:
        if (place, family) not in self.memories:
            self.memories[place, family] = memory = Memory({})
            memory.name = f"{place}{family}"
        return self.memories[place, family]

    def holds(self, place: str, style: Style, nets: Nets = FOUR, purpose: Purpose = BOTH) -> bool:
        """Return True if exactly these rules are there."""
        there = self.at(place, nets.family).rules
        return {chain: each for chain, each in there.items() if each} == rules(style, nets, purpose)

    def are_empty(self, place: str, family: int = 4) -> bool:
        return not any(self.at(place, family).rules.values())

    @staticmethod
    def _refuse(*_: object) -> Driver:
        raise Unavailable("no library", "install it")

    # ---- notifications --------------------------------------------------------------------------

    def read(self) -> set[Removal]:
        removals, self.removals = self.removals, set()
        return removals

    def fileno(self) -> int:
        return -1


def worker(
    wanted: FirewallSettings, nodes: Callable[[], Collection[IPAddress] | None] | None = None
) -> Firewall:
    return Firewall(wanted, stop=threading.Event(), make_loop=Supervisor().loop, nodes=nodes)


def running(
    wanted: FirewallSettings, nodes: Callable[[], Collection[IPAddress] | None] | None = None
) -> Firewall:
    """Return a worker that has set its rules and warned of others' chains."""
    made = worker(wanted, nodes)
    assert [made.step(1000.0) for _ in range(2)] == [1000.0, 1000.0]
    return made
