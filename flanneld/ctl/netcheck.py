"""``flannelctl netcheck``: the path to a peer, stage by stage: where packets stop, and what spoils them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from enum import StrEnum
from ipaddress import ip_network
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from flanneld.ctl.compare import wanted_route
from flanneld.ctl.drops import bases_of, drops_towards
from flanneld.ctl.inside import container_devices
from flanneld.ctl.losses import host_addresses, lost_packets
from flanneld.ctl.nodes import answer_remedy, our_addresses, port_of, target_of, told, vxlan_of
from flanneld.ctl.output import State, TextTable, in_lines
from flanneld.ctl.paths import PathToPeer, carriers, parsed, passing, paths, peer_named
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, Status, UplinkStatus, known
from flanneld.errors import FlannelError
from flanneld.model import IPAddress, family_of
from flanneld.network.interfaces import names
from flanneld.network.query import ORDINARY
from flanneld.network.survey import SILENCE, Channel, EchoChannel, QueryChannel, Reply, ask, path_mtus, survey
from flanneld.state.resources import Vxlan

#: Peers that are examined if none is named.
_FEW = 3
#: Bytes of a small packet, with the IP header: the size of ping(8).
SMALL = 84
#: Seconds until a packet counts as lost, lost packets in a row after which a stage is given up, and seconds
#: more for the last packet to a container: its node reports a missing one after 3 s of ARP.
_WITHIN, _ENOUGH, _LINGER = 1.0, 3, 2.0
#: Seconds for the answers to one try of a query without checksums, and tries.
_CHECKED_WITHIN, _TRIES = 0.5, 2


_NO_CONTAINER = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})


class Stage(StrEnum):
    """Stage of the way, in the order in which a packet passes them."""

    UNDERLAY = "underlay"
    PORT = "port"
    TUNNEL = "tunnel"
    UDP = "udp"
    THERE = "there"
    BACK = "back"
    CONTAINER = "container"


#: Stages at which the node itself answers, which its firewall may keep from it while containers talk.
AT_THE_NODE = frozenset({Stage.TUNNEL, Stage.UDP})
#: Stages whose messages are echoes, by which the size of a path is asked for, too.
_BY_ECHO = frozenset({Stage.UNDERLAY, Stage.TUNNEL, Stage.CONTAINER})


class Series(Struct, frozen=True, gc=False):
    """Messages of one size to one address. ``size`` is in bytes with the IP header, ``rtts`` are in seconds.

    ``error`` is the errno of the last ICMP error, ``facts`` are those of the last answer to a query. ``port``
    is the backend's at the stage ``PORT``.
    """

    stage: Stage
    to: str
    size: int
    sent: int
    rtts: tuple[float, ...] = ()
    error: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    port: int = 0

    @property
    def lost(self) -> int:
        return self.sent - len(self.rtts)

    @property
    def arrived(self) -> bool:
        """Return True if any message arrived; a closed port is an answer of the host's kernel."""
        return bool(self.rtts) or (self.is_refused and self.stage is not Stage.PORT)

    @property
    def is_refused(self) -> bool:
        return self.error == errno.ECONNREFUSED


class Verdict(Struct, frozen=True, gc=False):
    """Stage at which packets stop, with the reason; ``at`` is None if they arrive."""

    at: str | None
    reason: str

    def __str__(self) -> str:
        return f"stops at {self.at}; {self.reason}" if self.at else self.reason


class Result(Struct, frozen=True, gc=False):
    """Result of one check; ``more`` are its numbers for programs."""

    check: str
    about: str
    state: State
    found: str
    note: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON."""
        told = asdict(self)
        del told["more"]
        return {**told, **self.more}


class PathReport(Struct, frozen=True, gc=False):
    """Results of all peers, the verdict on each, and what is not known for want of answers to queries."""

    results: list[Result]
    verdicts: list[tuple[str, Verdict]]
    unanswered: list[str]

    @property
    def worst(self) -> Verdict:
        """Return the verdict on the first peer that packets do not reach, else on the first peer."""
        ends = [said for _, said in self.verdicts] or [Verdict(None, "no peer is in the kernel")]
        return next((each for each in ends if each.at), ends[0])

    @property
    def is_wrong(self) -> bool:
        return bool(self.worst.at) or any(each.state == State.PROBLEM for each in self.results)

    def tables(self) -> list[TextTable]:
        rows = [(each.check, each.about, each.state, each.found, each.note) for each in self.results]
        ends = in_lines(f"{peer}: {said}" for peer, said in self.verdicts)
        return [TextTable(("check", "of", "state", "found", "note"), rows), ends]

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON."""
        checks, worst = [each.plain() for each in self.results], self.worst
        return {"checks": checks, "stops_at": worst.at, "reason": worst.reason}


class Wanted(Struct, frozen=True, gc=False):
    """Arguments: a peer's name, a container of it, and packets of each kind.

    ``size`` is that of the largest packet to try, in bytes with the IP header; 0 for the network's MTU.
    """

    peer: str | None = None
    container: str | None = None
    count: int = 5
    size: int = 0


def examine(source: DataSource, wanted: Wanted, tell: Callable[[str], None]) -> PathReport:
    """Examine the path to one peer, or to a few; ``tell`` is called with what is done now.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    status = _with_size(source.status, wanted.size)
    peers, container = chosen(wanted, status)
    results, verdicts = [*translated(known(status.uplink))], []
    tell("largest packets")
    has_sizes = known(status.mtu) and known(status.uplink)
    sizes = paths(peers, status, path_mtus, container) if has_sizes else []
    devices = container_devices(status, host_addresses())
    bases, port = bases_of(status), port_of(source)
    is_mute = False
    for peer in peers:
        found = list(Walk(peer, status, port, wanted.count, tell).stages(container))
        through = [each for each in sizes if each.peer == peer.subnets[0]]
        here = [
            Result("filter", peer.place, each.state, f"{each.chain} of this node", each.note)
            for each in drops_towards(peer.networks[0].network_address, status, devices, bases)
        ] + [
            Result("lookup", peer.place, State.PROBLEM, each.packets, each.note)
            for each in lost_packets(status, names(), devices, bases, [parsed(peer)])
            if each.cause != "uplink"  # which may be meant so
        ]
        is_silent = not any(each.arrived for each in found if each.stage in AT_THE_NODE)
        passes_on = is_silent and any(name == peer.subnets[0] for name, _ in passing(status, through))
        spoils = list(spoilt(peer, found, port, status))
        results += [*judge(peer, found, through, status, passes_on=passes_on), *here, *spoils]
        verdicts.append((peer.place, verdict(found, through, [*here, *spoils], passes_on=passes_on)))
        is_mute = is_mute or any(each.stage is Stage.UDP and each.is_refused for each in found)
    mute = [f"which direction loses large packets (there, back); {answer_remedy(port)}"] if is_mute else []
    return PathReport(results, verdicts, mute)


def _with_size(status: Status, size: int) -> Status:
    mtu = known(status.mtu)
    if size and mtu and size > mtu:
        raise FlannelError(f"packets of {size} bytes do not fit the network's MTU", f"give at most {mtu}")
    return replace(status, mtu=size) if size else status


def chosen(wanted: Wanted, status: Status) -> tuple[list[PeerStatus], IPAddress | None]:
    """Return the peers to examine, and the container to reach: none if a node or a subnet is named."""
    name = wanted.container or wanted.peer
    if not name:
        return [each for each in status.each_peer if each.state == "in the kernel"][:_FEW], None
    peer = peer_named(name, status)
    if wanted.peer and peer_named(wanted.peer, status) is not peer:
        raise FlannelError(f"{name} is no container of {wanted.peer}", f"it is of {peer.place}")
    if name == peer.node:
        return [peer], None
    net, end = ip_network(name, strict=False), target_of(peer, our_addresses(status))
    address = net.network_address
    is_node = net.prefixlen != net.max_prefixlen or address in (*peer.addresses, *(end or ())[:1])
    return [peer], None if is_node else address


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
                channel = QueryChannel(each.family, each.peer_port)
                sent = self._series(Stage.PORT, channel, public, ORDINARY, 1)
                yield replace(sent, port=each.peer_port)

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
        return self._series(stage, EchoChannel(family_of(to), SMALL), to, SMALL, self.count)

    def _query(self, stage: Stage, to: IPAddress, size: int, answer_size: int) -> Series:
        channel = QueryChannel(family_of(to), self.port, size, answer_size)
        return self._series(stage, channel, to, size, self.count)

    def _series(
        self, stage: Stage, channel: Channel[IPAddress], target: IPAddress, size: int, count: int
    ) -> Series:
        """Send messages one after the other. The last one to a silent container may take longer."""
        self.tell(f"{self.peer.place}: {stage}")
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
                in_a_row += 1
                if reply.rtt is not None:
                    rtts.append(reply.rtt)
                    facts, in_a_row = reply.facts, 0
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
    replies = (both, neither, answer_only)
    yield checksums(peer.place, *replies, answers_icmp=answers_icmp, device=vxlan_of(status))
    seen = told(udp.facts).seen
    if seen and in_overlay:
        yield masqueraded(peer.place, seen, frozenset(map(str, our_addresses(status))))


def _ask_unsummed(target: IPAddress, port: int, which: tuple[bool, bool]) -> Reply:
    with closing(QueryChannel(4, port, ORDINARY, SMALL, unsummed=which)) as channel:
        return survey(channel, [target], _CHECKED_WITHIN, _TRIES)[target]


# ---- judgements (pure) --------------------------------------------------------------------------


def verdict(
    found: Sequence[Series],
    sizes: Sequence[PathToPeer] = (),
    causes: Sequence[Result] = (),
    *,
    passes_on: bool = False,
) -> Verdict:
    """Return where packets stop: at the first stage that explains everything after it.

    A known cause is better than any guess. A node that ``passes_on`` packets need not answer itself.
    """
    known_causes = [f"{each.found}: {each.note}" for each in causes if each.state == State.PROBLEM]
    said = _of_stages(found, sizes, passes_on=passes_on, is_known=bool(known_causes))
    return replace(said, reason=known_causes[0]) if said.at and known_causes else said


def _of_stages(
    found: Sequence[Series], sizes: Sequence[PathToPeer], *, passes_on: bool, is_known: bool
) -> Verdict:
    first = {each.stage: each for each in reversed(found)}
    tunnel, container, udp = map(first.get, (Stage.TUNNEL, Stage.CONTAINER, Stage.UDP))
    passes = passes_on or any(each is not None and each.arrived for each in (tunnel, container, udp))
    if not passes and (said := _before_the_tunnel(first)) is not None:
        return said
    if container is not None and not container.arrived:
        if container.error in _NO_CONTAINER:
            return Verdict("container", f"its node answers that there is no {container.to}")
        return Verdict(
            "forward",
            f"the way to its node is open and {container.to} does not answer: the node does not forward"
            " (flannelctl doctor there), or the container is gone or drops ICMP",
        )
    if (said := _too_large(found, sizes)) is not None:
        return said
    if udp is not None and not udp.arrived:
        reason = "packets get to the node, which answers no UDP: a firewall there, or checksums"
        return Verdict("udp" if is_known else None, reason)
    lossy = next((each for each in found if each.stage is not Stage.PORT and each.rtts and each.lost), None)
    if lossy is not None:
        return Verdict(lossy.stage.value, f"packets lost: {lossy.lost} of {lossy.sent}")
    if tunnel is None and container is None:
        return Verdict(None, "the node answers; its backend has no address in the overlay: name a container")
    return Verdict(None, "packets pass in both directions")


def _before_the_tunnel(first: Mapping[Stage, Series]) -> Verdict | None:
    """Return where packets stop that do not pass the tunnel; None if it has no end that would answer."""
    underlay, port, tunnel = map(first.get, (Stage.UNDERLAY, Stage.PORT, Stage.TUNNEL))
    if tunnel is not None and port is not None and port.is_refused:
        return Verdict("port", f"nothing listens there: flanneld on {port.to} has no device, or another port")
    if tunnel is not None and port is not None and port.error:
        return Verdict("port", "a firewall rejects it: let UDP to this port pass between the nodes")
    if underlay is not None and not underlay.arrived:
        return Verdict("underlay", f"{underlay.to} does not answer: its host is down, or ICMP is filtered")
    reason = (
        "does not answer, its host does: a firewall drops the tunnel's packets, or the node has another VNI"
        " or MAC than its lease; flannelctl trace and flannelctl doctor, here and there"
    )
    return Verdict("tunnel", f"{tunnel.to} {reason}") if tunnel is not None else None


def _too_large(found: Sequence[Series], sizes: Sequence[PathToPeer]) -> Verdict | None:
    # Sizes are asked for by ICMP: a host that drops all echoes, and passes such packets of UDP, loses none.
    echoing = {each.to for each in found if each.rtts and each.stage in _BY_ECHO}
    passed = {(each.to, each.size) for each in found if each.arrived and each.stage is Stage.BACK}
    for path in sizes:
        is_told = path.carried or (str(path.target), path.required) not in passed
        if path.carried != path.required and str(path.target) in echoing and is_told:
            passing = f"those of {path.carried} pass" if path.carried else "small ones pass"
            return Verdict(path.name, f"packets of {path.required} bytes are lost, {passing}")
    lost = {Stage.THERE: "do not get there", Stage.BACK: "get there and do not come back"}
    for each in found:
        if each.stage in lost and not each.arrived:
            return Verdict("tunnel", f"packets of {each.size} bytes {lost[each.stage]}")
    return None


def judge(
    peer: PeerStatus,
    found: Sequence[Series],
    sizes: Sequence[PathToPeer],
    told: Status,
    *,
    passes_on: bool = False,
) -> Iterator[Result]:
    """Yield a result for each stage and each size."""
    about, devices = peer.place, known(told.devices) or ()
    is_open = any(
        each.rtts
        and each.stage is Stage.TUNNEL
        and (route := wanted_route(ip_network(each.to).network_address, peer, told)) is not None
        and route.device in devices
        for each in found
    )
    for each in found:
        if each.stage is Stage.PORT:
            port = f"UDP port {each.port} of {each.to}"
            yield port_state(about, port, Reply(error=each.error), is_open=is_open)
        else:
            is_reached = passes_on or any(one.arrived for one in found if one.to == each.to)
            yield _of_stage(about, each, is_reached=is_reached)
    for path in sizes:
        carried = f"{path.carried or '-'} of {path.required} bytes"
        more = {"to": str(path.target), "wanted": path.required, "carried": path.carried}
        yield Result(f"path MTU, {path.name}", about, path.state, carried, path.note, more)


def _of_stage(about: str, each: Series, *, is_reached: bool) -> Result:
    more = {"to": each.to, "bytes": each.size, "sent": each.sent, "lost": each.lost, "rtts": each.rtts}
    if each.is_refused and each.stage is Stage.UDP:
        note = "UDP arrives; the daemon does not answer queries"
        return Result(each.stage.value, about, State.OK, f"{each.to}: port closed", note, more)
    if each.rtts:
        state, note = State.HINT if each.lost else State.OK, ""
        times = (min(each.rtts), sum(each.rtts) / len(each.rtts), max(each.rtts))
        shown = f", {'/'.join(f'{1000 * value:.2f}' for value in times)} ms"
    else:
        is_told = each.stage is not Stage.UNDERLAY and not (is_reached and each.stage in AT_THE_NODE)
        state, note, shown = State.PROBLEM if is_told else State.UNKNOWN, "no answer", ""
    found = f"{each.to}, {each.size} bytes: {len(each.rtts)} of {each.sent}{shown}"
    return Result(each.stage.value, about, state, found, note, more)


def translated(uplink: UplinkStatus | None) -> Iterator[Result]:
    """Yield a result for each of our addresses that other nodes know under another one."""
    for local, public in zip(uplink.addresses, uplink.public_ips, strict=False) if uplink else ():
        if local == public:
            yield Result("NAT, underlay", "this node", State.OK, f"{local}, announced as it is")
        else:
            note = "other nodes reach this one only if that address leads here for the backend's port"
            yield Result("NAT, underlay", "this node", State.HINT, f"{local}, announced as {public}", note)


def port_state(about: str, found: str, reply: Reply, *, is_open: bool) -> Result:
    """Judge the reply to a datagram at a peer's port; an open one is known by answers through it."""
    if reply.is_refusal:
        state, what, note = State.PROBLEM, "is closed", "no device listens: is flanneld started there?"
    elif reply.error:
        reason = errno.errorcode.get(reply.error, str(reply.error))
        state, what, note = State.PROBLEM, f"is rejected ({reason})", "let it pass in the firewall"
    elif is_open:
        state, what, note = State.OK, "is open", ""
    else:
        state, what, note = State.UNKNOWN, "gives no answer", "open, or a firewall drops what is sent there"
    return Result("port", about, state, f"{found} {what}", note)


def checksums(
    about: str, both: Reply, neither: Reply, answer_only: Reply, *, answers_icmp: bool, device: Vxlan | None
) -> Result:
    """Judge UDP through the overlay, where an uplink or a kernel may spoil checksums.

    The replies are to a query with checksums, to one without, and to one without whose answer has one. The
    CPU computes those of ICMP, which passes where offloaded ones are wrong: flannel's issue 1279.
    """
    if both.arrived:
        return Result("checksums", about, State.OK, "UDP with checksums arrives")
    if not answers_icmp:
        return Result("checksums", about, State.UNKNOWN, "the node does not answer at all")
    if not neither.arrived:
        note = "a firewall there drops UDP from the overlay, or checksums are wrong and it answers no queries"
        return Result("checksums", about, State.HINT, "ICMP arrives, UDP does not", note)
    here = answer_only.arrived or neither.is_refusal
    where = "this node" if here else about
    name = device.name if device else "the tunnel's device"
    note = f"on {where}: ethtool -K {name} tx-checksum-ip-generic off, for good -disable-tx-checksum-offload"
    return Result(
        "checksums", about, State.PROBLEM, f"UDP arrives without checksums only; {where} spoils them", note
    )


def masqueraded(about: str, seen: str, own: frozenset[str]) -> Result:
    """Judge the address under which a peer sees our packets from the overlay."""
    if seen in own:
        return Result("NAT, overlay", about, State.OK, f"sees this node as {seen}")
    note = "a rule masquerades packets inside the network: let it spare the network"
    return Result("NAT, overlay", about, State.HINT, f"sees this node as {seen}", note)
