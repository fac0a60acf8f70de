"""Names and numbers of the interfaces in this network namespace."""

from __future__ import annotations

import socket


def index_of(name: str) -> int:
    """Return the number of an interface, 0 if there is none of this name. It stays when it is renamed."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def name_of(index: int) -> str | None:
    """Return the name of an interface, None if there is none with this number."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None


def names() -> dict[int, str]:
    """Return the name of each interface by its number. Raises ``OSError``."""
    return dict(socket.if_nameindex())
