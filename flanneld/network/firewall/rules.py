"""Flannel's packet filter rules as data, and the edits that make a host's rules ours (pure).

There are three styles, each for both families:

- Go flannel v0.12's rules, among others in the built-in chains
- the later rules, in chains of their own
- the later rules, in an nftables table of their own

The rules keep the addresses of packets between containers, and of packets entering from outside for a local
container. Packets that leave the network are masqueraded.

Other programs' rules are never moved or removed, not even from our own chains. Another flanneld on the host,
with its own network, has its rules there, too. Our rules are only removed once their successors are in place.
Each table changes in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork, family_of, lies_in
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


# ---- from the rules found to those desired -------------------------------------------------------

_COMMENTS = (MASQ, FORWARD)


class RuleOwnership(Struct, frozen=True, gc=False):
    """Rules that identify flannel's rules among those found.

    In our own chains they are the rules whose first network is inside ``networks``; None stands for any.
    ``blocks`` are unmarked rules that an earlier run may have left in a built-in chain. A single rule may be
    an operator's, so a block only counts if it is complete and in order.
    """

    networks: tuple[IPNetwork, ...] | None
    blocks: tuple[tuple[Chain, tuple[Rule, ...]], ...] = ()

    def owns(self, chain: Chain, rule: Rule) -> bool:
        """Return True if a rule in one of our own chains is flannel's."""
        marked = rule.comment in _COMMENTS or chain[0] in NATIVE_TABLE.values()
        is_ours = marked and rule.is_plain and all(map(self.covers, networks_of(rule)[:1]))
        return is_ours or chain in TRIALS

    def left(self, chain: Chain, found: Sequence[Rule]) -> set[Rule]:
        """Return the rules of an earlier run in a built-in chain."""
        left: set[Rule] = set()
        for place, block in self.blocks:
            if place == chain and _in_order(block, found):
                left.update(block)
        return left

    def covers(self, net: IPNetwork) -> bool:
        """Return True if a network is inside a claimed one."""
        return self.networks is None or any(lies_in(net, known) for known in self.networks)


def claim(nets: Iterable[Nets], *former: Nets | None, masquerade: bool, forward: bool) -> RuleOwnership:
    """Return the claim to rules about the networks in ``nets``, and to earlier rules with a successor.

    Without a successor an unmarked rule stays: an operator may have put it there as a replacement.
    """
    blocks: list[tuple[Chain, tuple[Rule, ...]]] = []
    past = list(filter(None, former))
    for each in past:
        if masquerade:
            blocks += [(POSTROUTING, v012_masquerade(each, random)) for random in (True, False)]
        if forward:
            blocks.append((FORWARDING, v012_forward(each)))
    known = dict.fromkeys(each.network for each in (*nets, *past))
    return RuleOwnership(tuple(known), tuple(blocks))


class Edit(Struct, frozen=True, gc=False):
    """Changes of one chain, applied in the order of these fields.

    ``flush`` empties the chain and creates it if necessary. ``insert`` puts each rule at the top in turn.
    """

    chain: Chain
    flush: bool = False
    delete: tuple[Rule, ...] = ()
    insert: tuple[Rule, ...] = ()
    append: tuple[Rule, ...] = ()
    drop: bool = False


def edits_for(desired: Rules, found: Rules, claim: RuleOwnership) -> tuple[Edit, ...]:
    """Return the edits; none if the rules are correct. Chains are filled before jumps and dropped after."""
    names = [*desired, *(chain for chain in found if chain not in desired)]
    own = [
        edit
        for chain in names
        if chain in OWN_CHAINS and (edit := _own_edit(chain, desired.get(chain, ()), found.get(chain), claim))
    ]
    drops = [edit for edit in own if edit.drop]
    gone = {edit.chain for edit in drops}
    built_in = [
        edit
        for chain in names
        if chain not in OWN_CHAINS
        and (edit := _built_in_edit(chain, desired.get(chain, ()), found.get(chain, ()), claim, gone))
    ]
    return (*(edit for edit in own if not edit.drop), *built_in, *drops)


def _own_edit(
    chain: Chain, desired: tuple[Rule, ...], found: tuple[Rule, ...] | None, claim: RuleOwnership
) -> Edit | None:
    if found is None:
        return Edit(chain, flush=True, append=desired) if desired else None
    ours = [rule for rule in found if claim.owns(chain, rule)]
    if not desired:
        return _give_up(chain, ours, alone=len(ours) == len(found))
    if _distinct(ours) == desired:
        return None
    if len(ours) == len(found):
        return Edit(chain, flush=True, append=desired)
    # Another flanneld shares this chain. Rules without a network serve it, too, and must come first.
    shared = tuple(rule for rule in desired if not networks_of(rule))
    rest = tuple(rule for rule in desired if networks_of(rule))
    return Edit(chain, delete=tuple(ours), insert=shared[::-1], append=rest)


def _give_up(chain: Chain, ours: list[Rule], *, alone: bool) -> Edit | None:
    if alone:
        return Edit(chain, drop=True)
    delete = tuple(rule for rule in ours if networks_of(rule))
    return Edit(chain, delete=delete) if delete else None


def _built_in_edit(
    chain: Chain, desired: tuple[Rule, ...], found: tuple[Rule, ...], claim: RuleOwnership, gone: set[Chain]
) -> Edit | None:
    jumps = {rule for target, rule in JUMPS.items() if target in gone and target[0] == chain[0]}
    unwanted = (claim.left(chain, found) | jumps) - set(desired)
    surplus = tuple(rule for rule in found if rule in unwanted)
    ours = [rule for rule in found if rule in desired]
    if _distinct(ours) == desired:
        return Edit(chain, delete=surplus) if surplus else None
    return Edit(chain, delete=(*ours, *surplus), append=desired)


def _distinct(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return each rule at its first position. Duplicates, from two programs at once, are harmless."""
    return tuple(dict.fromkeys(rules))


def _in_order(block: Sequence[Rule], found: Sequence[Rule]) -> bool:
    rest = iter(found)
    return all(rule in rest for rule in block)


def lost(edits: Iterable[Edit], found: Rules) -> Iterator[tuple[Chain, Rule]]:
    """Yield the rules that the edits add and that were missing."""
    for edit in edits:
        there = found.get(edit.chain, ())
        for rule in (*edit.insert, *edit.append):
            if rule not in there:
                yield edit.chain, rule
