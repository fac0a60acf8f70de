"""Leases that lead nowhere: values that make no sense, and keys that claim what is somebody else's (data)."""

from __future__ import annotations

import json
from typing import Any

from tests.netns.histories.setting import OURS, Setting, public_key

UNREADABLE = ("{no", "", "[]", "null", '"198.18.0.101"', "[" * 2000)


def senseless(setting: Setting) -> tuple[str, ...]:
    """Values out of which no daemon can read where the peer is."""
    good = setting.attributes(host=101, mac=9)
    changes: list[dict[str, Any]] = [
        {"PublicIP": 5},
        {"PublicIP": "198.18.0.300"},
        {"PublicIP": None, "PublicIPv6": None},
        {"PublicIP": OURS[4], "PublicIPv6": OURS[6]},
        {"BackendType": 7},
    ]
    if setting.type == "vxlan":
        changes += [{"BackendData": None}, {"BackendData": {}}, {"BackendData": "02:00:00:00:00:01"}]
        changes += [{"BackendData": {"VtepMAC": mac}} for mac in ("02:00:00:00:00:xx", "01:00:5e:00:00:01")]
    if setting.type == "wireguard":
        changes += [{"BackendData": None}, {"BackendData": {}}, {"BackendData": {"PublicKey": "no"}}]
        changes += [{"BackendData": {"PublicKey": public_key(9), "Port": 70000}}]
    if setting.type == "udp":
        changes += [{"PublicIP": address} for address in ("127.0.0.1", "224.0.0.1", "255.255.255.255")]
    return UNREADABLE + tuple(json.dumps(good | change) for change in changes)


def half_sensible(setting: Setting) -> tuple[str, ...]:
    """Values of which a part makes sense, or that a daemon understands and a kernel refuses."""
    good = setting.attributes(host=101, mac=9)
    changes: list[dict[str, Any]] = []
    if not setting.devices:
        changes += [{"PublicIP": "198.19.7.7"}, {"PublicIP": "127.0.0.1"}]
    if 6 in setting.families:
        changes += [{"PublicIPv6": None}, {"PublicIPv6": OURS[6]}]
    if setting.devices.get(6) and setting.type == "vxlan":
        changes += [{"BackendV6Data": None}, {"BackendV6Data": {"VtepMAC": "no"}}]
    return tuple(json.dumps(good | change) for change in changes)


#: Somebody's leases for all the world, for a host that all need, and for a part of what the network has not.
CLAIMS = ("0.0.0.0/0", "8.0.0.0/6", "198.18.0.254/32", "10.5.0.0/16", "10.6.1.0/24", "10.5.x.0/24", "hello")


def claims(own: str) -> tuple[str, ...]:
    """Keys of leases that no daemon may follow: some overlap our own subnet."""
    subnet = own.partition("&")[0]
    return (*CLAIMS, subnet.replace("/24", "/25"), subnet.replace("/24", "/23"))


def impostors(own: str) -> tuple[str, ...]:
    """Subnets that the network has, with our own public IP: a former lease of this node, or another's."""
    return tuple(subnet for subnet in ("10.5.100.0/24", "10.5.250.0/24") if subnet != own.partition("&")[0])
