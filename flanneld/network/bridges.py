"""Bridges of containers: the MAC addresses that they know, and the containers heard behind their ports."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from flanneld.model import IPAddress, IPNetwork
from flanneld.network.host import HostView
from flanneld.network.rtnetlink.messages import (
    NUD_VALID,
    RTM_GETNEIGH,
    decode_neighbor,
    mac_text,
    neighbors_request,
)
from flanneld.state.resources import Neighbor

#: struct __fdb_entry (linux/if_bridge.h): MAC address, port, 1 for an address of the bridge itself.
_FDB_ENTRY = struct.Struct("=6sxB8x")
#: Containers of one subnet that are told to other nodes, at most: one may filter what it gets.
MOST_TOLD = 3


def learnt(bridge: str) -> set[str]:
    """Return the MAC addresses whose port a bridge knows: for 300 s after their last packet."""
    try:
        table = Path(f"/sys/class/net/{bridge}/brforward").read_bytes()
    except OSError:
        return set()
    return {mac_text(mac) for mac, is_own in _FDB_ENTRY.iter_unpack(table) if not is_own}


def heard_containers(subnets: Iterable[IPNetwork]) -> Iterator[IPAddress]:
    """Yield a few containers of this node in each subnet: its bridge has learnt their ports.

    A neighbour alone may be long gone: the kernel keeps the first 128. Raises ``OSError``.
    """
    view = HostView()
    for subnet in subnets:
        held = (each for each in view.addresses(subnet.version) if each.address in subnet)
        # The first address of the subnet is the tunnel's.
        way = next((each for each in held if each.address != subnet.network_address), None)
        name = view.name_of(way.index) if way else None
        if way is None or name is None or not (macs := learnt(name)):
            continue
        entries = view.dump(RTM_GETNEIGH, neighbors_request(subnet.version, way.index))
        seen = (decode_neighbor(*each, {way.index: name}.get, NUD_VALID) for each in entries)
        known = (each for each in seen if isinstance(each, Neighbor) and each.mac in macs)
        yield from islice((each.address for each in known if each.address in subnet), MOST_TOLD)
