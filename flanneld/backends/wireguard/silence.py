"""Detection of peers that never answer: a wrong key or port, or a firewall.

WireGuard does not report them. A failed handshake looks like a peer that is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence

from flanneld.backends.wireguard import keys
from flanneld.network.genetlink.wireguard import SeenDevice, SeenPeer

#: Seconds of a session without a new handshake (WireGuard's REJECT_AFTER_TIME).
DEAD = 180.0
#: Consecutive reads with packets to a peer without a session, before the peer is reported.
_READINGS = 3
#: The same if the last handshake is in the future, because the clock was set back. A live session makes a new
#: handshake within 120 s (REKEY_AFTER_TIME), which has the new time.
_READINGS_AFTER_SETBACK = 6
#: Peers named in one log line, at most.
_FEW = 5


class SilenceDetector:
    """Detector that compares each read of a device with the previous one."""

    def __init__(self) -> None:
        #: By device and public key: the bytes sent, and the reads since then without an answer.
        self._sent: dict[tuple[str, bytes], tuple[int, int]] = {}

    def look(self, device: SeenDevice, now: float) -> list[SeenPeer]:
        """Return the peers that were sent packets at several consecutive reads and have no session."""
        silent = []
        before, self._sent = (
            self._sent,
            {key: value for key, value in self._sent.items() if key[0] != device.name},
        )
        for peer in device.peers:
            key = (device.name, peer.public_key)
            sent, readings = before.get(key, (peer.tx_bytes, 0))
            is_called = peer.tx_bytes > sent and not is_alive(peer, now)
            is_quiet = peer.tx_bytes == sent and not is_alive(peer, now)
            readings = readings + 1 if is_called else readings if is_quiet else 0
            self._sent[key] = (peer.tx_bytes, readings)
            if readings >= (_READINGS_AFTER_SETBACK if peer.last_handshake > now else _READINGS):
                silent.append(peer)
        return silent


def is_alive(peer: SeenPeer, now: float) -> bool:
    """Return True if a peer has a session. A handshake far in the future means a clock set back."""
    return abs(now - peer.last_handshake) <= DEAD


def sentence(device: str, silent: Sequence[SeenPeer]) -> str:
    """Return one line about silent peers, with possible reasons."""
    names = ", ".join(
        f"{keys.text_of(peer.public_key)} at {where(peer) or 'no endpoint'}" for peer in silent[:_FEW]
    )
    more = f" and {len(silent) - _FEW} more" if len(silent) > _FEW else ""
    return (
        f"No handshake via {device}, though packets are sent there: peer {names}{more}; "
        "is their daemon up, their UDP port open, the PSK the same on both nodes, no clock set back?"
    )


def where(peer: SeenPeer) -> str:
    """Return a peer's current endpoint, address and port; empty if it has none."""
    if peer.endpoint is None:
        return ""
    address, port = peer.endpoint
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
