"""Which iptables a host uses, decided on what was found there."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld.network.firewall import placing
from flanneld.network.firewall.driver import Unavailable
from flanneld.network.firewall.iptables import Flavour
from flanneld.network.firewall.placing import IptablesFacts, choose

UNSEEN = "flavour of the host's iptables; only root can read the legacy tables"
BOTH: frozenset[Flavour] = frozenset({"nft", "legacy"})


@pytest.mark.parametrize(
    ("facts", "flavour", "reason"),
    [
        (IptablesFacts(BOTH), "nft", "no legacy rules found"),
        (IptablesFacts(BOTH, legacy_rules=3), "legacy", "3 rules in the legacy tables, 0 in nf_tables"),
        (
            IptablesFacts(BOTH, legacy_rules=3, nft_rules=3),
            "legacy",
            "3 rules in the legacy tables, 3 in nf_tables",
        ),
        (
            IptablesFacts(BOTH, legacy_rules=3, nft_rules=4),
            "nft",
            "4 rules in nf_tables, 3 in the legacy tables",
        ),
        (IptablesFacts(BOTH, frozenset({"legacy"}), nft_rules=9), "legacy", "in use by Kubernetes"),
        (IptablesFacts(BOTH, frozenset({"nft"}), legacy_rules=9), "nft", "in use by Kubernetes"),
        (IptablesFacts(BOTH, BOTH), "nft", "in use by Kubernetes"),
        (IptablesFacts(BOTH, nft_works=False), "legacy", "the kernel has no nf_tables"),
        (IptablesFacts(frozenset({"nft"}), frozenset({"legacy"})), "nft", "the only one installed"),
        (IptablesFacts(frozenset({"legacy"})), "legacy", "the only one installed"),
        (IptablesFacts(BOTH, usual="legacy"), "legacy", UNSEEN),
        (IptablesFacts(BOTH, usual="nft"), "nft", UNSEEN),
        (IptablesFacts(BOTH, frozenset({"nft"}), usual="legacy"), "nft", "in use by Kubernetes"),
        (IptablesFacts(frozenset({"nft"}), usual="legacy"), "nft", "the only one installed"),
    ],
)
def test_the_flavour_follows_from_the_facts(facts: IptablesFacts, flavour: Flavour, reason: str) -> None:
    assert choose("auto", facts) == (flavour, reason)


@pytest.mark.parametrize("wish", ["nft", "legacy"])
def test_the_operator_has_the_last_word(wish: Flavour) -> None:
    other = frozenset(BOTH - {wish})
    assert choose(wish, IptablesFacts(BOTH, other)) == (wish, "requested by -iptables-flavour")


def test_a_flavour_that_is_not_installed_cannot_be_had() -> None:
    with pytest.raises(
        Unavailable, match=r"iptables-legacy-restore is not installed; .*Debian package iptables"
    ):
        choose("legacy", IptablesFacts(frozenset({"nft"})))


def test_a_host_without_iptables_is_told_what_to_install() -> None:
    with pytest.raises(Unavailable, match="install the Debian package iptables"):
        choose("auto", IptablesFacts(frozenset()))


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_the_usual_flavour_is_the_one_that_iptables_leads_to(
    flavour: Flavour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"xtables-{flavour}-multi").touch(mode=0o755)
    (tmp_path / "iptables").symlink_to(f"xtables-{flavour}-multi")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert placing._usual() == flavour
