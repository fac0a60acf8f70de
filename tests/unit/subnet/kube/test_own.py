"""Our own node in Kubernetes while the daemon runs, and the nodes saved for a start without API server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.model import Added, Cached, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.subnet.kube.api import ApiTimeouts
from flanneld.subnet.kube.store import KubeStore
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.wait import wait_for
from tests.local_cluster import ATTRS, SUBNET, Cluster, peers, running_cluster
from tests.local_kube import DEADLINE


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        yield cluster


# ---- our own node ---------------------------------------------------------------------------------


def test_annotations_that_somebody_removed_are_reported(cluster: Cluster) -> None:
    cluster.join()
    wait_for(lambda: cluster.own_events == [Added(Lease(ATTRS, SUBNET))])
    cluster.control.annotate("n1", {f"{PREFIX}public-ip": None})
    wait_for(lambda: cluster.own_events[1:] == [Added(Lease(LeaseAttrs(), SUBNET))])


def test_our_node_deleted_and_made_anew_is_reported_as_unwritten(cluster: Cluster) -> None:
    manager = cluster.join()
    wait_for(lambda: cluster.own_events)
    assert manager.problem is None
    cluster.control.delete_node("n1")
    assert str(wait_for(lambda: manager.problem)).startswith("the Node object n1 is gone; ")
    cluster.put_node("n1", "10.5.1.0/24")
    wait_for(lambda: cluster.own_events[-1] == Added(Lease(LeaseAttrs(), SUBNET)))
    assert manager.problem is None
    manager.renew(Lease(ATTRS, SUBNET))
    wait_for(lambda: cluster.own_events[-1] == Added(Lease(ATTRS, SUBNET)))


def test_another_pod_cidr_takes_our_lease_away(cluster: Cluster) -> None:
    cluster.join()
    wait_for(lambda: cluster.own_events)
    cluster.control.set_pod_cidrs("n1")
    cluster.control.set_pod_cidrs("n1", "10.5.7.0/24")
    wait_for(lambda: cluster.own_events[-1] == Removed((SUBNET, None)))


def condition(cluster: Cluster) -> dict[str, Any] | None:
    return cluster.control.condition("n1")


def test_the_condition_is_cleared_when_the_network_is_there_and_for_each_new_node(cluster: Cluster) -> None:
    manager = cluster.join()
    cluster.wait_for()
    assert condition(cluster) is None
    manager.mark_available()
    found = wait_for(lambda: condition(cluster))
    assert found
    assert (found["status"], found["reason"]) == ("False", "FlannelIsUp")
    assert found["message"] == "Flannel is running on this node"
    cluster.control.delete_node("n1")
    cluster.put_node("n1", "10.5.1.0/24")
    wait_for(lambda: condition(cluster))


def test_a_reason_becomes_an_event_where_that_is_allowed(cluster: Cluster) -> None:
    cluster.control.put_token("teller", extra=[("create", "events")])
    manager = cluster.open("teller")
    for _ in range(3):
        manager.report("waiting for a lease: node n1 has no podCIDR yet")
    (event,) = cluster.control.events()
    # kubelet's events have the node's name as its uid, too: kubectl describe node looks for both.
    node = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}
    assert event["involvedObject"] == node
    assert event["type"] == "Warning"
    assert event["message"] == "waiting for a lease: node n1 has no podCIDR yet"


def test_an_event_that_the_api_server_could_not_take_is_sent_again(cluster: Cluster) -> None:
    cluster.control.put_token("teller", extra=[("create", "events")])
    manager = cluster.open("teller")
    cluster.fault(verb="create", status=500)
    for _ in range(3):
        manager.report("waiting for a lease")
    assert [request["status"] for request in cluster.asked("create")] == [500, 201]


def test_without_that_right_it_is_tried_once_and_not_spoken_of(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    manager = cluster.open()
    for number in range(3):
        manager.report(f"waiting for {number}")
    assert len(cluster.asked("create")) == 1
    assert caplog.text == ""


# ---- what was saved -------------------------------------------------------------------------------


def saved_nodes(cluster: Cluster) -> list[str]:
    file = cluster.state_dir / "kube-nodes.json"
    return [node["name"] for node in json.loads(file.read_text())["nodes"]] if file.exists() else []


def test_cache_follows_a_deletion_within_two_seconds_with_one_write(cluster: Cluster) -> None:
    cluster.state_dir.mkdir()
    cluster.put_peer(2)
    cluster.put_peer(3)
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    woken = threading.Event()
    step = manager.own_watch_step(lambda _: None, woken.set)
    cluster.start(lambda deliver: manager.watch(deliver), cluster.events)
    cluster.wait_for(2, 3)
    assert step(100.0) == 110.0
    written = (cluster.state_dir / "kube-nodes.json").stat().st_mtime_ns
    assert saved_nodes(cluster) == ["n1", "n2", "n3"]
    woken.clear()
    cluster.control.delete_node("n2")
    assert woken.wait(DEADLINE)
    assert step(100.1) == 102.0
    assert (cluster.state_dir / "kube-nodes.json").stat().st_mtime_ns == written
    assert step(102.0) == 112.0
    assert saved_nodes(cluster) == ["n1", "n3"]


@contextmanager
def without_server(cluster: Cluster) -> Iterator[str]:
    """A cluster that was saved, and an address at which nobody answers."""
    cluster.state_dir.mkdir()
    cluster.put_peer(2)
    cluster.join()
    wait_for(lambda: saved_nodes(cluster) == ["n1", "n2"], 20)
    cluster.close()
    cluster.events.clear()
    cluster.own_events.clear()
    cluster.ended.clear()
    yield "http://127.0.0.1:9"


def test_without_an_api_server_the_nodes_that_were_saved_do(cluster: Cluster) -> None:
    with without_server(cluster) as url:
        manager = cluster.open(url=url)
        assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)
        cluster.join(manager)
        cluster.wait_for(2)


def test_cached_nodes_are_replaced_by_the_first_list(cluster: Cluster) -> None:
    with without_server(cluster):
        cluster.control.delete_node("n2")
        cluster.put_peer(3)
        cluster.fault(verb="list", status=503, times=3)
        cluster.join()
        cluster.wait_for(3)
        assert isinstance(cluster.events[0], Cached), "a cache must not allow a sweep"
        assert peers(cluster.events[:1]) == {"10.5.2.0/24"}


@contextmanager
def saved_before(cluster: Cluster) -> Iterator[KubeStore]:
    """A daemon that starts anew with n2 on disk; meanwhile n2 has gone and n3 has come."""
    with without_server(cluster):
        cluster.control.delete_node("n2")
        cluster.put_peer(3)
        yield cluster.open(timeouts=ApiTimeouts(connect=5.0, read=300.0, silence=300.0))


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"cut": -1},
        {"cut": 100, "then": "reset"},
        {"delay": 3600},
        {"cut": 100, "then": "stall"},
        {"piece": 1, "pause": 0.5},
    ],
    ids=["is refused", "is not answered", "breaks off", "hangs", "stalls", "drips"],
)
def test_saved_nodes_serve_while_the_first_list(cluster: Cluster, fault: dict[str, Any]) -> None:
    """The API server has answered for our own node before."""
    with saved_before(cluster) as manager:
        manager.acquire(cluster.config, ATTRS, (None, None))
        cluster.fault(verb="list", times=0, **fault)
        cluster.start_watches(manager)
        cluster.wait_for(2)
        assert isinstance(cluster.events[0], Cached)
        cluster.control.clear_faults()


def test_the_first_list_ends_the_service_of_the_saved_nodes(cluster: Cluster) -> None:
    with saved_before(cluster) as manager:
        manager.acquire(cluster.config, ATTRS, (None, None))
        cluster.fault(verb="list", status=503, times=3)
        cluster.start_watches(manager)
        cluster.wait_for(3)
        assert [type(event) for event in cluster.events] == [Cached, Snapshot]
        wait_for(lambda: cluster.own_events == [Added(Lease(ATTRS, SUBNET))])


def test_saved_nodes_are_not_read_by_a_start_that_finds_all_nodes(cluster: Cluster) -> None:
    with saved_before(cluster) as manager:
        cluster.join(manager)
        cluster.wait_for(3)
        assert [type(event) for event in cluster.events] == [Snapshot]


def test_saved_nodes_serve_if_the_annotations_could_not_be_written(cluster: Cluster) -> None:
    moved = replace(ATTRS, public_ip=IPv4Address("198.18.0.7"))
    with saved_before(cluster) as manager:
        cluster.fault(verb="patch", status=503)
        assert manager.acquire(cluster.config, moved, (None, None)) == Lease(moved, SUBNET)
        cluster.fault(verb="list", status=503, times=3)
        cluster.start_watches(manager, moved)
        cluster.wait_for(3)
        assert [type(event) for event in cluster.events] == [Cached, Snapshot]
        # What was not written counts as overwritten, so it is written now.
        wait_for(lambda: Added(Lease(LeaseAttrs(), SUBNET)) in cluster.own_events)


def test_nodes_saved_before_our_node_was_made_anew_do_not_serve(cluster: Cluster) -> None:
    """Another cluster may have been built on the same hosts."""
    with saved_before(cluster) as manager:
        cluster.control.delete_node("n1")
        cluster.put_node("n1", "10.5.1.0/24")
        manager.acquire(cluster.config, ATTRS, (None, None))
        cluster.fault(verb="list", status=503, times=3)
        cluster.start_watches(manager)
        cluster.wait_for(3)
        assert [type(event) for event in cluster.events] == [Snapshot]


def test_the_age_of_what_was_saved_is_told_however_often_it_is_used(cluster: Cluster) -> None:
    with without_server(cluster) as url:
        os.utime(cluster.state_dir / "kube-nodes.json", (0, 1_700_000_000))
        for _ in range(2):
            cluster.events.clear()
            manager = cluster.join(cluster.open(url=url))
            (told,) = wait_for(lambda: cluster.events)
            assert isinstance(told, Cached)
            assert told.source.endswith("kube-nodes.json at 2023-11-14T22:13:20Z")
            manager.mark_available()  # After this it has looked whether there is something to save.
            wait_for(lambda: cluster.own_events)
            cluster.close()


def test_an_api_server_that_knows_our_node_no_more_outweighs_what_was_saved(cluster: Cluster) -> None:
    with without_server(cluster):
        cluster.control.delete_node("n1")
        manager = cluster.open()
        with pytest.raises(Retryable, match="not there yet"):
            manager.acquire(cluster.config, ATTRS, (None, None))


def test_cache_of_another_node_is_ignored(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """As on a host that was made from that node's disk."""
    with without_server(cluster) as url:
        manager = cluster.open(url=url, environ={"NODE_NAME": "n9"})
        with pytest.raises(Retryable, match="does not answer"):
            manager.acquire(cluster.config, ATTRS, (None, None))
        assert "it is of node n1, and this is n9" in caplog.text


def test_a_pod_that_has_to_ask_for_its_node_goes_by_what_was_saved(cluster: Cluster) -> None:
    with without_server(cluster) as url:
        manager = cluster.open(url=url, environ={"POD_NAME": "flannel-x", "POD_NAMESPACE": "kube-flannel"})
        assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{no",
        "[]",
        "[" * 100_000,
        '{"version":2,"own":"n1","nodes":[]}',
        '{"version":1,"own":"n1","nodes":[]}',
    ],
    ids=range(6),
)
def test_saved_nodes_that_make_no_sense_are_left_alone(
    cluster: Cluster, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.state_dir.mkdir()
    (cluster.state_dir / "kube-nodes.json").write_text(text)
    manager = cluster.open(url="http://127.0.0.1:9")
    for _ in range(2):
        with pytest.raises(Retryable, match="does not answer"):
            manager.acquire(cluster.config, ATTRS, (None, None))
    assert caplog.text.count("Ignoring the saved nodes") == 1


def test_without_its_directory_nothing_is_saved(cluster: Cluster) -> None:
    manager = cluster.join()
    manager.mark_available()
    wait_for(lambda: condition(cluster))
    assert not cluster.state_dir.exists()
