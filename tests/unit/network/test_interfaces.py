"""What ethtool's ioctl and other hosts say of an interface."""

from __future__ import annotations

import fcntl
import socket

import pytest

from flanneld.network import interfaces
from tests.unit.network.stand_ins import FakeEthtool


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


# ---- offloads and queues -------------------------------------------------------------------------

FEATURES = [f"feature-{number}" for number in range(40)]


@pytest.fixture
def ethtool(monkeypatch: pytest.MonkeyPatch) -> FakeEthtool:
    found = FakeEthtool(*FEATURES)
    monkeypatch.setattr(fcntl, "ioctl", found)
    return found


def test_checksums_of_sent_packets_are_left_to_hardware_until_the_cpu_has_to_compute_them(
    ethtool: FakeEthtool,
) -> None:
    assert interfaces.offloads_checksums("eth0") is True
    interfaces.compute_checksums("eth0")
    assert ethtool.checksums == 0
    assert interfaces.offloads_checksums("eth0") is False
    with pytest.raises(OSError, match="No such device"):
        interfaces.offloads_checksums("eth1")


@pytest.mark.parametrize("feature", ["feature-0", "feature-31", "feature-32", "feature-39"])
@pytest.mark.parametrize(
    ("state", "lacks"),
    [
        ((True, False, False), True),  # it was switched off
        ((True, True, True), False),
        ((True, True, False), False),  # the device below does not do it
        ((True, False, True), False),
        ((False, False, False), False),  # the device cannot do it
    ],
)
def test_feature_that_was_switched_off_is_told_from_one_that_cannot_be_had(
    feature: str, state: tuple[bool, bool, bool], lacks: bool, ethtool: FakeEthtool
) -> None:
    ethtool.states = dict.fromkeys(FEATURES, (True, lacks, lacks))
    ethtool.states[feature] = state
    assert interfaces.lacks_feature("eth0", feature) is lacks
    assert not interfaces.lacks_feature("eth0", "unknown")


@pytest.mark.usefixtures("ethtool")
def test_queues_are_those_in_use_and_those_that_may_be() -> None:
    assert interfaces.channels("eth0") == (4, 8)
