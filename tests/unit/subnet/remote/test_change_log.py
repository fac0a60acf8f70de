"""Entries of the server's log of changes, from the keys of the store behind it."""

from __future__ import annotations

import pytest

from flanneld.subnet.etcd.keys import KeyReply, Position, StoredKey
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.etcd.v3 import V3Client
from flanneld.subnet.list_watch import RelistNeeded
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
