"""The lock of the legacy tables where it cannot be had at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flanneld.errors import Retryable
from flanneld.network.firewall.iptables import xtables_lock


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
