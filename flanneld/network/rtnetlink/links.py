"""Devices as rtnetlink describes them, and what it takes to turn one into another (pure).

linux/if_link.h; the comparison follows upstream's backend/vxlan/device.go, which keeps a device
that fits and makes anew one that does not.
"""

from __future__ import annotations

import errno
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from enum import Enum

from msgspec import Struct
from msgspec.structs import fields, replace

from flanneld.model import IPAddress
from flanneld.network.rtnetlink.messages import address_of, mac_text
from flanneld.network.rtnetlink.netlink import attribute, attributes, unpack
from flanneld.state.resources import ForeignLink, Ipip, Link, Tun, Vxlan, WireGuard

#: The names that flannel's backends give, and the kinds of device that bear them.
_FLANNELS_NAMES = re.compile(r"flannel(-v6)?\.[0-9]+|flannel\.ipip|flannel-wg(-v6)?|flannel[0-9]+")
#: Kinds of device that only Go flannel makes: its TUN belongs to its process.
_MADE_OTHERWISE = frozenset({"tun"})
IFF_UP = 0x1
_IFINFOMSG = struct.Struct("=BxHiII")
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO = 1, 3, 4, 10, 18
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_VXLAN_ID, _VXLAN_GROUP, _VXLAN_LINK, _VXLAN_LOCAL, _VXLAN_LEARNING = 1, 2, 3, 4, 7
_VXLAN_L2MISS, _VXLAN_PORT, _VXLAN_GROUP6, _VXLAN_LOCAL6, _VXLAN_GBP = 13, 15, 16, 17, 23
_IPTUN_LOCAL, _IPTUN_REMOTE = 2, 3
_TUN_TYPE, _TUN_PERSIST, _IFF_TUN = 3, 6, 1
#: What can be changed of a device that is there; all else takes a new one.
_SETTABLE: dict[type[Link], tuple[str, ...]] = {
    Vxlan: ("mac", "mtu", "learning", "up"),
    Ipip: ("mtu", "up"),
    Tun: ("mtu", "up"),
    WireGuard: ("mtu", "up"),
}


class SeenLink(Struct, frozen=True, gc=False):
    """An interface of this host. ``make`` says what kind of device it is, as far as that matters to us.

    ``master`` is the index of the bridge or bond that it is a port of, else 0.
    """

    index: int
    name: str
    mac: str
    mtu: int
    up: bool
    make: Link | ForeignLink
    master: int = 0


def is_flannels(link: SeenLink) -> bool:
    """Return True for a device that a backend of flannel made, in Go or in Python."""
    if not _FLANNELS_NAMES.fullmatch(link.name):
        return False
    return not isinstance(link.make, ForeignLink) or link.make.make in _MADE_OTHERWISE


def by_name(name: str) -> bytes:
    """The body that asks for one interface."""
    return _IFINFOMSG.pack(0, 0, 0, 0, 0) + attribute(_IFLA_IFNAME, name.encode() + b"\0")


def everything() -> bytes:
    """The body that asks for all interfaces."""
    return _IFINFOMSG.pack(0, 0, 0, 0, 0)


def decode(data: bytes, offset: int, end: int) -> SeenLink:
    """Read the body of a link message. Raises ``Malformed`` for what no kernel sends."""
    _, _, index, flags, _ = unpack(_IFINFOMSG, data, offset, end)
    found = attributes(data, offset + _IFINFOMSG.size, end)
    name = _text(found.get(_IFLA_IFNAME, b""))
    mac = found.get(_IFLA_ADDRESS, b"")
    seen = SeenLink(
        index=index,
        name=name,
        mac=mac_text(mac) if len(mac) == 6 else "",
        mtu=_number(found.get(_IFLA_MTU)),
        up=bool(flags & IFF_UP),
        make=ForeignLink(name, "a plain interface"),
        master=_number(found.get(_IFLA_MASTER)),
    )
    info = found.get(_IFLA_LINKINFO)
    return replace(seen, make=_make(seen, info)) if info else seen


def _make(seen: SeenLink, info: bytes) -> Link | ForeignLink:
    parts = attributes(info, 0, len(info))
    kind = _text(parts.get(_IFLA_INFO_KIND, b""))
    data = parts.get(_IFLA_INFO_DATA, b"")
    if kind == "vxlan":
        return _vxlan(seen, attributes(data, 0, len(data)))
    if kind == "ipip":
        return _ipip(seen, attributes(data, 0, len(data)))
    if kind == "tun":
        return _tun(seen, attributes(data, 0, len(data)))
    if kind == "wireguard":
        return WireGuard(seen.name, seen.mtu, seen.up)
    return ForeignLink(seen.name, f"a device of kind {kind}", kind)


def _vxlan(seen: SeenLink, found: dict[int, bytes]) -> Vxlan | ForeignLink:
    local = found.get(_VXLAN_LOCAL) or found.get(_VXLAN_LOCAL6)
    if local is None:
        return ForeignLink(seen.name, "a vxlan device without a local address", Vxlan.make)
    for unwanted, what in ((_VXLAN_GROUP, "group"), (_VXLAN_GROUP6, "group"), (_VXLAN_L2MISS, "l2miss")):
        if any(found.get(unwanted, b"")):
            return ForeignLink(seen.name, f"a vxlan device with {what}", Vxlan.make)
    return Vxlan(
        name=seen.name,
        vni=_number(found.get(_VXLAN_ID)),
        parent=_number(found.get(_VXLAN_LINK)),
        local=address_of(local),
        port=int.from_bytes(found.get(_VXLAN_PORT, b""), "big"),
        mac=seen.mac,
        mtu=seen.mtu,
        learning=bool(_number(found.get(_VXLAN_LEARNING))),
        gbp=_VXLAN_GBP in found,
        up=seen.up,
    )


def _ipip(seen: SeenLink, found: dict[int, bytes]) -> Ipip:
    return Ipip(
        name=seen.name,
        local=_end(found.get(_IPTUN_LOCAL)),
        mtu=seen.mtu,
        remote=_end(found.get(_IPTUN_REMOTE)),
        up=seen.up,
    )


def _end(raw: bytes | None) -> IPAddress | None:
    return address_of(raw) if raw and any(raw) else None


def _tun(seen: SeenLink, found: dict[int, bytes]) -> Tun | ForeignLink:
    """Before Linux 4.20 the kernel tells no details: then any tun is taken for one of ours."""
    if found and _number(found.get(_TUN_TYPE)) != _IFF_TUN:
        return ForeignLink(seen.name, "a tap device of kind tun", Tun.make)
    if found and not _number(found.get(_TUN_PERSIST)):
        return ForeignLink(seen.name, "another process's device of kind tun", Tun.make)
    return Tun(seen.name, seen.mtu, seen.up)


class Step(Enum):
    """How to get from the device that is there to the wanted one."""

    NOTHING = "nothing"
    SET = "set"
    REPLACE = "replace"


def step(wanted: Link, actual: Link | ForeignLink) -> Step:
    """Set what can be set; all else takes a new device."""
    if actual == wanted:
        return Step.NOTHING
    if type(actual) is not type(wanted):
        return Step.REPLACE
    settable = {name: getattr(wanted, name) for name in _SETTABLE[type(wanted)]}
    return Step.SET if replace(actual, **settable) == wanted else Step.REPLACE


def is_not_ours_to_remove(wanted: Link, actual: Link | ForeignLink) -> bool:
    """Whether the name is taken by what upstream would not remove either, but has its owner remove it."""
    return isinstance(wanted, Ipip) and not isinstance(actual, Ipip)


def renamed(wanted: Link, present: Iterable[SeenLink]) -> SeenLink | None:
    """The wanted device under another name. Its MAC, which is random, tells it from anybody else's."""
    for seen in present:
        make = seen.make
        if not (isinstance(make, Vxlan) and isinstance(wanted, Vxlan) and make.mac == wanted.mac):
            continue
        if step(wanted, replace(make, name=wanted.name)) is not Step.REPLACE:
            return seen
    return None


def holder(wanted: Link, present: Iterable[SeenLink]) -> str:
    """The device because of which the kernel refuses the wanted one; empty if that is not plain."""
    ends = _ends(wanted)
    return next((seen.name for seen in present if ends and _ends(seen.make) == ends), "")


def _ends(make: Link | ForeignLink) -> tuple[object, ...]:
    """What no two devices of one kind may have in common."""
    match make:
        case Vxlan():
            return (make.make, make.local.version, make.vni, make.port)
        case Ipip():
            return (make.make, make.local, make.remote)
    return ()


def differences(wanted: Link, actual: Link | ForeignLink) -> str:
    """What is wrong with a device, for the log."""
    if type(actual) is not type(wanted):
        return f"is {described(actual)}, wanted {wanted}"
    return ", ".join(f"has {name} {has}, wanted {wants}" for name, has, wants in drift(wanted, actual))


def drift(wanted: Link, actual: Link | ForeignLink) -> Iterator[tuple[str, object, object]]:
    """Yield each property that differs, with the value that the device has and the wanted one."""
    if type(actual) is not type(wanted):
        yield "kind", described(actual), wanted.make
        return
    pairs = ((f.name, getattr(actual, f.name), getattr(wanted, f.name)) for f in fields(wanted))
    yield from ((name, has, wants) for name, has, wants in pairs if has != wants)


def described(actual: Link | ForeignLink) -> str:
    """What kind of device that is."""
    return actual.description if isinstance(actual, ForeignLink) else f"a device of kind {actual.make}"


def remedy(wanted: Link, code: int | None, holder: str = "") -> str:
    """What to do when the kernel refuses to make a device, if its reason or the ``holder`` tells that."""
    if holder:
        return f"if nobody needs {holder}, remove it: ip link delete {holder}"
    match code:
        case errno.EOPNOTSUPP:
            return f"load the kernel's module: modprobe {wanted.make}"
        case errno.EEXIST:
            return f"another device serves the same ends; find it with: ip -d link show type {wanted.make}"
        case errno.EACCES:
            return "let everybody open /dev/net/tun, as udev does (chmod 666): CAP_NET_ADMIN decides there"
        case errno.EBUSY:
            return "another process has made it at the same time: start again"
    return ""


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _number(raw: bytes | None) -> int:
    return int.from_bytes(raw, sys.byteorder) if raw else 0
