"""Interfaces in this network namespace: names and numbers, offload, TUN devices, and hosts on their links.

Source: linux/ethtool.h and linux/if_tun.h.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flanneld.model import IPAddress


def index_of(name: str) -> int:
    """Return the number of an interface, 0 if there is none of this name. It stays when it is renamed."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def name_of(index: int) -> str | None:
    """Return the name of an interface, None if there is none with this number."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None


def names() -> dict[int, str]:
    """Return the name of each interface by its number. Raises ``OSError``."""
    return dict(socket.if_nameindex())


_SIOCETHTOOL = 0x8946
_ETHTOOL_GTXCSUM, _ETHTOOL_STXCSUM = 0x16, 0x17
_ETHTOOL_GSTRINGS, _ETHTOOL_GSSET_INFO, _ETHTOOL_GFEATURES, _ETHTOOL_GCHANNELS = 0x1B, 0x37, 0x3A, 0x3C
_FEATURES, _STRING = 4, 32  # ETH_SS_FEATURES, ETH_GSTRING_LEN


def offloads_checksums(name: str) -> bool:
    """Return True if the device leaves the checksums of sent packets to hardware. Raises ``OSError``."""
    return bool(_call(name, _ETHTOOL_GTXCSUM))


def compute_checksums(name: str) -> None:
    """Have the CPU compute the checksums of sent packets. Raises ``OSError``."""
    _call(name, _ETHTOOL_STXCSUM)


def lacks_feature(name: str, feature: str) -> bool:
    """Return True if an offload was switched off that the device could do. Raises ``OSError``.

    One that is requested and not active is not done by the device below, as of a VLAN.
    """
    number = _words(name, [_ETHTOOL_GSSET_INFO, 0, 1 << _FEATURES, 0, 0])[4]
    strings = _words(name, [_ETHTOOL_GSTRINGS, _FEATURES, number, *[0] * (number * _STRING // 4)])
    names = [strings.tobytes()[12 + at * _STRING :][:_STRING].rstrip(b"\0").decode() for at in range(number)]
    if feature not in names:
        return False
    block, bit = divmod(names.index(feature), 32)
    blocks = (number + 31) // 32
    # Of each block: what can be changed, is requested, is active, and never changes.
    found = _words(name, [_ETHTOOL_GFEATURES, blocks, *[0] * (4 * blocks)])[2 + 4 * block :]
    return bool(found[0] & ~(found[1] | found[2]) & 1 << bit)


def channels(name: str) -> tuple[int, int]:
    """Return the number of queues that the device uses for both ways, and can use. Raises ``OSError``."""
    found = _words(name, [_ETHTOOL_GCHANNELS, *[0] * 8])
    return found[8], found[4]


def _call(name: str, command: int, value: int = 0) -> int:
    """Send a command with a struct ethtool_value, and return the value afterwards."""
    return _words(name, [command, value])[1]


def _words(name: str, sent: list[int]) -> array.array[int]:
    """Send a command in a structure of 32-bit words, and return the structure afterwards."""
    words = array.array("I", sent)
    request = struct.pack("16sP16x", name.encode(), words.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        fcntl.ioctl(asker, _SIOCETHTOOL, request)
    return words


#: Protocol of a frame; a request of RFC 826 for Ethernet and IPv4, up to MAC and IP address of both ends.
_ETH_P_ARP, _ARP, _PROBE = 0x0806, struct.Struct("!8s6s4s6s4s"), bytes.fromhex("0001080006040001")


def holders(device: str, targets: Iterable[IPAddress], within: float) -> dict[IPAddress, set[str]]:
    """Return the MAC addresses that have each target on a device's link, except this device's own.

    A probe (RFC 5227, section 2.1.1) names no sender, so it changes no host's cache. Raises ``OSError``.
    """
    from flanneld.runtime import clock, waits  # the proxy of udp needs neither

    asked = {each.packed: each for each in targets if each.version == 4}
    found: dict[IPAddress, set[str]] = {}
    # Until it is bound, a socket with a protocol hears all interfaces.
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0) as asker:
        asker.bind((device, _ETH_P_ARP))
        mac = asker.getsockname()[4]
        for each in asked if len(mac) == 6 else ():
            probe = _ARP.pack(_PROBE, mac, bytes(4), bytes(6), each)
            asker.sendto(probe, (device, _ETH_P_ARP, 0, 0, b"\xff" * 6))
        deadline = clock.now() + (within if asked else 0.0)
        while (left := deadline - clock.now()) > 0 and waits.readable(asker.fileno(), left):
            data = asker.recv(_ARP.size)
            _, sender, address, *_ = _ARP.unpack(data.ljust(_ARP.size, b"\0"))
            if address in asked:
                found.setdefault(asked[address], set()).add(sender.hex(":"))
    return found


_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOFFLOAD = 0x400454CA, 0x400454CB, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR, _IFF_TUN_EXCL = 0x0001, 0x1000, 0x4000, 0x8000
_IFREQ = struct.Struct("16sH22x")


def attach(name: str, features: int = 0) -> int:
    """Open an existing device without blocking I/O, and return its descriptor.

    ``features`` are the offloads (TUN_F_*) that the process accepts; with any, each packet has a vnet header.
    Raises ``OSError``: EBUSY if another process has it open, EINVAL for unsupported offloads.
    """
    if not index_of(name):
        # The kernel would create it, but without an address or a route.
        raise OSError(errno.ENODEV, f"there is no device {name}")
    fd = _open(name, _IFF_VNET_HDR if features else 0)
    try:
        # Also for 0: the device remembers the offloads of an earlier process.
        fcntl.ioctl(fd, _TUNSETOFFLOAD, features)
        os.set_blocking(fd, False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make(name: str) -> None:
    """Create a persistent device. Raises ``OSError``, with the remedy.

    EBUSY means that it exists: another daemon starting now may have created it.
    """
    with _opened(name, _IFF_TUN_EXCL) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)


def unmake(name: str) -> None:
    """Remove a device that no process has open. A missing one is no error. Raises ``OSError``."""
    with _opened(name) as fd:
        fcntl.ioctl(fd, _TUNSETPERSIST, 0)


def _open(name: str, flags: int = 0) -> int:
    try:
        fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise
        remedy = f"no {_DEVICE}; load the module with `modprobe tun`, or give the container this device"
        raise OSError(failure.errno, remedy) from None
    try:
        fcntl.ioctl(fd, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TUN | _IFF_NO_PI | flags))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _opened(name: str, flags: int = 0) -> Iterator[int]:
    fd = _open(name, flags)
    try:
        yield fd
    finally:
        os.close(fd)
