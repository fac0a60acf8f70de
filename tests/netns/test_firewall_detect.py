"""Telling which iptables a host uses by what is in its tables, and leaving them as they are."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.network.firewall.placing import IptablesFacts, choose, look
from tests.lab.daemon import ROOT
from tests.netns.firewall_host import WAYS, Host, host

LEGACY_RULES = "iptables-legacy -A INPUT -j ACCEPT; ip6tables-legacy -A INPUT -j ACCEPT"
NFT_RULES = (
    "iptables-nft -A INPUT -j ACCEPT; ip6tables-nft -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT"
)
KUBELET = "{0} -t mangle -N KUBE-IPTABLES-HINT"
KUBE_PROXY = "{0} -t mangle -N KUBE-KUBELET-CANARY"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path) as made:
        yield made


def seen(machine: Host) -> IptablesFacts:
    with machine.namespace.entered():
        return look((4, 6))


@pytest.mark.parametrize(
    ("script", "flavour"),
    [
        ("true", "nft"),
        (NFT_RULES, "nft"),
        (LEGACY_RULES, "legacy"),
        (f"{LEGACY_RULES}; {NFT_RULES}", "nft"),
        (f"{LEGACY_RULES}; {KUBELET.format('iptables-nft')}", "nft"),
        (f"{NFT_RULES}; {KUBE_PROXY.format('ip6tables-legacy')}", "legacy"),
        (f"{LEGACY_RULES}; {KUBE_PROXY.format('ip6tables-nft')}", "nft"),
    ],
)
def test_the_flavour_is_that_of_the_host(machine: Host, script: str, flavour: str) -> None:
    machine.sh(script)
    assert choose("auto", seen(machine))[0] == flavour


def test_looking_changes_nothing_and_starts_nothing(machine: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, notes = machine.spies()
    monkeypatch.setenv("PATH", environment["PATH"])
    with machine.watched() as written:
        facts = seen(machine)
        assert written.changes() == []
    assert facts == IptablesFacts(frozenset({"nft", "legacy"}))
    assert notes.read_text() == ""
    with machine.namespace.entered():
        for name in ("ip_tables_names", "ip6_tables_names"):
            assert Path("/proc/thread-self/net", name).read_text() == ""


def test_the_rules_of_others_are_counted(machine: Host) -> None:
    machine.sh(f"{LEGACY_RULES}; iptables-legacy -t nat -A POSTROUTING -j ACCEPT; {NFT_RULES}")
    assert (seen(machine).legacy_rules, seen(machine).nft_rules) == (3, 3)


def test_our_own_rules_say_nothing_about_the_host(machine: Host) -> None:
    machine.set_once(**WAYS["legacy"])
    assert seen(machine).legacy_rules == 0
    machine.sh("iptables-legacy -A INPUT -j ACCEPT")
    machine.set_once(**WAYS["nft"])
    assert (seen(machine).legacy_rules, seen(machine).nft_rules) == (1, 0)


NOBODY = (
    "setpriv --reuid=nobody --regid=nogroup --clear-groups"
    " --inh-caps=-all,+net_admin --ambient-caps=-all,+net_admin"
)
LOOK = "from flanneld.network.firewall.placing import *; print(choose('auto', look((4, 6)))[0])"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that every user may look into."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_unreadable_legacy_tables_leave_the_choice_to_the_iptables_command(
    machine: Host, open_directory: Path, flavour: str
) -> None:
    (open_directory / "iptables").symlink_to(f"/usr/sbin/xtables-{flavour}-multi")
    environment = f"PYTHONPATH={ROOT} PATH={open_directory}:$PATH:/usr/sbin"
    assert machine.sh(f'{environment} {NOBODY} {sys.executable} -c "{LOOK}"') == f"{flavour}\n"
