"""Creation, change and removal of devices. The only user of pyroute2.

Only pyroute2's message classes are imported, and only when a device is changed, which a restart over a
healthy device never does. Its ``IPRoute`` would start an event loop: 60 ms and 5 MiB.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing, suppress
from pathlib import Path

from flanneld.network.rtnetlink.links import Attribute, LinkStep, codec_for, link_info, step
from flanneld.network.rtnetlink.netlink import NLM_F_CREATE, NLM_F_REQUEST, NetlinkSocket
from flanneld.runtime.imports import defer
from flanneld.state.resources import ForeignLink, Link

# linux/rtnetlink.h, linux/netlink.h, linux/if.h
_RTM_NEWLINK, _RTM_DELLINK, _NLM_F_EXCL, _IFF_UP = 16, 17, 0x200, 0x1
_VERBS = {
    "add": (_RTM_NEWLINK, NLM_F_CREATE | _NLM_F_EXCL),
    "set": (_RTM_NEWLINK, 0),
    "del": (_RTM_DELLINK, 0),
}
#: Name that no device can have (net/core/dev.c, dev_valid_name).
_REFUSED_NAME = "/"


def put(desired: Link, actual: Link | ForeignLink | None) -> None:
    """Create the device, or change the existing one into it. Raises ``OSError``."""
    if isinstance(actual, Link) and step(desired, actual) is LinkStep.SET:
        _set(desired, actual)
        return
    if actual is not None:
        _call("del", index=_index(desired.name))
    _create(desired)


def rename(index: int, name: str) -> None:
    """Rename a device. Raises ``OSError``."""
    new_name = ("IFLA_IFNAME", name)
    try:
        _call("set", new_name, index=index)
    except OSError as failure:
        if failure.errno != errno.EBUSY:
            raise
        # Before Linux 6.2 a device must be down to be renamed.
        _call("set", index=index, up=False)
        _call("set", new_name, index=index)
        _call("set", index=index, up=True)


def lacks(kind: str) -> bool:
    """Return True if this kernel cannot make devices of a kind, not even after loading a module.

    The kernel looks for the kind before it refuses the name, so no device is made. Without CAP_NET_ADMIN it
    refuses earlier, and the result is False. A TUN is not made over netlink: its kind always counts as
    missing.
    """
    try:
        _call("add", ("IFLA_IFNAME", _REFUSED_NAME), link_info(kind))
    except OSError as failure:
        return failure.errno == errno.EOPNOTSUPP
    return False


def drop(name: str) -> None:
    """Remove a device. A missing one is no error. Raises ``OSError``."""
    try:
        _call("del", index=_index(name))
    except OSError as failure:
        if failure.errno != errno.ENODEV:
            raise


def _create(desired: Link) -> None:
    codec = codec_for(desired)
    if codec.make(desired):
        _call("set", ("IFLA_MTU", desired.mtu), index=_index(desired.name))
    else:
        basics = (("IFLA_IFNAME", desired.name), ("IFLA_MTU", desired.mtu), ("IFLA_TXQLEN", 0))
        _call("add", *basics, *codec.attributes(desired))
    _refuse_router_advertisements(desired.name)
    codec.finish(desired)
    _call("set", index=_index(desired.name), up=True)


def _set(desired: Link, actual: Link) -> None:
    """Set only what differs: setting a MAC, even to the same value, makes the kernel flush all neighbours."""
    index = _index(desired.name)
    for change in codec_for(desired).changes(desired, actual):
        _call("set", change, index=index)
    if actual.mtu != desired.mtu:
        _call("set", ("IFLA_MTU", desired.mtu), index=index)
    codec_for(desired).finish(desired)
    if actual.up != desired.up:
        _call("set", index=index, up=desired.up)


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        raise OSError(errno.ENODEV, f"no device {name}") from None


def _call(verb: str, *attributes: Attribute, index: int = 0, up: bool | None = None) -> None:
    """Send a link message. Raises ``OSError``, whose subclass tells a missing device from a refusal."""
    with closing(NetlinkSocket()) as kernel:
        for failed in kernel.write([_message(verb, attributes, index, up)]):
            for _, code in failed:
                raise OSError(code, f"link {verb}: {os.strerror(code)}")


def _message(verb: str, attributes: tuple[Attribute, ...], index: int, up: bool | None) -> bytes:
    defer("multiprocessing.reduction")
    defer("pkgutil")
    defer("pyroute2", "config")
    defer("pyroute2.netlink.rtnl")
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
    """Set accept_ra to 0: router advertisements from the overlay must not configure this host.

    A kernel without IPv6 has no such file.
    """
    with suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{name}/accept_ra").write_text("0")
