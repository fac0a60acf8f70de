"""A program that removes rules while they are being put right, on a clock of the test's own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from ipaddress import IPv4Network

import pytest

from flanneld import clock, firewall
from flanneld.firewall import Firewall, Wishes
from flanneld.network.firewall.netfilter import Removal
from flanneld.network.firewall.plan import Edit
from flanneld.network.firewall.rules import Nets, Purpose, Rules

NETS = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))


class Opponent:
    """Rules that are gone as soon as they are set, the news of it, and the times when they were set."""

    name = "a driver"

    def __init__(self, stop: threading.Event) -> None:
        self.set_at: list[float] = []
        self._stop = stop
        self._unread: set[Removal] = set()
        self._readable, end = os.pipe()
        os.close(end)

    def read(self) -> Rules:
        return {}

    def apply(self, edits: Sequence[Edit]) -> None:
        assert edits
        self.set_at.append(clock.now())
        self._unread = {Removal(4, "nat", "POSTROUTING", "somebody")}
        if len(self.set_at) == 8:
            self._stop.set()

    def news(self) -> set[Removal]:
        unread, self._unread = self._unread, set()
        return unread

    def fileno(self) -> int:
        return self._readable


def test_news_of_a_removal_does_not_shorten_the_pause_that_the_repair_earns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = threading.Event()
    opponent = Opponent(stop)
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
    task = Firewall(Wishes((NETS,), (), Purpose(masquerade=True)), stop=stop, heartbeat=lambda _: None)
    task.start_and_run()
    os.close(opponent.fileno())
    pauses = [after - before for before, after in itertools.pairwise(opponent.set_at)]
    assert all(pause >= 0.1 * 2**number for number, pause in enumerate(pauses, start=1)), pauses
    assert task.is_fighting()
