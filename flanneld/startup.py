"""Startup in stages: load, elect, join, desired. The daemon, ``-plan`` and ``flannelctl`` take the same.

A stage makes its attempts through a ``Waiting``. With ``SingleAttempts`` the whole stage is one attempt: it
returns its value, or raises ``Retryable`` or ``Fatal``. A daemon's ``Waiting`` is its ``Readiness``. The
callers differ in how they get a lease, and in what applies the desired state.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct, structs

from flanneld.backends import registry
from flanneld.backends.contract import Backend, Factory, HostServices
from flanneld.config import Config, unread_keys
from flanneld.effects import Effects
from flanneld.errors import Cancelled, Fatal, NoAnswer, Retryable, cause_of, lacking, prefixed, shown
from flanneld.model import Family, IPAddress, Lease, LeaseAttrs, LeaseKey, Uplink, overlap, single
from flanneld.network.host import HostKernel, HostMonitor
from flanneld.network.uplink_election import InterfaceChoice, NoInterface
from flanneld.network.uplink_facts import connected_networks
from flanneld.options import Options
from flanneld.reconcile.last_run import LastRun
from flanneld.reconcile.local_node import LocalNode, Member, UplinkManager, find_uplink
from flanneld.runtime import clock, waits
from flanneld.runtime.logs import Once
from flanneld.runtime.process import Notifier
from flanneld.runtime.waits import Backoff
from flanneld.state.resources import GUARD, Blackhole, Resource
from flanneld.subnet import subnet_file
from flanneld.subnet.store import LocalFacts, NodeStore, Store
from flanneld.subnet.subnet_file import Previous

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: First word of the claim to an address range.
_RANGE = "range "

#: Acquires this node's lease from the store, or predicts it without writing.
Acquire = Callable[[Config, LeaseAttrs, LeaseKey, LocalFacts], Lease]

#: Raises ``Retryable`` while another network or daemon of this host holds what the backend needs.
Admit = Callable[[Config, Backend], None]


class Reach(Protocol):
    """Attempt to ask the store, on another way if there is no answer."""

    def __call__(self, attempt: Callable[[], Result]) -> Result: ...


class Waiting(Protocol):
    """Retry policy: one attempt, or retries after each ``Retryable``. ``what`` is for the log."""

    def ask(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Make an attempt that asks the store."""
        ...

    def patiently(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Make an attempt that asks this host."""
        ...


class SingleAttempts:
    """``Waiting`` that never waits: ``Retryable`` ends the stage."""

    def ask(self, _what: str, attempt: Callable[[], Result]) -> Result:
        return attempt()

    def patiently(self, _what: str, attempt: Callable[[], Result]) -> Result:
        return attempt()


# With the collector: it refers to parts of a node that refer to it.
class Loaded(Struct, frozen=True):
    """Options, the record of the previous run, and the network config."""

    options: Options
    store: Store
    effects: Effects
    previous: Previous
    last_run: LastRun
    config: Config
    make_backend: Factory
    services: HostServices
    reach: Reach


class Elected(Struct, frozen=True):
    """The uplink, and the kernel that has it."""

    kernel: HostKernel
    monitor: HostMonitor
    choice: InterfaceChoice
    uplink: Uplink


# ---- the stages ---------------------------------------------------------------------------------


def load(options: Options, store: Store, waiting: Waiting, effects: Effects) -> Loaded:
    """Read the record of the last run and the network config."""
    path = Path(options.subnet_file)
    store.addresses  # noqa: B018 - starts the lookup of names, which a new lease needs
    previous, last_run = effects.read_past(path)
    reach: Reach = partial(_ask_or_try, store, previous, last_run) if effects.tries_routes else _ask_once
    last_run.former = tuple(dict.fromkeys((*previous.nets, *last_run.former)))
    config = waiting.ask("the network config", partial(reach, store.network_config))
    log.info("Found network config - Backend type: %s", shown(config.backend_type))
    for warning in config.warnings:
        log.warning("%s", warning)
    make_backend = registry.factory_for(config)
    for backend_type in [each.backend_type for each in (config, config.also) if each]:
        if backend_type == "extension" and not options.allow_extension:
            raise Fatal("the network config would run commands here as root", "-allow-extension lets it")
        carried = registry.described(backend_type).overhead
        for family in config.families if carried else ():
            if family not in carried:
                log.warning(
                    "%s carries no IPv%d: no routes lead to other nodes' IPv%d subnets; use vxlan,"
                    " or set EnableIPv%d to false",
                    *(backend_type, family, family, family),
                )
    services = structs.replace(
        effects.services,
        beside=partial(subnet_file.beside, path),
        boot_id=clock.boot_id,
        listen_port=options.wireguard_port,
        cpu_checksums=options.disable_tx_checksum_offload,
    )
    return Loaded(options, store, effects, previous, last_run, config, make_backend, services, reach)


def elect(loaded: Loaded, waiting: Waiting) -> Elected:
    """Choose the uplink. Wait for it at most ``-iface-wait`` seconds."""
    kernel, monitor = waiting.patiently("the kernel", loaded.effects.open_kernel)
    choice = waiting.ask("our node", partial(loaded.reach, partial(_choice, loaded.options, loaded.store)))
    deadline = clock.now() + loaded.options.iface_wait
    once = Once()

    def tell(line: str) -> None:
        once.warn(log, line, line, logging.INFO)

    elected = partial(_elected, kernel, loaded.config, choice, deadline, tell)
    with prefixed("Failed to find any valid interface to use"):
        uplink = waiting.patiently("an external interface", elected)
    families = loaded.config.families
    addresses = " and ".join(str(uplink.local(family)) for family in families)
    log.info("Using interface with name %s and address %s, MTU %d", uplink.name, addresses, uplink.mtu)
    for family in families:
        words = "Using %s as external address"
        if choice.public(family) is None:
            words = "Defaulting external address to interface address (%s)"
        log.info(words, uplink.public(family))
    return Elected(kernel, monitor, choice, uplink)


def claims_to(config: Config, backend: Backend, *, guards: bool = False) -> tuple[str, ...]:
    """Return a name for each thing that a network needs and that only one network of a host can have.

    With ``guards`` it has the guard of its tunnel, too: the peers of a second daemon are not in its set.
    """
    ranges = (f"{_RANGE}{each.network}" for each in config.ranges)
    guards = guards and bool(registry.clear_ports(config))
    tables = [name for name, has in (("EnableNFTables", config.enable_nftables), (GUARD, guards)) if has]
    return (*ranges, *backend.claims(), *tables)


def clash(one: str, other: str) -> bool:
    """Return True if two claims exclude each other: they are equal, or are ranges that overlap."""
    if one == other or not (one.startswith(_RANGE) and other.startswith(_RANGE)):
        return one == other
    try:
        return overlap(*(ip_network(each.removeprefix(_RANGE)) for each in (one, other)))
    except ValueError:
        return False


def admit_any(_config: Config, _backend: Backend) -> None:
    """Admit any backend: this is the daemon's only network."""


def join(
    loaded: Loaded, elected: Elected, waiting: Waiting, acquire: Acquire, admit: Admit = admit_any
) -> Member:
    """Build the backend and, once ``admit`` permits it, acquire the lease that announces it."""
    options, store, config = loaded.options, loaded.store, loaded.config
    previous, last_run = loaded.previous, loaded.last_run
    kernel, uplink = elected.kernel, elected.uplink
    machine = loaded.effects.machine_of(kernel, uplink)
    written = last_run.claim(machine, store.name, previous.subnets)
    facts = LocalFacts(written, earlier=last_run.earlier)
    family = config.families[0]
    stored = waiting.ask("the leases", partial(loaded.reach, lambda: store.stored(uplink.public(family))))
    is_others = partial(_is_others, store, stored, facts, family, uplink.public(family))
    if stored is None and written is not None:
        stored = written.attrs
    uplink_manager = waiting.patiently(
        "this host's devices",
        lambda: UplinkManager(
            kernel,
            config,
            elected.choice,
            loaded.make_backend,
            uplink,
            stored,
            tuple(network for network, _ in last_run.former),
            structs.replace(loaded.services, is_others=is_others),
        ),
    )
    if options.follow_path_mtu:
        uplink_manager.lowered = last_run.path_mtu(machine)
    for unread in unread_keys(config):
        log.warning("%s", unread)
    waiting.patiently("claims on this host", lambda: admit(config, uplink_manager.backend))
    avoided = (*connected_networks(kernel, config.families), *map(single, sorted(store.addresses, key=int)))
    local = structs.replace(facts, connected=avoided, is_self=uplink_manager.is_self)
    attributes = uplink_manager.backend.attributes()
    lease = waiting.ask(
        "a lease", partial(loaded.reach, lambda: acquire(config, attributes, previous.subnets, local))
    )
    last_run.joined(machine, store.name, lease, subnet_file.paired(config.networks, lease.key))
    last_run.record(path_mtu=uplink_manager.lowered)
    return Member(options, store, config, last_run, kernel, elected.monitor, uplink_manager, lease)


def desired(member: Member, effects: Effects) -> LocalNode:
    """Return the node to maintain: the backend's resources, and those that the options add."""
    ranges = (*member.uplink_manager.ranges, *member.last_run.former)
    networks = list(dict.fromkeys(network for network, _ in ranges))
    # Packets for a container that has gone must not go round between this host and its gateway.
    blackholes = member.lease.key if member.options.ip_blackhole_route else ()
    ports = registry.clear_ports(member.config) if member.options.guard_tunnel else ()
    beside, once_synced = _guard(member.config, ports) if ports else (None, ())
    if member.options.guard_tunnel and not ports:
        kind = member.config.backend_type
        log.warning("-guard-tunnel has no effect: %s has no port without encryption", kind)
    options = structs.replace(member.options, guard_tunnel=bool(ports))
    return LocalNode(
        member.kernel,
        member.monitor,
        member.uplink_manager,
        member.lease,
        member.last_run,
        lambda stale: effects.kernel_tables(member.kernel, stale, networks, options),
        extras=tuple(Blackhole(net) for net in blackholes if net is not None),
        beside=beside,
        once_synced=once_synced,
        store=member.store,
    )


def _guard(
    config: Config, ports: tuple[int, ...]
) -> tuple[Callable[[Lease], Iterable[Resource]], tuple[Resource, ...]]:
    """Return what lets in each peer, and the rules that keep all others out of the tunnel."""
    from flanneld.network.firewall.guard import Guarded, admits  # rarely needed

    families = config.families
    return partial(admits, families=families), tuple(Guarded(each, ports) for each in families)


# ---- their attempts -----------------------------------------------------------------------------


def _ask_once(attempt: Callable[[], Result]) -> Result:
    return attempt()


def _ask_or_try(store: Store, previous: Previous, last_run: LastRun, attempt: Callable[[], Result]) -> Result:
    """Make an attempt, and a trial without the routes to the store if it gets no answer."""
    try:
        return attempt()
    except NoAnswer as failure:
        from flanneld.reconcile.store_watch import StoreTrial  # rarely needed

        return StoreTrial(store, previous, last_run).ask(attempt, failure)


def _choice(options: Options, store: Store) -> InterfaceChoice:
    """Return how to choose the uplink; as in Go, the store's public addresses precede the flags'."""
    ipv4, ipv6 = store.public_ips() if isinstance(store, NodeStore) else (None, None)
    return InterfaceChoice(
        ifaces=options.iface,
        regexes=options.iface_regex,
        can_reach=str(options.iface_can_reach or ""),
        public_ip=ipv4 or options.public_ip,
        public_ipv6=ipv6 or options.public_ipv6,
    )


def _elected(
    kernel: HostKernel, config: Config, choice: InterfaceChoice, deadline: float, tell: Callable[[str], None]
) -> Uplink:
    try:
        return find_uplink(kernel, config, choice, tell)
    except NoInterface as failure:
        if clock.now() >= deadline:
            raise
        raise Retryable(failure.problem, failure.remedy) from failure


def _is_others(
    store: Store,
    stored: LeaseAttrs | None,
    local: LocalFacts,
    family: Family,
    public_ip: IPAddress | None,
    announces: Callable[[LeaseAttrs], bool],
) -> bool:
    """Return True if a lease announces this that is not provably ours, and none of ours does."""
    if stored is not None and announces(stored):
        return False
    found = [lease for lease in store.read_leases() if announces(lease.attrs)]
    ours = [each for each in found if each.attrs.public(family) == public_ip or local.wrote(each)]
    return bool(found) and not ours


# ---- a daemon's waits, and its readiness ----------------------------------------------------------

#: Upstream's words for a wait, where it logs one.
_UPSTREAM = {"the network config": "Couldn't fetch network config"}
#: Seconds between retries of actions on this host.
_RETRY = 1.0
#: Seconds between checks that the peers are known.
_PEERS_LOOK = 0.02
#: Pauses between requests to the store. They grow to at most 5 s, because many nodes may be waiting for it.
_ASK_AGAIN = partial(Backoff, first=0.4, longest=2.5, factor=1.2)


class Readiness:
    """Readiness, written by the threads involved and read by any. ``tell`` gets the reason of each wait."""

    def __init__(
        self,
        stop: threading.Event,
        notifier: Notifier,
        tell: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._stop = stop
        self._notifier = notifier
        #: By condition. Replaced, never changed, because other threads read it.
        self._missing = {"lease": "no lease yet"}
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._once = Once()
        self._tell = tell

    def is_ready(self) -> bool:
        return not self._missing

    def wait_for_peers(self, within: float) -> bool:
        """Block until the routes to peers exist, for at most ``within`` seconds. Return False on a stop."""
        deadline = clock.now() + within
        while {"lease", "peers"} & self._missing.keys() and clock.now() < deadline:
            if waits.pause(self._stop, _PEERS_LOOK):
                return False
        return not self._stop.is_set()

    def missing(self) -> list[str]:
        return list(self._missing.values())

    def waiting(self) -> list[str]:
        """Return what startup waits for, at most one line."""
        return list(self._waiting)

    def unready(self) -> list[str]:
        """Return the missing conditions, and what startup waits for."""
        return [*self.missing(), *self._waiting]

    def await_peers(self) -> None:
        self._set("peers", "the peers are not known yet")
        self._set("lease", "")

    def complete(self) -> None:
        self._set("peers", "")

    def hold(self, condition: str, problem: str) -> None:
        """Hold readiness back while a condition has a problem; an empty text is none."""
        if self._missing.get(condition, "") != problem:
            self._set(condition, problem)

    def ask(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt`` on the store until it succeeds, as ``patiently`` does."""
        return self.patiently(what, attempt, _ASK_AGAIN().pause)

    def patiently(
        self, what: str, attempt: Callable[[], Result], pause: Callable[[], float] = lambda: _RETRY
    ) -> Result:
        """Retry ``attempt`` until it succeeds, and log the reason once. Raises ``Cancelled`` on a stop.

        An ``OSError`` is retried, too: a dump of the kernel may be interrupted. Raises ``Fatal`` if this
        process lacks a necessary permission.
        """
        while not self._stop.is_set():
            try:
                result = attempt()
            except Retryable as reason:
                self._wait(what, reason, pause())
                continue
            except OSError as failure:
                self._wait(what, _of_this_host(failure), pause())
                continue
            self._waiting.clear()
            if self._once.clear(what):
                log.info("Got %s", what)
            return result
        raise Cancelled

    def _set(self, condition: str, text: str) -> None:
        with self._lock:
            others = {name: line for name, line in self._missing.items() if name != condition}
            self._missing = {**others, condition: text} if text else others

    def _wait(self, what: str, reason: Retryable, pause: float) -> None:
        self._once.warn(log, what, f"{_UPSTREAM.get(what, f'Waiting for {what}')}: {reason}")
        self._waiting[:] = [f"waiting for {what}: {reason}"]
        self._notifier.status(self._waiting[0])
        self._tell(self._waiting[0])
        waits.pause(self._stop, max(pause, reason.retry_after))


def _of_this_host(failure: OSError) -> Retryable:
    lack = lacking(failure)
    if lack and failure.errno != errno.ENOMEM:  # memory may be short only temporarily
        raise lack from failure
    return Retryable(f"this host refuses: {cause_of(failure)}")
