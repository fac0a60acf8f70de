"""Stages of startup: one attempt each for a dry run, as many as it takes for the daemon."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from flanneld import effects, startup
from flanneld.backends import registry
from flanneld.backends.contract import Backend
from flanneld.config import parse
from flanneld.diagnostics.observation import Observation
from flanneld.errors import Fatal, Retryable
from flanneld.model import Lease, LeaseAttrs
from flanneld.network.firewall.rules import Purpose
from flanneld.node import Node
from flanneld.options import Options, read
from flanneld.reconcile.counters import counted
from flanneld.reconcile.firewall import Firewall, FirewallSettings, firewall_settings
from flanneld.reconcile.last_run import LastRun, Machine
from flanneld.reconcile.local_node import Member
from flanneld.runtime.process import Notifier
from flanneld.runtime.supervisor import Supervisor
from flanneld.startup import Readiness, SingleAttempts
from flanneld.subnet.embedded.store import open_file, store_of
from flanneld.subnet.opening import open_store
from flanneld.subnet.store import Store
from tests.lab.etcd_v3 import V3Keys
from tests.lab.wait import wait_for
from tests.local_etcd import LocalEtcd, free_port
from tests.unit.reconcile.simulated_table import SimulatedTable

MACHINE = Machine("02:18:00:00:00:01", "4c4c4544-0042-3510-8051-b7c04f4d3232")
LEASE = Lease(LeaseAttrs(IPv4Address("192.0.2.1")), IPv4Network("10.5.7.0/24"))


def flags(etcd: LocalEtcd, directory: Path, prefix: str, *words: str) -> Options:
    where = f"-subnet-file={directory / 'subnet.env'}"
    return read([f"-etcd-endpoints={etcd.url}", f"-etcd-prefix={prefix}", "-etcd-api=v3", where, *words], {})


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/startup/{request.node.name}"


@pytest.fixture
def options(etcd: LocalEtcd, tmp_path: Path, prefix: str) -> Options:
    return flags(etcd, tmp_path, prefix)


@pytest.fixture
def manager(options: Options) -> Iterator[Store]:
    manager = open_store(options, {})
    yield manager
    manager.close()


def test_a_stage_of_a_dry_run_does_not_wait(options: Options, manager: Store) -> None:
    with pytest.raises(Retryable, match="has no network config"):
        startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))


def test_the_same_stage_waits_for_the_daemon(
    options: Options, manager: Store, keys: V3Keys, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = '{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}'

    def put_config(_reason: str) -> None:
        keys.put(f"{prefix}/config", config)

    readiness = Readiness(threading.Event(), Notifier(), tell=put_config)
    with caplog.at_level(logging.INFO):
        loaded = startup.load(options, manager, readiness, effects.dry_run(options, {}))
    assert loaded.config.backend_type == "host-gw"
    assert "Couldn't fetch network config: etcd answers, but has no network config" in caplog.text
    assert "Got the network config" in caplog.text


def test_store_is_closed_while_the_tasks_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_file(str(tmp_path / "leases.db"), create=True)
    store.create("/coreos.com/network/config", '{"Network": "10.5.0.0/16", "Backend": {"Type": "x"}}', None)
    manager, port = counted(store_of(store)), free_port()
    wanted = read([f"-subnet-file={tmp_path}/subnet.env", f"-healthz-port={port}"], {})
    answers: list[int] = []
    close = manager.close

    def closed() -> None:
        if threading.current_thread() is threading.main_thread():  # another thread closes it on a stop, too
            answers.append(wait_for(lambda: health(port), 2, "the health server"))
        close()

    monkeypatch.setattr(manager, "close", closed)
    node = Node(wanted, effects.real(wanted, {}, Supervisor(), Notifier()), manager, beside=Observation())
    with pytest.raises(Fatal, match="backend"):
        node.serve()
    assert answers == [200]
    assert not health(port)


def health(port: int) -> int:
    """Return the health server's status; 0 if nothing answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize(("kind", "is_told"), [("ipip", True), ("udp", True), ("vxlan", False)])
def test_backend_without_ipv6_in_a_dual_stack_network_is_told(
    options: Options,
    manager: Store,
    keys: V3Keys,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    is_told: bool,
) -> None:
    networks = {"Network": "10.5.0.0/16", "EnableIPv6": True, "IPv6Network": "fd00:5::/48"}
    keys.put(f"{prefix}/config", json.dumps({**networks, "Backend": {"Type": kind}}))
    with caplog.at_level(logging.INFO):
        startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))
    assert (f"{kind} carries no IPv6: no routes" in caplog.text) == is_told
    assert f"Found network config - Backend type: {kind}" in caplog.text


def test_an_unknown_backend_ends_the_load(
    options: Options, manager: Store, keys: V3Keys, prefix: str
) -> None:
    keys.put(f"{prefix}/config", '{"Network": "10.5.0.0/16", "Backend": {"Type": "pigeons"}}')
    with pytest.raises(Fatal, match='unknown backend type "pigeons"'):
        startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))


@pytest.mark.parametrize("also", [False, True])
def test_commands_of_a_config_are_refused_unless_allowed(
    etcd: LocalEtcd, keys: V3Keys, tmp_path: Path, also: bool
) -> None:
    prefix = f"/startup/commands/{also}"
    commands = {"Type": "extension", "SubnetAddCommand": "true"}
    backend = {"Type": "host-gw", "Also": commands} if also else commands
    keys.put(f"{prefix}/config", json.dumps({"Network": "10.5.0.0/16", "Backend": backend}))
    options = flags(etcd, tmp_path, prefix, "-allow-extension=false")
    manager = open_store(options, {})
    with pytest.raises(Fatal, match="would run commands here as root; -allow-extension lets it"):
        startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))
    manager.close()
    options = flags(etcd, tmp_path, prefix)
    manager = open_store(options, {})
    startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))
    manager.close()


@pytest.mark.parametrize(("wait", "failure"), [("0", Fatal), ("3600", Retryable)])
def test_a_missing_uplink_may_be_waited_out_as_long_as_iface_wait_says(
    etcd: LocalEtcd, keys: V3Keys, tmp_path: Path, wait: str, failure: type[Exception]
) -> None:
    prefix = f"/startup/uplink/{wait}"
    keys.put(f"{prefix}/config", '{"Network": "10.5.0.0/16"}')
    options = flags(etcd, tmp_path, prefix, "-iface=none0", f"-iface-wait={wait}")
    manager = open_store(options, {})
    loaded = startup.load(options, manager, SingleAttempts(), effects.dry_run(options, {}))
    with pytest.raises(failure, match="found no external interface"):
        startup.elect(loaded, SingleAttempts())
    manager.close()


def test_a_dry_run_does_not_write_the_state_file(tmp_path: Path) -> None:
    subnet_file = tmp_path / "subnet.env"
    dry = LastRun(subnet_file, is_dry_run=True)
    dry.joined(MACHINE, "etcd", LEASE)
    dry.lease_written(LEASE)
    dry.try_again()
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_claims_the_lease_that_the_daemon_would(tmp_path: Path) -> None:
    subnet_file = tmp_path / "subnet.env"
    LastRun(subnet_file).joined(MACHINE, "etcd", LEASE)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    claimed = LastRun(subnet_file, is_dry_run=True).claim(MACHINE, "etcd", LEASE.key)
    assert claimed == Lease(LEASE.attrs, *LEASE.key)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert LastRun(subnet_file).claim(MACHINE, "etcd", LEASE.key) == claimed


def test_start_that_fails_behind_the_packet_filter_leaves_none_of_its_sockets_open(manager: Store) -> None:
    rules, wanted = SimulatedTable("rules"), Options()

    class Failing(Node):
        def join(self, *_: object) -> Member:
            raise Fatal("refused", "none")

    node = Failing(wanted, effects.dry_run(wanted, {}), counted(manager))
    settings = FirewallSettings((), (), Purpose(masquerade=True, forward=True, random=True))
    node.firewall = Firewall(settings, stop=node.tasks.stop, make_loop=node.make_loop)
    node.firewall.use([rules])
    with pytest.raises(Fatal):
        node.serve()
    assert rules.closed == [False]


@pytest.mark.parametrize(
    ("backend", "guards"),
    [
        ({"Type": "vxlan", "Port": 4789}, (4789,)),
        ({"Type": "ipip"}, (0,)),
        ({"Type": "host-gw"}, ()),
        ({"Type": "wireguard"}, ()),
        ({"Type": "wireguard", "Also": {"Type": "vxlan"}}, (8472,)),
    ],
)
def test_guard_is_claimed_where_there_is_a_tunnel_to_guard(
    backend: dict[str, object], guards: tuple[int, ...]
) -> None:
    config = parse(json.dumps({"Network": "10.5.0.0/16", "Backend": backend}))
    assert registry.clear_ports(config) == guards
    made = cast("Backend", SimpleNamespace(claims=tuple))
    assert ("flannel-guard" in startup.claims_to(config, made, guards=True)) is bool(guards)
    wanted = read(["-guard-tunnel"], {})
    assert firewall_settings(wanted, config, (None, None), ()).guards is bool(guards)
