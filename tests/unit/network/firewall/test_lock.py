"""The lock of the legacy tables, and what is asked and written without it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from flanneld.errors import Retryable
from flanneld.network.firewall import iptables, xtables
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.iptables import Locked, Restore, read_legacy, xtables_lock
from flanneld.network.firewall.rules import Edit, Rules


def test_a_lock_that_cannot_be_opened_is_named_with_remedies_for_root_and_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "missing/xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    with (
        pytest.raises(Retryable, match=rf"{path}: No such file.*/run writable.*tmpfiles\.d") as caught,
        xtables_lock(threading.Event()),
    ):
        pass
    assert caught.value.problem.startswith("cannot open")


def test_lock_is_a_file_of_root_that_others_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    ends = threading.Event()
    ends.set()
    with xtables_lock(threading.Event()):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Locked, match="another program held the xtables lock"), xtables_lock(ends):
            pass
    with path.open() as ours:  # it was given back
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)


def restore() -> Restore:
    return Restore("nft", 6, IptablesRunner(threading.Event()))


def test_script_is_the_command_with_its_input() -> None:
    edits = [Edit(("filter", "FLANNEL-FWD"), flush=True, append=(Rule("ACCEPT"),))]
    first, *lines, last = restore().script(edits)
    assert (first, last) == ("ip6tables-nft-restore --noflush <<'END'", "END")
    assert lines == ["*filter", ":FLANNEL-FWD - [0:0]", "-A FLANNEL-FWD -j ACCEPT", "COMMIT"]


def test_question_that_the_kernel_refuses_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(iptables, "Netfilter", refuse)
    with pytest.raises(Retryable, match=r"cannot ask nf_tables: .*; run with CAP_NET_ADMIN"):
        restore().read()


def test_legacy_tables_that_only_root_can_list_are_all_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Rules = {("nat", "POSTROUTING"): ()}
    asked: list[object] = []

    def read(_family: int, _chains: object, tables: object = None) -> Rules:
        asked.append(tables)
        if tables is None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return found

    monkeypatch.setattr(xtables, "read", read)
    assert read_legacy(4) == found
    assert asked == [None, {"nat", "filter"}]
