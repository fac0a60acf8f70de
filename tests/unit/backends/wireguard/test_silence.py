"""Which peers of WireGuard are named because they do not answer."""

from __future__ import annotations

from ipaddress import ip_address

from flanneld.backends.wireguard import table
from flanneld.backends.wireguard.table import SilenceDetector
from flanneld.network.genetlink import Endpoint, SeenDevice, SeenPeer

NOW = 1e9
ENDPOINT: Endpoint = (ip_address("192.0.2.6"), 51820)


def device(*peers: SeenPeer, name: str = "flannel-wg") -> SeenDevice:
    return SeenDevice(1, name, 51820, 0, None, None, peers)


def peer(sent: int, handshake: float = 0.0, number: int = 1) -> SeenPeer:
    return SeenPeer(bytes([number]) * 32, endpoint=ENDPOINT, last_handshake=handshake, tx_bytes=sent)


def silent(*sent: int, handshake: float = 0.0) -> list[bool]:
    """Whether a peer counts as silent, reading by reading, each with what was sent by then."""
    watch = SilenceDetector()
    return [bool(watch.look(device(peer(each, handshake)), NOW)) for each in sent]


def test_a_peer_that_is_called_again_and_again_is_silent() -> None:
    assert silent(0, 148, 296, 444, 592) == [False, False, False, True, True]


def test_a_peer_to_which_nobody_speaks_is_not_silent() -> None:
    assert silent(0, 0, 0, 0, 0) == [False] * 5
    assert silent(500, 500, 500, 500, 500) == [False] * 5


def test_a_pause_between_two_calls_changes_nothing() -> None:
    assert silent(0, 148, 148, 296, 296, 444) == [False] * 5 + [True]


def test_a_peer_with_a_session_is_not_silent() -> None:
    assert silent(0, 148, 296, 444, 592, handshake=NOW - 100) == [False] * 5


def test_a_handshake_ends_the_silence() -> None:
    watch = SilenceDetector()
    found = [
        bool(watch.look(device(peer(sent, handshake)), NOW))
        for sent, handshake in [(0, 0.0), (148, 0.0), (296, 0.0), (444, 0.0), (900, NOW), (999, 0.0)]
    ]
    assert found == [False, False, False, True, False, False]


def test_a_clock_that_was_set_back_is_noticed_once_a_session_would_have_been_renewed() -> None:
    """The last handshake is in the future then, whether there is a session or not."""
    sent = range(0, 148 * 8, 148)
    found = silent(*sent, handshake=NOW + 3600)
    assert found == [False] * 6 + [True, True]
    watch = SilenceDetector()
    stamps = [NOW + 3600] * 4 + [NOW] * 4
    assert not any(
        watch.look(device(peer(each, stamp)), NOW) for each, stamp in zip(sent, stamps, strict=True)
    )


def test_devices_and_peers_are_told_apart() -> None:
    watch = SilenceDetector()
    for sent in (0, 148, 296):
        watch.look(device(peer(sent), peer(0, number=2)), NOW)
        watch.look(device(peer(0), name="flannel-wg-v6"), NOW)
    assert watch.look(device(peer(444), peer(148, number=2)), NOW) == [peer(444)]
    assert watch.look(device(peer(148), name="flannel-wg-v6"), NOW) == []


def test_a_peer_that_is_gone_is_forgotten() -> None:
    watch = SilenceDetector()
    for sent in (0, 148, 296):
        watch.look(device(peer(sent)), NOW)
    watch.look(device(), NOW)
    assert watch.look(device(peer(444)), NOW) == []


def test_only_the_first_few_are_named() -> None:
    text = table.sentence("flannel-wg", [peer(1, number=number) for number in range(7)])
    assert text.count("192.0.2.6:51820") == 5
    assert " and 2 more; " in text
    lone = table.sentence(
        "flannel-wg", [SeenPeer(bytes(32)), SeenPeer(bytes(32), endpoint=(ip_address("::1"), 5))]
    )
    assert "at no endpoint, " in lone
    assert "at [::1]:5; " in lone
