"""Files with keys, on a real disk."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.runtime import files


def never() -> bytes:
    raise AssertionError("there is a key already")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flannel" / "wgkey"


def test_a_key_is_made_once_and_only_its_owner_reads_it(path: Path) -> None:
    umask = os.umask(0o777)
    try:
        assert files.read_secret(path, lambda: b"key") == b"key"
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert files.read_secret(path, never) == files.read_secret(path) == b"key"
    assert [each.name for each in path.parent.iterdir()] == ["wgkey"]


def test_a_key_is_on_the_disk_before_it_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", watched)
    files.read_secret(path, lambda: b"key")
    assert [name.startswith(".wgkey.") or name for name in synced] == [True, "flannel"]


def test_processes_that_make_a_key_at_once_agree_on_one(path: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[bytes] = []

    def make(number: int) -> bytes:
        barrier.wait()
        return b"%d" % number

    threads = [
        threading.Thread(target=lambda n=n: found.append(files.read_secret(path, lambda: make(n))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {path.read_bytes()}
    assert len(found) == 8


@pytest.mark.parametrize("mode", [0o420, 0o402])
def test_a_key_that_others_can_write_is_refused(path: Path, mode: int) -> None:
    files.read_secret(path, lambda: b"key")
    path.chmod(mode)
    with pytest.raises(Fatal, match=f"^others can write {path}, so its key may be theirs; make a new one"):
        files.read_secret(path, never)


def test_a_key_of_another_user_is_refused(path: Path) -> None:
    files.read_secret(path, lambda: b"key")
    os.chown(path, 12345, -1)
    with pytest.raises(Fatal, match=f"^{path} belongs to user 12345"):
        files.read_secret(path, never)


def test_a_key_that_is_missing_and_that_nothing_makes_is_waited_for(path: Path) -> None:
    with pytest.raises(Retryable, match=f"^cannot keep the key in {path}: No such file or directory; "):
        files.read_secret(path)


def test_a_key_that_cannot_be_kept_is_tried_again(path: Path) -> None:
    path.parent.write_text("not a directory")
    with pytest.raises(Retryable, match=f"^cannot keep the key in {path}: "):
        files.read_secret(path, lambda: b"key")


def test_a_maker_that_fails_leaves_nothing(path: Path) -> None:
    def fail() -> bytes:
        raise Retryable("no entropy")

    with pytest.raises(Retryable, match="no entropy"):
        files.read_secret(path, fail)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("-1", -1), ("x", 0), ("", 0), (None, 0)])
def test_number_in_a_file_is_0_without_one(text: str | None, value: int, tmp_path: Path) -> None:
    file = tmp_path / "number"
    if text is not None:
        file.write_text(text)
    assert files.number(file) == value
