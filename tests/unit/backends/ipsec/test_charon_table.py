"""The table of charon's process, beside a program that behaves like it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flanneld.backends.ipsec import charon
from flanneld.backends.ipsec.resources import Charon
from flanneld.backends.ipsec.tables import CharonTable, stale_charon
from flanneld.backends.ipsec.vici import MalformedVici, ReadSection
from flanneld.errors import Fatal
from flanneld.state.resources import Resource
from flanneld.state.table import Changes, Put, Report, Scope
from tests.calls import at_once
from tests.lab import wait_for

#: It answers with its version, confirms events, and tells a line of its log, unless its folder asks for else.
PROGRAM = f"""#!{sys.executable} -IS
import os, socket, sys, threading, time
from pathlib import Path

here = Path(sys.argv[0]).parent
mode = (here / "mode").read_text()
(here / "environment").write_text("\\n".join(f"{{name}}={{value}}" for name, value in os.environ.items()))
print("loading\\n" + mode + "\\n", flush=True)
if mode == "ends":
    sys.exit(3)
(here / "charon.pid").write_text(str(os.getpid()))
if mode == "sleeps":
    print("asleep", flush=True)
    time.sleep(600)

def serve(connection):
    while length := connection.recv(4):
        request = connection.recv(int.from_bytes(length, "big"))
        answers = [bytes([5]), b"\\7\\3log" + b"\\3\\3msg\\0\\5hello"]
        if (here / "nonsense").exists():
            answers = [b"\\xff"]
        elif request[0] == 0:
            answers = [b"\\1" + b"\\3\\7version\\0\\0055.9.8"]
        for each in answers:
            connection.sendall(len(each).to_bytes(4, "big") + each)

(here / "vici").unlink(missing_ok=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(here / "new"))
listener.listen()
(here / "new").rename(here / "vici")
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Place:
    """The folder of a charon, and of its pid file and socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid_file = folder / "charon.pid"
        self.program = folder / "charon"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        self.told: list[ReadSection] = []
        self.set_mode("serves")

    def set_mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def talk_nonsense(self, *, on: bool) -> None:
        if on:
            (self.folder / "nonsense").touch()
        else:
            (self.folder / "nonsense").unlink()

    def table(self, mark: str = "digest") -> CharonTable:
        return CharonTable(self.told.append, mark, at_once)

    @property
    def pid(self) -> int:
        return int(self.pid_file.read_text())

    def start_by_hand(self, ready: str) -> subprocess.Popen[str]:
        """Start it as another program would, and wait until it says that it is ready."""
        process = subprocess.Popen([self.program], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        assert any(line.strip() == ready for line in process.stdout)
        return process


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = Place(tmp_path)
    monkeypatch.setattr(charon, "SOCKET", str(tmp_path / "vici"))
    monkeypatch.setattr(charon, "CHARON_PID_FILE", found.pid_file)
    monkeypatch.setattr(charon, "FOLDERS", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    yield found
    with suppress(OSError, ValueError):
        os.kill(found.pid, signal.SIGKILL)


def read(table: CharonTable) -> list[Resource]:
    return [each.resource for each in table.read(Scope({}))]


def put(table: CharonTable) -> Report:
    return table.put([Put(Charon())])


def test_charon_that_was_not_found_yet_tells_nothing(place: Place) -> None:
    table = place.table()
    assert (table.fileno(), table.changes(), place.told) == (-1, [], [])
    table.close(remove=False)


@pytest.mark.usefixtures("place")
def test_charon_that_is_not_reached_is_told_by_the_cause() -> None:
    with pytest.raises(charon.NoCharon, match="charon is not reached: No such file or directory"):
        charon.ask(charon.SOCKET, "version")
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(charon.SOCKET)
    with pytest.raises(charon.NoCharon, match="charon is not reached: Connection refused"):
        charon.ask(charon.SOCKET, "version")


def test_charon_outlives_the_daemon_and_serves_the_next_one(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = place.table()
    assert read(table) == []
    assert put(table).made == [Charon()]
    assert read(table) == [Charon()]
    table.close(remove=False)
    first = place.pid
    after = place.table()
    assert read(after) == [Charon()]
    assert put(after).made == [Charon()]
    assert place.pid == first
    assert caplog.messages == [
        f"Started charon, process {first}, strongSwan 5.9.8",
        "Using a charon that runs already, strongSwan 5.9.8",
    ]
    after.close(remove=True)
    wait_for(lambda: not lives(first), 60, "charon's end")


def test_charon_gets_no_variables_that_may_hold_passwords(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    monkeypatch.setenv("TZ", "UTC")
    put(place.table())
    names = {line.partition("=")[0] for line in (place.folder / "environment").read_text().split("\n")}
    assert {"PATH", "TZ"} <= names
    assert "FLANNELD_ETCD_PASSWORD" not in names


def test_charon_of_other_settings_is_replaced(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    put(place.table())
    first = place.pid
    table = place.table("another digest")
    assert read(table) == []
    assert put(table).made == [Charon()]
    wait_for(lambda: not lives(first), 60, "charon's end")
    assert place.pid != first
    assert f"Ending charon, process {first}: it has other settings, or its program was replaced" in (
        caplog.messages
    )
    assert read(table) == [Charon()]
    assert put(table).made == [Charon()]


def test_charon_that_answers_with_nonsense_is_replaced(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    table = place.table()
    put(table)
    first = place.pid
    place.talk_nonsense(on=True)
    assert read(table) == []
    place.talk_nonsense(on=False)
    assert read(table) == []  # its keys and connections must be loaded again
    assert put(table).made == [Charon()]
    wait_for(lambda: not lives(first), 60, "charon's end")
    assert read(table) == [Charon()]
    killed, started = caplog.messages
    assert killed.startswith(f"Killing charon, process {first}: charon's answer is not understood")
    assert started == "charon ended with status -9: starting it again"


def test_charon_of_another_program_is_used_and_never_ended(place: Place) -> None:
    with place.start_by_hand("ready") as theirs:
        table = place.table()
        assert read(table) == [Charon()]
        assert put(table).made == [Charon()]
        place.talk_nonsense(on=True)
        with pytest.raises(MalformedVici):
            read(table)
        table.close(remove=True)
        assert not list(stale_charon())
        assert theirs.poll() is None
        theirs.kill()


def test_end_of_charon_is_noticed_and_it_is_started_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    table = place.table()
    put(table)
    first = place.pid
    assert table.changes() == []
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: table.changes() == [Changes()], 60, "charon's end to be noticed")
    assert table.fileno() == -1
    assert read(table) == []
    assert put(table).made == [Charon()]
    assert caplog.messages == ["charon ended with status -9: starting it again"]
    assert place.pid != first


def test_charon_s_log_is_passed_on(place: Place) -> None:
    table = place.table()
    put(table)
    wait_for(lambda: table.changes() or place.told, 60, "a line of charon's log")
    assert place.told == [{"msg": b"hello"}]


def test_charon_that_ends_at_its_start_is_a_failure(place: Place) -> None:
    place.set_mode("ends")
    (failure,) = put(place.table()).failed
    assert (failure.resource, failure.reason) == (Charon(), "charon ended at its start with status 3")
    assert failure.remedy == "see what it logs"


def test_charon_that_is_not_installed_ends_the_daemon(place: Place) -> None:
    place.program.unlink()
    with pytest.raises(Fatal, match=f"neither in PATH nor in {place.folder}; install strongSwan"):
        put(place.table())


def test_charon_of_the_path_comes_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    other = place.folder / "bin"
    other.mkdir()
    monkeypatch.setenv("PATH", str(other))
    assert charon.find_charon() == str(place.program)
    (other / "charon").symlink_to(place.program)
    assert charon.find_charon() == str(other / "charon")


@pytest.mark.parametrize("pid", ["own", str(2**22 + 1), "none"])
def test_pid_file_that_names_no_charon_does_not_stop_the_next(place: Place, pid: str) -> None:
    place.set_mode("ends")
    place.pid_file.write_text(str(os.getpid()) if pid == "own" else pid)
    put(place.table())
    assert place.pid_file.exists() is (pid == "none")


def test_pid_file_of_another_program_s_charon_stays(place: Place) -> None:
    place.set_mode("sleeps")
    with place.start_by_hand("asleep") as theirs:
        place.set_mode("ends")
        put(place.table())
        assert place.pid == theirs.pid
        theirs.kill()


def test_charon_tells_why_it_does_not_start(place: Place) -> None:
    process = charon.CharonProcess("digest")
    assert process.output() == ""
    place.set_mode("ends")
    process.start()
    wait_for(lambda: process.status == 3, 60, "its end")
    assert process.output() == "ends"
    assert process.output() == ""
    process.close()


def test_charon_of_an_earlier_run_is_ended_by_another_backend(place: Place) -> None:
    assert not list(stale_charon())
    put(place.table())
    (stale,) = stale_charon()
    assert [each.resource for each in stale.read(Scope({}))] == [Charon()]
    assert stale.drop([Charon()]).removed == [Charon()]
    wait_for(lambda: not lives(place.pid), 60, "charon's end")
    assert list(stale.read(Scope({}))) == []
    assert not list(stale_charon())


def test_charon_that_may_not_be_ended_is_told_apart_from_one_that_has_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place.table())

    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        assert not charon.end_running(place.pid)
    assert charon.end_running(place.pid)
    wait_for(lambda: not lives(place.pid), 60, "charon's end")
    assert charon.end_running(place.pid)
