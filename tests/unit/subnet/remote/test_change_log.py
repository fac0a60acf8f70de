"""Entries of the server's log of changes, from the keys of the store behind it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from flanneld.errors import Cancelled
from flanneld.model import LeaseKey
from flanneld.runtime import clock
from flanneld.subnet.codec import parse_key
from flanneld.subnet.etcd.keys import KeyChanges, KeyReply, NotFound, Position, StoredKey
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.etcd.v3 import V3Client, V3Watcher
from flanneld.subnet.list_watch import Contact, RelistNeeded
from flanneld.subnet.remote.change_log import ChangeLog
from tests.etcd_clients import transport_to

ROOT = "/coreos.com/network"


@pytest.fixture
def changes() -> ChangeLog:
    client = V3Client(transport_to("http://127.0.0.1:1", timeouts=EtcdTimeouts()))  # nothing asks it
    return ChangeLog(client, ROOT, 1.0)


def reply(action: str, path: str, *, is_dir: bool = False) -> KeyReply:
    node = StoredKey(f"{ROOT}/{path}", "{}", None, 7, is_dir=is_dir)
    return KeyReply(action, node, (), Position(7))


def test_removed_directory_calls_for_a_list_and_a_new_one_tells_nothing(changes: ChangeLog) -> None:
    assert changes._entry(reply("set", "subnets", is_dir=True)) is None
    for action in ("delete", "expire"):
        with pytest.raises(RelistNeeded, match=f"the directory {ROOT}/subnets was removed"):
            changes._entry(reply(action, "subnets", is_dir=True))


def test_network_comes_and_goes_with_its_config(changes: ChangeLog) -> None:
    for action, is_added in (("set", True), ("delete", False)):
        entry = changes._entry(reply(action, "blue/config"))
        assert entry is not None
        assert (entry.event.is_added, entry.event.network) == (is_added, "blue")
    assert changes._entry(reply("set", "config")) is None


class Transaction(V3Client):
    """Client of an etcd that tells of one transaction with two keys."""

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        del key, recursive
        raise NotFound(Position(6))

    def watcher(self, key: str, *, recursive: bool, contact: Contact) -> V3Watcher:
        watcher = super().watcher(key, recursive=recursive, contact=contact)
        watcher.read = self._read  # type: ignore[method-assign, assignment]
        return watcher

    @staticmethod
    def _read(_after: Position) -> KeyChanges:
        both = tuple(reply("delete", f"subnets/10.5.{number}.0-24") for number in (1, 2))
        return KeyChanges(both, Position(7))


def test_changes_of_one_transaction_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears of the first change asks next for those after its index, which is the second's."""
    changes = ChangeLog(Transaction(transport_to("http://127.0.0.1:1", timeouts=EtcdTimeouts())), ROOT, 1.0)
    told: list[int] = []

    def ask() -> None:
        with suppress(Cancelled):  # it would have to wait
            told.append(len(changes.next_after(6, lambda _: True, lambda: False, lambda: 6) or ()))

    def parse(name: str) -> LeaseKey:
        ask()
        return parse_key(name)

    monkeypatch.setattr("flanneld.subnet.remote.change_log.parse_key", parse)
    monkeypatch.setattr("flanneld.subnet.remote.change_log.LOOK", 0.0)
    for _ in range(2):
        changes._watch.step(clock.now(), lambda _: None)
    ask()
    assert told == [2]
