"""WireGuard devices in this network namespace, read and written over generic netlink."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

from flanneld.network.genetlink import wireguard
from flanneld.network.genetlink.wireguard import SeenDevice
from flanneld.network.rtnetlink.netlink import (
    NLM_F_REQUEST,
    DumpInterrupted,
    NetlinkSocket,
    attribute,
    message,
)

_NETLINK_GENERIC = 16
# linux/genetlink.h: the controller, which maps names of families to their numbers.
_CONTROLLER, _GET_FAMILY, _FAMILY_NAME = 16, 3, 2
_HEADER = struct.Struct("=BBH")
_DUMP_TRIES = 5


class NoWireGuard(OSError):
    """Error for a kernel without WireGuard."""


class WireGuardDevices:
    """Reader and writer of WireGuard devices. Used by one thread; any method may raise ``OSError``."""

    def __init__(self) -> None:
        self._socket = NetlinkSocket(protocol=_NETLINK_GENERIC)
        try:
            self._family = self._find_family()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def read(self, name: str) -> SeenDevice | None:
        """Return a device with its peers; None if it is missing or of another kind."""
        for _ in range(_DUMP_TRIES):
            try:
                found = list(self._socket.dump(self._family, wireguard.get_device(name)))
            except DumpInterrupted:
                continue
            except OSError as failure:
                if failure.errno in (errno.ENODEV, errno.EOPNOTSUPP):
                    return None
                raise
            return wireguard.decode(found)
        raise DumpInterrupted(errno.EINTR, f"the peers of {name} keep changing")

    def write(self, bodies: Sequence[bytes]) -> dict[int, int]:
        """Send packed bodies. Return the errno of each refused body by its index."""
        refused: dict[int, int] = {}
        for failed in self._socket.write(
            message(self._family, NLM_F_REQUEST, body, place) for place, body in enumerate(bodies)
        ):
            refused.update(failed)
        return refused

    def _find_family(self) -> int:
        body = _HEADER.pack(_GET_FAMILY, 1, 0) + attribute(_FAMILY_NAME, b"wireguard\0")
        try:
            return wireguard.family_id(*self._socket.ask(_CONTROLLER, body))
        except OSError as failure:
            if failure.errno == errno.ENOENT:
                raise NoWireGuard(
                    errno.EOPNOTSUPP, f"{os.strerror(errno.EOPNOTSUPP)}; load it: modprobe wireguard"
                ) from None
            raise
