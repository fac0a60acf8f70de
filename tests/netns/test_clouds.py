"""Backends for clouds between real daemons: packets pass because the route is in the cloud's table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import Lab, wait_for
from tests.lab.clouds.cluster import CloudLab, cloud_lab
from tests.lab.daemon import own_command
from tests.lab.node import Node
from tests.netns.test_seeing import flannelctl

SOON = 60


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "gce"))


@pytest.fixture
def cloud(lab: Lab, kind: str) -> Iterator[CloudLab]:
    with cloud_lab(lab, kind) as made:
        yield made


def connected(cloud: CloudLab) -> tuple[Node, Node]:
    """Start two nodes whose containers reach each other."""
    first, second = cloud.nodes()
    for node in (first, second):
        cloud.launch(node)
    for node in (first, second):
        node.wait_ready(SOON)
    assert set(cloud.routes()) == {first.subnet(), second.subnet()}
    first.container().wait_for_reply(second.container(), SOON)
    return first, second


@pytest.mark.parametrize("kind", ["aws-vpc", "ali-vpc", "tencent-vpc"], indirect=True)
def test_containers_reach_each_other_by_the_clouds_table_alone(cloud: CloudLab) -> None:
    first, second = connected(cloud)
    assert second.stop().status == 0
    cloud.ask("drop_route", second.subnet())
    wait_for(
        lambda: not first.container().reaches(second.container(), 0.5), SOON, "packets to stop with the route"
    )
    cloud.run(second)
    first.container().wait_for_reply(second.container(), SOON)
    for node in (first, second):
        lease = cloud.lab.etcd.lease_values()[node.subnet()]
        assert lease == f'{{"PublicIP":"{node.address}"}}'


def test_a_restart_while_the_api_is_down_loses_no_packet(cloud: CloudLab) -> None:
    first, second = connected(cloud)
    with first.container().ping(second.container()) as ping:
        ping.wait_for_replies(20)
        cloud.ask("set", "is_down", True)
        second.kill()
        cloud.launch(second)
        second.wait_for_log("does not answer", SOON)
        ping.wait_for_replies(50)
        cloud.ask("set", "is_down", False)
        second.wait_for_log("In sync with", SOON)
        ping.wait_for_replies(20)
        assert ping.lost() == 0


def test_plan_routes_doctor_and_cleanup_know_the_cloud(cloud: CloudLab) -> None:
    (node,) = cloud.nodes(1)
    cloud.ask("forbid_forwarding", node.address)
    cloud.run(node)
    route = f"cloud route {node.subnet()} via {node.address}"

    def is_shown() -> bool:
        shown = flannelctl(node, "routes").stdout.splitlines()
        return any(line.split()[:2] == ["ok", "remote"] and route in line for line in shown)

    wait_for(is_shown, SOON, "the route to be shown")
    wait_for(lambda: "--can-ip-forward" in flannelctl(node, "doctor").stdout, SOON, "the doctor to explain")
    node.stop()
    cloud.ask("drop_route", node.subnet())
    planned = once(cloud, node, "--plan")
    assert f"# new: {route} in this node's table: compute.routes.insert name=flannel-10-5-" in planned
    assert cloud.routes() == {}
    cloud.run(node)
    node.stop()
    cloud.ask("set_route", "10.5.200.0/24", "somebody's")
    assert f"removed cloud route {node.subnet()}" in once(cloud, node, "--cleanup")
    assert cloud.routes() == {"10.5.200.0/24": "somebody's"}


def once(cloud: CloudLab, node: Node, flag: str) -> str:
    """Run the daemon's program for one errand; return what it says."""
    own = (f"--etcd-endpoints={node.endpoints}", f"--subnet-file={node.subnet_file}", flag)
    return node.run(*own_command(), *own, variables=cloud.environment()).stdout
