"""Notifications, received on a real socket."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.runtime import process
from flanneld.runtime.process import Notifier, watchdog_interval
from tests.lab.wait import wait_for


def receiver(address: str) -> socket.socket:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.settimeout(60)
    return manager


def received(manager: socket.socket) -> str:
    return manager.recv(8192).decode()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with receiver(address) as listening:
        yield listening


def test_every_message_is_what_systemd_documents(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready()
    notifier.status("3 peers")
    notifier.watchdog()
    notifier.stopping()
    assert [received(manager) for _ in range(4)] == ["READY=1", "STATUS=3 peers", "WATCHDOG=1", "STOPPING=1"]


def test_an_abstract_socket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"flanneld-test-{uuid.uuid4()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with receiver(f"\0{name}") as manager:
        Notifier().ready()
        assert received(manager) == "READY=1"


def test_the_environment_is_kept_for_children(manager: socket.socket) -> None:
    before = dict(os.environ)
    Notifier().ready()
    assert received(manager) == "READY=1"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("café → 10.1.0.0/16", r"STATUS=caf\xe9 \u2192 10.1.0.0/16"),
        ("broken \udcff name", r"STATUS=broken \udcff name"),
        ("one\nREADY=1\n", "STATUS=one READY=1"),
        ("nul\0bell\a", r"STATUS=nul\x00bell\x07"),
    ],
)
def test_any_text_becomes_one_line_of_ascii(manager: socket.socket, text: str, line: str) -> None:
    Notifier().status(text)
    assert received(manager) == line


def test_a_long_status_is_cut_to_what_systemd_takes(manager: socket.socket) -> None:
    Notifier().status("x" * 100_000)
    assert 1000 <= len(received(manager)) < 4096


def test_missing_service_manager_is_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier().ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    Notifier().ready()
    assert caplog.records == []


def test_the_library_is_not_imported_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    program = (
        "import sys, flanneld.runtime.process as n; n.Notifier().ready(); print('sdnotify' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize("address", ["/nonexistent/notify", "/" + "x" * 200, "vsock:2:1234"])
def test_a_lost_message_is_logged_once_and_hurts_nobody(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notifier()
    notifier.ready()
    notifier.watchdog()
    (message,) = caplog.messages
    assert "READY=1" in message
    assert address in message


def test_a_service_manager_that_comes_back_hears_us_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    notifier = Notifier()
    with receiver(str(address)):
        notifier.ready()
    address.unlink()
    with receiver(str(address)) as again:
        notifier.watchdog()
        assert received(again) == "WATCHDOG=1"


def test_lost_readiness_is_sent_again_until_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    notifier = Notifier()
    notifier.try_again()
    notifier.ready()
    notifier.try_again()
    with receiver(str(address)) as manager:
        notifier.try_again()
        notifier.try_again()
        notifier.watchdog()
        assert [received(manager) for _ in range(2)] == ["READY=1", "WATCHDOG=1"]


def test_lost_readiness_of_a_lease_server_is_sent_again(tmp_path: Path) -> None:
    address, log = tmp_path / "notify", tmp_path / "log"
    flags = ["-serve-only", "-listen=127.0.0.1:0", f"-store={tmp_path / 'leases.db'}"]
    command = [sys.executable, "-m", "flanneld", *flags, '-network={"Network":"10.5.0.0/16"}']
    environ = os.environ | {"NOTIFY_SOCKET": str(address)}
    with log.open("wb") as file, subprocess.Popen(command, env=environ, stderr=file) as server:
        try:
            wait_for(lambda: "cannot send" in log.read_text(), what="a lost message")
            with receiver(str(address)) as manager:
                assert received(manager) == "READY=1"
        finally:
            server.terminate()


def test_a_service_manager_that_does_not_read_does_not_hold_us_up(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "SEND_TIME", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stuffing:
        stuffing.setblocking(False)
        stuffing.connect(manager.getsockname())
        with contextlib.suppress(BlockingIOError):
            while stuffing.send(b"x" * 1000):
                continue
        begun = time.monotonic()
        Notifier().watchdog()
    assert time.monotonic() - begun >= 0.05
    assert "timed out" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_interval(environ) == seconds


@pytest.mark.parametrize("usec", ["0", "-1", "1e6", "1_000", "soon", "٣", "9" * 5000])
def test_a_senseless_watchdog_time_is_logged_and_means_none(
    usec: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert watchdog_interval({"WATCHDOG_USEC": usec}) is None
    assert "WATCHDOG_USEC" in caplog.text


def test_the_longest_watchdog_time_can_be_waited_for() -> None:
    seconds = watchdog_interval({"WATCHDOG_USEC": str(2**64 - 1)})
    assert seconds is not None
    assert threading.Lock().acquire(timeout=seconds)
