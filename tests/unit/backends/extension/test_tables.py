"""The tables of the extension backend, kept by the reconciler as in a daemon."""

from __future__ import annotations

import threading
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.backends.extension import tables
from flanneld.backends.extension.backend import PEERS, ConfigCommand, ConfigCommands, PeerSetup, Startup
from flanneld.backends.extension.journal import Journal
from flanneld.backends.extension.tables import PeerSetupTable, StartupTable
from flanneld.errors import Fatal
from flanneld.reconcile.reconciler import Reconciler
from flanneld.runtime import clock
from flanneld.runtime.command import CommandRunner
from flanneld.state.desired import Delta
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put

NODE = Startup(
    IPv4Network("10.1.0.0/16"), None, IPv4Network("10.1.5.0/24"), None, IPv4Address("192.168.0.5"), None
)


def peer(number: int = 6, data: str = "key", host: int = 6) -> PeerSetup:
    return PeerSetup(IPv4Network(f"10.1.{number}.0/24"), None, IPv4Address(f"192.168.0.{host}"), None, data)


class Killed(BaseException):
    """A kill -9 of the daemon."""


class Extension:
    """One node: its commands note in a file what they do, and fail if a file says so."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.passed = 0.0
        real = clock.now
        monkeypatch.setattr(clock, "now", lambda: real() + self.passed)
        self.base = "base"
        self.time_limit = 10.0
        self.has_check = self.has_remove = True
        self.desired: dict[Key, Resource] = {}
        self.start()

    def start(self) -> None:
        """Start as a daemon does that knows nothing but what is on disk."""
        self.stop = threading.Event()
        self.journal = Journal(self.directory / "flanneld.extension", lambda: self.base)
        commands = ConfigCommands(CommandRunner(self.stop).run, self.time_limit)
        self.table = PeerSetupTable(
            self.command("add"),
            self.command("remove") if self.has_remove else ConfigCommand("SubnetRemoveCommand"),
            self.command("check") if self.has_check else ConfigCommand("CheckCommand"),
            commands,
            self.journal,
        )
        self.reconciler = Reconciler(
            [self.table], {PEERS: self.desired}, self.stop.is_set, converged={"extension-startup"}
        )

    def command(self, what: str) -> ConfigCommand:
        names = {"add": "SubnetAddCommand", "remove": "SubnetRemoveCommand", "check": "CheckCommand"}
        note = f'echo {what} $SUBNET $PUBLIC_IP "$(cat)" >> {self.directory}/notes'
        script = f"{self.directory}/{what}-$PUBLIC_IP"
        text = f"{note}; [ ! -e {script} ] || . {script}"
        return ConfigCommand(names[what], text)

    def make_fail(self, what: str, host: int = 6, how: str = "exit 7") -> None:
        (self.directory / f"{what}-192.168.0.{host}").write_text(how)

    def mend(self, what: str, host: int = 6) -> None:
        (self.directory / f"{what}-192.168.0.{host}").unlink()

    def notes(self) -> list[str]:
        """What has run since the last call."""
        file = self.directory / "notes"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return found

    def want(self, *peers: PeerSetup) -> None:
        self.desired.clear()
        self.desired |= {each.key: each for each in peers}

    def converge(self) -> list[str]:
        self.reconciler.converge(clock.now())
        return self.notes()

    def later(self, seconds: float) -> list[str]:
        """Let time pass, and step."""
        self.passed += seconds
        self.reconciler.step(clock.now())
        return self.notes()

    def failures(self) -> list[str]:
        return [str(failure) for state in self.reconciler.states() for failure in state.failed]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    node = Extension(tmp_path, monkeypatch)
    node.has_check = False
    node.start()
    return node


def note(what: str, number: int = 6, host: int = 6, data: str = "key") -> str:
    return f"{what} 10.1.{number}.0/24 192.168.0.{host} {data}"


def test_each_peer_is_added_once(node: Extension) -> None:
    node.want(peer(6), peer(7, host=7))
    assert node.converge() == [note("add"), note("add", 7, 7)]
    assert node.converge() == []
    node.want(peer(7, host=7))
    assert node.converge() == [note("remove")]
    assert node.converge() == []


def test_a_restart_runs_nothing_again_and_removes_what_has_left_meanwhile(node: Extension) -> None:
    node.want(peer(6), peer(7, host=7))
    node.converge()
    node.notes()
    node.start()
    assert node.converge() == []
    node.want(peer(7, host=7))
    node.start()
    assert node.converge() == [note("remove")]


@pytest.mark.parametrize("new", [peer(host=8), peer(data="other key")], ids=["public IP", "data"])
def test_a_subnet_that_changes_hands_is_removed_before_it_is_added(node: Extension, new: PeerSetup) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.want(new)
    node.reconciler.change(Delta((Put(new, peer()),)), clock.now())
    host = int(str(new.public_ip).rpartition(".")[2])
    assert node.notes() == [note("remove"), note("add", host=host, data=new.data)]


def test_the_same_holds_if_it_changed_hands_while_no_daemon_ran(node: Extension) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.want(peer(host=8))
    node.start()
    assert node.converge() == [note("remove"), note("add", host=8)]


def test_setup_is_removed_by_the_remove_command_it_was_made_with(node: Extension) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.has_remove = False
    node.want()
    node.start()
    assert node.converge() == [note("remove")]


def test_a_failed_command_is_named_and_tried_again_with_back_off(
    node: Extension, caplog: pytest.LogCaptureFixture
) -> None:
    node.make_fail("add", how="echo no route; exit 7")
    node.want(peer(6), peer(7, host=7))
    assert node.converge() == [note("add"), note("add", 7, 7)]
    assert node.failures() == [
        "extension peer 10.1.6.0/24 at 192.168.0.6: SubnetAddCommand exited with status 7"
    ]
    assert "SubnetAddCommand exited with status 7; it wrote: no route" in caplog.text
    assert node.later(0.5) == []
    for pause in (0.6, 2.1, 4.1):
        assert node.later(pause) == [note("add")], "it has made nothing, so there is nothing to remove"
        assert node.later(0) == []
    node.mend("add")
    assert node.later(9) == [note("add")]
    assert node.failures() == []
    assert caplog.text.count("exited with status 7") == 1


@pytest.mark.parametrize("stage", ["before", "after"], ids=["before it ends", "after it ended"])
def test_a_kill_around_a_command_forgets_nothing(
    node: Extension, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    node.want(peer())
    with monkeypatch.context() as patch:
        if stage == "before":
            patch.setattr(node.table._commands, "run", killed)
        else:
            patch.setattr(node.journal, "ended", killed)
        with pytest.raises(Killed):
            node.converge()
    node.notes()
    node.start()
    assert node.converge() == [note("remove"), note("add")]
    node.want()
    with monkeypatch.context() as patch:
        patch.setattr(node.journal, "gone", killed)
        with pytest.raises(Killed):
            node.converge()
    assert node.notes() == [note("remove")]
    node.start()
    assert node.converge() == [note("remove")]
    node.start()
    assert node.converge() == []


def test_setup_left_by_a_kill_is_removed_with_its_peer(
    node: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    node.want(peer())
    with monkeypatch.context() as patch:
        patch.setattr(node.journal, "ended", killed)
        with pytest.raises(Killed):
            node.converge()
    node.notes()
    node.want()
    node.start()
    assert node.converge() == [note("remove")]


def test_a_command_that_hangs_is_killed_and_holds_up_no_other_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROUND", 0.2)
    node = Extension(tmp_path, monkeypatch)
    node.time_limit, node.has_check = 0.5, False
    node.start()
    node.make_fail("add", 6, "sleep 60")
    node.want(peer(6), peer(7, host=7), peer(8, host=8))
    assert node.converge() == [note("add")]
    assert node.failures() == [
        "extension peer 10.1.6.0/24 at 192.168.0.6: SubnetAddCommand did not end within 0.5 s"
    ]
    monkeypatch.setattr(tables, "ROUND", 60.0)  # for both, also on a busy machine
    assert node.later(0) == [note("add", 7, 7), note("add", 8, 8)]


def test_after_a_hang_it_is_removed_before_it_is_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Extension(tmp_path, monkeypatch)
    node.time_limit, node.has_check = 0.5, False
    node.start()
    node.make_fail("add", 6, "sleep 60")
    node.want(peer())
    node.converge()
    node.mend("add")
    assert node.later(1.1) == [note("remove"), note("add")]


def test_a_failed_removal_is_tried_five_times_and_then_named(
    node: Extension, caplog: pytest.LogCaptureFixture
) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.make_fail("remove")
    node.want()
    assert node.converge() == [note("remove")]
    for pause in (1, 2, 4, 8):
        assert node.later(pause) == [note("remove")]
    assert node.later(60) == []
    assert "Gave up removing extension peer 10.1.6.0/24 at 192.168.0.6 after 5 runs" in caplog.text
    node.start()
    assert node.converge() == []


def test_a_failed_removal_waits_before_the_next(node: Extension) -> None:
    node.want(peer())
    node.converge()
    node.make_fail("remove")
    node.notes()
    node.want()
    assert node.converge() == [note("remove")]
    assert node.later(0.5) == []
    assert 0 < node.table.next_look - clock.now() <= 1


@pytest.mark.parametrize("base", ["after a reboot", "next boot"])
def test_setup_is_repeated_after_its_base_changed(base: str, node: Extension) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.base = base
    node.start()
    assert node.converge() == [note("remove"), note("add")]
    node.start()
    assert node.converge() == []


def test_a_removal_that_an_earlier_base_needs_not_is_tried_once(node: Extension) -> None:
    node.want(peer())
    node.converge()
    node.notes()
    node.base = "after a reboot"
    node.make_fail("remove")
    node.want()
    node.start()
    assert node.converge() == [note("remove")]
    assert node.converge() == []


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    return Extension(tmp_path, monkeypatch)


def test_a_peer_whose_check_fails_is_removed_and_added_again(checked: Extension) -> None:
    checked.want(peer())
    assert checked.converge() == [note("add")]
    assert checked.converge() == [], "it was just made"
    checked.make_fail("check")
    checked.table._checked.clear()
    assert checked.converge() == [note("check"), note("remove"), note("add")]
    checked.mend("check")
    checked.table._checked.clear()
    assert checked.converge() == [note("check")]


def test_a_check_that_hangs_says_nothing(checked: Extension) -> None:
    checked.time_limit = 3.0  # long enough for the command before
    checked.start()
    checked.want(peer())
    assert checked.converge() == [note("add")]
    checked.make_fail("check", how="sleep 60")
    checked.table._checked.clear()
    assert checked.converge() == [note("check")]


def test_a_check_tells_whether_what_an_earlier_base_carried_still_holds(checked: Extension) -> None:
    checked.want(peer(6), peer(7, host=7))
    checked.converge()
    checked.make_fail("check", 7)
    checked.base = "another start"
    checked.start()
    assert checked.converge() == [
        note("check"),
        note("check", 7, 7),
        note("remove", 7, 7),
        note("add", 7, 7),
    ]
    checked.start()
    assert checked.converge() == [note("check"), note("check", 7, 7), note("remove", 7, 7), note("add", 7, 7)]


def test_checks_leave_time_for_other_things(checked: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    checked.want(peer(6), peer(7, host=7))
    checked.converge()
    checked.table._checked.clear()
    monkeypatch.setattr(tables, "ROUND", -1.0)
    assert checked.converge() == []
    monkeypatch.setattr(tables, "ROUND", 60.0)
    assert checked.later(1) == [note("check"), note("check", 7, 7)]


# ---- this node ----------------------------------------------------------------------------------


def startup(tmp_path: Path, post: str, shutdown: str = "") -> StartupTable:
    commands = ConfigCommands(CommandRunner(threading.Event()).run, 0.5)
    return StartupTable(
        ConfigCommand("PostStartupCommand", post.replace("NOTES", str(tmp_path / "notes"))),
        ConfigCommand("ShutdownCommand", shutdown.replace("NOTES", str(tmp_path / "notes"))),
        commands,
    )


def kept(table: StartupTable, node: Startup = NODE) -> Reconciler:
    return Reconciler([table], {table.name: {node.key: node}}, lambda: False)


def test_poststartupcommand_runs_once_a_run(tmp_path: Path) -> None:
    table = startup(tmp_path, "echo $NETWORK $SUBNET $PUBLIC_IP >> NOTES", "echo end $SUBNET >> NOTES")
    reconciler = kept(table)
    reconciler.converge(clock.now())
    reconciler.converge(clock.now())
    assert (tmp_path / "notes").read_text() == "10.1.0.0/16 10.1.5.0/24 192.168.0.5\n"
    reconciler.close()
    reconciler.close(remove=[table.name])
    assert (tmp_path / "notes").read_text().splitlines()[1:] == ["end 10.1.5.0/24"]


def test_a_start_fails_if_poststartupcommand_does(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="PostStartupCommand exited with status 3; it wrote: no"):
        kept(startup(tmp_path, "echo no; exit 3")).converge(clock.now())


def test_a_start_waits_if_poststartupcommand_hangs(tmp_path: Path) -> None:
    reconciler = kept(startup(tmp_path, "sleep 60"))
    reconciler.converge(clock.now())
    (state,) = reconciler.states()
    assert [str(each) for each in state.failed] == [
        "extension startup of 10.1.5.0/24: PostStartupCommand did not end within 0.5 s"
    ]


def test_a_shutdowncommand_that_fails_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = startup(tmp_path, "", "exit 4")
    kept(table).converge(clock.now())
    table.close(remove=True)
    assert (
        "Could not undo extension startup of 10.1.5.0/24: ShutdownCommand exited with status 4" in caplog.text
    )
