"""WireGuard's generic netlink messages: what a real kernel sent, cut, tampered with, and packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import Secret
from flanneld.network import genetlink
from flanneld.network.genetlink import SeenDevice, SeenPeer
from flanneld.network.rtnetlink.netlink import MalformedNetlink, attribute
from tests.unit.mutations import tampered_bytes

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "wireguard-dump.json").read_text())
#: The dump of a device that had a session with the first of its three peers. Its keys are no secrets.
DUMP = [bytes.fromhex(each) for each in _GOLDEN["device"]]
FAMILY = bytes.fromhex(_GOLDEN["family"])
PSK = Secret(bytes(range(2, 34)))
NETS = (ip_network("10.5.2.0/24"), ip_network("fd00:5:0:2::/64"))


def decode(messages: Sequence[bytes]) -> SeenDevice:
    return genetlink.decode((data, 0, len(data)) for data in messages)


def test_what_a_real_kernel_sent_is_understood() -> None:
    device = decode(DUMP)
    assert (device.name, device.listen_port, device.fwmark) == ("flannel-wg", 51820, 0)
    assert device.private_key is not None
    assert device.private_key.value[1:31] == bytes(range(1, 31))
    assert device.public_key is not None
    assert len(device.public_key) == 32
    alive, other, bare = device.peers
    assert (alive.endpoint, alive.keepalive) == ((ip_address("192.0.2.2"), 51820), 25)
    assert (alive.preshared_key, alive.allowed_ips) == (PSK, NETS)
    assert alive.last_handshake > 1.7e9
    assert min(alive.rx_bytes, alive.tx_bytes) > 0
    assert (other.endpoint, other.last_handshake) == ((ip_address("fd77::9"), 51821), 0.0)
    assert bare == SeenPeer(bytes(31) + b"\x02")


def test_the_number_of_the_family_is_read() -> None:
    assert genetlink.family_id(FAMILY, 0, len(FAMILY)) == 21


@given(tampered_bytes([FAMILY]))
def test_no_tampered_answer_about_the_family_is_more_than_malformed(data: bytes) -> None:
    with suppress(MalformedNetlink):
        assert 0 <= genetlink.family_id(data, 0, len(data)) < 1 << 16


def test_a_device_without_a_key_has_none() -> None:
    body = attribute(1, b"\5\0\0\0") + attribute(2, b"wg\0") + attribute(6, b"\0\0") + attribute(7, bytes(4))
    assert decode([bytes(4) + body]) == SeenDevice(5, "wg", 0, 0, None, None, ())


def rest_of(public_key: bytes, subnet: str) -> bytes:
    """A message of a dump that goes on with a peer's allowed IPs."""
    (body, _), *_ = genetlink.set_peers("flannel-wg", [genetlink.allow(public_key, [ip_network(subnet)])])
    return body


def test_a_peer_that_takes_several_messages_is_one() -> None:
    device = decode(DUMP)
    bare = device.peers[-1].public_key
    longer = decode([*DUMP, rest_of(bare, "10.5.3.0/24"), rest_of(bare, "10.5.4.0/24")])
    assert longer.peers[:-1] == device.peers[:-1]
    assert longer.peers[-1].allowed_ips == (ip_network("10.5.3.0/24"), ip_network("10.5.4.0/24"))
    assert longer.peers[-1].preshared_key == device.peers[-1].preshared_key


def test_an_empty_dump_is_no_device() -> None:
    with pytest.raises(MalformedNetlink):
        decode([])


@given(st.integers(1, len(DUMP[0]) - 1))
def test_a_message_that_was_cut_off_is_no_dump(length: int) -> None:
    """But where a peer is lost only with the list as a whole: netlink itself tells the length of that."""
    with suppress(MalformedNetlink):
        assert decode([DUMP[0][:length]]).peers == ()


@given(tampered_bytes(DUMP))
def test_no_tampered_dump_is_more_than_malformed(data: bytes) -> None:
    with suppress(MalformedNetlink):
        device = decode([data])
        assert all(len(peer.public_key) == 32 for peer in device.peers)
    with suppress(MalformedNetlink):
        genetlink.family_id(data, 0, len(data))


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 300))
def test_peers_are_split_into_messages_and_none_is_lost(sizes: list[int], more: int) -> None:
    """Each message is a list of whole peers that a reader finds again, and stays below 16 KiB."""
    peers = [
        genetlink.allow(number.to_bytes(32), [ip_network((number << 8, 24))] * size)
        for number, size in enumerate([*sizes, *[1] * more])
    ]
    messages = list(genetlink.set_peers("flannel-wg", peers))
    assert sum(number for _, number in messages) == len(peers)
    assert all(len(body) < 16 * 1024 for body, _ in messages)
    assert len(messages) <= 1 + sum(map(len, peers)) // (11 * 1024), "no more messages than needed"
    if peers:
        found = decode([*DUMP, *(body for body, _ in messages)]).peers
        assert [int.from_bytes(peer.public_key) for peer in found[3:]] == [
            number for number in range(len(peers)) if number not in (1, 2)
        ]


def test_no_secret_is_shown() -> None:
    text = repr(decode(DUMP))
    assert "Secret(...)" in text
    assert repr(PSK.value)[2:-1] not in text
