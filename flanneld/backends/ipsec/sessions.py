"""Sessions with peers, parsed from charon's list of SAs (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network

from msgspec import Struct

from flanneld.backends.ipsec.resources import Connection
from flanneld.backends.ipsec.vici import ReadSection, number, sections, text


class Session(Struct, frozen=True, gc=False):
    """State of the SAs with one peer. ``age`` is in seconds, of the newest; None without one.

    ``endpoint`` is the peer's address and port as charon sees them, empty if there is no IKE SA.
    """

    subnet: IPv4Network
    established: bool = False
    age: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    endpoint: str = ""


class Found(Struct):
    """SAs of one connection; ``is_negotiating`` is True while charon negotiates one."""

    is_negotiating: bool = False
    children: list[ReadSection] = []
    endpoint: str = ""


def by_connection(events: Iterable[ReadSection]) -> dict[str, Found]:
    """Group the events of ``list-sas`` by the connection's name."""
    found: dict[str, Found] = {}
    for name, ike in (item for event in events for item in sections(event).items()):
        known = found.setdefault(name, Found())
        known.is_negotiating |= text(ike, "state") != "ESTABLISHED"
        known.endpoint = f"{text(ike, 'remote-host')}:{text(ike, 'remote-port')}"
        children = ike.get("child-sas")
        for child in sections(children).values() if isinstance(children, dict) else ():
            if text(child, "state") in ("INSTALLED", "REKEYING", "REKEYED"):
                known.children.append(child)
            else:
                known.is_negotiating |= text(child, "state") not in ("DELETING", "DELETED", "DESTROYING")
    return found


def session_of(connection: Connection, found: Found | None) -> Session:
    """Return the session with one peer; its bytes are those of the current SAs."""
    if found is None:
        return Session(connection.peer)
    children = found.children
    return Session(
        connection.peer,
        bool(children),
        float(min(number(each, "install-time") for each in children)) if children else None,
        sum(number(each, "bytes-in") for each in children),
        sum(number(each, "bytes-out") for each in children),
        found.endpoint,
    )
