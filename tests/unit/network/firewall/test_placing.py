"""Places of our rules on a host: what is looked at, tried and removed, over stand-ins."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from flanneld.errors import Retryable
from flanneld.model import Family
from flanneld.network.firewall import xtables
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.iptables import Flavour
from flanneld.network.firewall.placing import (
    RulePlace,
    commands_of,
    described,
    look,
    may_hold,
    must_be_native,
    stale_rules,
)
from flanneld.network.firewall.rules import FLANNEL_FWD, FORWARDING, JUMPS, POSTROUTING, Edit, RuleOwnership
from tests.unit.network.firewall.stand_ins import GETRULE, IPV4, FakeKernel, FakeLibrary
from tests.unit.network.firewall.stand_ins import text as attribute
from tests.unit.network.firewall.test_edits import NATIVE, OURS, OWN

Names = Callable[[str | int], None]


@pytest.fixture
def legacy(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Makes the names of iptables-legacy's tables that the kernel tells, or its error; at first none."""
    told: list[str | int] = [""]
    opens: Callable[..., Any] = Path.open

    def instead(path: Path, *given: Any, **options: Any) -> Any:
        if not path.name.endswith("_tables_names"):
            return opens(path, *given, **options)
        if isinstance(told[0], int):
            raise OSError(told[0], os.strerror(told[0]))
        return StringIO(told[0] if path.name.startswith("ip_") else "")

    monkeypatch.setattr(Path, "open", instead)
    return lambda names: told.__setitem__(0, names)


@pytest.fixture
def restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ``iptables-nft-restore`` a script."""

    def make(script: str) -> None:
        (tmp_path / "iptables-nft-restore").write_text(f"#!/bin/sh\ncat >/dev/null\n{script}\n")
        (tmp_path / "iptables-nft-restore").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


# ---- facts ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("legacy")
@pytest.mark.parametrize(
    ("refusal", "hinted", "works"),
    [(0, {"nft"}, True), (errno.ENOENT, set(), True), (errno.EOPNOTSUPP, set(), False)],
)
def test_chains_of_kubernetes_hint_at_nf_tables(
    refusal: int, hinted: set[Flavour], works: bool, kernel: FakeKernel
) -> None:
    kernel.refusal = refusal
    facts = look([4])
    assert (set(facts.hinted), facts.nft_works) == (hinted, works)
    assert (facts.legacy_rules, facts.nft_rules, facts.usual) == (0, 0, None)


@pytest.mark.usefixtures("legacy")
def test_rules_in_nf_tables_are_counted_only_if_there_are_legacy_ones(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.objects = {(GETRULE, IPV4): [attribute(1, "filter") + attribute(2, "INPUT")] * 3}
    assert look([4]).nft_rules == 0
    monkeypatch.setattr(xtables, "count_rules", {4: 2, 6: 5}.__getitem__)
    facts = look([4])
    assert (facts.legacy_rules, facts.nft_rules) == (7, 3)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_usual_flavour_counts_where_only_root_may_read_the_legacy_tables(
    flavour: str, legacy: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"xtables-{flavour}-multi").touch(mode=0o755)
    (tmp_path / "iptables").symlink_to(f"xtables-{flavour}-multi")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look([4, 6]).usual is None
    legacy(errno.EACCES)
    assert (look([4, 6]).usual, look([4, 6]).legacy_rules) == (flavour, 0)


# ---- trials --------------------------------------------------------------------------------------


def needs_nftables(*, rules: Any = OWN) -> bool:
    return must_be_native("nft", {4: rules}, {4: NATIVE}, IptablesRunner())


def test_rules_are_tried_unless_ours_are_there(
    kernel: FakeKernel, library: FakeLibrary, restore: Callable[[str], None]
) -> None:
    restore("exit 1")
    assert not needs_nftables()
    kernel.refusal = errno.ENOENT
    assert needs_nftables()
    assert not needs_nftables(rules={FORWARDING: ()})
    restore("exit 0")
    library.told.clear()
    assert not needs_nftables()
    assert library.told == []


def test_refusal_is_told_with_the_way_out(
    kernel: FakeKernel,
    library: FakeLibrary,
    restore: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    kernel.refusal = errno.ENOENT
    restore("echo 'no match comment' >&2; echo 'more' >&2; exit 2")
    assert needs_nftables()
    assert caplog.messages[-1] == "The kernel refuses iptables' rules: no match comment; using nftables"
    restore("exit 2")
    assert needs_nftables()
    assert "ended with status 2: it says nothing; using nftables" in caplog.messages[-1]
    library.refusal = "no nftables either"
    assert not needs_nftables()
    assert caplog.records[-1].levelname == "WARNING"
    assert "nftables is no way out: nftables refuses our rules: no nftables either" in caplog.messages[-1]


@pytest.mark.usefixtures("library")
def test_rules_that_cannot_be_tried_are_no_reason_for_nftables(
    kernel: FakeKernel, restore: Callable[[str], None]
) -> None:
    kernel.refusal = errno.ENOENT
    restore("echo 'Another app is currently holding the xtables lock' >&2; exit 4")
    assert not needs_nftables()


# ---- rules of earlier runs -----------------------------------------------------------------------

NOBODY = RuleOwnership(networks=())


@pytest.mark.parametrize(
    ("names", "is_there"),
    [("", False), ("raw\nmangle", False), ("nat", True), ("raw\nfilter", True), (errno.EACCES, False)],
)
def test_legacy_tables_may_hold_our_rules_if_they_are_there(
    names: str | int, is_there: bool, legacy: Names
) -> None:
    legacy(names)
    assert may_hold("legacy", 4, NOBODY) is is_there
    assert not may_hold("legacy", 6, NOBODY)


def test_legacy_tables_that_cannot_be_read_are_told(legacy: Names) -> None:
    legacy(errno.EIO)
    with pytest.raises(Retryable, match=r"cannot ask the kernel: .*; run with CAP_NET_ADMIN"):
        may_hold("legacy", 4, NOBODY)


@pytest.mark.parametrize("place", ["nft", "native"])
def test_nf_tables_may_hold_our_rules_if_a_chain_of_ours_is_there(
    place: RulePlace, kernel: FakeKernel
) -> None:
    assert may_hold(place, 4, NOBODY)
    for refusal in (errno.ENOENT, errno.EOPNOTSUPP, errno.EPERM):
        kernel.refusal = refusal
        assert not may_hold(place, 4, NOBODY)
    kernel.refusal = errno.EIO
    with pytest.raises(Retryable, match="cannot ask the kernel"):
        may_hold(place, 4, NOBODY)


def test_chains_that_may_hold_our_rules_are_asked_for(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def ask(_kind: int, body: bytes) -> None:
        asked.append(body[4:])
        raise FileNotFoundError

    monkeypatch.setattr(kernel, "ask", ask)
    block = (POSTROUTING, (Rule("MASQUERADE"),))
    assert not may_hold("nft", 4, RuleOwnership(networks=(), blocks=(block,)))
    chains = [("nat", "FLANNEL-POSTRTG"), FLANNEL_FWD, ("nat", "FLANNEL-TRIAL"), ("filter", "FLANNEL-TRIAL")]
    assert asked == [attribute(1, table) + attribute(3, name) for table, name in [*chains, POSTROUTING]]
    asked.clear()
    assert not may_hold("native", 6, NOBODY)
    assert asked == [attribute(1, "flannel-ipv6")]


def test_rules_of_an_earlier_run_are_those_to_remove(kernel: FakeKernel, library: FakeLibrary) -> None:
    library.lists = [
        {"table": {"family": "ip", "name": "flannel-ipv4"}},
        {"chain": {"family": "ip", "table": "flannel-ipv4", "name": "forward"}},
    ]
    driver, edits = stale_rules("native", 4, OURS)
    assert (driver and driver.name, edits) == ("nftables", (Edit(("flannel-ipv4", "forward"), drop=True),))
    kernel.refusal = errno.ENOENT
    assert stale_rules("native", 4, OURS) == (None, ())


JUMP = JUMPS[FLANNEL_FWD]
EDITS = [Edit(FORWARDING, delete=(JUMP,)), Edit(FLANNEL_FWD, drop=True)]


@pytest.mark.parametrize(
    ("place", "family", "edits", "commands"),
    [
        (
            "legacy",
            4,
            EDITS,
            [
                "iptables-legacy -t filter -D FORWARD -m comment --comment flanneld forward -j FLANNEL-FWD",
                "iptables-legacy -t filter -F FLANNEL-FWD",
                "iptables-legacy -t filter -X FLANNEL-FWD",
            ],
        ),
        (
            "nft",
            6,
            EDITS[1:],
            ["ip6tables-nft -t filter -F FLANNEL-FWD", "ip6tables-nft -t filter -X FLANNEL-FWD"],
        ),
        (
            "native",
            4,
            [Edit(("flannel-ipv4", "forward"), drop=True)],
            ["nft flush chain ip flannel-ipv4 forward", "nft delete chain ip flannel-ipv4 forward"],
        ),
        ("nft", 4, [Edit(FLANNEL_FWD, flush=True)], []),
    ],
)
def test_removal_is_told_as_commands(
    place: RulePlace, family: Family, edits: list[Edit], commands: list[str]
) -> None:
    assert [" ".join(each) for each in commands_of(place, family, edits)] == commands


def test_removal_is_told_in_words() -> None:
    jump = 'filter FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD'
    assert list(described(EDITS)) == [jump, "filter FLANNEL-FWD"]
    stuck = "filter FLANNEL-FWD, emptied but not removed: a rule leads there"
    assert list(described(EDITS, EDITS[1:])) == [jump, stuck]
    assert list(described([Edit(FLANNEL_FWD, flush=True)])) == []
