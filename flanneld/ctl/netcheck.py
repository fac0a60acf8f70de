"""``flannelctl netcheck``: the path to a peer, stage by stage: where packets stop, and what spoils them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from ipaddress import ip_network
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.checks.containers import container_devices
from flanneld.ctl.drops import drops_towards
from flanneld.ctl.losses import host_addresses, lost_packets
from flanneld.ctl.nodes import answer_remedy, our_addresses, port_of, target_of, told, vxlan_of
from flanneld.ctl.output import State, TextTable
from flanneld.ctl.paths import carriers, parsed, passing, paths, peer_named
from flanneld.ctl.source import DataSource
from flanneld.ctl.verdicts import (
    AT_THE_NODE,
    Result,
    Series,
    Stage,
    Sums,
    Verdict,
    checksums,
    judge,
    masqueraded,
    translated,
    verdict,
)
from flanneld.diagnostics.status import PeerStatus, Status, known
from flanneld.errors import FlannelError
from flanneld.model import IPAddress, family_of
from flanneld.network.interfaces import names
from flanneld.network.query import ORDINARY
from flanneld.network.survey import SILENCE, Channel, EchoChannel, QueryChannel, Reply, ask, path_mtus, survey

#: Peers that are examined if none is named.
_FEW = 3
#: Bytes of a small packet, with the IP header: the size of ping(8).
SMALL = 84
#: Seconds until a packet counts as lost, lost packets in a row after which a stage is given up, and seconds
#: more for the last packet to a container: its node reports a missing one after 3 s of ARP.
_WITHIN, _ENOUGH, _LINGER = 1.0, 3, 2.0
#: Seconds for the answers to one try of a query without checksums, and tries.
_CHECKED_WITHIN, _TRIES = 0.5, 2


class Answer(Struct, frozen=True, gc=False):
    """Results of all peers, the verdict on each, and what is not known for want of answers to queries."""

    results: list[Result]
    verdicts: list[tuple[str, Verdict]]
    unanswered: list[str]

    @property
    def worst(self) -> Verdict | None:
        """Return the verdict on the first peer that packets do not reach, else on the first peer."""
        stops = (said for _, said in self.verdicts if said.at)
        return next(stops, self.verdicts[0][1] if self.verdicts else None)

    @property
    def is_wrong(self) -> bool:
        has_stop = self.worst is not None and self.worst.at is not None
        return has_stop or any(each.state == State.PROBLEM for each in self.results)

    def tables(self) -> list[TextTable]:
        rows = [(each.check, each.about, each.state, each.found, each.note) for each in self.results]
        ends = [(f"{peer}: {said}",) for peer, said in self.verdicts]
        return [TextTable(("check", "of", "state", "found", "note"), rows), TextTable((), ends)]

    def plain(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        worst = self.worst
        return {
            "checks": [each.plain() for each in self.results],
            "stops_at": worst.at if worst else None,
            "reason": worst.reason if worst else "no peer is in the kernel",
        }


class Wanted(Struct, frozen=True, gc=False):
    """Arguments: a peer's name, a container of it, and packets of each kind.

    ``size`` is that of the largest packet to try, in bytes with the IP header; 0 for the network's MTU.
    """

    peer: str | None = None
    container: str | None = None
    count: int = 5
    size: int = 0


def examine(source: DataSource, wanted: Wanted, tell: Callable[[str], None]) -> Answer:
    """Examine the path to one peer, or to a few; ``tell`` is called with what is done now.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    status = _with_size(source.status, wanted.size)
    peers, container = _chosen(wanted, status)
    results, verdicts = [*translated(known(status.uplink))], []
    tell("largest packets")
    has_sizes = known(status.mtu) and known(status.uplink)
    sizes = paths(peers, status, path_mtus, container) if has_sizes else []
    devices = container_devices(status, host_addresses())
    drops, port = drops_towards(status, devices), port_of(source)
    is_mute = False
    for peer in peers:
        found = list(Walk(peer, status, port, wanted.count, tell).stages(container))
        through = [each for each in sizes if each.peer == peer.subnets[0]]
        here = [
            Result("filter", peer.place, each.state, f"{each.chain} of this node", each.note)
            for each in drops(peer.networks[0].network_address)
        ] + [
            Result("lookup", peer.place, State.PROBLEM, each.packets, each.note)
            for each in lost_packets(status, names(), devices, [parsed(peer)])
            if each.cause != "uplink"  # which may be meant so
        ]
        is_silent = not any(each.arrived for each in found if each.stage in AT_THE_NODE)
        passes_on = is_silent and any(name == peer.subnets[0] for name, _ in passing(status, through))
        spoils = list(spoilt(peer, found, port, status))
        results += [*judge(peer, found, through, status, passes_on=passes_on), *here, *spoils]
        verdicts.append((peer.place, verdict(found, through, [*here, *spoils], passes_on=passes_on)))
        is_mute = is_mute or any(each.stage is Stage.UDP and each.is_refused for each in found)
    mute = [f"which direction loses large packets (there, back); {answer_remedy(port)}"] if is_mute else []
    return Answer(results, verdicts, mute)


def _with_size(status: Status, size: int) -> Status:
    mtu = known(status.mtu)
    if size and mtu and size > mtu:
        raise FlannelError(f"packets of {size} bytes do not fit the network's MTU", f"give at most {mtu}")
    return replace(status, mtu=size) if size else status


def _chosen(wanted: Wanted, status: Status) -> tuple[list[PeerStatus], IPAddress | None]:
    """Return the peers to examine, and the address of the container to reach."""
    name = wanted.container or wanted.peer
    if not name:
        return [each for each in status.each_peer if each.state == "in the kernel"][:_FEW], None
    peer = peer_named(name, status)
    if wanted.peer and peer_named(wanted.peer, status) is not peer:
        raise FlannelError(f"{name} is no container of {wanted.peer}", f"it is of {peer.place}")
    return [peer], _container(name, peer, target_of(peer, our_addresses(status)))


def _container(name: str, peer: PeerStatus, place: tuple[IPAddress, bool] | None) -> IPAddress | None:
    """Return the container's address, None if a subnet or a node's own address is named."""
    net = ip_network(name, strict=False)
    address = net.network_address
    if net.prefixlen != net.max_prefixlen or address in (*peer.addresses, *(place or ())[:1]):
        return None
    return address


# ---- measurements -------------------------------------------------------------------------------


class Walk(Struct, frozen=True, gc=False):
    """Way to a peer: ``count`` messages at each stage. ``tell`` is called before each."""

    peer: PeerStatus
    status: Status
    port: int
    count: int
    tell: Callable[[str], None]

    def stages(self, container: IPAddress | None) -> Iterator[Series]:
        """Yield the stages. Raises ``OSError``."""
        for public in self.peer.addresses[:1]:
            yield self._echo(Stage.UNDERLAY, public)
            yield from self._tunnel_port(public)
        place = target_of(self.peer, our_addresses(self.status))
        if place is not None:
            yield from self._node(*place)
        if container is not None:
            yield self._echo(Stage.CONTAINER, container)

    def _tunnel_port(self, public: IPAddress) -> Iterator[Series]:
        """Yield a datagram to each UDP port of the backend, which an open one drops without an answer."""
        for each in carriers(self.status, self.peer):
            if each.peer_port and each.family == public.version:
                self.tell(f"{self.peer.place}: {Stage.PORT}")
                channel = QueryChannel(each.family, each.peer_port)
                yield replace(series(Stage.PORT, channel, public, ORDINARY, 1), port=each.peer_port)

    def _node(self, target: IPAddress, in_overlay: bool) -> Iterator[Series]:
        """Yield queries: small ones, then large ones with a small answer, then with a large one."""
        uplink = known(self.status.uplink)
        size = known(self.status.mtu) if in_overlay else uplink.mtu if uplink else None
        if in_overlay:
            yield self._echo(Stage.TUNNEL, target)
        small = self._query(Stage.UDP, target, ORDINARY, ORDINARY)
        yield small
        if small.rtts and size:
            there = self._query(Stage.THERE, target, size, SMALL)
            yield there
            if there.rtts:
                yield self._query(Stage.BACK, target, size, size)

    def _echo(self, stage: Stage, to: IPAddress) -> Series:
        self.tell(f"{self.peer.place}: {stage}")
        return series(stage, EchoChannel(family_of(to), SMALL), to, SMALL, self.count)

    def _query(self, stage: Stage, to: IPAddress, size: int, answer_size: int) -> Series:
        self.tell(f"{self.peer.place}: {stage}")
        channel = QueryChannel(family_of(to), self.port, size, answer_size)
        return series(stage, channel, to, size, self.count)


def series(stage: Stage, channel: Channel[IPAddress], target: IPAddress, size: int, count: int) -> Series:
    """Send messages one after the other. The last one to a silent container may take longer."""
    rtts: list[float] = []
    facts: Mapping[str, Any] = {}
    sent = in_a_row = error = 0
    linger = _LINGER if stage is Stage.CONTAINER else 0.0
    with closing(channel):
        while sent < count and in_a_row < _ENOUGH:
            is_last = not rtts and (sent + 1 == count or in_a_row + 1 == _ENOUGH)
            reply = ask(channel, target, _WITHIN + (linger if is_last else 0.0))
            sent += 1
            error = reply.error or error
            if reply.rtt is not None:
                rtts.append(reply.rtt)
                facts = reply.facts
            in_a_row = 0 if reply.rtt is not None else in_a_row + 1
            if reply.is_refusal:
                break
    return Series(stage, str(target), size, sent, tuple(rtts), error, facts)


def spoilt(peer: PeerStatus, found: Sequence[Series], port: int, status: Status) -> Iterator[Result]:
    """Yield what becomes of UDP in the overlay. Queries without checksums are sent if others get lost."""
    place = target_of(peer, our_addresses(status))
    udp = next((each for each in found if each.stage is Stage.UDP), None)
    if place is None or udp is None:
        return
    target, in_overlay = place
    both = Reply(udp.rtts[0] if udp.rtts else None, error=udp.error)
    neither = answer_only = SILENCE
    if not both.arrived and target.version == 4:
        neither, answer_only = (_ask_unsummed(target, port, which) for which in ((True, True), (True, False)))
    answers_icmp = any(each.rtts for each in found if each.to == udp.to and each.stage is not Stage.UDP)
    replies = Sums(both, neither, answer_only)
    yield checksums(peer.place, replies, answers_icmp=answers_icmp, device=vxlan_of(status))
    seen = told(udp.facts).seen
    if seen and in_overlay:
        yield masqueraded(peer.place, seen, frozenset(map(str, our_addresses(status))))


def _ask_unsummed(target: IPAddress, port: int, which: tuple[bool, bool]) -> Reply:
    with closing(QueryChannel(4, port, ORDINARY, SMALL, unsummed=which)) as channel:
        return survey(channel, [target], _CHECKED_WITHIN, _TRIES)[target]
