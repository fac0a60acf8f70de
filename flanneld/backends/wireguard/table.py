"""Reconciler table of WireGuard's keys, peers and allowed IPs in one network namespace.

WireGuard sends no notifications, so the table is read every 30 s. Thousands of peers are written in a few
dozen messages, and read in as many. Nor does it report peers that never answer, for a wrong key or port, or a
firewall: a failed handshake looks like a peer that is switched off.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from msgspec import Struct, field

from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import TABLE, AllowedIp, DeviceKey, WgPeer
from flanneld.backends.wireguard.mesh import Mesh, name_of, text_of
from flanneld.backends.wireguard.rotation import (
    SEARCH_KEEPALIVE,
    Rotation,
    Steer,
    is_alive,
    is_doubted,
    observe,
    steer,
    upset,
)
from flanneld.model import IPNetwork
from flanneld.network import genetlink
from flanneld.network.genetlink import Endpoint, SeenDevice, SeenPeer, WireGuardDevices
from flanneld.network.interfaces import index_of
from flanneld.runtime import clock
from flanneld.runtime.logs import Once
from flanneld.state.resources import LINKS, Key, Resource
from flanneld.state.table import Failure, Put, Report, Scope, Seen, Table, TunnelSession

log = logging.getLogger(__name__)

#: Seconds between two readings.
_AUDIT = 30.0
#: Seconds between two checks for a recreated device, which has lost its key and its peers.
_LOOK = 1.0
#: Seconds between two turns of a mesh after the first round of all searches.
_TURN = 5.0
#: Seconds of keepalives each 5 s after a move: peers behind NAT read meanwhile where we are, and call us.
_GREET = 60.0
#: Public key of a peer that exists only during one message: an allowed IP moved to it is removed with it.
_THROWAWAY = b"flannel: takes an allowed IP away"[:32]
#: Peers named in one log line, at most.
_FEW = 5


def sentence(device: str, silent: Sequence[SeenPeer]) -> str:
    """Return one line about silent peers, with possible reasons."""
    names = ", ".join(
        f"{keys.text_of(peer.public_key)} at {where(peer) or 'no endpoint'}" for peer in silent[:_FEW]
    )
    more = f" and {len(silent) - _FEW} more" if len(silent) > _FEW else ""
    return (
        f"No handshake via {device}, though packets are sent there: peer {names}{more}; "
        "is their daemon up, their UDP port open, the PSK the same on both nodes, no clock set back?"
    )


def where(peer: SeenPeer) -> str:
    """Return a peer's current endpoint, address and port; empty if it has none."""
    return text_of(peer.endpoint) if peer.endpoint is not None else ""


class _Batch(Struct):
    """Part of a change for one device."""

    keys: list[DeviceKey] = field(default_factory=list)
    peers: dict[bytes, Put] = field(default_factory=dict)
    allowed_ips: dict[bytes, list[AllowedIp]] = field(default_factory=dict)


class WireGuardTable(Table):
    """Table of keys, peers and allowed IPs of some devices. The devices themselves are in the links' table.

    ``wall_clock`` gives seconds since 1970, as the kernel counts the times of handshakes. With ``mesh`` the
    peers' endpoints and keepalives follow their ``Rotation``.
    """

    name = TABLE
    what = "the keys and peers of WireGuard"
    needs = frozenset({LINKS})
    audit = _AUDIT

    def __init__(
        self,
        devices: Sequence[str],
        wall_clock: Callable[[], float] = clock.wall,
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = mesh
        self._devices = devices
        self._wall_clock = wall_clock
        self._kernel: WireGuardDevices | None = None
        #: Endpoint given to each peer; the peer may have roamed since.
        self._given: dict[Key, Endpoint] = {}
        #: Keys of the peers of a mesh whose lease has another endpoint since the last turn.
        self._moved: set[Key] = set()
        #: Interface index by device name, as last read; 0 for none.
        self._indexes: dict[str, int] = {}
        self._next_look = self._next_turn = self._greet_until = 0.0
        #: By device name and public key.
        self._rotations: dict[str, dict[bytes, Rotation]] = {}
        #: By device name. Replaced, never changed in place, because other threads read them.
        self._sessions: dict[str, tuple[TunnelSession, ...]] = {}
        self._once = Once()

    # ---- reading -----------------------------------------------------------------------------------

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield the contents of the devices. An endpoint that may have roamed counts as the desired one."""
        kernel, now = self._open(), self._wall_clock()
        for name in self._devices:
            device = kernel.read(name)
            self._indexes[name] = device.index if device else 0
            self._observe(name, device, now)
            if device is not None:
                yield from self._seen(device, scope, now)

    def _seen(self, device: SeenDevice, scope: Scope, now: float) -> Iterator[Seen]:
        if device.private_key is not None and device.public_key is not None:
            yield Seen(
                DeviceKey(
                    device.name, device.private_key, device.public_key, device.listen_port, device.fwmark
                )
            )
        for peer in device.peers:
            endpoint, port = peer.endpoint or (None, 0)
            found = WgPeer(device.name, peer.public_key, endpoint, port, peer.keepalive, peer.preshared_key)
            want = scope.desired.get(found.key)
            matches = isinstance(want, WgPeer) and self._is_as_wanted(peer, found, want, now)
            yield Seen(want if matches and want is not None else found)
            for net in peer.allowed_ips:
                yield Seen(AllowedIp(device.name, net, peer.public_key))

    def _is_as_wanted(self, peer: SeenPeer, found: WgPeer, want: WgPeer, now: float) -> bool:
        """Return True if a peer is correct. Its endpoint may have roamed, unless the lease's has changed.

        Only a live peer counts as roamed. A dead one gets the endpoint of its lease again.
        """
        wanted = _endpoint_of(want)
        if self.mesh is not None:
            self._note_given(want)
            return found.preshared_key == want.preshared_key
        if (found.preshared_key, found.keepalive) != (want.preshared_key, want.keepalive):
            return False
        has_roamed = peer.endpoint is not None and is_alive(peer, now)
        if peer.endpoint != wanted and not (has_roamed and self._given.get(want.key, wanted) == wanted):
            self._given.pop(want.key, None)
            return False
        self._note_given(want)
        return True

    def _note_given(self, want: WgPeer) -> None:
        if (given := _endpoint_of(want)) is not None:
            if self.mesh is not None and self._given.get(want.key, given) != given:
                self._moved.add(want.key)
                self._next_turn = 0.0
            self._given[want.key] = given

    def _observe(self, name: str, device: SeenDevice | None, wall: float) -> None:
        """Keep the sessions of a device, and name the peers that are silent."""
        now, before, peers = clock.now(), self._rotations.get(name, {}), device.peers if device else ()
        self._rotations[name] = {
            each.public_key: observe(before.get(each.public_key, Rotation()), each, now, wall)
            for each in peers
        }
        silent = [each for each in peers if self._rotations[name][each.public_key].is_silent]
        self._sessions[name] = tuple(_sessions(peers, silent, wall))
        if silent:
            self._once.warn(log, name, sentence(name, silent))
        elif device is not None and self._once.clear(name):
            log.info("Handshakes via %s succeed again", name)

    def sessions(self) -> tuple[TunnelSession, ...]:
        """Return the sessions of all devices as last read. May be called from any thread."""
        return tuple(chain.from_iterable(self._sessions.copy().values()))

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for name, batch in _by_device(puts):
            self._put_keys(batch.keys, report)
            self._put_peers(name, batch, report)
        return report

    def _put_keys(self, wanted: Sequence[DeviceKey], report: Report) -> None:
        bodies = [genetlink.set_device(each.device, each.private_key, each.listen_port) for each in wanted]
        refused = self._open().write(bodies)
        for place, resource in enumerate(wanted):
            if place in refused:
                report.failed.append(_failure(resource, refused[place]))
            else:
                report.made.append(resource)

    def _put_peers(self, name: str, batch: _Batch, report: Report) -> None:
        packed: list[bytes] = []
        content: list[list[Resource]] = []
        for public_key in dict.fromkeys((*batch.peers, *batch.allowed_ips)):
            put, allowed = batch.peers.get(public_key), batch.allowed_ips.get(public_key, [])
            networks = [each.subnet for each in allowed]
            packed.append(self._packed(put, networks) if put else genetlink.allow(public_key, networks))
            content.append([*([put.want] if put else []), *allowed])
        self._write(name, packed, content, report.made, report)
        for resource in report.made:
            if isinstance(resource, WgPeer):
                self._note_given(resource)

    def _packed(self, put: Put, allowed_ips: Iterable[IPNetwork]) -> bytes:
        """Pack a peer. A roamed one keeps its endpoint, unless the endpoint in its lease has changed."""
        want, endpoint = put.want, None
        assert isinstance(want, WgPeer)
        if put.was is None or (self.mesh is None and self._given.get(want.key) != _endpoint_of(want)):
            endpoint = _endpoint_of(want)
        return genetlink.put_peer(want.public_key, want.preshared_key, want.keepalive, allowed_ips, endpoint)

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove peers with their allowed IPs, and single allowed IPs. A key is removed with its device."""
        report = Report()
        for name, batch in _by_device([Put(each) for each in found]):
            report.removed += batch.keys
            packed = [genetlink.drop_peer(public_key) for public_key in batch.peers]
            content: list[list[Resource]] = [
                [put.want, *batch.allowed_ips.pop(public_key, [])] for public_key, put in batch.peers.items()
            ]
            rest = [each for allowed in batch.allowed_ips.values() for each in allowed]
            for each in rest:
                packed.append(genetlink.take_away(each.subnet, _THROWAWAY))
                content.append([each])
            self._write(name, packed, content, report.removed, report)
        for resource in report.removed:
            self._given.pop(resource.key, None)
        return report

    def _write(
        self,
        name: str,
        packed: Sequence[bytes],
        content: Sequence[Sequence[Resource]],
        done: list[Resource],
        report: Report,
    ) -> None:
        """Send messages. The kernel stops at the first refusal in a message without reporting its place."""
        messages = list(genetlink.set_peers(name, packed))
        refused = self._open().write([body for body, _ in messages])
        first = 0
        for place, (_, number) in enumerate(messages):
            resources = [each for group in content[first : first + number] for each in group]
            first += number
            if place in refused:
                report.failed += [_failure(each, refused[place]) for each in resources]
            else:
                done += resources

    # ---- recreated devices -------------------------------------------------------------------------

    @property
    def next_look(self) -> float:
        return self._next_look

    def look(self) -> bool:
        """Return True if a device was recreated since the last read: it has neither key nor peers."""
        now = clock.now()
        self._next_look = now + _LOOK
        if self.mesh is not None and (now >= self._next_turn or self.mesh.greets):
            # Cleared before the packets are sent: after a second move they are sent once more.
            if greets := self.mesh.greets:
                self.mesh.greets = False
            try:
                self._turn(self.mesh, now, greets=greets)
            except OSError:  # the next audit will say so
                self.mesh.greets |= greets
        return any(index_of(name) != index for name, index in self._indexes.items())

    def _turn(self, mesh: Mesh, now: float, *, greets: bool) -> None:
        """Read the devices, and let each peer that is searched for take its next endpoint."""
        searched: set[str] = set()
        if greets:
            self._greet_until = now + _GREET
        is_first = False
        for name in self._devices:
            device, wall = self._open().read(name), self._wall_clock()
            self._observe(name, device, wall)
            packed = []
            for peer in device.peers if device else ():
                state = self._rotations[name][peer.public_key]
                has_session = is_alive(peer, wall)
                if _key_of(name, peer.public_key) in self._moved or (greets and not has_session):
                    state = upset(state, peer, now, wall)
                state, change = steer(
                    state,
                    peer,
                    self._candidates(mesh, name, peer.public_key, has_session=has_session),
                    now,
                    wall,
                    SEARCH_KEEPALIVE if now < self._greet_until else mesh.keepalive,
                    mesh.name.encode(),
                )
                self._rotations[name][peer.public_key] = state
                if state.search is not None:
                    searched.add(name_of(peer.public_key))
                    is_first = is_first or (state.search.round == 0 and bool(state.search.known))
                elif is_doubted(state, now):
                    searched.add(name_of(peer.public_key))
                if greets:
                    change = Steer(SEARCH_KEEPALIVE, change.endpoint if change else None, at_once=True)
                if change is not None:
                    packed.append(
                        genetlink.steer_peer(
                            peer.public_key, change.keepalive, change.endpoint, at_once=change.at_once
                        )
                    )
            self._open().write([body for body, _ in genetlink.set_peers(name, packed)])
        mesh.searched, self._moved = frozenset(searched), set()
        self._next_turn = now + (_LOOK if is_first or greets else _TURN)

    def _candidates(
        self, mesh: Mesh, device: str, public_key: bytes, *, has_session: bool
    ) -> tuple[Endpoint, ...]:
        """Return the endpoints to try: the published ones, then that of the lease, but not in a session.

        Each device has a port of its own, so of two devices each tries its own family.
        """
        given = self._given.get(_key_of(device, public_key))
        published = mesh.published.get(name_of(public_key), ())
        found = (*published, *([given] if given and (published or not has_session) else []))
        if len(self._devices) > 1:
            family = 6 if self._devices.index(device) else 4
            found = tuple(each for each in found if each[0].version == family)
        return tuple(dict.fromkeys(found))

    def close(self, *, remove: bool) -> None:
        """Release the socket. Devices and peers stay: sessions go on without the daemon."""
        del remove
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _open(self) -> WireGuardDevices:
        if self._kernel is None:
            self._kernel = WireGuardDevices()
        return self._kernel


def _sessions(peers: Iterable[SeenPeer], silent: Iterable[SeenPeer], now: float) -> Iterator[TunnelSession]:
    names = {peer.public_key for peer in silent}
    for peer in peers:
        for subnet in peer.allowed_ips:
            yield TunnelSession(
                subnet,
                is_alive(peer, now),
                peer.last_handshake or None,
                peer.rx_bytes,
                peer.tx_bytes,
                where(peer),
                peer.public_key in names,
            )


def _by_device(puts: Sequence[Put]) -> Iterator[tuple[str, _Batch]]:
    batches: dict[str, _Batch] = {}
    for put in puts:
        want = put.want
        assert isinstance(want, DeviceKey | WgPeer | AllowedIp)
        batch = batches.setdefault(want.device, _Batch())
        match want:
            case DeviceKey():
                batch.keys.append(want)
            case WgPeer():
                batch.peers[want.public_key] = put
            case AllowedIp():
                batch.allowed_ips.setdefault(want.public_key, []).append(want)
    yield from batches.items()


def _key_of(device: str, public_key: bytes) -> Key:
    return (TABLE, device, keys.text_of(public_key))


def _endpoint_of(peer: WgPeer) -> Endpoint | None:
    return (peer.endpoint, peer.port) if peer.endpoint is not None else None


def _failure(resource: Resource, code: int) -> Failure:
    reason, remedy = os.strerror(code), ""
    if code == errno.EADDRINUSE and isinstance(resource, DeviceKey):
        from flanneld.network.processes import owner_of  # rarely needed

        reason = f"{reason}: {owner_of(resource.listen_port)} has UDP port {resource.listen_port}"
        remedy = "stop what has the port, or give this node a -wireguard-port"
    return Failure(resource, reason, remedy)
