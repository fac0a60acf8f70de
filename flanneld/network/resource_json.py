"""Resources as JSON values, so that two processes can compare them (pure)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from operator import itemgetter
from typing import Any

from msgspec.structs import fields

from flanneld.compat.json import address_number
from flanneld.model import IPAddress, IPNetwork
from flanneld.state.resources import Address, Blackhole, FdbEntry, Link, Neighbor, Resource, Route

#: Resources of the kernel, except devices.
_TYPES: tuple[type[Resource], ...] = (Address, Neighbor, FdbEntry, Route, Blackhole)
#: Texts whose addresses are remembered: each occurs several times in a document. 65,000 peers have two each.
_TEXTS = 1 << 18


@lru_cache(_TEXTS)
def parse_address(text: str) -> IPAddress:
    """Parse an address as ``encode`` writes it. Raises ``TypeError`` or ``ValueError``."""
    try:  # half the time of ip_address
        return IPv4Address(address_number(text, IPv4Address))
    except ValueError:
        return ip_address(str(text))  # which takes numbers, too


@lru_cache(_TEXTS)
def parse_network(text: str) -> IPNetwork:
    """Parse a network as ``encode`` writes it. Raises ``TypeError`` or ``ValueError``."""
    base, _, length = str.partition(text, "/")
    address = parse_address(base)
    made = IPv4Network if address.version == 4 else IPv6Network
    return made((int(address), int(length or address.max_prefixlen)))


#: Parsers of fields that are strings in JSON, by the field's type.
_READERS: dict[Any, Callable[[str], Any]] = {
    IPAddress: parse_address,
    IPAddress | None: parse_address,
    IPNetwork: parse_network,
    IPNetwork | None: parse_network,
}


def encode(resource: Resource) -> dict[str, Any] | None:
    """Return the JSON value of a resource, None for one of a backend's own table."""
    made = type(resource)
    if not (isinstance(resource, Link) or made in _TYPES):
        return None
    plain = {"type": made.__name__}
    for name, reader in _fields(made):
        value = getattr(resource, name)
        plain[name] = value if reader is None or value is None else str(value)
    return plain


def decode(value: dict[str, Any]) -> Resource:
    """Return the resource of a JSON value. Raises ``LookupError``, ``TypeError`` or ``ValueError``."""
    made, values, readers = _shape(value["type"])
    found = list(values(value))
    for place, reader in readers:
        if found[place] is not None:
            found[place] = reader(found[place])
    return made(*found)


@cache
def _shape(name: str) -> tuple[type[Resource], Callable[[Any], Any], list[tuple[int, Callable[[str], Any]]]]:
    """Return a resource's class, a getter of its fields, and the parsers by the field's place."""
    made = _types()[name]
    found = _fields(made)
    readers = [(place, reader) for place, (_, reader) in enumerate(found) if reader is not None]
    return made, itemgetter(*(name for name, _ in found)), readers


@cache
def _types() -> dict[str, type[Resource]]:
    """Return the classes by name: the kernel's resources, and every kind of device."""
    return {each.__name__: each for each in (*_TYPES, *Link.__subclasses__())}


@cache
def _fields(made: type) -> tuple[tuple[str, Callable[[str], Any] | None], ...]:
    """Return the fields of a resource class in its order, each with its parser, None if it is no string.

    The key is not among them: it follows from the others.
    """
    return tuple((each.name, _READERS.get(each.type)) for each in fields(made) if each.name != "key")
