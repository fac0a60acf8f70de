"""The packet filter rules that flannel wants, as data (pure).

Three kinds of rule set, each the same for both families: the one of Go flannel v0.12 between other
people's rules in the built-in chains, the later one in chains of its own, and that one in an nftables
table of its own. What they are for: packets between containers keep their addresses, and so do those that
enter from outside for a container here; what leaves the network takes this host's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork

ACCEPT, RETURN, MASQUERADE = "ACCEPT", "RETURN", "MASQUERADE"
#: What only others' rules do.
DROP, REJECT = "DROP", "REJECT"
#: The comments that tell our rules from others', as Go flannel writes them.
MASQ, FORWARD = "flanneld masq", "flanneld forward"

#: The mark that kube-proxy gives to packets it masquerades itself.
KUBE_MARK = 0x4000
ALL_BITS = 0xFFFF_FFFF

_MULTICAST: dict[Family, IPNetwork] = {4: IPv4Network("224.0.0.0/4"), 6: IPv6Network("ff00::/8")}
MULTICAST = frozenset(_MULTICAST.values())

#: A table and a chain in it.
Chain = tuple[str, str]

POSTROUTING: Chain = ("nat", "POSTROUTING")
FORWARDING: Chain = ("filter", "FORWARD")
FLANNEL_POSTRTG: Chain = ("nat", "FLANNEL-POSTRTG")
FLANNEL_FWD: Chain = ("filter", "FLANNEL-FWD")

#: The chains of iptables that hold rules of ours in one style or another.
IPTABLES_CHAINS = (FLANNEL_POSTRTG, POSTROUTING, FLANNEL_FWD, FORWARDING)

#: The table of our own in nftables.
NATIVE_TABLE: dict[Family, str] = {4: "flannel-ipv4", 6: "flannel-ipv6"}
NATIVE_POSTRTG, NATIVE_FORWARD = "postrtg", "forward"

#: The chains that only flannel makes.
OWN_CHAINS = frozenset(
    {FLANNEL_POSTRTG, FLANNEL_FWD}
    | {(table, name) for table in NATIVE_TABLE.values() for name in (NATIVE_POSTRTG, NATIVE_FORWARD)}
)

Style = Literal["v0.12", "own-chains", "native"]


class Match(Struct, frozen=True, gc=False):
    """The addresses inside a network, or all others."""

    net: IPNetwork
    inside: bool = True


class Rule(Struct, frozen=True, gc=False):
    """One rule. ``verdict`` is what becomes of a packet that fits, or the chain where it goes next.

    ``mark`` is a value and the bits that count. ``random`` wants fully random source ports. ``extra`` is
    what a rule of others has beyond all this: a rule that has some is never ours.
    """

    verdict: str
    source: Match | None = None
    destination: Match | None = None
    mark: tuple[int, int] | None = None
    comment: str = ""
    random: bool = False
    extra: str = ""

    @property
    def networks(self) -> tuple[IPNetwork, ...]:
        """The networks that the rule is about; all multicast addresses are nobody's."""
        sides = (self.source, self.destination)
        return tuple(side.net for side in sides if side and side.net not in MULTICAST)


#: What is wanted, or what was found: the rules of each chain, in their order. A chain without an entry
#: was not found; one that is wanted with no rules is not wanted.
Rules = Mapping[Chain, tuple[Rule, ...]]


class Nets(Struct, frozen=True, gc=False):
    """One family's network of the whole cluster and this node's subnet in it."""

    network: IPNetwork
    subnet: IPNetwork

    @property
    def family(self) -> Family:
        return 4 if self.network.version == 4 else 6


class Purpose(Struct, frozen=True, gc=False):
    """What the rules are to do."""

    masquerade: bool = False
    forward: bool = False
    random: bool = True

    def __bool__(self) -> bool:
        return self.masquerade or self.forward


def wanted(style: Style, nets: Nets, purpose: Purpose) -> Rules:
    """The rule set of one family in the order in which it is to be written."""
    return {"v0.12": _built_in, "own-chains": _own_chains, "native": _native}[style](nets, purpose)


def _built_in(nets: Nets, purpose: Purpose) -> Rules:
    """As in v0.12: unmarked, among the rules of others, which is why only exact copies count as ours."""
    masquerade, forward = v012_masquerade(nets, purpose.random), _accept(nets)
    return {
        POSTROUTING: masquerade if purpose.masquerade else (),
        FORWARDING: forward if purpose.forward else (),
    }


def v012_masquerade(nets: Nets, random: bool) -> tuple[Rule, ...]:
    inside, outside, here = Match(nets.network), Match(nets.network, inside=False), Match(nets.subnet)
    return (
        Rule(RETURN, inside, inside),
        Rule(MASQUERADE, inside, _no_multicast(nets), random=random),
        Rule(RETURN, outside, here),
        Rule(MASQUERADE, outside, inside, random=random),
    )


def v012_forward(nets: Nets) -> tuple[Rule, ...]:
    return _accept(nets)


def _own_chains(nets: Nets, purpose: Purpose) -> Rules:
    masquerade, forward = _masquerade(nets, purpose.random), _commented(FORWARD, _accept(nets))
    return {
        FLANNEL_POSTRTG: masquerade if purpose.masquerade else (),
        POSTROUTING: (JUMPS[FLANNEL_POSTRTG],) if purpose.masquerade else (),
        FLANNEL_FWD: forward if purpose.forward else (),
        FORWARDING: (JUMPS[FLANNEL_FWD],) if purpose.forward else (),
    }


#: The rules that lead from the built-in chains to ours.
JUMPS: dict[Chain, Rule] = {
    FLANNEL_POSTRTG: Rule(FLANNEL_POSTRTG[1], comment=MASQ),
    FLANNEL_FWD: Rule(FLANNEL_FWD[1], comment=FORWARD),
}


def _native(nets: Nets, purpose: Purpose) -> Rules:
    table = NATIVE_TABLE[nets.family]
    masquerade, forward = _masquerade(nets, purpose.random), _commented(FORWARD, _accept(nets))
    return {
        (table, NATIVE_FORWARD): forward if purpose.forward else (),
        (table, NATIVE_POSTRTG): masquerade if purpose.masquerade else (),
    }


def _masquerade(nets: Nets, random: bool) -> tuple[Rule, ...]:
    """The later rule set; nftables gets the same.

    Go flannel's nftables rules differ in two places. Their fourth has ``saddr != subnet daddr network``
    where this has ``! -s network -d subnet``: so nothing ever reached the last rule, and what a host
    sent to a remote container went unmasqueraded. And they compare the whole mark, so that a packet with
    another bit set besides kube-proxy's slipped through (docs/adr/0005).
    """
    inside, outside, here = Match(nets.network), Match(nets.network, inside=False), Match(nets.subnet)
    return _commented(
        MASQ,
        (
            Rule(RETURN, mark=(KUBE_MARK, KUBE_MARK)),
            Rule(RETURN, here, inside),
            Rule(RETURN, inside, here),
            Rule(RETURN, outside, here),
            Rule(MASQUERADE, inside, _no_multicast(nets), random=random),
            Rule(MASQUERADE, outside, inside, random=random),
        ),
    )


def _accept(nets: Nets) -> tuple[Rule, ...]:
    return (Rule(ACCEPT, source=Match(nets.network)), Rule(ACCEPT, destination=Match(nets.network)))


def _no_multicast(nets: Nets) -> Match:
    return Match(_MULTICAST[nets.family], inside=False)


def _commented(comment: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(replace(rule, comment=comment) for rule in rules)
