"""Prometheus metrics of the daemon, for ``/metrics``.

Imported at the first request. The only work is to read the counters.
"""

from __future__ import annotations

import errno
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct

from flanneld import __version__
from flanneld.diagnostics.conditions import parts
from flanneld.diagnostics.describe import states
from flanneld.model import FAMILIES, Lease
from flanneld.node import Node
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import BOUNDS, FOUND, TOLD, Histogram, wall
from flanneld.runtime import clock
from flanneld.state.resources import Kind, Link

_INSTALL = "pip install prometheus-client, or apt install python3-prometheus-client"
_ERRNO = {os.strerror(code): name for code, name in errno.errorcode.items()}
#: Reasons of refusals that are counted from 0; others begin with the first one.
_USUAL_ERRORS = ("EEXIST", "EINVAL", "ENETUNREACH", "ENODEV", "EPERM", "other")

#: Number, histogram, numbers by label values, or None for no sample now.
Reading = float | Histogram | dict[Any, Any] | None
Read = Callable[[Node], Reading]


class Metric(Struct, frozen=True):
    """A metric.

    ``type`` is ``counter``, ``gauge`` or ``histogram``; a counter's name ends with ``_total``.
    """

    type: str
    name: str
    meaning: str
    read: Read
    labels: tuple[str, ...] = ()

    def samples(self, node: Node) -> Iterator[tuple[tuple[str, ...], float] | Histogram]:
        """Yield label values with a number each, or a histogram."""
        match self.read(node):
            case dict() as numbers:
                # Copied at once, because another thread may add to it.
                for labels, number in numbers.copy().items():
                    yield labels if isinstance(labels, tuple) else (labels,), number
            case Histogram() as histogram:
                yield histogram
            case None:
                return
            case number:
                yield (), number


# ---- reading ------------------------------------------------------------------------------------


def _of_the_controller(read: Callable[[Controller], Reading], absent: Reading = None) -> Read:
    return lambda node: read(node.controller) if node.controller else absent


def _lease(read: Callable[[Lease], Reading]) -> Read:
    return lambda node: read(node.lease_keeper.lease) if node.lease_keeper else None


def _public_ips(controller: Controller) -> Reading:
    uplink = controller.uplink_manager.uplink
    return {str(ip): 1 for family in FAMILIES if (ip := uplink.public(family))}


def _mtus(controller: Controller) -> Reading:
    """Return the MTU by device. They differ: VXLAN's outer headers take 20 bytes more over IPv6."""
    uplink = controller.uplink_manager.uplink
    links = (each for each in controller.peers.local_resources() if isinstance(each, Link))
    return {uplink.name: uplink.mtu} | {link.name: link.mtu for link in links}


def _peers(controller: Controller) -> Reading:
    """Count peers by backend and state. A node without peers reports 0, so that sums are defined."""
    found = states(controller.peers.view(), controller.tables.pending())
    own = controller.uplink_manager.backend.attributes().backend_type
    return {(own, "in-the-kernel"): 0} | Counter(
        (backend, state.replace(" ", "-")) for backend, state in found
    )


def _heals(node: Node) -> Reading:
    desired = node.controller.peers.desired_kinds() if node.controller else ()
    return _from_zero({Kind.RULES, Kind.FILE, *desired}, (TOLD, FOUND)) | node.heals()


def _from_zero(kinds: Iterable[Kind], labels: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return 0 for each label of each kind: ``increase`` does not see the step that makes a series."""
    return {(kind.name.lower(), label): 0 for kind in sorted(kinds) for label in labels}


def _objects(number: Callable[[int, int], int]) -> Read:
    """Return a reader that derives a number from the desired and the refused objects of a kind."""

    def read(controller: Controller) -> Reading:
        desired = Counter(controller.peers.desired_kinds())
        refused = Counter(failure.resource.kind for failure in controller.tables.pending().values())
        return {kind.name.lower(): number(desired[kind], refused[kind]) for kind in sorted(desired)}

    return _of_the_controller(read)


def _sessions(controller: Controller) -> Reading:
    return Counter(session.state for session in controller.tables.sessions())


def _oldest_handshake(controller: Controller) -> Reading:
    """Return the age of the oldest handshake among live sessions; dead ones may be months old."""
    stamps = [
        each.handshake
        for each in controller.tables.sessions()
        if each.is_established and each.handshake is not None
    ]
    return max(0.0, clock.wall() - min(stamps)) if stamps else None


def _session_bytes(controller: Controller) -> Reading:
    sessions = controller.tables.sessions()
    if not sessions:
        return None
    return {
        "received": sum(each.rx_bytes for each in sessions),
        "sent": sum(each.tx_bytes for each in sessions),
    }


def _refusals(controller: Controller) -> Reading:
    numbers: Counter[tuple[str, ...]] = Counter()
    for (kind, reason), number in controller.tables.refusals().items():
        numbers[kind, _ERRNO.get(reason, "other")] += number
    return _from_zero(set(controller.peers.desired_kinds()), _USUAL_ERRORS) | numbers


# ---- definitions --------------------------------------------------------------------------------


_gauge, _counter, _histogram = (partial(Metric, kind) for kind in ("gauge", "counter", "histogram"))

#: All metrics, in the order of the page.
METRICS = (
    _gauge(
        "flannel_build_info",
        "1, with the running versions as labels",
        lambda _: {(__version__, platform.python_version()): 1},
        ("version", "python"),
    ),
    _gauge("flannel_ready", "1 if this node is ready for containers", lambda node: not node.missing()),
    _gauge(
        "flannel_condition",
        "1 while this part of the daemon or its host is unhealthy; see `flannelctl status`",
        lambda node: {each.part: bool(each.problem) for each in parts(node)},
        ("part",),
    ),
    _gauge(
        "flannel_subnet_info",
        "1 for each subnet of our lease",
        _lease(lambda lease: {str(net): 1 for net in lease.key if net is not None}),
        ("subnet",),
    ),
    _gauge(
        "flannel_public_ip_info",
        "1 for each address at which peers reach us",
        _of_the_controller(_public_ips),
        ("ip",),
    ),
    _gauge("flannel_mtu_bytes", "largest packet that the device takes", _of_the_controller(_mtus), ("dev",)),
    _gauge(
        "flannel_mtu_lowered_bytes",
        "bytes by which `-follow-path-mtu` has lowered the network's MTU",
        _of_the_controller(lambda controller: controller.uplink_manager.bytes_lowered),
    ),
    _gauge(
        "flannel_lease_expiry_timestamp_seconds",
        "when our lease ends if it is not renewed; none for a reservation",
        _lease(lambda lease: None if lease.expires is None else wall(lease.expires)),
    ),
    _gauge(
        "flannel_lease_ttl_seconds",
        "seconds until our lease ends",
        _lease(lambda lease: None if lease.expires is None else lease.expires - clock.now()),
    ),
    _counter(
        "flannel_firewall_resyncs_total",
        "repairs of our firewall rules, by the program that removed them",
        lambda node: node.firewall.repairs if node.firewall else None,
        ("backend", "cause"),
    ),
    _gauge("flannel_peers", "leases of other nodes", _of_the_controller(_peers), ("backend", "state")),
    _gauge(
        "flannel_desired_objects",
        "objects in the desired state",
        _objects(lambda desired, _: desired),
        ("kind",),
    ),
    _gauge(
        "flannel_actual_objects",
        "desired objects that the kernel holds, as last read or written",
        _objects(lambda desired, refused: desired - refused),
        ("kind",),
    ),
    _gauge(
        "flannel_drift_objects",
        "desired objects that the kernel refuses",
        _objects(lambda _, refused: refused),
        ("kind",),
    ),
    _counter(
        "flannel_heals_total",
        "objects repaired after a change by another program",
        _heals,
        ("kind", "cause"),
    ),
    _counter(
        "flannel_netlink_errors_total", "writes refused", _of_the_controller(_refusals), ("op", "errno")
    ),
    _counter(
        "flannel_netlink_overruns_total",
        "losses of kernel notifications",
        _of_the_controller(lambda controller: controller.tables.work.overruns, absent=0),
    ),
    _gauge(
        "flannel_last_sync_timestamp_seconds",
        "when the kernel was last read",
        _of_the_controller(lambda controller: controller.tables.work.last_sync, absent=0),
    ),
    _gauge(
        "flannel_removal_guard_held",
        "1 while removals are held back",
        _of_the_controller(lambda controller: bool(controller.removal_guard.holds), absent=0),
    ),
    _counter(
        "flannel_removal_guard_holds_total",
        "times removals were held back",
        _of_the_controller(lambda controller: controller.removal_guard.holds_total, absent=0),
    ),
    _gauge("flannel_sessions", "encrypted sessions with peers", _of_the_controller(_sessions), ("state",)),
    _gauge(
        "flannel_session_oldest_handshake_seconds",
        "seconds since the last handshake of the oldest session",
        _of_the_controller(_oldest_handshake),
    ),
    _gauge(
        "flannel_session_bytes",
        "bytes carried by the present sessions",
        _of_the_controller(_session_bytes),
        ("direction",),
    ),
    _histogram(
        "flannel_event_to_kernel_seconds",
        "from a lease event until the kernel has the lease's objects",
        _of_the_controller(lambda controller: controller.tables.work.event_to_kernel),
    ),
    _histogram(
        "flannel_apply_seconds",
        "one write to the kernel",
        _of_the_controller(lambda controller: controller.tables.work.apply),
    ),
    _histogram(
        "flannel_reconcile_seconds",
        "one audit of the kernel with its repairs",
        _of_the_controller(lambda controller: controller.tables.work.reconcile),
    ),
    _gauge(
        "flannel_peer_probe_loss_ratio",
        "the share of the last 100 probes that got no answer, with `-peer-probes`",
        lambda node: node.prober.loss if node.prober else None,
    ),
    _histogram(
        "flannel_peer_probe_rtt_seconds",
        "from a probe until its answer",
        lambda node: node.prober.rtt if node.prober else None,
    ),
    _histogram(
        "flannel_datastore_request_seconds",
        "one request to the store, without watches",
        lambda node: node.store_counters.requests,
    ),
    _counter(
        "flannel_datastore_errors_total",
        "failed requests, without watches",
        lambda node: node.store_counters.errors,
    ),
    _gauge("flannel_datastore_up", "1 if the store answers", lambda node: node.store_is_up),
    _counter(
        "flannel_lease_renewals_total",
        "renewals of our lease",
        lambda node: node.store_counters.renewals,
        ("result",),
    ),
    _counter(
        "flannel_watch_events_total",
        "lease events received from the store",
        lambda node: node.store_counters.events,
    ),
    _counter(
        "flannel_watch_resyncs_total",
        "relists of all leases, by reason",
        lambda node: node.store_counters.resyncs,
        ("reason",),
    ),
    _gauge(
        "flannel_watch_last_event_timestamp_seconds",
        "time of the last lease event from the store",
        lambda node: node.store_counters.last_event,
    ),
)


# ---- page ---------------------------------------------------------------------------------------


def page(node: Node, accept: str) -> tuple[int, str, bytes]:
    """Return status, content type and page for an Accept header; 503 and the remedy without the library."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        line = f"no metrics without prometheus_client; install it with: {_INSTALL}\n"
        return 503, "text/plain; charset=utf-8", line.encode()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(node))
    more = node.more_metrics
    # Only the plain text format can be put together from two texts.
    encode, content_type = choose_encoder("" if more else accept)
    return 200, content_type, encode(registry) + (more().encode() if more else b"")


class _Collector:
    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Any]:
        """Return nothing: otherwise the library would read all metrics only to learn their names."""
        return []

    def collect(self) -> Iterator[Any]:
        for metric in METRICS:
            family = _family(metric)
            for sample in metric.samples(self._node):
                if isinstance(sample, Histogram):
                    family.add_metric((), _buckets(sample), sample.total)
                else:
                    family.add_metric(*sample)
            yield family


def _family(metric: Metric) -> Any:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[metric.type](metric.name, metric.meaning, labels=metric.labels)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus defines them."""
    counts, below = histogram.counts.copy(), 0
    found = []
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found
