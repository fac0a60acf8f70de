"""Where others look at the daemon: the health server and the status socket."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flanneld.diagnostics import conditions
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.readiness import Readiness
from flanneld.runtime.supervisor import Supervisor


class Observation:
    """Starts the servers. What answers is made of is imported when it is asked for."""

    def __init__(self, components: Components, readiness: Readiness, supervisor: Supervisor) -> None:
        self._components = components
        self._readiness = readiness
        self._supervisor = supervisor
        self._has_socket = False

    def serve_health(self) -> None:
        options = self._components.options
        if options.healthz_port <= 0:
            return
        from flanneld.diagnostics.health_server import Checks, HealthServer  # only for those who ask for it

        checks = Checks(
            self._supervisor.overdue,
            self._readiness.is_ready,
            self._readiness.unready,
            self._caveats,
            lambda: [(part.name, part.trouble) for part in conditions.parts(self._components)],
            self._metrics,
        )
        server = HealthServer(options.healthz_ip, options.healthz_port, checks)
        self._supervisor.start("health server", server.serve, server.close)

    def serve_status(self) -> None:
        """Once the packets flow, or as soon as there is something to wait for; later calls do nothing."""
        if self._has_socket:
            return
        from flanneld.diagnostics.status_socket import StatusSocket, path_beside

        self._has_socket = True
        server = StatusSocket(path_beside(Path(self._components.options.subnet_file)), self._document)
        if server.open():
            self._supervisor.start("status socket", server.serve, server.close)

    def _caveats(self) -> list[str]:
        return [f"leases: taken from {self._components.cached}"] if self._components.cached else []

    def _metrics(self, accept: str) -> tuple[int, str, bytes]:
        from flanneld.diagnostics.metrics import page

        return page(self._components, accept)

    def _document(self) -> Iterable[bytes]:
        from flanneld.diagnostics.status import pieces

        return pieces(self._components)
