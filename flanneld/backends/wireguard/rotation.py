"""Rotation of one WireGuard peer's endpoints, and the notice that a peer is silent (pure).

Rules of WireGuard (its paper, section 6; Linux, drivers/net/wireguard/timers.c):

- An authenticated packet moves a peer's endpoint to the packet's source.
- A new endpoint by netlink sends nothing. A keepalive interval that goes from 0 to n sends a packet at once.
- Without a session a packet becomes a handshake initiation, one in 5 s at most (REKEY_TIMEOUT). After 90 s
  (REKEY_ATTEMPT_TIME) the handshake is given up, until the next packet.
- A session carries packets for 180 s (REJECT_AFTER_TIME), and is renewed after 120 s with traffic
  (REKEY_AFTER_TIME).

Timeline of a peer, in seconds after its last handshake:

    0 .. 180    established: neither its endpoint nor its session is touched
    180 ..      idle while nothing is sent: what worked stays
    275         silent, if packets have been sent for 95 s (90 s and 5 s) without a handshake

Timeline of a search, which begins when a peer is silent or was never met:

    0           a keepalive every 5 s, on both sides: each opens its NAT for the other
    0, 5, ..    first round: each candidate for 5 s, in the order of its announcement
    then        later rounds: each candidate for 15 s, in another order on each node and in each round
    news        a candidate that was not known is tried at once, and the first round begins again
    handshake   the search is over, whichever endpoint the answer came from
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from flanneld.network.genetlink import Endpoint, SeenPeer

#: Seconds of a session without a new handshake (REJECT_AFTER_TIME).
DEAD = 180.0
#: Seconds of packets without a handshake after which a peer is silent (REKEY_ATTEMPT_TIME, REKEY_TIMEOUT).
GIVEN_UP = 95.0
#: Further seconds if the last handshake is in the future, because the clock was set back: a live session
#: makes a new one within REKEY_AFTER_TIME, which has the new time.
SET_BACK = 120.0
#: Seconds between keepalive packets during a search.
SEARCH_KEEPALIVE = 5
#: Seconds for one candidate, in the first round and in later ones.
FIRST_TRY, LATER_TRY = 5.0, 15.0


class Search(Struct, frozen=True, gc=False):
    """Search for a peer. ``left`` are the candidates of this round that are still to be tried."""

    known: tuple[Endpoint, ...] = ()
    left: tuple[Endpoint, ...] = ()
    round: int = 0
    until: float = 0.0


class Rotation(Struct, frozen=True, gc=False):
    """State of a peer. ``called`` is the time of the first packet that no handshake answered."""

    sent: int | None = None
    called: float | None = None
    is_silent: bool = False
    search: Search | None = None


class Steer(Struct, frozen=True, gc=False):
    """Change of a peer in the kernel. None leaves its endpoint; ``at_once`` has a packet sent now."""

    keepalive: int
    endpoint: Endpoint | None = None
    at_once: bool = False


def is_alive(peer: SeenPeer, wall: float) -> bool:
    """Return True if a peer has a session. A handshake far in the future means a clock set back."""
    return abs(wall - peer.last_handshake) <= DEAD


def observe(state: Rotation, peer: SeenPeer, now: float, wall: float) -> Rotation:
    """Return the state after a reading, at ``now`` on ``clock.now`` and ``wall`` since 1970."""
    if is_alive(peer, wall) or (state.sent is not None and peer.tx_bytes < state.sent):
        return Rotation(peer.tx_bytes)
    if state.sent is None or peer.tx_bytes == state.sent:
        return replace(state, sent=peer.tx_bytes)
    called = now if state.called is None else state.called
    patience = GIVEN_UP + (SET_BACK if peer.last_handshake > wall else 0.0)
    return replace(
        state, sent=peer.tx_bytes, called=called, is_silent=state.is_silent or now - called >= patience
    )


def steer(
    state: Rotation,
    peer: SeenPeer,
    candidates: Sequence[Endpoint],
    now: float,
    wall: float,
    keepalive: int,
    salt: bytes,
) -> tuple[Rotation, Steer | None]:
    """Return the state and the change to make after ``observe``, None without one.

    ``keepalive`` is the interval of a peer that is not searched for. ``salt`` differs between nodes: two that
    search for each other must not stay in step.
    """
    if is_alive(peer, wall) or not (state.is_silent or peer.last_handshake == 0.0):
        return replace(state, search=None), Steer(keepalive) if peer.keepalive != keepalive else None
    search, endpoint = _turn(state.search or Search(), tuple(candidates), now, salt)
    if endpoint is None and peer.keepalive == SEARCH_KEEPALIVE:
        return replace(state, search=search), None
    return replace(state, search=search), Steer(SEARCH_KEEPALIVE, endpoint, at_once=True)


def _turn(
    search: Search, candidates: tuple[Endpoint, ...], now: float, salt: bytes
) -> tuple[Search, Endpoint | None]:
    """Return the search, and the endpoint whose turn begins; None while another has its turn."""
    news = tuple(each for each in candidates if each not in search.known)
    if not candidates or (not news and now < search.until):
        return replace(search, known=candidates), None
    left = (*news, *(each for each in search.left if each in candidates and each not in news))
    number = 0 if news else search.round
    if not left:
        number += 1
        left = tuple(sorted(candidates, key=lambda each: crc32(f"{number} {each}".encode(), crc32(salt))))
    until = now + (LATER_TRY if number else FIRST_TRY)
    return Search(candidates, left[1:], number, until), left[0]
