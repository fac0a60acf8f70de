"""The mesh: what is announced and asked, and 200 nodes behind random NATs that meet in a simulation."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from flanneld.backends.wireguard import mesh, table
from flanneld.backends.wireguard.mesh import (
    Mesh,
    MeshTask,
    Nat,
    nat_of,
    own_endpoints,
    parse,
    text_of,
    usable,
)
from flanneld.backends.wireguard.rotation import Rotation, is_alive, is_doubted, observe, steer, upset
from flanneld.errors import Retryable
from flanneld.model import IPAddress, Uplink
from flanneld.network.genetlink import Endpoint, SeenDevice, SeenPeer
from flanneld.runtime import clock
from flanneld.runtime.clock import replaced_chance
from flanneld.state.table import TunnelSession

NETWORK = [ip_network("10.5.0.0/16")]
#: The fewest steps of a search: two nodes that begin together look again after this time.
TICK = 5.0
#: Time at which all simulated nodes start, in seconds since 1970.
BEGIN = 1e9


class Time(clock.Clock):
    def __init__(self) -> None:
        self.time = self.slept = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return BEGIN + self.time

    def suspended(self) -> float:
        return self.slept


def endpoint(text: str) -> Endpoint:
    found = parse(text)
    assert found is not None
    return found


# ---- what is announced, and what is taken over ------------------------------------------------------


def test_endpoints_are_told_in_the_order_in_which_they_are_tried() -> None:
    uplink = Uplink(
        "eth0",
        1,
        1500,
        ip_address("192.168.1.5"),  # type: ignore[arg-type]
        ip_address("203.0.113.9"),  # type: ignore[arg-type]
        ip_address("2001:db8::5"),  # type: ignore[arg-type]
        ip_address("2001:db8::5"),  # type: ignore[arg-type]
    )
    seen = [endpoint("203.0.113.9:40000")]
    assert own_endpoints(uplink, {4: 51820, 6: 51821}, seen, "home.example.org").split(",") == [
        "203.0.113.9:40000",
        "home.example.org:51820",
        "home.example.org:51821",
        "203.0.113.9:51820",
        "[2001:db8::5]:51821",
        "192.168.1.5:51820",
    ]


def tried(text: str, local: str = "192.168.1.5", **named: list[str]) -> tuple[list[str], list[str]]:
    """Return the endpoints to try, and why others are refused."""
    refused: list[str] = []
    addresses = {f"{name}.example.org": list(map(ip_address, found)) for name, found in named.items()}
    found = usable(text, NETWORK, [ip_address(local)], addresses, refused.append)
    return list(map(text_of, found)), refused


def test_endpoints_of_this_host_and_of_the_network_are_left_out() -> None:
    found = tried("203.0.113.9:40000,192.168.1.5:51820,10.5.3.1:51820,[2001:db8::5]:1")
    assert found == (["203.0.113.9:40000", "[2001:db8::5]:1"], [])


@pytest.mark.parametrize("address", ["[fe80::1%eth0]", "[fe80::1]", "[2001:db8::1%eth0]", "169.254.1.1"])
def test_an_address_of_one_link_is_refused_with_the_reason(address: str) -> None:
    assert tried(f"{address}:1") == ([], [f"{address}:1: its address is valid on one link only"])


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "127.0.0.1", "[::1]", "224.0.0.1", "255.255.255.255"])
def test_an_address_of_no_host_is_refused_with_the_reason(address: str) -> None:
    assert tried(f"{address}:1") == ([], [f"{address}:1: its address is that of no host"])


def test_a_name_stands_for_all_its_addresses_that_are_usable() -> None:
    text = "203.0.113.1:1,home.example.org:51820,lost.example.org:1"
    found, refused = tried(text, home=["203.0.113.9", "192.168.1.5", "127.0.0.1", "2001:db8::9"])
    assert found == ["203.0.113.1:1", "203.0.113.9:51820", "[2001:db8::9]:51820"]
    assert refused == ["127.0.0.1:51820: its address is that of no host"]


def test_only_names_are_looked_up() -> None:
    texts = ["203.0.113.1:1,[::1]:2,home.example.org:3", "1.2.3:4,a_b:5,-a:6,x:0,localhost:7,[::%1]:1"]
    assert mesh.names_in(texts) == {"home.example.org", "localhost"}


@pytest.mark.parametrize(
    "text",
    ["", ",", "x", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:70000", "[::1", "1.2.3.4:-5", "::", f"1.2.3.4:{9:05000}"],
)
def test_a_text_without_an_endpoint_is_none(text: str) -> None:
    assert tried(text) == ([], [])


def test_at_most_eight_endpoints_of_a_peer_are_tried() -> None:
    text = ",".join(f"203.0.113.{number}:1" for number in range(1, 20))
    assert len(tried(text)[0]) == mesh.MOST


@pytest.mark.parametrize(
    ("answers", "nat"),
    [
        ([], Nat.UNKNOWN),
        (["192.168.1.5:51820"], Nat.NONE),
        (["203.0.113.9:4000"], Nat.CONE),
        (["203.0.113.9:4000", "203.0.113.9:4000"], Nat.CONE),
        (["203.0.113.9:4000", "203.0.113.9:4001"], Nat.SYMMETRIC),
        (["192.168.1.5:51820", "203.0.113.9:4001"], Nat.CONE),
    ],
)
def test_the_kind_of_nat_is_told_by_two_answers(answers: list[str], nat: Nat) -> None:
    assert nat_of([endpoint(each) for each in answers], [ip_address("192.168.1.5")]) is nat


def test_a_node_behind_nat_keeps_its_mapping_alive() -> None:
    found = Mesh(bytes(32), {4: 51820}, 0)
    assert found.keepalive == 0
    found.nat = Nat.CONE
    assert found.keepalive == mesh.NAT_KEEPALIVE
    configured = Mesh(bytes(32), {4: 51820}, 10)
    configured.nat = Nat.SYMMETRIC
    assert configured.keepalive == 10


class OnePeer:
    """Kernel with a device that has one peer, which was never met."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, name: str) -> SeenDevice:
        self.reads += 1
        return SeenDevice(1, name, 51820, 0, None, None, (SeenPeer(bytes(32)),))

    def write(self, _: Sequence[bytes]) -> dict[int, int]:
        return {}


@pytest.mark.parametrize(("published", "reads"), [((), 2), ((endpoint("192.0.2.1:1"),), 6)])
def test_device_is_read_each_second_only_while_there_is_an_endpoint_to_try(
    time: Time, monkeypatch: pytest.MonkeyPatch, published: tuple[Endpoint, ...], reads: int
) -> None:
    kernel, found = OnePeer(), Mesh(bytes(32), {4: 51820}, 0)
    monkeypatch.setattr(table, "WireGuardDevices", lambda: kernel)
    found.published = {mesh.name_of(bytes(32)): published}
    looked = table.WireGuardTable(["wg0"], mesh=found)
    for second in range(6):
        time.time = float(second)
        looked.look()
    assert kernel.reads == reads


class Shelf:
    """Store with the endpoints of one peer."""

    name = "shelf"
    is_down = False

    def __init__(self) -> None:
        self.written: list[str] = []

    def publish_endpoints(self, name: str, text: str) -> None:
        del name
        self.written.append(text)

    def endpoints(self) -> dict[str, str]:
        if self.is_down:
            raise Retryable("the store is down")
        return {"peer": "home.example.org:51820,0.0.0.0:1,127.0.0.1:1", "met": "other.example.org:1"}


def test_name_is_looked_up_while_its_peer_is_searched_for_also_without_the_store(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    found, shelf, asked = Mesh(bytes(32), {4: 51820}, 0), Shelf(), []
    answers = {"home.example.org": [ip_address("203.0.113.1")]}

    def resolve(names: Collection[str]) -> dict[str, list[IPAddress]]:
        asked.append(set(names))
        return answers

    uplink = Uplink("eth0", 1, 1500, IPv4Address("192.168.1.5"), IPv4Address("192.168.1.5"))
    task = MeshTask(found, shelf, lambda: uplink, NETWORK, lambda: (), lambda _: (), "", resolve)

    def published() -> list[str]:
        time.time += mesh._READ_AT_LAST + 1
        task.step(time.time)
        return list(map(text_of, found.published.get("peer", ())))

    assert (published(), asked) == ([], [])
    found.searched = frozenset({"peer"})
    assert published() == ["203.0.113.1:51820"]
    answers = {}
    assert published() == ["203.0.113.1:51820"]
    shelf.is_down = True
    answers = {"home.example.org": [ip_address("203.0.113.2")]}
    assert published() == ["203.0.113.2:51820"]
    assert asked == [{"home.example.org"}] * 3
    refused = [each.message for each in caplog.records if "Refused" in each.message]
    assert refused == [
        "Refused an endpoint of peer, 0.0.0.0:1: its address is that of no host, 127.0.0.1:1: its address is"
        " that of no host; correct it on its node"
    ]


def test_answer_from_before_our_first_packet_is_soon_put_right(time: Time) -> None:
    """A peer that has just read our lease gives us the address in it."""
    found, shelf = Mesh(bytes(32), {4: 51820}, 0), Shelf()
    uplink = Uplink("eth0", 1, 1500, IPv4Address("192.168.1.5"), IPv4Address("192.168.1.5"))
    peer = TunnelSession(ip_network("10.5.9.0/24"), is_established=True, endpoint="203.0.113.1:51820")
    answer = endpoint("192.168.1.5:51820")
    task = MeshTask(found, shelf, lambda: uplink, NETWORK, lambda: [peer], lambda _: [answer])
    task.step(time.time)
    assert shelf.written == ["192.168.1.5:51820"]
    answer = endpoint("198.51.100.2:40000")
    time.time += mesh._ASK_AGAIN
    task.step(time.time)
    assert shelf.written[1:] == ["198.51.100.2:40000,192.168.1.5:51820"]


def test_lookup_that_hangs_is_left_and_the_other_answers_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    there = [ip_address("203.0.113.1")]

    def look_up(name: str) -> list[IPAddress]:
        if name == "slow.example.org":
            hangs.wait(60)
        return there

    monkeypatch.setattr("flanneld.runtime.sockets.interruptible.look_up", look_up)
    monkeypatch.setattr(mesh, "_LOOKUP", 0.1)
    with replaced_chance(random.Random(1)):
        resolve = mesh.resolver(threading.Event())
        answers = [resolve(["slow.example.org", "home.example.org"]) for _ in range(8)]
    hangs.set()
    assert {} in answers
    assert {"home.example.org": there} in answers


def test_lookup_that_was_left_goes_on_to_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), list[str]()

    def look_up(name: str) -> list[IPAddress]:
        asked.append(name)
        answers.wait(60)
        return []

    monkeypatch.setattr("flanneld.runtime.sockets.interruptible.look_up", look_up)
    monkeypatch.setattr(mesh, "_LOOKUP", 0.1)
    before = set(threading.enumerate())
    assert mesh.resolver(threading.Event())(["one.example.org", "other.example.org"]) == {}
    (left,) = set(threading.enumerate()) - before
    answers.set()
    left.join(60)
    assert len(asked) == 1


# ---- a simulated internet ---------------------------------------------------------------------------


class Site(Enum):
    PUBLIC = "public"
    FULL_CONE = "full cone"
    RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"


#: Kinds that do not meet: a symmetric NAT shows the other side a port that nothing was announced of.
UNABLE = ({Site.SYMMETRIC}, {Site.SYMMETRIC, Site.RESTRICTED})


class Router:
    """NAT of one site."""

    def __init__(self, address: IPAddress, kind: Site) -> None:
        self.address = address
        self.kind = kind
        self.reboot()

    def reboot(self) -> None:
        """Forget all mappings."""
        self._ports = itertools.count(20000)
        self._outer: dict[tuple[Endpoint, Endpoint | None], Endpoint] = {}
        self._inner: dict[Endpoint, Endpoint] = {}
        self._called: set[tuple[Endpoint, Endpoint]] = set()

    def out(self, inner: Endpoint, target: Endpoint) -> Endpoint:
        key = (inner, target if self.kind is Site.SYMMETRIC else None)
        if key not in self._outer:
            self._outer[key] = outer = (self.address, next(self._ports))
            self._inner[outer] = inner
        self._called.add((self._outer[key], target))
        return self._outer[key]

    def into(self, outer: Endpoint, source: Endpoint) -> Endpoint | None:
        if self.kind is Site.FULL_CONE or (outer, source) in self._called:
            return self._inner.get(outer)
        return None


class Member:
    """A node: WireGuard in a few lines, the rotation of its peers, and its task of the mesh."""

    def __init__(self, world: World, number: int, router: Router | None, address: IPv4Address) -> None:
        self.world, self.number, self.router = world, number, router
        self.name = number.to_bytes(32, "big")
        self.here: Endpoint = (address, 51820)
        self.subnet = ip_network((int(ip_address("10.128.0.0")) + 256 * number, 24))
        self.start()

    def start(self) -> None:
        """Start the machine: no session is left."""
        self.peers = {
            each: SeenPeer(each.to_bytes(32, "big"), endpoint=None)
            for each in range(self.world.size)
            if each != self.number
        }
        self.rotations = dict.fromkeys(self.peers, Rotation())
        self.mesh = Mesh(self.name, {4: 51820}, 0)
        self.uplink = Uplink("eth0", 1, 1500, self.here[0], self.here[0])  # type: ignore[arg-type]
        self.task = MeshTask(self.mesh, self.world, lambda: self.uplink, NETWORK, self.sessions, self.ask)
        self.greet_until = 0.0
        self.moved: set[int] = set()

    def sessions(self) -> Iterator[TunnelSession]:
        for number, peer in self.peers.items():
            if peer.last_handshake and peer.endpoint:
                subnet = self.world.members[number].subnet
                yield TunnelSession(subnet, is_established=True, endpoint=text_of(peer.endpoint))

    def ask(self, targets: Sequence[IPAddress]) -> Collection[Endpoint]:
        self.world.questions += len(targets)
        asked = [each for each in self.world.members if each.subnet.network_address in targets]
        return [found for each in asked if self.gets_to(each) and (found := each.peers[self.number].endpoint)]

    def turn(self, now: float) -> None:
        """Let each peer that is searched for take its next endpoint, as the table does."""
        greets, self.mesh.greets = self.mesh.greets, False
        moved, self.moved = self.moved, set()
        searched = set()
        if greets:
            self.greet_until = now + 60
        for number, peer in self.peers.items():
            other = self.world.members[number]
            published, has_session = self.mesh.published.get(other.mesh.name, ()), is_alive(peer, BEGIN + now)
            has_lease = other.here[0] != self.here[0] and (published or not has_session)
            candidates = dict.fromkeys((*published, *([other.here] if has_lease else [])))
            state = observe(self.rotations[number], peer, now, BEGIN + now)
            if (greets and not has_session) or number in moved:
                state = upset(state, peer, now, BEGIN + now)
            keepalive = 5 if now < self.greet_until else self.mesh.keepalive
            state, change = steer(state, peer, tuple(candidates), now, BEGIN + now, keepalive, self.name)
            self.rotations[number] = state
            if state.search is not None or is_doubted(state, now):
                searched.add(other.mesh.name)
            if change is not None:
                peer = self.set(number, keepalive=change.keepalive, endpoint=change.endpoint or peer.endpoint)
            if peer.keepalive and now % peer.keepalive == 0 and self.is_with(other):
                self.keep_alive(number)
        self.mesh.searched = frozenset(searched)

    def keep_alive(self, number: int) -> None:
        """Send an empty packet through a session: it moves the endpoint of a peer that gets it."""
        peer = self.peers[number]
        self.set(number, tx_bytes=peer.tx_bytes + 32)
        arrived = self.world.send(self, peer.endpoint) if peer.endpoint else None
        if arrived and arrived[0].number == number and arrived[0].is_with(self):
            heard = arrived[0].peers[self.number].rx_bytes
            arrived[0].set(self.number, endpoint=arrived[1], rx_bytes=heard + 32)

    def gets_to(self, other: Member) -> bool:
        """Return True if packets of a session arrive."""
        peer = self.peers[other.number]
        arrived = self.world.send(self, peer.endpoint) if peer.endpoint else None
        return arrived is not None and arrived[0] is other and self.is_with(other)

    def move(self, router: Router | None, address: IPv4Address) -> None:
        """Take the node to another site. Its lease tells its peers, if it has another address there."""
        del self.world.hosts[self.router, self.here]
        if address != self.here[0]:
            for other in self.world.members:
                other.moved.add(self.number)
        self.router, self.here = router, (address, 51820)
        self.world.hosts[router, self.here] = self
        self.uplink = Uplink("eth1", 2, 1500, address, address)

    def set(self, number: int, **changes: object) -> SeenPeer:
        old = self.peers[number]
        values = {field: getattr(old, field) for field in old.__struct_fields__} | changes
        self.peers[number] = found = SeenPeer(**values)
        return found

    def is_with(self, other: Member) -> bool:
        return abs(clock.wall() - self.peers[other.number].last_handshake) <= 180

    def calls(self, number: int, now: float) -> bool:
        """Return True if a handshake is due.

        That is without a session, before it ends, and 15 s after packets that nothing answered
        (KEEPALIVE_TIMEOUT and REKEY_TIMEOUT), as to a node that was started again.
        """
        peer = self.peers[number]
        is_forgotten = bool(peer.last_handshake) and not self.world.members[number].is_with(self)
        return clock.wall() - peer.last_handshake > 120 or (is_forgotten and now % 15 == 0)

    def call(self, number: int) -> None:
        """Send an initiation, and take the answer."""
        peer, wall = self.peers[number], clock.wall()
        if peer.endpoint is None:
            return
        self.world.handshakes += 1
        self.set(number, tx_bytes=peer.tx_bytes + 148)
        arrived = self.world.send(self, peer.endpoint)
        if arrived is None or arrived[0].number != number:
            return
        other, source = arrived
        heard = other.peers[self.number].rx_bytes + 148
        other.set(self.number, endpoint=source, rx_bytes=heard)
        back = self.world.send(other, source)
        assert back is None or back[0] is self
        if back is not None:
            heard = self.peers[number].rx_bytes + 92
            self.set(number, endpoint=back[1], last_handshake=wall, rx_bytes=heard)
            other.set(self.number, last_handshake=wall)


class World:
    """Internet of some sites, and the store."""

    name = "store"

    def __init__(self, size: int, dice: random.Random) -> None:
        self.size = size
        self.handshakes = self.questions = self.writes = 0
        self.stored: dict[str, str] = {}
        self.is_down = False
        self.members: list[Member] = []
        self.routers: dict[IPAddress, Router] = {}
        self.hosts: dict[tuple[Router | None, Endpoint], Member] = {}
        kinds = [Site.FULL_CONE, Site.RESTRICTED, Site.RESTRICTED, Site.SYMMETRIC]
        router: Router | None = None
        for number in range(size):
            address = IPv4Address(int(ip_address("45.0.0.0")) + number)
            if number < 2 or dice.random() < 0.05:
                router = None
            elif router is None or dice.random() < 0.7:
                router = self.routers[address] = Router(address, dice.choice(kinds))
                inside = itertools.count(int(ip_address("192.168.1.2")))
            # Many sites have the same private addresses.
            here = IPv4Address(next(inside)) if router else address
            member = Member(self, number, router, here)
            self.members.append(member)
            self.hosts[router, member.here] = member

    def publish_endpoints(self, name: str, text: str) -> None:
        if self.is_down:
            raise Retryable("the store is down")
        self.writes += 1
        self.stored[name] = text

    def endpoints(self) -> dict[str, str]:
        if self.is_down:
            raise Retryable("the store is down")
        return dict(self.stored)

    def send(self, member: Member, target: Endpoint) -> tuple[Member, Endpoint] | None:
        """Return who gets a packet, and from which source; None if it is lost."""
        near = self.hosts.get((member.router, target))
        if near is not None:
            return near, member.here
        if target[0].is_private:
            return None
        source = member.router.out(member.here, target) if member.router else member.here
        router = self.routers.get(target[0])
        if router is None:
            far = self.hosts.get((None, target))
            return (far, source) if far else None
        inner = router.into(target, source)
        host = self.hosts.get((router, inner)) if inner else None
        return (host, source) if host else None

    def run(self, seconds: float, time: Time, up: Collection[Member]) -> None:
        for _ in range(int(seconds / TICK)):
            for member in up:
                member.task.step(time.time)
            for member in up:
                member.turn(time.time)
            for member in up:
                for number in member.peers:
                    if self.members[number] in up and member.calls(number, time.time):
                        member.call(number)
            time.time += TICK

    def unmet(self, members: Sequence[Member]) -> list[tuple[int, int]]:
        """Return the pairs that can meet and have not."""
        return [
            (one.number, other.number)
            for one, other in itertools.combinations(members, 2)
            if can_meet(one, other) and not (one.is_with(other) and other.is_with(one))
        ]


def kind_of(member: Member) -> Site:
    return member.router.kind if member.router else Site.PUBLIC


def can_meet(one: Member, other: Member) -> bool:
    if one.router is not None and one.router is other.router:
        return True
    return {kind_of(one), kind_of(other)} not in UNABLE


@pytest.fixture
def time() -> Iterator[Time]:
    found = Time()
    with clock.replaced(found), replaced_chance(random.Random(40)):
        yield found


@pytest.mark.parametrize("seed", range(3))
def test_all_pairs_that_can_meet_meet_within_30_s_of_a_cold_start(time: Time, seed: int) -> None:
    world = World(40, random.Random(seed))
    world.run(30, time, world.members)
    assert world.unmet(world.members) == []


def test_200_nodes_meet_with_handshakes_and_writes_that_grow_with_the_pairs(time: Time) -> None:
    """Each pair needs a few handshakes, and each node two writes, however many nodes there are."""
    ratios = {}
    for size in (50, 200):
        time.time = 0.0
        world = World(size, random.Random(1))
        world.run(30, time, world.members)
        assert world.unmet(world.members) == []
        assert world.writes <= 2 * size
        assert world.questions <= 4 * size
        ratios[size] = world.handshakes / size**2
    assert ratios[200] < 1.2 * ratios[50] < 12


def test_a_node_that_starts_again_meets_all_within_30_s(time: Time) -> None:
    world = World(40, random.Random(2))
    world.run(40, time, world.members)
    for member in (world.members[0], *(each for each in world.members if each.router)):
        member.start()
        world.run(30, time, world.members)
        assert world.unmet(world.members) == []


def test_what_has_met_outlives_the_public_node_and_the_store(time: Time) -> None:
    world = World(30, random.Random(3))
    world.run(40, time, world.members)
    world.is_down = True
    rest = world.members[2:]
    moved = [{number: peer.endpoint for number, peer in each.peers.items()} for each in rest]
    world.run(600, time, rest)
    assert world.unmet(rest) == []
    for each, before in zip(rest, moved, strict=True):
        assert all(
            peer.endpoint == before[number]
            for number, peer in each.peers.items()
            if each.is_with(world.members[number])
        )


def test_a_node_that_was_suspended_sends_its_peers_packets_and_asks_where_they_see_it(time: Time) -> None:
    world = World(30, random.Random(5))
    world.run(40, time, world.members)
    member = next(each for each in world.members if kind_of(each) is Site.FULL_CONE)
    asked = world.questions
    time.slept += 1
    member.task.step(time.time)
    assert (member.mesh.greets, world.questions) == (False, asked)
    time.slept += 3600
    member.task.step(time.time)
    assert member.mesh.greets
    world.run(15, time, world.members)
    assert world.questions > asked


@pytest.mark.parametrize("seed", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("kind", [None, Site.FULL_CONE, Site.RESTRICTED])
def test_a_node_that_moved_meets_all_within_30_s_in_the_same_sessions(
    time: Time, seed: int, kind: Site | None
) -> None:
    world = World(40, random.Random(seed))
    world.run(60, time, world.members)
    member = next(each for each in world.members if kind_of(each) is Site.FULL_CONE)
    there, here = IPv4Address("46.0.0.1"), IPv4Address("192.168.7.7")
    router = Router(there, kind) if kind else None
    if router:
        world.routers[there] = router
    member.move(router, here if router else there)
    before = {number: peer.last_handshake for number, peer in member.peers.items()}
    others = [each for each in world.members if each is not member and can_meet(each, member)]
    world.run(30, time, world.members)
    assert [each.number for each in others if not (each.gets_to(member) and member.gets_to(each))] == []
    assert before == {number: peer.last_handshake for number, peer in member.peers.items()}


def test_a_symmetric_nat_is_noticed_and_not_announced(time: Time) -> None:
    world = World(60, random.Random(4))
    world.run(30, time, world.members)
    for member in world.members:
        kind, text = kind_of(member), world.stored[member.mesh.name]
        wanted = {Site.PUBLIC: Nat.NONE, Site.SYMMETRIC: Nat.SYMMETRIC}.get(kind, Nat.CONE)
        assert member.mesh.nat is wanted
        if member.router is not None:
            assert (str(member.router.address) in text) is (wanted is Nat.CONE)
