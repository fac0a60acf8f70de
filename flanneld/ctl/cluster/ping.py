"""``flannelctl ping``: packets to a node and its container, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from ipaddress import ip_address, ip_network
from typing import Any

from flanneld.ctl.cluster.nodes import answer_remedy, our_addresses, port_of, target_of, vxlan_of
from flanneld.ctl.cluster.reach import Series, Stage, Verdict
from flanneld.ctl.data_source import Source
from flanneld.ctl.path_mtu import peer_named
from flanneld.ctl.text_tables import TextTable
from flanneld.model import IPAddress, family_of
from flanneld.network.query.message import ORDINARY
from flanneld.network.query.survey import Channel, EchoChannel, QueryChannel, ask

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


def measure(name: str, source: Source, count: int) -> Iterator[Series]:
    """Yield the stages to a node, named by its subnet, public IP or a container's address.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    document = source.document
    peer = peer_named(name, document)
    place = target_of(peer["subnets"], peer["public_ips"], our_addresses(document))
    if peer["public_ips"]:
        public = ip_address(peer["public_ips"][0])
        yield from _echo(Stage.UNDERLAY, public, (document.get("uplink") or {}).get("mtu"), count)
        yield from _port(public, document)
    if place is not None:
        target = ip_address(place[0])
        size = document.get("mtu") if place[1] else (document.get("uplink") or {}).get("mtu")
        if place[1]:
            yield from _echo(Stage.TUNNEL, target, size, count)
        yield from _queries(target, port_of(document, source.options), size, count)
    container = _container(name, peer, place)
    if container is not None:
        yield from _echo(Stage.CONTAINER, container, document.get("mtu"), count)


def _container(name: str, peer: Mapping[str, Any], place: tuple[str, bool] | None) -> IPAddress | None:
    """Return the container's address, None if a subnet or a node's own address is named."""
    net = ip_network(name, strict=False)
    address = net.network_address
    if net.prefixlen != net.max_prefixlen or str(address) in (*peer["public_ips"], *(place or ())[:1]):
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


def _port(public: IPAddress, document: Mapping[str, Any]) -> Iterator[Series]:
    """Yield a datagram to the VXLAN port. No answer is the good case: the kernel drops it as no VXLAN."""
    device = vxlan_of(document)
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


def table(found: list[Series], said: Verdict) -> list[TextTable]:
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


def unanswered(found: list[Series], source: Source) -> list[str]:
    """Return one line about stages that are left out for want of answers to queries, with the remedy."""
    if not any(each.stage is Stage.UDP and each.is_refused for each in found):
        return []
    remedy = answer_remedy(port_of(source.document, source.options))
    return [f"which direction loses large packets (there, back); {remedy}"]


def plain(found: list[Series], said: Verdict) -> dict[str, Any]:
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
