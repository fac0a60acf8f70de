"""Stages on the way to a node, and where packets stop (pure)."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

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
