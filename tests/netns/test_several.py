"""Several daemons on one host, and the blackhole route."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import Daemon, own_command


def blackholes(node: Node) -> list[dict[str, Any]]:
    return node.namespace.json("ip", "-j", "route", "show", "type", "blackhole")


def test_a_blackhole_lies_behind_every_other_route_and_heals(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    first, second = lab.add_nodes(2)
    for node in (first, second):
        node.start("--ip-blackhole-route")
        node.wait_ready()
    assert [(route["dst"], route["metric"]) for route in blackholes(first)] == [(first.subnet(), 65535)]
    first.container().wait_for_reply(second.container())
    second.container().wait_for_reply(first.container())

    first.run("ip", "route", "del", "blackhole", first.subnet(), "metric", "65535")
    wait_for(lambda: blackholes(first), 3, "the blackhole to come back")
    assert first.wait_for_log("Healed: blackhole")

    assert first.stop().status == 0
    first.start()
    wait_for(lambda: not blackholes(first), 5, "the blackhole to go when it is not asked for")


def leads_twice_to(node: Node, peer: Node) -> bool:
    routes = [route for route in node.routes("eth0") if route["dst"].startswith("10.")]
    return [route["gateway"] for route in routes] == [peer.address] * 2


def test_two_daemons_with_host_gw_on_one_host_leave_each_other_alone(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    lab.etcd.set(
        "/other/config", '{"Network": "10.6.0.0/16", "SubnetLen": 24, "Backend": {"Type": "host-gw"}}'
    )
    nodes = lab.add_nodes(2)
    for node in nodes:
        node.start()
        node.wait_ready()
    other = [*own_command(), f"--etcd-endpoints={lab.etcd.endpoint}", "--etcd-prefix=/other"]
    daemons = [
        Daemon(
            node.namespace,
            [*other, f"--subnet-file={node.directory / 'other.env'}"],
            node.directory / "other.log",
            {},
        )
        for node in nodes
    ]
    try:
        for node, peer in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
            wait_for(partial(leads_twice_to, node, peer), 5, "a route of each network")
        repairs = [node.log().count("Removed what nobody wants") for node in nodes]
    finally:
        ends = [daemon.end(signal.SIGTERM, 5) for daemon in daemons]
    assert [end.status for end in ends] == [0, 0]
    assert repairs == [0, 0]
