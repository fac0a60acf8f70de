"""extension backend: commands in the network config set up the traffic to peers.

Compatible with upstream's backend/extension of 0.12: ``sh -c``, with the documented environment variables.
Retries, time limits, a journal, and the commands for shutdown and checks are additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from flanneld.backends.contract import DryRun, ExitPolicy, Host, peers_public_ip, require_type
from flanneld.backends.extension.commands import ConfigCommand, ConfigCommandFailed, ConfigCommands
from flanneld.backends.extension.journal import Journal
from flanneld.backends.extension.resources import PeerSetup, Startup
from flanneld.backends.extension.tables import PeerSetupTable, StartupTable
from flanneld.compat.json import GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal, Refused
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource
from flanneld.state.table import Table

TYPE = "extension"
#: Seconds for one command, default and maximum: several must fit into a heartbeat of 120 s.
_TIME_LIMIT, _LONGEST_LIMIT = 10, 20
#: Characters of PreStartupCommand's output: it is part of the lease, and of every node's watch.
_LONGEST_DATA = 16 << 10


class Extension:
    """Backend with the options of ``Backend``: the commands, ``Shell`` and ``TimeLimitSeconds``."""

    #: Commands make routes of their own, and the data in its lease may be any text.
    stands_alone = makes_routes = True

    def __init__(self, config: Config, host: Host) -> None:
        self._config = config
        self._host = host
        self._uplink = host.uplink
        options = config.backend
        try:
            shell = options.boolean("Shell", True)
            limit = options.uint("TimeLimitSeconds", _TIME_LIMIT)
            texts = {
                name: options.string(f"{name}Command", "")
                for name in ("PreStartup", "PostStartup", "SubnetAdd", "SubnetRemove", "Check", "Shutdown")
            }
        except GoJsonError as error:
            raise Fatal(f"the network config is wrong: {error}", "correct it where it is stored") from None
        if not 1 <= limit <= _LONGEST_LIMIT:
            raise Fatal(
                f"Backend.TimeLimitSeconds {limit} cannot be used", f"set it to 1 to {_LONGEST_LIMIT} seconds"
            )
        if any("\0" in text for text in texts.values()):
            raise Fatal("a command in Backend has a zero byte", "remove it from the network config")
        commands = {
            name: ConfigCommand(f"{name}Command", text.strip(), shell) for name, text in texts.items()
        }
        self._pre, self._post, self._shutdown = (
            commands[name] for name in ("PreStartup", "PostStartup", "Shutdown")
        )
        self._add, self._remove, self._check = (
            commands[name] for name in ("SubnetAdd", "SubnetRemove", "Check")
        )
        self._commands = ConfigCommands(host.run, limit)
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

    def local(self, own: Lease) -> Iterator[Resource]:
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

    def peer(self, _own: Lease, lease: Lease) -> Iterator[Resource]:
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
