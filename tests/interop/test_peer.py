"""Together with another daemon, named by ``FLANNELD_PEER``: in one network, and by turns on one node."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.crowd import swap_after_them, swap_both_ways
from tests.interop.mixed import mixed, replace_daemons
from tests.lab import Lab, own_command, peer_command, wait_for
from tests.netns.pair import connect
from tests.netns.test_etcd_move import migrate, nothing_lost, restart, subnets_in
from tests.netns.test_probes import probe
from tests.netns.test_seeing import answer, flannelctl

OURS, THEIRS = own_command(), peer_command()


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other(
    lab: Lab, backend: dict[str, Any], order: tuple[list[str], list[str]]
) -> None:
    first, second = mixed(lab, backend, *order)
    assert set(lab.etcd.leases()) == {first.subnet(), second.subnet()}


@pytest.mark.parametrize("kind", ["vxlan", "udp"])
def test_a_node_of_the_other_answers_probes_at_its_end_of_the_tunnel(lab: Lab, kind: str) -> None:
    (theirs,) = lab.cluster({"Type": kind}, nodes=1, command=THEIRS)
    (ours,) = lab.cluster({"Type": kind}, nodes=1, flags=("--peer-probes=600",))
    theirs.container()
    wait_for(lambda: probe(ours).get("rtt"), 60, "an answer")
    assert probe(ours)["target"] == theirs.subnet().removesuffix("/24")


def test_node_of_the_other_is_examined_without_a_responder(lab: Lab) -> None:
    """Its kernel answers: by ICMP, and by a refusal of UDP, which shows that UDP arrives."""
    ours, theirs = mixed(lab, {"Type": "vxlan"}, OURS, THEIRS)
    container = theirs.container().address
    wait_for(
        lambda: answer(ours, "ping", container, "--count=2")["stops_at"] is None, 60, "a way that is open"
    )
    node = {each["subnets"][0]: each for each in answer(ours, "nodes")["nodes"]}[theirs.subnet()]
    assert (node["state"], node["answers"], node["version"]) == ("ok", "kernel", None)
    assert "Go's daemon answers no queries" in flannelctl(ours, "nodes").stdout
    checks = {each["check"]: each["state"] for each in answer(ours, "netcheck", theirs.subnet())["checks"]}
    assert (checks["port"], checks["checksums"]) == ("ok", "ok")
    theirs.run("nft", "add table inet fault")
    theirs.run("nft", "add chain inet fault input { type filter hook input priority -400; }")
    theirs.run("nft", "add rule inet fault input udp dport 8470 udp checksum != 0 drop")
    checks = {each["check"]: each["state"] for each in answer(ours, "netcheck", theirs.subnet())["checks"]}
    assert checks["checksums"] == "PROBLEM"


def test_a_node_that_leaves_is_led_to_by_neither(lab: Lab, backend: dict[str, Any]) -> None:
    ours, theirs, gone = mixed(lab, backend, OURS, THEIRS, OURS)
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    for node in (ours, theirs):
        node.wait_for_no_route(gone.subnet())
    assert ours.container().reaches(theirs.container())


@pytest.mark.parametrize(
    "turns", [(OURS, THEIRS, OURS), (THEIRS, OURS, THEIRS)], ids=["from-ours", "from-theirs"]
)
def test_changing_the_daemon_on_a_live_node_loses_nothing(
    lab: Lab, backend: dict[str, Any], turns: tuple[list[str], ...]
) -> None:
    node, peer = mixed(lab, backend, turns[0], turns[1])
    replace_daemons(lab, node, peer, turns[1:])


@pytest.mark.long
@pytest.mark.parametrize("swap", [swap_both_ways, swap_after_them])
def test_changing_the_daemon_among_thousands_of_peers_loses_and_leaves_nothing(
    lab: Lab, swap: Callable[..., None]
) -> None:
    swap(lab, THEIRS, hears_all=True)


def test_a_cluster_of_the_other_daemon_moves_to_v3_of_etcd(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "vxlan"}, nodes=2, command=THEIRS)
    subnets = [node.subnet() for node in nodes]
    with nothing_lost(nodes):
        for node in nodes:
            node.kill()
            node.start("-etcd-api=both")
            node.wait_ready(20)
        migrate(lab, nodes[0])
        for node in nodes:
            restart(node, "v3")
    assert [node.subnet() for node in nodes] == subnets
    assert subnets_in(lab, "v3") == set(subnets)


@pytest.mark.parametrize(("kind", "also"), [("vxlan", "host-gw"), ("host-gw", "vxlan")])
def test_the_other_daemon_ignores_a_second_backend(lab: Lab, kind: str, also: str) -> None:
    """Neither our lease nor the network config keeps it from its work; it stays where it was."""
    (theirs,) = lab.cluster({"Type": kind}, nodes=1, command=THEIRS)
    both = {"Type": kind, "Also": {"Type": also}}
    (ours,) = lab.cluster(both, nodes=1)
    (later,) = lab.cluster(both, nodes=1, command=THEIRS)
    assert lab.etcd.leases()[ours.subnet()]["BackendData"]["Also"]["Type"] == also
    for one, other in itertools.permutations((theirs, ours, later), 2):
        connect(one, other)
