"""The data plane in C, for those who had a compiler when they installed: ``udp_pump/`` holds its source."""

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
from flanneld.network import tun

# linux/if_tun.h
_CSUM, _TSO4, _TSO_ECN, _USO4, _USO6 = 0x01, 0x02, 0x08, 0x20, 0x40

#: What the kernel may leave undone in a packet that it hands over, from the newest kernels to the oldest.
#: USO came with Linux 6.2, which takes it for both families or not at all. IPv6 is dropped anyhow.
_TSO = _CSUM | _TSO4 | _TSO_ECN
OFFLOADS = {"all": _TSO | _USO4 | _USO6, "tso": _TSO, "none": 0}

# udp_pump/pump.h
_VNET_HEADER, _MERGE_UDP, _SEGMENT_SENDS, _ACCEPT_ANY = 1, 2, 4, 8
_FEATURES = {"all": _VNET_HEADER | _MERGE_UDP, "tso": _VNET_HEADER, "none": 0}

# linux/udp.h, asm-generic/socket.h
_UDP_SEGMENT, _UDP_GRO = 103, 104
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
#: Each of the two options, what is left without CAP_NET_ADMIN, and bytes. Of the kernel's 208 KiB three sends
#: are enough to wait for the wire, and what comes while we are busy overflows them at once.
_BUFFERS = ((_SO_RCVBUFFORCE, socket.SO_RCVBUF, 4 << 20), (_SO_SNDBUFFORCE, socket.SO_SNDBUF, 1 << 20))


def available() -> str | None:
    """None if this plane can be used, else why it cannot."""
    try:
        _library()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


class NativePlane:
    """Two threads of C; ``run`` only waits for them. Once stopped it is used up.

    ``offloads`` is the most that may be asked of the kernel: one that has less of it gives what it has.
    Raises ``OSError`` when the library is missing, or when the TUN cannot be had.
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
            raise OSError(errno.ENOMEM, "no memory or descriptors left for the packet pump")
        # Not at exit, when the loops may still run.
        weakref.finalize(self, self._library.udp_pump_free, self._pump).atexit = False

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Raises ``OSError`` when memory is short."""
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
            raise OSError(result, f"the packet pump: {os.strerror(result)}")

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
    """Raises ``OSError`` or ``AttributeError``, and the next time again."""
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
    """The TUN, and what the kernel grants of ``offloads``. Raises ``OSError``."""
    *levels, last = list(OFFLOADS)[list(OFFLOADS).index(offloads) :]
    for level in levels:
        try:
            return FileIO(tun.attach(name, OFFLOADS[level]), "r+"), level
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return FileIO(tun.attach(name, OFFLOADS[last]), "r+"), last


def _tune(descriptor: int) -> int:
    """Prepare the socket; returns the features of the pump that it can do."""
    with socket.socket(fileno=os.dup(descriptor)) as wire:
        for forced, permitted, size in _BUFFERS:
            try:
                wire.setsockopt(socket.SOL_SOCKET, forced, size)
            except PermissionError:
                wire.setsockopt(socket.SOL_SOCKET, permitted, size)
    _receive_whole(descriptor, True)
    return _SEGMENT_SENDS if _set(descriptor, _UDP_SEGMENT, 0) else 0


def _receive_whole(descriptor: int, wanted: bool) -> None:
    """Take many datagrams as one, or no longer: another plane would not understand it."""
    _set(descriptor, _UDP_GRO, int(wanted))


def _set(descriptor: int, option: int, value: int) -> bool:
    """Set an option of UDP, if the kernel has it: from Linux 5.0 on it has both of ours."""
    with socket.socket(fileno=os.dup(descriptor)) as wire:
        try:
            wire.setsockopt(socket.IPPROTO_UDP, option, value)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            return False
    return True
