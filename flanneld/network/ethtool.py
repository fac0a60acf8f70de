"""Checksum offload of a device, by the ethtool ioctl (linux/ethtool.h)."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_ETHTOOL_GTXCSUM, _ETHTOOL_STXCSUM = 0x16, 0x17


def offloads_checksums(name: str) -> bool:
    """Return True if the device leaves the checksums of sent packets to hardware. Raises ``OSError``."""
    return bool(_call(name, _ETHTOOL_GTXCSUM))


def compute_checksums(name: str) -> None:
    """Have the CPU compute the checksums of sent packets. Raises ``OSError``."""
    _call(name, _ETHTOOL_STXCSUM)


def _call(name: str, command: int, value: int = 0) -> int:
    """Send a command with a struct ethtool_value, and return the value afterwards."""
    words = array.array("I", [command, value])
    request = struct.pack("16sP16x", name.encode(), words.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        fcntl.ioctl(asker, _SIOCETHTOOL, request)
    return words[1]
