"""Containers of peers, named by the daemons there, as packets of this node find them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address

from flanneld.ctl.nodes import told
from flanneld.ctl.paths import BRIEFLY, PathToPeer
from flanneld.diagnostics.status import Status, known
from flanneld.model import IPAddress
from flanneld.network import survey
from flanneld.network.bridges import MOST_TOLD


def containers_of_peers(status: Status, paths: Collection[PathToPeer], port: int) -> Iterator[PathToPeer]:
    """Yield the path to a container of each peer that answers on all paths, and names some; by family.

    The one that carries most stands for all: another may filter what it gets. Raises ``OSError``.
    """
    silent = {each.peer for each in paths if each.carried is None}
    tunnels = {each.peer for each in paths if each.name == "tunnel"}
    ends = {
        each.target: each.peer
        for each in paths
        if each.peer not in silent and (each.name == "tunnel" or each.peer not in tunnels)
    }
    mtu, asked = known(status.mtu) or 0, dict[IPAddress, str]()
    networks = {peer.subnets[0]: peer.networks for peer in (status.each_peer if ends else ())}
    for end, reply in survey.queries(ends, port, BRIEFLY, 1).items():
        for text in told(reply.facts).containers[:MOST_TOLD]:
            with suppress(ValueError):
                address = ip_address(text)
                if any(address in net and address != end for net in networks[ends[end]]):
                    asked[address] = ends[end]
    sizes = dict(zip(asked, survey.glance_at_mtu([(each, mtu) for each in asked]), strict=True))
    sizes |= dict.fromkeys(survey.reached([each for each, size in sizes.items() if not size], BRIEFLY), mtu)
    found: dict[tuple[str, int], list[PathToPeer]] = defaultdict(list)
    for address, peer in asked.items():
        found[peer, address.version].append(PathToPeer("container", address, mtu, sizes[address], peer))
    for some in found.values():
        yield max(some, key=lambda each: each.carried or 0)
