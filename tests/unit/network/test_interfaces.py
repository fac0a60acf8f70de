"""What ethtool's ioctl and other hosts say of an interface."""

from __future__ import annotations

import array
import socket

import pytest

from flanneld.network import interfaces

NAMES = [f"feature-{number}" for number in range(40)]
BIT = 1 << 3  # of feature-35, in the second block


@pytest.mark.parametrize(
    ("available", "requested", "active", "lacks"),
    [
        (BIT, BIT, BIT, False),
        (BIT, 0, 0, True),
        (BIT, BIT, 0, False),  # a VLAN whose device cannot do it
        (0, 0, 0, False),
        (BIT, 0, BIT, False),
    ],
)
def test_feature_is_lacking_only_where_it_was_switched_off(
    monkeypatch: pytest.MonkeyPatch, available: int, requested: int, active: int, lacks: bool
) -> None:
    def answer(_name: str, sent: list[int]) -> array.array[int]:
        if sent[0] == 0x37:
            sent[4] = len(NAMES)
        elif sent[0] == 0x1B:
            sent[3:] = array.array("I", b"".join(name.encode().ljust(32, b"\0") for name in NAMES))
        else:
            sent[2:] = [0, 0, 0, 0, available, requested, active, 0]
        return array.array("I", sent)

    monkeypatch.setattr(interfaces, "_words", answer)
    assert interfaces.lacks_feature("eth0", "feature-35") is lacks
    assert not interfaces.lacks_feature("eth0", "feature-34")
    assert not interfaces.lacks_feature("eth0", "unknown")


def test_other_links_are_not_heard_before_the_socket_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """packet(7): a socket with a protocol takes its packets of all interfaces until it is bound to one."""
    opened: list[tuple[int, ...]] = []

    def refuse(*arguments: int) -> socket.socket:
        opened.append(arguments)
        raise PermissionError

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(PermissionError):
        interfaces.holders("lo", [], 0.0)
    assert opened == [(socket.AF_PACKET, socket.SOCK_DGRAM, 0)]
