"""What to change so that the rules that are there become those that are wanted (pure).

Other people's rules are never moved and never removed, not even from our own chains: another flanneld
on the same host, with a network of its own, keeps its rules there too. Nothing of ours is removed
before its successor is in place, and each table changes in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from flanneld.model import IPNetwork, lies_in
from flanneld.network.firewall.rules import (
    FORWARD,
    FORWARDING,
    JUMPS,
    MASQ,
    NATIVE_TABLE,
    OWN_CHAINS,
    POSTROUTING,
    Chain,
    Nets,
    Rule,
    Rules,
    v012_forward,
    v012_masquerade,
)

_COMMENTS = (MASQ, FORWARD)


class Claim(Struct, frozen=True, gc=False):
    """Which of the rules found are flannel's, and so ours to remove.

    In our own chains these are the rules about addresses inside ``networks``; None stands for any.
    ``blocks`` are unmarked rules that an earlier run may have left in a built-in chain. One of these
    rules alone may be an operator's: a block counts only when all of it is there, in its order.
    """

    networks: tuple[IPNetwork, ...] | None
    blocks: tuple[tuple[Chain, tuple[Rule, ...]], ...] = ()

    def owns(self, chain: Chain, rule: Rule) -> bool:
        """Whether a rule in a chain of our own is flannel's."""
        marked = rule.comment in _COMMENTS or chain[0] in NATIVE_TABLE.values()
        return marked and not rule.extra and all(map(self._covers, rule.networks))

    def left(self, chain: Chain, found: Sequence[Rule]) -> set[Rule]:
        """The rules in a built-in chain that an earlier run left."""
        left: set[Rule] = set()
        for place, block in self.blocks:
            if place == chain and _in_order(block, found):
                left.update(block)
        return left

    def _covers(self, net: IPNetwork) -> bool:
        return self.networks is None or any(lies_in(net, known) for known in self.networks)


def claim(nets: Iterable[Nets], former: Nets | None, *, masquerade: bool, forward: bool) -> Claim:
    """What is ours: rules about the networks in ``nets`` and, of an earlier run's, what has a successor.

    Without such a successor an unmarked rule stays: it may be just what an operator put in its place.
    """
    blocks: list[tuple[Chain, tuple[Rule, ...]]] = []
    if former and masquerade:
        blocks += [(POSTROUTING, v012_masquerade(former, random)) for random in (True, False)]
    if former and forward:
        blocks.append((FORWARDING, v012_forward(former)))
    known = {each.network: None for each in (*nets, *([former] if former else []))}
    return Claim(tuple(known), tuple(blocks))


class Edit(Struct, frozen=True, gc=False):
    """What to do to one chain, in the order of these fields.

    ``flush`` makes the chain if need be and empties it. ``insert`` puts rules at the top, one by one.
    """

    chain: Chain
    flush: bool = False
    delete: tuple[Rule, ...] = ()
    insert: tuple[Rule, ...] = ()
    append: tuple[Rule, ...] = ()
    drop: bool = False


def plan(wanted: Rules, found: Rules, claim: Claim) -> tuple[Edit, ...]:
    """The changes, empty when all is right. Chains are filled before a jump leads there, and go after it."""
    names = [*wanted, *(chain for chain in found if chain not in wanted)]
    own = [
        edit
        for chain in names
        if chain in OWN_CHAINS and (edit := _own(chain, wanted.get(chain, ()), found.get(chain), claim))
    ]
    drops = [edit for edit in own if edit.drop]
    gone = {edit.chain for edit in drops}
    built_in = [
        edit
        for chain in names
        if chain not in OWN_CHAINS
        and (edit := _built_in(chain, wanted.get(chain, ()), found.get(chain, ()), claim, gone))
    ]
    return (*(edit for edit in own if not edit.drop), *built_in, *drops)


def _own(chain: Chain, wanted: tuple[Rule, ...], found: tuple[Rule, ...] | None, claim: Claim) -> Edit | None:
    if found is None:
        return Edit(chain, flush=True, append=wanted) if wanted else None
    ours = [rule for rule in found if claim.owns(chain, rule)]
    if not wanted:
        return _give_up(chain, ours, alone=len(ours) == len(found))
    if _distinct(ours) == wanted:
        return None
    if len(ours) == len(found):
        return Edit(chain, flush=True, append=wanted)
    # Others' rules are here too. What is about no network serves them as well, and has to come first.
    shared = tuple(rule for rule in wanted if not rule.networks)
    rest = tuple(rule for rule in wanted if rule.networks)
    return Edit(chain, delete=tuple(ours), insert=shared[::-1], append=rest)


def _give_up(chain: Chain, ours: list[Rule], *, alone: bool) -> Edit | None:
    if alone:
        return Edit(chain, drop=True)
    delete = tuple(rule for rule in ours if rule.networks)
    return Edit(chain, delete=delete) if delete else None


def _built_in(
    chain: Chain, wanted: tuple[Rule, ...], found: tuple[Rule, ...], claim: Claim, gone: set[Chain]
) -> Edit | None:
    jumps = {rule for target, rule in JUMPS.items() if target in gone and target[0] == chain[0]}
    unwanted = (claim.left(chain, found) | jumps) - set(wanted)
    surplus = tuple(rule for rule in found if rule in unwanted)
    ours = [rule for rule in found if rule in wanted]
    if _distinct(ours) == wanted:
        return Edit(chain, delete=surplus) if surplus else None
    return Edit(chain, delete=(*ours, *surplus), append=wanted)


def _distinct(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Each rule where it comes first: what two programs appended at once does no harm twice."""
    return tuple(dict.fromkeys(rules))


def _in_order(block: Sequence[Rule], found: Sequence[Rule]) -> bool:
    rest = iter(found)
    return all(rule in rest for rule in block)


def lost(edits: Iterable[Edit], found: Rules) -> Iterator[tuple[Chain, Rule]]:
    """Of the rules that the edits put in place, those that were not there."""
    for edit in edits:
        there = found.get(edit.chain, ())
        for rule in (*edit.insert, *edit.append):
            if rule not in there:
                yield edit.chain, rule
