"""WireGuard's keys, and the resources of the wireguard backend: devices' keys, peers and allowed IPs (pure).

Allowed IPs are resources of their own, because each belongs to at most one peer of a device: the kernel moves
it silently from one to another. So two leases with the same allowed IP are found like any other conflict.

The public key is computed here, by the Montgomery ladder of RFC 7748, because the lease needs it before the
device exists. Python's integer operations do not take constant time. That reveals nothing to an attacker: the
key is computed once a start, without foreign input.
"""

from __future__ import annotations

import base64
import binascii
from typing import ClassVar

from msgspec import Struct

from flanneld.errors import Refused
from flanneld.model import IPAddress, IPNetwork, Secret
from flanneld.state.resources import Key, Kind

#: Bytes of each kind of key.
LENGTH = 32
#: Value of a missing pre-shared key.
NO_PRESHARED_KEY = Secret(bytes(LENGTH))
#: Name of the table of all these resources.
TABLE = "wireguard"

_PRIME = 2**255 - 19
_A24 = 121665
_BASE_POINT = bytes([9]) + bytes(31)


def parse(text: str) -> bytes:
    """Parse a key in base64, as ``wg`` and Go write it. Raises ``Refused`` without the key's text."""
    try:
        # Go's decoder ignores line ends at any position.
        raw = base64.b64decode(text.replace("\r", "").replace("\n", ""), validate=True)
    except (binascii.Error, ValueError):
        raise Refused("the key is no base64", "write 32 bytes in base64, as `wg genkey` does") from None
    if len(raw) != LENGTH:
        raise Refused(
            f"the key has {len(raw)} bytes, not {LENGTH}", "write 32 bytes in base64, as `wg genkey` does"
        )
    return raw


def text_of(key: bytes) -> str:
    """Return a key in base64."""
    return base64.b64encode(key).decode()


def private_key(random: bytes) -> Secret:
    """Make a private key of 32 random bytes (RFC 7748, section 5)."""
    return Secret(_clamp(random))


def public_key(private: Secret) -> bytes:
    """Return the public key that belongs to a private one."""
    return x25519(private.value, _BASE_POINT)


def x25519(scalar: bytes, point: bytes) -> bytes:
    """Multiply a point of Curve25519 by a scalar (RFC 7748, section 5)."""
    k = int.from_bytes(_clamp(scalar), "little")
    x1 = int.from_bytes(point, "little") & (2**255 - 1)
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        if k >> bit & 1:
            x3, z3, x2, z2 = _step(x1, x3, z3, x2, z2)
        else:
            x2, z2, x3, z3 = _step(x1, x2, z2, x3, z3)
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(LENGTH, "little")


def _step(x1: int, x2: int, z2: int, x3: int, z3: int) -> tuple[int, int, int, int]:
    """Double one point of the ladder and add the other, whose difference is ``x1``."""
    a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
    aa, bb, da, cb = a * a % _PRIME, b * b % _PRIME, d * a % _PRIME, c * b % _PRIME
    e = aa - bb
    sum_x, sum_z = (da + cb) ** 2 % _PRIME, x1 * (da - cb) ** 2 % _PRIME
    return aa * bb % _PRIME, e * (aa + _A24 * e) % _PRIME, sum_x, sum_z


def _clamp(raw: bytes) -> bytes:
    return bytes([raw[0] & 248, *raw[1:31], raw[31] & 127 | 64])


class DeviceKey(Struct, frozen=True, gc=False):
    """Private key and UDP port of a device. ``public_key`` is derived from the private one."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    private_key: Secret
    public_key: bytes
    listen_port: int
    #: Firewall mark of the device's own packets; a nonzero mark can divert them from the main routing table.
    fwmark: int = 0

    @property
    def key(self) -> Key:
        return (TABLE, self.device)

    def __str__(self) -> str:
        return f"key {text_of(self.public_key)} listen-port {self.listen_port} dev {self.device}"


class WgPeer(Struct, frozen=True, gc=False):
    """Peer with its public key. ``endpoint`` and ``port`` are its initial address."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    public_key: bytes
    endpoint: IPAddress | None
    port: int
    #: Seconds between keepalive packets, which keep a NAT's mapping open; 0 for none.
    keepalive: int = 0
    preshared_key: Secret = NO_PRESHARED_KEY

    @property
    def key(self) -> Key:
        return (TABLE, self.device, text_of(self.public_key))

    def __str__(self) -> str:
        where = f"[{self.endpoint}]" if self.endpoint and self.endpoint.version == 6 else str(self.endpoint)
        return f"peer {text_of(self.public_key)} endpoint {where}:{self.port} dev {self.device}"


class AllowedIp(Struct, frozen=True, gc=False):
    """Allowed IP: a subnet whose packets go to one peer, and are accepted only from this peer."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    subnet: IPNetwork
    public_key: bytes

    @property
    def key(self) -> Key:
        net = self.subnet
        return (TABLE, self.device, net.version, int(net.network_address), net.prefixlen)

    def __str__(self) -> str:
        return f"allowed-ip {self.subnet} peer {text_of(self.public_key)} dev {self.device}"
