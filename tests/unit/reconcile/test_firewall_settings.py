"""What options, network config and lease ask of the packet filter."""

from __future__ import annotations

import os
import threading
from ipaddress import IPv4Network, IPv6Network
from typing import cast

import pytest

from flanneld.config import parse
from flanneld.errors import Fatal
from flanneld.model import IPNetwork, LeaseKey
from flanneld.network.firewall import guard
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.rules import Nets, Purpose
from flanneld.options import Options, read
from flanneld.reconcile import firewall
from flanneld.reconcile.firewall import Firewall, FirewallSettings, firewall_settings, old_guards
from flanneld.runtime.command import TooMuchOutput
from flanneld.runtime.process import HostClaims
from flanneld.runtime.supervisor import Loop
from flanneld.state.resources import GUARDS
from flanneld.subnet.subnet_file import Previous, paired

DUAL_STACK = '{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00:5::/48"%s}'
OWN: LeaseKey = (IPv4Network("10.5.72.0/24"), IPv6Network("fc00:5:0:72::/64"))
NETS = (Nets(IPv4Network("10.5.0.0/16"), OWN[0]), Nets(IPv6Network("fc00:5::/48"), OWN[1]))  # type: ignore[arg-type]


def wishes(*flags: str, previous: Previous | None = None, more: str = "") -> FirewallSettings:
    return firewall_settings(read(flags, {}), parse(DUAL_STACK % more), OWN, (previous or Previous()).nets)


def worker() -> Firewall:
    return Firewall(wishes(), stop=threading.Event(), make_loop=lambda *_: cast("Loop", None))


def test_by_default_traffic_is_forwarded_and_no_more() -> None:
    assert wishes() == FirewallSettings(NETS, (), Purpose(forward=True))
    assert Options().iptables_rules == "own-chains"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-ip-masq"], Purpose(masquerade=True, forward=True)),
        (["-ip-masq", "-iptables-forward-rules=false"], Purpose(masquerade=True)),
        (["-ip-masq", "-ip-masq-fully-random-disable"], Purpose(masquerade=True, forward=True, random=False)),
    ],
)
def test_flags_say_what_the_rules_are_for(flags: list[str], expected: Purpose) -> None:
    assert wishes(*flags).purpose == expected


def test_flags_and_config_say_how_the_rules_are_set() -> None:
    made = wishes("-iptables-rules=v0.12", "-iptables-flavour=legacy", "-iptables-resync=7")
    assert (made.style, made.flavour, made.native, made.resync) == ("v0.12", "legacy", False, 7)
    assert wishes(more=', "EnableNFTables": true').native


SPARED = ', "MasqueradeExceptions": ["192.0.2.0/25", "192.0.2.128/25", "2001:db8::/32"]'


def test_exceptions_are_of_each_family_and_need_masquerading() -> None:
    four, six = wishes("-ip-masq", more=SPARED).nets
    assert four.spared == (IPv4Network("192.0.2.0/24"),)
    assert six.spared == (IPv6Network("2001:db8::/32"),)
    assert wishes(more=SPARED).nets == NETS


def test_nodes_are_spared_only_by_masquerading() -> None:
    nodes = ', "MasqueradeExceptions": ["nodes"]'
    assert wishes("-ip-masq", more=nodes).spares_nodes
    assert not wishes(more=nodes).spares_nodes
    assert not wishes("-ip-masq", more=SPARED).spares_nodes


def test_exceptions_are_refused_with_the_rules_of_v012() -> None:
    with pytest.raises(Fatal, match=r"rules of v0\.12 have none; start without -iptables-rules=v0\.12"):
        wishes("-ip-masq", "-iptables-rules=v0.12", more=SPARED)
    assert wishes("-iptables-rules=v0.12", more=SPARED).nets == NETS
    assert wishes("-ip-masq", "-iptables-rules=v0.12", more=f'{SPARED}, "EnableNFTables": true').native


def test_a_former_family_counts_if_network_and_subnet_are_known() -> None:
    former = Previous((IPv4Network("10.9.0.0/16"),), (IPv4Network("10.9.3.0/24"), IPv6Network("fc00:9::/64")))
    assert wishes(previous=former).former == (Nets(IPv4Network("10.9.0.0/16"), IPv4Network("10.9.3.0/24")),)


def test_rules_of_earlier_runs_may_be_there_until_the_tables_are_known() -> None:
    assert not worker().has_swept()


def test_nothing_known_makes_no_pair() -> None:
    assert paired((), (None, None)) == ()


def test_very_large_sets_and_tables_of_others_are_not_read_for_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[IPNetwork] = []

    def forward_drops(network: IPNetwork, commands: IptablesRunner) -> list[object]:
        asked.append(network)
        assert len(commands.run(("head", "-c", str(4 << 20), "/dev/zero"))) == 4 << 20
        with pytest.raises(TooMuchOutput):
            commands.run(("head", "-c", str(9 << 20), "/dev/zero"))
        return []

    monkeypatch.setattr(firewall, "forward_drops", forward_drops)
    worker()._warn_of_dropping()
    assert asked == [nets.network for nets in NETS]


def test_guard_of_the_tunnel_is_left_while_another_daemon_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"guard {os.getpid()}"  # abstract names are those of the network namespace
    monkeypatch.setattr(firewall, "GUARD", name)
    monkeypatch.setattr(firewall, "has_guard", lambda family: family == 4)
    monkeypatch.setattr(guard, "load", lambda: None)
    other = HostClaims()
    other.take([name], str.__eq__)
    assert old_guards(wishes()) == []
    other.close()
    assert [table.name for table in old_guards(wishes())] == [GUARDS[4]]
