"""This node's route in each of the four clouds: made, kept, replaced and swept, and nobody else's touched."""

from __future__ import annotations

import json

from flanneld.backends.cloud.contract import ErrorKind
from flanneld.state.table import Put, Scope
from tests.unit.backends.cloud.bench import OURS, SUBNET, THEIRS, Bench

MADE = [f"cloud route {SUBNET} via {OURS} in this node's table"]


def test_the_route_is_made_once_and_then_left_alone(cloud: Bench) -> None:
    node = cloud.node()
    assert node.audit() == (MADE, [])
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    cloud.wait()
    assert node.audit() == ([], [])
    assert cloud.cloud.made("create") == 1


def test_the_table_asks_again_within_minutes_and_not_always_after_the_same_time(cloud: Bench) -> None:
    periods = {cloud.node().routes.audit for _ in range(20)}
    assert len(periods) > 1
    assert all(120 <= period <= 300 for period in periods)


def test_a_route_that_somebody_removed_is_restored(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.drop_route(SUBNET)
    cloud.wait()
    assert node.audit() == (MADE, [])
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}


def test_a_living_instances_route_in_our_place_stays_and_is_named(cloud: Bench) -> None:
    cloud.cloud.set_route(SUBNET, cloud.their_hop)
    node = cloud.node()
    assert node.audit() == ([], [])
    assert cloud.cloud.routes() == {SUBNET: cloud.their_hop}
    complaint = node.complaint()
    assert cloud.their_hop in complaint
    assert SUBNET in complaint
    assert "delete the route" in complaint
    cloud.cloud.drop_route(SUBNET)
    cloud.wait()
    assert node.audit()[0] == MADE


def test_a_vanished_instances_route_in_our_place_is_replaced(cloud: Bench) -> None:
    cloud.cloud.set_route(SUBNET, cloud.their_hop)
    cloud.cloud.terminate(THEIRS)
    assert cloud.node().audit() == (MADE, [])
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    if cloud.cloud.kind != "gce":  # its API replaces no route
        assert cloud.cloud.made("delete", "create") == 0


def test_routes_of_vanished_instances_are_swept_after_the_leases_are_known(cloud: Bench) -> None:
    cloud.cloud.set_route("10.5.9.0/24", cloud.their_hop)
    cloud.cloud.terminate(THEIRS)
    node = cloud.node()
    assert node.audit(sweep=False)[1] == []
    assert len(node.audit()[1]) == 1
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}


def test_our_former_route_is_swept(cloud: Bench) -> None:
    cloud.node(subnet="10.5.7.0/24").audit()
    cloud.wait()
    node = cloud.node()
    node.audit()
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}


def test_foreign_cloud_routes_stay(cloud: Bench) -> None:
    others = {
        "10.5.8.0/24": cloud.their_hop,  # a living node's
        "10.6.0.0/24": cloud.hop,  # outside the network
        "192.0.2.0/24": cloud.their_hop,
        "10.5.64.0/18": cloud.hop,  # no lease has this shape
    }
    for destination, hop in others.items():
        cloud.cloud.set_route(destination, hop)
    cloud.node().audit()
    assert cloud.cloud.routes() == others | {SUBNET: cloud.hop}


def test_dead_routes_outside_the_network_stay(cloud: Bench) -> None:
    cloud.cloud.set_route("10.6.1.0/24", cloud.their_hop)
    cloud.cloud.set_route("10.5.64.0/18", cloud.their_hop)
    cloud.cloud.terminate(THEIRS)
    cloud.node().audit()
    assert set(cloud.cloud.routes()) == {"10.6.1.0/24", "10.5.64.0/18", SUBNET}


def test_mass_loss_of_instances_is_confirmed_by_a_second_read(cloud: Bench) -> None:
    stale = [f"10.5.{100 + i}.0/24" for i in range(12)]
    for destination in stale:
        cloud.cloud.set_route(destination, cloud.their_hop)
    cloud.cloud.terminate(THEIRS)
    node = cloud.node()
    assert node.audit() == (MADE, [])
    cloud.wait()
    assert len(node.audit()[1]) == len(stale)
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}


def test_a_write_that_reads_do_not_show_yet_is_not_repeated(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    # The last reading was before the write, so that is what stale reads repeat.
    cloud.cloud.stale[cloud.cloud.actions["list"]] = 3
    assert node.audit() == ([], [])
    assert node.state().failed == ()
    assert node.routes.next_look <= cloud.clock.now() + 10
    cloud.cloud.stale.clear()
    cloud.wait()
    assert node.audit() == ([], [])
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    assert cloud.cloud.made("create") == 1


def test_a_route_that_is_there_though_no_read_shows_it_is_found_by_the_next_try(cloud: Bench) -> None:
    node = cloud.node()
    cloud.cloud.fail("create", ErrorKind.EXISTS)
    assert node.audit() == ([], [])
    cloud.wait()
    assert node.audit()[0] == MADE


def test_the_record_names_our_routes_and_no_secret(cloud: Bench) -> None:
    has_keys = cloud.cloud.kind in ("ali-vpc", "tencent-vpc")
    key = {"AccessKeyID": "lab-key", "AccessKeySecret": "lab-secret"} if has_keys else {}
    cloud.node(**key).audit()
    path = cloud.room / "flanneld.cloud"
    content = json.loads(path.read_text())
    assert content["type"] == cloud.cloud.kind
    assert [route["destination"] for route in content["routes"]] == [SUBNET]
    assert "lab-" not in path.read_text().replace("rtb-lab", "").replace("vtb-lab", "").replace(
        "zones/lab-", ""
    )
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_dry_run_tells_the_calls_that_a_start_would_make(cloud: Bench) -> None:
    node = cloud.node()
    desired = {each.key: each for each in node.desired if each.key[0] == "cloud-routes"}
    node.routes.read(Scope(desired))
    (want,) = desired.values()
    shown = node.routes.explain(Put(want))
    assert cloud.cloud.actions["create"].rsplit(".", 1)[-1] in shown
    assert SUBNET in shown
    assert cloud.hop in shown
    assert cloud.cloud.made("create") == 0
