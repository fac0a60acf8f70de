"""Judgements of ``flannelctl netcheck``: where packets stop, and what spoils them (pure)."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_network
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.ctl.compare import wanted_route
from flanneld.ctl.output import State
from flanneld.ctl.paths import PathToPeer
from flanneld.diagnostics.status import PeerStatus, Status, UplinkStatus, known
from flanneld.network.survey import Reply
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
        told = {"check": self.check, "about": self.about, "state": self.state, "found": self.found}
        return {**told, "note": self.note, **self.more}


class Sums(Struct, frozen=True, gc=False):
    """Replies to a query with checksums, to one without, and to one without whose answer has one."""

    both: Reply
    neither: Reply
    answer_only: Reply


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
    def one(stage: Stage) -> Series | None:
        return next((each for each in found if each.stage is stage), None)

    underlay, port, tunnel = one(Stage.UNDERLAY), one(Stage.PORT), one(Stage.TUNNEL)
    container, udp = one(Stage.CONTAINER), one(Stage.UDP)
    passes = passes_on or any(each is not None and each.arrived for each in (tunnel, container, udp))
    if tunnel is not None and not passes:
        return _before_the_tunnel(underlay, port, tunnel)
    if tunnel is None and not passes and underlay is not None and not underlay.arrived:
        return Verdict("underlay", f"{underlay.to} does not answer: its host is down, or ICMP is filtered")
    if container is not None and not container.arrived:
        return _after_the_tunnel(container)
    if (too_large := _too_large(found, sizes)) is not None:
        return too_large
    if udp is not None and not udp.arrived:
        reason = "packets get to the node, which answers no UDP: a firewall there, or checksums"
        return Verdict("udp" if is_known else None, reason)
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
        state = State.HINT if each.lost else State.OK
    else:
        is_told = each.stage is not Stage.UNDERLAY and not (is_reached and each.stage in AT_THE_NODE)
        state = State.PROBLEM if is_told else State.UNKNOWN
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


def checksums(about: str, replies: Sums, *, answers_icmp: bool, device: Vxlan | None) -> Result:
    """Judge UDP through the overlay, where an uplink or a kernel may spoil checksums.

    The CPU computes those of ICMP, which passes where offloaded ones are wrong: flannel's issue 1279.
    """
    if replies.both.arrived:
        return Result("checksums", about, State.OK, "UDP with checksums arrives")
    if not answers_icmp:
        return Result("checksums", about, State.UNKNOWN, "the node does not answer at all")
    if not replies.neither.arrived:
        note = "a firewall there drops UDP from the overlay, or checksums are wrong and it answers no queries"
        return Result("checksums", about, State.HINT, "ICMP arrives, UDP does not", note)
    here = replies.answer_only.arrived or replies.neither.is_refusal
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
