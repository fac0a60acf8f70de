"""Rotation of one WireGuard peer's endpoints, and the notice that a peer is silent (pure).

Rules of WireGuard (its paper, section 6; Linux, drivers/net/wireguard/timers.c):

- An authenticated packet moves a peer's endpoint to the packet's source.
- A new endpoint by netlink sends nothing. A keepalive interval that goes from 0 to n sends a packet at once.
- Without a session a packet becomes a handshake initiation, one in 5 s at most (REKEY_TIMEOUT). After 90 s
  (REKEY_ATTEMPT_TIME) the handshake is given up, until the next packet.
- A session carries packets for 180 s (REJECT_AFTER_TIME), and is renewed after 120 s with traffic
  (REKEY_AFTER_TIME).
- Data are answered within 10 s, if only by an empty packet (KEEPALIVE_TIMEOUT). A keepalive is not answered.

Timeline of a peer, in seconds after its last handshake:

    0 .. 180    established: neither its endpoint nor its session is touched
                doubted after 20 s of data without an answer, or if its lease says that it has moved and
                nothing comes for 6 s: a keepalive every 5 s, and a search if it does not announce the
                endpoint that is used
    180 ..      idle while nothing is sent: what worked stays
    275         silent, if packets have been sent for 95 s (90 s and 5 s) without a handshake

Timeline of a search, which begins when a peer is silent or was never met, or after a move without a session:

    0           a keepalive every 5 s, on both sides: each opens its NAT for the other
    0, 5, ..    first round: each candidate for 5 s, in the order of its announcement
    then        later rounds: each candidate for 15 s, in another order on each node and in each round
    news        a candidate that was not known is tried at once, and the first round begins again
    handshake   the search is over, whichever endpoint the answer came from; in a session any packet ends it

A moved peer cannot tell us so itself: a NAT before us lets in only those that we have called. Its session
goes on at the new endpoint, without a handshake.
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
#: Seconds of data without an answer after which an established peer is doubted (KEEPALIVE_TIMEOUT,
#: REKEY_TIMEOUT, and 5 s between two readings).
UNANSWERED = 20.0
#: Seconds within which a peer is heard that has moved and reaches us: its keepalive, and one second.
_HEARD = 6.0
#: Bytes of keepalives between two readings, at most: two of 32 bytes each. A packet with data has more.
_KEEPALIVES = 64
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
    """State of a peer. ``called`` is the time of the first packet that no handshake answered.

    ``asked`` is the time of the first data in a session that nothing has answered.
    """

    sent: int | None = None
    heard: int = 0
    asked: float | None = None
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
    is_again = state.sent is not None and peer.tx_bytes < state.sent  # the device was made again
    if is_alive(peer, wall) or is_again:
        if is_again or state.sent is None or peer.rx_bytes != state.heard:
            return Rotation(peer.tx_bytes, peer.rx_bytes)
        is_asked = state.asked is None and peer.tx_bytes - state.sent > _KEEPALIVES
        asked = now if is_asked else state.asked
        return Rotation(peer.tx_bytes, peer.rx_bytes, asked, search=state.search if asked else None)
    state = replace(state, heard=peer.rx_bytes, asked=None)
    if state.sent is None or peer.tx_bytes == state.sent:
        return replace(state, sent=peer.tx_bytes)
    called = now if state.called is None else state.called
    patience = GIVEN_UP + (SET_BACK if peer.last_handshake > wall else 0.0)
    return replace(
        state, sent=peer.tx_bytes, called=called, is_silent=state.is_silent or now - called >= patience
    )


def is_doubted(state: Rotation, now: float) -> bool:
    """Return True if a session may lead nowhere."""
    return state.asked is not None and now - state.asked >= UNANSWERED


def upset(state: Rotation, peer: SeenPeer, now: float, wall: float) -> Rotation:
    """Return the state after a move: of the peer, or of this node if it has no session with the peer."""
    if is_alive(peer, wall):
        return replace(state, asked=now - UNANSWERED + _HEARD)
    return replace(state, search=state.search or Search())


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
    search for each other must not stay in step. The ``candidates`` of a peer with a session are those that it
    announces, none if they are not known.
    """
    is_lost = is_doubted(state, now)
    if is_alive(peer, wall):
        has_left = bool(candidates) and peer.endpoint not in candidates
        is_sought = is_lost and (state.search is not None or has_left)
    else:
        is_sought = state.is_silent or state.search is not None or peer.last_handshake == 0.0
    if not is_sought:
        change = Steer(SEARCH_KEEPALIVE if is_lost else keepalive, at_once=is_lost)
        return replace(state, search=None), change if peer.keepalive != change.keepalive else None
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
