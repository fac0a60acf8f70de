"""Description of the daemon for its status socket: node into the status document."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from flanneld import __version__
from flanneld.backends.contract import second
from flanneld.config import Config
from flanneld.diagnostics.conditions import unhealthy_parts
from flanneld.diagnostics.status import (
    EventStatus,
    FirewallStatus,
    GuardStatus,
    HealthStatus,
    LeaseStatus,
    NetworkStatus,
    ObjectStatus,
    PeerStatus,
    ProbeStatus,
    RangeStatus,
    RefusalStatus,
    RepairStatus,
    RuleRepairStatus,
    SessionStatus,
    Status,
    StoreStatus,
    UplinkStatus,
)
from flanneld.errors import shown
from flanneld.model import FAMILIES, Lease, Uplink, name_of
from flanneld.network import resource_json
from flanneld.node import Node
from flanneld.reconcile.counters import kind_of, wall
from flanneld.reconcile.peers import View
from flanneld.runtime import clock
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Failure, TunnelSession

if TYPE_CHECKING:
    from flanneld.reconcile.probes import Probe  # only with -peer-probes


def describe(node: Node) -> Status:
    """Return the document without the peers."""
    missing = node.missing()
    status = Status(
        version=__version__,
        pid=os.getpid(),
        time=clock.wall(),
        started=node.started,
        flags=node.options.described(),
        subnet_file=node.options.subnet_file,
        kube_subnet_mgr=node.options.kube_subnet_mgr,
        answer_port=node.options.answer_port,
        store=_store(node),
        health=HealthStatus(
            ready=not missing,
            missing=tuple(missing),
            waiting=tuple(node.waiting()),
            late=tuple(node.overdue()),
            conditions=tuple(unhealthy_parts(node)),
        ),
        network=network(node.config),
        lease=_lease(node),
        firewall=_firewall(node),
        events=tuple(EventStatus(*event) for event in node.events.recent()),
    )
    return _with_data_plane(status, node)


def _store(node: Node) -> StoreStatus:
    store, problem = node.store_counters, node.store_problem
    return StoreStatus(
        name=node.store.name,
        answers=node.store_is_up,
        problem=problem.problem if problem else None,
        remedy=problem.remedy if problem else None,
        cache=node.cached or None,
        requests=sum(store.requests.counts),
        errors=store.errors,
        last_event=store.last_event or None,
        resyncs=store.resyncs.copy(),
    )


def network(config: Config | None) -> NetworkStatus | None:
    """Return the networks and the backend of the network config."""
    if config is None:
        return None
    return NetworkStatus(
        ranges=tuple(RangeStatus(str(each.network), each.subnet_len) for each in config.ranges),
        backend=config.backend_type,
        port=config.backend.integer("Port", 0) or None,
        also=config.also.backend_type if config.also else None,
    )


def _lease(node: Node) -> LeaseStatus | None:
    if node.lease_keeper is None:
        return None
    return replace(lease(node.lease_keeper.lease), renewals=node.store_counters.renewals.copy())


def lease(own: Lease) -> LeaseStatus:
    """Return our lease."""
    expires = None if own.expires is None else wall(own.expires)
    return LeaseStatus(_subnets(own), expires, _public_ips(own), _macs(_data(own)))


def _with_data_plane(status: Status, node: Node) -> Status:
    controller = node.controller
    if controller is None:
        return status
    work, pending = controller.tables.work, controller.tables.pending()
    guard, uplink_manager = controller.removal_guard, controller.uplink_manager
    return replace(
        status,
        uplink=replace(uplink(uplink_manager.uplink), usable=not uplink_manager.is_adrift),
        mtu=uplink_manager.mtu,
        mtu_lowered_from=uplink_manager.backend.mtu if uplink_manager.bytes_lowered else UNSET,
        devices=tuple(sorted(controller.domain.links)),
        local=tuple(described(each, pending) for each in controller.peers.local_resources()),
        synced=controller.peers.synced,
        last_sync=work.last_sync or None,
        repairs=tuple(RepairStatus(*of, number) for of, number in node.heals().items()),
        fights=controller.tables.is_contested(),
        lost_notifications=work.overruns,
        refused=tuple(map(_refusal, pending.values())),
        removal_guard=GuardStatus(guard.holds, guard.holds_total),
    )


def uplink(elected: Uplink) -> UplinkStatus:
    return UplinkStatus(
        name=elected.name,
        mtu=elected.mtu,
        addresses=tuple(str(ip) for family in FAMILIES if (ip := elected.local(family))),
        public_ips=tuple(str(ip) for family in FAMILIES if (ip := elected.public(family))),
    )


def _firewall(node: Node) -> FirewallStatus | None:
    firewall = node.firewall
    if firewall is None:
        return None
    return FirewallStatus(
        place=firewall.placed.place,
        masquerade=node.options.ip_masq,
        forward=node.options.iptables_forward_rules,
        not_in_place=tuple(f"IPv{family}" for family in firewall.unsettled()),
        fights=any(state.contested for state in firewall.states()),
        repairs=tuple(RuleRepairStatus(*of, number) for of, number in firewall.repairs.items() if number),
    )


def peers(node: Node) -> Iterator[PeerStatus]:
    """Yield each peer with its desired objects, in the order of the store."""
    if node.controller is None:
        return
    view = node.controller.peers.view()
    found = peers_of(view, node.controller.tables.pending(), node.controller.tables.sessions())
    if node.prober is None:
        yield from found
        return
    last = node.prober.last
    for lease, peer in zip(view.leases, found, strict=True):
        yield replace(peer, probe=_probe(last.get(lease.key)))


def _probe(last: Probe | None) -> ProbeStatus | None:
    return ProbeStatus(str(last.target), last.time, last.rtt) if last else None


def peers_of(
    view: View, pending: Mapping[Key, Failure], sessions: Iterable[TunnelSession] = ()
) -> Iterator[PeerStatus]:
    """Yield the same of any view; ``pending`` is what the kernel refuses."""
    by_subnet = {session.subnet: session for session in sessions}
    for each in view.leases:
        peer = _peer(each, view, pending)
        if by_subnet:
            found = (by_subnet.get(net) for net in each.key if net is not None)
            peer = replace(peer, sessions=tuple(_session(session) for session in found if session))
        yield peer


def _session(session: TunnelSession) -> SessionStatus:
    return SessionStatus(
        str(session.subnet),
        session.state,
        session.handshake,
        session.rx_bytes,
        session.tx_bytes,
        session.protocol,
        session.endpoint,
        session.is_encapsulated,
        session.problem,
    )


def states(view: View, pending: Mapping[Key, Failure]) -> Iterator[tuple[str, str]]:
    """Yield backend and state of each peer."""
    for each in view.leases:
        yield shown(each.attrs.backend_type), _state(each, view, pending)


def _peer(peer: Lease, view: View, pending: Mapping[Key, Failure]) -> PeerStatus:
    resources, refusal = view.desired.get(peer.key, ()), view.reasons.get(peer.key)
    failed = [pending[resource.key] for resource in resources if resource.key in pending] if pending else ()
    also, data = second(peer.attrs), _data(peer)
    return PeerStatus(
        subnets=_subnets(peer),
        public_ips=_public_ips(peer),
        macs=_macs(data),
        vnis=_vnis(data),
        expires=_end(peer),
        backend=shown(peer.attrs.backend_type),
        also=shown(also["Type"]) or UNSET if also else UNSET,
        state=_state(peer, view, pending),
        reason=refusal.text if refusal else "; ".join(map(str, failed)),
        code=refusal.code if refusal else "",
        conflicts=tuple(_rivals(peer, view)),
        node=peer.node or UNSET,
        objects=tuple(described(resource, pending) for resource in resources),
    )


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


def described(resource: Resource, pending: Mapping[Key, Failure]) -> ObjectStatus:
    """Return an object as text, and as a value for programs: None for one of a backend's own ``table``."""
    key, value = resource.key, resource_json.encode(resource)
    table = UNSET if value else str(key[0])
    return ObjectStatus(kind_of(resource), str(resource), value, key not in pending, table)


def _refusal(failure: Failure) -> RefusalStatus:
    table = str(failure.resource.key[0])
    return RefusalStatus(str(failure.resource), failure.reason, failure.errno, failure.remedy, table)


def _subnets(of: Lease) -> tuple[str, ...]:
    return tuple(str(net) for net in of.key if net is not None)


def _public_ips(of: Lease) -> tuple[str, ...]:
    return tuple(map(str, of.attrs.public_ips))


def _data(of: Lease) -> list[dict[str, Any]]:
    """Return a lease's backend data, of each family that has any."""
    both = (of.attrs.backend_data, of.attrs.backend_v6_data)
    return [each for each in both if isinstance(each, dict)]


def _vnis(data: list[dict[str, Any]]) -> tuple[int, ...]:
    """Return the VNIs in backend data; Go flannel before 0.20 writes none."""
    # By type: JSON's true is an int, too.
    return tuple(sorted({each["VNI"] for each in data if type(each.get("VNI")) is int}))


def _end(of: Lease) -> float | None:
    """Return when a lease ends, in seconds since the epoch; None if never, or if the store was not asked."""
    return None if of.expires is None or math.isinf(of.expires) else wall(of.expires)


def _macs(data: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(shown(str(each["VtepMAC"])) for each in data if "VtepMAC" in each)
