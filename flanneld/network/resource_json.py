"""Resources as JSON values, so that two processes can compare them (pure)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any

from flanneld.state.resources import Address, Blackhole, FdbEntry, Link, Neighbor, Resource, Route

#: Resources of the kernel, except devices.
_TYPES: tuple[type[Resource], ...] = (Address, Neighbor, FdbEntry, Route, Blackhole)
#: Parsers of fields that are strings in JSON, by the field's type.
_READERS: dict[str, Callable[[str], Any]] = {"IPAddress": ip_address, "IPNetwork": ip_network}


def encode(resource: Resource) -> dict[str, Any] | None:
    """Return the JSON value of a resource, None for one of a backend's own table."""
    made = type(resource)
    if not (isinstance(resource, Link) or made in _TYPES):
        return None
    values = ((name, getattr(resource, name), reader) for name, reader in _fields(made).items())
    plain = {name: str(value) if reader and value is not None else value for name, value, reader in values}
    return {"type": made.__name__, **plain}


def decode(value: dict[str, Any]) -> Resource:
    """Return the resource of a JSON value. Raises ``LookupError``, ``TypeError`` or ``ValueError``."""
    made = {each.__name__: each for each in (*_TYPES, *Link.__subclasses__())}[value["type"]]
    found = {
        name: reader(value[name]) if reader and value[name] is not None else value[name]
        for name, reader in _fields(made).items()
    }
    return made(**found)


@cache
def _fields(made: type) -> dict[str, Callable[[str], Any] | None]:
    """Return the fields of a resource class, each with its parser, None if it is no string."""
    annotations: dict[str, str] = made.__annotations__
    return {
        name: next((_READERS[each] for each in _READERS if annotation.startswith(each)), None)
        for name, annotation in annotations.items()
        if not annotation.startswith("ClassVar")
    }
