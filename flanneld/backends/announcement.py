"""Announcement of a second backend in a lease, beside the data of the first (pure).

The key ``Also`` of the backend data holds the type, and the data of a lease of this type. Go flannel does not
know the key and ignores it::

    {"VNI": 1, "VtepMAC": "...", "Also": {"Type": "wireguard", "Data": {"PublicKey": "...", "Port": 51820}}}
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from flanneld.model import LeaseAttrs

KEY = "Also"


def with_also(first: LeaseAttrs, second: LeaseAttrs) -> LeaseAttrs:
    """Return the attributes of a node with two backends; the data of the first are an object or None."""
    also: dict[str, Any] = {"Type": second.backend_type}
    if second.backend_data is not None:
        also["Data"] = second.backend_data
    if second.backend_v6_data is not None:
        also["V6Data"] = second.backend_v6_data
    if first.public_ip:
        return replace(first, backend_data={**(first.backend_data or {}), KEY: also})
    return replace(first, backend_v6_data={**(first.backend_v6_data or {}), KEY: also})


def announced(attrs: LeaseAttrs, backend_type: str) -> LeaseAttrs | None:
    """Return the attributes of a lease of this type; None if the node does not announce the type."""
    if attrs.backend_type == backend_type:
        return attrs
    for data in (attrs.backend_data, attrs.backend_v6_data):
        also = data.get(KEY) if isinstance(data, dict) else None
        if isinstance(also, dict) and also.get("Type") == backend_type:
            return replace(
                attrs,
                backend_type=backend_type,
                backend_data=also.get("Data"),
                backend_v6_data=also.get("V6Data"),
            )
    return None
