"""Server of leases (``-listen``): no lease, device or file of its own, only other nodes' requests."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from functools import partial

from flanneld import __version__
from flanneld.diagnostics.health_server import Checks, HealthServer
from flanneld.errors import Cancelled
from flanneld.options import Options
from flanneld.runtime import sd_notify
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet.manager import LONGEST_SILENCE
from flanneld.subnet.remote.change_log import ChangeLog
from flanneld.subnet.remote.http_server import LeaseServer
from flanneld.subnet.remote.lease_store import LeaseStore
from flanneld.subnet.remote.listener import open_listener
from flanneld.subnet.remote.rest import RestApi
from flanneld.subnet.remote.tls import server_context
from flanneld.subnet.stores import etcd_options, remote_tls

log = logging.getLogger(__name__)


def run(wanted: Options, environ: Mapping[str, str]) -> int:
    """Serve until told to stop; the exit status is 0 then, and 1 after a failure."""
    supervisor, notifier = Supervisor(quiet=(Cancelled,)), sd_notify.Notifier()
    log.info("flanneld %s %s", __version__, wanted.described())
    supervisor.handle_signals()
    _allow_many_connections()
    store = LeaseStore(etcd_options(wanted), wanted.etcd_api)

    def follow(changes: ChangeLog) -> None:
        alive = partial(supervisor.heartbeat, "watch of etcd", LONGEST_SILENCE)
        supervisor.start("watch of etcd", lambda: changes.run(alive), changes.close)

    tls = server_context(remote_tls(wanted))
    listener = open_listener(wanted.listen, environ)
    where = _name(listener.getsockname())
    server = LeaseServer(listener, RestApi(store, follow), tls)
    if wanted.healthz_port:
        checks = Checks(
            supervisor.overdue, lambda: not store.problem, lambda: [store.problem], metrics=server.metrics
        )
        health = HealthServer(wanted.healthz_ip, wanted.healthz_port, checks)
        supervisor.start("health server", health.serve, health.close)
    supervisor.start("server", server.serve)
    log.info("running as server on %s%s; leases are in %s", where, " with TLS" if tls else "", store.name)
    notifier.status(f"server on {where}, leases in {store.name}")
    notifier.ready()
    ticks = []
    interval = sd_notify.watchdog_interval(environ)
    if interval is not None:
        ticks.append((lambda: None if supervisor.overdue() else notifier.watchdog(), interval))
    supervisor.wait(*ticks)
    notifier.stopping()
    store.close()  # Each watch is answered, and the clients go on with another server.
    server.close()
    supervisor.shutdown()
    return 1 if supervisor.failure else 0


def _allow_many_connections() -> None:
    """Raise the soft limit of file descriptors, 1024 by default, to the hard one: a client takes three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _name(address: object) -> str:
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return os.fsdecode(address) if isinstance(address, str | bytes) else "a socket"
