"""Data plane in C, available if a compiler was there at installation. Its source is in ``udp_pump/``."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import threading
import weakref
from collections import Counter
from importlib.machinery import EXTENSION_SUFFIXES
from io import FileIO
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from flanneld.backends.udp.proxy.plane import Wire
from flanneld.network import interfaces

# linux/if_tun.h
_CSUM, _TSO4, _TSO_ECN, _USO4, _USO6 = 0x01, 0x02, 0x08, 0x20, 0x40

#: Offloads: work that the kernel may leave undone in packets from the TUN, best first. USO needs Linux 6.2,
#: which only accepts both families together. IPv6 packets are dropped anyway.
_TSO = _CSUM | _TSO4 | _TSO_ECN
OFFLOADS = {"all": _TSO | _USO4 | _USO6, "tso": _TSO, "none": 0}

# udp_pump/pump.h
_VNET_HEADER, _MERGE_UDP, _SEGMENT_SENDS, _ACCEPT_ANY = 1, 2, 4, 8
_FEATURES = {"all": _VNET_HEADER | _MERGE_UDP, "tso": _VNET_HEADER, "none": 0}

# linux/udp.h, asm-generic/socket.h
_UDP_SEGMENT, _UDP_GRO = 103, 104
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
#: The forced option, the one without CAP_NET_ADMIN, and bytes. Three sends fill the kernel's default of 208
#: KiB, and a burst of received packets overflows it at once.
_BUFFERS = ((_SO_RCVBUFFORCE, socket.SO_RCVBUF, 4 << 20), (_SO_SNDBUFFORCE, socket.SO_SNDBUF, 1 << 20))


def available() -> str | None:
    """Return None if this data plane is usable, else the reason why it is not."""
    try:
        _library()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


class NativePlane:
    """Data plane of two C threads; ``run`` only waits for them. Once stopped it cannot be restarted.

    ``offloads`` is the highest level to request; the kernel may grant less. Raises ``OSError`` if the library
    or the TUN is missing.
    """

    name = "native"

    def __init__(self, wire: Wire, offloads: str = "all") -> None:
        self._library = _library()
        self._socket = wire.socket
        self._tun, self.offloads = _attach(wire.tun, offloads)
        features = _FEATURES[self.offloads] | (_ACCEPT_ANY if wire.accept_any else 0) | _tune(wire.socket)
        self._pump = self._library.udp_pump_new(
            self._tun.fileno(), wire.socket, int(wire.address), wire.port, features
        )
        if not self._pump:
            self._tun.close()
            _receive_whole(wire.socket, False)
            raise OSError(errno.ENOMEM, "no memory or descriptors left for the udp proxy")
        # Not at exit, when the loops may still run.
        weakref.finalize(self, self._library.udp_pump_free, self._pump).atexit = False

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Add or replace a peer. Raises ``OSError`` if memory is short."""
        failed = self._library.udp_pump_set_peer(
            self._pump, int(subnet.network_address), subnet.prefixlen, int(endpoint)
        )
        if failed:
            raise OSError(failed, f"{os.strerror(failed)}: no room for the peer {subnet}")

    def drop_peer(self, subnet: IPv4Network) -> None:
        self._library.udp_pump_drop_peer(self._pump, int(subnet.network_address), subnet.prefixlen)

    def run(self) -> None:
        results: list[int] = []
        threads: list[threading.Thread] = []
        try:
            for loop in (self._library.udp_pump_from_tun, self._library.udp_pump_from_wire):
                thread = threading.Thread(
                    target=lambda loop=loop: results.append(loop(self._pump)), daemon=True
                )
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
            self._tun.close()
            _receive_whole(self._socket, False)
        for result in filter(None, results):
            raise OSError(result, f"the udp proxy: {os.strerror(result)}")

    def stop(self) -> None:
        self._library.udp_pump_stop(self._pump)

    def counters(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for number in range(self._library.udp_pump_counters()):
            name = self._library.udp_pump_counter_name(number)
            if name:
                counts[name.decode()] += self._library.udp_pump_counter(self._pump, number)
        return dict(counts)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library. Raises ``OSError`` or ``AttributeError``, again on each call."""
    paths = [Path(__file__).with_name(f"_udp_pump{suffix}") for suffix in EXTENSION_SUFFIXES]
    found = next(filter(Path.exists, paths), None)
    if found is None:
        raise OSError(f"{paths[0].name} was not built; install flanneld again where there is a C compiler")
    library = ctypes.CDLL(str(found))
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    signatures = {
        "new": (pointer, ctypes.c_int, ctypes.c_int, number, ctypes.c_uint16, number),
        "free": (None, pointer),
        "set_peer": (ctypes.c_int, pointer, number, number, number),
        "drop_peer": (None, pointer, number, number),
        "from_tun": (ctypes.c_int, pointer),
        "from_wire": (ctypes.c_int, pointer),
        "stop": (None, pointer),
        "counter": (ctypes.c_uint64, pointer, number),
        "counter_name": (ctypes.c_char_p, number),
        "counters": (number,),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"udp_pump_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _attach(name: str, offloads: str) -> tuple[FileIO, str]:
    """Return the TUN, and the level of ``offloads`` that the kernel grants. Raises ``OSError``."""
    *levels, last = list(OFFLOADS)[list(OFFLOADS).index(offloads) :]
    for level in levels:
        try:
            return FileIO(interfaces.attach(name, OFFLOADS[level]), "r+"), level
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return FileIO(interfaces.attach(name, OFFLOADS[last]), "r+"), last


def _tune(descriptor: int) -> int:
    """Configure the socket. Return the proxy features that it supports."""
    with socket.socket(fileno=os.dup(descriptor)) as wire:
        for forced, permitted, size in _BUFFERS:
            try:
                wire.setsockopt(socket.SOL_SOCKET, forced, size)
            except PermissionError:
                wire.setsockopt(socket.SOL_SOCKET, permitted, size)
    _receive_whole(descriptor, True)
    return _SEGMENT_SENDS if _set(descriptor, _UDP_SEGMENT, 0) else 0


def _receive_whole(descriptor: int, settings: bool) -> None:
    """Turn UDP GRO, the merging of datagrams, on or off. Other data planes need it off."""
    _set(descriptor, _UDP_GRO, int(settings))


def _set(descriptor: int, option: int, value: int) -> bool:
    """Set a UDP option. Return False if the kernel lacks it; both used here need Linux 5.0."""
    with socket.socket(fileno=os.dup(descriptor)) as wire:
        try:
            wire.setsockopt(socket.IPPROTO_UDP, option, value)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            return False
    return True
