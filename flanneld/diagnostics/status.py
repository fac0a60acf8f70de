"""Status of the daemon as a JSON document, for the status socket."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from flanneld import __version__
from flanneld.config import Config
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.conditions import unhealthy_parts
from flanneld.model import FAMILIES, Lease, Uplink, name_of
from flanneld.network import resource_json
from flanneld.reconcile.counters import kind_of, wall
from flanneld.reconcile.peers import View
from flanneld.runtime import clock, logs
from flanneld.state.report import Failure
from flanneld.state.resources import Key
from flanneld.state.sessions import Session

if TYPE_CHECKING:
    from flanneld.diagnostics.probes import Probe  # only with -peer-probes

#: Peers per piece of the document.
_PEERS_AT_A_TIME = 100

Document = dict[str, Any]
#: Six times as fast as the standard library, which counts with thousands of peers.
_encode = msgspec.json.Encoder().encode


def pieces(components: Components) -> Iterator[bytes]:
    """Yield the document in pieces, so that other work goes on while a long list of peers is written."""
    yield encoded(summary(components))[:-1]
    yield b',"peers":['
    separator = b""
    known = peers(components)
    while some := list(islice(known, _PEERS_AT_A_TIME)):
        yield separator + b",\n".join(map(encoded, some))
        separator = b",\n"
    yield b"]}\n"


def encoded(value: Document) -> bytes:
    """Return a part of the document as JSON."""
    try:
        return _encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, out of a lease
        return json.dumps(value).encode()


def summary(components: Components) -> Document:
    """Return the document without the peers."""
    missing = components.missing()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "time": clock.wall(),
        "started": components.started,
        "flags": components.options.described(),
        "subnet_file": components.options.subnet_file,
        "kube_subnet_mgr": components.options.kube_subnet_mgr,
        "answer_port": components.options.answer_port,
        "store": _store(components),
        "health": {
            "ready": not missing,
            "missing": missing,
            "waiting": components.waiting(),
            "late": components.overdue(),
            "conditions": [
                {"part": part.name, "problem": part.problem} for part in unhealthy_parts(components)
            ],
        },
        "network": network(components.config),
        "lease": _lease(components),
        **_data_plane(components),
        "firewall": _firewall(components),
        "events": logs.described(components.events.recent()),
    }


def _store(components: Components) -> Document:
    store, problem = components.store, components.store_problem
    return {
        "name": components.manager.name,
        "answers": components.store_is_up,
        "problem": problem.problem if problem else None,
        "remedy": problem.remedy if problem else None,
        "cache": components.cached or None,
        "requests": sum(store.requests.counts),
        "errors": store.errors,
        "last_event": store.last_event or None,
        "resyncs": store.resyncs.copy(),
    }


def network(config: Config | None) -> Document | None:
    """Return the networks and the backend of the network config."""
    if config is None:
        return None
    return {
        "ranges": [{"network": str(each.network), "subnet_len": each.subnet_len} for each in config.ranges],
        "backend": config.backend_type,
        "port": config.backend.integer("Port", 0) or None,
        "also": config.also.backend_type if config.also else None,
    }


def _lease(components: Components) -> Document | None:
    if components.lease_keeper is None:
        return None
    return {**lease(components.lease_keeper.lease), "renewals": components.store.renewals.copy()}


def lease(own: Lease) -> Document:
    """Return our lease; ``macs`` are the VXLAN devices' MACs that peers know."""
    return {
        "subnets": _subnets(own),
        "expires": None if own.expires is None else wall(own.expires),
        "public_ips": _public_ips(own),
        "macs": _macs(own),
    }


def _data_plane(components: Components) -> Document:
    reconciler = components.reconciler
    if reconciler is None:
        return {}
    work, pending = reconciler.tables.work, reconciler.tables.pending()
    repairs = components.heals().items()
    return {
        "uplink": {
            **uplink(reconciler.uplink_manager.uplink),
            "usable": not reconciler.uplink_manager.is_adrift,
        },
        "mtu": reconciler.uplink_manager.backend.mtu,
        "devices": sorted(reconciler.domain.links),
        "local": [describe(resource, pending) for resource in reconciler.peers.local_resources()],
        "synced": reconciler.peers.synced,
        "last_sync": work.last_sync or None,
        "repairs": [{"kind": kind, "cause": cause, "number": number} for (kind, cause), number in repairs],
        "fights": reconciler.tables.is_contested(),
        "lost_notifications": work.overruns,
        "refused": [_refusal(failure) for failure in pending.values()],
        "removal_guard": {
            "holds": reconciler.removal_guard.holds,
            "number": reconciler.removal_guard.holds_total,
        },
    }


def uplink(elected: Uplink) -> Document:
    return {
        "name": elected.name,
        "mtu": elected.mtu,
        "addresses": [str(ip) for family in FAMILIES if (ip := elected.local(family))],
        "public_ips": [str(ip) for family in FAMILIES if (ip := elected.public(family))],
    }


def _firewall(components: Components) -> Document | None:
    firewall = components.firewall
    if firewall is None:
        return None
    repairs = firewall.repairs.items()
    return {
        "place": firewall.placed.place,
        "masquerade": components.options.ip_masq,
        "forward": components.options.iptables_forward_rules,
        "not_in_place": [f"IPv{family}" for family in firewall.unsettled()],
        "fights": any(state.contested for state in firewall.states()),
        "repairs": [
            {"through": name, "by": by, "number": number} for (name, by), number in repairs if number
        ],
    }


def peers(components: Components) -> Iterator[Document]:
    """Yield each peer with its desired objects, in the order of the store."""
    if components.reconciler is None:
        return
    view = components.reconciler.peers.view()
    documents = peers_of(
        view, components.reconciler.tables.pending(), components.reconciler.tables.sessions()
    )
    if components.prober is None:
        yield from documents
        return
    last = components.prober.last
    for lease, document in zip(view.leases, documents, strict=True):
        yield document | {"probe": _probe(last.get(lease.key))}


def _probe(last: Probe | None) -> Document | None:
    return {"target": str(last.target), "time": last.time, "rtt": last.rtt} if last else None


def peers_of(
    view: View, pending: Mapping[Key, Failure], sessions: Iterable[Session] = ()
) -> Iterator[Document]:
    """Yield the same of any view; ``pending`` is what the kernel refuses."""
    by_subnet = {session.subnet: session for session in sessions}
    for each in view.leases:
        document = _peer(each, view, pending)
        if by_subnet:
            found = (by_subnet.get(net) for net in each.key if net is not None)
            document["sessions"] = [_session(session) for session in found if session]
        yield document


def _session(session: Session) -> Document:
    """Return a session; ``handshake`` is in seconds since 1970, null for none yet."""
    return {
        "subnet": str(session.subnet),
        "state": session.state,
        "handshake": session.handshake,
        "rx_bytes": session.rx_bytes,
        "tx_bytes": session.tx_bytes,
        "protocol": session.protocol,
        "endpoint": session.endpoint,
        "encapsulated": session.is_encapsulated,
        "problem": session.problem,
    }


def states(view: View, pending: Mapping[Key, Failure]) -> Iterator[tuple[str, str]]:
    """Yield backend and state of each peer."""
    for each in view.leases:
        yield each.attrs.backend_type, _state(each, view, pending)


def _peer(peer: Lease, view: View, pending: Mapping[Key, Failure]) -> Document:
    resources, refusal = view.desired.get(peer.key, ()), view.reasons.get(peer.key)
    refused = "; ".join(str(pending[resource.key]) for resource in resources if resource.key in pending)
    return {
        "subnets": _subnets(peer),
        "public_ips": _public_ips(peer),
        "macs": _macs(peer),
        "vnis": _vnis(peer),
        "expires": _end(peer),
        "backend": peer.attrs.backend_type,
        "state": _state(peer, view, pending),
        "reason": refusal.text if refusal else refused,
        "code": refusal.code if refusal else "",
        "conflicts": _rivals(peer, view),
        "objects": [describe(resource, pending) for resource in resources],
    }


def _state(peer: Lease, view: View, pending: Mapping[Key, Failure]) -> str:
    if peer.key in view.unsafe:
        return "unsafe"
    if peer.key in view.reasons:
        return "refused"
    if pending and any(resource.key in pending for resource in view.desired.get(peer.key, ())):
        return "not in the kernel"
    if _rivals(peer, view):
        return "contested"
    return "in the kernel" if view.synced else "pending"


def _rivals(peer: Lease, view: View) -> list[str]:
    """Return other leases with a different claim to one of the same objects."""
    if not view.rivals:
        return []
    found: dict[str, None] = {}
    for resource in view.desired.get(peer.key, ()):
        for owner, other in view.rivals.get(resource.key, {}).items():
            if owner != peer.key and other != resource:
                found[name_of(owner)] = None
    return list(found)


def describe(resource: Any, pending: Mapping[Key, Failure]) -> Document:
    """Return an object as text, and as a value for programs: None for one of a backend's own ``table``."""
    key, value = resource.key, resource_json.encode(resource)
    described = {
        "kind": kind_of(resource),
        "text": str(resource),
        "value": value,
        "in_kernel": key not in pending,
    }
    return described if value else {**described, "table": str(key[0])}


def _refusal(failure: Failure) -> Document:
    return {
        "object": str(failure.resource),
        "reason": failure.reason,
        "errno": failure.errno,
        "remedy": failure.remedy,
        "table": str(failure.resource.key[0]),
    }


def _subnets(of: Lease) -> list[str]:
    return [str(net) for net in of.key if net is not None]


def _public_ips(of: Lease) -> list[str]:
    return [str(ip) for family in FAMILIES if (ip := of.attrs.public(family))]


def _vnis(of: Lease) -> list[int]:
    """Return the VNIs in a lease; Go flannel before 0.20 writes none."""
    data = [of.attrs.data(family) for family in FAMILIES]
    # By type: JSON's true is an int, too.
    return sorted({each["VNI"] for each in data if isinstance(each, dict) and type(each.get("VNI")) is int})


def _end(of: Lease) -> float | None:
    """Return when a lease ends, in seconds since the epoch; None if never, or if the store was not asked."""
    return None if of.expires is None or math.isinf(of.expires) else wall(of.expires)


def _macs(of: Lease) -> list[str]:
    data = [of.attrs.data(family) for family in FAMILIES]
    return [str(each["VtepMAC"]) for each in data if isinstance(each, dict) and "VtepMAC" in each]
