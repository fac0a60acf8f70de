"""``flannelctl ping`` and ``flannelctl netcheck``: packets to a node by stages, and what spoils them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from ipaddress import ip_network
from typing import Any

from msgspec import Struct

from flanneld.ctl.checks.packets import Drop, drops_towards
from flanneld.ctl.compare import wanted_route
from flanneld.ctl.nodes import answer_remedy, our_addresses, port_of, target_of, told, vxlan_of
from flanneld.ctl.output import TextTable
from flanneld.ctl.path_mtu import paths, peer_named
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, Status, UplinkStatus, known
from flanneld.model import IPAddress, family_of
from flanneld.network.query import ORDINARY
from flanneld.network.survey import Channel, EchoChannel, QueryChannel, Reply, ask, path_mtus, survey
from flanneld.state.resources import Vxlan

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


class Series(Struct, frozen=True, gc=False):
    """Messages of one size to one address. ``size`` is in bytes with the IP header, ``rtts`` are in seconds.

    ``error`` is the errno of the last ICMP error; ``is_full`` means the largest packets of this stage.
    """

    stage: Stage
    to: str
    size: int
    sent: int
    rtts: tuple[float, ...] = ()
    error: int = 0
    is_full: bool = False

    @property
    def lost(self) -> int:
        return self.sent - len(self.rtts)

    @property
    def arrived(self) -> bool:
        """Return True if any message arrived; a closed port is an answer of the host's kernel."""
        return bool(self.rtts) or (self.error == errno.ECONNREFUSED and self.stage is not Stage.PORT)

    @property
    def is_refused(self) -> bool:
        return self.error == errno.ECONNREFUSED


class Verdict(Struct, frozen=True, gc=False):
    """Stage at which packets stop, with the reason; ``at`` is None if they arrive."""

    at: str | None
    reason: str


def verdict(found: Sequence[Series]) -> Verdict:
    """Return where packets stop: at the first stage that explains everything after it."""

    def one(stage: Stage, *, full: bool = False) -> Series | None:
        return next((each for each in found if each.stage is stage and each.is_full == full), None)

    underlay, port, tunnel = one(Stage.UNDERLAY), one(Stage.PORT), one(Stage.TUNNEL)
    container, udp = one(Stage.CONTAINER), one(Stage.UDP)
    passes = any(each is not None and each.arrived for each in (tunnel, container, udp))
    if tunnel is not None and not passes:
        return _before_the_tunnel(underlay, port, tunnel)
    if tunnel is None and not passes and underlay is not None and not underlay.arrived:
        return Verdict("underlay", f"{underlay.to} does not answer: its host is down, or ICMP is filtered")
    if container is not None and not container.arrived:
        return _after_the_tunnel(container)
    for each in found:
        if each.is_full and not each.arrived:
            return _too_large(each)
    if udp is not None and not udp.arrived:
        return Verdict(
            "udp", "ICMP passes and UDP does not: flannelctl netcheck tells a firewall from checksums"
        )
    lossy = next((each for each in found if each.stage is not Stage.PORT and each.rtts and each.lost), None)
    if lossy is not None:
        return Verdict(lossy.stage.value, f"{lossy.lost} of {lossy.sent} packets are lost")
    if tunnel is None and container is None:
        return Verdict(None, "the node answers; its backend has no address in the overlay: ping a container")
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


def _too_large(each: Series) -> Verdict:
    match each.stage:
        case Stage.THERE:
            return Verdict("tunnel", f"packets of {each.size} bytes do not get there")
        case Stage.BACK:
            return Verdict("tunnel", f"packets of {each.size} bytes get there and do not come back")
    return Verdict(
        each.stage.value, f"packets of {each.size} bytes are lost: flannelctl mtu finds what passes"
    )


#: Bytes of a small packet, with the IP header: the size of ping(8).
SMALL = 84
#: Seconds until a packet counts as lost.
_WITHIN = 1.0
#: Lost packets in a row after which a stage is given up.
_ENOUGH = 3
#: Seconds more for the last packet to a container: its node reports a missing one after 3 s of ARP.
_LINGER = 2.0


def series(
    channel: Channel[IPAddress], target: IPAddress, count: int, linger: float = 0.0
) -> tuple[int, tuple[float, ...], int]:
    """Send messages one after the other. Return how many, the times of the answers, and the last error.

    The last one may take ``linger`` seconds longer if none was answered.
    """
    rtts: list[float] = []
    sent = in_a_row = error = 0
    with closing(channel):
        while sent < count and in_a_row < _ENOUGH:
            is_last = not rtts and (sent + 1 == count or in_a_row + 1 == _ENOUGH)
            reply = ask(channel, target, _WITHIN + (linger if is_last else 0.0))
            sent += 1
            error = reply.error or error
            if reply.rtt is not None:
                rtts.append(reply.rtt)
            in_a_row = 0 if reply.rtt is not None else in_a_row + 1
            if reply.is_refusal:
                break
    return sent, tuple(rtts), error


def stages(name: str, source: DataSource, count: int) -> Iterator[Series]:
    """Yield the stages to a node, named by its subnet, public IP or a container's address.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    told = source.status
    uplink, mtu = known(told.uplink), known(told.mtu)
    uplink_mtu = uplink.mtu if uplink else None
    peer = peer_named(name, told)
    place = target_of(peer, our_addresses(told))
    for public in peer.addresses[:1]:
        yield from _echo(Stage.UNDERLAY, public, uplink_mtu, count)
        yield from _port_stage(public, told)
    if place is not None:
        target = place[0]
        size = mtu if place[1] else uplink_mtu
        if place[1]:
            yield from _echo(Stage.TUNNEL, target, size, count)
        yield from _queries(target, port_of(source), size, count)
    container = _container(name, peer, place)
    if container is not None:
        yield from _echo(Stage.CONTAINER, container, mtu, count)


def _container(name: str, peer: PeerStatus, place: tuple[IPAddress, bool] | None) -> IPAddress | None:
    """Return the container's address, None if a subnet or a node's own address is named."""
    net = ip_network(name, strict=False)
    address = net.network_address
    if net.prefixlen != net.max_prefixlen or address in (*peer.addresses, *(place or ())[:1]):
        return None
    return address


def _echo(stage: Stage, target: IPAddress, size: int | None, count: int) -> Iterator[Series]:
    """Yield ICMP echoes, small ones and, if these are answered, the largest."""
    linger = _LINGER if stage is Stage.CONTAINER else 0.0
    channel = EchoChannel(family_of(target), SMALL)
    small = Series(stage, str(target), SMALL, *series(channel, target, count, linger))
    yield small
    if small.rtts and size:
        found = series(EchoChannel(family_of(target), size), target, count)
        yield Series(stage, str(target), size, *found, is_full=True)


def _port_stage(public: IPAddress, told: Status) -> Iterator[Series]:
    """Yield a datagram to the VXLAN port. No answer is the good case: the kernel drops it as no VXLAN."""
    device = vxlan_of(told)
    if device is not None and device.local.version == public.version:
        channel = QueryChannel(family_of(public), device.port)
        yield Series(Stage.PORT, str(public), ORDINARY, *series(channel, public, 1))


def _queries(target: IPAddress, port: int, size: int | None, count: int) -> Iterator[Series]:
    """Yield queries to the daemon: small, then large with a small answer, then large with a large one."""

    def run(size: int, answer_size: int) -> tuple[int, tuple[float, ...], int]:
        return series(QueryChannel(family_of(target), port, size, answer_size), target, count)

    small = Series(Stage.UDP, str(target), ORDINARY, *run(ORDINARY, ORDINARY))
    yield small
    if small.rtts and size:
        there = Series(Stage.THERE, str(target), size, *run(size, SMALL), is_full=True)
        yield there
        if there.rtts:
            yield Series(Stage.BACK, str(target), size, *run(size, size), is_full=True)


def stages_table(found: list[Series], said: Verdict) -> list[TextTable]:
    """Return a line for each stage, then where packets stop."""
    rows = [
        (
            each.stage.value,
            each.to,
            str(each.size),
            _state(each),
            f"{each.lost}/{each.sent}",
            _rtt(each),
            _note(each),
        )
        for each in found
    ]
    end = f"stops at: {said.at}; {said.reason}" if said.at else said.reason
    return [
        TextTable(("stage", "to", "bytes", "state", "lost", "rtt", "note"), rows),
        TextTable((), [(end,)]),
    ]


def unanswered(found: list[Series], source: DataSource) -> list[str]:
    """Return one line about stages that are left out for want of answers to queries, with the remedy."""
    if not any(each.stage is Stage.UDP and each.is_refused for each in found):
        return []
    remedy = answer_remedy(port_of(source))
    return [f"which direction loses large packets (there, back); {remedy}"]


def stages_plain(found: list[Series], said: Verdict) -> dict[str, Any]:
    """Return the same as JSON."""
    stages = [
        {
            "stage": each.stage.value,
            "to": each.to,
            "bytes": each.size,
            "state": _state(each),
            "sent": each.sent,
            "lost": each.lost,
            "rtts": each.rtts,
        }
        for each in found
    ]
    return {"stages": stages, "stops_at": said.at, "reason": said.reason}


def _state(each: Series) -> str:
    if each.stage is Stage.PORT:
        return "PROBLEM" if each.error else "unknown"
    if each.stage is Stage.UDP and each.is_refused:
        return "ok"
    if each.rtts:
        return "hint" if each.lost else "ok"
    return "PROBLEM" if each.is_full or each.stage is not Stage.UNDERLAY else "unknown"


def _rtt(each: Series) -> str:
    if not each.rtts:
        return "-"
    least, mean, most = min(each.rtts), sum(each.rtts) / len(each.rtts), max(each.rtts)
    return "/".join(f"{1000 * value:.2f}" for value in (least, mean, most)) + " ms"


def _note(each: Series) -> str:
    if each.stage is Stage.PORT:
        if each.is_refused:
            return "closed"
        return "rejected" if each.error else "open, or dropped without an answer"
    if each.stage is Stage.UDP and each.is_refused:
        return "UDP arrives; the daemon does not answer queries"
    return ""


#: Peers that are examined if none is named.
_FEW = 3
#: Seconds for the answers to one try of a check, and tries.
_CHECKED_WITHIN, _TRIES = 0.5, 2


class Result(Struct, frozen=True, gc=False):
    """Result of one check. ``state`` is ``ok``, ``hint``, ``PROBLEM`` or ``unknown``."""

    check: str
    about: str
    state: str
    found: str
    note: str = ""


class Sums(Struct, frozen=True, gc=False):
    """Replies to a query with checksums, to one without, and to one without whose answer has one."""

    both: Reply
    neither: Reply
    answer_only: Reply


def measure(source: DataSource, name: str | None) -> Iterator[Result]:
    """Yield the results for this host and for one peer, or for a few.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    status = source.status
    yield from translated(known(status.uplink))
    if name:
        some = [peer_named(name, status)]
    else:
        some = [each for each in status.each_peer if each.state == "in the kernel"][:_FEW]
    drops = drops_towards(status)
    for peer in some:
        yield from _of_peer(peer, source, drops)


def _of_peer(
    peer: PeerStatus, source: DataSource, drops: Callable[[IPAddress], list[Drop]]
) -> Iterator[Result]:
    status, about = source.status, peer.name
    through: set[IPAddress] = set()
    if known(status.mtu) and known(status.uplink):
        for path in paths([peer], status, path_mtus):
            carried = f"{path.carried or '-'} of {path.required} bytes"
            yield Result(f"path MTU, {path.name}", about, path.state, carried, path.note)
            if path.name == "tunnel" and path.carried is not None:
                through.add(path.target)
    own = our_addresses(status)
    for public in peer.addresses[:1]:
        yield from _port(public, peer, status, through)
    for drop in drops(peer.networks[0].network_address):
        yield Result("filter", about, drop.state, f"{drop.chain} of this node", drop.note)
    place = target_of(peer, own)
    if place is None:
        return
    target, port = place[0], port_of(source)
    replies = Sums(
        _ask(QueryChannel(family_of(target), port), target),
        *(
            _ask(QueryChannel(4, port, ORDINARY, SMALL, unsummed=which), target)
            if target.version == 4
            else Reply()
            for which in ((True, True), (True, False))
        ),
    )
    echo = _ask(EchoChannel(family_of(target)), target)
    yield checksums(about, replies, answers_icmp=echo.rtt is not None, device=vxlan_of(status))
    seen = told(replies.both.facts).seen
    if seen and place[1]:
        yield masqueraded(about, seen, frozenset(map(str, own)))


def _ask(channel: Any, target: IPAddress) -> Reply:
    with closing(channel):
        return survey(channel, [target], _CHECKED_WITHIN, _TRIES)[target]


def _port(
    public: IPAddress, peer: PeerStatus, told: Status, through: Collection[IPAddress]
) -> Iterator[Result]:
    """Yield the state of the peer's VXLAN port; ``through`` are its addresses that answered in the overlay.

    The kernel answers nothing at an open port.
    """
    device = vxlan_of(told)
    if device is None or device.local.version != public.version:
        return
    reply = _ask(QueryChannel(family_of(public), device.port), public)
    routes = [wanted_route(target, peer, told) for target in through]
    is_open = any(route is not None and route.device == device.name for route in routes)
    yield port_state(peer.name, f"UDP port {device.port} of {public}", reply, is_open=is_open)


# ---- judgements (pure) --------------------------------------------------------------------------


def translated(uplink: UplinkStatus | None) -> Iterator[Result]:
    """Yield a result for each of our addresses that other nodes know under another one."""
    for local, public in zip(uplink.addresses, uplink.public_ips, strict=False) if uplink else ():
        if local == public:
            yield Result("NAT, underlay", "this node", "ok", f"{local}, announced as it is")
        else:
            note = "other nodes reach this one only if that address leads here for the backend's port"
            yield Result("NAT, underlay", "this node", "hint", f"{local}, announced as {public}", note)


def port_state(about: str, found: str, reply: Reply, *, is_open: bool) -> Result:
    """Judge the reply to a datagram at a peer's VXLAN port; an open one is known by answers through it."""
    if reply.is_refusal:
        return Result(
            "port", about, "PROBLEM", f"{found} is closed", "no device listens: is flanneld started there?"
        )
    if reply.error:
        reason = errno.errorcode.get(reply.error, str(reply.error))
        return Result(
            "port", about, "PROBLEM", f"{found} is rejected ({reason})", "let it pass in the firewall"
        )
    if is_open:
        return Result("port", about, "ok", f"{found} is open")
    return Result(
        "port", about, "unknown", f"{found} gives no answer", "open, or a firewall drops what is sent there"
    )


def checksums(about: str, replies: Sums, *, answers_icmp: bool, device: Vxlan | None) -> Result:
    """Judge UDP through the overlay, where an uplink or a kernel may spoil checksums.

    The CPU computes those of ICMP, which passes where offloaded ones are wrong: flannel's issue 1279.
    """
    if replies.both.arrived:
        return Result("checksums", about, "ok", "UDP with checksums arrives")
    if not answers_icmp:
        return Result("checksums", about, "PROBLEM", "the node does not answer at all", "flannelctl ping")
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
