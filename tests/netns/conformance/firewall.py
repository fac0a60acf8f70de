"""The tables of rules under test: what is wanted of each, and what others do to it."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from typing import ClassVar

from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.placing import RulePlace, driver
from flanneld.network.firewall.rules import Nets, Purpose, Style, claim, desired_rules
from flanneld.network.firewall.tables import RulesTable
from flanneld.state.table import Put, Scope, Table
from tests.lab.namespace import Namespace
from tests.netns.conformance.host import OnHost


class OfFirewall(OnHost):
    """One family's rules in one place."""

    place: ClassVar[RulePlace]
    style: ClassVar[Style] = "own-chains"
    _nets = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))
    _purpose = Purpose(masquerade=True, forward=True, random=True)

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self.resources = [self._table().desired(desired_rules(self.style, self._nets, self._purpose))]

    def make(self) -> RulesTable:
        table = self._table()
        if self.place != "legacy":
            table.listen()
        return table

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        del table
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def _table(self) -> RulesTable:
        commands = IptablesRunner(threading.Event())
        mine = claim([self._nets], None, masquerade=True, forward=True)
        return RulesTable(self.place, 4, mine, driver(self.place, 4, commands), commands, audit=1.0)


class NftRules(OfFirewall):
    place = "nft"
    drifts = (
        "iptables-nft -F FLANNEL-FWD",
        "iptables-nft -t nat -F",
        "iptables-nft -t nat -D FLANNEL-POSTRTG 1",
        "nft flush ruleset",
    )
    foreign = (
        "iptables-nft -A FORWARD -s 192.0.2.9 -j DROP",
        "iptables-nft -t nat -A POSTROUTING -s 192.0.2.9 -j MASQUERADE",
    )
    shows_foreign = "iptables-nft-save | grep 192.0.2.9"


class LegacyRules(OfFirewall):
    place = "legacy"
    drifts = (
        "iptables-legacy -F FLANNEL-FWD",
        "iptables-legacy -t nat -F",
        "iptables-legacy -t nat -D FLANNEL-POSTRTG 1",
    )
    foreign = (
        "iptables-legacy -A FORWARD -s 192.0.2.9 -j DROP",
        "iptables-legacy -t nat -A POSTROUTING -s 192.0.2.9 -j MASQUERADE",
    )
    shows_foreign = "iptables-legacy-save | grep 192.0.2.9"


class NativeRules(OfFirewall):
    place = "native"
    style = "native"

    @contextmanager
    def blind(self, _table: Table) -> Iterator[None]:
        os.seteuid(65534)  # libnftables has its socket, and may use it only with CAP_NET_ADMIN
        try:
            yield
        finally:
            os.seteuid(0)

    drifts = ("nft delete table ip flannel-ipv4", "nft flush table ip flannel-ipv4", "nft flush ruleset")
    foreign = (
        "nft add table ip other",
        "nft add chain ip other c",
        "nft add rule ip other c ip saddr 192.0.2.9 drop",
    )
    shows_foreign = "nft list table ip other"


class StaleNftRules(OfFirewall):
    """What an earlier run has left in a place that is not in use: nothing of ours is wanted there."""

    place = "nft"
    resources = ()
    drifts = ("iptables-nft -N FLANNEL-FWD", "run with iptables-nft")
    foreign = NftRules.foreign
    shows_foreign = NftRules.shows_foreign

    def __init__(self, host: Namespace) -> None:
        OnHost.__init__(self, host)

    def do(self, command: str, *, check: bool = True) -> str:
        if command != "run with iptables-nft":
            return super().do(command, check=check)
        earlier = self._table()
        wanted = earlier.desired(desired_rules(self.style, self._nets, self._purpose))
        list(earlier.read(Scope({wanted.key: wanted})))
        assert earlier.put([Put(wanted)]).failed == []
        earlier.close(remove=False)
        return ""
