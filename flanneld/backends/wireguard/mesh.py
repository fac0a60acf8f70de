"""Mesh of nodes behind NAT, with ``"Mesh": true``: each publishes the endpoints that may lead to it.

Endpoints have keys of their own in the store. After a change of a lease's data the peers, Go's among them,
configure this node again, and lose an endpoint that has roamed. The table tries the published endpoints
(``rotation``). To learn its endpoint outside a NAT, a node asks two peers, inside the tunnel. It asks no
other server, and no packet is relayed.
"""

from __future__ import annotations

import logging
import threading
from base64 import urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from ipaddress import ip_address

from flanneld.errors import Retryable
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, Uplink, is_a_hosts
from flanneld.network.genetlink import Endpoint
from flanneld.option_values import is_host_name
from flanneld.runtime import clock
from flanneld.runtime.clock import shuffle
from flanneld.runtime.logs import Once, Outage
from flanneld.state.table import TunnelSession
from flanneld.subnet.store import EndpointStore

log = logging.getLogger(__name__)

#: Name of the task's thread.
NAME = "mesh"
#: Endpoints that a node announces, and that are tried of a peer.
MOST = 8
#: Seconds between keepalive packets of a node behind NAT, as WireGuard's documentation has it.
NAT_KEEPALIVE = 25
#: Seconds between two questions to peers, until the next if none answered, and after a move or a new answer:
#: peers read their devices every 5 s, and until then know the endpoint of before or of our lease.
_ASK, _ASK_SOON, _ASK_AGAIN = 60.0, 2.0, 6.0
#: Peers that are asked: two show whether a NAT shows us to each in the same way. After a move more, until one
#: answers: most NATs let nothing in from where we are now.
_ASKED, _ASKED_MOVED = 2, 8
#: Seconds within which a peer answers.
_WITHIN = 1.0
#: Seconds for all lookups of names of one reading.
_LOOKUP = 5.0
#: Seconds between two announcements, and after which one is repeated: half a lease's life.
_ANNOUNCE, _REPEAT = 60.0, 43200.0
#: Seconds between two readings while peers are searched for: doubled up to the longest.
_READ, _READ_AT_LAST = 5.0, 60.0
#: Seconds of suspension from which on a NAT may have forgotten us.
_NAP = 5.0
#: Seconds between two steps.
_STEP = 1.0


class Nat(Enum):
    """NAT between this node and its peers, as these see it."""

    UNKNOWN = "unknown"
    NONE = "none"
    #: All peers see one endpoint: any of them reaches us there, once we have sent it a packet.
    CONE = "cone"
    #: Each peer sees another endpoint: only peers that are reachable themselves can be met.
    SYMMETRIC = "symmetric"


class Mesh:
    """State that the table and the task share. Each attribute is replaced as a whole."""

    def __init__(self, public_key: bytes, ports: Mapping[Family, int], keepalive: int) -> None:
        self.name = name_of(public_key)
        self.ports = ports
        self._keepalive = keepalive
        #: Published endpoints by name.
        self.published: Mapping[str, tuple[Endpoint, ...]] = {}
        self.nat = Nat.UNKNOWN
        #: Set by the table: names of the peers that are searched for or doubted.
        self.searched: frozenset[str] = frozenset()
        #: Set by the task: each peer is to get a packet, from which it sees where we are now.
        self.greets = False

    @property
    def keepalive(self) -> int:
        """Seconds between keepalive packets to a peer, 0 for none. Behind NAT they keep its mapping."""
        behind = self.nat in (Nat.CONE, Nat.SYMMETRIC)
        return self._keepalive or (NAT_KEEPALIVE if behind else 0)

    @property
    def problem(self) -> str:
        """Reason why peers behind NAT cannot meet this node, with a remedy; empty without one."""
        if self.nat is not Nat.SYMMETRIC:
            return ""
        ports = " or ".join(sorted({str(port) for port in self.ports.values()}))
        return (
            "each peer sees this node at another port (symmetric NAT): it meets no peer behind such a NAT or"
            f" a port-restricted one; forward UDP port {ports} to it, with a -wireguard-port of its own"
        )


def name_of(public_key: bytes) -> str:
    """Return a public key as part of a store's key: in etcd's v2 API a slash would make a directory."""
    return urlsafe_b64encode(public_key).decode()


def text_of(endpoint: Endpoint) -> str:
    """Return an endpoint as text."""
    address, port = endpoint
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _split(text: str) -> tuple[str, int] | None:
    """Return host and port of an endpoint, None if there is none."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse(text: str) -> Endpoint | None:
    """Return the endpoint with an address in a text, None if there is none."""
    found = _split(text)
    try:
        return (ip_address(found[0]), found[1]) if found else None
    except ValueError:
        return None


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the DNS names in published endpoints."""
    found = (_split(each) for text in texts for each in text.split(",") if parse(each) is None)
    return {each[0] for each in found if each is not None and is_host_name(each[0])}


def refusal(endpoint: Endpoint) -> str:
    """Return the reason why no other host can use an endpoint, empty if it can."""
    address, _ = endpoint
    if address.is_link_local or getattr(address, "scope_id", None):
        return "its address is valid on one link only"
    return "" if is_a_hosts(address) else "its address is that of no host"


def usable(
    text: str,
    networks: Collection[IPNetwork],
    local: Collection[IPAddress],
    named: Mapping[str, Sequence[IPAddress]],
    refuse: Callable[[str], None],
) -> tuple[Endpoint, ...]:
    """Return the published endpoints that may lead to a peer: none of this host, nor inside the network.

    ``named`` are the addresses of the names among them. ``refuse`` gets a line for each that is unusable.
    """
    found: dict[Endpoint, None] = {}
    for each in text.split(","):
        if endpoint := parse(each):
            found[endpoint] = None
        elif by_name := _split(each):
            found |= {(address, by_name[1]): None for address in named.get(by_name[0], ())}
    refused = {each: reason for each in found if (reason := refusal(each))}
    for bad, reason in refused.items():
        refuse(f"{text_of(bad)}: {reason}")
    return tuple(
        each
        for each in found
        if each not in refused
        and each[0] not in local
        and not any(each[0] in network for network in networks)
    )[:MOST]


def own_endpoints(uplink: Uplink, ports: Mapping[Family, int], seen: Iterable[Endpoint], name: str) -> str:
    """Return what this node announces: where peers see it, its name, its public IPs, its own addresses."""
    public = [(uplink.public(family), ports.get(family)) for family in FAMILIES]
    local = [(uplink.local(family), ports.get(family)) for family in FAMILIES]
    known = [(address, port) for address, port in (*public, *local) if address is not None and port]
    named = [f"{name}:{port}" for port in ports.values() if name and port]
    return ",".join(list(dict.fromkeys([*map(text_of, seen), *named, *map(text_of, known)]))[:MOST])


def nat_of(answers: Collection[Endpoint], local: Collection[IPAddress]) -> Nat:
    """Return the NAT that peers' answers show. Those of our own link see our own address."""
    if not answers:
        return Nat.UNKNOWN
    for family in FAMILIES:
        shown = {each for each in answers if each[0].version == family and each[0] not in local}
        if shown:
            return Nat.SYMMETRIC if len(shown) > 1 else Nat.CONE
    return Nat.NONE


def to_ask(sessions: Iterable[TunnelSession], number: int) -> list[IPAddress]:
    """Return the tunnel addresses of peers at different endpoints; those at public addresses first."""
    found: dict[IPAddress, IPAddress] = {}
    for each in sessions:
        endpoint = parse(each.endpoint)
        if each.is_established and endpoint is not None:
            found.setdefault(endpoint[0], each.subnet.network_address)
    outer = list(found)
    shuffle(outer)
    outer.sort(key=lambda address: address.is_private)
    return [found[each] for each in outer[:number]]


class MeshTask:
    """Task that announces this node's endpoints, and reads those of the peers that are searched for.

    ``ask`` returns the endpoints at which peers with these tunnel addresses see us. ``name`` is this node's
    DNS name, ``resolve`` returns the addresses of peers' names.
    """

    def __init__(
        self,
        mesh: Mesh,
        store: EndpointStore,
        uplink: Callable[[], Uplink],
        networks: Collection[IPNetwork],
        sessions: Callable[[], Iterable[TunnelSession]],
        ask: Callable[[Sequence[IPAddress]], Collection[Endpoint]],
        name: str = "",
        resolve: Callable[[Collection[str]], Mapping[str, Sequence[IPAddress]]] = lambda _: {},
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._uplink = uplink
        self._networks = networks
        self._sessions = sessions
        self._ask = ask
        self._name = name
        self._resolve = resolve
        #: As last read, and the addresses of the names in it.
        self._texts: Mapping[str, str] = {}
        self._named: Mapping[str, Sequence[IPAddress]] = {}
        self._once = Once()
        self._here = uplink(), clock.suspended()
        self._seen: tuple[Endpoint, ...] = ()
        self._questions, self._ask_at = _ASKED, 0.0
        self._announced = ""
        self._announce_at = self._repeat_at = 0.0
        self._read_at, self._pause = 0.0, _READ
        self._sought: frozenset[str] = frozenset()
        self._outage = Outage(log, "Exchanging endpoints with the store", "The store has our endpoints again")

    def step(self, now: float) -> float:
        """Ask peers, announce and read endpoints if it is time. Return the time of the next step."""
        uplink = self._uplink()
        self._follow(uplink, now)
        local = [each for family in FAMILIES if (each := uplink.local(family)) is not None]
        if now >= self._ask_at:
            self._reflect(local)
        try:
            has_answered = self._announce(
                own_endpoints(uplink, self._mesh.ports, self._seen, self._name), now
            )
            has_answered |= self._read(local, now)
        except Retryable as reason:
            self._outage.failed(reason)
            self._announce_at = self._read_at = again = clock.now() + _READ
            self._repeat_at = max(self._repeat_at, again)
        else:
            if has_answered:
                self._outage.over()
        return clock.now() + _STEP

    def _follow(self, uplink: Uplink, now: float) -> None:
        """Send each peer a packet if this host has moved or was suspended: they see then where it is."""
        here, (before, slept) = (uplink, clock.suspended()), self._here
        if uplink == before and here[1] - slept < _NAP:
            return
        log.info("This node has moved, or was suspended: asking peers where they see it")
        self._here = here
        self._mesh.greets = True
        self._questions, self._ask_at, self._announce_at = _ASKED_MOVED, now + _ASK_AGAIN, now
        self._seen = ()

    def _reflect(self, local: Collection[IPAddress]) -> None:
        """Set the kind of NAT, and where peers see this node, by their answers."""
        asked = to_ask(self._sessions(), self._questions)
        answers = self._ask(asked) if asked else ()
        nat = nat_of(answers, local)
        if nat is Nat.UNKNOWN:
            self._ask_at = clock.now() + _ASK_SOON
            return
        self._questions = _ASKED
        # Where the NAT is symmetric, only the peer that was asked reaches us there.
        shown = {each for each in answers if each[0] not in local and nat is not Nat.SYMMETRIC}
        seen = tuple(sorted(shown, key=text_of))
        is_certain = (nat, seen) == (self._mesh.nat, self._seen)
        self._ask_at = clock.now() + (_ASK if is_certain else _ASK_AGAIN)
        if nat is not self._mesh.nat:
            log.info("NAT between this node and its peers: %s", nat.value)
        self._mesh.nat, self._seen = nat, seen

    def _announce(self, endpoints: str, now: float) -> bool:
        """Publish our endpoints if it is time. Return True if the store took them."""
        is_news = endpoints != self._announced and now >= self._announce_at
        if not is_news and now < self._repeat_at:
            return False
        # What is known from the start is announced at once, and what peers have told us once a minute.
        self._announce_at = now + _ANNOUNCE if self._seen else now
        self._store.publish_endpoints(self._mesh.name, endpoints)
        self._announced, self._repeat_at = endpoints, now + _REPEAT
        return True

    def _read(self, local: Collection[IPAddress], now: float) -> bool:
        """Read while peers are searched for, ever more rarely if these stay the same. Return True if so."""
        searched = self._mesh.searched
        if searched - self._sought:
            self._pause = _READ
            self._read_at = min(self._read_at, now)
        self._sought = searched
        if not searched or now < self._read_at:
            return False
        try:
            self._texts = self._store.endpoints()
        finally:  # a name may have got another address while the store is down
            self._publish({name: text for name, text in self._texts.items() if name in searched}, local)
        self._read_at, self._pause = now + self._pause, min(2 * self._pause, _READ_AT_LAST)
        return True

    def _publish(self, texts: Mapping[str, str], local: Collection[IPAddress]) -> None:
        """Look names up, and let the table try the endpoints. The last addresses of a name stay."""
        names = names_in(texts.values())
        found = self._resolve(names) if names else {}
        self._named = {name: found.get(name) or self._named.get(name, ()) for name in names}
        published: dict[str, tuple[Endpoint, ...]] = {}
        for name, text in texts.items():
            refused: list[str] = []
            published[name] = usable(text, self._networks, local, self._named, refused.append)
            if refused:
                told = ", ".join(refused)
                self._once.warn(log, name, f"Refused an endpoint of {name}, {told}; correct it on its node")
        self._mesh.published = published


def resolver(stop: threading.Event) -> Callable[[Collection[str]], Mapping[str, Sequence[IPAddress]]]:
    """Return the function that looks names up, in a thread that may be left behind."""
    from flanneld.runtime.sockets.interruptible import look_up  # not imported without a mesh
    from flanneld.runtime.waits import DetachedCalls

    def resolve(names: Collection[str]) -> Mapping[str, Sequence[IPAddress]]:
        found: dict[str, Sequence[IPAddress]] = {}
        asked, until = list(names), clock.now() + _LOOKUP
        shuffle(asked)  # one that hangs does not always hide the same others

        def ask() -> None:
            for name in asked:
                if clock.now() < until:  # else the threads of many readings look up all names
                    found[name] = look_up(name)

        with suppress(Retryable):
            DetachedCalls(stop).run("lookup of peers' names", ask, _LOOKUP)
        return found.copy()

    return resolve


def ask_peers(port: int) -> Callable[[Sequence[IPAddress]], Collection[Endpoint]]:
    """Return the function that asks peers, whose daemons answer at a UDP port."""
    from flanneld.network.survey import queries  # sockets, which the table does not need

    def ask(targets: Sequence[IPAddress]) -> Collection[Endpoint]:
        try:
            replies = queries(targets, port, _WITHIN, 1)
        except OSError:
            return ()
        found = (parse(str(reply.facts.get("endpoint"))) for reply in replies.values())
        return [each for each in found if each is not None and not refusal(each)]

    return ask
