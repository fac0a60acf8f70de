"""WireGuard devices over a stand-in for generic netlink: questions, writes and their words."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from ipaddress import ip_address, ip_network

import pytest

from flanneld.model import Secret
from flanneld.network import genetlink
from flanneld.network.genetlink import Endpoint, NoWireGuard, WireGuardDevices
from flanneld.network.rtnetlink.netlink import HEADER, DumpInterrupted, attributes
from tests.unit.network.test_wireguard import DUMP, FAMILY, NETS, PSK

KEY = bytes(range(32))
NUMBER = 21  # of the family, as the controller tells it
#: linux/wireguard.h
DEVICE_NAME, DEVICE_KEY, DEVICE_PORT, DEVICE_MARK = 2, 3, 6, 7
PEER_KEY, PEER_PSK, PEER_FLAGS, PEER_ENDPOINT, PEER_KEEPALIVE, PEER_IPS = 1, 2, 3, 4, 5, 9
REMOVE_ME, UPDATE_ONLY = struct.pack("=I", 1), struct.pack("=I", 4)


class FakeSocket:
    """Stands in for the netlink socket: one device, interruptions and refusals."""

    def __init__(self) -> None:
        self.interruptions = 0
        self.refusal = 0
        self.refused: dict[int, int] = {}
        self.written: list[tuple[int, int, bytes]] = []
        self.closed = 0

    def __call__(self, *, protocol: int) -> FakeSocket:
        assert protocol == 16  # NETLINK_GENERIC
        return self

    def close(self) -> None:
        self.closed += 1

    def _refuse(self) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        self._refuse()
        assert kind == 16  # GENL_ID_CTRL
        assert body[0] == 3  # CTRL_CMD_GETFAMILY
        assert attributes(body, 4, len(body)) == {2: b"wireguard\0"}
        return FAMILY, 0, len(FAMILY)

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        self._refuse()
        assert kind == NUMBER
        assert (body[:2], attributes(body, 4, len(body))) == (b"\0\1", {DEVICE_NAME: b"flannel-wg\0"})
        yield from ((data, 0, len(data)) for data in DUMP)
        if self.interruptions:
            self.interruptions -= 1
            raise DumpInterrupted(errno.EINTR, "interrupted")

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        for item in batch:
            _, kind, flags, number, _ = HEADER.unpack_from(item)
            self.written.append((kind, flags, item[HEADER.size :]))
            yield [(number, self.refused[number])] if number in self.refused else []


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    found = FakeSocket()
    monkeypatch.setattr(genetlink, "NetlinkSocket", found)
    return found


@pytest.mark.parametrize(("interruptions", "is_read"), [(0, True), (4, True), (5, False)])
def test_device_that_changes_meanwhile_is_read_again(
    interruptions: int, is_read: bool, kernel: FakeSocket
) -> None:
    devices = WireGuardDevices()
    kernel.interruptions = interruptions
    if is_read:
        found = devices.read("flannel-wg")
        assert found is not None
        assert (found.name, len(found.peers)) == ("flannel-wg", 3)
    else:
        with pytest.raises(DumpInterrupted, match="the peers of flannel-wg keep changing"):
            devices.read("flannel-wg")


def test_device_that_is_missing_is_told_from_one_that_cannot_be_read(kernel: FakeSocket) -> None:
    devices = WireGuardDevices()
    for code in (errno.ENODEV, errno.EOPNOTSUPP):
        kernel.refusal = code
        assert devices.read("flannel-wg") is None
    kernel.refusal = errno.EPERM
    with pytest.raises(PermissionError):
        devices.read("flannel-wg")


def test_refused_bodies_are_told_by_their_positions(kernel: FakeSocket) -> None:
    devices = WireGuardDevices()
    kernel.refused = {1: errno.EINVAL, 2: errno.EPERM}
    assert devices.write([b"one", b"two", b"six"]) == kernel.refused
    assert kernel.written == [(NUMBER, 1, body) for body in (b"one", b"two", b"six")]
    devices.close()
    assert kernel.closed == 1


@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOENT, "load it: modprobe wireguard"), (errno.EPERM, "not permitted")]
)
def test_kernel_without_wireguard_is_told_with_a_remedy(code: int, text: str, kernel: FakeSocket) -> None:
    kernel.refusal = code
    with pytest.raises(OSError, match=text) as refusal:
        WireGuardDevices()
    assert isinstance(refusal.value, NoWireGuard) == (code == errno.ENOENT)
    assert kernel.closed == 1


# ---- words ---------------------------------------------------------------------------------------


def nests_in(packed: bytes) -> list[dict[int, bytes]]:
    """Return the attributes of each peer, or of each allowed IP."""
    found = []
    while packed:
        length = int.from_bytes(packed[:2], "little")
        found.append(attributes(packed, 4, length))
        packed = packed[(length + 3) & ~3 :]
    return found


def test_device_is_set_with_its_key_and_port_and_without_a_mark() -> None:
    body = genetlink.set_device("flannel-wg", Secret(KEY), 51820)
    assert body[:2] == b"\1\1"  # WG_CMD_SET_DEVICE, version
    assert attributes(body, 4, len(body)) == {
        DEVICE_NAME: b"flannel-wg\0",
        DEVICE_KEY: KEY,
        DEVICE_PORT: struct.pack("=H", 51820),
        DEVICE_MARK: bytes(4),
    }


V4 = b"\x02\0" + (51820).to_bytes(2) + ip_address("192.0.2.2").packed + bytes(8)
V6 = b"\x0a\0" + (51821).to_bytes(2) + bytes(4) + ip_address("fd77::9").packed + bytes(4)


@pytest.mark.parametrize(
    ("endpoint", "packed"),
    [
        ((ip_address("192.0.2.2"), 51820), V4),
        ((ip_address("fd77::9"), 51821), V6),
        (None, None),
    ],
)
def test_peer_is_put_with_all_that_is_known_of_it(endpoint: Endpoint | None, packed: bytes | None) -> None:
    (peer,) = nests_in(genetlink.put_peer(KEY, PSK, 25, NETS, endpoint))
    ips = peer.pop(PEER_IPS)
    assert peer == {
        PEER_KEY: KEY,
        PEER_PSK: PSK.value,
        PEER_KEEPALIVE: b"\x19\0",
        **({PEER_ENDPOINT: packed} if packed else {}),
    }
    assert nests_in(ips) == [
        {1: b"\x02\0", 2: NETS[0].network_address.packed, 3: b"\x18"},
        {1: b"\x0a\0", 2: NETS[1].network_address.packed, 3: b"\x40"},
    ]
    (bare,) = nests_in(genetlink.put_peer(KEY, PSK, 0, (), endpoint))
    assert PEER_IPS not in bare


@pytest.mark.parametrize(("at_once", "steps"), [(False, [b"\x19\0"]), (True, [b"\0\0", b"\x19\0"])])
def test_peer_is_steered_without_being_made(at_once: bool, steps: list[bytes]) -> None:
    found = nests_in(genetlink.steer_peer(KEY, 25, None, at_once=at_once))
    assert found == [{PEER_KEY: KEY, PEER_FLAGS: UPDATE_ONLY, PEER_KEEPALIVE: step} for step in steps]
    elsewhere = (ip_address("192.0.2.2"), 51820)
    for each in nests_in(genetlink.steer_peer(KEY, 25, elsewhere, at_once=at_once)):
        assert each[PEER_ENDPOINT] == V4


def test_peer_and_its_allowed_ips_are_removed() -> None:
    gone = {PEER_KEY: KEY, PEER_FLAGS: REMOVE_ME}
    assert nests_in(genetlink.drop_peer(KEY)) == [gone]
    first, last = nests_in(genetlink.take_away(ip_network("10.5.2.0/24"), KEY))
    assert last == gone
    assert first.keys() == {PEER_KEY, PEER_IPS}
    (more,) = nests_in(genetlink.allow(KEY, NETS))
    assert (more[PEER_FLAGS], len(nests_in(more[PEER_IPS]))) == (UPDATE_ONLY, 2)
