"""Rules of other programs that drop packets of the network, found by following the packets through them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from flanneld.ctl.data_source import ranges_of
from flanneld.ctl.evidence.flows import Flow, flows, peers, some
from flanneld.model import FAMILIES, Family, IPNetwork
from flanneld.network.firewall.verdicts import ruleset
from flanneld.network.firewall.verdicts.packet import DROP, Fate
from flanneld.network.firewall.verdicts.ruleset import BaseChain, Opening
from flanneld.runtime.shell import Command

#: Networks named by rules for which a peer is looked up, at most.
_MENTIONED = 64


class Drop(Struct, frozen=True, gc=False):
    """A rule, or without ``rule`` a policy, that drops a flow; and the commands that accept the flow."""

    chain: str
    flow: str
    rule: str
    commands: tuple[Command, ...]
    is_firewalld: bool = False


def read(document: Mapping[str, Any], container_devices: Mapping[Family, str]) -> list[Drop]:
    """Return what this host's packet filters drop, as far as they can be read."""
    versions = {network.version for network, _ in ranges_of(document)}
    bases = [
        base for family in FAMILIES if _concerns(family, versions, document) for base in ruleset.read(family)
    ]
    if not bases:
        return []
    chosen = some(peers(document), _mentioned(bases, [network for network, _ in ranges_of(document)]))
    found = dropped(bases, list(flows(document, chosen, container_devices)))
    return [_described(*each) for each in found]


def _concerns(family: Family, versions: set[Family], document: Mapping[str, Any]) -> bool:
    """Return True if packets of a family are sent: an IPv6 network has IPv6 packets between its nodes."""
    public = (document.get("uplink") or {}).get("public_ips", ())
    return family in versions or any((":" in text) == (family == 6) for text in public if versions)


def _mentioned(bases: Iterable[BaseChain], around: Container[IPNetwork]) -> list[IPNetwork]:
    """Return the networks that rules name, each once, except the cluster networks ``around`` all peers."""
    found: dict[IPNetwork, None] = {}
    for base in bases:
        for steps in base.chains.values():
            for test in (test for step in steps for test in step.tests):
                for value in test.values:
                    if not isinstance(value, str | tuple) and value.prefixlen and value not in around:
                        found[value] = None
    return list(found)[:_MENTIONED]


def dropped(bases: Sequence[BaseChain], packets: Sequence[Flow]) -> Iterator[tuple[BaseChain, Flow, Fate]]:
    """Yield each drop that is certain, once for a rule (pure).

    A FORWARD chain that drops by its policy or its last rule is the subject of another check.
    """
    known: set[tuple[str, str, tuple[Opening, ...]]] = set()
    for flow in packets:
        for base in bases:
            if base.family != flow.family or base.hook not in flow.hooks:
                continue
            decided = base.fate(flow.packet)
            if decided.act != DROP or not decided.certain or _is_final(base, decided):
                continue
            key = (str(base), decided.by, flow.openings)
            if key not in known:
                known.add(key)
                yield base, flow, decided


def _is_final(base: BaseChain, decided: Fate) -> bool:
    if base.hook != "forward":
        return False
    by = next((step for step in base.chains.get(base.chain, ()) if step.text == decided.by), None)
    return not decided.by or (by is not None and not by.tests)


def _described(base: BaseChain, flow: Flow, decided: Fate) -> Drop:
    return Drop(
        str(base),
        flow.name,
        ruleset.text_of(base, decided),
        base.accept(*flow.openings),
        base.table == "inet firewalld",
    )
