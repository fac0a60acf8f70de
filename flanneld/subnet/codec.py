"""Format of leases in etcd: the name of the key and the JSON of the value (pure).

Nodes with any flannel read and write the same format. All parsers raise ``Refused``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from sys import intern
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from flanneld.compat import json as gojson
from flanneld.compat.json import Fields, GoJsonError
from flanneld.errors import Refused
from flanneld.model import Address4, LeaseAttrs, LeaseKey, ipv4_prefix, ipv6_prefix

N = TypeVar("N", bound=IPv4Network | IPv6Network)

_KEY = re.compile(
    r"([0-9]+\.[0-9]+\.[0-9]+\.[0-9]+)-(0|[1-9][0-9]?)"
    r"(?:&([0-9a-fA-F:]+)-(0|[1-9][0-9]{0,2}))?"
)
_MAC = re.compile(
    r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}|[0-9a-f]{2}(?:-[0-9a-f]{2}){5}|[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}"
)
_SEPARATORS = str.maketrans("", "", ":-.")

_WRITE_AGAIN = "restart flanneld on its node to have it written again"


def parse_key(text: str) -> LeaseKey:
    """Parse the key of a lease, which may be the last part of a path.

    Formats: ``10.1.5.0-24``, with IPv6 ``10.1.5.0-24&fd00:1:5::-64``, IPv6 only ``0.0.0.0-0&fd00:1:5::-64``.
    """
    name = text.rpartition("/")[2]
    found = _KEY.fullmatch(name)
    if not found:
        raise _no_key(name)
    base, length, base6, length6 = found.groups()
    try:
        key = (
            _subnet(ipv4_prefix, gojson.address_number(base, IPv4Address), int(length)),
            _subnet(ipv6_prefix, gojson.address_number(base6, IPv6Address), int(length6)) if base6 else None,
        )
    except ValueError:
        raise _no_key(name) from None
    if not any(key):
        raise _no_key(name)
    return key


def format_key(key: LeaseKey) -> str:
    """Return the key of a lease, as ``parse_key`` reads it. Raises ``ValueError`` if it has no subnet."""
    subnet, ipv6_subnet = key
    if subnet is None and ipv6_subnet is None:
        raise ValueError("a lease without a subnet has no key")
    name = f"{subnet.network_address}-{subnet.prefixlen}" if subnet else "0.0.0.0-0"
    return f"{name}&{ipv6_subnet.network_address}-{ipv6_subnet.prefixlen}" if ipv6_subnet else name


class _VtepData(Struct, gc=False, forbid_unknown_fields=True):
    """Backend data as every vxlan daemon writes them."""

    VtepMAC: str
    VNI: int | UnsetType = UNSET

    def decoded(self) -> dict[str, Any]:
        return vars(_Decoded(self))


class _Decoded:
    """Owner of backend data: the dictionaries of attributes share their keys, for half the memory."""

    def __init__(self, data: _VtepData) -> None:
        if data.VNI is not UNSET:
            self.VNI = data.VNI
        self.VtepMAC = data.VtepMAC


class _CommonAttrs(Struct, gc=False, forbid_unknown_fields=True):
    """Attributes as daemons write them: plain names and types, no data or a VTEP's."""

    PublicIP: str
    PublicIPv6: str | None = None
    BackendType: str = ""
    BackendData: _VtepData | None = None
    BackendV6Data: _VtepData | None = None


_COMMON = msgspec.json.Decoder(_CommonAttrs)


def _common_attrs(text: str | bytes) -> LeaseAttrs | None:
    """Return attributes in the common form, None for others. It takes a third of the time.

    It may refuse what ``parse_attrs`` accepts, and accepts nothing that ``parse_attrs`` reads differently.
    """
    try:
        found = _COMMON.decode(text)
        public_ip = gojson.address_of(found.PublicIP, Address4)
        public_ipv6 = None
        if found.PublicIPv6 is not None:
            public_ipv6 = gojson.address_of(found.PublicIPv6, IPv6Address)
    except (ValueError, RecursionError):
        return None
    if public_ip is None and public_ipv6 is None:
        return None
    return LeaseAttrs(
        public_ip,
        public_ipv6,
        intern(found.BackendType),
        found.BackendData.decoded() if found.BackendData else None,
        found.BackendV6Data.decoded() if found.BackendV6Data else None,
    )


def parse_attrs(text: str | bytes) -> LeaseAttrs:
    """Parse a node's attributes. Without IPv4 the PublicIP is absent or ``0.0.0.0``."""
    return _common_attrs(text) or _any_attrs(text)


def _any_attrs(text: str | bytes) -> LeaseAttrs:
    """Parse attributes by Go's rules: names in any case, unknown names, any backend's data."""
    try:
        fields = Fields(gojson.parse(text))
        attrs = LeaseAttrs(
            public_ip=fields.address("PublicIP", IPv4Address),
            public_ipv6=fields.address("PublicIPv6", IPv6Address),
            backend_type=intern(fields.string("BackendType", "")),
            backend_data=fields.raw("BackendData"),
            backend_v6_data=fields.raw("BackendV6Data"),
        )
    except GoJsonError as error:
        raise Refused(f"the lease is wrong: {error}", _WRITE_AGAIN) from None
    if attrs.public_ip is None and attrs.public_ipv6 is None:
        raise Refused("the lease names no public IP", _WRITE_AGAIN)
    return attrs


def format_attrs(attrs: LeaseAttrs, *, with_ipv6: bool) -> str:
    """Return the JSON of attributes in the format of flannel 0.12, or with IPv6 fields of later versions."""
    value: dict[str, Any] = {"PublicIP": str(attrs.public_ip or IPv4Address(0))}
    if with_ipv6:
        value["PublicIPv6"] = str(attrs.public_ipv6) if attrs.public_ipv6 else None
    if attrs.backend_type:
        value["BackendType"] = attrs.backend_type
    if attrs.backend_data is not None:
        value["BackendData"] = attrs.backend_data
    if with_ipv6 and attrs.backend_v6_data is not None:
        value["BackendV6Data"] = attrs.backend_v6_data
    return gojson.compact(value)


def parse_mac(text: str) -> str:
    """Parse a MAC address with colons, dashes or dots, and return it as ``0a:1b:2c:3d:4e:5f``."""
    low = text.lower()
    if not _MAC.fullmatch(low):
        raise Refused(f"{_shown(text)} is not a MAC address", _WRITE_AGAIN)
    digits = low.translate(_SEPARATORS)
    if int(digits[1], 16) & 1 or not int(digits, 16):
        raise Refused(f"{low} is not the MAC address of one device", _WRITE_AGAIN)
    if text[2] == ":" and text == low:
        return text
    return ":".join(digits[i : i + 2] for i in range(0, 12, 2))


def _no_key(name: str) -> Refused:
    return Refused(f"{_shown(name)} is not the key of a lease", "remove it from the store")


def _shown(text: str) -> str:
    return gojson.compact(text[:60])


def _subnet(make: Callable[[int, int], N], base: int, length: int) -> N | None:
    """Return a network, None for length 0, which stands for an unused family. Raises ``ValueError``."""
    net = make(base, length)
    if length == net.max_prefixlen:
        raise ValueError("one address is no subnet")
    return net if length else None
