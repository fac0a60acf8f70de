"""Election of the uplink, the interface between the nodes (pure).

The rules are those of flannel's ``LookupExtIface``. Facts are in the kernel's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.flags import compile_re2, quoted
from flanneld.errors import Fatal
from flanneld.model import FAMILIES, Family, IPAddress, Uplink

#: Addresses by family: IPv4Address for 4, IPv6Address for 6.
AddressOf = Mapping[Family, Any]

_BROADCAST = IPv4Address("255.255.255.255")


class LinkFact(Struct, frozen=True, gc=False):
    """An interface of this host; ``mtu`` in bytes."""

    name: str
    index: int
    mtu: int
    up: bool


class AddressFact(Struct, frozen=True, gc=False):
    """An address of the interface ``index``, with its flags (linux/if_addr.h, IFA_F_*)."""

    index: int
    address: IPAddress
    permanent: bool
    deprecated: bool
    temporary: bool
    tentative: bool

    @property
    def rank(self) -> tuple[bool, ...]:
        """Sort key of addresses, best first; the first flag that differs decides."""
        return (self.address.is_link_local, not self.permanent, self.temporary, self.tentative)

    @property
    def reachable(self) -> bool:
        """True unless the address is loopback, multicast, unspecified, broadcast or deprecated."""
        ip = self.address
        foreign = ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST
        return not (foreign or self.deprecated)


class DefaultRoute(Struct, frozen=True, gc=False):
    """A default route of the main table. ``index`` is 0 for none or several interfaces."""

    family: Family
    index: int


class RouteFact(Struct, frozen=True, gc=False):
    """Result of a route lookup: interface, source address and gateway."""

    index: int
    source: IPAddress | None
    gateway: IPAddress | None


class HostFacts(Struct, frozen=True, gc=False):
    """Interfaces, addresses and default routes of this host, in the kernel's order."""

    links: tuple[LinkFact, ...]
    addresses: tuple[AddressFact, ...]
    default_routes: tuple[DefaultRoute, ...]

    def link(self, wanted: str | int) -> LinkFact | None:
        """Return the interface with this name or index."""
        return next((link for link in self.links if wanted in (link.name, link.index)), None)

    def owner(self, address: IPAddress) -> LinkFact | None:
        """Return the first interface with this address, in any state."""
        indexes = {fact.index for fact in self.addresses if fact.address == address}
        return next((link for link in self.links if link.index in indexes), None)

    def usable(self, link: LinkFact, family: Family) -> list[IPAddress]:
        """Return the addresses that other nodes could send to, best first."""
        own = [fact for fact in self.addresses if fact.index == link.index and fact.reachable]
        own.sort(key=lambda fact: fact.rank)
        return [fact.address for fact in own if fact.address.version == family]


class InterfaceChoice(Struct, frozen=True, gc=False):
    """The operator's options in order of precedence. A public IP may be that of a NAT gateway."""

    ifaces: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    can_reach: str = ""
    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None

    def public(self, family: Family) -> IPAddress | None:
        return self.public_ip if family == 4 else self.public_ipv6


class Election(Struct, frozen=True, gc=False):
    """The uplink, and one line per earlier option with the reason for its rejection."""

    uplink: Uplink
    rejected: tuple[str, ...]


class NoInterface(Fatal):
    """Error for options that match no interface now. A new interface, address or route may change that."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        problem = f"found no external interface ({'; '.join(reasons)})"
        super().__init__(problem, "give --iface the name of the interface that reaches the other nodes")
        self.reasons = reasons


class _NoMatch(Exception):
    """Reason why one option matches no interface."""


RouteTo = Callable[[IPAddress], RouteFact | None]


def elect(
    choice: InterfaceChoice,
    facts: HostFacts,
    route_to: RouteTo,
    families: tuple[Family, ...],
    tell: Callable[[str], None] = lambda _: None,
) -> Election:
    """Choose the interface and its local address for each of ``families`` (at least one).

    ``tell`` gets what upstream logs before a search. Raises ``NoInterface`` if no option matches, or a plain
    ``Fatal`` if one of them is malformed. As in Go flannel, a malformed option does no harm if another one
    matches.
    """
    search = _Search(choice, facts, route_to, families)
    rejected: list[str] = []
    malformed: Fatal | None = None
    for wish, find, target in search.wishes():
        if not target:
            tell("Determining IP address of default interface")
        elif find == search.by_name and (address := _literal(target)):
            tell(f"Searching for interface using {address}")
        try:
            return Election(search.uplink(*find(target)), tuple(rejected))
        except _NoMatch as reason:
            rejected.append(f"{wish}: {reason}")
        except Fatal as error:
            malformed = malformed or error
            rejected.append(f"{wish}: {error}")
    raise malformed or NoInterface(tuple(rejected))


def keep(uplink: Uplink, facts: HostFacts) -> Uplink | None:
    """Return the uplink with its current index and MTU, None if a new election is needed.

    An interface stays elected while it keeps its name and addresses, even if a better one appears. A new
    public IP would have to be announced to every peer. Only a link-local address is none to stay for.
    """
    link = facts.link(uplink.name)
    if link is None or link.mtu == 0:
        return None
    held = {fact.address for fact in facts.addresses if fact.index == link.index}
    needed = {ip for family in FAMILIES if (ip := uplink.local(family)) is not None}
    worst = {ip.version for ip in needed if ip.is_link_local}
    outdone = any(not ip.is_link_local for family in worst for ip in facts.usable(link, family))
    return None if outdone or not needed <= held else replace(uplink, index=link.index, mtu=link.mtu)


def refuse_link_local(uplink: Uplink, former: Uplink) -> None:
    """Raise ``NoInterface`` for a link-local address in place of one that is not.

    The other comes back, as when a service of the host configures the interface again, or DAD ends. Peers
    refuse a link-local one.
    """
    for family in FAMILIES:
        now, before = uplink.local(family), former.local(family)
        if now and before and now.is_link_local and not before.is_link_local:
            raise NoInterface((f"{uplink.name} has lost {before}, and {now} is of its link only",))


#: An interface, and the addresses that the option determines.
_Found = tuple[LinkFact, AddressOf]


class _Search(Struct, frozen=True):
    """Search for the interface. Each method raises ``_NoMatch`` if it finds none."""

    choice: InterfaceChoice
    facts: HostFacts
    route_to: RouteTo
    families: tuple[Family, ...]

    def wishes(self) -> Iterator[tuple[str, Callable[[str], _Found], str]]:
        """Yield the searches in order, by option, and what each searches for."""
        choice = self.choice
        for name in choice.ifaces:
            yield f"--iface={name}", self.by_name, name
        for pattern in choice.regexes:
            yield f"--iface-regex={pattern}", self.by_pattern, pattern
        if choice.can_reach:
            yield f"--iface-can-reach={choice.can_reach}", self.by_route_to, choice.can_reach
        elif not choice.ifaces and not choice.regexes:
            public = next((str(ip) for family in self.families if (ip := choice.public(family))), "")
            yield f"public IP {public}" if public else "default route", self.by_name, public

    def by_name(self, name: str) -> _Found:
        """Find an interface by name or address. An empty name means the default route, as in Go flannel."""
        if not name:
            return self.by_default_route()
        address = _literal(name)
        if address is not None:
            return self.by_address(address)
        link = self.facts.link(name)
        if link is None:
            raise _NoMatch("there is no interface of this name")
        return link, {}

    def by_address(self, address: IPAddress) -> _Found:
        """Find the interface with an address.

        In dual stack the public IPv6 address must be on the same interface. It replaces an IPv6 literal, as
        in Go flannel.
        """
        if address.version not in self.families:
            raise _NoMatch(f"the network does not use IPv{address.version}")
        settled: dict[Family, IPAddress] = {address.version: address}
        if len(self.families) > 1 and self.choice.public_ipv6 is not None:
            settled[6] = self.choice.public_ipv6
        return _one({str(ip): self._owner(ip) for ip in settled.values()}), settled

    def _owner(self, address: IPAddress) -> LinkFact:
        link = self.facts.owner(address)
        if link is not None:
            return link
        nat = "; behind NAT also give --iface the name of the local interface"
        is_public = address == self.choice.public(address.version)
        raise _NoMatch(f"no interface has the address {address}{nat if is_public else ''}")

    def by_pattern(self, pattern: str) -> _Found:
        """Find an interface with a matching address of each family, else one with a matching name."""
        if not pattern:
            return self.by_default_route()
        regex = compile_re2(pattern)

        def match(link: LinkFact, family: Family) -> IPAddress | None:
            return next((ip for ip in self.facts.usable(link, family) if regex.search(str(ip))), None)

        for link in self.facts.links:
            matches = {family: match(link, family) for family in self.families}
            if all(matches.values()):
                return link, matches
        for link in self.facts.links:
            if regex.search(link.name):
                return link, {}
        raise _NoMatch(f"matches none of {', '.join(map(self._describe, self.facts.links))}")

    def _describe(self, link: LinkFact) -> str:
        addresses = [str(ip) for family in self.families for ip in self.facts.usable(link, family)]
        return f"{link.name}:[{' '.join(addresses)}]"

    def by_route_to(self, target: str) -> _Found:
        """Find the interface of a route lookup. The source address may be another interface's."""
        address = _literal(target)
        if address is None:
            raise Fatal(
                f"{quoted(target)} is not an IP address", "give --iface-can-reach an IPv4 or IPv6 address"
            )
        route = self.route_to(address)
        link = self.facts.link(route.index) if route else None
        if route is None or link is None:
            raise _NoMatch("no interface has a route to this address")
        return link, {route.source.version: route.source} if route.source else {}

    def by_default_route(self) -> _Found:
        return _one({f"IPv{family} default route": self._default(family) for family in self.families}), {}

    def _default(self, family: Family) -> LinkFact:
        route = next((route for route in self.facts.default_routes if route.family == family), None)
        if route is None:
            raise _NoMatch(f"there is no IPv{family} default route")
        link = self.facts.link(route.index)
        if link is None:
            raise _NoMatch(f"the IPv{family} default route does not lead to a single interface")
        return link

    def uplink(self, link: LinkFact, settled: AddressOf) -> Uplink:
        """Return the uplink, with the best address for each family that the option leaves open."""
        if link.mtu == 0:
            raise _NoMatch(f"{link.name} has MTU 0")
        local: AddressOf = {f: settled.get(f) or self._best(link, f) for f in self.families}
        public: AddressOf = {f: self.choice.public(f) or local[f] for f in self.families}
        addresses = (local.get(4), public.get(4), local.get(6), public.get(6))
        return Uplink(link.name, link.index, link.mtu, *addresses)

    def _best(self, link: LinkFact, family: Family) -> IPAddress:
        usable = self.facts.usable(link, family)
        if not usable:
            raise _NoMatch(f"{link.name} has no IPv{family} address that other nodes can reach")
        return usable[0]


def _one(links: Mapping[str, LinkFact]) -> LinkFact:
    """Return the interface that all entries share. Raises ``_NoMatch`` if they differ."""
    first = next(iter(links.values()))
    if any(link.index != first.index for link in links.values()):
        places = ", ".join(f"{thing} on {link.name}" for thing, link in links.items())
        raise _NoMatch(f"both families must use one interface, but there is {places}")
    return first


def _literal(text: str) -> IPAddress | None:
    """Return an address as Go's ``net.ParseIP`` parses it: without zone, IPv4 if IPv4-mapped."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        return None if address.scope_id else address.ipv4_mapped or address
    return address
