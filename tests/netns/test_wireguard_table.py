"""WireGuard's table on a real kernel: drift of each property, roaming, and packets between two nodes."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Network, ip_address, ip_network
from typing import Any

import pytest
from pyroute2 import WireGuard as Reader

from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import AllowedIp, DeviceKey, WgPeer
from flanneld.backends.wireguard.rotation import DEAD, GIVEN_UP
from flanneld.backends.wireguard.table import WireGuardTable
from flanneld.model import Secret
from flanneld.network.rtnetlink import devices as links
from flanneld.runtime import clock
from flanneld.state.desired import difference
from flanneld.state.resources import Key, Resource, WireGuard
from flanneld.state.table import Put, Report, Scope
from tests.lab.namespace import Namespace, batch, remove
from tests.lab.wait import wait_for

pytestmark = pytest.mark.needs_kernel("wireguard")

DEVICE = "flannel-wg"
PSK = Secret(bytes(range(100, 132)))
_numbers = itertools.count(1)


class Host:
    """A namespace with an uplink, a device, and a table that is driven by hand."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.namespace = Namespace(f"flw{os.getpid()}.{next(_numbers)}")
        self.private_key = keys.private_key(bytes([number]) * 32)
        self.public_key = keys.public_key(self.private_key)
        self.address = ip_address(f"192.0.2.{number}")
        self.subnet = ip_network(f"10.5.{number}.0/24")
        self.now = 0.0
        self.table = WireGuardTable([DEVICE], lambda: clock.wall() + self.now)
        self.wanted: dict[Key, Resource] = {}
        batch(f"netns add {self.namespace.name}")

    def make_device(self) -> None:
        with self.namespace.entered():
            links.put(WireGuard(DEVICE, 1420), None)
        self.namespace.ip(f"address add {self.subnet.network_address}/32 dev {DEVICE}")

    def want(self, *resources: Resource) -> None:
        self.wanted = {resource.key: resource for resource in resources}

    def key(self, **changes: Any) -> DeviceKey:
        known: dict[str, Any] = {"private_key": self.private_key, "public_key": self.public_key}
        known |= {"listen_port": 51820}
        return DeviceKey(DEVICE, **(known | changes))

    def as_peer(self, **changes: Any) -> WgPeer:
        return WgPeer(
            DEVICE, **({"public_key": self.public_key, "endpoint": self.address, "port": 51820} | changes)
        )

    def allowed(self, *nets: str) -> list[AllowedIp]:
        return [AllowedIp(DEVICE, ip_network(net), self.public_key) for net in nets or [str(self.subnet)]]

    def audit(self) -> tuple[list[Put], list[Resource]]:
        """Read the table and compare it."""
        with self.namespace.entered():
            return difference(self.wanted, self.table.read(Scope(self.wanted)))

    def repair(self) -> Report:
        """Read, put, drop: one pass of the loop."""
        puts, stale = self.audit()
        report = Report()
        with self.namespace.entered():
            if puts:
                report.add(self.table.put(puts))
            if stale:
                report.add(self.table.drop(stale))
        return report

    def seen(self) -> dict[str, Any]:
        """What another reader finds: port, and for each peer its endpoint, allowed IPs, keepalive and key."""
        with self.namespace.entered(), Reader() as reader:
            messages = reader.info(DEVICE)
        first = messages[0]
        peers = [each for message in messages for each in message.get_attr("WGDEVICE_A_PEERS") or ()]
        return {
            "port": first.get_attr("WGDEVICE_A_LISTEN_PORT"),
            "mark": first.get_attr("WGDEVICE_A_FWMARK"),
            "key": first.get_attr("WGDEVICE_A_PUBLIC_KEY").decode(),
            "peers": {each.get_attr("WGPEER_A_PUBLIC_KEY").decode(): _peer(each) for each in peers},
        }

    def seen_bytes(self, other: Host) -> int:
        """Return how much was sent to a peer."""
        with self.namespace.entered(), Reader() as reader:
            (peer,) = reader.info(DEVICE)[0].get_attr("WGDEVICE_A_PEERS")
        assert peer.get_attr("WGPEER_A_PUBLIC_KEY").decode() == text(other.public_key)
        sent: int = peer.get_attr("WGPEER_A_TX_BYTES")
        return sent


def _peer(found: Any) -> dict[str, Any]:
    endpoint = found.get_attr("WGPEER_A_ENDPOINT") or {}
    return {
        "endpoint": (endpoint.get("addr"), endpoint.get("port")),
        "allowed": sorted(each["addr"] for each in found.get_attr("WGPEER_A_ALLOWEDIPS") or ()),
        "keepalive": found.get_attr("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL"),
        "psk": found.get_attr("WGPEER_A_PRESHARED_KEY").decode(),
    }


def text(key: bytes) -> str:
    return b64encode(key).decode()


@pytest.fixture
def hosts() -> Iterator[Callable[[int], list[Host]]]:
    """Makes hosts on one link, which is a bridge of a namespace of its own."""
    made: list[Host] = []
    switch = Namespace(f"flw{os.getpid()}.{next(_numbers)}s")
    batch(f"netns add {switch.name}")
    switch.ip("link add br0 type bridge", "link set br0 up")

    def make(number: int) -> list[Host]:
        for each in range(1, number + 1):
            host = Host(each)
            made.append(host)
            host.namespace.ip(
                "link set lo up",
                f"link add eth0 type veth peer name h{each} netns {switch.name}",
                f"address add {host.address}/24 dev eth0",
                "link set eth0 up",
            )
            switch.ip(f"link set h{each} master br0 up")
            host.make_device()
        return made

    try:
        yield make
    finally:
        for host in made:
            host.table.close(remove=False)
        remove([switch, *(host.namespace for host in made)])


@pytest.fixture
def host(hosts: Callable[[int], list[Host]]) -> Host:
    """A host with a key and two peers; the second has an allowed IP of each family."""
    (host,) = hosts(1)
    host.want(host.key(), *FIRST, *SECOND)
    host.repair()
    return host


def peer_of(number: int, *nets: str, **changes: Any) -> list[Resource]:
    """Return a peer that nobody is, and its allowed IPs."""
    public_key = keys.public_key(keys.private_key(bytes([100 + number]) * 32))
    address = ip_address(f"192.0.2.{100 + number}")
    peer = WgPeer(DEVICE, public_key, **({"endpoint": address, "port": 51820, "keepalive": 25} | changes))
    return [peer, *(AllowedIp(DEVICE, ip_network(net), public_key) for net in nets)]


FIRST = peer_of(1, "10.5.101.0/24", preshared_key=PSK)
SECOND = peer_of(2, "10.5.102.0/24", "fd00:5:0:66::/64", endpoint=ip_address("fd77::66"), keepalive=0)
FIRST_KEY, SECOND_KEY, STRANGER = (
    text(keys.public_key(keys.private_key(bytes([number]) * 32))) for number in (101, 102, 109)
)
WHOLE = {
    FIRST_KEY: {
        "endpoint": ("192.0.2.101", 51820),
        "allowed": ["10.5.101.0/24"],
        "keepalive": 25,
        "psk": text(PSK.value),
    },
    SECOND_KEY: {
        "endpoint": ("fd77::66", 51820),
        "allowed": ["10.5.102.0/24", "fd00:5:0:66::/64"],
        "keepalive": 0,
        "psk": text(bytes(32)),
    },
}


# ---- what is written ------------------------------------------------------------------------------


def test_all_is_made_and_a_second_look_changes_nothing(host: Host) -> None:
    assert host.seen() == {"port": 51820, "mark": 0, "key": text(host.public_key), "peers": WHOLE}
    assert host.audit() == ([], [])


def test_the_next_daemon_finds_all_as_it_should_be(host: Host) -> None:
    host.table.close(remove=False)
    host.table = WireGuardTable([DEVICE])
    assert host.audit() == ([], [])


@pytest.mark.parametrize(
    "change",
    [
        {"private_key": text(bytes([77]) * 32)},
        {"listen_port": 4444},
        {"fwmark": 7},
        {"peer": {"public_key": FIRST_KEY, "remove": True}},
        {"peer": {"public_key": FIRST_KEY, "persistent_keepalive": 1}},
        {"peer": {"public_key": FIRST_KEY, "preshared_key": text(bytes(range(32)))}},
        {"peer": {"public_key": FIRST_KEY, "endpoint_addr": "192.0.2.9", "endpoint_port": 9}},
        {"peer": {"public_key": FIRST_KEY, "replace_allowed_ips": True, "allowed_ips": []}},
        {"peer": {"public_key": SECOND_KEY, "allowed_ips": ["10.5.101.0/24"]}},
        {"peer": {"public_key": SECOND_KEY, "allowed_ips": ["10.5.99.0/24"]}},
        {"peer": {"public_key": STRANGER, "allowed_ips": ["10.5.101.0/24", "10.5.98.0/24"]}},
        {"peer": {"public_key": STRANGER}},
    ],
    ids=[
        "another private key", "another port", "a mark", "a peer removed", "another keepalive", "another PSK",
        "another endpoint", "an allowed IP lost", "an allowed IP moved to a peer", "an allowed IP too many",
        "allowed IPs taken by a stranger", "a stranger",
    ],
)  # fmt: skip
def test_drift_is_repaired(host: Host, change: dict[str, Any]) -> None:
    before = host.seen()
    with host.namespace.entered(), Reader() as somebody:
        somebody.set(DEVICE, **change)
    assert host.seen() != before
    report = host.repair()
    assert host.seen() == before
    assert not report.failed
    assert host.audit() == ([], [])


def test_undesired_peers_are_removed(host: Host) -> None:
    host.want(host.key(), FIRST[0], FIRST[1], *SECOND[:2])
    assert host.repair().removed == [SECOND[2]]
    assert host.seen()["peers"][SECOND_KEY]["allowed"] == ["10.5.102.0/24"]
    host.want(host.key(), *FIRST)
    assert sorted(map(str, host.repair().removed)) == sorted(map(str, SECOND[:2]))
    assert host.seen()["peers"] == {FIRST_KEY: WHOLE[FIRST_KEY]}


def test_a_peer_that_comes_back_with_another_key_takes_its_subnet_along(host: Host) -> None:
    successor = peer_of(3, "10.5.101.0/24")
    host.want(host.key(), *successor, *SECOND)
    report = host.repair()
    assert (report.made, report.removed) == (successor, FIRST[:1])
    peers = host.seen()["peers"]
    assert FIRST_KEY not in peers
    assert {key: peer["allowed"] for key, peer in peers.items() if key != SECOND_KEY} == {
        text(successor[0].public_key): ["10.5.101.0/24"]  # type: ignore[attr-defined]
    }


def test_several_hundred_peers_are_made_found_and_removed(host: Host) -> None:
    many: list[Resource] = []
    for number in range(400):
        public_key = bytes([9, *number.to_bytes(31)])
        many.append(WgPeer(DEVICE, public_key, ip_address("192.0.2.7"), 1000 + number))
        many.append(AllowedIp(DEVICE, IPv4Network(((11 << 24) + (number << 8), 24)), public_key))
    host.want(host.key(), *FIRST, *SECOND, *many)
    assert len(host.repair().made) == len(many)
    assert host.audit() == ([], [])
    host.want(host.key(), *FIRST, *SECOND)
    assert len(host.repair().removed) == len(many)
    assert host.seen()["peers"] == WHOLE


# ---- what cannot be done ---------------------------------------------------------------------------


def test_a_device_that_is_made_anew_gets_all_of_it_again(host: Host) -> None:
    before = host.seen()
    with host.namespace.entered():
        assert not host.table.look()
    host.namespace.ip(f"link del {DEVICE}")
    with host.namespace.entered():
        assert host.table.look()
    report = host.repair()
    assert len(report.failed) == len(host.wanted)
    assert {failure.reason for failure in report.failed} == {"No such device"}
    host.make_device()
    with host.namespace.entered():
        assert host.table.look()
    assert not host.repair().failed
    assert host.seen() == before
    with host.namespace.entered():
        assert not host.table.look()


def test_a_port_that_is_taken_is_refused_with_a_remedy_and_peers_are_made(host: Host) -> None:
    with host.namespace.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("0.0.0.0", 5555))
        host.namespace.ip(f"link set {DEVICE} up")
        host.want(host.key(listen_port=5555), *FIRST)
        report = host.repair()
    (failure,) = report.failed
    assert failure.resource == host.key(listen_port=5555)
    assert failure.reason == f"Address already in use: process {os.getpid()} (python) has UDP port 5555"
    assert failure.remedy == "stop what has the port, or give this node a -wireguard-port"
    assert host.repair().failed == []


def test_a_device_of_another_kind_holds_nothing(host: Host) -> None:
    host.namespace.ip(f"link del {DEVICE}", f"link add {DEVICE} type dummy")
    puts, stale = host.audit()
    assert (len(puts), stale) == (len(host.wanted), [])


# ---- packets --------------------------------------------------------------------------------------


def connect(hosts: Sequence[Host]) -> None:
    """Make each host a peer of all others, and route their subnets through the devices."""
    for host in hosts:
        others = [other for other in hosts if other is not host]
        peers: list[Resource] = []
        for other in others:
            peers += [other.as_peer(), *other.allowed()]
        host.want(host.key(), *peers)
        host.repair()
        host.namespace.ip(*(f"route replace {other.subnet} dev {DEVICE}" for other in others))


def answers(host: Host, other: Host) -> bool:
    target = str(other.subnet.network_address)
    return host.namespace.run("ping", "-n", "-c", "1", "-W", "1", target, check=False).returncode == 0


@pytest.fixture
def pair(hosts: Callable[[int], list[Host]]) -> list[Host]:
    """Two hosts that have a session."""
    pair = hosts(2)
    connect(pair)
    wait_for(lambda: answers(*pair), 20, "an answer through the tunnel")
    return pair


def endpoint(host: Host, other: Host) -> tuple[str, int]:
    found: tuple[str, int] = host.seen()["peers"][text(other.public_key)]["endpoint"]
    return found


def roam(host: Host, other: Host, to: str) -> None:
    """Give a host another address, from which it calls another one."""
    host.namespace.ip(f"address del {host.address}/24 dev eth0", f"address add {to}/24 dev eth0")
    host.namespace.ip(f"route replace {other.subnet} dev {DEVICE}")
    wait_for(lambda: answers(host, other), 20, "an answer after the move")
    wait_for(lambda: endpoint(other, host) == (to, 51820), 5, "the endpoint to follow")


def test_an_endpoint_that_has_roamed_is_left_alone_while_it_lives(pair: list[Host]) -> None:
    one, other = pair
    roam(other, one, "192.0.2.77")
    assert one.audit() == ([], [])
    # The next daemon does not know what was given, and the peer is alive.
    one.table.close(remove=False)
    one.table = WireGuardTable([DEVICE], one.table._wall_clock)
    assert one.audit() == ([], [])
    one.now = DEAD + 1
    (put,), _ = one.audit()
    assert put.want == other.as_peer()
    one.repair()
    assert endpoint(one, other) == (str(other.address), 51820)


def test_a_changed_lease_gives_a_peer_that_roamed_another_endpoint(pair: list[Host]) -> None:
    one, other = pair
    roam(other, one, "192.0.2.77")
    moved = other.as_peer(endpoint=ip_address("192.0.2.88"))
    one.want(one.key(), moved, *other.allowed())
    assert one.repair().made == [moved]
    assert endpoint(one, other) == ("192.0.2.88", 51820)


def test_another_change_leaves_a_peer_where_it_has_roamed(pair: list[Host]) -> None:
    one, other = pair
    roam(other, one, "192.0.2.77")
    assert one.audit() == ([], [])
    one.want(one.key(), other.as_peer(keepalive=5), *other.allowed())
    assert len(one.repair().made) == 1
    assert endpoint(one, other) == ("192.0.2.77", 51820)
    assert one.audit() == ([], [])


def test_a_session_outlives_the_table(pair: list[Host]) -> None:
    one, other = pair
    with one.namespace.entered():
        one.table.close(remove=True)
    assert answers(one, other)
    one.table = WireGuardTable([DEVICE])
    assert one.repair() == Report()
    assert answers(one, other)


class Later(clock.Clock):
    """Clock of a time at which WireGuard has given up a handshake that it tries now."""

    def now(self) -> float:
        return super().now() + GIVEN_UP


def call(host: Host, other: Host) -> None:
    """Send something to a peer that does not answer."""
    before = host.seen_bytes(other)

    def sent() -> bool:
        assert not answers(host, other)
        return host.seen_bytes(other) > before

    wait_for(sent, 20, "a handshake to be tried")


def test_a_wrong_psk_is_named_in_the_log(pair: list[Host], caplog: pytest.LogCaptureFixture) -> None:
    one, other = pair
    caplog.set_level(logging.INFO)
    one.want(one.key(), other.as_peer(preshared_key=PSK), *other.allowed())
    one.repair()
    one.namespace.ip(f"link set {DEVICE} down", f"link set {DEVICE} up")  # forgets the session
    one.namespace.ip(f"route replace {other.subnet} dev {DEVICE}")
    one.now = DEAD + 1
    one.audit()
    call(one, other)
    one.audit()
    call(one, other)
    with clock.replaced(Later()):
        one.audit()
    assert (
        f"No handshake via {DEVICE}, though packets are sent there: peer {text(other.public_key)} at"
        in caplog.text
    )
    assert text(PSK.value) not in caplog.text
    one.want(one.key(), other.as_peer(), *other.allowed())
    one.repair()
    wait_for(lambda: answers(one, other), 20, "an answer with the right PSK")
    one.now = 0.0
    one.audit()
    assert f"Handshakes via {DEVICE} succeed again" in caplog.text
