"""Backend for any cloud: a lease, and one route for this node in each cloud table.

Behaves as upstream's backends for clouds. The lease has only the public IP, and the MTU is the uplink's.
No objects are created for peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from msgspec import Struct

from flanneld.backends.cloud.contract import ACCESS_KEY, Cloud, CloudRoute, Forwarding, table_option
from flanneld.backends.cloud.record import SUFFIX, Record
from flanneld.backends.cloud.routes import CloudForwardingTable, CloudRoutes
from flanneld.backends.contract import Backend, Host, HostServices, Option, Overhead, carried
from flanneld.compat.json import Fields, GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource
from flanneld.state.table import Table

#: Makes a cloud's client from the options in ``Backend``. Raises ``Fatal`` for unusable options.
Connect = Callable[[Fields, HostServices], Cloud]


class CloudFactory(Struct, frozen=True):
    """Factory of the backend for one cloud, as the registry of backends requires.

    ``connect`` makes the cloud's client. ``table_option`` is the option that names tables, or empty.
    ``options`` are those that ``connect`` reads; empty if it does not declare them. ``kept`` names those to
    record for -cleanup, none of them secret; by default all but ``ACCESS_KEY``.
    """

    kind: str
    connect: Connect
    table_option: str = ""
    kept: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def described(self) -> type[Backend]:
        """The class of this cloud's backend, for ``registry.described``."""
        return type(self.kind, (CloudBackend,), {"options": self.options}) if self.options else Backend

    def __call__(self, config: Config, host: Host) -> CloudBackend:
        return CloudBackend(self, config, host)


class CloudBackend(Backend):
    """Backend that desires one route in each table."""

    has_peers = False
    overhead: ClassVar[Overhead] = {4: 0}
    refuses_others = True

    def __init__(self, made_by: CloudFactory, config: Config, host: Host) -> None:
        self._kind = made_by.kind
        self._host = host
        (self._range,) = carried(CloudBackend, config)
        address = host.uplink.address
        if address is None:
            problem = f"{made_by.kind} needs an IPv4 address on the external interface"
            raise Fatal(problem, "choose another with -iface")
        self._address = address
        options, table = config.backend, made_by.table_option
        kept = made_by.kept or [each.name for each in made_by.options if each not in ACCESS_KEY]
        try:
            self._cloud = made_by.connect(options, host)
            self._tables = table_option(table).of(options) if table else ()
            self._kept = {name: options.raw(name) for name in kept if options.has(name)}
        except GoJsonError as error:
            raise Fatal(f"the network config is wrong: {error}", "correct it where it is stored") from None

    @property
    def mtu(self) -> int:
        return self._host.uplink.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._host.uplink.public_ip, self._host.uplink.public_ipv6)

    def local(self, own: Lease, /) -> Iterator[Resource]:
        if own.subnet is not None:
            if self._cloud.filters_addresses:
                yield Forwarding(self._address)
            for table in self._tables or ("",):
                yield CloudRoute(own.subnet, str(self._address), table)

    def peer(self, own: Lease, lease: Lease, /) -> Iterable[Resource]:
        """Return no objects: each node maintains its own route."""
        del own, lease
        return ()

    def tables(self) -> tuple[Table, ...]:
        record = Record(self._host.beside(SUFFIX), self._kind, self._kept)
        routes = CloudRoutes(self._cloud, self._range, record)
        return (routes, CloudForwardingTable(self._cloud)) if self._cloud.filters_addresses else (routes,)
