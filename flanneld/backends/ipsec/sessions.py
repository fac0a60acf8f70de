"""Sessions with peers, parsed from charon's list of SAs (pure)."""

from __future__ import annotations

from collections.abc import Container, Iterable

from msgspec import Struct

from flanneld.backends.ipsec.resources import IkeConnection
from flanneld.backends.ipsec.vici import ReadSection, number, sections, text
from flanneld.state.sessions import Session


class ConnectionSas(Struct):
    """SAs of one connection; ``is_negotiating`` is True while charon negotiates one.

    ``lost`` are those that charon takes for installed and the kernel lacks.
    """

    is_negotiating: bool = False
    children: list[ReadSection] = []
    lost: list[ReadSection] = []
    endpoint: str = ""


def by_connection(
    events: Iterable[ReadSection], spis: Container[str] | None = None
) -> dict[str, ConnectionSas]:
    """Group the events of ``list-sas`` by the connection's name.

    ``spis`` are those of the kernel's SAs, read after the events; without them charon is believed.
    """
    found: dict[str, ConnectionSas] = {}
    for name, ike in (item for event in events for item in sections(event).items()):
        known = found.setdefault(name, ConnectionSas())
        known.is_negotiating |= text(ike, "state") != "ESTABLISHED"
        known.endpoint = f"{text(ike, 'remote-host')}:{text(ike, 'remote-port')}"
        children = ike.get("child-sas")
        for child in sections(children).values() if isinstance(children, dict) else ():
            if text(child, "state") in ("INSTALLED", "REKEYING", "REKEYED"):
                if spis is None or (text(child, "spi-in") in spis and text(child, "spi-out") in spis):
                    known.children.append(child)
                elif text(child, "state") == "INSTALLED":
                    known.lost.append(child)
                else:
                    known.is_negotiating = True  # charon is replacing it
            else:
                known.is_negotiating |= text(child, "state") not in ("DELETING", "DELETED", "DESTROYING")
    return found


def is_encapsulated(found: ConnectionSas) -> bool:
    """Return True if UDP carries the packets."""
    return any(text(each, "encap") == "yes" for each in found.children)


def session_of(
    connection: IkeConnection, found: ConnectionSas | None, now: float, problem: str = ""
) -> Session:
    """Return the session with one peer; its bytes are those of the current SAs.

    ``now`` is in seconds since 1970, ``problem`` the reason of a failed negotiation. charon negotiates with
    each peer as soon as it knows it, so a peer without an SA during a negotiation does not answer.
    """
    if found is None:
        endpoint = f"{connection.remote}:500" if problem else ""
        return Session(
            connection.peer,
            is_established=False,
            endpoint=endpoint,
            is_silent=bool(problem),
            problem=problem,
            protocol="ipsec",
        )
    children = found.children
    ages = [number(each, "install-time") for each in children]
    return Session(
        connection.peer,
        is_established=bool(children),
        handshake=now - min(ages) if ages else None,
        rx_bytes=sum(number(each, "bytes-in") for each in children),
        tx_bytes=sum(number(each, "bytes-out") for each in children),
        endpoint=found.endpoint,
        is_encapsulated=is_encapsulated(found),
        is_silent=(found.is_negotiating or bool(problem)) and not children,
        problem="" if children else problem,
        protocol="ipsec",
    )
