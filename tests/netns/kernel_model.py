"""What a node's kernel should hold for its peers, computed a second time and as plainly as can be.

It knows the wire format of the leases and what ``ip`` and ``bridge`` print, and none of the daemon's code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network
from typing import Any

from tests.lab import Node
from tests.lab.namespace import run

NETWORK = IPv4Network("10.5.0.0/16")
TUNNEL, UPLINK = "flannel.1", "eth0"
OVERHEAD = 50

#: Destination, kind, device, gateway, metric, TOS, whether onlink.
Way = tuple[str, str, str, str, int, str, bool]


def wanted(leases: Mapping[str, Any], own: str, backend: str, uplink_mtu: int) -> dict[str, Any]:
    """What ``ours`` should find. ``leases`` are all attributes by subnet, as the store has them."""
    theirs = sorted(
        (
            (IPv4Network(subnet), data)
            for subnet, data in leases.items()
            if subnet != own and data["BackendType"] == backend
        ),
        key=lambda lease: lease[0],
    )
    if backend == "host-gw":
        ways = [way(str(net), UPLINK, data["PublicIP"]) for net, data in theirs]
        return {"routes": sorted(ways), "tunnel": None}
    remotes: dict[str, str] = {}
    for _, data in theirs:
        remotes.setdefault(data["BackendData"]["VtepMAC"], data["PublicIP"])  # of two, the lower subnet's
    return {
        "routes": sorted(way(str(net), TUNNEL, str(net[0]), onlink=True) for net, _ in theirs),
        "tunnel": {
            "neighbors": sorted((str(net[0]), data["BackendData"]["VtepMAC"]) for net, data in theirs),
            "fdb": sorted((mac, remote, "") for mac, remote in remotes.items()),
            "addresses": [f"{IPv4Network(own)[0]}/32"],
            "up": True,
            "mtu": uplink_mtu - OVERHEAD,
            "mac": leases[own]["BackendData"]["VtepMAC"],
            "vxlan": (1, leases[own]["PublicIP"], 8472, False),
        },
    }


def way(net: str, device: str, gateway: str, *, onlink: bool = False) -> Way:
    return (net, "unicast", device, gateway, 0, "", onlink)


class Observed:
    """What one look at a node's kernel shows."""

    def __init__(self, node: Node) -> None:
        name = node.namespace.name
        asked = "route show table all\nneighbor show nud permanent\naddress show\nrule show\n"
        said = run("ip", "-n", name, "-4", "-d", "-j", "-batch", "-", stdin=asked).stdout
        self._routes, self._neighbors, self._links, self._rules = _documents(said)
        self._fdb = json.loads(run("bridge", "-n", name, "-j", "fdb", "show").stdout)

    def ours(self, strays: Iterable[str]) -> dict[str, Any]:
        """What belongs to the daemon; ``strays`` are subnets whose routes beside the tunnel do not count."""
        stray = set(strays)
        ways = [
            each for each in self._main() if _is_ours(each) and not (each[0] in stray and each[2] != TUNNEL)
        ]
        return {"routes": sorted(ways), "tunnel": self._tunnel()}

    def foreign(self) -> dict[str, Any]:
        """All else that may not be touched."""
        return {
            "routes": sorted(each for each in self._main() if not _is_ours(each)),
            "tables": sorted(_way(row) for row in self._routes if row["table"] == "100"),
            "rules": sorted(str(row) for row in self._rules),
            "neighbors": sorted(_pair(row) for row in self._neighbors if row["dev"] != TUNNEL),
            "fdb": sorted(_remote(row) for row in self._fdb if "dst" in row and row["ifname"] != TUNNEL),
            "addresses": sorted(
                (row["ifname"], f"{info['local']}/{info['prefixlen']}")
                for row in self._links
                for info in row.get("addr_info", ())
                if row["ifname"] != TUNNEL
            ),
        }

    def mtu(self, device: str) -> int:
        return next((int(row["mtu"]) for row in self._links if row["ifname"] == device), 0)

    def _main(self) -> list[Way]:
        return [_way(row) for row in self._routes if row["table"] == "main"]

    def _tunnel(self) -> dict[str, Any] | None:
        link = next((row for row in self._links if row["ifname"] == TUNNEL), None)
        if link is None:
            return None
        info = link.get("linkinfo", {}).get("info_data", {})
        return {
            "neighbors": sorted(_pair(row) for row in self._neighbors if row["dev"] == TUNNEL),
            "fdb": sorted(_remote(row)[1:] for row in self._fdb if "dst" in row and row["ifname"] == TUNNEL),
            "addresses": [f"{each['local']}/{each['prefixlen']}" for each in link.get("addr_info", ())],
            "up": "UP" in link["flags"],
            "mtu": link["mtu"],
            "mac": link.get("address"),
            "vxlan": tuple(info.get(name) for name in ("id", "local", "port", "learning")),
        }


def _is_ours(each: Way) -> bool:
    """All on the tunnel, and in the main table what a packet to a subnet of a peer takes first."""
    net, _, device, _, metric, tos, _ = each
    if device == TUNNEL:
        return True
    return net.endswith(".0/24") and IPv4Network(net).subnet_of(PEERS) and metric == 0 and tos == ""


#: The part of the network that peers have in these tests; nobody else writes routes there.
PEERS = IPv4Network("10.5.0.0/20")


def _way(row: dict[str, Any]) -> Way:
    return (
        row["dst"],
        row.get("type", "unicast"),
        row.get("dev", ""),
        row.get("gateway", ""),
        row.get("metric", 0),
        row.get("tos", ""),
        "onlink" in row.get("flags", ()),
    )


def _pair(row: dict[str, Any]) -> tuple[str, str]:
    return row["dst"], row.get("lladdr", "")


def _remote(row: dict[str, Any]) -> tuple[str, str, str, str]:
    odd = {name: row[name] for name in ("port", "vni", "via") if name in row}
    return row["ifname"], row["mac"], row["dst"], str(odd or "")


def _documents(text: str) -> list[Any]:
    """JSON values that stand one behind the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found
