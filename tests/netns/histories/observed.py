"""What one look at a node shows of its kernel, told apart: what is the daemon's, and what is others'."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from ipaddress import ip_address, ip_network
from typing import Any

from flanneld.backends.udp.client import NoProxy, ProxyClient
from tests.lab import Node
from tests.lab.namespace import run
from tests.netns.histories.setting import GATEWAY, PEERS, Setting, nets

#: Destination, kind, device, gateway, metric, TOS, whether onlink.
Way = tuple[str, str, str, str, int, str, bool]

_SUBNET_LENGTH = {4: 24, 6: 64}
_METRIC = {4: 0, 6: 1024}


class Observed:
    def __init__(self, node: Node, setting: Setting) -> None:
        name = node.namespace.name
        self._devices = tuple(setting.devices.values())
        self._routes: list[dict[str, Any]] = []
        self._neighbors: list[dict[str, Any]] = []
        self._rules: list[dict[str, Any]] = []
        for family in setting.families:
            asked = "route show table all\nneighbor show nud permanent\nrule show\n"
            said = run("ip", "-n", name, f"-{family}", "-d", "-j", "-batch", "-", stdin=asked).stdout
            routes, neighbors, rules = _documents(said)
            self._routes += routes
            self._neighbors += neighbors
            self._rules += rules
        said = run("ip", "-n", name, "-d", "-j", "address", "show").stdout
        self._links: list[dict[str, Any]] = json.loads(said)
        self._fdb = json.loads(run("bridge", "-n", name, "-j", "fdb", "show").stdout)
        self._pump = _pump_peers(node, self._devices[0]) if setting.type == "udp" else []
        if setting.type == "ipsec":
            self._pump = _ipsec_tunnels(node)
        self._keys = _wireguard_peers(node, self._devices[0]) if setting.type == "wireguard" else ([], [])

    # ---- ours ------------------------------------------------------------------------------------

    def ours(self, strays: Collection[str] = ()) -> dict[str, Any]:
        """What belongs to the daemon; ``strays`` are subnets whose routes beside the tunnel do not count."""
        ways = [
            each
            for each in self._main()
            if self._is_ours(each) and not (each[0] in strays and each[2] not in self._devices)
        ]
        return {"routes": sorted(ways), "tunnels": dict(self._tunnels())}

    def _tunnels(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for link in self._links:
            if link["ifname"] in self._devices:
                yield link["ifname"], self._tunnel(link["ifname"], link)

    def _tunnel(self, device: str, link: dict[str, Any]) -> dict[str, Any]:
        make = link.get("linkinfo", {})
        info = make.get("info_data", {})
        local = info.get("local") or info.get("local6")
        remotes = [_remote(row)[1:] for row in self._fdb if "dst" in row and row["ifname"] == device]
        neighbors = [_pair(row) for row in self._neighbors if row["dev"] == device]
        return {
            "neighbors": sorted(neighbors) + self._keys[0],
            "fdb": sorted(remotes) + self._pump + self._keys[1],
            "addresses": sorted(_addresses(link)),
            "up": "UP" in link["flags"],
            "mtu": link["mtu"],
            "mac": None if make.get("info_kind") == "dummy" else link.get("address"),
            "make": (
                make.get("info_kind"),
                info.get("id"),
                local,
                info.get("port"),
                info.get("learning"),
            ),
        }

    def _is_ours(self, each: Way) -> bool:
        """All on the tunnel, and in the main table what a packet to a subnet of a peer takes first."""
        net, _, device, _, metric, tos, _ = each
        if device in self._devices:
            return True
        if net == "default" or tos:
            return False
        where = ip_network(net)
        subnet = where.prefixlen == _SUBNET_LENGTH[where.version] and metric == _METRIC[where.version]
        return subnet and where.subnet_of(PEERS[where.version])  # type: ignore[arg-type]

    # ---- others' ---------------------------------------------------------------------------------

    def foreign(self) -> dict[str, Any]:
        """What may not be touched."""
        devices = self._devices
        return {
            "routes": sorted(each for each in self._main() if not self._is_ours(each)),
            "tables": sorted(_way(row) for row in self._routes if row["table"] == "100"),
            "rules": sorted(str(row) for row in self._rules),
            "neighbors": sorted(_pair(row) for row in self._neighbors if row["dev"] not in devices),
            "fdb": sorted(_remote(row) for row in self._fdb if "dst" in row and row["ifname"] not in devices),
            "addresses": sorted(
                (row["ifname"], address)
                for row in self._links
                if row["ifname"] not in devices
                for address in _addresses(row)
            ),
        }

    # ---- the world around ------------------------------------------------------------------------

    def mtu(self, device: str) -> int:
        return next((int(row["mtu"]) for row in self._links if row["ifname"] == device), 0)

    def is_on_link(self, host: str) -> bool:
        """Whether packets go there without a gateway, by the longest prefix of the main table."""
        address = ip_address(host)
        ways = [
            (net.prefixlen, -row.get("metric", 0), row)
            for row in self._routes
            if row["table"] == "main" and address in (net := _net(row["dst"], address.version))
        ]
        if not ways:
            return False
        best = max(ways, key=lambda way: way[:2])[2]
        return "gateway" not in best and best.get("type", "unicast") == "unicast"

    def _main(self) -> list[Way]:
        """Routes that somebody has made; the kernel's own come and go with addresses."""
        return [
            _way(row) for row in self._routes if row["table"] == "main" and row.get("protocol") != "kernel"
        ]


def is_vandals(way: Way) -> bool:
    """Whether a route is one that somebody put in the place of the daemon's."""
    return way[1] == "blackhole" or way[2] == "lo" or way[3] in GATEWAY.values()


def leave_out(leases: Iterable[str], *states: dict[str, Any]) -> list[dict[str, Any]]:
    """What our states say besides what leads to these leases' subnets, and to the MACs that they have."""
    gone = [net for lease in leases for net in nets(lease).values()]
    names, bases = {str(net) for net in gone}, {str(net[0]) for net in gone}
    every_tunnel = [tunnel for state in states for tunnel in state["tunnels"].values()]
    ends = {mac for tunnel in every_tunnel for base, mac in tunnel["neighbors"] if base in bases} | names
    return [
        {
            "routes": [each for each in state["routes"] if each[0] not in names],
            "tunnels": {
                device: {
                    **tunnel,
                    "neighbors": [each for each in tunnel["neighbors"] if each[0] not in bases],
                    "fdb": [each for each in tunnel["fdb"] if each[0] not in ends],
                }
                for device, tunnel in state["tunnels"].items()
            },
        }
        for state in states
    ]


def _pump_peers(node: Node, tun: str) -> list[tuple[str, str, str]]:
    """What the pump of the udp backend knows of the peers; nothing while there is none."""
    with node.namespace.entered():
        client = ProxyClient(tun)
        try:
            return sorted((str(net), str(host), "") for net, host in client.peers())
        except (NoProxy, OSError):
            return []
        finally:
            client.close()


def _ipsec_tunnels(node: Node) -> list[tuple[str, str, str]]:
    """The subnets to which a policy encrypts, each with its host."""
    shown = node.run("ip", "xfrm", "policy", "list", "dir", "out").stdout
    return sorted((*found, "") for found in re.findall(r"dst (\S+).*\n.*\n\s*tmpl src \S+ dst (\S+)", shown))


def _wireguard_peers(node: Node, device: str) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """The key by each allowed subnet's base, and the host by key."""
    shown = node.run("wg", "show", device, "dump", check=False).stdout.splitlines()[1:]
    peers = [line.split("\t") for line in shown]
    bases = [(net.partition("/")[0], peer[0]) for peer in peers for net in peer[3].split(",") if "/" in net]
    return sorted(bases), sorted((peer[0], peer[2].rpartition(":")[0], "") for peer in peers)


def _addresses(link: dict[str, Any]) -> list[str]:
    found = (f"{info['local']}/{info['prefixlen']}" for info in link.get("addr_info", ()))
    return [address for address in found if not address.startswith("fe80:")]


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


def _net(destination: str, version: int) -> Any:
    everything = "0.0.0.0/0" if version == 4 else "::/0"
    return ip_network(everything if destination == "default" else destination)


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
