"""Start of the observers: health server, status socket, health conditions, probes to peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

from flanneld.diagnostics import conditions
from flanneld.diagnostics.components import Components
from flanneld.model import Lease
from flanneld.readiness import Readiness
from flanneld.reconcile.controller import Controller
from flanneld.runtime.loop import StepLoop
from flanneld.runtime.supervisor import Supervisor


class Observation:
    """Starter of the servers and watchers. Optional ones are imported when started."""

    def __init__(self, components: Components, readiness: Readiness, supervisor: Supervisor) -> None:
        self._components = components
        self._readiness = readiness
        self._supervisor = supervisor
        self._has_socket = False

    def serve_health(self) -> None:
        options = self._components.options
        if options.healthz_port <= 0:
            return
        # Only imported with -healthz-port.
        from flanneld.diagnostics.serving import Checks, HealthServer

        checks = Checks(
            self._supervisor.overdue,
            self._readiness.is_ready,
            self._readiness.unready,
            self._caveats,
            lambda: [(part.name, part.problem) for part in conditions.parts(self._components)],
            self._metrics,
        )
        server = HealthServer(options.healthz_ip, options.healthz_port, checks)
        self._supervisor.start("health server", server.serve, server.close)

    def serve_status(self) -> None:
        """Start the status socket, once traffic flows or startup has to wait. Later calls do nothing."""
        if self._has_socket:
            return
        from flanneld.diagnostics.serving import StatusSocket, path_beside

        self._has_socket = True
        server = StatusSocket(path_beside(Path(self._components.options.subnet_file)), self._document)
        if server.open():
            self._supervisor.start("status socket", server.serve, server.close)

    def watch_conditions(self, tell: Callable[[list[str]], None]) -> None:
        """Call ``tell`` with the conditions on each change."""
        stop = self._supervisor.stop
        self._supervisor.start("conditions", lambda: conditions.watch(self._components, stop, tell))

    def probe_peers(self, lease: Lease, reconciler: Controller) -> None:
        number = self._components.options.peer_probes
        if not number:
            return
        from flanneld.diagnostics.probes import Prober

        heartbeat = partial(self._supervisor.heartbeat, "prober")
        prober = Prober(number, lease, reconciler, stop=self._supervisor.stop, heartbeat=heartbeat)
        self._components.prober = prober
        self._supervisor.start("prober", prober.run)

    def answer_queries(self) -> None:
        """Answer other nodes' queries, with ``-answer-port``."""
        port = self._components.options.answer_port
        if not port:
            return
        from flanneld.diagnostics.responder import Responder

        responder = Responder(self._components, port)
        heartbeat = partial(self._supervisor.heartbeat, "responder")
        loop = StepLoop(responder.step, responder.sources, stop=self._supervisor.stop, heartbeat=heartbeat)

        def run() -> None:
            # One process may serve this network again, and the port must be free then.
            with closing(responder):
                loop.run()

        self._supervisor.start("responder", run, loop.cancel)

    def _caveats(self) -> list[str]:
        return [f"leases: taken from {self._components.cached}"] if self._components.cached else []

    def _metrics(self, accept: str) -> tuple[int, str, bytes]:
        from flanneld.diagnostics.metrics import page

        return page(self._components, accept)

    def _document(self) -> Iterable[bytes]:
        from flanneld.diagnostics.describe import describe, peers
        from flanneld.diagnostics.status import pieces

        return pieces(describe(self._components), peers(self._components))
