"""XFRM policies as resources: which packets are encrypted, blocked or allowed as they are (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld.model import IPNetwork, lies_in
from flanneld.state.resources import Key, Kind, Resource

#: Name of the table of policies.
POLICIES = "xfrm-policies"
#: Kernel modules of policies and SAs, for modprobe.
MODULES = "xfrm_user esp4"
#: reqid of upstream's tunnels, in their SAs and policies.
REQID = 11
#: Priority of tunnels, upstream's 0. A lower number comes first, so tunnels precede the guards.
TUNNEL_PRIORITY = 0
#: Priorities that charon computes for its own tunnels, which it numbers from 1, are above this one.
CHARONS_PRIORITY = 100_000
#: Priorities of the guards, the last possible ones.
ALLOW_PRIORITY, BLOCK_PRIORITY = 0xFFFF_FFFE, 0xFFFF_FFFF


class Direction(IntEnum):
    """Direction of the packets of a policy (linux/xfrm.h, XFRM_POLICY_*)."""

    IN = 0
    OUT = 1
    FWD = 2


class Action(IntEnum):
    """Action for matching packets (linux/xfrm.h)."""

    ALLOW = 0
    BLOCK = 1


class Tunnel(Struct, frozen=True, gc=False):
    """Template: ESP in tunnel mode between two hosts.

    An ``optional`` one also accepts packets that came in another way. It is for incoming packets: the kernel
    refuses it for outgoing ones.
    """

    source: IPv4Address
    destination: IPv4Address
    reqid: int = REQID
    optional: bool = False

    def __str__(self) -> str:
        level = " level use" if self.optional else ""
        return (
            f"tmpl src {self.source} dst {self.destination} proto esp reqid {self.reqid} mode tunnel{level}"
        )


class XfrmPolicy(Struct, frozen=True, gc=False):
    """Policy of the main type, without mark and interface id.

    ``odd`` describes properties that flannel's policies never have. Such a policy is never desired.
    ``index`` is the kernel's number of a policy for one protocol, port or device, which stands beside ours;
    0 for one that is for all packets.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    direction: Direction
    source: IPv4Network
    destination: IPv4Network
    priority: int
    tunnel: Tunnel | None = None
    action: Action = Action.ALLOW
    odd: str = ""
    index: int = 0

    @property
    def key(self) -> Key:
        """Return the selector and direction, and the index: they identify a policy in the kernel."""
        source, destination = self.source, self.destination
        return (
            POLICIES,
            int(self.direction),
            int(source.network_address),
            source.prefixlen,
            int(destination.network_address),
            destination.prefixlen,
            self.index,
        )

    @property
    def subnet(self) -> IPNetwork | None:
        """Return the peer's subnet: the policy is kept while the lease of this subnet is unreadable."""
        if self.tunnel is None:
            return None
        return self.destination if self.direction is Direction.OUT else self.source

    @property
    def leads(self) -> bool:
        """Return True if packets to a peer leave through this tunnel, whichever route they have."""
        return self.tunnel is not None and self.direction is Direction.OUT

    @property
    def is_guard(self) -> bool:
        """Return True for a policy with a guard's priority, which no other program uses."""
        return self.tunnel is None and self.priority in (ALLOW_PRIORITY, BLOCK_PRIORITY)

    def __str__(self) -> str:
        how = str(self.tunnel) if self.tunnel else f"action {self.action.name.lower()}"
        part = f" index {self.index}" if self.index else ""
        selector = f"src {self.source} dst {self.destination}{part} dir {self.direction.name.lower()}"
        return f"policy {selector} priority {self.priority} {how}{self.odd and f' {self.odd}'}"


def guards(network: IPv4Network, subnet: IPv4Network | None) -> list[XfrmPolicy]:
    """Return the policies that keep packets between containers from leaving unencrypted.

    A block alone would cut this node's own containers off from each other. The kernel looks up a forwarded
    packet twice. A packet to a peer is also looked up as forwarded, before its encryption. A packet from a
    peer is also looked up as leaving, after its decryption. So the policies that allow come first.
    """
    block = [XfrmPolicy(each, network, network, BLOCK_PRIORITY, action=Action.BLOCK) for each in Direction]
    if subnet is None:
        return block
    return [
        XfrmPolicy(Direction.IN, subnet, subnet, ALLOW_PRIORITY),
        XfrmPolicy(Direction.OUT, network, subnet, ALLOW_PRIORITY),
        XfrmPolicy(Direction.FWD, subnet, network, ALLOW_PRIORITY),
        *block,
    ]


def tunnel_policies(
    own: IPv4Network,
    peer: IPv4Network,
    local: IPv4Address,
    remote: IPv4Address,
    *,
    accepts_others: bool = False,
) -> list[XfrmPolicy]:
    """Return the policies that lead to a peer and from it, as upstream makes them.

    With ``accepts_others`` the peer may also send by another backend.
    """
    out, back = Tunnel(local, remote), Tunnel(remote, local, optional=accepts_others)
    return [
        XfrmPolicy(Direction.OUT, own, peer, TUNNEL_PRIORITY, out),
        XfrmPolicy(Direction.IN, peer, own, TUNNEL_PRIORITY, back),
        XfrmPolicy(Direction.FWD, peer, own, TUNNEL_PRIORITY, back),
    ]


def is_flannels(policy: XfrmPolicy, network: IPNetwork) -> bool:
    """Return True for a guard or a tunnel that flannel, in Go or in Python, made for this network."""
    if policy.index:
        return False
    if policy.is_guard:
        return lies_in(policy.source, network) and lies_in(policy.destination, network)
    is_tunnel = policy.tunnel is not None and policy.tunnel.reqid == REQID
    is_tunnel = is_tunnel and policy.priority < CHARONS_PRIORITY
    return is_tunnel and (lies_in(policy.source, network) or lies_in(policy.destination, network))


def passes_by(policy: XfrmPolicy, network: IPv4Network, desired: Iterable[Resource] = ()) -> bool:
    """Return True if another program's policy lets packets inside the network leave unencrypted.

    One to this node's own containers does not: a guard among the ``desired`` resources allows as much.
    """
    is_open = policy.tunnel is None and policy.action is Action.ALLOW and not is_flannels(policy, network)
    is_ours = policy.source.overlaps(network) and policy.destination.overlaps(network)
    if not (is_open and is_ours and policy.direction is Direction.OUT):
        return False
    return not any(
        each.priority == ALLOW_PRIORITY
        and each.direction is Direction.OUT
        and policy.destination.subnet_of(each.destination)
        for each in desired
        if isinstance(each, XfrmPolicy)
    )
