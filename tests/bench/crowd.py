"""Answers for peers that exist in the store alone: the kernel behind the switch takes all their addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.cluster import OVERLAY
from tests.lab import Lab, Node
from tests.lab.namespace import Namespace

DEVICE = "flannel.1"
#: The public IPs of all peers, and no address of the laboratory.
_PUBLIC = ("198.18.16.0/20", "198.18.32.0/19", "198.18.64.0/18", "198.18.128.0/17", "198.19.0.0/20")
#: Frames for the MACs of all peers are for the kernel behind the switch.
_TAKE_ALL = (
    "add table netdev crowd",
    f'add chain netdev crowd frames {{ type filter hook ingress device "{DEVICE}" priority 0; }}',
    "add rule netdev crowd frames meta pkttype set host",
)


@contextmanager
def answering(lab: Lab, node: Node) -> Iterator[None]:
    """Have the kernel answer ICMP echoes of a node, at the peers' public IPs and through vxlan."""
    switch, base = lab.switch, node.subnet().partition("/")[0]
    switch.sysctl("net/ipv4/icmp_ratelimit", 0)  # else the one kernel refuses one query a second
    mac = str((node.link(DEVICE) or {})["address"])
    routes = [f"local {each} dev lo" for each in (OVERLAY, *_PUBLIC)]
    # In the same table as the peers' addresses, where the longer prefix comes first.
    routes.append(f"{base} dev {DEVICE} table local")
    switch.ip(
        f"link add {DEVICE} mtu 1450 up type vxlan id 1 dstport 8472 nolearning",
        f"neighbor add {base} lladdr {mac} dev {DEVICE} nud permanent",
        *(f"route add {each}" for each in routes),
    )
    try:
        switch.run("bridge", "fdb", "append", mac, "dev", DEVICE, "dst", node.address, "self", "permanent")
        switch.run("nft", "-f", "-", stdin="\n".join(_TAKE_ALL))
        yield
    finally:
        _remove(switch, routes)


def _remove(switch: Namespace, routes: list[str]) -> None:
    switch.run("nft", "delete", "table", "netdev", "crowd", check=False)
    for each in routes:
        switch.run("ip", "route", "del", *each.split(), check=False)
    switch.run("ip", "link", "del", DEVICE)
