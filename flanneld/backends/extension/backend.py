"""extension backend: commands in the network config set up the traffic to peers.

Compatible with upstream's backend/extension of 0.12: ``sh -c``, with the documented environment variables.
Retries, time limits, a journal, and the commands for shutdown and checks are additions.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import ClassVar

from msgspec import Struct

from flanneld.backends.contract import (
    Backend,
    DryRun,
    ExitPolicy,
    Host,
    Option,
    RunCommand,
    peers_public_ip,
    read_options,
    require_type,
)
from flanneld.compat.glog import V
from flanneld.config import Config
from flanneld.errors import Fatal, Refused, Retryable
from flanneld.model import IPNetwork, Lease, LeaseAttrs, name_of
from flanneld.state.resources import Key, Kind, Resource
from flanneld.state.table import Table

log = logging.getLogger(__name__)

TYPE = "extension"
#: Seconds for one command, default and maximum: several must fit into a heartbeat of 120 s.
_TIME_LIMIT, _LONGEST_LIMIT = 10, 20
_COMMANDS = ("PreStartup", "PostStartup", "SubnetAdd", "SubnetRemove", "Check", "Shutdown")
#: Characters of PreStartupCommand's output: it is part of the lease, and of every node's watch.
_LONGEST_DATA = 16 << 10
#: Characters of a command's output in the log.
_LONGEST_TOLD = 500
#: ``$NAME``, ``${NAME}`` and the shell's special parameters, as in Go's os.Expand.
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*|[*#$@!?0-9-]))")
#: Names of the tables.
STARTUP, PEERS = "extension-startup", "extension-peers"


class Startup(Struct, frozen=True, gc=False):
    """Parameters of this node for PostStartupCommand and ShutdownCommand."""

    kind: ClassVar[Kind] = Kind.REMOTE
    network: IPv4Network | None
    ipv6_network: IPv6Network | None
    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None

    @property
    def key(self) -> Key:
        return (STARTUP, "post-startup")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the commands."""
        return _variables(
            NETWORK=self.network,
            IPV6NETWORK=self.ipv6_network,
            SUBNET=self.subnet,
            PUBLIC_IP=self.public_ip,
            IPV6SUBNET=self.ipv6_subnet,
            PUBLIC_IPV6=self.public_ipv6,
        )

    def __str__(self) -> str:
        return f"extension startup of {name_of((self.subnet, self.ipv6_subnet))}"


class PeerSetup(Struct, frozen=True, gc=False):
    """Parameters of a peer for SubnetAddCommand and SubnetRemoveCommand.

    ``data`` is their stdin. ``stands`` is False if SubnetAddCommand may not have taken effect.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    ipv4_subnet: IPv4Network | None = None
    ipv6_subnet: IPv6Network | None = None
    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None
    data: str = ""
    stands: bool = True

    @property
    def subnet(self) -> IPNetwork | None:
        """The subnet whose unreadable lease keeps this resource."""
        return self.ipv4_subnet or self.ipv6_subnet

    @property
    def key(self) -> Key:
        return (PEERS, self.name)

    @property
    def name(self) -> str:
        return name_of((self.ipv4_subnet, self.ipv6_subnet))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the commands."""
        return _variables(
            SUBNET=self.ipv4_subnet,
            PUBLIC_IP=self.public_ip,
            IPV6SUBNET=self.ipv6_subnet,
            PUBLIC_IPV6=self.public_ipv6,
        )

    def __str__(self) -> str:
        public = ", ".join(str(ip) for ip in (self.public_ip, self.public_ipv6) if ip)
        return f"extension peer {self.name} at {public}"


def _variables(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


class ConfigCommand(Struct, frozen=True, gc=False):
    """A command, named by its key in the config. Its text may contain a secret and is never logged.

    Without ``shell`` it is split at white space and run directly, as in Go flanneld since 0.28.2.
    """

    name: str
    text: str = ""
    shell: bool = True

    def __bool__(self) -> bool:
        return bool(self.text)


class ConfigCommandFailed(Retryable):
    """Error for a command that failed. ``status`` is its exit status, None after a timeout."""

    def __init__(self, problem: str, remedy: str, status: int | None) -> None:
        super().__init__(problem, remedy)
        self.status = status


class ConfigCommands:
    """Runner of commands through ``Host.run``, each for at most ``time_limit`` seconds."""

    def __init__(self, run: RunCommand, time_limit: float) -> None:
        self._run = run
        self._time_limit = time_limit

    def run(
        self,
        command: ConfigCommand,
        env: Mapping[str, str],
        data: str = "",
        about: str = "",
        *,
        at_exit: bool = False,
    ) -> str:
        """Run a command with ``data`` and a newline as stdin. Return its stdout and stderr.

        Raises ``ConfigCommandFailed``, and ``DryRun`` in a dry run.
        """
        name = command.name + (f" for {about}" if about else "")
        argv = command.text if command.shell else expanded(command.text, {**os.environ, **env})
        try:
            done = self._run(
                argv,
                env,
                f"{data}\n",
                self._time_limit,
                at_exit=at_exit,
                clean=command.shell,
                merged=True,
                name=command.name,
            )
        except DryRun:
            raise
        except Retryable as failure:
            log.log(V(1), "%s failed: %s", name, failure)
            raise ConfigCommandFailed(failure.problem, failure.remedy, None) from None
        output = done.output.strip()
        if done.status:
            log.log(V(1), "%s exited with status %d: %s", name, done.status, told(output))
            remedy = f"it wrote: {told(output)}" if output else "run it by hand with its variables"
            raise ConfigCommandFailed(f"{command.name} exited with status {done.status}", remedy, done.status)
        log.log(V(0 if output else 1), "Ran %s%s", name, f": {told(output)}" if output else "")
        return output


def told(output: str) -> str:
    """Return a command's output as one line for the log."""
    line = " ".join(output.split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= _LONGEST_TOLD else f"{line[:_LONGEST_TOLD]}..."


def expanded(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split a command at white space, then expand variables in each word; unknown ones are empty."""
    return [
        _VARIABLE.sub(lambda found: variables.get(found[1] or found[2] or "", ""), word)
        for word in text.split()
    ]


def _command(text: str) -> str:
    if "\0" in text:
        raise Fatal("a command in Backend has a zero byte", "remove it from the network config")
    return text.strip()


class Extension(Backend):
    """Backend with the options of ``Backend``: the commands, ``Shell`` and ``TimeLimitSeconds``."""

    options = (
        Option("Shell", "shell", True),
        Option("TimeLimitSeconds", "limit", _TIME_LIMIT, least=1, most=_LONGEST_LIMIT),
        *(Option(f"{name}Command", name, "", made=_command) for name in _COMMANDS),
    )
    #: Commands make routes of their own, and the data in its lease may be any text.
    stands_alone = makes_routes = True

    def __init__(self, config: Config, host: Host) -> None:
        self._config = config
        self._host = host
        self._uplink = host.uplink
        options = read_options(config, self.options)
        commands = {
            name: ConfigCommand(f"{name}Command", options[name], options["shell"]) for name in _COMMANDS
        }
        self._pre, self._post, self._shutdown = (
            commands[name] for name in ("PreStartup", "PostStartup", "Shutdown")
        )
        self._add, self._remove, self._check = (
            commands[name] for name in ("SubnetAdd", "SubnetRemove", "Check")
        )
        self._commands = ConfigCommands(host.run, options["limit"])
        #: ShutdownCommand is the only cleanup at the daemon's end.
        self.exit_policy = ExitPolicy.REMOVE if self._shutdown else ExitPolicy.KEEP

    @property
    def mtu(self) -> int:
        return self._uplink.mtu

    def identity(self) -> str | None:
        """Run PreStartupCommand and return its output, None without one. Raises ``Fatal`` if it fails."""
        if not self._pre:
            return None
        try:
            output = self._commands.run(self._pre, {})
        except DryRun:
            stored = self._host.stored
            return stored.backend_data if stored and isinstance(stored.backend_data, str) else ""
        except ConfigCommandFailed as failure:
            if failure.status is None:
                raise
            raise Fatal(failure.problem, failure.remedy) from None
        if len(output) > _LONGEST_DATA:
            raise Fatal(
                f"PreStartupCommand writes {len(output)} characters, more than {_LONGEST_DATA}",
                "let it write what peers need, and nothing else",
            )
        return output

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, self._uplink.public_ipv6, TYPE, self._host.identity)

    def local(self, own: Lease, /) -> Iterator[Resource]:
        if self._post or self._shutdown:
            networks = {each.family: each.network for each in self._config.ranges}
            yield Startup(
                networks.get(4),  # type: ignore[arg-type]
                networks.get(6),  # type: ignore[arg-type]
                own.subnet,
                own.ipv6_subnet,
                self._uplink.public_ip,
                self._uplink.public_ipv6,
            )

    def peer(self, _own: Lease, lease: Lease, /) -> Iterator[Resource]:
        require_type(lease, TYPE)
        data = lease.attrs.backend_data
        if not isinstance(data, str | None):
            raise Refused(f"{lease} has BackendData that is no JSON string", "check its PreStartupCommand")
        families = [family for family in self._config.families if lease.net(family) is not None]
        for family in families:
            peers_public_ip(lease, family, self._uplink)
        has_ipv4, has_ipv6 = 4 in families, 6 in families
        if families:
            yield PeerSetup(
                lease.subnet if has_ipv4 else None,
                lease.ipv6_subnet if has_ipv6 else None,
                lease.attrs.public_ip if has_ipv4 else None,
                lease.attrs.public_ipv6 if has_ipv6 else None,
                data or "",
            )

    def tables(self) -> tuple[Table, ...]:
        from flanneld.backends.extension.journal import Journal  # they import this module
        from flanneld.backends.extension.tables import PeerSetupTable, StartupTable

        journal = Journal(self._host.beside(TYPE), self._base)
        return (
            StartupTable(self._post, self._shutdown, self._commands),
            PeerSetupTable(self._add, self._remove, self._check, self._commands, journal),
        )

    def _base(self) -> str:
        """Return a value that an earlier run must share, so that its peer setups are still valid.

        PostStartupCommand may recreate what the setups depend on, and ShutdownCommand removes it. With either
        of them no earlier setup is valid.
        """
        if self._post or self._shutdown:
            return self._host.random_bytes(16).hex()
        facts = (self._host.boot_id(), self._host.identity or "", self._add.text, str(self._add.shell))
        return sha256("\0".join(facts).encode()).hexdigest()
