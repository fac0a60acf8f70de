"""The daemon stands still, is flooded, or hears of leases that flap: no packet is lost, all is right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import TTL
from tests.netns.apis import both_apis
from tests.netns.strangers import ABOVE_STRANGERS, PATIENT, Stranger, settle, wait_for_just
from tests.netns.test_seeing import HEALTH_PORT, answer, metrics

#: A renewal is due so many seconds before the end of a lease.
MARGIN = 3600
#: So often the service manager wants to hear of a daemon, in microseconds.
WATCHDOG = {"WATCHDOG_USEC": "10000000"}


def pair(lab: Lab, kind: str, *flags: str, **environment: str) -> tuple[Node, Node]:
    """Two nodes that reach each other, with nothing left to do; flags and variables are the first one's."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": kind}, **ABOVE_STRANGERS})
    node, peer = lab.add_nodes(2)
    node.start(*flags, environment=environment)
    peer.start()
    settle(node, peer)
    return node, peer


# ---- it stands still ---------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "kind"), [("v2", "host-gw"), ("v3", "vxlan")])
def test_ten_seconds_of_standstill_cost_no_packet_and_no_lease(lab: Lab, kind: str) -> None:
    node, peer = pair(lab, kind, **WATCHDOG)
    stay, go, come = ([Stranger(3 * i + place, kind) for i in range(5)] for place in range(3))
    for each in (*stay, *go):
        each.come(lab)
    wait_for_just(node, [*stay, *go])
    own = lab.etcd.leases()[node.subnet()]
    with node.container().ping(peer.container()) as ping:
        with node.paused():
            # Its renewal is due in the middle of the standstill.
            lab.etcd.put_lease(node.subnet(), own, ttl=MARGIN + 5)
            for old, new, kept in zip(go, come, stay, strict=True):
                old.go(lab)
                new.come(lab)
                kept.damage(node)
            ping.wait_for_replies(500, 2 * PATIENT)
        wait_for_just(node, [*stay, *come])
        wait_for(lambda: (lab.etcd.lease(node.subnet()) or {})["ttl"] > TTL - 60, PATIENT, "a full term")
        heard = len(node.service_manager.heard())
        wait_for(lambda: "WATCHDOG=1" in node.service_manager.heard()[heard:], PATIENT, "the watchdog")
        assert ping.lost() == 0
    assert len(node.wait_for_log("Lease renewed, new expiration: ")) == 1
    assert answer(node, "status")["health"]["late"] == []
    assert [line for line in node.log().splitlines() if line[0] in "EF"] == []


# ---- it is flooded -----------------------------------------------------------------------------

#: Routes of others, in a table of their own. Their notifications take far more room than there is.
FLOOD = 60_000
OTHERS = IPv4Address("100.64.0.0")
TABLE = "4711"
#: Repairs that did not have to wait for the next look at everything.
TOLD_AND_HEALED = 'flannel_heals_total{cause="notification",kind="route"}'


def others_routes(numbers: Iterable[int]) -> list[str]:
    return [f"route add {OTHERS + number} dev others table {TABLE}" for number in numbers]


def test_news_that_are_lost_in_a_flood_are_read_back(lab: Lab) -> None:
    node, peer = pair(lab, "vxlan", f"-healthz-port={HEALTH_PORT}")
    strangers = [Stranger(number) for number in range(3)]
    for each in strangers:
        each.come(lab)
    wait_for_just(node, strangers)
    node.namespace.ip("link add others type bridge", "link set others up")
    before = metrics(node)["flannel_netlink_overruns_total"]
    with node.container().ping(peer.container()) as ping:
        with node.paused():
            # What is lost is the news of the damage: it comes when there is no room any more.
            node.namespace.ip(*others_routes(range(FLOOD)))
            for each in strangers:
                each.damage(node)
        wait_for_just(node, strangers)
        assert ping.lost() == 0
    wait_for(
        lambda: metrics(node).get(TOLD_AND_HEALED) == len(strangers), PATIENT, "all repairs in the metrics"
    )
    assert metrics(node)["flannel_netlink_overruns_total"] > before
    routes = node.namespace.json("ip", "-j", "route", "show", "table", TABLE)
    assert len(routes) == FLOOD


def test_damage_in_the_middle_of_a_flood_is_made_good(lab: Lab) -> None:
    """Others make and remove interfaces, addresses, neighbours and routes without pause."""
    node, peer = pair(lab, "vxlan")
    stranger = Stranger(7)
    stranger.come(lab)
    wait_for_just(node, [stranger])
    with node.container().ping(peer.container()) as ping, flooded(node):
        for _ in range(5):
            stranger.damage(node)
            wait_for_just(node, [stranger])
        assert ping.lost() == 0
    assert [line for line in node.log().splitlines() if line[0] in "EF"] == []


@contextmanager
def flooded(node: Node) -> Iterator[None]:
    device = "dev others"
    changes = [
        "link add others type bridge",
        "link set others up",
        *others_routes(range(500)),
        *(f"neigh add {OTHERS + n} lladdr 02:00:00:00:ff:01 {device} nud permanent" for n in range(500)),
        *(f"address add {OTHERS + n}/32 {device}" for n in range(20)),
        "link del others",
    ]
    batch = node.directory / "changes"
    batch.write_text("\n".join(changes) + "\n")
    loop = f"while ip -batch {batch}; do :; done"
    with (node.directory / "flood.log").open("wb") as output:
        flood = node.namespace.start("sh", "-c", f"exec nice sh -c '{loop}'", output=output)
        try:
            yield
            assert flood.poll() is None, (node.directory / "flood.log").read_text()
        finally:
            flood.kill()
            flood.wait()


# ---- leases flap -------------------------------------------------------------------------------

#: What is said of one lease that comes or goes, in bytes of the log.
BYTES = 120


@both_apis
@pytest.mark.parametrize(
    ("number", "times"), [(200, 2), pytest.param(1000, 5, marks=pytest.mark.long)], ids=["200", "1000"]
)
def test_leases_that_flap_cost_no_packet_and_a_line_each_at_most(lab: Lab, number: int, times: int) -> None:
    node, peer = pair(lab, "vxlan")
    strangers = [Stranger(n) for n in range(number)]
    said = len(node.log())
    with node.container().ping(peer.container()) as ping:
        for _ in range(times):
            for each in strangers:
                each.come(lab)
            for each in strangers:
                each.go(lab)
        for each in strangers[::2]:
            each.come(lab)
        wait_for_just(node, strangers[::2])
        ping.wait_for_replies()
        assert ping.lost() == 0
    size = len(node.log()) - said
    events = (2 * times + 0.5) * number
    assert size < BYTES * events, f"{size / events:.0f} bytes an event"
    assert [line for line in node.log().splitlines() if line[0] in "EF"] == []
