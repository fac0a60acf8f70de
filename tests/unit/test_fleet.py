"""Networks of one daemon: what only one can have, which are wanted, and how a fault of one ends."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from flanneld import fleet as network_module
from flanneld.backends import registry
from flanneld.backends.contract import Backend, Host
from flanneld.config import Config, parse
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.fleet import Claims, Fleet, Network
from flanneld.model import Uplink
from flanneld.network_names import Choice
from flanneld.options import Options
from flanneld.runtime import process
from flanneld.runtime.process import HostClaims, Notifier
from flanneld.runtime.supervisor import Supervisor
from flanneld.runtime.waits import Backoff
from flanneld.startup import clash
from tests.clock import Clock
from tests.lab.wait import wait_for

ADDRESS = IPv4Address("192.0.2.1")


def config(network: str, kind: str, **options: Any) -> Config:
    return parse(json.dumps({"Network": network, "Backend": {"Type": kind, **options}}))


def backend(wanted: Config) -> Backend:
    uplink = Uplink("eth0", 2, 1500, ADDRESS, ADDRESS)
    host = Host(uplink=uplink, stored=None, mac_of=lambda _: None, link_to=lambda _: None, random_bytes=bytes)
    return registry.load(wanted.backend_type)(wanted, host)


@pytest.mark.parametrize(
    ("kind", "options", "claims"),
    [
        ("vxlan", {}, ("VNI 1",)),
        ("vxlan", {"VNI": 9}, ("VNI 9",)),
        ("udp", {"Port": 8286}, ("UDP port 8286",)),
        ("ipip", {}, ("device flannel.ipip",)),
        ("wireguard", {}, ("device flannel-wg",)),
        ("host-gw", {}, ()),
        ("alloc", {}, ()),
    ],
)
def test_backend_says_what_only_one_network_can_have(
    kind: str, options: dict[str, Any], claims: tuple[str, ...]
) -> None:
    assert tuple(backend(config("10.5.0.0/16", kind, **options)).claims()) == claims


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[Claims]:
    """Claims under names of their own: other tests run in this network namespace."""
    monkeypatch.setattr(process, "CLAIM_PREFIX", f"flanneld-test-{os.getpid()}/")
    claims = Claims()
    yield claims
    for name in ("red", "pink", "green"):
        claims.release(name)


def take(claims: Claims, name: str, wanted: Config) -> None:
    claims.take(name, wanted, backend(wanted))


def test_second_network_with_a_vni_is_refused_by_name_until_the_first_has_gone(claims: Claims) -> None:
    red, pink = config("10.5.0.0/16", "vxlan"), config("10.6.0.0/16", "vxlan")
    take(claims, "red", red)
    take(claims, "red", red)
    with pytest.raises(Retryable, match="it wants VNI 1, which the network red has; give each"):
        take(claims, "pink", pink)
    take(claims, "green", config("10.6.0.0/16", "vxlan", VNI=2))
    claims.release("red")
    claims.release("green")
    take(claims, "pink", pink)


def test_overlapping_ranges_are_refused_by_name(claims: Claims) -> None:
    take(claims, "red", config("10.5.0.0/16", "host-gw"))
    with pytest.raises(
        Retryable, match=r"range 10\.5\.128\.0/17 overlaps the range 10\.5\.0\.0/16 of the network red"
    ):
        take(claims, "pink", config("10.5.128.0/17", "host-gw"))


def test_network_of_another_process_is_refused_until_it_has_gone(claims: Claims) -> None:
    wanted = config("10.5.0.0/16", "vxlan")
    other = HostClaims()
    other.take(("range 10.5.4.0/22",), clash)
    with pytest.raises(
        Retryable, match=f"another flanneld, process {os.getpid()}, has range 10.5.4.0/22; stop"
    ):
        take(claims, "red", wanted)
    take(claims, "green", config("10.6.0.0/16", "vxlan"))
    claims.release("green")
    other.close()
    take(claims, "red", wanted)
    with pytest.raises(Retryable, match="has VNI 1"):
        other.take(("VNI 1",), clash)


def test_network_that_has_gone_leaves_nothing_to_drain(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[HostClaims] = []
    monkeypatch.setattr(HostClaims, "drain", lambda each: drained.append(each))
    take(claims, "red", config("10.5.0.0/16", "vxlan"))
    claims.drain()
    assert len(drained) == 1
    claims.release("red")
    claims.drain()
    assert len(drained) == 1


class SlowManager(Notifier):
    """Service manager that reads the first status only after another network has come up, if it can."""

    def __init__(self, come_up: Callable[[], None]) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.other = threading.Thread(target=come_up)

    def status(self, text: str) -> None:
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.2)
        self.heard.append(text.partition(";")[0])

    def ready(self) -> None:
        self.heard.append("READY")


def test_networks_that_come_up_at_once_are_reported_in_order_and_ready_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "run", lambda _: None)
    networks: dict[str, Network] = {}
    manager = SlowManager(lambda: networks["blue"].notifier.ready())
    options = Options(networks=("red", "blue"), subnet_dir=str(tmp_path))
    fleet = Fleet(options, {}, Supervisor(), manager, None, str)
    make = fleet._network
    monkeypatch.setattr(fleet, "_network", lambda name: networks.setdefault(name, make(name)))
    monkeypatch.setattr(manager, "status", lambda _: None)
    fleet.start()
    monkeypatch.undo()
    networks["red"].notifier.ready()
    manager.other.join()
    states = [line for line in manager.heard if line != "READY"]
    assert states == ["1 of 2 networks are up", "2 of 2 networks are up"]
    assert manager.heard.count("READY") == 1


class Ears(Notifier):
    """Service manager that remembers what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def status(self, text: str) -> None:
        self.heard.append(text)

    def ready(self) -> None:
        self.heard.append("READY")


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Network]:
    """The networks that have been started, by name; they serve nothing."""
    started: dict[str, Network] = {}
    monkeypatch.setattr(Network, "run", lambda each: started.__setitem__(each.name, each))
    return started


def test_daemon_is_ready_once_one_network_is_up_and_each_other_has_said_why_it_is_not(
    tmp_path: Path, networks: dict[str, Network], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    manager, options = Ears(), Options(networks=("blue", "green", "red"), subnet_dir=str(tmp_path))
    fleet = Fleet(options, {}, Supervisor(), manager, None, lambda: "# more\n")
    assert fleet.missing() == ["the names of the networks are not known yet"]
    fleet.start()
    wait_for(lambda: len(networks) == 3)
    assert fleet.missing() == [f"network {name}: not up yet" for name in ("blue", "green", "red")]
    networks["blue"].problem = "unknown backend"
    networks["green"].notifier.status("starting")
    networks["red"].notifier.ready()
    assert "READY" not in manager.heard
    networks["green"].notifier.status("waiting for the store: silent")
    missing = ["network blue: unknown backend", "network green: waiting for the store: silent"]
    assert manager.heard[-2:] == [f"1 of 3 networks are up; {'; '.join(missing)}", "READY"]
    assert caplog.messages[-1] == "Ready: red"
    assert fleet.missing() == missing
    assert fleet.metrics("")[2].decode().splitlines() == [
        "# TYPE flannel_network_up gauge",
        'flannel_network_up{network="blue"} 0',
        'flannel_network_up{network="green"} 0',
        'flannel_network_up{network="red"} 1',
        "# more",
    ]
    networks["red"].notifier.stopping()
    networks["blue"].notifier.status("starting")
    assert manager.heard[-1].startswith("0 of 3 networks are up; ")
    assert manager.heard.count("READY") == 1


def test_daemon_is_not_ready_while_each_network_only_says_why_it_is_not_up(
    tmp_path: Path, networks: dict[str, Network]
) -> None:
    manager = Ears()
    Fleet(Options(networks=("red",), subnet_dir=str(tmp_path)), {}, Supervisor(), manager, None, str).start()
    wait_for(lambda: networks)
    networks["red"].notifier.status("waiting for the store: silent")
    assert "READY" not in manager.heard


def test_task_that_is_overdue_is_told_with_the_name_of_its_network(
    tmp_path: Path, networks: dict[str, Network], clock: Clock
) -> None:
    supervisor = Supervisor(clock=clock)
    fleet = Fleet(Options(networks=("red",), subnet_dir=str(tmp_path)), {}, supervisor, Ears(), None, str)
    fleet.start()
    wait_for(lambda: networks)
    networks["red"].supervisor = Supervisor(clock=clock)
    networks["red"].supervisor.heartbeat("reconciler", 10.0)
    supervisor.heartbeat("network names", 20.0)
    for told in ([], ["network red: reconciler"], ["network names", "network red: reconciler"]):
        assert [line.partition(" has ")[0] for line in fleet.overdue()] == told
        clock.time += 11.0


def test_threads_of_many_networks_keep_the_interpreter_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "run", lambda _: None)
    intervals: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    for count in (1, 50):
        options = Options(networks=tuple(f"net{number}" for number in range(count)), subnet_dir=str(tmp_path))
        Fleet(options, {}, Supervisor(), Notifier(), None, str).start()
    assert intervals == pytest.approx([0.0004, 0.02])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("VNI 1", "VNI 1", True),
        ("VNI 1", "VNI 11", False),
        ("range 10.5.0.0/16", "range 10.5.7.0/24", True),
        ("range 10.5.0.0/16", "range 10.6.0.0/16", False),
        ("range 10.5.0.0/16", "range fd00::/48", False),
        ("range 10.5.0.0/16", "range of a stranger", False),
    ],
)
def test_equal_claims_and_overlapping_ranges_clash(one: str, other: str, *, expected: bool) -> None:
    assert clash(one, other) is clash(other, one) is expected


def test_names_that_are_not_allowed_or_no_file_names_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = Choice(("red", "blue"), most=1)
    names = ["blue", "green", "../etc", "red"]
    assert choice.of(names) == choice.of(names) == ["blue", "red"]
    assert Choice((), most=9).of(names) == ["blue", "green", "red"]
    assert [record.getMessage() for record in caplog.records if "green" in record.getMessage()] == [
        'Network "green" is not allowed; -networks lists those that are'
    ]
    assert sum("../etc" in record.getMessage() for record in caplog.records) == 2


def test_networks_served_before_come_first_and_one_too_many_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = Choice((), most=2)
    assert choice.of(["green", "red"]) == ["green", "red"]
    assert choice.of(["blue", "green", "red"]) == choice.of(["blue", "red", "green"]) == ["green", "red"]
    assert caplog.messages == ["Ignoring the network blue: -max-networks is 2"]
    assert choice.of(["blue", "red"]) == ["red", "blue"]


class Faulty:
    """Serves a network and fails as often as wanted."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.serves = threading.Event()

    def __call__(self, network: Network) -> None:
        if self.failures:
            raise self.failures.pop(0)
        network.notifier.ready()
        self.serves.set()
        network.supervisor.stop.wait(60)


def test_network_is_served_again_after_each_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network_module, "Backoff", lambda **_: Backoff(first=0.01, longest=0.01))
    serve = Faulty(Fatal("unknown backend", "name another"), ValueError("odd"), KeyError(), Cancelled())
    states: list[str] = []
    network = Network("red", tmp_path / "red.env", serve, lambda: states.append(network.missing))
    with caplog.at_level(logging.ERROR):
        thread = threading.Thread(target=network.run)
        thread.start()
        assert serve.serves.wait(30)
        wait_for(lambda: network.missing == "", what="the network to be up")
        network.stop()
        thread.join(30)
    assert network.has_ended
    assert states[:4] == [
        f"network red: {reason}"
        for reason in ("unknown backend; name another", "odd", "KeyError", "not up yet")
    ]
    told = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    assert told == [
        ("Network red: unknown backend; name another", False),
        ("Network red failed", True),
        ("Network red failed", True),
    ]


def test_task_of_a_network_that_fails_is_its_problem(tmp_path: Path) -> None:
    def serve(network: Network) -> None:
        network.supervisor.failure = Fatal("no memory", "add some")
        network.stop()

    network = Network("red", tmp_path / "red.env", serve, lambda: None)
    network.run()
    assert network.missing == "network red: no memory; add some"
    assert network.is_settled


def test_network_that_fails_while_it_is_up_starts_anew_and_its_end_leaves_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network_module, "Backoff", lambda **_: Backoff(first=0.01, longest=0.01))
    served: list[Supervisor] = []

    def serve(network: Network) -> None:
        served.append(network.supervisor)
        if len(served) == 1:
            network.notifier.ready()
            raise Fatal("the store has gone")
        network.stop()

    states: list[tuple[str, bool]] = []
    network = Network(
        "red", tmp_path / "red.env", serve, lambda: states.append((network.missing, network.has_ended))
    )
    with caplog.at_level(logging.INFO):
        network.run()
    down = "network red: not up yet"
    assert states == [("", False), ("network red: the store has gone", False), (down, False), (down, True)]
    assert served[0] is not served[1]
    assert not any("Removing" in message for message in caplog.messages)
