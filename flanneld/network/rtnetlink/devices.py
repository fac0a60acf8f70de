"""Making, changing and removing devices: the only user of pyroute2.

Of pyroute2 only what knows the kernel's messages is loaded, and only when a device has to be touched, which a
restart over a healthy device never does. Its ``IPRoute`` would bring an event loop along: 60 ms and 5 MiB.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from flanneld.network import tun
from flanneld.network.rtnetlink.links import Step, step
from flanneld.network.rtnetlink.netlink import NLM_F_CREATE, NLM_F_REQUEST, NetlinkSocket
from flanneld.runtime.imports import package_without_init
from flanneld.state.resources import ForeignLink, Ipip, Link, Tun, Vxlan, WireGuard

# linux/rtnetlink.h, linux/netlink.h, linux/if.h
_RTM_NEWLINK, _RTM_DELLINK, _NLM_F_EXCL, _IFF_UP = 16, 17, 0x200, 0x1
_VERBS = {
    "add": (_RTM_NEWLINK, NLM_F_CREATE | _NLM_F_EXCL),
    "set": (_RTM_NEWLINK, 0),
    "del": (_RTM_DELLINK, 0),
}

#: An attribute by its name in linux/if_link.h.
Attribute = tuple[str, Any]


def put(wanted: Link, actual: Link | ForeignLink | None) -> None:
    """Make the device, or turn the one that is there into it. Raises ``OSError``."""
    if isinstance(actual, Link) and step(wanted, actual) is Step.SET:
        _set(wanted, actual)
        return
    if actual is not None:
        _call("del", index=_index(wanted.name))
    _create(wanted)


def rename(index: int, name: str) -> None:
    """Give a device another name. Raises ``OSError``."""
    new_name = ("IFLA_IFNAME", name)
    try:
        _call("set", new_name, index=index)
    except OSError as failure:
        if failure.errno != errno.EBUSY:
            raise
        # Before Linux 6.2 a device has to be down for that.
        _call("set", index=index, up=False)
        _call("set", new_name, index=index)
        _call("set", index=index, up=True)


def drop(name: str) -> None:
    """Remove a device; one that is not there is fine. Raises ``OSError``."""
    try:
        _call("del", index=_index(name))
    except OSError as failure:
        if failure.errno != errno.ENODEV:
            raise


def _create(wanted: Link) -> None:
    if isinstance(wanted, Tun):
        tun.make(wanted.name)
        _call("set", ("IFLA_MTU", wanted.mtu), index=_index(wanted.name))
    else:
        _call("add", *_attributes(wanted))
    _refuse_router_advertisements(wanted.name)
    _call("set", index=_index(wanted.name), up=True)


def _attributes(wanted: Vxlan | Ipip | WireGuard) -> Iterator[Attribute]:
    yield "IFLA_IFNAME", wanted.name
    yield "IFLA_MTU", wanted.mtu
    if isinstance(wanted, WireGuard):
        yield _kind("wireguard")
        return
    yield "IFLA_TXQLEN", 0
    if isinstance(wanted, Vxlan):
        yield "IFLA_ADDRESS", wanted.mac
        yield _kind("vxlan", *_vxlan_data(wanted))
    else:
        yield _kind("ipip", *_ipip_data(wanted))


def _kind(name: str, *data: Attribute) -> Attribute:
    details = [("IFLA_INFO_DATA", {"attrs": list(data)})] if data else []
    return "IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", name), *details]}


def _vxlan_data(wanted: Vxlan) -> Iterator[Attribute]:
    yield "IFLA_VXLAN_ID", wanted.vni
    yield "IFLA_VXLAN_LINK", wanted.parent
    yield "IFLA_VXLAN_PORT", wanted.port
    yield "IFLA_VXLAN_LEARNING", wanted.learning
    yield f"IFLA_VXLAN_LOCAL{'' if wanted.local.version == 4 else 6}", str(wanted.local)
    if wanted.gbp:
        # A flag: the attribute's mere presence turns it on.
        yield "IFLA_VXLAN_GBP", True


def _ipip_data(wanted: Ipip) -> Iterator[Attribute]:
    """Path MTU discovery is on unless turned off: no packet could then be fragmented on the way."""
    if wanted.local is not None:
        yield "IFLA_IPIP_LOCAL", str(wanted.local)
    if wanted.remote is not None:
        yield "IFLA_IPIP_REMOTE", str(wanted.remote)
    yield from (("IFLA_IPIP_TTL", 0), ("IFLA_IPIP_TOS", 0), ("IFLA_IPIP_PMTUDISC", 0))


def _set(wanted: Link, actual: Link) -> None:
    """Touch only what differs: even a MAC set to what it is makes the kernel forget all neighbours."""
    index = _index(wanted.name)
    if isinstance(wanted, Vxlan) and isinstance(actual, Vxlan):
        _set_vxlan(index, wanted, actual)
    if actual.mtu != wanted.mtu:
        _call("set", ("IFLA_MTU", wanted.mtu), index=index)
    if actual.up != wanted.up:
        _call("set", index=index, up=wanted.up)


def _set_vxlan(index: int, wanted: Vxlan, actual: Vxlan) -> None:
    if actual.mac != wanted.mac:
        _call("set", ("IFLA_ADDRESS", wanted.mac), index=index)
    if actual.learning != wanted.learning:
        learning = ("IFLA_VXLAN_LEARNING", wanted.learning)
        _call("set", _kind("vxlan", ("IFLA_VXLAN_ID", wanted.vni), learning), index=index)


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        raise OSError(errno.ENODEV, f"no device {name}") from None


def _call(verb: str, *attributes: Attribute, index: int = 0, up: bool | None = None) -> None:
    """Have the kernel do it. Raises ``OSError``, whose subclass tells a missing device from a refusal."""
    with closing(NetlinkSocket()) as kernel:
        for failed in kernel.write([_message(verb, attributes, index, up)]):
            for _, code in failed:
                raise OSError(code, f"link {verb}: {os.strerror(code)}")


def _message(verb: str, attributes: tuple[Attribute, ...], index: int, up: bool | None) -> bytes:
    package_without_init("pyroute2")
    package_without_init("pyroute2.netlink.rtnl")
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

    kind, flags = _VERBS[verb]
    link = ifinfmsg()
    link["index"] = index
    if up is not None:
        link["flags"], link["change"] = _IFF_UP if up else 0, _IFF_UP
    link["attrs"] = list(attributes)
    link["header"] = {"type": kind, "flags": flags | NLM_F_REQUEST, "sequence_number": 0}
    link.encode()
    return bytes(link.data)


def _refuse_router_advertisements(name: str) -> None:
    """What the overlay carries must never configure this host. A kernel without IPv6 has no such file."""
    with suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{name}/accept_ra").write_text("0")
