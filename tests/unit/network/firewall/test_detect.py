"""Which iptables a host uses, decided on what was found there."""

from __future__ import annotations

import pytest

from flanneld.network.firewall.detect import Facts, choose
from flanneld.network.firewall.driver import Unavailable
from flanneld.network.firewall.iptables.restore import Flavour

UNSEEN = "the host's iptables is of that kind, and only root may see the legacy tables"
BOTH: frozenset[Flavour] = frozenset({"nft", "legacy"})


@pytest.mark.parametrize(
    ("facts", "flavour", "reason"),
    [
        (Facts(BOTH), "nft", "nothing speaks for the legacy tables"),
        (Facts(BOTH, legacy_rules=3), "legacy", "3 rules are in its tables, 0 in nf_tables"),
        (Facts(BOTH, legacy_rules=3, nft_rules=3), "legacy", "3 rules are in its tables, 3 in nf_tables"),
        (Facts(BOTH, legacy_rules=3, nft_rules=4), "nft", "nothing speaks for the legacy tables"),
        (Facts(BOTH, frozenset({"legacy"}), nft_rules=9), "legacy", "Kubernetes uses it here"),
        (Facts(BOTH, frozenset({"nft"}), legacy_rules=9), "nft", "Kubernetes uses it here"),
        (Facts(BOTH, BOTH), "nft", "Kubernetes uses it here"),
        (Facts(BOTH, nft_works=False), "legacy", "the kernel has no nf_tables"),
        (Facts(frozenset({"nft"}), frozenset({"legacy"})), "nft", "no other is installed"),
        (Facts(frozenset({"legacy"})), "legacy", "no other is installed"),
        (Facts(BOTH, usual="legacy"), "legacy", UNSEEN),
        (Facts(BOTH, usual="nft"), "nft", UNSEEN),
        (Facts(BOTH, frozenset({"nft"}), usual="legacy"), "nft", "Kubernetes uses it here"),
        (Facts(frozenset({"nft"}), usual="legacy"), "nft", "no other is installed"),
    ],
)
def test_the_flavour_follows_from_the_facts(facts: Facts, flavour: Flavour, reason: str) -> None:
    assert choose("auto", facts) == (flavour, reason)


@pytest.mark.parametrize("wish", ["nft", "legacy"])
def test_the_operator_has_the_last_word(wish: Flavour) -> None:
    other = frozenset(BOTH - {wish})
    assert choose(wish, Facts(BOTH, other)) == (wish, "--iptables-flavour asks for it")


def test_a_flavour_that_is_not_installed_cannot_be_had() -> None:
    with pytest.raises(
        Unavailable, match=r"iptables-legacy-restore is not installed; .*Debian package iptables"
    ):
        choose("legacy", Facts(frozenset({"nft"})))


def test_a_host_without_iptables_is_told_what_to_install() -> None:
    with pytest.raises(Unavailable, match="install the Debian package iptables"):
        choose("auto", Facts(frozenset()))
