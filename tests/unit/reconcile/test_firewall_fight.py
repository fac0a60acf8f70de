"""A program that removes rules while they are being put right, on a clock of the test's own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network

import pytest

from flanneld.network.firewall.nftables.netlink import Removal
from flanneld.network.firewall.plan import Edit
from flanneld.network.firewall.rules import Nets, Purpose, Rules
from flanneld.reconcile import firewall
from flanneld.reconcile.firewall import Firewall, Wishes
from flanneld.runtime import clock

NETS = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))


IPV6_NETS = Nets(IPv6Network("fc00:5::/48"), IPv6Network("fc00:5:0:72::/64"))


class Opponent:
    """Rules that are gone as soon as they are set, the news of it, and the times when they were set.

    After so many ``rounds`` it stops the daemon.
    """

    name = "a driver"

    def __init__(self, stop: threading.Event, rounds: int) -> None:
        self.set_at: list[float] = []
        self._stop = stop
        self._rounds = rounds
        self._unread: set[Removal] = set()
        self._readable, end = os.pipe()
        os.close(end)

    def read(self) -> Rules:
        return {}

    def apply(self, edits: Sequence[Edit]) -> None:
        assert edits
        self.set_at.append(clock.now())
        self._unread = {Removal(by="somebody")}
        if len(self.set_at) == self._rounds:
            self._stop.set()

    def news(self) -> set[Removal]:
        unread, self._unread = self._unread, set()
        return unread

    def fileno(self) -> int:
        return self._readable


def fight(monkeypatch: pytest.MonkeyPatch, rounds: int, *nets: Nets) -> tuple[Firewall, list[float]]:
    """The task after a fight about the rules of these families, and when it set rules."""
    stop = threading.Event()
    opponent = Opponent(stop, rounds)
    monkeypatch.setattr(clock, "now", itertools.count(1000, 0.01).__next__)
    monkeypatch.setattr(firewall, "driver", lambda *_: opponent)
    monkeypatch.setattr(firewall, "sweep", lambda *_: [])
    monkeypatch.setattr(firewall, "dropping", lambda *_: [])
    monkeypatch.setattr(firewall.detect, "look", lambda *_: None)
    monkeypatch.setattr(firewall.detect, "choose", lambda *_: ("nft", "the test says so"))

    class Removals:
        read = staticmethod(opponent.news)
        fileno = staticmethod(opponent.fileno)

    monkeypatch.setattr(firewall, "Removals", Removals)
    task = Firewall(Wishes(nets, (), Purpose(masquerade=True)), stop=stop, heartbeat=lambda _: None)
    task.start_and_run()
    os.close(opponent.fileno())
    return task, opponent.set_at


def test_news_of_a_removal_does_not_shorten_the_pause_that_the_repair_earns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, set_at = fight(monkeypatch, 8, NETS)
    pauses = [after - before for before, after in itertools.pairwise(set_at)]
    assert all(pause >= 0.2 * 2 ** max(0, number - 4) for number, pause in enumerate(pauses, start=1)), pauses
    assert task.is_fighting()


def test_what_is_repaired_for_both_families_at_once_is_one_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = fight(monkeypatch, 12, NETS, IPV6_NETS)
    assert sum(task.repairs.values()) > 8
    assert not task.is_fighting()
