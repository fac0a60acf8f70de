"""The table of keys, peers and allowed IPs, beside a kernel that does what linux/wireguard.h says."""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Iterator, Sequence
from ipaddress import ip_address, ip_network

import pytest

from flanneld.backends.wireguard import table as table_module
from flanneld.backends.wireguard.keys import AllowedIp, DeviceKey, WgPeer
from flanneld.backends.wireguard.mesh import Mesh, name_of
from flanneld.backends.wireguard.rotation import SEARCH_KEEPALIVE
from flanneld.backends.wireguard.table import WireGuardTable
from flanneld.model import Family, IPNetwork, Secret
from flanneld.network.genetlink import Endpoint, SeenDevice, SeenPeer
from flanneld.network.rtnetlink.messages import address_of, network_of
from flanneld.runtime import clock
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Scope

DEVICE = "wg0"
#: Time at which all begins, in seconds since 1970.
BEGIN = 1e9
ONE, OTHER = bytes([1]) * 32, bytes([2]) * 32
PSK, KEY = Secret(b"p" * 32), DeviceKey(DEVICE, Secret(b"k" * 32), b"K" * 32, 51820)
FIRST, SECOND, SIX = ip_network("10.5.1.0/24"), ip_network("10.5.2.0/24"), ip_network("fd05:1::/64")
HOME: Endpoint = (ip_address("192.0.2.1"), 51820)
AWAY: Endpoint = (ip_address("2001:db8::1"), 4711)
MESH_PORT: dict[Family, int] = {4: 51820}


def peer(
    public_key: bytes = ONE, endpoint: Endpoint | None = HOME, keepalive: int = 25, psk: Secret = PSK
) -> WgPeer:
    address, port = endpoint or (None, 0)
    return WgPeer(DEVICE, public_key, address, port, keepalive, psk)


def inner(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each attribute's type, without the mark of those with others inside, and content."""
    while data:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


def endpoint_of(raw: bytes) -> Endpoint:
    """Parse a struct sockaddr_in or sockaddr_in6 of exactly its size."""
    (family,), (port,) = struct.unpack_from("=H", raw), struct.unpack_from("!H", raw, 2)
    assert {2: 16, 10: 28}[family] == len(raw)
    if family == 10:
        assert raw[4:8] == raw[24:] == bytes(4)  # flow and scope
    return address_of(raw[4:8] if family == 2 else raw[8:24]), port


class FakeKernel:
    """One device. It refuses messages by their number, and counts what it is sent."""

    def __init__(self, name: str = DEVICE) -> None:
        self.name = name
        self.index = 5
        self.fails = self.is_closed = False
        self.is_there = True
        self.key: tuple[Secret, int] | None = None
        self.peers: dict[bytes, SeenPeer] = {}
        self.refused: dict[int, int] = {}
        self.pinged: list[bytes] = []  # peers whose keepalive went from 0 to another
        self.messages = self.reads = 0

    def read(self, name: str) -> SeenDevice | None:
        assert name == self.name
        self.reads += 1
        if self.fails:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        if not self.is_there:
            return None
        secret, port = self.key or (None, 0)
        public = KEY.public_key if self.key else None
        return SeenDevice(self.index, name, port, 0, secret, public, tuple(self.peers.values()))

    def write(self, bodies: Sequence[bytes]) -> dict[int, int]:
        for number, body in enumerate(bodies):
            self.messages += 1
            if number not in self.refused:
                self._set(body)
        return self.refused

    def close(self) -> None:
        self.is_closed = True

    def _set(self, body: bytes) -> None:
        assert body[:4] == b"\1\1\0\0"  # WG_CMD_SET_DEVICE, version 1
        given = dict(inner(body[4:]))
        assert given[2] == self.name.encode() + b"\0"
        if 3 in given:
            self.key = Secret(given[3]), struct.unpack("=H", given[6])[0]
            assert given[7] == bytes(4)
        for _, raw in inner(given.get(8, b"")):
            self._set_peer(dict(inner(raw)))

    def _set_peer(self, given: dict[int, bytes]) -> None:
        public_key, (flags,) = given[1], struct.unpack("=I", given.get(3, bytes(4)))
        assert len(public_key) == 32
        known = self.peers.get(public_key)
        if flags & 1:
            self.peers.pop(public_key, None)
            return
        if known is None:
            if flags & 4:
                return
            known = SeenPeer(public_key)
        if 5 in given:
            (keepalive,) = struct.unpack("=H", given[5])
            if keepalive and not known.keepalive:
                self.pinged.append(public_key)
        else:
            keepalive = known.keepalive
        networks = tuple(self._network(dict(inner(raw))) for _, raw in inner(given.get(9, b"")))
        for other, each in self.peers.items():
            self.peers[other] = changed(
                each, allowed_ips=tuple(net for net in each.allowed_ips if net not in networks)
            )
        known = self.peers.get(public_key, known)
        self.peers[public_key] = changed(
            known,
            preshared_key=Secret(given[2]) if 2 in given else known.preshared_key,
            endpoint=endpoint_of(given[4]) if 4 in given else known.endpoint,
            keepalive=keepalive,
            allowed_ips=known.allowed_ips + networks,
        )

    @staticmethod
    def _network(given: dict[int, bytes]) -> IPNetwork:
        (family,) = struct.unpack("=H", given[1])
        assert len(given[2]) == {2: 4, 10: 16}[family]
        return network_of(given[2], given[3][0])


def changed(seen: SeenPeer, **changes: object) -> SeenPeer:
    return SeenPeer(**{name: getattr(seen, name) for name in seen.__struct_fields__} | changes)


class Time(clock.Clock):
    time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return BEGIN + self.time


@pytest.fixture
def time() -> Iterator[Time]:
    with clock.replaced(found := Time()):
        yield found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    found = FakeKernel()
    monkeypatch.setattr(table_module, "WireGuardDevices", lambda: found)
    monkeypatch.setattr(table_module, "index_of", lambda _: found.index if found.is_there else 0)
    return found


@pytest.fixture
def table(kernel: FakeKernel, time: Time) -> WireGuardTable:
    del kernel, time
    return WireGuardTable([DEVICE])


def read(table: WireGuardTable, *desired: Resource) -> list[Resource]:
    return [each.resource for each in table.read(Scope({each.key: each for each in desired}))]


def allowed(net: IPNetwork, public_key: bytes = ONE) -> AllowedIp:
    return AllowedIp(DEVICE, net, public_key)


def put(table: WireGuardTable, *wanted: Resource) -> list[Resource]:
    report = table.put([Put(each) for each in wanted])
    assert not report.failed
    return report.made


@pytest.mark.parametrize("endpoint", [HOME, AWAY, None])
def test_what_is_put_is_read_back_and_what_is_dropped_is_gone(
    kernel: FakeKernel, table: WireGuardTable, endpoint: Endpoint | None
) -> None:
    resources: list[Resource] = [KEY, peer(endpoint=endpoint), allowed(FIRST), allowed(SIX)]
    assert put(table, *resources) == resources
    assert read(table) == resources
    report = table.drop(resources)
    assert sorted(map(str, report.removed)) == sorted(map(str, resources))
    assert kernel.peers == {}
    assert kernel.key  # it goes with its device


def test_single_allowed_ip_is_dropped_and_its_peer_stays(table: WireGuardTable) -> None:
    put(table, peer(), allowed(FIRST), allowed(SECOND), peer(OTHER, AWAY), allowed(SIX, OTHER))
    assert table.drop([allowed(FIRST)]).removed == [allowed(FIRST)]
    rest: list[Resource] = [peer(), allowed(SECOND), peer(OTHER, AWAY), allowed(SIX, OTHER)]
    assert read(table) == rest


def test_allowed_ip_moves_to_another_peer_and_makes_none(kernel: FakeKernel, table: WireGuardTable) -> None:
    put(table, peer(), allowed(FIRST), peer(OTHER))
    put(table, allowed(FIRST, OTHER))
    assert kernel.peers[ONE].allowed_ips == ()
    assert kernel.peers[OTHER].allowed_ips == (FIRST,)
    put(table, allowed(SECOND, b"3" * 32))
    assert kernel.peers.keys() == {ONE, OTHER}


@pytest.mark.parametrize(
    "wanted",
    [peer(keepalive=24), peer(keepalive=26), peer(psk=Secret(b"a" * 32)), peer(psk=Secret(b"z" * 32))],
)
def test_peer_with_another_key_or_interval_is_not_the_wanted_one(
    table: WireGuardTable, wanted: WgPeer
) -> None:
    put(table, peer())
    assert read(table, wanted) == [peer()]


@pytest.mark.parametrize("psk", [Secret(b"a" * 32), Secret(b"z" * 32)])
def test_in_a_mesh_only_the_preshared_key_makes_a_peer_another_one(
    kernel: FakeKernel, time: Time, psk: Secret
) -> None:
    """Its endpoint and interval follow the search for it."""
    del kernel, time
    table = WireGuardTable([DEVICE], mesh=Mesh(bytes(32), MESH_PORT, 0))
    put(table, peer())
    wanted = peer(endpoint=AWAY, keepalive=7)
    assert read(table, wanted) == [wanted]
    assert read(table, peer(psk=psk)) == [peer()]


def test_endpoint_of_a_live_peer_may_roam_and_a_dead_one_gets_its_leases_again(
    kernel: FakeKernel, table: WireGuardTable, time: Time
) -> None:
    put(table, peer())
    kernel.peers[ONE] = changed(kernel.peers[ONE], endpoint=AWAY, last_handshake=time.wall())
    assert read(table, peer()) == [peer()]
    moved = peer(endpoint=(ip_address("192.0.2.9"), 1))
    assert read(table, moved) == [peer(endpoint=AWAY)]  # the lease has changed meanwhile
    table.put([Put(moved, was=peer(endpoint=AWAY))])
    assert kernel.peers[ONE].endpoint == (ip_address("192.0.2.9"), 1)
    # A change of the interval alone leaves a roamed endpoint.
    kernel.peers[ONE] = changed(kernel.peers[ONE], endpoint=AWAY)
    slower = WgPeer(DEVICE, ONE, moved.endpoint, moved.port, 30, PSK)
    table.put([Put(slower, was=moved)])
    assert (kernel.peers[ONE].endpoint, kernel.peers[ONE].keepalive) == (AWAY, 30)
    time.time += 181
    assert read(table, slower) == [changed_peer(slower, AWAY)]
    table.put([Put(slower, was=changed_peer(slower, AWAY))])
    assert kernel.peers[ONE].endpoint == (ip_address("192.0.2.9"), 1)


def test_roamed_peer_of_an_earlier_run_stays_until_its_lease_changes(
    kernel: FakeKernel, table: WireGuardTable, time: Time
) -> None:
    put(WireGuardTable([DEVICE]), peer())
    kernel.peers[ONE] = changed(kernel.peers[ONE], endpoint=AWAY, last_handshake=time.wall())
    assert read(table, peer()) == [peer()]
    assert read(table, peer(endpoint=(ip_address("192.0.2.9"), 1))) == [peer(endpoint=AWAY)]


def changed_peer(each: WgPeer, endpoint: Endpoint) -> WgPeer:
    return WgPeer(each.device, each.public_key, *endpoint, each.keepalive, each.preshared_key)


def test_peer_that_was_dropped_gets_its_endpoint_again(kernel: FakeKernel, table: WireGuardTable) -> None:
    put(table, peer())
    table.drop([peer()])
    kernel.peers[ONE] = SeenPeer(ONE, PSK, AWAY, 25)  # as another program makes it
    table.put([Put(peer(), was=peer(endpoint=AWAY))])
    assert kernel.peers[ONE].endpoint == HOME


def test_refusal_is_told_of_what_was_in_its_message(kernel: FakeKernel, table: WireGuardTable) -> None:
    """A message holds 12 KiB of peers: these take two."""
    many: list[Resource] = [peer(number.to_bytes(32)) for number in range(150)]
    kernel.refused = {1: errno.ENOMEM}
    report = table.put([Put(each) for each in many])
    assert kernel.messages == 2
    assert len(kernel.peers) == len(report.made) > 100
    assert report.made + [failure.resource for failure in report.failed] == many
    assert {str(failure).rpartition(": ")[2] for failure in report.failed} == {"Cannot allocate memory"}
    kernel.refused = {0: errno.EADDRINUSE}
    (failure,) = table.put([Put(KEY)]).failed
    assert "has UDP port 51820" in failure.reason
    assert failure.remedy == "stop what has the port, or give this node a -wireguard-port"


def test_sessions_tell_of_each_subnet(kernel: FakeKernel, table: WireGuardTable, time: Time) -> None:
    put(table, peer(), allowed(FIRST), allowed(SIX), peer(OTHER, None), allowed(SECOND, OTHER))
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall() - 5, rx_bytes=7, tx_bytes=8)
    read(table)
    told = {each.subnet: each for each in table.sessions()}
    assert told.keys() == {FIRST, SIX, SECOND}
    one, other = told[SIX], told[SECOND]
    assert (one.is_established, one.handshake, one.rx_bytes, one.tx_bytes, one.endpoint) == (
        True, time.wall() - 5, 7, 8, "192.0.2.1:51820"
    )  # fmt: skip
    assert (other.is_established, other.handshake, other.endpoint, other.is_silent) == (
        False, None, "", False
    )  # fmt: skip


def test_silent_peer_is_named_once_and_so_is_the_end_of_its_silence(
    kernel: FakeKernel, table: WireGuardTable, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(table, peer(), allowed(FIRST))
    for seconds in range(0, 300, 30):
        time.time = 2000.0 + seconds
        kernel.peers[ONE] = changed(kernel.peers[ONE], tx_bytes=148 * seconds)
        read(table)
    (silent,) = caplog.messages
    assert silent.startswith(f"No handshake via {DEVICE}, though packets are sent there: peer AQEBAQEB")
    assert [each.is_silent for each in table.sessions()] == [True]
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall())
    for _ in range(2):
        read(table)
    assert caplog.messages[1:] == [f"Handshakes via {DEVICE} succeed again"]


def test_recreated_device_is_noticed_within_a_second(
    kernel: FakeKernel, table: WireGuardTable, time: Time
) -> None:
    read(table)
    assert not table.look()
    assert table.next_look == time.time + 1
    kernel.index = 6
    assert table.look()
    read(table)
    assert not table.look()
    kernel.is_there = False
    assert table.look()
    assert read(table) == []
    assert not table.look()


def test_peer_of_a_mesh_is_called_at_each_of_its_endpoints(kernel: FakeKernel, time: Time) -> None:
    found = Mesh(bytes(32), MESH_PORT, 25)
    found.published = {name_of(ONE): (AWAY,)}
    table = WireGuardTable([DEVICE], mesh=found)
    put(table, peer(), allowed(FIRST))
    kernel.pinged.clear()
    tried = []
    for second in range(12):
        time.time = 2000.0 + second
        table.look()
        tried.append(kernel.peers[ONE].endpoint)
    assert tried[0] == AWAY
    assert tried[5] == HOME  # of the lease
    assert kernel.pinged == [ONE] * len(kernel.pinged)
    assert len(kernel.pinged) >= 2
    assert found.searched == {name_of(ONE)}
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall())
    time.time += 6
    table.look()
    assert not found.searched
    assert kernel.peers[ONE].keepalive == 25
    # A node that has moved greets each peer for a minute.
    pinged, found.greets = len(kernel.pinged), True
    table.look()
    assert not found.greets
    assert len(kernel.pinged) == pinged + 1
    assert kernel.peers[ONE].keepalive == SEARCH_KEEPALIVE
    time.time += 66
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall())
    table.look()
    assert kernel.peers[ONE].keepalive == 25


def test_peer_of_a_mesh_whose_lease_has_another_endpoint_is_searched_for_in_its_session(
    kernel: FakeKernel, time: Time
) -> None:
    found = Mesh(bytes(32), MESH_PORT, 0)
    table = WireGuardTable([DEVICE], mesh=found)
    before = peer()
    put(table, before, allowed(FIRST))
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall(), endpoint=HOME)
    table.look()
    moved = WgPeer(DEVICE, ONE, ip_address("192.168.7.7"), 51820)
    table.put([Put(moved, before)])
    for _ in range(5):
        time.time += 1
        table.look()
        assert not found.searched
    for _ in range(7):
        time.time += 1
        table.look()
    assert found.searched == {name_of(ONE)}
    assert kernel.peers[ONE].endpoint == HOME
    found.published = {name_of(ONE): (AWAY,)}
    time.time += 5
    table.look()
    assert kernel.peers[ONE].endpoint == AWAY
    kernel.peers[ONE] = changed(kernel.peers[ONE], rx_bytes=32)
    time.time += 5
    table.look()
    assert not found.searched


def test_mesh_without_a_search_is_read_every_5_s(kernel: FakeKernel, time: Time) -> None:
    table = WireGuardTable([DEVICE], mesh=Mesh(bytes(32), MESH_PORT, 0))
    for second in range(11):
        time.time = 2000.0 + second
        table.look()
    assert kernel.reads == 3


def test_greeting_that_could_not_be_sent_is_sent_later(kernel: FakeKernel, time: Time) -> None:
    found = Mesh(bytes(32), MESH_PORT, 25)
    table = WireGuardTable([DEVICE], mesh=found)
    put(table, peer(), allowed(FIRST))
    kernel.peers[ONE] = changed(kernel.peers[ONE], last_handshake=time.wall())
    found.greets = kernel.fails = True
    table.look()
    assert found.greets
    kernel.fails = False
    time.time += 1
    table.look()
    assert not found.greets
    assert kernel.peers[ONE].keepalive == SEARCH_KEEPALIVE


class TwoDevices:
    """A kernel with a device for each family."""

    def __init__(self) -> None:
        self.devices = {name: FakeKernel(name) for name in (DEVICE, "wg6")}

    def read(self, name: str) -> SeenDevice | None:
        return self.devices[name].read(name)

    def write(self, bodies: Sequence[bytes]) -> dict[int, int]:
        for body in bodies:
            name = dict(inner(body[4:]))[2].rstrip(b"\0").decode()
            self.devices[name].write([body])
        return {}


def test_of_two_devices_each_tries_the_endpoints_of_its_family(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    kernel = TwoDevices()
    monkeypatch.setattr(table_module, "WireGuardDevices", lambda: kernel)
    found = Mesh(bytes(32), MESH_PORT, 0)
    elsewhere: Endpoint = (ip_address("192.0.2.7"), 1)
    found.published = {name_of(ONE): (AWAY, elsewhere)}
    table = WireGuardTable([DEVICE, "wg6"], mesh=found)
    put(table, *(WgPeer(name, ONE, None, 51820, 0, PSK) for name in kernel.devices))
    tried: dict[str, set[Endpoint | None]] = {name: set() for name in kernel.devices}
    for _ in range(30):
        time.time += 1
        table.look()
        for name, device in kernel.devices.items():
            tried[name].add(device.peers[ONE].endpoint)
    assert tried == {DEVICE: {elsewhere}, "wg6": {AWAY}}


def test_socket_to_the_kernel_is_closed_at_the_end_and_peers_stay(
    kernel: FakeKernel, table: WireGuardTable
) -> None:
    table.close(remove=True)
    assert not kernel.is_closed  # it was never opened
    put(table, peer())
    table.close(remove=True)
    assert kernel.is_closed
    assert kernel.peers.keys() == {ONE}
