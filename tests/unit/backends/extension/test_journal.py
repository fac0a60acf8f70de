"""The journal of the extension backend: what it keeps over kills, full disks and damage."""

from __future__ import annotations

import os
import stat
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import NoReturn

import pytest

from flanneld.backends.extension.backend import ConfigCommand, PeerSetup
from flanneld.backends.extension.journal import Journal, JournalEntry, Progress
from flanneld.runtime import files

REMOVE = ConfigCommand("SubnetRemoveCommand", "ip route del $SUBNET")


def entry(number: int = 6, stage: Progress = Progress.BEGUN, base: str = "base") -> JournalEntry:
    setup = PeerSetup(
        IPv4Network(f"10.1.{number}.0/24"),
        IPv6Network(f"fd00:0:0:{number}::/64"),
        IPv4Address("192.168.0.6"),
        IPv6Address("fd77::6"),
        "data \n\u2028",
    )
    return JournalEntry(setup, REMOVE, base, stage)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "flanneld.extension"


def opened(path: Path) -> Journal:
    return Journal(path, lambda: "base")


def kept(path: Path) -> list[JournalEntry]:
    return list(opened(path).entries().values())


def test_an_entry_comes_back_as_it_was(path: Path) -> None:
    journal = opened(path)
    journal.begin(entry())
    assert kept(path) == [entry()]
    journal.ended(entry(stage=Progress.DONE))
    assert kept(path) == [entry(stage=Progress.DONE)] == list(journal.entries().values())
    journal.gone(entry().setup.name)
    assert kept(path) == [] == list(journal.entries().values())


def test_lines_are_as_the_release_before_wrote_and_read_them(path: Path) -> None:
    before = (
        '{"subnet": "10.1.6.0/24", "ipv6_subnet": "fd00:0:0:6::/64", "public_ip": "192.168.0.6",'
        ' "public_ipv6": "fd77::6", "data": "data \\n\\u2028", "remove": "ip route del $SUBNET",'
        ' "shell": true, "base": "base", "stage": "begun"}\n'
    )
    journal = opened(path)
    journal.begin(entry())
    assert path.read_text() == before
    journal.gone(entry().setup.name)
    assert path.read_text() == f'{before}{{"gone": "{entry().setup.name}"}}\n'


def test_only_root_reads_it_since_commands_may_hold_keys(path: Path) -> None:
    opened(path).begin(entry())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_read_makes_no_file(path: Path) -> None:
    assert kept(path) == []
    assert not path.parent.exists()


def test_a_line_that_a_kill_has_cut_off_costs_nothing_else(path: Path) -> None:
    journal = opened(path)
    journal.begin(entry(6))
    journal.begin(entry(7))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert kept(path) == [entry(6)]
        again = opened(path)
        again.begin(entry(8))
        assert kept(path) == [entry(6), entry(8)]


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", "{}", '{"subnet": 7}', '{"subnet": null}', "\0", "[" * 100_000]
)
def test_a_line_that_makes_no_sense_is_named_and_the_others_count(
    path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(path)
    journal.begin(entry(6))
    journal.begin(entry(7))
    one, other = path.read_text().splitlines()
    path.write_text(f"{one}\n{line}\n{other}\n")
    assert kept(path) == [entry(6), entry(7)]
    assert caplog.messages == [f"Ignoring a malformed line of {path}"]


def test_a_journal_that_cannot_be_read_is_a_failure_and_not_empty(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        kept(path)


def full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_no_command_runs_that_cannot_be_journalled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    journal.begin(entry(6))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        journal.begin(entry(7))
    assert list(journal.entries().values()) == [entry(6)]


def test_journal_on_a_full_disk_is_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(path)
    journal.begin(entry(6))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(files, "replace", full)
        for _ in range(2):
            journal.ended(entry(6, Progress.DONE))
    assert list(journal.entries().values()) == [entry(6, Progress.DONE)]
    assert len(caplog.messages) == 1
    assert "No space left on device; make its directory writable" in caplog.messages[0]
    journal.begin(entry(7))
    assert kept(path) == [entry(6, Progress.DONE), entry(7)]


def test_the_file_stays_small(path: Path) -> None:
    journal = opened(path)
    for _ in range(1200):
        journal.begin(entry(6))
        journal.gone(entry(6).setup.name)
    assert len(path.read_bytes().splitlines()) < 1100
    assert kept(path) == []


def test_the_base_is_asked_once(path: Path) -> None:
    asked: list[str] = []

    def base() -> str:
        asked.append("once")
        return "base"

    journal = Journal(path, base)
    assert (journal.base, journal.base) == ("base", "base")
    assert asked == ["once"]
