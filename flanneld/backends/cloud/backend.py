"""Backend for any cloud that routes packets itself: a lease, and one route for this node.

Behaves as upstream's backends for clouds: the lease has the public IP only, the MTU is the uplink's, and
nothing is made for peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from flanneld.backends.cloud.contract import Cloud
from flanneld.backends.cloud.forwarding import ForwardingTable
from flanneld.backends.cloud.options import table_ids
from flanneld.backends.cloud.record import SUFFIX, Record
from flanneld.backends.cloud.resources import CloudRoute, Forwarding
from flanneld.backends.cloud.routes import CloudRoutes
from flanneld.backends.contract import Host, HostServices
from flanneld.compat.json import Fields, GoJsonError
from flanneld.config import Config, SubnetRange
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource
from flanneld.state.table import Table

#: Makes a cloud's API of the options in ``Backend``. Raises ``Fatal`` for options that cannot be used.
Connect = Callable[[Fields, HostServices], Cloud]


class CloudBackend:
    """Decides on one route for each table.

    ``connect`` makes the API of the cloud, and ``kept`` names the options that are no secret: -cleanup needs
    them. ``table_option`` is the option that names tables, empty if there is none.
    """

    has_peers = False

    def __init__(
        self,
        kind: str,
        connect: Connect,
        table_option: str,
        kept: tuple[str, ...],
        config: Config,
        host: Host,
    ) -> None:
        self._kind = kind
        self._host = host
        self._range = _only_range(kind, config)
        address = host.uplink.address
        if address is None:
            raise Fatal(
                f"{kind} needs an IPv4 address on the external interface", "choose another with -iface"
            )
        self._address = address
        options = config.backend
        try:
            self._cloud = connect(options, host)
            self._tables = table_ids(options, table_option) if table_option else ()
            self._kept = {name: options.raw(name) for name in kept if options.has(name)}
        except GoJsonError as error:
            raise Fatal(f"the network config is wrong: {error}", "correct it where it is stored") from None

    @property
    def mtu(self) -> int:
        return self._host.uplink.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._host.uplink.public_ip, self._host.uplink.public_ipv6)

    def local(self, own: Lease) -> Iterator[Resource]:
        if own.subnet is not None:
            yield Forwarding(self._address)
            for table in self._tables or ("",):
                yield CloudRoute(own.subnet, str(self._address), table)

    def peer(self, own: Lease, lease: Lease, /) -> Iterator[Resource]:
        """Nothing: each node keeps its own route."""
        del own, lease
        return iter(())

    def tables(self) -> tuple[Table, ...]:
        record = Record(self._host.beside(SUFFIX), self._kind, self._kept)
        return (CloudRoutes(self._cloud, self._range, record), ForwardingTable(self._cloud))


def factory(
    kind: str, connect: Connect, *, table_option: str = "", kept: tuple[str, ...] = ()
) -> Callable[[Config, Host], CloudBackend]:
    """Return what the registry of backends takes."""
    return partial(CloudBackend, kind, connect, table_option, kept)


def _only_range(kind: str, config: Config) -> SubnetRange:
    """Return the IPv4 range. Raises ``Fatal`` for a network that has another one."""
    found = config.range(4)
    if found is None or len(config.ranges) != 1:
        raise Fatal(f"{kind} carries IPv4 only", "set EnableIPv6 to false and EnableIPv4 to true")
    return found
