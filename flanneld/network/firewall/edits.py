"""Plan of the edits that turn the actual rules into the desired ones (pure).

Other programs' rules are never moved or removed, not even from our own chains. Another flanneld on the host,
with its own network, has its rules there, too. Our rules are only removed once their successors are in place.
Each table changes in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from flanneld.model import IPNetwork, lies_in
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.rules import (
    FORWARD,
    FORWARDING,
    JUMPS,
    MASQ,
    NATIVE_TABLE,
    OWN_CHAINS,
    POSTROUTING,
    TRIALS,
    Chain,
    Nets,
    Rules,
    networks_of,
    v012_forward,
    v012_masquerade,
)

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
        if chain in OWN_CHAINS and (edit := _own(chain, desired.get(chain, ()), found.get(chain), claim))
    ]
    drops = [edit for edit in own if edit.drop]
    gone = {edit.chain for edit in drops}
    built_in = [
        edit
        for chain in names
        if chain not in OWN_CHAINS
        and (edit := _built_in(chain, desired.get(chain, ()), found.get(chain, ()), claim, gone))
    ]
    return (*(edit for edit in own if not edit.drop), *built_in, *drops)


def _own(
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


def _built_in(
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
