"""Devices as rtnetlink describes them, and the steps that turn one into another.

Each kind of device has a codec, in ``kinds``, for all in which kinds differ. linux/if_link.h; the comparison
follows upstream's backend/vxlan/device.go, which keeps a device that fits and replaces one that does not.
"""

from __future__ import annotations

import errno
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from flanneld.network.rtnetlink.messages import mac_text
from flanneld.network.rtnetlink.netlink import attribute, attributes, unpack
from flanneld.runtime.shell import Command, command
from flanneld.state.resources import ForeignLink, Link

L = TypeVar("L", bound=Link)

#: Kinds with a codec in ``kinds``, in a module of the kind's name that is loaded when such a device is met.
_BUILT_IN = frozenset({"ipip", "tun", "vxlan", "wireguard"})
IFF_UP = 0x1
_IFINFOMSG = struct.Struct("=BxHiII")
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO = 1, 3, 4, 10, 18
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2

#: An attribute by its name in linux/if_link.h, as pyroute2 takes it.
Attribute = tuple[str, Any]


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


class LinkCodec(Generic[L]):
    """One kind of device: how the kernel describes it, and how it is made, compared and changed.

    A package with a kind of its own calls ``register``.
    """

    #: The class of its resources; ``resource.make`` is the kind's name.
    resource: type[L]
    #: The names that flannel's backends give to such devices, Go's included.
    names: re.Pattern[str]
    #: The fields that can be changed of a device that is there; for all others it is replaced.
    settable: tuple[str, ...] = ("mtu", "up")
    #: Go flannel makes devices of this kind that ``parse`` takes for foreign ones.
    is_made_otherwise = False
    #: A device of another kind under the wanted name is left for its owner to remove, as upstream leaves it.
    spares_others = False

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> L | ForeignLink:
        """Return the resource, given the attributes in IFLA_INFO_DATA."""
        raise NotImplementedError

    def make(self, wanted: L) -> bool:
        """Make the device by other means than a netlink message, and return True; False if there are none."""
        del wanted
        return False

    def attributes(self, wanted: L) -> Iterator[Attribute]:
        """Yield what the message that makes the device says besides its name and MTU."""
        yield link_info(wanted.make, *self.data(wanted))

    def data(self, wanted: L) -> Iterable[Attribute]:
        """Return the attributes in IFLA_INFO_DATA that make the device."""
        del wanted
        return ()

    def changes(self, wanted: L, actual: L) -> Iterable[Attribute]:
        """Return the attributes to set, each in a message of its own, besides the MTU."""
        del wanted, actual
        return ()

    def mark(self, link: L) -> str:
        """Return what tells a device from everybody else's under any name, empty if nothing does."""
        del link
        return ""

    def ends(self, link: L) -> tuple[object, ...]:
        """Return what no two devices of this kind may have in common, empty if that is nothing."""
        del link
        return ()

    def carrier(self, link: L) -> str:
        """Return what a firewall between the nodes has to let through, for an operator."""
        return f"the packets of {link.name}"

    def make_commands(self, wanted: L, parent: str) -> Iterator[Command]:
        """Yield the commands of iproute2 that make the device; ``parent`` is the device under it."""
        del parent
        yield command(
            "ip", "link", "add", wanted.name, "mtu", wanted.mtu, "txqueuelen", 0, "type", wanted.make
        )

    def change_commands(self, wanted: L, actual: L) -> Iterable[Command]:
        """Return the commands that do what ``changes`` does."""
        del wanted, actual
        return ()


_codecs: dict[str, LinkCodec[Any]] = {}


def register(codec: LinkCodec[Any]) -> None:
    """Have devices of a kind read, made and compared by this codec."""
    _codecs[codec.resource.make] = codec


def codec_of(kind: str) -> LinkCodec[Any] | None:
    """Return the codec of a kind of device, None for a kind that no backend makes."""
    if kind not in _codecs and kind in _BUILT_IN:
        register(import_module(f"flanneld.network.rtnetlink.kinds.{kind}").CODEC)
    return _codecs.get(kind)


def codec_for(link: Link) -> LinkCodec[Any]:
    """Return the codec of a device that a backend makes."""
    codec = codec_of(link.make)
    assert codec is not None, f"no codec is registered for devices of kind {link.make}"
    return codec


def link_info(kind: str, *data: Attribute) -> Attribute:
    """Return the attribute IFLA_LINKINFO of a device."""
    # An empty IFLA_INFO_DATA cannot be encoded for kinds that pyroute2 knows no data of.
    details = [("IFLA_INFO_DATA", {"attrs": list(data)})] if data else []
    return "IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", kind), *details]}


def is_flannels(link: SeenLink) -> bool:
    """Return True for a device that a backend of flannel made, in Go or in Python."""
    codec = codec_of(link.make.make)
    if codec is None or not codec.names.fullmatch(link.name):
        return False
    return not isinstance(link.make, ForeignLink) or codec.is_made_otherwise


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
        mtu=number(found.get(_IFLA_MTU)),
        up=bool(flags & IFF_UP),
        make=ForeignLink(name, "a plain interface"),
        master=number(found.get(_IFLA_MASTER)),
    )
    info = found.get(_IFLA_LINKINFO)
    return replace(seen, make=_make(seen, info)) if info else seen


def _make(seen: SeenLink, info: bytes) -> Link | ForeignLink:
    parts = attributes(info, 0, len(info))
    kind = _text(parts.get(_IFLA_INFO_KIND, b""))
    codec = codec_of(kind)
    if codec is None:
        return ForeignLink(seen.name, f"a device of kind {kind}", kind)
    data = parts.get(_IFLA_INFO_DATA, b"")
    made: Link | ForeignLink = codec.parse(seen, attributes(data, 0, len(data)))
    return made


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
    settable = {name: getattr(wanted, name) for name in codec_for(wanted).settable}
    return Step.SET if replace(actual, **settable) == wanted else Step.REPLACE


def is_not_ours_to_remove(wanted: Link, actual: Link | ForeignLink) -> bool:
    """Return True if the name is taken by what upstream would not remove either, but has its owner remove."""
    return codec_for(wanted).spares_others and type(actual) is not type(wanted)


def renamed(wanted: Link, present: Iterable[SeenLink]) -> SeenLink | None:
    """Return the wanted device under another name."""
    codec = codec_for(wanted)
    for seen in present:
        make = seen.make
        if not isinstance(make, Link) or type(make) is not type(wanted) or not codec.mark(wanted):
            continue
        same = codec.mark(make) == codec.mark(wanted)
        if same and step(wanted, replace(make, name=wanted.name)) is not Step.REPLACE:
            return seen
    return None


def holder(wanted: Link, present: Iterable[SeenLink]) -> str:
    """Return the device because of which the kernel refuses the wanted one; empty if that is not plain."""
    ends = codec_for(wanted).ends(wanted)
    alike = (each for each in present if isinstance(each.make, Link) and type(each.make) is type(wanted))
    return next((each.name for each in alike if ends and codec_for(wanted).ends(each.make) == ends), "")


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


def number(raw: bytes | None) -> int:
    """Return the number in an attribute, 0 if there is none."""
    return int.from_bytes(raw, sys.byteorder) if raw else 0
