"""Drivers of the packet filters, over stand-ins for programs and libraries."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Callable, Sequence
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from flanneld.errors import Retryable
from flanneld.model import FAMILIES, Family
from flanneld.network.firewall.driver import IptablesFailed, IptablesRunner, Rejected, Unavailable, carry_out
from flanneld.network.firewall.fate import ALL_BITS, Rule, Test
from flanneld.network.firewall.iptables import Flavour, Locked, PythonIptables, Restore, program
from flanneld.network.firewall.nftables import Nftables
from flanneld.network.firewall.rules import (
    FLANNEL_FWD,
    FLANNEL_POSTRTG,
    FORWARDING,
    JUMPS,
    MASQ,
    Edit,
    Rules,
    destination,
    source,
)
from tests.unit.network.firewall.stand_ins import Answer, FakeKernel, FakeLibrary
from tests.unit.network.firewall.test_edits import NATIVE

Script = Callable[[str, str], None]
NET = ip_network("10.5.0.0/16")
ACCEPTS = Edit(FLANNEL_FWD, flush=True, append=(Rule("ACCEPT"),))
DROPS = Edit(FLANNEL_FWD, drop=True)


# ---- edits and removals --------------------------------------------------------------------------


class Stubborn:
    """A driver that refuses to drop the chains named here, alone or with others."""

    name = "stubborn"

    def __init__(self, *kept: str, present: Sequence[Edit] = ()) -> None:
        self.kept = kept
        self.present = {edit.chain: () for edit in present}
        self.applied: list[list[Edit]] = []

    def read(self) -> Rules:
        return self.present

    def apply(self, edits: Sequence[Edit]) -> None:
        if any(edit.drop and edit.chain[1] in self.kept for edit in edits):
            raise Rejected("it is in use", "see")
        self.applied.append(list(edits))

    def script(self, edits: Sequence[Edit]) -> Any:
        raise NotImplementedError


OTHER = Edit(FLANNEL_POSTRTG, drop=True)


def test_chains_are_filled_before_others_are_dropped() -> None:
    driver = Stubborn()
    assert carry_out(driver, [DROPS, ACCEPTS, OTHER]) == ()
    assert driver.applied == [[ACCEPTS], [DROPS, OTHER]]
    assert carry_out(driver, []) == ()
    assert len(driver.applied) == 2


def test_chain_to_which_others_lead_is_emptied_and_told() -> None:
    driver = Stubborn("FLANNEL-FWD", present=[DROPS, OTHER])
    assert carry_out(driver, [DROPS, OTHER]) == (DROPS,)
    assert driver.applied == [[Edit(FLANNEL_FWD, flush=True)], [OTHER]]


def test_chain_that_has_gone_meanwhile_is_no_trouble() -> None:
    driver = Stubborn("FLANNEL-FWD", present=[OTHER])
    assert carry_out(driver, [DROPS, OTHER]) == ()
    assert driver.applied == [[OTHER]]


# ---- iptables-restore ----------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes a program; what it is given goes to ``input``, each time after its command line."""

    def make(name: str, end: str) -> None:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\n(echo "${{0##*/}} $*"; cat) >>{tmp_path}/input\n{end}\n')
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


def restore(family: Family = 4, flavour: Flavour = "nft") -> Restore:
    return Restore(flavour, family, IptablesRunner(threading.Event()))


@pytest.mark.parametrize(
    ("flavour", "family", "name"),
    [
        ("nft", 4, "iptables-nft"),
        ("legacy", 4, "iptables-legacy"),
        ("nft", 6, "ip6tables-nft"),
        ("legacy", 6, "ip6tables-legacy"),
    ],
)
def test_edits_are_the_input_of_the_flavours_restore(
    flavour: Flavour, family: Family, name: str, programs: Script, tmp_path: Path
) -> None:
    assert program(flavour, family) == name
    programs(f"{name}-restore", "exit 0")
    restore(family, flavour).apply([ACCEPTS])
    assert (tmp_path / "input").read_text() == (
        f"{name}-restore --noflush --wait=5\n"
        "*filter\n:FLANNEL-FWD - [0:0]\n-A FLANNEL-FWD -j ACCEPT\nCOMMIT\n"
    )


def test_lock_that_another_program_holds_is_told_from_a_refusal(programs: Script) -> None:
    programs("iptables-nft-restore", "echo 'Another app is currently holding the xtables lock' >&2; exit 4")
    with pytest.raises(Locked, match="for 5 s"):
        restore().apply([ACCEPTS])
    programs("iptables-nft-restore", "echo 'line 2 failed' >&2; exit 4")
    with pytest.raises(IptablesFailed, match="line 2 failed"):
        restore().apply([ACCEPTS])


TRIAL = """\
iptables-nft-restore --noflush --wait=5
*nat
:FLANNEL-TRIAL - [0:0]
-A FLANNEL-TRIAL -j MASQUERADE
COMMIT
*nat
-F FLANNEL-TRIAL
-X FLANNEL-TRIAL
COMMIT
*filter
:FLANNEL-TRIAL - [0:0]
-A FLANNEL-TRIAL -j ACCEPT
COMMIT
*filter
-F FLANNEL-TRIAL
-X FLANNEL-TRIAL
COMMIT
"""
TRIED: Rules = {
    FLANNEL_POSTRTG: (Rule("MASQUERADE", random=True),),
    FLANNEL_FWD: (Rule("ACCEPT"),),
    FORWARDING: (JUMPS[FLANNEL_FWD],),
}


def test_rules_are_tried_in_chains_that_are_removed_at_once(programs: Script, tmp_path: Path) -> None:
    programs("iptables-nft-restore", "exit 0")
    restore().check(TRIED)
    assert (tmp_path / "input").read_text() == TRIAL


def test_rules_are_refused_if_they_are_refused_twice(programs: Script, tmp_path: Path) -> None:
    programs("iptables-nft-restore", f"[ $(grep -c restore {tmp_path}/input) = 2 ]")
    restore().check(TRIED)
    assert (tmp_path / "input").read_text() == TRIAL * 2
    programs("iptables-nft-restore", "exit 1")
    with pytest.raises(IptablesFailed):
        restore().check(TRIED)
    assert (tmp_path / "input").read_text() == TRIAL * 4


@pytest.mark.usefixtures("kernel")
def test_chains_of_ours_that_are_there_are_listed(answer: Answer, tmp_path: Path) -> None:
    for name in ("iptables-nft", "ip6tables-nft"):
        (tmp_path / name).write_text((tmp_path / "nft").read_text())
        (tmp_path / name).chmod(0o755)
    places = [("nat", "FLANNEL-POSTRTG"), ("nat", "POSTROUTING"), ("filter", "FLANNEL-FWD")]
    places += [("filter", "FORWARD"), ("nat", "FLANNEL-TRIAL"), ("filter", "FLANNEL-TRIAL")]
    for table, chain in places:
        answer(f"ip6tables-nft -t {table} -S {chain}", f"-N {chain}\n")
    answer("ip6tables-nft -t filter -S FORWARD", "-P FORWARD DROP\n-A FORWARD -j ACCEPT\n")
    assert restore(6).read() == dict.fromkeys(places, ()) | {("filter", "FORWARD"): (Rule("ACCEPT"),)}


@pytest.mark.usefixtures("answer")
def test_chains_of_ours_that_are_not_there_are_not_listed(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.refusal = errno.ENOENT
    assert restore().read() == {}
    assert not (tmp_path / "asked").exists()


# ---- python-iptables -----------------------------------------------------------------------------


class FakeTable:
    """Stands in for a table of the library: what is done to it."""

    existing_table_names: ClassVar[dict[str, bool]]
    done: ClassVar[list[str]]
    ALL = ("nat", "filter")
    refuses = False

    def __init__(self, name: str, *, autocommit: bool) -> None:
        assert not autocommit
        known = [each for each, is_there in self.existing_table_names.items() if is_there]
        self._say(f"table {name} of {' '.join(known)}")

    def _say(self, what: str) -> None:
        self.done.append(what)

    def is_chain(self, chain: str) -> bool:
        return chain == "FORWARD"

    def refresh(self) -> None:
        self._say("refresh")

    def commit(self) -> None:
        if self.refuses:
            raise ValueError("invalid table")
        self._say("commit")

    def create_chain(self, chain: str) -> None:
        self._say(f"create {chain}")

    def flush_entries(self, chain: str) -> None:
        self._say(f"flush {chain}")

    def delete_chain(self, chain: str) -> None:
        self._say(f"drop {chain}")

    def delete_entry(self, chain: str, rule: str, mask: str) -> None:
        self._say(f"delete {chain} {rule} {mask}")

    def insert_entry(self, chain: str, rule: str, position: int) -> None:
        self._say(f"insert {chain} {rule} at {position}")

    def append_entry(self, chain: str, rule: str) -> None:
        self._say(f"append {chain} {rule}")


class FakeRule:
    """Stands in for a rule of the library."""

    mask = "all"

    def __init__(self) -> None:
        self.matches: list[tuple[str, SimpleNamespace]] = []
        self.src = self.dst = ""

    def create_match(self, name: str) -> SimpleNamespace:
        self.matches.append((name, SimpleNamespace()))
        return self.matches[-1][1]

    def create_target(self, name: str) -> SimpleNamespace:
        self.target = SimpleNamespace(_final_check=lambda: None)
        self.verdict = name
        return self.target

    @property
    def rule(self) -> str:
        words = [f"-s {self.src}" if self.src else "", f"-d {self.dst}" if self.dst else ""]
        words += [f"{name} {' '.join(vars(match).values())}" for name, match in self.matches]
        words += [self.verdict, "random" if hasattr(self.target, "random_fully") else ""]
        return " ".join(filter(None, words))


@pytest.fixture
def iptc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeTable]:
    class Table(FakeTable):
        existing_table_names: ClassVar[dict[str, bool]] = {}
        done: ClassVar[list[str]] = []

    errors = {name: type(name, (Exception,), {}) for name in ("IPTCError", "XTablesError")}
    monkeypatch.setitem(sys.modules, "iptc", SimpleNamespace(Table=Table, Rule=FakeRule, **errors))
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    return Table


def library_driver() -> PythonIptables:
    return PythonIptables(IptablesRunner(threading.Event()), threading.Event())


def test_library_makes_the_edits_of_each_table_with_one_commit(iptc: type[FakeTable]) -> None:
    tests = source(NET), destination(NET, inside=False), Test("mark", ((0x4000, 0x4000),))
    masquerades = Rule("MASQUERADE", tests, MASQ, random=True)
    returns = Rule("RETURN", (source(NET, inside=False), Test("mark", ((1, ALL_BITS),))))
    driver = library_driver()
    driver.apply(
        [
            Edit(FLANNEL_POSTRTG, flush=True, append=(returns, masquerades)),
            Edit(FORWARDING, delete=(Rule("own"),), insert=(Rule("first"), Rule("second"))),
            DROPS,
        ]
    )
    assert iptc.done == [
        "table nat of nat",
        "refresh",
        "create FLANNEL-POSTRTG",
        "flush FLANNEL-POSTRTG",
        "append FLANNEL-POSTRTG -s !10.5.0.0/16 mark 0x1 RETURN",
        "append FLANNEL-POSTRTG -s 10.5.0.0/16 -d !10.5.0.0/16 mark 0x4000/0x4000 comment flanneld masq"
        " MASQUERADE random",
        "commit",
        "refresh",
        "table filter of filter",
        "refresh",
        "delete FORWARD own all",
        "insert FORWARD first at 0",
        "insert FORWARD second at 0",
        "flush FLANNEL-FWD",
        "drop FLANNEL-FWD",
        "commit",
        "refresh",
    ]


def test_chain_that_is_there_is_not_created_by_the_library(
    iptc: type[FakeTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    library_driver().apply([Edit(FORWARDING, flush=True)])
    assert iptc.done == ["table filter of filter", "refresh", "flush FORWARD", "commit", "refresh"]
    monkeypatch.setattr(iptc, "refuses", True)
    with pytest.raises(Rejected, match="python-iptables: invalid table; without it"):
        library_driver().apply([Edit(FORWARDING, flush=True)])


def test_library_that_is_not_there_or_broken_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "iptc", None)
    with pytest.raises(Unavailable, match="python-iptables is not installed"):
        library_driver()
    monkeypatch.delitem(sys.modules, "iptc")
    (tmp_path / "iptc.py").write_text("raise Exception('no libxtables')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unavailable, match="python-iptables does not load: no libxtables"):
        library_driver()


# ---- libnftables ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_tried_in_a_table_that_goes_in_the_same_transaction(
    family: Family, library: FakeLibrary
) -> None:
    Nftables(family).check({**NATIVE, ("flannel-ipv4", "none"): ()})
    ((first, *made, last),) = library.told
    place = {"family": "ip" if family == 4 else "ip6", "name": "flannel-trial"}
    assert (first, last) == ({"add": {"table": place}}, {"delete": {"table": place}})
    chains = [each["add"]["chain"]["name"] for each in made if "chain" in each.get("add", ())]
    assert sorted(chains) == ["forward", "postrtg"]
    inside = [each["add"]["rule"] for each in made if "rule" in each.get("add", ())]
    assert {each["table"] for each in inside} == {"flannel-trial"}
    assert len(inside) == sum(map(len, NATIVE.values()))


def table(name: str) -> dict[str, Any]:
    return {"table": {"family": "ip", "name": name}}


def test_table_of_ours_is_read_if_it_is_listed(library: FakeLibrary) -> None:
    driver = Nftables(4)
    library.lists = [table("flannel-ipv6"), {"chain": {"name": "forward"}}]
    assert driver.read() == {}
    assert library.told == [[{"list": {"tables": {"family": "ip"}}}]]
    library.lists = [table("flannel-ipv4"), {"chain": {"name": "forward"}}]
    assert driver.read() == {("flannel-ipv4", "forward"): ()}
    assert library.told[-1] == [{"list": {"table": {"family": "ip", "name": "flannel-ipv4"}}}]
    library.lists = [table("flannel-ipv4"), {"rule": {"chain": "forward"}}]
    with pytest.raises(Rejected, match=r"cannot read our rules in nftables: .* not understood"):
        driver.read()


def test_script_for_nft_is_what_the_library_would_be_told(library: FakeLibrary) -> None:
    driver = Nftables(4)
    edits = [Edit(chain, flush=True, append=rules) for chain, rules in NATIVE.items()]
    first, lines, last = driver.script(edits)
    assert (first, last) == ("nft -j -f - <<'END'", "END")
    driver.apply(edits)
    assert library.told == [json.loads(lines)["nftables"]]
    library.refusal = "no"
    with pytest.raises(Retryable, match="nftables refuses our rules: no"):
        driver.apply(edits)
