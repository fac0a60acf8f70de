"""Lease server (``-listen``): serves other nodes' requests from etcd or from the store in a file."""

from __future__ import annotations

import logging
import os
import resource
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flanneld import __version__
from flanneld.diagnostics.serving import Checks, HealthServer
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.option_values import RemoteServer
from flanneld.options import Options
from flanneld.runtime import process
from flanneld.runtime.process import InstanceLock
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet.embedded.store import KeyStore, open_file, write_config
from flanneld.subnet.embedded.tokens import Tokens
from flanneld.subnet.opening import etcd_options, remote_tls
from flanneld.subnet.remote.change_log import ChangeLog
from flanneld.subnet.remote.credentials import identity_context, server_context
from flanneld.subnet.remote.leases import over_etcd, over_file
from flanneld.subnet.remote.rest import RestApi
from flanneld.subnet.remote.server import LeaseServer, open_listener
from flanneld.subnet.store import LONGEST_SILENCE

log = logging.getLogger(__name__)


def open_file_store(wanted: Options, supervisor: Supervisor) -> KeyStore:
    """Open the store of ``-store`` for this process alone, with the network of ``-network``.

    Raises ``Fatal`` if it cannot be used, or another flanneld uses it.
    """
    lock = InstanceLock(Path(f"{Path(wanted.store).resolve()}.lock"))
    lock.wait(supervisor.stop)
    store = open_file(wanted.store, create=bool(wanted.network))
    if wanted.network:
        with _at_start():
            write_config(store, wanted.network)
    return store


@contextmanager
def _at_start() -> Iterator[None]:
    """Turn a failed write into ``Fatal``: at startup an operator reads the reason."""
    try:
        yield
    except Retryable as problem:
        raise Fatal(problem.problem, problem.remedy) from None


def run(wanted: Options, environ: Mapping[str, str]) -> int:
    """Serve leases until told to stop, without a lease of our own. Return 0 then, 1 after a failure."""
    supervisor, notifier = Supervisor(quiet=(Cancelled,)), process.Notifier()
    log.info("flanneld %s %s", __version__, wanted.described())
    supervisor.handle_signals()
    file = open_file_store(wanted, supervisor) if wanted.store else None
    service = LeaseService(wanted, environ, supervisor, file)
    if wanted.healthz_port:
        checks = Checks(
            supervisor.overdue,
            lambda: not service.problem,
            lambda: [service.problem],
            metrics=service.server.metrics,
        )
        health = HealthServer(wanted.healthz_ip, wanted.healthz_port, checks)
        supervisor.start("health server", health.serve, health.close)
    service.start()
    notifier.status(f"server on {service.where}, leases in {service.store.name}")
    notifier.ready()
    ticks: list[tuple[Callable[[], None], float]] = [(notifier.try_again, 1.0)]
    interval = process.watchdog_interval(environ)
    if interval is not None:
        ticks.append((lambda: None if supervisor.overdue() else notifier.watchdog(), interval))
    supervisor.wait(*ticks)
    notifier.stopping()
    service.close()
    supervisor.shutdown()
    return 1 if supervisor.failure else 0


class LeaseService:
    """Listening lease server with its tasks under the supervisor."""

    def __init__(
        self, wanted: Options, environ: Mapping[str, str], supervisor: Supervisor, file: KeyStore | None
    ) -> None:
        self._supervisor = supervisor
        _allow_many_connections()
        self.store = over_file(file) if file else over_etcd(etcd_options(wanted), wanted.etcd_api)
        files = remote_tls(wanted)
        tokens = Tokens(file.database) if file and wanted.require_token else None
        if tokens and not files.certfile:
            with _at_start():
                identity = tokens.identity()
            tls: ssl.SSLContext | None = identity_context(identity, files.cafile)
        else:
            tls = server_context(files, with_tokens=tokens is not None)
        listener = open_listener(wanted.listen, environ)
        self.where = _name(listener.getsockname()) + (" with TLS" if tls else "")
        checked = (tokens.check,) if tokens else ()
        self.server = LeaseServer(listener, RestApi(self.store, self._follow, *checked), tls)

    @property
    def problem(self) -> str:
        """Reason why the leases cannot be watched now; empty if they can."""
        return self.store.problem

    def start(self) -> None:
        """Start to answer requests."""
        self._supervisor.start("server", self.server.serve, self.close)
        log.info("running as server on %s; leases are in %s", self.where, self.store.name)

    def close(self) -> None:
        """Answer each watch, so that its client changes to another server, then stop."""
        self.store.close()
        self.server.close()

    def _follow(self, changes: ChangeLog) -> None:
        alive = partial(self._supervisor.heartbeat, "watch of etcd", LONGEST_SILENCE)
        self._supervisor.start("watch of etcd", lambda: changes.run(alive), changes.close)


def _allow_many_connections() -> None:
    """Raise the soft limit of file descriptors, 1024 by default, to the hard one: a client takes three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _name(address: object) -> str:
    if isinstance(address, tuple):
        return str(RemoteServer(*address[:2]))
    return os.fsdecode(address) if isinstance(address, str | bytes) else "a socket"
