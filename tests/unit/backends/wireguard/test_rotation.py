"""Rotation of a peer's endpoints: who is silent, whose endpoint moves, and how nodes behind NAT meet."""

from __future__ import annotations

import random
from ipaddress import ip_address

import pytest
from msgspec.structs import replace

from flanneld.backends.wireguard import rotation, table
from flanneld.backends.wireguard.rotation import (
    SEARCH_KEEPALIVE,
    Rotation,
    Steer,
    is_doubted,
    observe,
    steer,
    upset,
)
from flanneld.network.genetlink import Endpoint, SeenPeer

NOW = 1e9
ENDPOINT: Endpoint = (ip_address("192.0.2.6"), 51820)
OTHERS: list[Endpoint] = [(ip_address(f"203.0.113.{number}"), 51820) for number in range(1, 5)]
#: Seconds between two readings of the table.
AUDIT = 30.0


def peer(sent: int = 0, handshake: float = 0.0, number: int = 1, keepalive: int = 0) -> SeenPeer:
    return SeenPeer(
        bytes([number]) * 32,
        endpoint=ENDPOINT,
        last_handshake=handshake,
        tx_bytes=sent,
        keepalive=keepalive,
    )


def silent(*sent: int, handshake: float = 0.0) -> list[bool]:
    """Whether a peer counts as silent, reading by reading, each with what was sent by then."""
    state, found = Rotation(), []
    for number, each in enumerate(sent):
        state = observe(state, peer(each, handshake), number * AUDIT, NOW)
        found.append(state.is_silent)
    return found


# ---- silence ------------------------------------------------------------------------------------


def test_a_peer_that_is_called_for_95_seconds_is_silent() -> None:
    assert silent(0, 148, 296, 444, 592, 740) == [False] * 5 + [True]


def test_a_peer_to_which_nobody_speaks_is_not_silent() -> None:
    assert silent(0, 0, 0, 0, 0, 0) == [False] * 6
    assert silent(500, 500, 500, 500, 500, 500) == [False] * 6


def test_a_pause_between_two_calls_changes_nothing() -> None:
    assert silent(0, 148, 148, 296, 296, 444) == [False] * 5 + [True]


def test_a_peer_with_a_session_is_not_silent() -> None:
    assert silent(*range(0, 1480, 148), handshake=NOW - 100) == [False] * 10


def test_a_handshake_ends_the_silence() -> None:
    state, found = Rotation(), []
    for number, (sent, handshake) in enumerate(
        [(0, 0.0), (148, 0.0), (296, 0.0), (444, 0.0), (592, 0.0), (740, 0.0), (900, NOW), (999, 0.0)]
    ):
        state = observe(state, peer(sent, handshake), number * AUDIT, NOW)
        found.append(state.is_silent)
    assert found == [False] * 5 + [True, False, False]


def test_a_device_that_was_made_again_begins_anew() -> None:
    assert silent(0, 148, 296, 444, 592, 740, 10) == [False] * 5 + [True, False]


def test_a_clock_that_was_set_back_is_noticed_once_a_session_would_have_been_renewed() -> None:
    """The last handshake is in the future then, whether there is a session or not."""
    assert silent(*range(0, 148 * 10, 148), handshake=NOW + 3600) == [False] * 9 + [True]


def test_only_the_first_few_are_named() -> None:
    text = table.sentence("flannel-wg", [peer(1, number=number) for number in range(8)])
    assert text.count("192.0.2.6:51820") == 5
    assert " and 3 more; " in text
    assert "more" not in table.sentence("flannel-wg", [peer(1, number=number) for number in range(5)])
    lone = table.sentence(
        "flannel-wg", [SeenPeer(bytes(32)), SeenPeer(bytes(32), endpoint=(ip_address("::1"), 5))]
    )
    assert "at no endpoint, " in lone
    assert "at [::1]:5; " in lone


# ---- doubt --------------------------------------------------------------------------------------


def doubted(*readings: tuple[int, int]) -> list[bool]:
    """Whether a peer with a session is doubted, at readings of what was sent and heard, 5 s apart."""
    state, found = Rotation(), []
    for number, (sent, heard) in enumerate(readings):
        state = observe(state, replace(peer(sent, NOW), rx_bytes=heard), number * 5.0, NOW)
        found.append(is_doubted(state, number * 5.0))
    return found


def test_session_is_doubted_after_20_s_of_data_that_nothing_answers() -> None:
    assert doubted((0, 0), *((84 * n, 0) for n in range(1, 7))) == [False] * 5 + [True] * 2
    assert doubted((0, 0), (84, 0), *[(84, 0)] * 4) == [False] * 5 + [True]


def test_session_is_not_doubted_for_keepalives_nor_for_data_that_are_answered() -> None:
    assert not any(doubted(*((32 * n, 0) for n in range(30))))
    assert not any(doubted(*((840 * n, 32 * n) for n in range(30))))
    assert not any(doubted((0, 0), (840, 84), *[(840, 84)] * 9))


def test_answer_ends_the_doubt() -> None:
    readings = [(84 * n, 0) for n in range(7)]
    assert doubted(*readings, (600, 32), (600, 32))[-3:] == [True, False, False]


def test_peer_that_has_moved_is_searched_for_in_its_session_until_a_packet_comes() -> None:
    seen = peer(500, NOW, keepalive=25)
    state = upset(observe(Rotation(), seen, 0, NOW), seen, 0, NOW)
    found = {}
    for now in range(20):
        state = observe(state, seen, now, NOW)
        state, change = steer(state, seen, OTHERS[:2] if now > 9 else [], now, NOW, 25, b"")
        if change is not None:
            found[now] = change
            seen = replace(seen, keepalive=change.keepalive, endpoint=change.endpoint or seen.endpoint)
    assert found == {
        6: Steer(SEARCH_KEEPALIVE, at_once=True),
        10: Steer(SEARCH_KEEPALIVE, OTHERS[0], at_once=True),
        15: Steer(SEARCH_KEEPALIVE, OTHERS[1], at_once=True),
    }
    state = observe(state, replace(seen, rx_bytes=32), 20, NOW)
    assert steer(state, seen, OTHERS, 20, NOW, 25, b"") == (Rotation(500, 32), Steer(25))


def test_doubted_session_keeps_an_endpoint_that_its_peer_announces() -> None:
    seen = peer(500, NOW, keepalive=SEARCH_KEEPALIVE)
    state = upset(observe(Rotation(), seen, 0, NOW), seen, 0, NOW)
    assert steer(state, seen, [*OTHERS, ENDPOINT], 6, NOW, 25, b"") == (state, None)
    assert steer(state, seen, OTHERS, 6, NOW, 25, b"")[1] == Steer(SEARCH_KEEPALIVE, OTHERS[0], at_once=True)


def test_peer_without_a_session_is_searched_for_at_once_after_a_move() -> None:
    seen = peer(500, NOW - 1000)
    state = observe(Rotation(), seen, 0, NOW)
    assert steer(state, seen, OTHERS, 0, NOW, 25, b"")[1] == Steer(25)
    change = steer(upset(state, seen, 0, NOW), seen, OTHERS, 0, NOW, 25, b"")[1]
    assert change == Steer(SEARCH_KEEPALIVE, OTHERS[0], at_once=True)


# ---- the search ---------------------------------------------------------------------------------


def turns(
    seconds: int, candidates: list[Endpoint], state: Rotation | None = None, salt: bytes = b"one"
) -> list[tuple[int, Endpoint]]:
    """Return the second and the endpoint of each turn in a search for a peer that never answers."""
    state, found = state or Rotation(), []
    seen = peer()
    for now in range(seconds):
        state, change = steer(state, seen, candidates, now, NOW, 0, salt)
        if change is not None and change.endpoint is not None:
            assert change == Steer(SEARCH_KEEPALIVE, change.endpoint, at_once=True)
            found.append((now, change.endpoint))
        seen = replace(seen, keepalive=change.keepalive if change else seen.keepalive)
    return found


def test_the_first_round_takes_5_s_an_endpoint_in_the_order_of_its_announcement() -> None:
    assert turns(20, OTHERS) == list(zip((0, 5, 10, 15), OTHERS, strict=True))


def test_later_rounds_take_15_s_an_endpoint_in_another_order_on_each_node() -> None:
    found = turns(20 + 60 * 8, OTHERS)[4:]
    assert [second for second, _ in found] == list(range(20, 20 + 60 * 8, 15))
    rounds = [tuple(each for _, each in found[at : at + 4]) for at in range(0, len(found), 4)]
    assert {frozenset(each) for each in rounds} == {frozenset(OTHERS)}
    assert len(set(rounds)) > 1
    assert found != turns(20 + 60 * 8, OTHERS, salt=b"two")[4:]


def test_a_new_candidate_is_tried_at_once() -> None:
    state = Rotation()
    for now in range(100):
        state, _ = steer(state, peer(), OTHERS[1:], now, NOW, 0, b"one")
    state, change = steer(state, peer(), OTHERS, 100, NOW, 0, b"one")
    assert change is not None
    assert change.endpoint == OTHERS[0]
    assert state.search is not None
    assert (state.search.round, state.search.until) == (0, 105)


def test_a_search_without_candidates_only_keeps_alive() -> None:
    state, change = steer(Rotation(), peer(), [], 0, NOW, 0, b"")
    assert change == Steer(SEARCH_KEEPALIVE, at_once=True)
    assert steer(state, peer(keepalive=SEARCH_KEEPALIVE), [], 1, NOW, 0, b"")[1] is None


@pytest.mark.parametrize("keepalive", [0, 25])
def test_a_handshake_ends_the_search_wherever_it_came_from(keepalive: int) -> None:
    state, _ = steer(Rotation(), peer(), OTHERS, 0, NOW, keepalive, b"")
    met = peer(handshake=NOW, keepalive=SEARCH_KEEPALIVE)
    state, change = steer(state, met, OTHERS, 1, NOW, keepalive, b"")
    assert (state.search, change) == (None, Steer(keepalive))
    assert steer(state, replace(met, keepalive=keepalive), OTHERS, 2, NOW, keepalive, b"")[1] is None


def test_no_history_moves_the_endpoint_of_a_peer_with_a_session_or_of_an_idle_one() -> None:
    """Random readings, candidates and clocks: only a peer that is silent or was never met is moved."""
    dice = random.Random(40)
    moves = 0
    for _ in range(300):
        state, seen, now, wall = Rotation(), peer(), 0.0, NOW
        for _ in range(100):
            step = dice.choice([1.0, 5.0, 30.0, 200.0])
            now, wall = now + step, wall + step + dice.choice([0.0] * 9 + [-3600.0])
            if dice.random() < 0.1:
                seen = replace(seen, last_handshake=wall)
            seen = replace(seen, tx_bytes=seen.tx_bytes + dice.choice([0, 148]))
            seen = replace(seen, rx_bytes=seen.rx_bytes + dice.choice([0, 0, 148]))
            candidates = dice.sample(OTHERS, dice.randrange(5))
            state = observe(state, seen, now, wall)
            was_sought = state.search is not None
            state, change = steer(state, seen, candidates, now, wall, 0, b"")
            if change is None:
                continue
            seen = replace(seen, keepalive=change.keepalive)
            if change.endpoint is not None:
                moves += 1
                if abs(wall - seen.last_handshake) <= rotation.DEAD:
                    assert is_doubted(state, now)
                else:
                    assert state.is_silent or seen.last_handshake == 0.0 or was_sought
                assert change.endpoint in candidates
            assert (state.search is not None or is_doubted(state, now)) is (
                change.keepalive == SEARCH_KEEPALIVE
            )
    assert moves > 100


def test_an_idle_peer_keeps_its_endpoint_for_ever() -> None:
    state = Rotation()
    for now in range(0, 100_000, 30):
        seen = peer(500, handshake=NOW)
        state = observe(state, seen, now, NOW + now)
        state, change = steer(state, seen, OTHERS, now, NOW + now, 0, b"")
        assert change is None
