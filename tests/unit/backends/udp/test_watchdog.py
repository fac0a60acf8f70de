"""When a pump that says nothing is taken for one that hangs, and what is done about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flanneld.backends.udp import client as client_module
from flanneld.backends.udp import control
from flanneld.backends.udp.client import NoProxy, ProxyClient, ProxySilent
from flanneld.backends.udp.tables import PERIOD, Activity, ProxyTable, ProxyWatchdog, activity, verdict
from flanneld.state.table import Scope
from tests.clock import Clock

#: Listens under the name that it is given, says so, and does nothing more.
MUTE = """
import signal, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("there", flush=True)
signal.pause()
"""


def looks(*seen: tuple[str, float]) -> list[Activity]:
    return [Activity(at, states, cpu) for at, (states, cpu) in enumerate(seen)]


def test_proxy_idle_for_five_seconds_hangs() -> None:
    assert verdict(5, looks(*[("SS", 1.0)] * 3)) == "does nothing"
    assert verdict(5, looks(*[("TT", 1.0)] * 3)) == "is stopped"
    assert verdict(5, looks(("SS", 1.0), ("SS", 1.0), ("TT", 1.0))) == "is stopped"
    assert verdict(4.9, looks(*[("TT", 1.0)] * 9)) == ""


def test_proxy_with_few_samples_is_not_judged() -> None:
    """Host and daemon may have slept themselves."""
    assert verdict(4000, looks(("SS", 1.0), ("SS", 1.0))) == ""


@pytest.mark.parametrize("states", ["RS", "SR", "DS", "DD"])
def test_proxy_waiting_for_cpu_or_disk_is_slow(states: str) -> None:
    assert verdict(600, looks(*[(states, 1.0)] * 600)) == ""


def test_proxy_runnable_in_a_recent_sample_is_slow() -> None:
    assert verdict(9, looks(("SS", 1.0), ("SR", 1.0), ("SS", 1.0))) == ""


def test_proxy_silent_while_running_for_fifteen_seconds_hangs() -> None:
    running = looks(*[("SR", at * 0.9) for at in range(16)])
    assert verdict(15, running) == "does other things"
    assert verdict(14, running[:14]) == ""
    assert verdict(15, looks(*[("SR", 100 + at * 0.4) for at in range(16)])) == ""
    assert verdict(15, looks(*[("SR" if at % 2 else "SS", at * 0.1) for at in range(16)])) == ""


def test_proxy_silent_between_sleeps_hangs() -> None:
    assert verdict(15, looks(*[("SS", at * 0.1) for at in range(16)])) == "does other things"


def test_a_process_is_seen_with_all_its_threads() -> None:
    seen = activity(os.getpid(), 7.0)
    assert seen.at == 7
    assert "R" in seen.states  # We run now.
    assert not seen.sleeps
    assert seen.cpu > 0


@contextmanager
def mute(name: str) -> Iterator[subprocess.Popen[str]]:
    address = control.address_of(name)[1:]
    command = [sys.executable, "-c", MUTE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_pump_that_is_stopped_is_ended(daemon_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    name = f"test{os.getpid()}.stopped"
    watchdog = ProxyWatchdog(name)
    assert watchdog.next_look == daemon_clock.time + PERIOD
    with mute(name) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        began = daemon_clock.time
        while not watchdog.look():
            assert process.poll() is None
            assert daemon_clock.time < began + 30
            daemon_clock.time = watchdog.next_look
        assert process.wait(20) == -signal.SIGKILL
        assert daemon_clock.time - began == 5
        assert caplog.messages == [
            f"Killed the udp proxy of {name}, process {process.pid}: no answer for 5 s, and is stopped"
        ]
    watchdog.close()


def test_a_pump_that_answers_is_asked_again_and_its_end_is_noticed(daemon_clock: Clock) -> None:
    name = f"test{os.getpid()}.well"
    watchdog = ProxyWatchdog(name)
    with control.listen(name) as listener:
        assert not watchdog.look()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(20)
            for _ in range(20):
                assert connection.recv(control.LONGEST) == control.HELLO
                connection.send(control.HELLO + b"whatever")
                daemon_clock.time = watchdog.next_look
                assert not watchdog.look()
            assert daemon_clock.time >= 1000 + 20 * PERIOD
    assert watchdog.look()
    assert not watchdog.look()  # There is none any more.
    watchdog.close()


def test_a_pump_that_does_not_answer_is_silent_and_ended_by_its_successor(
    monkeypatch: pytest.MonkeyPatch, daemon_clock: Clock
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_PATIENCE", 0.1)
    name = f"test{os.getpid()}.silent"
    client = ProxyClient(name)
    with mute(name) as process:
        with pytest.raises(ProxySilent, match=f"no udp proxy for {name}: it does not answer"):
            client.hello()
        table = ProxyTable(client)
        for passed, is_due in ((PERIOD - 1, False), (1.0, True)):
            due, daemon_clock.time = table.next_look, daemon_clock.time + passed
            with pytest.raises(ProxySilent):
                list(table.read(Scope({})))
            assert table.next_look == (daemon_clock.time + PERIOD if is_due else due)
        assert process.poll() is None
        client.leave(device_stays=True)
        assert process.wait(20) == -signal.SIGKILL
    assert client.fileno() < 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the process has ended"),
        (control.END_REASON + b"worn out", "worn out"),
        (control.LIST + b"x", "multiple of"),
    ],
    ids=["nothing", "its reason", "nonsense"],
)
def test_peers_of_a_pump_that_ends_meanwhile_cannot_be_known(answer: bytes, reason: str) -> None:
    name = f"test{os.getpid()}.ending"
    with control.listen(name) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                if answer:
                    connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = ProxyClient(name)
        with pytest.raises(NoProxy, match=f"no udp proxy for {name}: .*({reason})"):
            client.peers()
        thread.join()
        assert client.fileno() < 0
