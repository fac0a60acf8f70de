"""Keys of the embedded store against a model: compare-and-swap, expiry, history."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.runtime import clock
from flanneld.subnet.copy import Migration
from flanneld.subnet.embedded import store as store_module
from flanneld.subnet.embedded.database import Database, restore, set_fact
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, KeyStore, Moment, open_file, time_since
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.keys import Conflict, NotFound, Position
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport
from flanneld.subnet.list_watch import RelistNeeded
from tests.clock import Clock
from tests.local_etcd import LocalEtcd

KEYS = st.sampled_from(["/net/a", "/net/b", "/net/deep/c", "/netting"])
TTLS = st.sampled_from([None, 10, 60])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


@pytest.fixture
def store(path: Path) -> Iterator[KeyStore]:
    database = Database(path, create=True)
    yield KeyStore(database)
    database.close()


class StoreModel(RuleBasedStateMachine):
    """Each operation has the outcome that a dictionary under one lock would have, in a history of its own."""

    @initialize()
    def open(self) -> None:
        self.directory = TemporaryDirectory()
        self.clock = Clock()
        self.database = Database(Path(self.directory.name) / "leases.db", create=True)
        self.store = KeyStore(self.database)
        self.model: dict[str, tuple[str, float | None, int]] = {}
        self.created: dict[str, int] = {}
        _, self.begin = self.store.below("/net")

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.directory.cleanup()

    @rule(key=KEYS, value=st.text(max_size=3), ttl=TTLS)
    def create(self, key: str, value: str, ttl: int | None) -> None:
        with clock.replaced(self.clock):
            if self.alive(key):
                with pytest.raises(Conflict):
                    self.store.create(key, value, ttl)
                return
            node, at = self.store.create(key, value, ttl)
        assert node.modified == node.created == at.index
        self.model[key] = (value, self.ends(ttl), at.index)
        self.created[key] = at.index

    @rule(key=KEYS, value=st.text(max_size=3), ttl=TTLS, lag=st.integers(0, 1))
    def replace(self, key: str, value: str, ttl: int | None, lag: int) -> None:
        modified = self.model.get(key, ("", None, 0))[2] - lag
        with clock.replaced(self.clock):
            if lag or not self.alive(key):
                with pytest.raises(Conflict):
                    self.store.replace(key, value, ttl, modified)
                return
            _, at = self.store.replace(key, value, ttl, modified)
        assert at.index > modified
        self.model[key] = (value, self.ends(ttl), at.index)

    @rule(key=KEYS)
    def prolong(self, key: str) -> None:
        value, ends, modified = self.model.get(key, ("", None, 0))
        with clock.replaced(self.clock):
            lasts = self.store.prolong(key, modified)
        assert (lasts is not None) == (self.alive(key) and ends is not None)
        if lasts is not None:
            self.model[key] = (value, self.clock.time + lasts, modified)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        with clock.replaced(self.clock):
            if not self.alive(key):
                with pytest.raises(NotFound):
                    self.store.remove(key, 0)
                return
            with pytest.raises(Conflict):
                self.store.remove(key, self.model[key][2] - 1)
            self.store.remove(key, self.model[key][2])
        del self.model[key]

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule()
    def reopen(self) -> None:
        with clock.replaced(self.clock):
            self.database.close()
            self.database = Database(self.database.path)
            self.store = KeyStore(self.database)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        with clock.replaced(self.clock):
            self.store.tick()
            nodes, _ = self.store.below("/net")
            found = {each.key: (each.value, each.ttl, each.modified) for each in nodes}
        assert all(each.created == self.created[each.key] for each in nodes)
        assert found == {
            key: (value, None if ends is None else ends - self.clock.time, modified)
            for key, (value, ends, modified) in self.model.items()
            if self.alive(key) and key.startswith("/net/")
        }

    @invariant()
    def history_leads_to_what_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        with clock.replaced(self.clock):
            self.store.tick()
            nodes, _ = self.store.below("/net")
            replies = self.store.changes("/net", recursive=True, after=self.begin).replies
        assert [each.at.index for each in replies] == sorted({each.at.index for each in replies})
        known: dict[str, str] = {}
        for node, action in ((each.node, each.action) for each in replies):
            assert node is not None
            assert (action == "put") or node.key in known
            known.pop(node.key, None)
            known |= {node.key: node.value} if action == "put" else {}
        assert known == {each.key: each.value for each in nodes}

    def alive(self, key: str) -> bool:
        if key not in self.model:
            return False
        ends = self.model[key][1]
        return ends is None or ends > self.clock.time

    def ends(self, ttl: int | None) -> float | None:
        return None if ttl is None else self.clock.time + ttl


StoreModel.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStoreModel = StoreModel.TestCase


# ---- compare-and-swap between threads and processes ----------------------------------------------


def test_one_of_many_writers_succeeds_at_each_revision(path: Path) -> None:
    stores = [open_file(str(path), create=True) for _ in range(2)]
    stores[0].create("/counter", "0", None)

    def count(store: KeyStore) -> None:
        for _ in range(20):
            _repeat(lambda: _increment(store))

    _together([partial(count, each) for each in stores * 3])
    node, _ = stores[0].get("/counter")
    assert node.value == "120"


def _increment(store: KeyStore) -> None:
    node, _ = store.get("/counter")
    store.replace("/counter", str(int(node.value) + 1), None, node.modified)


def _repeat(attempt: Callable[[], None]) -> None:
    while True:
        try:
            return attempt()
        except Conflict:
            continue


def _together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)


# ---- watches ---------------------------------------------------------------------------------------


def test_watch_hears_of_each_write_of_this_and_of_another_process_once(store: KeyStore, path: Path) -> None:
    _, at = store.below("/net")
    watcher = EmbeddedClient(store).watcher("/net", recursive=True, contact=lambda: None)
    other = open_file(str(path))

    def write() -> None:
        for number in range(30):
            (store, other)[number % 2].create(f"/net/{number}", "", None)

    thread = threading.Thread(target=write)
    thread.start()
    heard: list[str] = []
    while len(heard) < 30:
        changes = watcher.read(at)
        at = changes.at
        heard += [each.node.key for each in changes.replies if each.node]
    thread.join()
    assert heard == [f"/net/{number}" for number in range(30)]


def test_watch_tells_what_ends(store: KeyStore) -> None:
    _, at = store.create("/net/a", "", 1)
    watcher = EmbeddedClient(store).watcher("/net/a", recursive=False, contact=lambda: None)
    (gone,) = watcher.read(at).replies
    assert (gone.action, gone.node and gone.node.key) == ("expire", "/net/a")


def test_forgotten_history_is_listed_again(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEPT", 10)
    _, begin = store.below("/net")
    for number in range(11):
        _, at = store.create(f"/net/{number}", "", None)
    with pytest.raises(RelistNeeded, match="does not go back"):
        store.changes("/net", recursive=True, after=begin)
    tenth = Position(at.index - 10, at.cluster)
    assert len(store.changes("/net", recursive=True, after=tenth).replies) == 10


def test_cut_watch_ends_and_its_store_goes_on(store: KeyStore) -> None:
    _, at = store.below("/net")
    watcher = EmbeddedClient(store).watcher("/net", recursive=True, contact=lambda: None)
    threading.Timer(0.1, watcher.cancel).start()
    with pytest.raises(Cancelled):
        watcher.read(at)
    store.create("/net/a", "", None)


# ---- the clock -------------------------------------------------------------------------------------


def test_time_runs_within_a_boot_and_stands_still_between_boots() -> None:
    record = Moment(time=500.0, boot="one", at=100.0)
    assert time_since(record, "one", 130.0) == 530.0
    assert time_since(record, "two", 5.0) == 500.0
    assert time_since(record, "one", 90.0) == 500.0


# ---- the file --------------------------------------------------------------------------------------


def test_backup_is_a_store_with_another_history(store: KeyStore, path: Path, tmp_path: Path) -> None:
    store.create("/net/a", "x", 60)
    _, at = store.create("/net/b", "y", None)
    Database(path).backup(tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "again.db")
    again = open_file(str(tmp_path / "again.db"))
    nodes, now = again.below("/net")
    assert [(each.key, each.value) for each in nodes] == [("/net/a", "x"), ("/net/b", "y")]
    assert now.index > at.index + 1000
    with pytest.raises(RelistNeeded):
        again.changes("/net", recursive=True, after=at)
    with pytest.raises(Fatal, match="is there"):
        restore(tmp_path / "copy", path)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []


def test_order_of_creation_is_kept_by_backups_and_moves_and_unknown_for_keys_of_earlier_versions(
    store: KeyStore, path: Path, tmp_path: Path, etcd: LocalEtcd
) -> None:
    root = f"{PREFIX}/subnets"
    store.create(f"{PREFIX}/config", '{"Network":"10.5.0.0/16"}', None)
    for third in (9, 1, 4):
        store.create(f"{root}/10.5.{third}.0-24", '{"PublicIP":"192.0.2.1"}', 600)
    store.replace(
        f"{root}/10.5.9.0-24", '{"PublicIP":"192.0.2.9"}', 600, store.get(f"{root}/10.5.9.0-24")[0].modified
    )
    Database(path).backup(tmp_path / "copy")
    copied = [each.created for each in KeyStore(Database(tmp_path / "copy")).below(root)[0]]
    assert copied == [each.created for each in store.below(root)[0]]
    assert copied[2] < copied[0] < copied[1]

    v3 = open_client("v3", Transport(Servers(EtcdOptions((etcd.url,))), EtcdTimeouts()))
    assert Migration(
        EmbeddedClient(store), v3, PREFIX, lambda _line: None, dry_run=False, new_prefix="/moved-here"
    ).run()
    moved = [each.created for each in v3.fetch("/moved-here/subnets", recursive=True).children]
    assert moved[2] < moved[0] < moved[1]

    with Database(path).writing() as connection:
        connection.execute("DROP TABLE created")
    reopened = open_file(str(path))
    assert [each.created for each in reopened.below(root)[0]] == [0, 0, 0]
    node, _ = reopened.create(f"{root}/10.5.5.0-24", "", 600)
    assert reopened.get(node.key)[0].created == node.modified


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "no store of flanneld"),
        (b"leases: none\n" * 9, "no store of flanneld"),
        (None, "there is no store"),
    ],
)
def test_file_that_is_no_store_is_refused_and_left_alone(
    path: Path, content: bytes | None, text: str
) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Fatal, match=text):
        open_file(str(path), create=content is not None)
    assert (path.read_bytes() if path.exists() else None) == content


def test_one_file_has_one_server_whatever_its_names(path: Path, tmp_path: Path) -> None:
    Database(path, create=True).close()
    link, other = tmp_path / "link.db", tmp_path / "other.db"
    link.symlink_to(path)
    assert Database(link).path == path
    other.hardlink_to(path)
    before = path.read_bytes()
    for name in (path, other):
        with pytest.raises(Fatal, match="one of 2 names of a file; remove the others"):
            open_file(str(name))
    assert path.read_bytes() == before


@pytest.mark.parametrize("replaced", [False, True])
def test_file_that_was_moved_away_or_replaced_is_not_written(
    path: Path, tmp_path: Path, replaced: bool
) -> None:
    database = Database(path, create=True)
    moved = path.rename(tmp_path / "moved.db")
    if replaced:
        path.write_bytes(moved.read_bytes())
    before = [file.read_bytes() for file in (moved, path) if file.exists()]
    with (
        pytest.raises(Retryable, match="moved away or replaced while in use"),
        database.writing() as connection,
    ):
        set_fact(connection, "revision", 1)
    assert [file.read_bytes() for file in (moved, path) if file.exists()] == before
    path.unlink(missing_ok=True)
    moved.rename(path)
    with database.writing() as connection:
        set_fact(connection, "revision", 1)


def test_revision_at_the_end_of_numbers_is_named(path: Path) -> None:
    database = Database(path, create=True)
    with database.writing() as connection:
        set_fact(connection, "revision", 2**63 - 1)
    database.close()
    with pytest.raises(Fatal, match="is damaged: its revision is too large"):
        open_file(str(path))


def test_new_store_gets_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "var" / "lib" / "leases.db"
    Database(path, create=True).close()
    assert path.is_file()


def test_database_of_another_program_or_format_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title)")
    with pytest.raises(Fatal, match="another program"):
        open_file(str(path), create=True)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id=0x666c616e")
        connection.execute("PRAGMA user_version=9")
    with pytest.raises(Fatal, match="has format 9, this flanneld reads 1"):
        open_file(str(path))


def test_damaged_store_is_refused_and_left_alone(path: Path) -> None:
    store = open_file(str(path), create=True)
    for number in range(300):
        store.create(f"/net/{number}", "x" * 200, None)
    store.database.close()
    content = bytearray(path.read_bytes())
    content[8192:40960] = os.urandom(32768)
    path.write_bytes(content)
    with pytest.raises(Fatal, match="flannelctl store restore"):
        open_file(str(path), create=True)
    assert path.read_bytes() == content


def test_log_of_a_lost_store_is_not_mixed_with_a_new_one(path: Path) -> None:
    path.with_name("leases.db-wal").write_bytes(b"leases")
    with pytest.raises(Fatal, match="-wal is there"):
        open_file(str(path), create=True)


def test_full_store_refuses_writes_keeps_what_it_has_and_goes_on(store: KeyStore) -> None:
    store.create("/net/a", "x", None)
    with store.database.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    store.database._connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(Retryable, match="is full; free space"):
        store.create("/net/b", "x" * 1_000_000, None)
    assert [each.key for each in store.below("/net")[0]] == ["/net/a"]
    store.database._connection.execute("PRAGMA max_page_count=100000")
    store.create("/net/b", "x" * 1_000_000, None)


WRITER = """
import sys
from flanneld.subnet.embedded.store import open_file
store = open_file(sys.argv[1], create=True)
for number in range(int(sys.argv[2]), 10 ** 6):
    node, _ = store.create(f"/net/{number}", "x" * 100, None)
    print(number, node.modified, flush=True)
"""


def test_kill_9_at_any_write_loses_nothing_acknowledged(path: Path) -> None:
    acknowledged: dict[str, int] = {}
    for count in (1, 3, 40):
        command = [sys.executable, "-c", WRITER, str(path), str(len(acknowledged) * 2)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(count)]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        for number, modified in (line.split() for line in lines if line.endswith("\n")):
            acknowledged[f"/net/{number}"] = int(modified)
        found = {each.key: each.modified for each in open_file(str(path)).below("/net")[0]}
        assert found.items() >= acknowledged.items()
        acknowledged = found
