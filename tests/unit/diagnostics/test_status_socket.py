"""The status socket: who may read it, and what a reader cannot do."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path

import pytest

from flanneld.ctl import source
from flanneld.diagnostics import serving as status_socket
from flanneld.diagnostics.serving import StatusSocket
from flanneld.subnet.subnet_file import beside

DEADLINE = 20.0


def ask(path: Path, within: float) -> bytes:
    said, pid = source.ask(path, within)
    assert pid == os.getpid()
    return said


@contextmanager
def serving(path: Path, document: Callable[[], Iterable[bytes]]) -> Iterator[StatusSocket]:
    server = StatusSocket.open(path, document)
    assert server
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()


def said() -> Iterator[bytes]:
    yield from (b'{"a"', b": 1}")


@pytest.mark.parametrize(
    ("file", "name"), [("subnet.env", "flanneld.sock"), ("blue.env", "flanneld-blue.sock")]
)
def test_each_daemon_of_a_host_has_a_socket_of_its_own(file: str, name: str) -> None:
    assert beside(Path("/run/flannel") / file, "sock") == Path("/run/flannel") / name


def test_the_whole_document_is_told_to_each_reader(tmp_path: Path) -> None:
    with serving(tmp_path / "s", said):
        assert [ask(tmp_path / "s", DEADLINE) for _ in range(3)] == [b'{"a": 1}'] * 3


def test_only_the_owner_may_ask(tmp_path: Path) -> None:
    with serving(tmp_path / "s", said):
        mode = (tmp_path / "s").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("left", ["a dead daemon's socket", "a file", "a link"])
def test_what_is_in_its_place_is_replaced(tmp_path: Path, left: str) -> None:
    path, target = tmp_path / "s", tmp_path / "target"
    target.write_text("untouched")
    if left == "a file":
        path.write_text("old")
    elif left == "a link":
        path.symlink_to(target)
    else:
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
    with serving(path, said):
        assert ask(path, DEADLINE) == b'{"a": 1}'
    assert target.read_text() == "untouched"


def test_it_goes_with_its_daemon(tmp_path: Path) -> None:
    with serving(tmp_path / "s", said):
        pass
    assert list(tmp_path.iterdir()) == []


def test_it_has_gone_when_its_thread_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon ends then, and whoever closes the socket may not come to it."""
    path = tmp_path / "s"
    server = StatusSocket.open(path, said)
    assert server
    thread = threading.Thread(target=server.serve)
    remove = Path.unlink

    def remove_late(path: Path, missing_ok: bool = False) -> None:
        thread.join(0.5)
        if thread.is_alive():
            remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", remove_late)
    thread.start()
    server.close()
    thread.join(DEADLINE)
    assert not path.exists()


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    with serving(tmp_path / "s", said) as first, serving(tmp_path / "s", said):
        first.close()
        assert ask(tmp_path / "s", DEADLINE) == b'{"a": 1}'


def test_a_place_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        assert not StatusSocket.open(tmp_path / "file" / "s", said)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_path_that_is_too_long_for_a_socket_leaves_nothing_behind(tmp_path: Path) -> None:
    assert not StatusSocket.open(tmp_path / ("x" * 120), said)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_socket, "READER_TIME", 0.2)
    pieces: list[bytes] = [b"x" * (1 << 22)]
    with serving(tmp_path / "s", lambda: pieces), socket.socket(socket.AF_UNIX) as lazy:
        lazy.connect(str(tmp_path / "s"))
        lazy.recv(1)
        pieces[:] = [b"short"]
        assert ask(tmp_path / "s", DEADLINE) == b"short"


def test_readers_that_hang_up_harm_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "s", lambda: [b"x" * (1 << 20)]):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as hasty:
                hasty.connect(str(tmp_path / "s"))
        assert len(ask(tmp_path / "s", DEADLINE)) == 1 << 20


def test_a_document_that_cannot_be_made_does_not_end_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = iter([ZeroDivisionError("a bug"), None])

    def document() -> Iterator[bytes]:
        problem = next(documents)
        if problem:
            raise problem
        yield b"{}"

    with serving(tmp_path / "s", document):
        assert ask(tmp_path / "s", DEADLINE) == b""
        assert ask(tmp_path / "s", DEADLINE) == b"{}"
    assert "Cannot tell our status" in caplog.text


def test_a_daemon_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(TimeoutError):
            ask(path, 0.1)


def test_a_long_document_may_take_longer_than_a_silence(tmp_path: Path) -> None:
    def slow() -> Iterator[bytes]:
        for _ in range(30):
            time.sleep(0.05)
            yield b"x"

    with serving(tmp_path / "s", slow):
        assert ask(tmp_path / "s", 1.0) == b"x" * 30


def test_a_document_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "s", lambda: repeat(b"x")):
        monkeypatch.setattr(source, "_WHOLE_TIME", 0.2)
        with pytest.raises(TimeoutError):
            ask(tmp_path / "s", DEADLINE)


def test_a_directory_is_made_for_it(tmp_path: Path) -> None:
    with serving(tmp_path / "run" / "flannel" / "s", said):
        assert [each.name for each in (tmp_path / "run" / "flannel").iterdir()] == ["s"]


@pytest.mark.parametrize("number", [10, 40])
def test_readers_that_hang_do_not_stall_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(status_socket, "READER_TIME", 10 * DEADLINE)
    pieces = [b"x" * (1 << 20), b"y" * (1 << 20)]
    with serving(tmp_path / "s", lambda: pieces), ExitStack() as hanging:
        for _ in range(number):
            lazy = hanging.enter_context(socket.socket(socket.AF_UNIX))
            lazy.settimeout(DEADLINE)
            lazy.connect(str(tmp_path / "s"))
        assert ask(tmp_path / "s", DEADLINE) == b"".join(pieces)
