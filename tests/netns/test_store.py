"""A store that goes away, forgets, or holds nonsense: no peer is lost and no news is missed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.bench.process import cpu_seconds
from tests.lab import Lab, Node, wait_for
from tests.lab.namespace import suspend
from tests.netns.apis import both_apis

MAC = "02:00:00:00:00:{:02x}"


def vxlan(number: int, mac: str = "") -> dict[str, Any]:
    """What a node announces; its number ends its address and its MAC."""
    data = {"VtepMAC": mac or MAC.format(number)}
    return {"PublicIP": f"198.18.0.{number}", "BackendType": "vxlan", "BackendData": data}


def host_gw(number: int) -> dict[str, Any]:
    return {"PublicIP": f"198.18.0.{number}", "BackendType": "host-gw"}


def overlay_routes(node: Node) -> dict[str, str]:
    """The gateway of each peer's subnet."""
    found = [route for route in node.routes() if route["dst"].startswith("10.5.")]
    return {route["dst"]: route["gateway"] for route in found if "gateway" in route}


def complaints(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if not line.startswith("I")]


def said_of_etcd(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if "etcd" in line]


def connected(nodes: list[Node]) -> tuple[Node, Node]:
    first, second = nodes
    first.container().wait_for_reply(second.container())
    return first, second


# ---- etcd goes away ----------------------------------------------------------------------------


@both_apis
@pytest.mark.parametrize(
    ("backend_type", "seconds"),
    [
        ("vxlan", 5),
        pytest.param("vxlan", 30, marks=pytest.mark.long),
        pytest.param("host-gw", 30, marks=pytest.mark.long),
    ],
)
def test_an_outage_of_etcd_costs_no_packet_no_news_and_few_words(
    lab: Lab, backend_type: str, seconds: int
) -> None:
    first, second = connected(lab.cluster({"Type": backend_type}))
    before = len(said_of_etcd(first))
    with first.container().ping(second.container()) as ping:
        lab.etcd.kill()
        ping.wait_for_replies(seconds * 50, 2 * seconds)
        lab.etcd.start()
        lab.etcd.put_lease("10.5.0.0/24", {**vxlan(200), "BackendType": backend_type})
        first.wait_for_route("10.5.0.0/24")
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert len(said_of_etcd(first)) - before <= 8


@both_apis
def test_an_etcd_that_hangs_costs_no_packet_and_no_news(lab: Lab) -> None:
    first, second = connected(lab.cluster({"Type": "vxlan"}))
    with first.container().ping(second.container()) as ping:
        with lab.etcd.frozen():
            ping.wait_for_replies(100)
        lab.etcd.put_lease("10.5.0.0/24", vxlan(200))
        first.wait_for_route("10.5.0.0/24")
        assert ping.lost() == 0


# ---- etcd comes back with a backup ---------------------------------------------------------------


@both_apis
@pytest.mark.parametrize("writes", [0, 200], ids=["behind", "overtaken"])
def test_a_backup_that_was_put_back_is_followed(lab: Lab, writes: int) -> None:
    """Whether its revision is lower than the one that the daemon knows, or has overtaken it meanwhile."""
    first, second = connected(lab.cluster({"Type": "host-gw"}, SubnetMin="10.5.100.0"))
    lab.etcd.back_up()
    lab.etcd.write(100)
    lab.etcd.put_lease("10.5.1.0/24", host_gw(201))
    first.wait_for_route("10.5.1.0/24")
    with first.container().ping(second.container()) as ping:
        with stopped(lab, first):
            lab.etcd.kill()
            lab.etcd.restore()
            lab.etcd.start()
            lab.etcd.put_lease("10.5.2.0/24", host_gw(202))
            lab.etcd.write(writes)
        wait_for(lambda: set(overlay_routes(first)) == {second.subnet(), "10.5.2.0/24"}, 5)
        ping.wait_for_replies()
        assert ping.lost() == 0


# ---- etcd forgets ------------------------------------------------------------------------------


@contextmanager
def stopped(_lab: Lab, node: Node) -> Iterator[None]:
    suspend(node.pid)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


@contextmanager
def cut_off(lab: Lab, node: Node) -> Iterator[None]:
    with lab.unplugged(node):
        yield


@contextmanager
def facing_another_etcd_process(lab: Lab, node: Node) -> Iterator[None]:
    """etcd's history is in its memory, and gone with its process."""
    with stopped(lab, node):
        yield
        lab.etcd.restart()


@both_apis
@pytest.mark.parametrize("absent", [stopped, cut_off, facing_another_etcd_process])
def test_changes_beyond_the_history_are_noticed(lab: Lab, absent: Any) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    for number in (1, 2, 3):
        lab.etcd.put_lease(f"10.5.{number}.0/24", host_gw(200 + number))
        node.wait_for_route(f"10.5.{number}.0/24")
    with absent(lab, node):
        lab.etcd.forget_history()
        lab.etcd.put_lease("10.5.4.0/24", host_gw(204))
        lab.etcd.put_lease("10.5.2.0/24", host_gw(222))
        last = lab.etcd.put_lease("10.5.3.0/24", host_gw(203))
        lab.etcd.delete_lease("10.5.3.0/24")
        lab.etcd.forget_history()
        assert lab.etcd.has_forgotten(last)
    wanted = {"10.5.1.0/24": "198.18.0.201", "10.5.2.0/24": "198.18.0.222", "10.5.4.0/24": "198.18.0.204"}
    wait_for(lambda: overlay_routes(node) == wanted, what=f"{wanted}")
    lab.etcd.put_lease("10.5.5.0/24", host_gw(205))
    node.wait_for_route("10.5.5.0/24")


def test_changes_after_etcd_has_dropped_the_stream_are_noticed(lab: Lab) -> None:
    """In v2 the stream stays open, and nothing more comes of it."""
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    for number in (1, 2):
        lab.etcd.put_lease(f"10.5.{number}.0/24", host_gw(200 + number))
        node.wait_for_route(f"10.5.{number}.0/24")
    with stopped(lab, node):
        lab.etcd.drop_streams()
        lab.etcd.delete_lease("10.5.1.0/24")
        lab.etcd.put_lease("10.5.3.0/24", host_gw(203))
    wanted = {"10.5.2.0/24": "198.18.0.202", "10.5.3.0/24": "198.18.0.203"}
    wait_for(lambda: overlay_routes(node) == wanted, what=f"{wanted}")
    assert "Relisting" not in node.log()
    lab.etcd.put_lease("10.5.4.0/24", host_gw(204))
    node.wait_for_route("10.5.4.0/24")


def test_changes_beyond_the_history_of_a_dropped_stream_are_noticed(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    lab.etcd.put_lease("10.5.1.0/24", host_gw(201))
    node.wait_for_route("10.5.1.0/24")
    with stopped(lab, node):
        lab.etcd.drop_streams()
        lab.etcd.delete_lease("10.5.1.0/24")
        last = lab.etcd.put_lease("10.5.2.0/24", host_gw(202))
        lab.etcd.put_often("/unrelated", 1100)
        assert lab.etcd.has_forgotten(last)
    wait_for(lambda: overlay_routes(node) == {"10.5.2.0/24": "198.18.0.202"}, what="the other route")
    assert "has compacted its history" in node.log()


#: More than etcd's v2 API remembers.
MANY = 1200
#: Leases between two looks at the daemon, and how many it may be behind: less than etcd remembers.
PACE, LAG = 200, 600


def wait_for_routes(node: Node, least: int, most: int) -> None:
    wait_for(lambda: least <= len(overlay_routes(node)) <= most, what=f"{least} to {most} routes")


@pytest.mark.parametrize("api", ["v2", pytest.param("v3", marks=pytest.mark.long)])
def test_removals_as_fast_as_etcd_takes_them_are_followed_one_by_one(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0", SubnetLen=28)
    subnets = [f"10.5.{number // 16}.{16 * (number % 16)}/28" for number in range(MANY)]
    for number, subnet in enumerate(subnets):
        lab.etcd.put_lease(subnet, host_gw(200 + number % 50))
        if number % PACE == 0:
            wait_for_routes(node, number - LAG, MANY)
    wait_for_routes(node, MANY, MANY)
    for number, subnet in enumerate(subnets):
        lab.etcd.delete_lease(subnet)
        if number % PACE == 0:
            wait_for_routes(node, 0, MANY - number + LAG)
    wait_for_routes(node, 0, 0)
    assert "Relisting" not in node.log()
    assert "Removals suspended" not in node.log()


@both_apis
def test_an_etcd_that_lost_its_data_ends_the_daemons_and_not_the_traffic(lab: Lab) -> None:
    first, second = connected(lab.cluster({"Type": "vxlan"}))
    before = lab.etcd.leases()
    with first.container().ping(second.container()) as ping:
        lab.etcd.kill()
        lab.etcd.forget()
        lab.etcd.start()
        for node in (first, second):
            assert node.daemon.wait(20).status == 0
            assert len(node.wait_for_log("Lease has been revoked")) == 1
        ping.wait_for_replies()
        assert ping.lost() == 0
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    for node in (first, second):
        node.start()
        node.wait_ready()
    assert lab.etcd.leases() == before
    first.container().wait_for_reply(second.container())


# ---- leases come and go ------------------------------------------------------------------------


@both_apis
def test_a_lease_that_expires_takes_its_peer_along(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    lab.etcd.put_lease("10.5.0.0/24", host_gw(200), ttl=2)
    node.wait_for_route("10.5.0.0/24")
    node.wait_for_no_route("10.5.0.0/24")
    assert lab.etcd.lease("10.5.0.0/24") is None


# ---- etcd holds nonsense -----------------------------------------------------------------------

GARBAGE = {
    "not JSON": "{no",
    "empty": "",
    "a list": "[]",
    "null": "null",
    "a number for an address": json.dumps({**vxlan(99), "PublicIP": 5}),
    "an impossible address": json.dumps({**vxlan(99), "PublicIP": "198.18.0.300"}),
    "no address": json.dumps({**vxlan(99), "PublicIP": None}),
    "a type that is no text": json.dumps({**vxlan(99), "BackendType": 7}),
    "no backend data": json.dumps({**vxlan(99), "BackendData": None}),
    "backend data of another kind": json.dumps({**vxlan(99), "BackendData": "02:00:00:00:00:01"}),
    "no MAC": json.dumps({**vxlan(99), "BackendData": {}}),
    "an impossible MAC": json.dumps(vxlan(99, "02:00:00:00:00:xx")),
    "a MAC of many": json.dumps(vxlan(99, "01:00:5e:00:00:01")),
    "far too much": json.dumps(vxlan(99, "0" * 1_000_000)),
    "too deep": "[" * 100_000,
}
NUMBERS = range(100, 100 + len(GARBAGE))  # of the peers whose leases hold that
BAD_NAMES = ("hello", "10.5.x.0-24", "10.5.251.0-33", "10.5.252.0-24-7", "10.5.253.0", "10.5.254.0-24/nested")


def put_garbage(lab: Lab) -> None:
    for number, value in zip(NUMBERS, GARBAGE.values(), strict=True):
        lab.etcd.set(f"subnets/10.5.{number}.0-24", value)


def put_peers(lab: Lab) -> None:
    for number in NUMBERS:
        lab.etcd.put_lease(f"10.5.{number}.0/24", vxlan(number))


def wait_for_news(lab: Lab, node: Node) -> None:
    """Wait until the daemon has dealt with all that is in the store now."""
    lab.etcd.put_lease("10.5.200.0/24", vxlan(200))
    node.wait_for_route("10.5.200.0/24")
    lab.etcd.delete_lease("10.5.200.0/24")
    node.wait_for_no_route("10.5.200.0/24")


def check_complaints(node: Node) -> None:
    """There is one line for each key, and no other."""
    said = complaints(node)
    marks = [f"10.5.{number}.0" for number in NUMBERS] + [name.partition("-")[0] for name in BAD_NAMES]
    assert {mark: sum(mark in line for line in said) for mark in marks} == dict.fromkeys(marks, 1)
    assert len(said) == len(marks)
    assert max(map(len, said)) < 500


@both_apis
def test_nonsense_is_complained_about_once_a_key_and_hurts_nobody_else(lab: Lab) -> None:
    first, second = connected(lab.cluster({"Type": "vxlan"}, SubnetMax="10.5.50.0"))
    first.wait_for_log("Made our rules")
    before = first.kernel_state("flannel.1")
    with first.container().ping(second.container()) as ping:
        put_garbage(lab)
        for name in BAD_NAMES:
            lab.etcd.set(f"subnets/{name}", json.dumps(vxlan(99)))
        wait_for_news(lab, first)
        cpu = cpu_seconds(first.pid)
        ping.wait_for_replies(50)
        assert cpu_seconds(first.pid) - cpu < 0.1
        check_complaints(first)
        first.stop()
        first.start()
        first.wait_ready()
        wait_for_news(lab, first)
        assert ping.lost() == 0
    check_complaints(first)
    wait_for(lambda: first.kernel_state("flannel.1") == before, what="the state of before")


def test_senseless_leases_that_are_put_right_are_taken(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMax="10.5.50.0")
    put_garbage(lab)
    put_peers(lab)
    wanted = {f"10.5.{number}.0/24": f"10.5.{number}.0" for number in NUMBERS}
    wait_for(lambda: overlay_routes(node) == wanted, what=f"{wanted}")


def test_garbage_over_good_leases_keeps_the_ways_to_the_peers(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMax="10.5.50.0")
    put_peers(lab)
    wait_for_news(lab, node)
    node.wait_for_log("Made our rules")
    before = node.kernel_state("flannel.1")
    put_garbage(lab)
    wait_for_news(lab, node)
    assert lost_routes(node, before) == []
    wait_for(lambda: node.kernel_state("flannel.1") == before, what="the state of before")
    for number in NUMBERS:
        lab.etcd.delete_lease(f"10.5.{number}.0/24")
    wait_for(lambda: not node.fdb("flannel.1"), what="the peers to go")
    assert overlay_routes(node) == {}


def lost_routes(node: Node, before: dict[str, Any]) -> list[str]:
    """The garbage in the leases of the peers whose routes are missing."""
    names = dict(zip((f"10.5.{number}.0/24" for number in NUMBERS), GARBAGE, strict=True))
    there = overlay_routes(node)
    return [names[route["dst"]] for route in before["flannel.1"]["routes-4"] if route["dst"] not in there]


def test_a_restart_keeps_the_ways_to_peers_whose_leases_are_garbage_now(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMax="10.5.50.0")
    put_peers(lab)
    wait_for_news(lab, node)
    before = node.kernel_state("flannel.1")
    put_garbage(lab)
    node.stop()
    node.start()
    node.wait_ready()
    wait_for_news(lab, node)
    assert lost_routes(node, before) == []


#: What a node that may write leases could draw to itself.
HIJACKS = {
    "0.0.0.0/0": "outside our network",
    "8.0.0.0/6": "outside our network",
    "198.18.0.254/32": "outside our network",
    "10.5.0.0/16": "overlaps our own subnet",
}


def test_a_peer_cannot_draw_traffic_to_itself_that_is_not_its_own(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMax="10.5.50.0")
    before = node.routes()
    for subnet in (*HIJACKS, node.subnet().replace("/24", "/25")):
        lab.etcd.put_lease(subnet, vxlan(99))
    wait_for_news(lab, node)
    said = complaints(node)
    assert [
        any(f"lease {subnet}: it" in line and why in line for line in said) for subnet, why in HIJACKS.items()
    ]
    assert len(said) == len(HIJACKS) + 1
    node.stop()
    node.start()
    node.wait_ready()
    wait_for_news(lab, node)
    assert node.routes() == before


def test_a_peer_that_runs_another_backend_now_is_led_to_no_more(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMax="10.5.50.0")
    lab.etcd.put_lease("10.5.100.0/24", vxlan(100))
    node.wait_for_route("10.5.100.0/24")
    lab.etcd.put_lease("10.5.100.0/24", host_gw(100))
    node.wait_for_no_route("10.5.100.0/24")
    wait_for_news(lab, node)
    (complaint,) = complaints(node)
    assert "10.5.100.0/24 is a host-gw node, we run vxlan" in complaint
