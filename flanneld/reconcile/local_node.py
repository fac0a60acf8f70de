"""This node: its uplink, the backend bound to it, its lease, and the host's services for backends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct, structs

from flanneld.backends.contract import (
    NO_SERVICES,
    Backend,
    DryRun,
    Factory,
    Host,
    HostServices,
    complete,
)
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import IPAddress, IPNetwork, Lease, LeaseAttrs, Uplink, is_same_node
from flanneld.network.host import HostKernel, HostMonitor
from flanneld.network.rtnetlink.messages import RTN_UNICAST
from flanneld.network.uplink_election import InterfaceChoice, elect, keep, refuse_link_local
from flanneld.network.uplink_facts import route_to, survey
from flanneld.options import Options
from flanneld.reconcile.last_run import LastRun
from flanneld.runtime.clock import random_bytes
from flanneld.runtime.logs import Once
from flanneld.state.resources import Link, Resource
from flanneld.state.table import Table
from flanneld.subnet.store import Store

if TYPE_CHECKING:
    from flanneld.runtime.command import Finished
    from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

log = logging.getLogger(__name__)

#: Methods that change nothing (RFC 9110, 9.2.1).
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_Read = Callable[[Path, Callable[[], bytes] | None], bytes]


def services_of_daemon(directory: str, environ: Mapping[str, str], stop: threading.Event) -> HostServices:
    """Return the services of a daemon with its key files in ``directory``, until ``stop``."""
    secret = partial(_secret, _read_key, Path(directory), environ)
    return HostServices(
        secret=secret, run=partial(_run, stop), http=partial(_ask, stop), call=partial(_call, stop)
    )


def services_of_dry_run(directory: str, environ: Mapping[str, str]) -> HostServices:
    """Return services that change nothing: a new key is not kept, no command runs, HTTP only reads."""
    stop = threading.Event()

    def read(path: Path, make: Callable[[], bytes] | None) -> bytes:
        return make() if make and not path.exists() else _read_key(path)

    def run(*_: object, **__: object) -> NoReturn:
        raise DryRun("a dry run starts no command", "start the daemon to see what the backend does")

    def ask(request: HttpRequest) -> HttpAnswer:
        if request.method not in _SAFE and not request.harmless:
            raise DryRun(f"a dry run makes no {request.method} request", "start the daemon")
        return _ask(stop, request)

    secret = partial(_secret, read, Path(directory), environ)
    return HostServices(secret=secret, run=run, http=ask, call=partial(_call, stop))


def _run(stop: threading.Event, command: Sequence[str] | str, *args: Any, **options: Any) -> Finished:
    from flanneld.runtime.command import CommandRunner

    return CommandRunner(stop).run(command, *args, **options)


def _ask(stop: threading.Event, request: HttpRequest) -> HttpAnswer:
    from flanneld.runtime.sockets.http_client import HttpClient

    return HttpClient(stop).ask(request)


def _call(stop: threading.Event, what: str, act: Callable[[], Any], timeout: float) -> Any:
    from flanneld.runtime.waits import DetachedCalls

    return DetachedCalls(stop).run(what, act, timeout)


def _read_key(path: Path, make: Callable[[], bytes] | None = None) -> bytes:
    from flanneld.runtime import files

    return files.read_secret(path, make)


def _secret(
    read: _Read,
    directory: Path,
    environ: Mapping[str, str],
    name: str,
    make: Callable[[], bytes] | None = None,
    *,
    variable: str = "",
) -> bytes:
    return read(Path(environ.get(variable) or directory / name), make)


def find_uplink(
    kernel: HostKernel, config: Config, choice: InterfaceChoice, tell: Callable[[str], None] = lambda _: None
) -> Uplink:
    """Elect the uplink, and log why other candidates were rejected. Raises ``NoInterface``.

    ``tell`` is that of ``elect``.
    """
    wishes = (*choice.ifaces, *choice.regexes, *([choice.can_reach] if choice.can_reach else []))
    wants_default = not wishes or "" in wishes
    facts = survey(kernel, config.families, default_routes=wants_default)
    election = elect(choice, facts, partial(route_to, kernel), config.families, tell)
    for line in election.rejected:
        log.info("Skipped %s", line)
    return election.uplink


class UplinkManager:
    """Current uplink and the backend built on it. Both are replaced when the uplink moves."""

    def __init__(
        self,
        kernel: HostKernel,
        config: Config,
        choice: InterfaceChoice,
        make_backend: Factory,
        uplink: Uplink,
        stored: LeaseAttrs | None,
        former: tuple[IPNetwork, ...] = (),
        services: HostServices = NO_SERVICES,
    ) -> None:
        self._kernel = kernel
        self._config = config
        self._choice = choice
        self._make_backend = make_backend
        self._former = former
        self._services = services
        #: Decision of the first backend, for the whole run.
        self._identity: Any = None
        self._once = Once()
        self.uplink = uplink
        #: True while no interface is usable. Any notification may end that.
        self.is_adrift = False
        #: True if the backend's decisions depend on the host's routes.
        self.asks_routes = False
        #: MTU of the backend, and the one to which ``-follow-path-mtu`` has lowered it; zeros for none.
        self.lowered = (0, 0)
        self.backend: Backend
        self._use(self._build(uplink, stored))

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """Return the cluster networks, each with the prefix length of a node's subnet."""
        return tuple((each.network, each.subnet_len) for each in self._config.ranges)

    @property
    def networks(self) -> tuple[IPNetwork, ...]:
        """Return the cluster networks, one of each family."""
        return self._config.networks

    @property
    def mtu(self) -> int:
        """Return the network's MTU: the backend's, or what paths to peers carry. From any thread."""
        mtu, (full, lowered) = self.backend.mtu, self.lowered
        return lowered if full == mtu else mtu

    @property
    def bytes_lowered(self) -> int:
        """Return the bytes by which the network's MTU is below the backend's. From any thread."""
        return self.backend.mtu - self.mtu

    def local(self, own: Lease) -> Iterator[Resource]:
        """Yield what the backend needs without peers; no device exceeds an MTU that was lowered."""
        mtu, is_lower = self.mtu, bool(self.bytes_lowered)
        for each in self.backend.local(own):
            if is_lower and isinstance(each, Link) and each.mtu > mtu:
                yield structs.replace(each, mtu=mtu)
            else:
                yield each

    def follow(self) -> bool:
        """Elect the uplink again. Return True if the backend was replaced.

        While no interface is usable nothing changes, so existing traffic goes on.
        """
        try:
            facts = survey(self._kernel, self._config.families, default_routes=False)
            uplink = keep(self.uplink, facts) or find_uplink(self._kernel, self._config, self._choice)
            refuse_link_local(uplink, self.uplink)
            if uplink != self.uplink:
                backend = self._build(uplink, self.backend.attributes())
        except Fatal as reason:
            self._once.warn(log, "uplink", f"The uplink {self.uplink.name} is unusable: {reason}")
            self.is_adrift = True
            return False
        self.is_adrift = False
        self._once.clear("uplink")
        if uplink == self.uplink:
            return False
        log.warning("The uplink moved to %s, from %s", uplink, self.uplink)
        self.uplink = uplink
        self._use(backend)
        return True

    def is_self(self, theirs: LeaseAttrs, ours: LeaseAttrs) -> bool:
        """Return True if a lease is this node's, as the backend says; by default if it has our public IP."""
        return self.backend.is_self(theirs) if self._knows_itself else is_same_node(theirs, ours)

    def _use(self, backend: Backend) -> None:
        self.backend = backend
        # Without ``is_self`` of its own, its attributes need not be made for each lease.
        self._knows_itself = backend.gives("is_self")

    def _build(self, uplink: Uplink, stored: LeaseAttrs | None) -> Backend:
        backend = complete(self._make_backend(self._config, self._host(uplink, stored)))
        if self._identity is None and backend.gives("identity"):
            self._identity = backend.identity()
            backend = complete(self._make_backend(self._config, self._host(uplink, stored)))
        return backend

    def _host(self, uplink: Uplink, stored: LeaseAttrs | None) -> Host:
        return Host(
            uplink=uplink,
            stored=stored,
            mac_of=self._mac_of,
            link_to=self._link_to,
            random_bytes=random_bytes,
            tun_for=self._tun_for,
            identity=self._identity,
            **structs.asdict(self._services),
        )

    def _tun_for(self, network: IPNetwork) -> str:
        from flanneld.network.uplink_facts import tun_for  # for the backend udp only

        return tun_for(self._kernel, (network, *self._former))

    def _mac_of(self, name: str) -> str | None:
        link = self._kernel.link(name)
        return link.mac or None if link else None

    def _link_to(self, target: IPAddress) -> str | None:
        self.asks_routes = True
        way = self._kernel.look_up_route(target)
        if way is None or way.gateway is not None or way.kind != RTN_UNICAST:
            return None
        return self._kernel.name_of(way.index)


KernelTables = Callable[[Callable[[], Iterable[Link]]], Sequence[Table]]


# With the collector: it refers to parts of a node that refer to it.
class Member(Struct, frozen=True):
    """Node with a lease, and the backend that the lease announces."""

    options: Options
    store: Store
    config: Config
    last_run: LastRun
    kernel: HostKernel
    monitor: HostMonitor
    uplink_manager: UplinkManager
    lease: Lease


class LocalNode(Struct, frozen=True):
    """Kernel, uplink and lease of this node, and the record of its last run.

    ``kernel_tables`` returns the kernel's tables in the order of creation; its argument names stale devices.
    ``extras`` are desired in addition to the backend's objects. ``store`` is None if no lease can cut this
    node off from it.
    """

    kernel: HostKernel
    monitor: HostMonitor
    uplink_manager: UplinkManager
    lease: Lease
    last_run: LastRun
    kernel_tables: KernelTables
    extras: tuple[Resource, ...] = ()
    #: What each followed lease needs beside the backend's objects, and what is made once all are known.
    beside: Callable[[Lease], Iterable[Resource]] | None = None
    once_synced: tuple[Resource, ...] = ()
    store: Store | None = None

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """Return the cluster's networks, each with our subnet's prefix length, which may be a podCIDR's."""
        own = {net.version: net.prefixlen for net in self.lease.key if net is not None}
        ranges = self.uplink_manager.ranges
        return tuple((network, own.get(network.version, length)) for network, length in ranges)
