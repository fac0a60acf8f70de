"""Devices in rtnetlink's format, and the steps that change one into another.

Each kind of device has a codec in ``kinds`` for its specifics. Source: linux/if_link.h. The comparison
follows upstream's backend/vxlan/device.go, which keeps a matching device and replaces any other.
"""

from __future__ import annotations

import errno
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from flanneld.findings import Command, command
from flanneld.network.rtnetlink.messages import mac_text
from flanneld.network.rtnetlink.netlink import attribute, attributes, u32, unpack
from flanneld.state.resources import ForeignLink, Link

L = TypeVar("L", bound=Link)

#: Kinds with a codec in ``kinds``, imported at first use.
_BUILT_IN = frozenset({"dummy", "ipip", "tun", "vxlan", "wireguard"})
IFF_UP = 0x1
_IFINFOMSG = struct.Struct("=BxHiII")
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO = 1, 3, 4, 5, 10, 18
_IFLA_LINK_NETNSID, _IFLA_NEW_NETNSID, _IFLA_TARGET_NETNSID, _IFLA_NEW_IFINDEX = 37, 45, 46, 49
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_IFLA_XDP, _IFLA_XDP_ATTACHED = 43, 2
_XDP_MODES = {1: "xdpdrv", 2: "xdpgeneric", 3: "xdpoffload"}

#: Remedy for a UDP port that something else has.
PORT_REMEDY = "stop what has the port, or set another Backend.Port for all nodes"

#: An attribute: its name in linux/if_link.h, as pyroute2 spells it, and its value.
Attribute = tuple[str, Any]


class SeenLink(Struct, frozen=True, gc=False):
    """An interface of this host. ``make`` describes its kind, as far as backends need it.

    ``master`` is the index of the bridge or bond that it is a port of, else 0.
    """

    index: int
    name: str
    mac: str
    mtu: int
    up: bool
    make: Link | ForeignLink
    master: int = 0
    #: Index of the interface that it belongs to, of a veth the other end, in the namespace with this number.
    link: int = 0
    namespace: int = -1
    #: How a program of XDP is attached, in ip-link(8)'s words: it sees what comes in before all else.
    xdp: str = ""


class LinkCodec(Generic[L]):
    """Codec of one kind of device: its attributes, creation, comparison and changes.

    An extension with a kind of its own calls ``register``.
    """

    #: Resource class; ``resource.make`` is the kind's name.
    resource: type[L]
    #: Names that flannel's backends, also Go's, give to such devices.
    names: re.Pattern[str]
    #: Fields that can be set on an existing device. A difference in any other replaces the device.
    settable: tuple[str, ...] = ("mtu", "up")
    #: True if Go flannel creates such devices in a way that ``parse`` returns as foreign.
    is_made_otherwise = False
    #: True if a device of another kind with the wanted name is not replaced, as upstream leaves it to its
    #: owner.
    spares_others = False

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> L | ForeignLink:
        """Return the resource for the attributes in IFLA_INFO_DATA; here of a kind without properties."""
        del data
        made: Callable[[str, int, bool], L] = self.resource
        return made(seen.name, seen.mtu, seen.up)

    def make(self, desired: L) -> bool:
        """Create the device without netlink and return True, or return False if netlink is to be used."""
        del desired
        return False

    def attributes(self, desired: L) -> Iterator[Attribute]:
        """Yield the attributes of the create message, besides name and MTU."""
        yield link_info(desired.make, *self.data(desired))

    def data(self, desired: L) -> Iterable[Attribute]:
        """Return the attributes in IFLA_INFO_DATA of the create message."""
        del desired
        return ()

    def changes(self, desired: L, actual: L) -> Iterable[Attribute]:
        """Return the attributes to set, each in a message of its own, besides the MTU."""
        del desired, actual
        return ()

    def completed(self, desired: L, actual: L) -> L:
        """Return the actual device with the wanted properties that rtnetlink does not tell."""
        del desired
        return actual

    def finish(self, desired: L) -> None:
        """Set the wanted properties that rtnetlink cannot set. Raises ``OSError``."""

    def mark(self, link: L) -> str:
        """Return a value that identifies our device under any name; empty if there is none."""
        del link
        return ""

    def ends(self, link: L) -> tuple[object, ...]:
        """Return the values that no two devices of this kind may share; empty if there are none."""
        del link
        return ()

    def bars(self, desired: L, other: Link | ForeignLink) -> bool:
        """Return True if another device that is up keeps the UDP port of the wanted one for itself."""
        del desired, other
        return False

    def make_commands(self, desired: L, parent: str) -> Iterator[Command]:
        """Yield the iproute2 commands that create the device. ``parent`` is its underlying device."""
        del parent
        yield command(
            "ip", "link", "add", desired.name, "mtu", desired.mtu, "txqueuelen", 0, "type", desired.make
        )

    def change_commands(self, desired: L, actual: L) -> Iterable[Command]:
        """Return the iproute2 commands equivalent to ``changes``."""
        del desired, actual
        return ()


_codecs: dict[str, LinkCodec[Any]] = {}


def register(codec: LinkCodec[Any]) -> None:
    """Register the codec of a kind of device."""
    _codecs[codec.resource.make] = codec


def codec_of(kind: str) -> LinkCodec[Any] | None:
    """Return the codec of a kind of device, None for a kind that no backend creates."""
    if kind not in _codecs and kind in _BUILT_IN:
        for codec in import_module("flanneld.network.rtnetlink.kinds").CODECS:
            _codecs.setdefault(codec.resource.make, codec)
    return _codecs.get(kind)


def codec_for(link: Link) -> LinkCodec[Any]:
    """Return the codec of a backend's device."""
    codec = codec_of(link.make)
    assert codec is not None, f"no codec is registered for devices of kind {link.make}"
    return codec


def link_info(kind: str, *data: Attribute) -> Attribute:
    """Return the attribute IFLA_LINKINFO of a device."""
    # pyroute2 cannot encode an empty IFLA_INFO_DATA of kinds unknown to it.
    details = [("IFLA_INFO_DATA", {"attrs": list(data)})] if data else []
    return "IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", kind), *details]}


def is_flannels(link: SeenLink) -> bool:
    """Return True for a device that a backend of flannel created, in Go or in Python."""
    codec = codec_of(link.make.make)
    if codec is None or not codec.names.fullmatch(link.name):
        return False
    return not isinstance(link.make, ForeignLink) or codec.is_made_otherwise


def by_name(name: str) -> bytes:
    """Return the request body for one interface."""
    return _IFINFOMSG.pack(0, 0, 0, 0, 0) + attribute(_IFLA_IFNAME, name.encode() + b"\0")


def in_namespace(namespace: int, index: int) -> bytes:
    """Return the request body for one interface in the network namespace with this number (Linux 4.16)."""
    return _IFINFOMSG.pack(0, 0, index, 0, 0) + u32(_IFLA_TARGET_NETNSID, namespace)


def moved_to(data: bytes, offset: int, end: int) -> tuple[int, int] | None:
    """Return the number of the namespace to which an interface moved, with its index there; else None."""
    found = attributes(data, offset + _IFINFOMSG.size, end)
    if _IFLA_NEW_NETNSID not in found or _IFLA_NEW_IFINDEX not in found:
        return None
    return number(found[_IFLA_NEW_NETNSID]), number(found[_IFLA_NEW_IFINDEX])


def everything() -> bytes:
    """Return the request body for all interfaces."""
    return _IFINFOMSG.pack(0, 0, 0, 0, 0)


def decode(data: bytes, offset: int, end: int) -> SeenLink:
    """Decode the body of a link message. Raises ``MalformedNetlink``."""
    _, _, index, flags, _ = unpack(_IFINFOMSG, data, offset, end)
    found = attributes(data, offset + _IFINFOMSG.size, end)
    name = _text(found.get(_IFLA_IFNAME, b""))
    mac = found.get(_IFLA_ADDRESS, b"")
    seen = SeenLink(
        index=index,
        name=name,
        mac=mac_text(mac) if len(mac) == 6 else "",
        mtu=number(found.get(_IFLA_MTU)),
        up=bool(flags & IFF_UP),
        make=ForeignLink(name, "a plain interface"),
        master=number(found.get(_IFLA_MASTER)),
        link=number(found.get(_IFLA_LINK)),
        namespace=number(found[_IFLA_LINK_NETNSID]) if _IFLA_LINK_NETNSID in found else -1,
        xdp=_xdp_mode(found.get(_IFLA_XDP, b"")),
    )
    info = found.get(_IFLA_LINKINFO)
    return replace(seen, make=_make(seen, info)) if info else seen


def _xdp_mode(xdp: bytes) -> str:
    attached = number(attributes(xdp, 0, len(xdp)).get(_IFLA_XDP_ATTACHED))
    return _XDP_MODES.get(attached, "xdp") if attached else ""


def _make(seen: SeenLink, info: bytes) -> Link | ForeignLink:
    parts = attributes(info, 0, len(info))
    kind = _text(parts.get(_IFLA_INFO_KIND, b""))
    codec = codec_of(kind)
    if codec is None:
        return ForeignLink(seen.name, f"a device of kind {kind}", kind)
    data = parts.get(_IFLA_INFO_DATA, b"")
    made: Link | ForeignLink = codec.parse(seen, attributes(data, 0, len(data)))
    return made


class LinkStep(Enum):
    """Step from the actual device to the wanted one."""

    NOTHING = "nothing"
    SET = "set"
    REPLACE = "replace"


def step(desired: Link, actual: Link | ForeignLink) -> LinkStep:
    """Return SET if only settable fields differ, REPLACE for any other difference."""
    if actual == desired:
        return LinkStep.NOTHING
    if type(actual) is not type(desired):
        return LinkStep.REPLACE
    settable = {name: getattr(desired, name) for name in codec_for(desired).settable}
    return LinkStep.SET if replace(actual, **settable) == desired else LinkStep.REPLACE


def completed(desired: Link, actual: Link | ForeignLink) -> Link | ForeignLink:
    """Return the actual device with the wanted properties that rtnetlink does not tell."""
    if isinstance(actual, ForeignLink) or type(actual) is not type(desired):
        return actual
    found: Link = codec_for(desired).completed(desired, actual)
    return found


def is_not_ours_to_remove(desired: Link, actual: Link | ForeignLink) -> bool:
    """Return True if a device that the owner must remove has the wanted name, as in upstream."""
    return codec_for(desired).spares_others and type(actual) is not type(desired)


def renamed(desired: Link, present: Iterable[SeenLink]) -> SeenLink | None:
    """Return the wanted device if it exists under another name."""
    codec = codec_for(desired)
    for seen in present:
        make = seen.make
        if not isinstance(make, Link) or type(make) is not type(desired) or not codec.mark(desired):
            continue
        same = codec.mark(make) == codec.mark(desired)
        if same and step(desired, replace(make, name=desired.name)) is not LinkStep.REPLACE:
            return seen
    return None


def holder(desired: Link, present: Iterable[SeenLink]) -> str:
    """Return the name of the device that conflicts with the wanted one; empty if unknown."""
    ends = codec_for(desired).ends(desired)
    alike = (each for each in present if isinstance(each.make, Link) and type(each.make) is type(desired))
    return next((each.name for each in alike if ends and codec_for(desired).ends(each.make) == ends), "")


def at_port_of(desired: Link, present: Iterable[SeenLink]) -> list[str]:
    """Return the names of the devices that keep the UDP port of the wanted one for themselves."""
    codec = codec_for(desired)
    return [
        each.name
        for each in present
        if each.up and each.name != desired.name and codec.bars(desired, each.make)
    ]


def differences(desired: Link, actual: Link | ForeignLink) -> str:
    """Describe the differences of a device, for the log."""
    if type(actual) is not type(desired):
        return f"is {described(actual)}, wanted {desired}"
    return ", ".join(f"has {name} {has}, wanted {wants}" for name, has, wants in drift(desired, actual))


def drift(desired: Link, actual: Link | ForeignLink) -> Iterator[tuple[str, object, object]]:
    """Yield each differing property with its actual and its wanted value."""
    if type(actual) is not type(desired):
        yield "kind", described(actual), desired.make
        return
    pairs = ((f.name, getattr(actual, f.name), getattr(desired, f.name)) for f in fields(desired))
    yield from ((name, has, wants) for name, has, wants in pairs if has != wants)


def described(actual: Link | ForeignLink) -> str:
    """Describe the kind of a device."""
    return actual.description if isinstance(actual, ForeignLink) else f"a device of kind {actual.make}"


def remedy(desired: Link, code: int | None, holder: str = "") -> str:
    """Return the remedy for a refused device, by errno or conflicting ``holder``; empty if unknown."""
    if holder and code == errno.EADDRINUSE:
        return PORT_REMEDY
    if holder:
        return f"let the owner of {holder} give it up, or set other values in Backend of the network config"
    match code:
        case errno.EOPNOTSUPP:
            return f"load the kernel's module: modprobe {desired.make}; or choose another Backend.Type"
        case errno.EEXIST:
            return f"another device serves the same ends; find it with: ip -d link show type {desired.make}"
        case errno.EACCES:
            return "let everybody open /dev/net/tun, as udev does (chmod 666): CAP_NET_ADMIN decides there"
        case errno.EBUSY:
            return "another process has made it at the same time: start again"
    return ""


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def number(raw: bytes | None) -> int:
    """Return the number in an attribute, 0 if it is missing."""
    return int.from_bytes(raw, sys.byteorder) if raw else 0
