"""What a node's kernel should hold, computed a second time and as plainly as can be.

It knows the wire format of the leases and what ``ip`` and ``bridge`` print, and none of the daemon's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.netns.histories.observed import Observed, Way
from tests.netns.histories.setting import NETWORKS, UPLINK, Setting, nets

OVERHEAD = {
    ("vxlan", 4): 50,
    ("vxlan", 6): 70,
    ("udp", 4): 28,
    ("ipip", 4): 20,
    ("wireguard", 4): 80,
    ("ipsec", 4): 77,
}
METRIC = {4: 0, 6: 1024}
PUBLIC_IP = {4: "PublicIP", 6: "PublicIPv6"}
DATA = {4: "BackendData", 6: "BackendV6Data"}


def wanted(setting: Setting, leases: Mapping[str, Any], own: str, seen: Observed) -> dict[str, Any]:
    """What ``Observed.ours`` should find. ``leases`` are the attributes of all peers and of ourselves.

    ``seen`` tells of the world around: the uplink's MTU, and which hosts are on our link.
    """
    peers = sorted(
        (
            (nets(lease), attributes)
            for lease, attributes in leases.items()
            if lease != own and attributes.get("BackendType", setting.type) == setting.type
        ),
        key=lambda peer: peer[0][4],
    )
    routes: list[Way] = []
    tunnels: dict[str, Any] = {}
    for family in setting.families:
        led = [(peer[family], attributes[PUBLIC_IP[family]], attributes) for peer, attributes in peers]
        direct = [
            (net, host)
            for net, host, _ in led
            if not setting.devices or (setting.is_direct and seen.is_on_link(host))
        ]
        onlink = setting.type == "ipip"
        routes += [_way(family, str(net), UPLINK, host, onlink=onlink) for net, host in direct]
        if not setting.devices:
            continue
        tunneled = [peer for peer in led if peer[:2] not in direct]
        ways, tunnel = _TUNNELS[setting.type](setting, family, tunneled, own, leases[own])
        routes += ways
        tunnel["mtu"] = seen.mtu(UPLINK) - OVERHEAD[setting.type, family]
        tunnels[setting.devices[family]] = tunnel
    return {"routes": sorted(routes), "tunnels": tunnels}


#: A subnet, its host and all that the host announces.
Peer = tuple[Any, str, Mapping[str, Any]]


def _vxlan(
    setting: Setting, family: int, peers: list[Peer], own: str, announced: Mapping[str, Any]
) -> tuple[list[Way], dict[str, Any]]:
    macs = {net: data[DATA[family]]["VtepMAC"] for net, _, data in peers}
    remotes: dict[str, str] = {}
    for net, host, _ in peers:
        remotes.setdefault(macs[net], host)  # of two, the lower subnet's
    device = setting.devices[family]
    return [_way(family, str(net), device, str(net[0]), onlink=True) for net, _, _ in peers], {
        "neighbors": sorted((str(net[0]), mac) for net, mac in macs.items()),
        "fdb": sorted((mac, remote, "") for mac, remote in remotes.items()),
        "addresses": [_base(own, family)],
        "up": True,
        "mac": announced[DATA[family]]["VtepMAC"],
        "make": ("vxlan", 1, announced[PUBLIC_IP[family]], 8472, False),
    }


def _udp(
    setting: Setting, family: int, peers: list[Peer], own: str, _: object
) -> tuple[list[Way], dict[str, Any]]:
    return [_way(family, NETWORKS[family], setting.devices[family], "")], {
        "neighbors": [],
        "fdb": sorted((str(net), host, "") for net, host, _ in peers),
        "addresses": [_base(own, family)],
        "up": True,
        "mac": None,
        "make": ("tun", None, None, None, None),
    }


def _ipip(
    setting: Setting, family: int, peers: list[Peer], own: str, announced: Mapping[str, Any]
) -> tuple[list[Way], dict[str, Any]]:
    device, local = setting.devices[family], announced[PUBLIC_IP[family]]
    return [_way(family, str(net), device, host, onlink=True) for net, host, _ in peers], {
        "neighbors": [],
        "fdb": [],
        "addresses": [_base(own, family)],
        "up": True,
        "mac": local,
        "make": ("ipip", None, local, None, None),
    }


def _wireguard(
    setting: Setting, family: int, peers: list[Peer], own: str, _: object
) -> tuple[list[Way], dict[str, Any]]:
    keys = {net: data[DATA[family]]["PublicKey"] for net, _, data in peers}
    hosts: dict[str, str] = {}
    for net, host, _ in peers:
        hosts.setdefault(keys[net], host)  # of two, the lower subnet's
    return [_way(family, str(net), setting.devices[family], "") for net in keys], {
        "neighbors": sorted((str(net[0]), key) for net, key in keys.items()),
        "fdb": sorted((key, host, "") for key, host in hosts.items()),
        "addresses": [_base(own, family)],
        "up": True,
        "mac": None,
        "make": ("wireguard", None, None, None, None),
    }


def _ipsec(
    setting: Setting, family: int, peers: list[Peer], own: str, _: object
) -> tuple[list[Way], dict[str, Any]]:
    return [_way(family, str(net), setting.devices[family], "") for net, _, _ in peers], {
        "neighbors": [],
        "fdb": sorted((str(net), host, "") for net, host, _ in peers),
        "addresses": [_base(own, family)],
        "up": True,
        "mac": None,
        "make": ("dummy", None, None, None, None),
    }


_TUNNELS = {"ipsec": _ipsec, "vxlan": _vxlan, "udp": _udp, "ipip": _ipip, "wireguard": _wireguard}


def _base(own: str, family: int) -> str:
    base = nets(own)[family][0]
    return f"{base}/{base.max_prefixlen}"


def _way(family: int, net: str, device: str, gateway: str, *, onlink: bool = False) -> Way:
    return (net, "unicast", device, gateway, METRIC[family], "", onlink)
