"""The udp backend beside another daemon's: the same packets on the wire, with either data plane."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Container, Lab, Node, own_command, peer_command
from tests.netns.exchange import check_content
from tests.netns.test_cleanup import cleanup

OURS, THEIRS = own_command(), peer_command()


@pytest.fixture(params=["native", "python"])
def mixed(request: pytest.FixtureRequest, lab: Lab) -> tuple[Node, Node]:
    """Our node and theirs, whose containers reach each other."""
    backend = {"Type": "udp", "DataPlane": request.param}
    (ours,) = lab.cluster(backend, nodes=1, command=OURS)
    (theirs,) = lab.cluster(backend, nodes=1, command=THEIRS)
    ours.container().wait_for_reply(theirs.container(), 10)
    theirs.container().wait_for_reply(ours.container(), 10)
    return ours, theirs


def ping(source: Container, target: Container, *flags: str) -> str:
    """Return what ping says once an answer or an error has come: a busy host takes long."""
    command = ("ping", "-n", "-c", "1", "-W", "10", *flags, target.address)
    return source.run(*command, check=False).stdout


def test_packets_arrive_unchanged(mixed: tuple[Node, Node]) -> None:
    ours, theirs = mixed
    check_content(ours.container(), theirs.container(), ours.directory / "echo")
    check_content(theirs.container(), ours.container(), theirs.directory / "echo")


def test_both_treat_packets_alike(mixed: tuple[Node, Node]) -> None:
    """Sizes up to the MTU pass unfragmented, and a hop costs as much one way as the other."""
    ours, theirs = (node.container() for node in mixed)
    for source, target in ((ours, theirs), (theirs, ours)):
        for flags, passes in ((("-s", "1444", "-M", "do"), True), (("-s", "1445", "-M", "do"), False)):
            assert ("ttl=60" in ping(source, target, *flags)) is passes
        assert "ttl=60" in ping(source, target, "-s", "8000")
        assert "ttl=60" in ping(source, target, "-s", "60000")
        assert ["ttl=" in ping(source, target, "-t", str(ttl)) for ttl in range(1, 6)] == [False] * 4 + [True]


def test_a_route_with_a_smaller_mtu_than_the_devices_is_no_obstacle(mixed: tuple[Node, Node]) -> None:
    ours, theirs = mixed
    for node, other in (mixed, mixed[::-1]):
        node.namespace.ip(f"route add {other.address}/32 dev eth0 mtu 1400")
    check_content(ours.container(), theirs.container(), ours.directory / "echo", size=1 << 19)
    check_content(theirs.container(), ours.container(), theirs.directory / "echo", size=1 << 19)


def test_both_write_leases_alike(lab: Lab, mixed: tuple[Node, Node]) -> None:
    values = [json.loads(found["value"]) for found in lab.etcd.children("subnets")]
    assert sorted(values, key=str) == [{"PublicIP": node.address} for node in mixed]


@pytest.mark.parametrize("plane", ["native", "python"])
def test_back_to_the_other_daemon_and_here_again(lab: Lab, plane: str) -> None:
    backend: dict[str, Any] = {"Type": "udp", "DataPlane": plane}
    node, peer = lab.cluster(backend)
    node.container().wait_for_reply(peer.container())
    for command in (THEIRS, OURS, THEIRS):
        node.stop()
        if command == THEIRS:
            subnet_file = node.subnet_file.read_text()
            cleanup(node)
            node.subnet_file.write_text(subnet_file)
        node.start(command=command)
        node.wait_ready(10)
        node.container().wait_for_reply(peer.container(), 10)
        assert [row["dst"] for row in node.routes("flannel0")] == ["10.5.0.0/16"]
