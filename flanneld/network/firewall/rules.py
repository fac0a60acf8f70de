"""Flannel's packet filter rules as data (pure).

There are three styles, each for both families:

- Go flannel v0.12's rules, among others in the built-in chains
- the later rules, in chains of their own
- the later rules, in an nftables table of their own

The rules keep the addresses of packets between containers, and of packets entering from outside for a local
container. Packets that leave the network are masqueraded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, collapse_addresses
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork, family_of
from flanneld.network.firewall.fate import ACCEPT, MASQUERADE, RETURN, Rule, Test

#: Comments that identify our rules, as Go flannel writes them.
MASQ, FORWARD = "flanneld masq", "flanneld forward"

#: Mark of packets that kube-proxy masquerades itself.
KUBE_MARK = 0x4000

_MULTICAST: dict[Family, IPNetwork] = {4: IPv4Network("224.0.0.0/4"), 6: IPv6Network("ff00::/8")}
MULTICAST = frozenset(_MULTICAST.values())

#: A table and a chain in it.
Chain = tuple[str, str]

POSTROUTING: Chain = ("nat", "POSTROUTING")
FORWARDING: Chain = ("filter", "FORWARD")
FLANNEL_POSTRTG: Chain = ("nat", "FLANNEL-POSTRTG")
FLANNEL_FWD: Chain = ("filter", "FLANNEL-FWD")

#: The iptables chains that contain our rules in one style or another.
IPTABLES_CHAINS = (FLANNEL_POSTRTG, POSTROUTING, FLANNEL_FWD, FORWARDING)
#: Chains in which rules are tried; a start that was killed may have left them.
TRIALS: tuple[Chain, ...] = (("nat", "FLANNEL-TRIAL"), ("filter", "FLANNEL-TRIAL"))

#: Names of the families in nftables, also of the tables that iptables-nft makes there.
NFT_FAMILY: dict[Family, str] = {4: "ip", 6: "ip6"}
#: Names of our own tables in nftables.
NATIVE_TABLE: dict[Family, str] = {4: "flannel-ipv4", 6: "flannel-ipv6"}
NATIVE_POSTRTG, NATIVE_FORWARD = "postrtg", "forward"

#: Chains that only flannel creates.
OWN_CHAINS = frozenset(
    {FLANNEL_POSTRTG, FLANNEL_FWD, *TRIALS}
    | {(table, name) for table in NATIVE_TABLE.values() for name in (NATIVE_POSTRTG, NATIVE_FORWARD)}
)

Style = Literal["v0.12", "own-chains", "native"]


def source(net: IPNetwork, *, inside: bool = True) -> Test:
    """Return the test that a packet's source is inside a network, or outside it."""
    return Test("source", (net,), not inside)


def destination(net: IPNetwork, *, inside: bool = True) -> Test:
    """Return the test that a packet's destination is inside a network, or outside it."""
    return Test("destination", (net,), not inside)


def networks_of(rule: Rule) -> tuple[IPNetwork, ...]:
    """Return the networks that one of our rules is about, multicast ranges excepted."""
    values = [value for test in rule.tests for value in test.values]
    nets = [value for value in values if isinstance(value, IPv4Network | IPv6Network)]
    return tuple(net for net in nets if net not in MULTICAST)


#: Desired or actual rules of each chain, in order. A chain without an entry does not exist; a desired chain
#: without rules should not exist.
Rules = Mapping[Chain, tuple[Rule, ...]]


class Nets(Struct, frozen=True, gc=False):
    """One family's cluster network and this node's subnet.

    ``spared`` are the destinations outside the network that see the containers' addresses, in order.
    """

    network: IPNetwork
    subnet: IPNetwork
    spared: tuple[IPNetwork, ...] = ()

    def sparing(self, more: Iterable[IPNetwork]) -> Nets:
        """Return these nets with more spared destinations, as few as possible."""
        ours: list[Any] = [net for net in (*self.spared, *more) if net.version == self.network.version]
        return replace(self, spared=tuple(collapse_addresses(ours)))

    @property
    def family(self) -> Family:
        return family_of(self.network)


class Purpose(Struct, frozen=True, gc=False):
    """Functions that the rules should provide."""

    masquerade: bool = False
    forward: bool = False
    random: bool = True

    def __bool__(self) -> bool:
        return self.masquerade or self.forward


def desired_rules(style: Style, nets: Nets, purpose: Purpose) -> Rules:
    """Return one family's rules in the order of writing."""
    return {"v0.12": _built_in, "own-chains": _own_chains, "native": _native}[style](nets, purpose)


def _built_in(nets: Nets, purpose: Purpose) -> Rules:
    """Return v0.12's rules. They are unmarked among others' rules, so only exact copies count as ours."""
    masquerade, forward = v012_masquerade(nets, purpose.random), _accept(nets)
    return {
        POSTROUTING: masquerade if purpose.masquerade else (),
        FORWARDING: forward if purpose.forward else (),
    }


def v012_masquerade(nets: Nets, random: bool) -> tuple[Rule, ...]:
    inside, here = nets.network, nets.subnet
    return (
        Rule(RETURN, (source(inside), destination(inside))),
        Rule(MASQUERADE, (source(inside), _no_multicast(nets)), random=random),
        Rule(RETURN, (source(inside, inside=False), destination(here))),
        Rule(MASQUERADE, (source(inside, inside=False), destination(inside)), random=random),
    )


def v012_forward(nets: Nets) -> tuple[Rule, ...]:
    return _accept(nets)


def _own_chains(nets: Nets, purpose: Purpose) -> Rules:
    masquerade = _masquerade(nets, purpose.random, ((net,) for net in nets.spared))
    forward = _commented(FORWARD, _accept(nets))
    return {
        FLANNEL_POSTRTG: masquerade if purpose.masquerade else (),
        POSTROUTING: (JUMPS[FLANNEL_POSTRTG],) if purpose.masquerade else (),
        FLANNEL_FWD: forward if purpose.forward else (),
        FORWARDING: (JUMPS[FLANNEL_FWD],) if purpose.forward else (),
    }


#: Jumps from the built-in chains to ours.
JUMPS: dict[Chain, Rule] = {
    FLANNEL_POSTRTG: Rule(FLANNEL_POSTRTG[1], comment=MASQ),
    FLANNEL_FWD: Rule(FLANNEL_FWD[1], comment=FORWARD),
}


def _native(nets: Nets, purpose: Purpose) -> Rules:
    table = NATIVE_TABLE[nets.family]
    masquerade = _masquerade(nets, purpose.random, filter(None, [nets.spared]))
    forward = _commented(FORWARD, _accept(nets))
    return {
        (table, NATIVE_FORWARD): forward if purpose.forward else (),
        (table, NATIVE_POSTRTG): masquerade if purpose.masquerade else (),
    }


def _masquerade(nets: Nets, random: bool, spared: Iterable[tuple[IPNetwork, ...]]) -> tuple[Rule, ...]:
    """Return the later rule set, which is also used for nftables, with a rule for each tuple in ``spared``.

    Go flannel's nftables rules differ in two places (docs/adr/0005). Their fourth has ``saddr != subnet daddr
    network`` instead of ``! -s network -d subnet``: the last rule never matches, and a host's packets to
    remote containers are not masqueraded. They also compare the whole mark, so a packet with a further bit
    besides kube-proxy's does not match.
    """
    inside, here = nets.network, nets.subnet
    return _commented(
        MASQ,
        (
            Rule(RETURN, (Test("mark", ((KUBE_MARK, KUBE_MARK),)),)),
            Rule(RETURN, (source(here), destination(inside))),
            Rule(RETURN, (source(inside), destination(here))),
            Rule(RETURN, (source(inside, inside=False), destination(here))),
            *(Rule(RETURN, (source(inside), Test("destination", each))) for each in spared),
            Rule(MASQUERADE, (source(inside), _no_multicast(nets)), random=random),
            Rule(MASQUERADE, (source(inside, inside=False), destination(inside)), random=random),
        ),
    )


def _accept(nets: Nets) -> tuple[Rule, ...]:
    return Rule(ACCEPT, (source(nets.network),)), Rule(ACCEPT, (destination(nets.network),))


def _no_multicast(nets: Nets) -> Test:
    return destination(_MULTICAST[nets.family], inside=False)


def _commented(comment: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(replace(rule, comment=comment) for rule in rules)
