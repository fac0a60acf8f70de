"""Resources as JSON values, so that two processes compare values and not texts (pure)."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any

from msgspec.structs import fields

from flanneld.state.resources import (
    Address,
    Blackhole,
    FdbEntry,
    Ipip,
    Neighbor,
    Resource,
    Route,
    Tun,
    Vxlan,
    WireGuard,
)

#: All that the kernel can hold for us, by the name in the JSON value.
_TYPES = {
    each.__name__: each
    for each in (Vxlan, Ipip, Tun, WireGuard, Address, Neighbor, FdbEntry, Route, Blackhole)
}
#: Fields that are text in JSON, by what reads them. Everything else is a number, a text or a truth value.
_READERS: dict[str, Callable[[str], Any]] = {
    "local": ip_address,
    "remote": ip_address,
    "address": ip_address,
    "gateway": ip_address,
    "destination": ip_network,
}


def encode(resource: Resource) -> dict[str, Any] | None:
    """Return the JSON value; None for what a backend's own driver holds."""
    name = type(resource).__name__
    if _TYPES.get(name) is not type(resource):
        return None
    values = ((each, getattr(resource, each)) for each in _FIELDS[name])
    return {"type": name, **{each: _plain(each, value) for each, value in values}}


def decode(value: dict[str, Any]) -> Resource:
    """Return the resource. Raises ``LookupError``, ``TypeError`` or ``ValueError`` for any other value."""
    name = value["type"]
    found = {each: _READERS[each](text) for each in _READERS if (text := value.get(each)) is not None}
    resource: Resource = _TYPES[name](**{each: found.get(each, value[each]) for each in _FIELDS[name]})
    return resource


_FIELDS = {name: tuple(field.name for field in fields(made)) for name, made in _TYPES.items()}


def _plain(name: str, value: Any) -> Any:
    return str(value) if name in _READERS and value is not None else value
