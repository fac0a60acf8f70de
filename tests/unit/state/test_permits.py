"""What the leases permit to make, and to remove."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address

from flanneld.backends.contract import Host
from flanneld.backends.vxlan import VxlanBackend
from flanneld.config import parse
from flanneld.model import Added, Cached, Event, IPNetwork, Lease, LeaseAttrs, Snapshot, Uplink
from flanneld.network.firewall.guard import Admitted
from flanneld.reconcile.peers import Peers
from flanneld.state.permits import Permits, RemovalGuard
from flanneld.state.resources import (
    FDB,
    GUARDS,
    LINKS,
    NEIGHBORS,
    ROUTES,
    FdbEntry,
    Neighbor,
    Resource,
    Route,
    WireGuard,
)
from flanneld.state.table import Put

OWN = Lease(LeaseAttrs(IPv4Address("192.0.2.5")), IPv4Network("10.1.5.0/24"))
PEER, UNREADABLE = IPv4Network("10.1.9.0/24"), IPv4Network("10.1.8.0/24")
MAC, OTHER_MAC = "02:00:00:00:00:09", "02:00:00:00:00:08"
#: More than the removal guard lets go at once.
CLEAR: list[Resource] = [
    Route(IPv4Network(f"10.1.{number}.0/24"), "eth0", IPv4Address(f"192.0.2.{number}"))
    for number in range(10, 40)
]
TUNNELLED: list[Resource] = [Route(IPv4Network("10.1.9.0/24"), "flannel-wg")]
DEVICES: list[Resource] = [WireGuard("flannel.1", 1450)]
BACKEND = VxlanBackend(
    parse('{"Network": "10.1.0.0/16"}'),
    Host(
        uplink=Uplink("eth0", 2, 1500, OWN.attrs.public_ip, OWN.attrs.public_ip),
        stored=None,
        mac_of=lambda _: "02:00:00:00:00:05",
        link_to=lambda _: None,
        random_bytes=bytes,
    ),
)


class World:
    """Permits, and the leases on which they rest."""

    def __init__(self, *, encrypts: bool = False) -> None:
        self.guard = RemovalGuard(is_on=True)
        self.peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], self.guard)
        self.is_complete = True
        self.permits = Permits(
            self.peers.known,
            self.guard,
            is_complete=lambda: self.is_complete,
            harms=lambda resource: encrypts and resource in CLEAR,
            routes=lambda: len(self.peers.desired.table(ROUTES)),
        )

    def hear(self, *events: Event) -> World:
        self.peers.take(events, BACKEND)
        return self


def permits(*, encrypts: bool) -> Permits:
    return World(encrypts=encrypts).permits


def peer(number: int = 9) -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"), backend_type="vxlan", backend_data={"VtepMAC": MAC})
    return Lease(attrs, IPv4Network(f"10.1.{number}.0/24"))


def synced(*leases: Lease, unreadable: tuple[IPNetwork, ...] = ()) -> Snapshot:
    keys = frozenset((net, None) for net in unreadable if isinstance(net, IPv4Network))
    return Snapshot((OWN, *leases), keys)


# ---- what may go ---------------------------------------------------------------------------------


def test_nothing_goes_before_the_leases_are_known() -> None:
    assert permits(encrypts=False).drops({ROUTES: CLEAR + TUNNELLED, LINKS: DEVICES}) == {}


def test_bypassing_routes_are_removed_before_the_leases_are_known() -> None:
    assert permits(encrypts=True).drops({ROUTES: CLEAR + TUNNELLED, LINKS: DEVICES}) == {ROUTES: CLEAR}
    assert permits(encrypts=True).drops({ROUTES: TUNNELLED, LINKS: DEVICES}) == {}


def test_bypassing_routes_are_removed_once_among_all_drops() -> None:
    world = World(encrypts=True).hear(synced())
    allowed = world.permits.drops({ROUTES: CLEAR + TUNNELLED, LINKS: DEVICES})
    assert {name: list(found) for name, found in allowed.items()} == {
        ROUTES: CLEAR + TUNNELLED,
        LINKS: DEVICES,
    }


def test_permits_of_no_encryption_take_no_route_for_a_leak() -> None:
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], RemovalGuard())
    assert Permits(peers.known).drops({ROUTES: CLEAR}) == {}


def test_ways_to_an_unreadable_lease_stay_and_all_others_go() -> None:
    world = World().hear(synced(unreadable=(UNREADABLE,)))
    ways: dict[str, list[Resource]] = {
        ROUTES: [Route(net, "flannel.1", net.network_address) for net in (PEER, UNREADABLE)],
        NEIGHBORS: [
            Neighbor("flannel.1", PEER.network_address, MAC),
            Neighbor("flannel.1", UNREADABLE.network_address, OTHER_MAC),
        ],
        FDB: [FdbEntry("flannel.1", mac, IPv4Address("192.0.2.9")) for mac in (MAC, OTHER_MAC)],
    }
    allowed = world.permits.drops(ways)
    assert {name: list(found) for name, found in allowed.items()} == {
        name: found[:1] for name, found in ways.items()
    }
    # The neighbour entry, which tells the MAC, may be read at another time.
    assert list(world.permits.drops({FDB: ways[FDB]})[FDB]) == ways[FDB][:1]


def test_guard_lets_in_all_nodes_of_before_while_a_lease_is_unreadable() -> None:
    stale: dict[str, list[Resource]] = {
        ROUTES: TUNNELLED,
        **{GUARDS[ip.version]: [Admitted(ip)] for ip in (IPv4Address("192.0.2.9"), IPv6Address("fd00::9"))},
    }
    world = World().hear(synced(unreadable=(UNREADABLE,)))
    assert set(world.permits.drops(stale)) == {ROUTES}
    world.hear(synced())
    assert set(world.permits.drops(stale)) == {*stale}


def test_devices_stay_until_all_that_replaces_them_is_there() -> None:
    world = World().hear(synced())
    world.is_complete = False
    assert world.permits.drops({ROUTES: TUNNELLED, LINKS: DEVICES}) == {ROUTES: tuple(TUNNELLED)}
    world.is_complete = True
    assert world.permits.drops({LINKS: DEVICES}) == {LINKS: tuple(DEVICES)}


def test_sweep_of_most_routes_is_held_and_devices_stay_as_long() -> None:
    world = World().hear(synced())
    assert world.permits.drops({ROUTES: CLEAR, LINKS: DEVICES}) == {
        ROUTES: tuple(CLEAR),
        LINKS: tuple(DEVICES),
    }
    world.permits.sweeps = True
    assert world.permits.drops({ROUTES: CLEAR, LINKS: DEVICES}) == {}
    world.permits.sweeps = False
    assert world.permits.drops({ROUTES: TUNNELLED, LINKS: DEVICES}) == {ROUTES: tuple(TUNNELLED)}


# ---- what may be made ----------------------------------------------------------------------------


def puts() -> tuple[Put, Put, Put]:
    """A route that is new, one that another stands for, and one that this node needs for itself."""
    new, other = TUNNELLED[0], Route(IPv4Network("10.1.7.0/24"), "flannel.1")
    return Put(new), Put(other, CLEAR[0]), Put(Route(OWN.subnet or PEER, "flannel.1"), CLEAR[1])


def test_all_may_be_made_with_leases_of_the_store() -> None:
    assert World().permits.puts(ROUTES, list(puts())) == list(puts())
    assert World().hear(synced()).permits.puts(ROUTES, list(puts())) == list(puts())


def test_leases_of_a_cache_replace_only_what_this_node_needs_for_itself() -> None:
    new, replacing, own = puts()
    world = World().hear(Cached((OWN, peer()), "a file"))
    world.peers.set_local([own.want])
    assert world.permits.puts(ROUTES, [new, replacing, own]) == [new, own]
    # What was taken away meanwhile stays so: what had stood there was newer than the cache.
    assert world.permits.puts(ROUTES, [new, Put(replacing.want), own]) == [new, own]
    # Each table by itself.
    assert world.permits.puts(NEIGHBORS, [Put(replacing.want)]) == [Put(replacing.want)]
    world.hear(synced(peer()), Added(peer(10)))
    assert world.permits.puts(ROUTES, [new, replacing, own]) == [new, replacing, own]
