"""``flannelctl netcheck``: the path to a peer, stage by stage: where packets stop, and what spoils them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from enum import StrEnum
from ipaddress import ip_network
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.ctl.checks.containers import container_devices
from flanneld.ctl.compare import wanted_route
from flanneld.ctl.losses import drops_towards, host_addresses, lost_packets
from flanneld.ctl.nodes import answer_remedy, our_addresses, port_of, target_of, told, vxlan_of
from flanneld.ctl.output import TextTable
from flanneld.ctl.paths import PathToPeer, carriers, parsed, paths, peer_named
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, Status, UplinkStatus, known
from flanneld.errors import FlannelError
from flanneld.model import IPAddress, family_of
from flanneld.network.interfaces import names
from flanneld.network.query import ORDINARY
from flanneld.network.survey import SILENCE, Channel, EchoChannel, QueryChannel, Reply, ask, path_mtus, survey
from flanneld.state.resources import Vxlan

_NO_CONTAINER = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})
#: Peers that are examined if none is named.
_FEW = 3
#: Bytes of a small packet, with the IP header: the size of ping(8).
SMALL = 84
#: Seconds until a packet counts as lost, lost packets in a row after which a stage is given up, and seconds
#: more for the last packet to a container: its node reports a missing one after 3 s of ARP.
_WITHIN, _ENOUGH, _LINGER = 1.0, 3, 2.0
#: Seconds for the answers to one try of a query without checksums, and tries.
_CHECKED_WITHIN, _TRIES = 0.5, 2


class Stage(StrEnum):
    """Stage of the way, in the order in which a packet passes them."""

    UNDERLAY = "underlay"
    PORT = "port"
    TUNNEL = "tunnel"
    UDP = "udp"
    THERE = "there"
    BACK = "back"
    CONTAINER = "container"


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
    """Result of one check. ``state`` is ``ok``, ``hint``, ``PROBLEM`` or ``unknown``.

    ``more`` are its numbers for programs.
    """

    check: str
    about: str
    state: str
    found: str
    note: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON."""
        told = {"check": self.check, "about": self.about, "state": self.state, "found": self.found}
        return {**told, "note": self.note, **self.more}


class Sums(Struct, frozen=True, gc=False):
    """Replies to a query with checksums, to one without, and to one without whose answer has one."""

    both: Reply
    neither: Reply
    answer_only: Reply


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
        return has_stop or any(each.state == "PROBLEM" for each in self.results)

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
            Result("filter", peer.name, each.state, f"{each.chain} of this node", each.note)
            for each in drops(peer.networks[0].network_address)
        ] + [
            Result("lookup", peer.name, "PROBLEM", each.packets, each.note)
            for each in lost_packets(status, names(), devices, [parsed(peer)])
            if each.cause != "uplink"  # which may be meant so
        ]
        results += [*judge(peer, found, through, status), *here, *spoilt(peer, found, port, status)]
        verdicts.append((peer.name, verdict(found, through, here)))
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
        raise FlannelError(f"{name} is no container of {wanted.peer}", f"it is of {peer.name}")
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
                self.tell(f"{self.peer.name}: {Stage.PORT}")
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
        self.tell(f"{self.peer.name}: {stage}")
        return series(stage, EchoChannel(family_of(to), SMALL), to, SMALL, self.count)

    def _query(self, stage: Stage, to: IPAddress, size: int, answer_size: int) -> Series:
        self.tell(f"{self.peer.name}: {stage}")
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
    yield checksums(peer.name, replies, answers_icmp=answers_icmp, device=vxlan_of(status))
    seen = told(udp.facts).seen
    if seen and in_overlay:
        yield masqueraded(peer.name, seen, frozenset(map(str, our_addresses(status))))


def _ask_unsummed(target: IPAddress, port: int, which: tuple[bool, bool]) -> Reply:
    with closing(QueryChannel(4, port, ORDINARY, SMALL, unsummed=which)) as channel:
        return survey(channel, [target], _CHECKED_WITHIN, _TRIES)[target]


# ---- judgements (pure) --------------------------------------------------------------------------


def verdict(
    found: Sequence[Series], sizes: Sequence[PathToPeer] = (), here: Sequence[Result] = ()
) -> Verdict:
    """Return where packets stop: at the first stage that explains everything after it.

    A cause on this node, ``here``, is better than any guess.
    """
    said = _of_stages(found, sizes)
    known_here = [f"{each.found}: {each.note}" for each in here if each.state == "PROBLEM"]
    return replace(said, reason=known_here[0]) if said.at and known_here else said


def _of_stages(found: Sequence[Series], sizes: Sequence[PathToPeer]) -> Verdict:

    def one(stage: Stage) -> Series | None:
        return next((each for each in found if each.stage is stage), None)

    underlay, port, tunnel = one(Stage.UNDERLAY), one(Stage.PORT), one(Stage.TUNNEL)
    container, udp = one(Stage.CONTAINER), one(Stage.UDP)
    passes = any(each is not None and each.arrived for each in (tunnel, container, udp))
    if tunnel is not None and not passes:
        return _before_the_tunnel(underlay, port, tunnel)
    if tunnel is None and not passes and underlay is not None and not underlay.arrived:
        return Verdict("underlay", f"{underlay.to} does not answer: its host is down, or ICMP is filtered")
    if container is not None and not container.arrived:
        return _after_the_tunnel(container)
    if (too_large := _too_large(found, sizes)) is not None:
        return too_large
    if udp is not None and not udp.arrived:
        return Verdict("udp", "ICMP passes and UDP does not: a firewall, or checksums")
    lossy = next((each for each in found if each.stage is not Stage.PORT and each.rtts and each.lost), None)
    if lossy is not None:
        return Verdict(lossy.stage.value, f"packets lost: {lossy.lost} of {lossy.sent}")
    if tunnel is None and container is None:
        return Verdict(None, "the node answers; its backend has no address in the overlay: name a container")
    return Verdict(None, "packets pass in both directions")


def _before_the_tunnel(underlay: Series | None, port: Series | None, tunnel: Series) -> Verdict:
    if port is not None and port.is_refused:
        return Verdict("port", f"nothing listens there: flanneld on {port.to} has no device, or another port")
    if port is not None and port.error:
        return Verdict("port", "a firewall rejects it: let UDP to this port pass between the nodes")
    if underlay is not None and not underlay.arrived:
        return Verdict("underlay", f"{underlay.to} does not answer: its host is down, or ICMP is filtered")
    return Verdict(
        "tunnel",
        f"{tunnel.to} does not answer, its host does: a firewall drops the tunnel's packets, or the node has"
        " another VNI or MAC than its lease; flannelctl trace and flannelctl doctor, here and there",
    )


def _after_the_tunnel(container: Series) -> Verdict:
    if container.error in _NO_CONTAINER:
        return Verdict("container", f"its node answers that there is no {container.to}")
    return Verdict(
        "forward",
        f"the way to its node is open and {container.to} does not answer: the node does not forward"
        " (flannelctl doctor there), or the container is gone or drops ICMP",
    )


def _too_large(found: Sequence[Series], sizes: Sequence[PathToPeer]) -> Verdict | None:
    answering = {each.to for each in found if each.rtts}
    for path in sizes:
        if path.carried != path.required and str(path.target) in answering:
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
) -> Iterator[Result]:
    """Yield a result for each stage and each size."""
    about, devices = peer.name, known(told.devices) or ()
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
            yield _of_stage(about, each)
    for path in sizes:
        carried = f"{path.carried or '-'} of {path.required} bytes"
        more = {"to": str(path.target), "wanted": path.required, "carried": path.carried}
        yield Result(f"path MTU, {path.name}", about, path.state, carried, path.note, more)


def _of_stage(about: str, each: Series) -> Result:
    more = {"to": each.to, "bytes": each.size, "sent": each.sent, "lost": each.lost, "rtts": each.rtts}
    if each.is_refused and each.stage is Stage.UDP:
        note = "UDP arrives; the daemon does not answer queries"
        return Result(each.stage.value, about, "ok", f"{each.to}: port closed", note, more)
    if each.rtts:
        state = "hint" if each.lost else "ok"
    else:
        state = "unknown" if each.stage is Stage.UNDERLAY else "PROBLEM"
    found = f"{each.to}, {each.size} bytes: {len(each.rtts)} of {each.sent}{_rtt(each)}"
    return Result(each.stage.value, about, state, found, "" if each.rtts else "no answer", more)


def _rtt(each: Series) -> str:
    if not each.rtts:
        return ""
    least, mean, most = min(each.rtts), sum(each.rtts) / len(each.rtts), max(each.rtts)
    return ", " + "/".join(f"{1000 * value:.2f}" for value in (least, mean, most)) + " ms"


def translated(uplink: UplinkStatus | None) -> Iterator[Result]:
    """Yield a result for each of our addresses that other nodes know under another one."""
    for local, public in zip(uplink.addresses, uplink.public_ips, strict=False) if uplink else ():
        if local == public:
            yield Result("NAT, underlay", "this node", "ok", f"{local}, announced as it is")
        else:
            note = "other nodes reach this one only if that address leads here for the backend's port"
            yield Result("NAT, underlay", "this node", "hint", f"{local}, announced as {public}", note)


def port_state(about: str, found: str, reply: Reply, *, is_open: bool) -> Result:
    """Judge the reply to a datagram at a peer's port; an open one is known by answers through it."""
    if reply.is_refusal:
        state, what, note = "PROBLEM", "is closed", "no device listens: is flanneld started there?"
    elif reply.error:
        reason = errno.errorcode.get(reply.error, str(reply.error))
        state, what, note = "PROBLEM", f"is rejected ({reason})", "let it pass in the firewall"
    elif is_open:
        state, what, note = "ok", "is open", ""
    else:
        state, what, note = "unknown", "gives no answer", "open, or a firewall drops what is sent there"
    return Result("port", about, state, f"{found} {what}", note)


def checksums(about: str, replies: Sums, *, answers_icmp: bool, device: Vxlan | None) -> Result:
    """Judge UDP through the overlay, where an uplink or a kernel may spoil checksums.

    The CPU computes those of ICMP, which passes where offloaded ones are wrong: flannel's issue 1279.
    """
    if replies.both.arrived:
        return Result("checksums", about, "ok", "UDP with checksums arrives")
    if not answers_icmp:
        return Result("checksums", about, "PROBLEM", "the node does not answer at all")
    if not replies.neither.arrived:
        note = "a firewall there drops UDP from the overlay, or checksums are wrong and it answers no queries"
        return Result("checksums", about, "hint", "ICMP arrives, UDP does not", note)
    here = replies.answer_only.arrived or replies.neither.is_refusal
    where = "this node" if here else about
    name = device.name if device else "the tunnel's device"
    note = f"on {where}: ethtool -K {name} tx-checksum-ip-generic off, for good -disable-tx-checksum-offload"
    return Result(
        "checksums", about, "PROBLEM", f"UDP arrives without checksums only; {where} spoils them", note
    )


def masqueraded(about: str, seen: str, own: frozenset[str]) -> Result:
    """Judge the address under which a peer sees our packets from the overlay."""
    if seen in own:
        return Result("NAT, overlay", about, "ok", f"sees this node as {seen}")
    note = "a rule masquerades packets inside the network: let it spare the network"
    return Result("NAT, overlay", about, "hint", f"sees this node as {seen}", note)
