"""``flannelctl netcheck``: properties of the network under the overlay that break it."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from ipaddress import ip_address
from typing import Any

from msgspec import Struct

from flanneld.ctl.cluster.nodes import our_addresses, port_of, target_of, told, vxlan_of
from flanneld.ctl.cluster.ping import SMALL
from flanneld.ctl.data_source import Source
from flanneld.ctl.path_mtu import at_a_glance, peer_named
from flanneld.ctl.shadowing_routes import wanted_route
from flanneld.model import IPAddress, family_of
from flanneld.network.query import path_mtu
from flanneld.network.query.message import ORDINARY
from flanneld.network.query.survey import EchoChannel, QueryChannel, Reply, survey
from flanneld.state.resources import Vxlan

#: Peers that are examined if none is named.
_FEW = 3
_WITHIN, _TRIES = 0.5, 2


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


def measure(source: Source, name: str | None) -> Iterator[Result]:
    """Yield the results for this host and for one peer, or for a few.

    Raises ``FlannelError`` for an unknown name, ``OSError`` if this process may not send ICMP.
    """
    document = source.document
    yield from translated(document.get("uplink") or {})
    if name:
        some = [peer_named(name, document)]
    else:
        some = [each for each in document.get("peers", ()) if each["state"] == "in the kernel"][:_FEW]
    for peer in some:
        yield from _of_peer(peer, source)


def _of_peer(peer: Mapping[str, Any], source: Source) -> Iterator[Result]:
    document, about = source.document, ",".join(peer["subnets"])
    through: set[IPAddress] = set()
    if "mtu" in document and document.get("uplink"):
        for path in at_a_glance([peer], document, path_mtu.glance):
            carried = f"{path.carried or '-'} of {path.required} bytes"
            yield Result(f"path MTU, {path.name}", about, path.state, carried, path.note)
            if path.name == "tunnel" and path.carried is not None:
                through.add(path.target)
    own = our_addresses(document)
    if peer["public_ips"]:
        yield from _port(ip_address(peer["public_ips"][0]), peer, document, through)
    place = target_of(peer["subnets"], peer["public_ips"], own)
    if place is None:
        return
    target, port = ip_address(place[0]), port_of(document, source.options)
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
    yield checksums(about, replies, answers_icmp=echo.rtt is not None, device=vxlan_of(document))
    seen = told(replies.both.facts).seen
    if seen and place[1]:
        yield masqueraded(about, seen, frozenset(map(str, own)))


def _ask(channel: Any, target: IPAddress) -> Reply:
    with closing(channel):
        return survey(channel, [target], _WITHIN, _TRIES)[target]


def _port(
    public: IPAddress, peer: Mapping[str, Any], document: Mapping[str, Any], through: Collection[IPAddress]
) -> Iterator[Result]:
    """Yield the state of the peer's VXLAN port; ``through`` are its addresses that answered in the overlay.

    The kernel answers nothing at an open port.
    """
    device = vxlan_of(document)
    if device is None or device.local.version != public.version:
        return
    reply = _ask(QueryChannel(family_of(public), device.port), public)
    routes = [wanted_route(target, peer, document) for target in through]
    is_open = any(route is not None and route.device == device.name for route in routes)
    yield port_state(",".join(peer["subnets"]), f"UDP port {device.port} of {public}", reply, is_open=is_open)


# ---- judgements (pure) --------------------------------------------------------------------------


def translated(uplink: Mapping[str, Any]) -> Iterator[Result]:
    """Yield a result for each of our addresses that other nodes know under another one."""
    addresses = uplink.get("addresses", ())
    for local, public in zip(addresses, uplink.get("public_ips", ()), strict=False):
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
        return Result("checksums", about, "unknown", "the node does not answer at all", "flannelctl ping")
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
