"""Start of the observers of a node: health server, status socket, health conditions, probes, responder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

from flanneld.diagnostics import conditions
from flanneld.network.query import DEFAULT_PORT
from flanneld.node import Node, Phase
from flanneld.subnet.subnet_file import beside

log = logging.getLogger(__name__)


class Observation:
    """Starter of the servers and watchers beside a node. Optional ones are imported when started."""

    def __init__(self) -> None:
        self._has_socket = False

    def __call__(self, node: Node, phase: Phase) -> None:
        """Start what may look at the node from this moment on."""
        if phase is Phase.BEGINS:
            _serve_health(node)
            return
        if phase is Phase.SERVES:
            node.tasks.start("conditions", partial(conditions.watch, node, node.tasks.stop, node.tell))
            _probe_peers(node)
            _follow_path_mtu(node)
            _meet_peers(node)
            _answer_queries(node)
        if not self._has_socket:
            self._has_socket = True
            _serve_status(node)


def _serve_health(node: Node) -> None:
    options = node.options
    if options.healthz_port <= 0:
        return
    # Only imported with -healthz-port.
    from flanneld.diagnostics.serving import Checks, HealthServer

    checks = Checks(
        node.overdue,
        node.readiness.is_ready,
        node.readiness.unready,
        lambda: [f"leases: taken from {node.cached}"] if node.cached else [],
        partial(conditions.parts, node),
        partial(_metrics, node),
    )
    server = HealthServer(options.healthz_ip, options.healthz_port, checks)
    node.tasks.start("health server", server.serve, server.close)


def _serve_status(node: Node) -> None:
    """Start the status socket, once traffic flows or startup has to wait."""
    from flanneld.diagnostics.serving import StatusSocket

    server = StatusSocket.open(beside(Path(node.options.subnet_file), "sock"), partial(_document, node))
    if server:
        node.tasks.start("status socket", server.serve, server.close)


def _probe_peers(node: Node) -> None:
    number = node.options.peer_probes
    if not number:
        return
    assert node.member is not None
    assert node.controller is not None
    from flanneld.reconcile.probes import Prober

    heartbeat = partial(node.tasks.heartbeat, "prober")
    prober = Prober(number, node.member.lease, node.controller, stop=node.tasks.stop, heartbeat=heartbeat)
    node.prober = prober
    node.tasks.start("prober", prober.run)


def _follow_path_mtu(node: Node) -> None:
    if not node.options.follow_path_mtu:
        return
    assert node.member is not None
    assert node.controller is not None
    from flanneld.reconcile.probes import MTU_TASK, PathMtuFollower, answering

    if not answering(node.member.lease, node.controller.peers.local_resources()):
        log.warning("-follow-path-mtu has no effect: %s has no tunnel", node.member.config.backend_type)
        return
    loop = node.make_loop(MTU_TASK, PathMtuFollower(node.member.lease, node.controller).step)
    node.tasks.start(MTU_TASK, loop.run, loop.cancel)


def _meet_peers(node: Node) -> None:
    """Announce our endpoints, and read those of peers, if the backend has a mesh."""
    controller = node.controller
    assert controller is not None
    mesh = controller.tables.mesh
    if mesh is None:
        if node.options.public_name:
            log.warning('-public-name has no effect: it is for wireguard with "Mesh": true')
        return
    from flanneld.backends.wireguard.mesh import NAME, MeshTask, ask_peers, resolver

    uplinks = controller.uplink_manager
    task = MeshTask(
        mesh,
        node.store,
        lambda: uplinks.uplink,
        uplinks.networks,
        controller.tables.sessions,
        ask_peers(answer_port(node)),
        node.options.public_name,
        resolver(node.tasks.stop),
    )
    loop = node.make_loop(NAME, task.step)
    node.tasks.start(NAME, loop.run, loop.cancel)


def answer_port(node: Node) -> int:
    """Return the port at which this node answers queries, 0 for none."""
    in_mesh = node.controller is not None and node.controller.tables.mesh is not None
    return node.options.answer_port or (DEFAULT_PORT if in_mesh else 0)


def _answer_queries(node: Node) -> None:
    """Answer other nodes' queries, with ``-answer-port`` or in a mesh."""
    port = answer_port(node)
    if not port:
        return
    from flanneld.diagnostics.responder import Responder

    responder = Responder(node, port)
    loop = node.make_loop("responder", responder.step, responder.sources)

    def run() -> None:
        # One process may serve this network again, and the port must be free then.
        with closing(responder):
            loop.run()

    node.tasks.start("responder", run, loop.cancel)


def _metrics(node: Node, accept: str) -> tuple[int, str, bytes]:
    from flanneld.diagnostics.metrics import page

    return page(node, accept)


def _document(node: Node) -> Iterable[bytes]:
    from flanneld.diagnostics.describe import describe, peers
    from flanneld.diagnostics.status import pieces

    return pieces(describe(node), peers(node))
