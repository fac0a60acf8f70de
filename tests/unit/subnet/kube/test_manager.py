"""The store in Kubernetes, against an API server on loopback and what can happen to it and on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from flanneld.errors import Cancelled, Fatal, NoAnswer, Retryable
from flanneld.model import Lease, LeaseAttrs
from flanneld.runtime.sockets import interruptible
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube.api import ApiRefusal, ApiTimeouts, Denied
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.kube.watch import backoffs
from flanneld.subnet.store import NodeStore, Store
from tests.lab.credentials import write_kubeconfig
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.kube_api.faults import Fault
from tests.lab.proxy import Proxy, Trouble
from tests.lab.wait import wait_for
from tests.local_cluster import ATTRS, CONFIG, SUBNET, Cluster, peers, running_cluster
from tests.local_kube import DEADLINE, FLANNEL_TOKEN, NOBODY


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        yield cluster


# ---- before there is a lease ----------------------------------------------------------------------


def test_kube_manager_is_a_node_store(cluster: Cluster) -> None:
    manager: Store = cluster.open()
    assert isinstance(manager, NodeStore)
    assert manager.name == f"Kubernetes at the server in {cluster.directory}/kubeconfig-{FLANNEL_TOKEN}"


def test_a_daemon_that_does_not_know_its_node_is_told_how(cluster: Cluster) -> None:
    with pytest.raises(Fatal, match="NODE_NAME, or POD_NAME and POD_NAMESPACE"):
        cluster.open(environ={"POD_NAME": "flannel"})


def test_outside_a_pod_the_api_server_has_to_be_named(tmp_path: Path) -> None:
    options = KubeOptions("", "", PREFIX, str(tmp_path), "")
    with pytest.raises(Fatal, match="-kubeconfig-file or -kube-api-url"):
        KubeStore(options, {"NODE_NAME": "n1"})


def test_the_name_of_the_node_is_asked_of_the_pod(cluster: Cluster) -> None:
    manager = cluster.open(environ={"POD_NAME": "flannel-x", "POD_NAMESPACE": "kube-flannel"})
    with pytest.raises(Retryable, match="404"):
        manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.control.put_pod("kube-flannel", "flannel-x", "")
    with pytest.raises(Retryable, match="pod kube-flannel/flannel-x has no node yet"):
        manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.control.put_pod("kube-flannel", "flannel-x", "n1")
    assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)


@pytest.mark.parametrize("text", [None, "{no", '{"Network":"nowhere"}', "[]"])
def test_a_network_config_that_is_missing_or_wrong_is_waited_for(cluster: Cluster, text: str | None) -> None:
    manager = cluster.open()
    if text is None:
        cluster.net_config.unlink()
    else:
        cluster.net_config.write_text(text)
    with pytest.raises(Retryable, match="network config"):
        manager.network_config()
    cluster.net_config.write_text(json.dumps(CONFIG))
    assert manager.network_config().families == (4,)


def test_stored_attributes_and_address_of_our_node(cluster: Cluster) -> None:
    manager = cluster.open()
    assert manager.stored(None) == LeaseAttrs()
    cluster.put_peer(1, node_public_ip="192.0.2.9", node_public_ipv6="2001:db8::9")
    manager = cluster.open()
    assert manager.public_ips() == (IPv4Address("192.0.2.9"), IPv6Address("2001:db8::9"))
    stored = manager.stored(None)
    assert stored is not None
    assert stored.backend_data == {"VtepMAC": "02:00:00:00:00:01"}


def test_leases_of_the_other_nodes_are_read_in_pages(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flanneld.subnet.kube.watch.PAGE", 2)
    for number in (1, 2, 3, 4, 5):
        cluster.put_peer(number)
    cluster.put_peer(6, public_ip="nowhere")
    manager = cluster.open()
    assert sorted(map(str, manager.read_leases())) == [f"10.5.{number}.0/24" for number in (2, 3, 4, 5)]


def test_garbage_in_our_own_annotations_is_as_good_as_nothing(cluster: Cluster) -> None:
    cluster.put_peer(1, node_public_ip="here", backend_data="{no", public_ip_overwrite="there")
    manager = cluster.open()
    assert manager.public_ips() == (None, None)
    assert manager.stored(None) is None
    manager.acquire(cluster.config, ATTRS, (None, None))
    assert cluster.notes()["public-ip"] == "198.18.0.1"


# ---- the lease ------------------------------------------------------------------------------------


def test_taking_the_lease_writes_the_annotations_and_nothing_twice(cluster: Cluster) -> None:
    manager = cluster.open()
    for _ in range(2):
        assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)
    assert cluster.notes() == {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": '{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}',
        "public-ip": "198.18.0.1",
    }
    (patch,) = cluster.asked("patch")
    assert patch["resource"] == "nodes/status"
    assert patch["headers"]["content-type"] == "application/strategic-merge-patch+json"


def test_endpoints_have_an_annotation_of_their_own(cluster: Cluster) -> None:
    """A peer that changes its endpoints changes no lease."""
    manager = cluster.join()
    cluster.put_peer(2, endpoints="two= 203.0.113.9:51820")
    cluster.put_peer(3)
    cluster.wait_for(2, 3)
    manager.publish_endpoints("one=", "203.0.113.7:51820,192.168.1.5:51820")
    assert cluster.notes()["endpoints"] == "one= 203.0.113.7:51820,192.168.1.5:51820"
    assert cluster.asked("patch")[-1]["resource"] == "nodes/status"
    assert manager.endpoints() == {"two=": "203.0.113.9:51820"}
    before = len(cluster.events)
    cluster.put_peer(2, endpoints="two= 203.0.113.10:51820")
    wait_for(lambda: manager.endpoints() == {"two=": "203.0.113.10:51820"}, DEADLINE)
    assert len(cluster.events) == before


def test_another_prefix_is_used_throughout(cluster: Cluster) -> None:
    manager = cluster.open(prefix="example.org/one")
    manager.acquire(cluster.config, ATTRS, (None, None))
    node = cluster.control.node("n1")
    assert node is not None
    assert node["metadata"]["annotations"]["example.org/one-backend-type"] == "vxlan"


def test_the_overwritten_address_is_announced_and_ours_is_kept(cluster: Cluster) -> None:
    cluster.put_node("n1", "10.5.1.0/24", public_ip_overwrite="192.0.2.7")
    manager = cluster.open()
    assert manager.acquire(cluster.config, ATTRS, (None, None)).attrs == ATTRS
    assert cluster.notes()["public-ip"] == "192.0.2.7"
    assert manager.renew(Lease(ATTRS, SUBNET)) == Lease(ATTRS, SUBNET)
    assert len(cluster.asked("patch")) == 1


@pytest.mark.parametrize(
    ("cidrs", "reason"),
    [
        ([], "no podCIDR yet"),
        (["10.9.1.0/24"], "outside Network 10.5.0.0/16"),
        (["10.5.1.0/24", "fd00::/64", "10.5.2.0/24"], "3 podCIDRs"),
    ],
)
def test_a_node_that_has_no_subnet_for_us_is_waited_for(
    cluster: Cluster, cidrs: list[str], reason: str
) -> None:
    cluster.control.set_pod_cidrs("n1", *cidrs)
    manager = cluster.open()
    with pytest.raises(Retryable, match=reason):
        manager.acquire(cluster.config, ATTRS, (None, None))
    assert cluster.asked("patch") == []
    cluster.control.set_pod_cidrs("n1", "10.5.1.0/24")
    assert manager.acquire(cluster.config, ATTRS, (None, None)).subnet == SUBNET


def test_a_node_that_is_not_there_yet_is_waited_for(cluster: Cluster) -> None:
    manager = cluster.open(environ={"NODE_NAME": "n9"})
    with pytest.raises(Retryable, match="node n9 is not there yet"):
        manager.acquire(cluster.config, ATTRS, (None, None))


@pytest.mark.parametrize("status", [401, 403, 409, 410, 422, 429, 500, 503])
@pytest.mark.parametrize("verb", ["list", "patch"])
def test_a_refusal_is_waited_out(cluster: Cluster, verb: str, status: int) -> None:
    manager = cluster.open()
    cluster.fault(verb=verb, status=status)
    with pytest.raises(Retryable):
        manager.acquire(cluster.config, ATTRS, (None, None))
    assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)
    assert cluster.notes()["kube-subnet-manager"] == "true"


@pytest.mark.parametrize(
    "fault",
    [
        {"cut": 40},
        {"cut": 40, "then": "reset"},
        {"cut": 40, "then": "end"},
        {"cut": -1},
        {"status": 200, "body": "[]"},
    ],
)
def test_an_answer_that_breaks_off_is_asked_for_again(cluster: Cluster, fault: dict[str, Any]) -> None:
    manager = cluster.open()
    cluster.fault(verb="list", **fault)
    with pytest.raises(Retryable, match="does not answer"):
        manager.acquire(cluster.config, ATTRS, (None, None))
    assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)


def test_an_answer_that_drips_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "WITHIN", 1.0)
    manager = cluster.open()
    cluster.fault(verb="list", piece=8, pause=0.05)
    with pytest.raises(Retryable, match="its answer brings less than 4 KiB in 1 s"):
        manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.fault(verb="list", piece=1, pause=0.5)
    impatient = cluster.open(timeouts=ApiTimeouts(connect=20.0, read=5.0, silence=30.0))
    with pytest.raises(Retryable, match="no answer within 5 s"):
        impatient.acquire(cluster.config, ATTRS, (None, None))
    assert manager.acquire(cluster.config, ATTRS, (None, None)) == Lease(ATTRS, SUBNET)


def test_an_event_that_never_ends_calls_for_a_list(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "WITHIN", 1.0)
    cluster.fault(verb="watch", cut=100, then="stall")
    cluster.join(cluster.open(timeouts=ApiTimeouts(connect=20.0, read=20.0, silence=300.0)))
    cluster.wait_for()
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.put_peer(3)
    cluster.wait_for(3)


def test_a_token_that_was_rotated_is_read_again(cluster: Cluster) -> None:
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.control.revoke_token(FLANNEL_TOKEN)
    cluster.control.put_token("new")
    with pytest.raises(Retryable, match="401"):
        manager.renew(Lease(ATTRS, SUBNET))
    write_kubeconfig(cluster.directory / f"kubeconfig-{FLANNEL_TOKEN}", cluster.kube.url, "new", None)
    assert manager.renew(Lease(ATTRS, SUBNET)) == Lease(ATTRS, SUBNET)


def test_pauses_are_short_after_a_denial_and_long_after_other_refusals() -> None:
    pauses = backoffs(lambda: Backoff(chance=lambda: 1.0))
    longest = {kind: max(pauses.pause(kind) for _ in range(10)) for kind in (Denied, ApiRefusal, NoAnswer)}
    assert longest == {Denied: 5.0, ApiRefusal: 40.0, NoAnswer: 40.0}


@pytest.mark.parametrize("is_of_its_own", [False, True], ids=["kubeconfig", "tokenFile"])
def test_changed_token_ends_the_pause_after_a_denial(cluster: Cluster, *, is_of_its_own: bool) -> None:
    manager = cluster.open(backoff=Backoff(first=1000.0))
    file = cluster.directory / f"kubeconfig-{FLANNEL_TOKEN}"
    if is_of_its_own:
        text = file.read_text()
        (cluster.directory / "token").write_text(FLANNEL_TOKEN)
        file.write_text(text.replace(f"token: {FLANNEL_TOKEN}", "tokenFile: token"))
    manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.control.revoke_token(FLANNEL_TOKEN)
    cluster.control.put_token("new")
    cluster.start_watches(manager)
    wait_for(lambda: manager.problem is not None and "401" in str(manager.problem))
    if is_of_its_own:
        (cluster.directory / "token").write_text("new")
    else:
        write_kubeconfig(file, cluster.kube.url, "new", None)
    cluster.wait_for()
    assert len([each for each in cluster.asked("list") if each["status"] == 401]) == 1


def test_missing_rights_are_named_with_their_remedy(cluster: Cluster) -> None:
    with pytest.raises(Retryable, match=r"403: nodes is forbidden.*ClusterRole"):
        cluster.open(NOBODY).acquire(cluster.config, ATTRS, (None, None))


def test_no_token_is_shown_in_what_is_said(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(1):
        manager = cluster.join()
        wait_for(lambda: cluster.control.watches() == 1)
        cluster.fault(status=500)
        with pytest.raises(Retryable) as refusal:
            manager.renew(Lease(ATTRS, SUBNET))
    assert FLANNEL_TOKEN not in caplog.text + str(refusal.value) + manager.name.partition("kubeconfig")[0]


# ---- the watch ------------------------------------------------------------------------------------


def test_heartbeats_and_other_changes_are_no_news(cluster: Cluster) -> None:
    cluster.put_peer(2)
    cluster.join()
    cluster.wait_for(2)
    for number in range(20):
        cluster.control.annotate("n2", {"other": str(number)})
    cluster.put_peer(3)
    cluster.wait_for(2, 3)
    assert len(cluster.events) == 2


def crowd(cluster: Cluster) -> None:
    """600 more nodes, which is three pages."""
    cluster.net_config.write_text(json.dumps({**CONFIG, "Network": "10.0.0.0/8"}))
    cluster.control.put_crowd(600, "10.128.0.0/9", "198.19.0.1", "vxlan")


def test_many_nodes_come_in_pages(cluster: Cluster) -> None:
    crowd(cluster)
    cluster.join()
    wait_for(lambda: cluster.events, 10)
    assert len(peers(cluster.events)) == 600
    pages = [request for request in cluster.asked("list") if "limit" in request["query"]]
    assert len(pages) == 3


def test_a_list_gives_signs_of_life_within_each_page(cluster: Cluster) -> None:
    """Over a slow line a page takes minutes, and a daemon that says nothing for so long is ended."""
    crowd(cluster)
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    signs: list[None] = []
    with pytest.raises(Cancelled):
        manager.watch(lambda _events: manager.close(), lambda: signs.append(None))
    assert len(signs) > 3 * 4  # three pages of some MB


def test_a_list_that_expires_between_its_pages_is_begun_anew(cluster: Cluster) -> None:
    crowd(cluster)
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.fault(verb="list", times=2)  # nothing: our own node, and the first page
    cluster.fault(verb="list", status=410)
    cluster.join(manager)
    wait_for(lambda: cluster.events, 10)
    assert len(peers(cluster.events)) == 600
    asked = [(each["status"], "continue" in each["query"]) for each in cluster.asked("list")[2:]]
    assert asked == [(200, False), (410, True), (200, False), (200, True), (200, True)]


FAULTS: dict[str, dict[str, Any]] = {
    "clean end": {"then": "end", "cut": 0},
    "cut": {"then": "close", "cut": 0},
    "reset": {"then": "reset", "cut": 0},
    "ERROR 410": {"error": 410},
    "ERROR 500": {"error": 500},
    "garbage": {"line": "{no"},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_watch_that_is_struck_goes_on(cluster: Cluster, fault: dict[str, Any]) -> None:
    cluster.put_peer(2)
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.control.disturb_watches(Fault(**fault))
    cluster.control.delete_node("n2")
    cluster.put_peer(3)
    cluster.wait_for(3)
    assert cluster.ended == []


@pytest.mark.parametrize("status", [401, 403, 410, 429, 500, 503, 504])
def test_a_watch_that_is_refused_is_asked_for_again(cluster: Cluster, status: int) -> None:
    cluster.fault(verb="watch", status=status, times=2)
    cluster.join()
    cluster.put_peer(3)
    cluster.wait_for(3)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_events_in_pieces_are_put_together(cluster: Cluster, size: int) -> None:
    cluster.fault(verb="watch", piece=size, times=0)
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    for number in (2, 3, 4):
        cluster.put_peer(number)
    cluster.wait_for(2, 3, 4)


def test_an_event_is_not_held_back_where_a_proxy_joins_the_chunks(cluster: Cluster) -> None:
    host, _, port = cluster.kube.url.rpartition("/")[2].partition(":")
    with Proxy(None, ("127.0.0.1", 0), (host, int(port))) as proxy:
        proxy.trouble = Trouble(chunked=False)
        cluster.join(cluster.open(url=proxy.url, timeouts=ApiTimeouts(2.0, 2.0, silence=60.0)))
        wait_for(lambda: cluster.control.watches() == 1)
        cluster.put_peer(2)
        cluster.wait_for(2)
        cluster.close()


@pytest.mark.parametrize("cut", [1, 50, 200])
def test_an_event_that_breaks_off_comes_again(cluster: Cluster, cut: int) -> None:
    cluster.fault(verb="watch", cut=cut)
    cluster.join()
    wait_for(lambda: cluster.asked("watch"))
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_history_that_was_lost_is_made_up_for_by_a_list(cluster: Cluster) -> None:
    cluster.put_peer(2)
    cluster.put_peer(3)
    cluster.join()
    cluster.wait_for(2, 3)
    cluster.fault(verb="watch", status=500)
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.control.disturb_watches(Fault(cut=0))
    cluster.control.delete_node("n2")
    cluster.put_peer(4)
    cluster.control.compact()
    cluster.wait_for(3, 4)


def test_many_invalid_nodes_are_one_line(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(300):
        cluster.put_node(f"m{number:03}", "10.5.2.0/24", kube_subnet_manager="true", public_ip="nowhere")
    manager = cluster.join()
    for number in (1, 2, 3):
        wait_for(lambda: len(cluster.events) == number, 10)  # noqa: B023
        manager.reread()
    (line,) = [text for text in caplog.messages if "Ignoring" in text]
    assert line.startswith("Ignoring 300 invalid nodes: node m000 has ")
    assert line.endswith("; and 297 more")


def lists_of_all(cluster: Cluster, start: int = 0) -> list[dict[str, Any]]:
    """The requests for all nodes, without those for our own."""
    return [each for each in cluster.asked("list", start) if "fieldSelector" not in each["query"]]


def test_bookmarks_keep_the_place(cluster: Cluster) -> None:
    cluster.control.set_bookmark_interval(0.05)
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    version = cluster.control.jump(100)
    start = len(cluster.asked())

    def goes_on_from_there() -> bool:
        wait_for(lambda: cluster.control.bookmarks() >= 2)
        before = len(cluster.asked())
        cluster.control.disturb_watches(Fault(cut=0))
        (again, *_) = wait_for(lambda: cluster.asked("watch", before))
        return int(again["query"]["resourceVersion"]) >= version

    wait_for(goes_on_from_there, what="a watch that knows of it")
    assert lists_of_all(cluster, start) == [], "bookmarks are the only thing that can have told of it"


def test_a_list_without_our_node_is_not_acted_on(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.put_peer(2)
    cluster.join()
    cluster.wait_for(2)
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.control.delete_node("n1")
    cluster.control.disturb_watches(Fault(error=410))
    cluster.control.delete_node("n2")
    wait_for(lambda: "lacks our own node n1" in caplog.text, 10)
    cluster.put_node("n1", "10.5.1.0/24")
    cluster.wait_for()


def test_lists_that_are_not_acted_on_leave_no_connection_open(cluster: Cluster) -> None:
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    start = len(cluster.asked())
    cluster.control.delete_node("n1")
    cluster.control.disturb_watches(Fault(error=410))
    wait_for(lambda: len(lists_of_all(cluster, start)) > 9, 10)
    wait_for(lambda: len(cluster.kube.server.connections) < 4, 10)


def test_every_blocked_call_ends_at_once(cluster: Cluster) -> None:
    manager = cluster.join(cluster.open(timeouts=ApiTimeouts(600, 600, silence=600)))
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.fault(verb="list", delay=600)
    blocked: list[BaseException] = []

    def ask() -> None:
        try:
            manager.renew(Lease(ATTRS, SUBNET))
        except BaseException as error:
            blocked.append(error)

    start = len(cluster.asked())
    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: len(cluster.asked()) > start)
    cluster.close()
    thread.join(DEADLINE)
    assert {type(error) for error in (*cluster.ended, *blocked)} == {Cancelled}


def test_a_silent_server_is_left(cluster: Cluster) -> None:
    cluster.fault(verb="watch", cut=0, then="stall")
    cluster.join(cluster.open(timeouts=ApiTimeouts(20.0, 20.0, silence=0.3)))
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_a_watch_that_is_not_even_begun_is_given_up_sooner_than_a_quiet_one(cluster: Cluster) -> None:
    cluster.fault(verb="watch", delay=60)
    cluster.join(cluster.open(timeouts=ApiTimeouts(20.0, 0.3, silence=60.0)))
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_a_server_whose_versions_went_back_is_listed_again(cluster: Cluster) -> None:
    cluster.join(cluster.open(timeouts=ApiTimeouts(20.0, 20.0, silence=0.3)))
    wait_for(lambda: cluster.control.watches() == 1)
    future = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "900000"}}})
    cluster.control.disturb_watches(Fault(line=future))
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_after_a_move_of_the_uplink_connections_are_made_anew(cluster: Cluster) -> None:
    cluster.fault(verb="watch", cut=0, then="stall")
    manager = cluster.join()
    wait_for(lambda: cluster.asked("watch"))
    manager.reconnect()
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_a_connection_that_we_broke_ourselves_is_nothing_to_complain_about(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    manager = cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    start = len(cluster.asked("list"))
    cluster.fault(verb="list", delay=30)
    manager.reread()
    wait_for(lambda: len(cluster.asked("list")) > start)
    manager.reconnect()
    cluster.put_peer(2)
    cluster.wait_for(2)
    assert "Watching the nodes" not in caplog.text


@pytest.mark.parametrize(
    "body", ["{}", '{"items":{}}', '{"items":[5,null,{"metadata":[]}],"metadata":[]}', '"x"']
)
def test_a_list_that_makes_no_sense_is_not_acted_on(cluster: Cluster, body: str) -> None:
    cluster.put_peer(2)
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.fault(verb="list")  # nothing: our own node is read once more
    cluster.fault(verb="list", status=200, body=body)
    cluster.join(manager)
    cluster.wait_for(2)
    assert (len(cluster.events), cluster.ended) == (1, [])


@pytest.mark.parametrize("line", ['{"type":"ADDED","object":{"metadata":[]}}', '{"type":"NEW","object":{}}'])
def test_an_event_that_makes_no_sense_is_passed_over(cluster: Cluster, line: str) -> None:
    cluster.fault(verb="watch", line=line)
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.put_peer(2)
    cluster.wait_for(2)
    assert cluster.ended == []


def test_address_of_the_api_server_is_known_once_it_was_asked(cluster: Cluster) -> None:
    manager = cluster.open()
    assert manager.addresses == frozenset()
    manager.public_ips()
    assert manager.addresses == {IPv4Address("127.0.0.1")}
