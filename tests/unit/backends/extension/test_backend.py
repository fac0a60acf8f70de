"""The extension backend's decisions: what runs, with which variables, and what nodes announce."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from flanneld.backends import registry
from flanneld.backends.contract import ExitPolicy, Host, HostServices, OtherBackend
from flanneld.backends.extension.backend import (
    PEERS,
    STARTUP,
    ConfigCommand,
    ConfigCommandFailed,
    ConfigCommands,
    Extension,
    PeerSetup,
    Startup,
    expanded,
    told,
)
from flanneld.compat.glog import V
from flanneld.config import parse
from flanneld.errors import Fatal, Refused, Retryable
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.reconcile.local_node import services_of_dry_run
from flanneld.runtime.command import CommandRunner
from flanneld.state.table import Put, Scope, Table

OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"), IPv6Network("fd00:0:0:5::/64"))
THEIRS = IPv4Address("192.168.0.6"), IPv6Address("fd77::6")
SUBNETS = IPv4Network("10.1.6.0/24"), IPv6Network("fd00:0:0:6::/64")
ADD = ConfigCommand("SubnetAddCommand", "env; cat")


def commands(limit: float = 10.0) -> ConfigCommands:
    return ConfigCommands(CommandRunner(threading.Event()).run, limit)


def made(
    backend: dict[str, Any] | None = None,
    *,
    ipv6: bool = False,
    identity: str | None = None,
    stored: LeaseAttrs | None = None,
    services: HostServices | None = None,
) -> Extension:
    networks = {"Network": "10.1.0.0/16", "EnableIPv6": ipv6, "IPv6Network": "fd00::/48"}
    config = parse(json.dumps({**networks, "Backend": {"Type": "extension", **(backend or {})}}))
    v6 = IPv6Address("fd77::5") if ipv6 else None
    uplink = Uplink("eth0", 2, 1500, IPv4Address("192.168.0.5"), IPv4Address("203.0.113.5"), v6, v6)
    services = services or HostServices(run=CommandRunner(threading.Event()).run)
    return Extension(config, host(uplink, stored, identity, services))


def host(uplink: Uplink, stored: LeaseAttrs | None, identity: str | None, services: HostServices) -> Host:
    def nothing(_: object) -> None:
        return None

    return Host(uplink, stored, nothing, nothing, bytes, identity=identity, **asdict(services))


def peer(
    data: Any = "key", backend_type: str = "extension", public_ip: IPv4Address | None = THEIRS[0]
) -> Lease:
    return Lease(LeaseAttrs(public_ip, THEIRS[1], backend_type, data), *SUBNETS)


def test_it_is_built_in() -> None:
    assert registry.load("Extension") is Extension


def test_the_lease_has_what_prestartupcommand_wrote() -> None:
    backend = made({"PreStartupCommand": "echo ' 4e:2d '; echo more >&2"})
    assert backend.identity() == "4e:2d \nmore"
    attrs = made(identity="4e:2d").attributes()
    assert attrs == LeaseAttrs(IPv4Address("203.0.113.5"), None, "extension", "4e:2d")
    assert made().identity() is None
    assert made().attributes().backend_data is None


def test_prestartupcommand_has_an_empty_environment_and_a_line_feed_as_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    output = made({"PreStartupCommand": "env | grep -v -e ^PWD -e ^SHLVL -e ^_; od -c | head -1"}).identity()
    assert output is not None
    assert output.split() == ["0000000", r"\n"]


def test_a_start_fails_if_prestartupcommand_does() -> None:
    with pytest.raises(Fatal, match="PreStartupCommand exited with status 3; it wrote: no key") as failure:
        made({"PreStartupCommand": "echo no; echo key >&2; exit 3  # PSK=secret"}).identity()
    assert "secret" not in str(failure.value)


def test_a_start_waits_if_prestartupcommand_hangs() -> None:
    with pytest.raises(Retryable, match="PreStartupCommand did not end within 1 s") as failure:
        made({"PreStartupCommand": "sleep 60  # PSK=secret", "TimeLimitSeconds": 1}).identity()
    assert "secret" not in str(failure.value)


def test_a_start_fails_if_prestartupcommand_writes_too_much() -> None:
    with pytest.raises(Fatal, match="PreStartupCommand writes 20000 characters"):
        made({"PreStartupCommand": "printf %020000d 7"}).identity()


def test_a_dry_run_announces_what_the_lease_has_and_runs_nothing(tmp_path: Path) -> None:
    services = services_of_dry_run(str(tmp_path), {})
    pre = {"PreStartupCommand": f"touch {tmp_path / 'ran'}"}
    stored = LeaseAttrs(backend_type="extension", backend_data="4e:2d")
    assert made(pre, stored=stored, services=services).identity() == "4e:2d"
    assert made(pre, services=services).identity() == ""
    assert not (tmp_path / "ran").exists()


def test_a_peer_is_told_by_subnet_public_ip_and_data() -> None:
    (setup,) = made().peer(OWN, peer())
    assert setup == PeerSetup(SUBNETS[0], None, THEIRS[0], None, "key")
    assert setup.variables() == {"SUBNET": "10.1.6.0/24", "PUBLIC_IP": "192.168.0.6"}
    assert str(setup) == "extension peer 10.1.6.0/24 at 192.168.0.6"
    assert setup.subnet == SUBNETS[0]


def test_a_peer_of_both_families_is_one_setup() -> None:
    (setup,) = made(ipv6=True).peer(OWN, peer())
    assert isinstance(setup, PeerSetup)
    assert setup.variables() == {
        "SUBNET": "10.1.6.0/24",
        "PUBLIC_IP": "192.168.0.6",
        "IPV6SUBNET": "fd00:0:0:6::/64",
        "PUBLIC_IPV6": "fd77::6",
    }


def test_a_peer_without_data_gives_empty_input() -> None:
    (setup,) = made().peer(OWN, peer(None))
    assert isinstance(setup, PeerSetup)
    assert setup.data == ""


@pytest.mark.parametrize("data", [7, {"VtepMAC": "4e:2d"}, ["key"], True])
def test_data_that_are_no_string_are_refused(data: Any) -> None:
    with pytest.raises(Refused, match="BackendData that is no JSON string"):
        list(made().peer(OWN, peer(data)))


def test_a_lease_of_another_backend_is_left_alone() -> None:
    with pytest.raises(OtherBackend):
        list(made().peer(OWN, peer(backend_type="vxlan")))


def test_a_lease_with_our_public_ip_is_refused() -> None:
    with pytest.raises(Refused, match="our own public IP"):
        list(made().peer(OWN, peer(public_ip=IPv4Address("203.0.113.5"))))


def test_startup_has_the_network_and_our_lease() -> None:
    (ours,) = made({"PostStartupCommand": "true"}).local(OWN)
    assert isinstance(ours, Startup)
    assert ours.variables()["NETWORK"] == "10.1.0.0/16"
    assert (ours.variables()["SUBNET"], ours.variables()["PUBLIC_IP"]) == ("10.1.5.0/24", "203.0.113.5")
    assert not list(made().local(OWN))


def test_only_a_shutdowncommand_undoes_something_at_the_end() -> None:
    assert made().exit_policy is ExitPolicy.KEEP
    assert made({"ShutdownCommand": "true"}).exit_policy is ExitPolicy.REMOVE


@pytest.mark.parametrize("types", [("extension", "host-gw"), ("host-gw", "extension")])
def test_no_other_backend_runs_beside_its_commands(types: tuple[str, str]) -> None:
    backend = {"Type": types[0], "Also": {"Type": types[1]}}
    config = parse(json.dumps({"Network": "10.1.0.0/16", "Backend": backend}))
    address = IPv4Address("192.168.0.5")
    uplink = Uplink("eth0", 2, 1500, address, address)
    with pytest.raises(Fatal, match="extension cannot run beside another one"):
        registry.factory_for(config)(config, host(uplink, None, None, HostServices()))


ADDS = {"SubnetAddCommand": "true"}


def peers_of(tmp_path: Path, boot: str, key: str, options: dict[str, Any]) -> Table:
    """Return the table of peers of a run in this directory."""
    run = CommandRunner(threading.Event()).run
    services = HostServices(run=run, boot_id=lambda: boot, beside=lambda suffix: tmp_path / f"fl.{suffix}")
    startup, peers = made(ADDS | options, identity=key, services=services).tables()
    assert (startup.name, peers.name, peers.needs) == (STARTUP, PEERS, frozenset({STARTUP}))
    return peers


@pytest.mark.parametrize(
    ("boot", "key", "options", "stands"),
    [
        ("one", "key", {}, True),
        ("one", "key", {"SubnetRemoveCommand": "true", "CheckCommand": "true"}, True),
        ("other", "key", {}, False),
        ("one", "other", {}, False),
        ("one", "key", {"SubnetAddCommand": "echo"}, False),
        ("one", "key", {"Shell": False}, False),
        ("one", "key", {"PostStartupCommand": "true"}, False),
        ("one", "key", {"ShutdownCommand": "true"}, False),
    ],
    ids=[
        "the same", "other commands", "another boot", "another key", "another SubnetAddCommand",
        "without a shell", "PostStartupCommand", "ShutdownCommand",
    ],
)  # fmt: skip
def test_setups_of_an_earlier_run_stand_if_nothing_has_changed_beneath_them(
    tmp_path: Path, boot: str, key: str, options: dict[str, Any], stands: bool
) -> None:
    (setup,) = made().peer(OWN, peer())
    assert isinstance(setup, PeerSetup)
    peers_of(tmp_path, "one", "key", {}).put([Put(setup)])
    assert (tmp_path / "fl.extension").exists()
    (found,) = peers_of(tmp_path, boot, key, options).read(Scope({}))
    assert found.resource == replace(setup, stands=stands)


@pytest.mark.parametrize("seconds", [1, 20])
def test_the_shortest_and_the_longest_time_limit_are_taken(seconds: int) -> None:
    made({"TimeLimitSeconds": seconds})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"SubnetAddCommand": ["ip", "route"]}, "Backend.SubnetAddCommand must be a string"),
        ({"Shell": "no"}, "Backend.Shell must be true or false"),
        ({"TimeLimitSeconds": 0}, "Backend.TimeLimitSeconds is 0; set it to a number from 1 to 20"),
        ({"TimeLimitSeconds": 21}, "Backend.TimeLimitSeconds is 21"),
        ({"CheckCommand": "a\0b"}, "zero byte"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(Fatal, match=problem):
        made(options)


def test_a_command_gets_just_its_variables_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    output = commands().run(ADD, {"SUBNET": "10.1.6.0/24"}, "data")
    lines = [line for line in output.splitlines() if not line.startswith(("PWD=", "SHLVL=", "_="))]
    assert lines == ["SUBNET=10.1.6.0/24", "data"]


def test_without_a_shell_words_are_expanded_and_run_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")
    command = ConfigCommand("SubnetAddCommand", "echo $SUBNET;  ${COLOUR}x $NONE| 'a b'", shell=False)
    assert commands().run(command, {"SUBNET": "10.1.6.0/24"}) == "10.1.6.0/24; redx | 'a b'"
    output = commands().run(ConfigCommand("SubnetAddCommand", "env", shell=False), {"SUBNET": "10.1.6.0/24"})
    assert {"COLOUR=red", "SUBNET=10.1.6.0/24"} <= set(output.splitlines())


def test_variables_are_expanded_as_go_does() -> None:
    assert expanded("a$A-${A}${B} $ $$ 5$1", {"A": "x y"}) == ["ax y-x y", "$", "", "5"]


def test_output_is_bounded_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    commands().run(
        ConfigCommand("SubnetAddCommand", "echo a; echo b; printf '\\033[1m%0900d' 7"), {}, "", "a peer"
    )
    (line,) = caplog.messages
    assert line.startswith("Ran SubnetAddCommand for a peer: a b ?[1m000")
    assert len(line) < 600
    assert told("x" * 500) == "x" * 500
    assert told("x" * 501) == "x" * 500 + "..."


def test_a_command_that_says_nothing_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    commands().run(ConfigCommand("SubnetAddCommand", "true"), {})
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true", "Ran SubnetAddCommand for a peer"),
        ("echo no; echo key >&2; exit 3", "SubnetAddCommand for a peer exited with status 3: no key"),
        ("sleep 60", "SubnetAddCommand for a peer failed: SubnetAddCommand did not end within 1 s"),
    ],
    ids=["without output", "refused", "late"],
)
@pytest.mark.parametrize("verbosity", [0, 1])
def test_details_of_a_command_are_for_the_verbose_log(
    caplog: pytest.LogCaptureFixture, text: str, message: str, verbosity: int
) -> None:
    caplog.set_level(V(verbosity))
    with suppress(ConfigCommandFailed):
        commands(1.0).run(ConfigCommand("SubnetAddCommand", text), {}, "", "a peer")
    assert [each.partition(";")[0] for each in caplog.messages] == ([message] if verbosity else [])


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigCommandFailed, match="no-such-program is not installed"):
        commands().run(ConfigCommand("SubnetAddCommand", "no-such-program", shell=False), {})
