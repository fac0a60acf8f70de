"""Daemon of several networks (``-networks``, ``-watch-networks``), each served independently."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from flanneld import __version__, effects
from flanneld.backends.contract import Backend
from flanneld.config import Config
from flanneld.diagnostics.cleanup import sweep_network
from flanneld.diagnostics.observation import Observation
from flanneld.diagnostics.serving import Checks, HealthServer
from flanneld.errors import Cancelled, FlannelError, Retryable
from flanneld.lease_server import LeaseService, open_file_store
from flanneld.network.firewall import nftables
from flanneld.network.firewall.driver import Unavailable
from flanneld.network_names import Choice, NetworkNames, RemoteNames, StoreNames
from flanneld.node import Node
from flanneld.option_values import is_network_name
from flanneld.options import Options
from flanneld.reconcile import controller
from flanneld.reconcile.counters import counted
from flanneld.runtime import logs, process, waits
from flanneld.runtime.logs import Outage
from flanneld.runtime.process import DRAIN, HostClaims, InstanceLock
from flanneld.runtime.supervisor import Loop, Supervisor
from flanneld.runtime.waits import Backoff
from flanneld.startup import claims_to, clash
from flanneld.subnet import subnet_file
from flanneld.subnet.embedded.store import KeyStore, store_of
from flanneld.subnet.opening import etcd_options, open_store, remote_options
from flanneld.subnet.remote.change_log import ChangeLog
from flanneld.subnet.remote.leases import over_etcd, over_file
from flanneld.subnet.remote.server import METRICS
from flanneld.subnet.store import LONGEST_SILENCE

log = logging.getLogger(__name__)


class Claims:
    """Claims of each network of this daemon; the first claim wins. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, str] = {}
        #: Claims against other daemons, by network.
        self._on_host: dict[str, HostClaims] = {}

    def take(self, network: str, config: Config, backend: Backend) -> None:
        """Claim all that a network needs, or nothing. Raises ``Retryable`` if another has some of it."""
        wanted = claims_to(config, backend)
        with self._lock:
            self._drop(network)
            for each in wanted:
                for held, holder in self._holders.items():
                    if each == held:
                        raise Retryable(
                            f"it wants {each}, which the network {holder} has",
                            "give each network its own in the store",
                        )
                    if clash(each, held):
                        raise Retryable(
                            f"its {each} overlaps the {held} of the network {holder}",
                            "change one of their configs",
                        )
            self._on_host.setdefault(network, HostClaims()).take(wanted, clash)
            self._holders |= dict.fromkeys(wanted, network)

    def release(self, network: str) -> None:
        """Release the claims of a network."""
        with self._lock:
            self._drop(network)
            self._on_host.pop(network, None)

    def drain(self) -> None:
        """Do what ``HostClaims.drain`` does, for each network."""
        with self._lock:
            for each in self._on_host.values():
                each.drain()

    def _drop(self, network: str) -> None:
        self._holders = {each: holder for each, holder in self._holders.items() if holder != network}
        if network in self._on_host:
            self._on_host[network].close()


#: First word of a status line while startup waits.
_HELD_UP = "waiting for"


class NetworkNotifier(process.Notifier):
    """Substitute for the service manager's notifier in the daemon of one network."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.is_ready = False
        self.text = ""
        self._changed = changed

    def ready(self) -> None:
        self.is_ready = True
        self._changed()

    def status(self, text: str) -> None:
        self.text = text
        self._changed()

    def watchdog(self) -> None:
        """Do nothing: the daemon of all networks feeds the watchdog."""

    def stopping(self) -> None:
        self.is_ready = False


#: Serves a network until its supervisor stops; the exit status is ignored.
Serve = Callable[["Network"], object]


class Network:
    """Network with its name. ``changed`` is called when its state may have changed."""

    def __init__(self, name: str, subnet_file: Path, serve: Serve, changed: Callable[[], None]) -> None:
        self.name = name
        self.subnet_file = subnet_file
        self.notifier = NetworkNotifier(changed)
        self.supervisor = Supervisor(quiet=(Cancelled,))
        self.problem = ""
        self._serve = serve
        self._changed = changed
        self._stop = threading.Event()
        self.is_removed = False
        self.has_ended = False

    @property
    def is_settled(self) -> bool:
        """Return True if the network is up, or has given a reason why it is not."""
        return self.notifier.is_ready or bool(self.problem) or self.notifier.text.startswith(_HELD_UP)

    @property
    def missing(self) -> str:
        """Reason why the network is not up; empty if it is."""
        if self.notifier.is_ready:
            return ""
        return f"network {self.name}: {self.problem or self.notifier.text or 'not up yet'}"

    def run(self) -> None:
        """Serve until ``stop``. Restart after each failure, with growing pauses."""
        backoff = Backoff(first=1.0, longest=15.0)
        while not self._stop.is_set():
            self._run_once()
            self.notifier.stopping()
            self._changed()
            if waits.pause(self._stop, backoff.pause()):
                break
            self.supervisor = Supervisor(quiet=(Cancelled,))
        if self.is_removed:
            self._sweep()
        self.has_ended = True
        self._changed()

    def stop(self, *, remove: bool = False) -> None:
        """End ``run``; with ``remove`` also remove the network's objects on this host. From any thread."""
        self.is_removed = self.is_removed or remove
        self._stop.set()
        self.supervisor.request_stop(f"the network {self.name} was removed" if remove else "the daemon ends")

    def _run_once(self) -> None:
        try:
            if not self._stop.is_set():
                self._serve(self)
            failure = self.supervisor.failure
            self.problem = str(failure) if failure else ""
        except Cancelled:
            self.problem = ""
        except FlannelError as failure:
            self.problem = str(failure)
            log.error("Network %s: %s", self.name, failure)  # noqa: TRY400 - it says all
        except Exception as failure:
            # A failure of one network must not end the others.
            self.problem = str(failure) or type(failure).__name__
            log.exception("Network %s failed", self.name)

    def _sweep(self) -> None:
        log.info("Removing all objects of network %s from this host", self.name)
        sweep(self.subnet_file)


def sweep(subnet_file: Path) -> None:
    """Remove devices, routes, rules and files of a network without a daemon."""

    def say(line: str) -> None:
        if not line.startswith("left "):
            log.info("%s", line[0].upper() + line[1:])

    try:
        sweep_network(subnet_file, (), say)
    except (OSError, FlannelError) as failure:
        log.error(  # noqa: TRY400 - it says all
            "Cannot remove all of %s: %s; try flanneld -cleanup", subnet_file, failure
        )


#: Seconds between two attempts to read the names, and seconds for all networks to stop.
_PAUSE, _END = 1.0, 5.0
#: Variables of the service manager. Only the daemon as a whole reports to it, no single network.
_MANAGERS = ("WATCHDOG_USEC", "WATCHDOG_PID")


def run(wanted: Options, environ: Mapping[str, str]) -> int:
    """Serve several networks until told to stop. Return 0 then, 1 after a failure."""
    supervisor, notifier = Supervisor(quiet=(Cancelled,)), process.Notifier()
    log.info("flanneld %s %s", __version__, wanted.described())
    supervisor.handle_signals()
    lock = InstanceLock(Path(wanted.subnet_dir) / "flanneld.lock")
    lock.wait(supervisor.stop, tell=notifier.status)
    file = open_file_store(wanted, supervisor) if wanted.store else None
    service = LeaseService(wanted, environ, supervisor, file) if wanted.listen else None
    if service:
        service.start()
    fleet = Fleet(
        wanted, environ, supervisor, notifier, file, service.server.metrics_text if service else str
    )
    with suppress(Unavailable):
        # While descriptors are low: 2 ms and 1 MiB, also where no network's config turns out to need it.
        nftables.load()
    fleet.start()
    ticks: list[tuple[Callable[[], None], float]] = [(fleet.claims.drain, DRAIN), (notifier.try_again, 1.0)]
    interval = process.watchdog_interval(environ)
    if interval is not None:
        ticks.append((lambda: None if fleet.overdue() else notifier.watchdog(), interval))
    supervisor.wait(*ticks)
    notifier.stopping()
    fleet.end()
    supervisor.shutdown()
    return 1 if supervisor.failure else 0


class Fleet:
    """Set of the daemon's networks: starts, stops and removes them."""

    def __init__(
        self,
        wanted: Options,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        notifier: process.Notifier,
        file: KeyStore | None,
        more_metrics: Callable[[], str],
    ) -> None:
        self._more_metrics = more_metrics
        self._options = wanted
        self._environ = {name: text for name, text in environ.items() if name not in _MANAGERS}
        self._supervisor = supervisor
        self._notifier = notifier
        self._file = file
        self._events = logs.remember()
        self.claims = Claims()
        #: Held by the network whose controller steps.
        self._turn = threading.Lock()
        self._choice = Choice(wanted.networks, wanted.max_networks)
        #: Replaced, never changed in place: other threads read it.
        self._networks: dict[str, Network] = {}
        #: Networks that startup waits for; None until the store has listed them.
        self._first: frozenset[str] | None = None
        self._is_ready = False
        #: Held for each report, so that the last one tells the last state.
        self._reporting = threading.Lock()

    # ---- status, from any thread -------------------------------------------------------------

    def overdue(self) -> list[str]:
        """Return a line for each task without a recent heartbeat."""
        of_networks = [
            f"network {each.name}: {line}"
            for each in self._networks.values()
            for line in each.supervisor.overdue()
        ]
        return [*self._supervisor.overdue(), *of_networks]

    def missing(self) -> list[str]:
        """Return a line for each network that is not up."""
        if self._first is None:
            return ["the names of the networks are not known yet"]
        return [line for each in self._networks.values() if (line := each.missing)]

    def metrics(self, _accept: str) -> tuple[int, str, bytes]:
        """Return /metrics: the state of each network, and the counters of a lease server in this process."""
        lines = [
            f'flannel_network_up{{network="{each.name}"}} {int(each.notifier.is_ready)}'
            for each in self._networks.values()
        ]
        page = "\n".join(["# TYPE flannel_network_up gauge", *lines, ""]) + self._more_metrics()
        return 200, METRICS, page.encode()

    # ---- running -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the networks of the options, or follow those in the store."""
        if self._options.healthz_port:
            checks = Checks(
                self.overdue, lambda: self._is_ready, self.missing, caveats=self.missing, metrics=self.metrics
            )
            health = HealthServer(self._options.healthz_ip, self._options.healthz_port, checks)
            self._supervisor.start("health server", health.serve, health.close)
        if self._options.watch_networks:
            names = self._open_names()
            self._supervisor.start("network names", partial(self._follow, names), names.close)
        else:
            self._set(self._options.networks)

    def end(self) -> None:
        """Stop all networks at once and wait for them. Their objects on this host stay."""
        for network in self._networks.values():
            network.stop()
        waits.until(lambda: all(each.has_ended for each in self._networks.values()), within=_END, every=0.02)

    def _open_names(self) -> NetworkNames:
        if self._options.remote:
            return RemoteNames(remote_options(self._options))
        if self._file:
            return StoreNames(over_file(self._file), self._run_log)
        return StoreNames(over_etcd(etcd_options(self._options), self._options.etcd_api), self._run_log)

    def _run_log(self, changes: ChangeLog) -> None:
        alive = partial(self._supervisor.heartbeat, "watch of networks", LONGEST_SILENCE)
        self._supervisor.start("watch of networks", lambda: changes.run(alive), changes.close)

    def _follow(self, names: NetworkNames) -> None:
        """Serve the networks in the store until ``names`` is closed (raises ``Cancelled``)."""
        outage = Outage(
            log, "Reading the names of the networks", "The names of the networks could be read again"
        )
        alive = partial(self._supervisor.heartbeat, "network names", LONGEST_SILENCE)
        while True:
            alive()
            try:
                found, after = names.read()
                outage.over()
                self._sweep_former(found)
                if self._set(self._choice.of(found)):
                    names.await_change(after, alive)
            except Retryable as problem:
                outage.failed(problem)
            if waits.pause(self._supervisor.stop, _PAUSE):
                raise Cancelled

    def _set(self, names: Iterable[str]) -> bool:
        """Start new networks and remove missing ones. Return False while a removal still runs."""
        wanted = set(names)
        for name, network in self._networks.items():
            if name not in wanted and not network.has_ended:
                network.stop(remove=True)
        ending = {
            name: each for name, each in self._networks.items() if each.is_removed and not each.has_ended
        }
        kept = {name: each for name, each in self._networks.items() if not each.is_removed} | ending
        new = {name: self._network(name) for name in sorted(wanted - kept.keys())}
        self._networks = kept | new
        process.share_interpreter(len(self._networks))
        for name, network in new.items():
            self._supervisor.start(f"network {name}", network.run, network.stop, may_end=True)
        if self._first is None and wanted:
            self._first = frozenset(wanted)
        self._changed()
        return not ending

    def _sweep_former(self, found: list[str]) -> None:
        """Remove the objects of networks that were deleted since an earlier run."""
        if self._first is not None:
            return
        for path in Path(self._options.subnet_dir).glob("*.env"):
            is_ours = subnet_file.beside(path, "state").exists() and is_network_name(path.stem)
            if is_ours and path.stem not in found:
                log.info("The network %s has gone", path.stem)
                sweep(path)

    def _changed(self) -> None:
        """Report to the service manager, and readiness once all first networks are up or have given a reason.

        From any thread.
        """
        with self._reporting:
            self._report()

    def _report(self) -> None:
        networks = self._networks
        up = [each.name for each in networks.values() if each.notifier.is_ready]
        self._notifier.status(f"{len(up)} of {len(networks)} networks are up; " + "; ".join(self.missing()))
        first = [networks[name] for name in self._first or () if name in networks]
        if not self._is_ready and up and all(each.is_settled for each in first):
            self._is_ready = True
            log.info("Ready: %s", ", ".join(sorted(up)))
            self._notifier.ready()

    # ---- one network -------------------------------------------------------------------------

    def _network(self, name: str) -> Network:
        return Network(name, Path(self._options.subnet_dir) / f"{name}.env", self._serve, self._changed)

    def _serve(self, network: Network) -> None:
        """Serve one network with a daemon of its own."""
        own = replace(
            self._options,
            networks=(),
            watch_networks=False,
            # Who makes a network in the store is not to be root on each host.
            allow_extension=self._options.allow_extension and "allow-extension" in self._options.given,
            subnet_file=str(network.subnet_file),
            healthz_port=0,
            # The other set of chains has room for one network only.
            iptables_rules="v0.12",
        )
        store = counted(
            store_of(self._file, network.name) if self._file else open_store(own, self._environ, network.name)
        )
        make_loop = partial(self._loop, network.supervisor)
        node = Node(
            own,
            effects.real(own, self._environ, network.supervisor, network.notifier, make_loop),
            store,
            admit=partial(self.claims.take, network.name),
            beside=Observation(),
            events=self._events,
        )
        try:
            node.serve()
        finally:
            self.claims.release(network.name)

    def _loop(
        self,
        supervisor: Supervisor,
        name: str,
        step: Callable[[float], float],
        sources: Callable[[], Iterable[int]] = tuple,
    ) -> Loop:
        """Return the loop of a network's task. The controllers take turns, since none of them blocks.

        At a start their threads would compete for the interpreter, and fifty need up to twice the CPU time.
        """

        def step_in_turn(now: float) -> float:
            with self._turn:
                return step(now)

        return supervisor.loop(name, step_in_turn if name == controller.NAME else step, sources)
