"""The daemon's counters in Prometheus' words, for ``/metrics``.

Imported when somebody asks for the first time; reading the counters is all the work there is.
"""

from __future__ import annotations

import errno
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from flanneld import __version__
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.status import states
from flanneld.model import FAMILIES
from flanneld.reconcile.counters import BOUNDS, Histogram, wall
from flanneld.runtime import clock
from flanneld.state.resources import Kind, Link

_INSTALL = "pip install 'flanneld[metrics]', or apt install python3-prometheus-client"
_ERRNO = {os.strerror(code): name for code, name in errno.errorcode.items()}

#: Label values, in the order of the labels, with a number; or a histogram.
Sample = tuple[tuple[str, ...], float]
Reader = Callable[[Components], Iterator[Sample]]


class Metric(Struct, frozen=True):
    """``type`` is ``counter``, ``gauge`` or ``histogram``; a counter's name ends with ``_total``."""

    type: str
    name: str
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Components], Iterator[Any]]


def _metrics() -> Iterator[Metric]:
    yield from _of_the_node()
    yield from _of_the_kernel()
    yield from _of_the_brake()
    yield from _of_the_time_it_takes()
    yield from _of_the_probes()
    yield from _of_the_store()
    yield from _of_the_watch()


# ---- what there is ------------------------------------------------------------------------------


def _of_the_node() -> Iterator[Metric]:
    yield Metric("gauge", "flannel_build_info", "1 for what runs here", ("version", "python"), _build)
    yield Metric("gauge", "flannel_ready", "1 if pods can be started here", (), _ready)
    yield Metric("gauge", "flannel_subnet_info", "1 for each subnet of our lease", ("subnet",), _subnets)
    yield Metric(
        "gauge", "flannel_public_ip_info", "1 for each address at which peers reach us", ("ip",), _public_ips
    )
    yield Metric("gauge", "flannel_mtu_bytes", "largest packet that the device takes", ("dev",), _mtus)
    yield Metric(
        "gauge",
        "flannel_lease_expiry_timestamp_seconds",
        "when our lease ends if it is not renewed; none for a reservation",
        (),
        _expiry,
    )
    yield Metric("gauge", "flannel_lease_ttl_seconds", "seconds until then", (), _time_left)
    yield Metric(
        "counter",
        "flannel_firewall_resyncs_total",
        "times that our firewall rules had to be put back, by who removed them",
        ("backend", "cause"),
        _firewall_repairs,
    )


def _of_the_kernel() -> Iterator[Metric]:
    yield Metric("gauge", "flannel_peers", "leases of other nodes", ("backend", "state"), _peers)
    yield Metric("gauge", "flannel_desired_objects", "what the kernel should hold", ("kind",), _desired)
    yield Metric(
        "gauge",
        "flannel_actual_objects",
        "what of that it holds, as last read or written",
        ("kind",),
        _actual,
    )
    yield Metric("gauge", "flannel_drift_objects", "what of that it refuses", ("kind",), _drift)
    yield Metric(
        "counter",
        "flannel_heals_total",
        "objects put right after others changed them",
        ("kind", "cause"),
        _heals,
    )
    yield Metric("counter", "flannel_netlink_errors_total", "writes refused", ("op", "errno"), _refusals)
    yield Metric(
        "counter", "flannel_netlink_overruns_total", "times that notifications were lost", (), _overruns
    )
    yield Metric(
        "gauge", "flannel_last_sync_timestamp_seconds", "when the kernel was last read", (), _last_sync
    )


def _of_the_brake() -> Iterator[Metric]:
    yield Metric("gauge", "flannel_removal_brake_held", "1 while removals are held back", (), _removal_guard)
    yield Metric(
        "counter",
        "flannel_removal_brake_holds_total",
        "times that removals were held back",
        (),
        _removal_guard_holds,
    )


def _of_the_time_it_takes() -> Iterator[Metric]:
    yield Metric(
        "histogram",
        "flannel_event_to_kernel_seconds",
        "from a lease's arrival from the store until the kernel has what it means",
        (),
        lambda components: _histogram(components, "event_to_kernel"),
    )
    yield Metric(
        "histogram",
        "flannel_apply_seconds",
        "one write to the kernel",
        (),
        lambda components: _histogram(components, "apply"),
    )
    yield Metric(
        "histogram",
        "flannel_reconcile_seconds",
        "one reading of the kernel with its repairs",
        (),
        lambda components: _histogram(components, "reconcile"),
    )


def _of_the_probes() -> Iterator[Metric]:
    yield Metric(
        "gauge",
        "flannel_peer_probe_loss_ratio",
        "the share of the last 100 probes that got no answer, with `-peer-probes`",
        (),
        _loss,
    )
    yield Metric(
        "histogram",
        "flannel_peer_probe_rtt_seconds",
        "from a probe until its answer",
        (),
        lambda components: iter([components.prober.rtt] if components.prober else []),
    )


def _of_the_store() -> Iterator[Metric]:
    yield Metric(
        "histogram",
        "flannel_datastore_request_seconds",
        "one request to the store, watches left out",
        (),
        lambda components: iter([components.store.requests]),
    )
    yield Metric(
        "counter",
        "flannel_datastore_errors_total",
        "requests that failed, watches left out",
        (),
        lambda components: _one(components.store.errors),
    )
    yield Metric("gauge", "flannel_datastore_up", "1 if the store answers", (), _up)
    yield Metric(
        "counter",
        "flannel_lease_renewals_total",
        "renewals of our lease",
        ("result",),
        lambda components: _each(components.store.renewals),
    )


def _of_the_watch() -> Iterator[Metric]:
    yield Metric(
        "counter",
        "flannel_watch_events_total",
        "changes of leases that the store told",
        (),
        lambda components: _one(components.store.events),
    )
    yield Metric(
        "counter",
        "flannel_watch_resyncs_total",
        "times that all leases were read again, by who wanted it",
        ("reason",),
        lambda components: _each(components.store.resyncs),
    )
    yield Metric(
        "gauge",
        "flannel_watch_last_event_timestamp_seconds",
        "when the store last told of a lease",
        (),
        lambda components: _one(components.store.last_event),
    )


# ---- reading ------------------------------------------------------------------------------------


def _one(number: float) -> Iterator[Sample]:
    yield (), number


def _each(numbers: dict[str, int]) -> Iterator[Sample]:
    yield from (((name,), number) for name, number in numbers.copy().items())


def _build(_components: Components) -> Iterator[Sample]:
    yield (__version__, platform.python_version()), 1


def _ready(components: Components) -> Iterator[Sample]:
    return _one(not components.missing())


def _subnets(components: Components) -> Iterator[Sample]:
    if components.lease_keeper:
        yield from (((str(net),), 1) for net in components.lease_keeper.lease.key if net is not None)


def _public_ips(components: Components) -> Iterator[Sample]:
    if components.reconciler:
        uplink = components.reconciler.uplink_manager.uplink
        yield from (((str(ip),), 1) for family in FAMILIES if (ip := uplink.public(family)))


def _mtus(components: Components) -> Iterator[Sample]:
    """Each device has room for its own outer headers: VXLAN takes 20 bytes more over IPv6 than over IPv4."""
    if components.reconciler:
        uplink = components.reconciler.uplink_manager.uplink
        yield (uplink.name,), uplink.mtu
        links = (each for each in components.reconciler.peers.local_wishes() if isinstance(each, Link))
        yield from (((link.name,), link.mtu) for link in links)


def _expiry(components: Components) -> Iterator[Sample]:
    expires = _expires(components)
    if expires is not None:
        yield (), wall(expires)


def _time_left(components: Components) -> Iterator[Sample]:
    expires = _expires(components)
    if expires is not None:
        yield (), expires - clock.now()


def _expires(components: Components) -> float | None:
    return components.lease_keeper.lease.expires if components.lease_keeper else None


def _firewall_repairs(components: Components) -> Iterator[Sample]:
    if components.firewall:
        yield from components.firewall.repairs.copy().items()


def _peers(components: Components) -> Iterator[Sample]:
    if components.reconciler:
        found = states(components.reconciler.peers.view(), components.reconciler.pending())
        numbers = Counter((backend, state.replace(" ", "-")) for backend, state in found)
        yield from numbers.items()


def _desired(components: Components) -> Iterator[Sample]:
    return _by_kind(_wanted(components))


def _drift(components: Components) -> Iterator[Sample]:
    pending = _pending(components)
    return _by_kind(Counter({kind: pending[kind] for kind in _wanted(components)}))


def _actual(components: Components) -> Iterator[Sample]:
    pending = _pending(components)
    return _by_kind(Counter({kind: number - pending[kind] for kind, number in _wanted(components).items()}))


def _wanted(components: Components) -> Counter[Kind]:
    return Counter(components.reconciler.peers.wanted_kinds()) if components.reconciler else Counter()


def _pending(components: Components) -> Counter[Kind]:
    failures = components.reconciler.pending().values() if components.reconciler else ()
    return Counter(failure.resource.kind for failure in failures)


def _by_kind(numbers: Counter[Kind]) -> Iterator[Sample]:
    yield from (((kind.name.lower(),), numbers[kind]) for kind in sorted(numbers))


def _heals(components: Components) -> Iterator[Sample]:
    if components.reconciler:
        yield from components.reconciler.heals().items()


def _refusals(components: Components) -> Iterator[Sample]:
    if components.reconciler:
        numbers: Counter[tuple[str, ...]] = Counter()
        for (kind, reason), number in components.reconciler.refusals().items():
            numbers[kind, _ERRNO.get(reason, "other")] += number
        yield from numbers.items()


def _loss(components: Components) -> Iterator[Sample]:
    loss = components.prober.loss if components.prober else None
    if loss is not None:
        yield (), loss


def _overruns(components: Components) -> Iterator[Sample]:
    return _one(components.reconciler.work.overruns if components.reconciler else 0)


def _last_sync(components: Components) -> Iterator[Sample]:
    return _one(components.reconciler.work.last_sync if components.reconciler else 0)


def _removal_guard(components: Components) -> Iterator[Sample]:
    return _one(bool(components.reconciler and components.reconciler.removal_guard.holds))


def _removal_guard_holds(components: Components) -> Iterator[Sample]:
    return _one(components.reconciler.removal_guard.holds_total if components.reconciler else 0)


def _up(components: Components) -> Iterator[Sample]:
    return _one(components.store_is_up)


def _histogram(components: Components, name: str) -> Iterator[Histogram]:
    if components.reconciler:
        yield getattr(components.reconciler.work, name)


#: All of them, in the order in which they are told.
METRICS = tuple(_metrics())


# ---- telling ------------------------------------------------------------------------------------


def page(components: Components, accept: str) -> tuple[int, str, bytes]:
    """Return status, content type and page for an Accept header; without the library 503 and the remedy."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        line = f"no metrics without prometheus_client; install it with: {_INSTALL}\n"
        return 503, "text/plain; charset=utf-8", line.encode()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(components))
    encode, content_type = choose_encoder(accept)
    return 200, content_type, encode(registry)


class _Collector:
    def __init__(self, components: Components) -> None:
        self._components = components

    def describe(self) -> list[Any]:
        """Nothing: the library would read everything only to learn the names."""
        return []

    def collect(self) -> Iterator[Any]:
        for metric in METRICS:
            family = _family(metric)
            for sample in metric.read(self._components):
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
    """Each with all that are below, as Prometheus has it."""
    counts, below = histogram.counts.copy(), 0
    found = []
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found
