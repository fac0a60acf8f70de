"""What Go flanneld's users have complained about, as far as it is about the store and about restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab import Exit, Lab, Node, wait_for
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.lab import gateway
from tests.netns.kube import notes, overlay_routes, start
from tests.netns.pair import connect
from tests.netns.traffic import Sniffer, Stream

VXLAN = {"Type": "vxlan"}
#: A daemon waits up to 40 s between two attempts to reach Kubernetes.
RECONNECTED = 60.0


@contextmanager
def no_packet_lost(one: Node, other: Node) -> Iterator[None]:
    connect(one, other)
    with one.container().ping(other.container()) as ping:
        yield
        ping.wait_for_replies(deadline=20)
        assert ping.lost() == 0


@pytest.mark.parametrize(
    "end", [Node.stop, pytest.param(Node.kill, marks=pytest.mark.long)], ids=["SIGTERM", "SIGKILL"]
)
def test_a_restart_costs_no_packet_inside_and_leaks_none_outside(
    lab: Lab, end: Callable[[Node], Exit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    first, second = lab.cluster(VXLAN, flags=["--ip-masq"])
    outside = gateway(first.link_number)
    with (
        no_packet_lost(first, second),
        first.container().ping(outside) as out,
        Stream(first.container().namespace, outside, tmp_path / "stream"),
        Sniffer(lab.switch, "br0") as world,
    ):
        out.wait_for_replies(deadline=20)
        wait_for(lambda: world.sources(0.1) == {first.address}, what="the stream to be masqueraded")
        begin = len(world.packets)
        end(first)
        first.start("--ip-masq")
        first.wait_ready(20)
        first.wait_for_log("In sync with", 20)
        out.wait_for_replies(deadline=20)
        assert set(world.listen(0.3)[begin:]) == {first.address}
        assert out.lost() == 0


def test_a_node_that_was_deleted_while_the_daemon_was_down_is_led_to_no_more(lab: Lab) -> None:
    node, stays, gone = lab.kube_cluster(VXLAN, nodes=3)
    connect(node, gone)
    with no_packet_lost(node, stays):
        node.kill()
        gone.stop()
        lab.kube.control.delete_node(gone.name)
        assert gone.subnet() in overlay_routes(node)
        start(lab, node)
        wait_for(lambda: overlay_routes(node) == {stays.subnet()}, 20, "the stale route to go")
        assert [entry["dst"] for entry in node.fdb("flannel.1")] == [stays.address]
        assert len(node.neighbors("flannel.1")) == 1


def test_a_restart_while_the_api_server_is_down_costs_no_packet(lab: Lab) -> None:
    first, second, third = lab.kube_cluster(VXLAN, nodes=3)
    connect(first, third)
    with no_packet_lost(first, second):
        before = first.kernel_state("flannel.1")
        lab.kube.kill()
        first.kill()
        start(lab, first)
        first.wait_for_log("does not answer", 20)
        assert first.kernel_state("flannel.1") == before
        lab.kube.start()
        lab.kube.control.delete_node(third.name)
        first.wait_ready(20)
        wait_for(lambda: overlay_routes(first) == {second.subnet()}, RECONNECTED, "the deleted node to go")


def test_a_pod_cidr_that_comes_late_costs_the_others_nothing(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    with no_packet_lost(first, second):
        (late,) = lab.add_nodes()
        lab.kube.control.put_node(late.name, address=late.address)
        start(lab, late)
        late.wait_for_log("has no podCIDR yet", 20)
        assert overlay_routes(first) == {second.subnet()}
        lab.kube.control.set_pod_cidrs(late.name, "10.5.3.0/24")
        late.wait_ready(20)
        connect(first, late)


@pytest.mark.long
def test_annotations_contested_by_a_webhook_are_logged_once(lab: Lab) -> None:
    (node,) = lab.kube_cluster(VXLAN, nodes=1)
    ours = notes(lab, node)
    for _ in range(3):
        lab.kube.control.annotate(node.name, {f"{PREFIX}public-ip": "192.0.2.99"})
        wait_for(lambda: notes(lab, node) == ours, 60, "our address to be written again")
    assert len(node.wait_for_log("rewriting them")) == 1
    assert len(node.wait_for_log("Lease renewed, new expiration: ")) == 1
