"""Encrypted sessions with peers and ways past the encryption, as a table last read them (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from flanneld.model import IPNetwork

#: Subnets that one sentence names.
_FEW = 5


class Session(Struct, frozen=True, gc=False):
    """Session with the node of one peer subnet.

    ``handshake`` is when the keys were last agreed on, in seconds since 1970, None for never. ``is_silent``
    says that packets are sent there and no session comes of it.
    """

    subnet: IPNetwork
    is_established: bool
    handshake: float | None = None
    rx_bytes: int = 0
    tx_bytes: int = 0
    #: Address and port where the peer is called now; empty if that is not known.
    endpoint: str = ""
    is_silent: bool = False
    #: True if UDP carries the packets of an IPsec SA, as behind NAT.
    is_encapsulated: bool = False
    #: Reason why the last negotiation failed, with the remedy; empty if none is known.
    problem: str = ""
    protocol: Literal["wireguard", "ipsec"] = "wireguard"

    @property
    def state(self) -> str:
        """Return one word for metrics and people."""
        return "established" if self.is_established else "silent" if self.is_silent else "idle"


class Bypass(Struct, frozen=True, gc=False):
    """Another program's object by which packets may leave unencrypted, and the command that removes it."""

    what: str
    removal: str


@runtime_checkable
class FindsBypasses(Protocol):
    """Optional part of a table: it notices objects that let packets pass unencrypted."""

    def bypasses(self) -> tuple[Bypass, ...]:
        """Return those of the last read. From any thread."""
        ...


@runtime_checkable
class HasSessions(Protocol):
    """Optional part of a table: its resources carry encrypted sessions."""

    def sessions(self) -> tuple[Session, ...]:
        """Return the sessions as last read. From any thread."""
        ...


def silence(sessions: Iterable[Session]) -> str:
    """Name the subnets whose peers do not answer; empty if all do."""
    silent = sorted(str(each.subnet) for each in sessions if each.is_silent)
    if not silent:
        return ""
    more = f", and {len(silent) - _FEW} more" if len(silent) > _FEW else ""
    return f"no handshake with the nodes of {', '.join(silent[:_FEW])}{more}, though packets are sent there"
