"""The store in Kubernetes, against an API server on loopback and what can happen to it and on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Any, Self

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.subnet.kube import KubeManager, KubeOptions
from flanneld.subnet.kube_api import Timeouts
from flanneld.subnet.kube_watch import Backoff
from flanneld.subnet.manager import Cancelled, Deliver, NodeStore, SubnetManager
from tests.lab.credentials import write_kubeconfig
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.kube_api.faults import Fault
from tests.lab.wait import wait_for
from tests.local_kube import FLANNEL_TOKEN, NOBODY, LocalKube, running_kube

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}
ATTRS = LeaseAttrs(IPv4Address("198.18.0.1"), None, "vxlan", {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"})
SUBNET = IPv4Network("10.5.1.0/24")
QUICK = Timeouts(connect=2.0, read=2.0, silence=5.0)


def patiently(seconds: float = 0.02) -> Callable[[], Backoff]:
    return lambda: Backoff(seconds, 4 * seconds)


class Cluster:
    """An API server with our node ``n1``, and a manager for that node."""

    def __init__(self, kube: LocalKube, directory: Path) -> None:
        self.kube = kube
        self.control = kube.control
        self.directory = directory
        self.net_config = directory / "net-conf.json"
        self.net_config.write_text(json.dumps(CONFIG))
        self.state_dir = directory / "state"
        self.events: list[Event] = []
        self.own_events: list[Event] = []
        self.ended: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._managers: list[KubeManager] = []

    def open(
        self,
        token: str = FLANNEL_TOKEN,
        environ: Mapping[str, str] | None = None,
        url: str = "",
        prefix: str = PREFIX.rstrip("/"),
        timeouts: Timeouts = QUICK,
    ) -> KubeManager:
        """A manager; with its config read, for all tests but those of the config need that."""
        kubeconfig = self.directory / f"kubeconfig-{token}"
        write_kubeconfig(kubeconfig, url or self.kube.url, token, None)
        options = KubeOptions("", str(kubeconfig), prefix, str(self.net_config), str(self.state_dir))
        manager = KubeManager(options, environ or {"NODE_NAME": "n1"}, timeouts, patiently())
        self._managers.append(manager)
        self.config = manager.network_config()
        return manager

    def join(self, manager: KubeManager | None = None, attrs: LeaseAttrs = ATTRS) -> KubeManager:
        """Take the lease and start both watches."""
        manager = manager or self.open()
        manager.acquire(self.config, attrs, (None, None))
        self._start(manager.watch, self.events)
        self._start(lambda deliver: manager.watch_own(Lease(attrs, SUBNET), deliver), self.own_events)
        return manager

    def put_node(self, name: str, *cidrs: str, **notes: str) -> None:
        annotations = {PREFIX + key.replace("_", "-"): value for key, value in notes.items()}
        self.control.put_node(name, *cidrs, annotations=annotations)

    def put_peer(self, number: int, **notes: str) -> None:
        data = json.dumps({"VtepMAC": f"02:00:00:00:00:{number:02x}"})
        known = {"kube_subnet_manager": "true", "backend_type": "vxlan", "backend_data": data}
        self.put_node(
            f"n{number}", f"10.5.{number}.0/24", **{**known, "public_ip": f"198.18.0.{number}", **notes}
        )

    def notes(self, name: str = "n1") -> dict[str, str]:
        """Our annotations on a node."""
        found = self.control.annotations(name).items()
        return {key.removeprefix(PREFIX): value for key, value in found if key.startswith(PREFIX)}

    def fault(self, **fault: Any) -> None:
        self.control.add_fault(Fault(**fault))

    def asked(self, verb: str = "", start: int = 0) -> list[dict[str, Any]]:
        return self.control.requests(verb, start=start)

    def wait_for(self, *numbers: int) -> None:
        """Wait until just these peers are known."""
        wanted = {f"10.5.{number}.0/24" for number in numbers}
        wait_for(lambda: peers(self.events) == wanted, 10, f"{wanted} of {self.events}")

    def close(self) -> None:
        for manager in self._managers:
            manager.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, watch: Callable[[Deliver], None], events: list[Event]) -> None:
        def run() -> None:
            try:
                watch(events.extend)
            except BaseException as error:
                self.ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)


def peers(events: list[Event]) -> set[str]:
    """The subnets that a reader of all events knows, our own left out."""
    there: set[str] = set()
    for event in list(events):
        match event:
            case Added(lease):
                there.add(str(lease))
            case Removed((subnet, _)):
                there.discard(str(subnet))
            case Snapshot(leases):
                there = {str(lease) for lease in leases}
    return there - {str(SUBNET)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_kube() as kube, Cluster(kube, tmp_path) as cluster:
        cluster.put_node("n1", "10.5.1.0/24")
        yield cluster


# ---- before there is a lease ----------------------------------------------------------------------


def test_it_is_a_store_that_knows_its_node(cluster: Cluster) -> None:
    manager: SubnetManager = cluster.open()
    assert isinstance(manager, NodeStore)
    assert manager.name == f"Kubernetes at the server in {cluster.directory}/kubeconfig-{FLANNEL_TOKEN}"


def test_a_daemon_that_does_not_know_its_node_is_told_how(cluster: Cluster) -> None:
    with pytest.raises(Fatal, match="NODE_NAME, or POD_NAME and POD_NAMESPACE"):
        cluster.open(environ={"POD_NAME": "flannel"})


def test_outside_a_pod_the_api_server_has_to_be_named(tmp_path: Path) -> None:
    options = KubeOptions("", "", PREFIX, str(tmp_path), "")
    with pytest.raises(Fatal, match="-kubeconfig-file or -kube-api-url"):
        KubeManager(options, {"NODE_NAME": "n1"})


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


def test_what_the_node_announced_and_where_it_is_can_be_had(cluster: Cluster) -> None:
    manager = cluster.open()
    assert manager.stored(None) == LeaseAttrs()
    cluster.put_peer(1, node_public_ip="192.0.2.9", node_public_ipv6="2001:db8::9")
    manager = cluster.open()
    assert manager.public_ips() == (IPv4Address("192.0.2.9"), IPv6Address("2001:db8::9"))
    stored = manager.stored(None)
    assert stored is not None
    assert stored.backend_data == {"VtepMAC": "02:00:00:00:00:01"}


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


def test_a_token_that_was_rotated_is_read_again(cluster: Cluster) -> None:
    manager = cluster.open()
    manager.acquire(cluster.config, ATTRS, (None, None))
    cluster.control.revoke_token(FLANNEL_TOKEN)
    cluster.control.put_token("new")
    with pytest.raises(Retryable, match="401"):
        manager.renew(Lease(ATTRS, SUBNET))
    write_kubeconfig(cluster.directory / f"kubeconfig-{FLANNEL_TOKEN}", cluster.kube.url, "new", None)
    assert manager.renew(Lease(ATTRS, SUBNET)) == Lease(ATTRS, SUBNET)


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


def test_peers_come_change_and_go(cluster: Cluster) -> None:
    cluster.put_peer(2)
    cluster.join()
    cluster.wait_for(2)
    cluster.put_peer(3)
    cluster.wait_for(2, 3)
    cluster.put_peer(3, public_ip="198.18.0.33")
    wait_for(
        lambda: any(
            isinstance(e, Added) and str(e.lease.attrs.public_ip) == "198.18.0.33" for e in cluster.events
        )
    )
    cluster.control.annotate("n3", {f"{PREFIX}kube-subnet-manager": None})
    cluster.wait_for(2)
    cluster.control.delete_node("n2")
    cluster.wait_for()


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


def test_bookmarks_keep_the_place(cluster: Cluster) -> None:
    cluster.control.set_bookmark_interval(0.05)
    cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    version = cluster.control.jump(100)
    # Bookmarks are the only thing that could have told of it.
    wait_for(lambda: cluster.control.watches() == 1)
    time.sleep(0.3)
    start = len(cluster.asked())
    cluster.control.disturb_watches(Fault(cut=0))
    (again,) = wait_for(lambda: cluster.asked("watch", start))
    assert int(again["query"]["resourceVersion"]) >= version


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


def test_all_nodes_are_listed_again_when_somebody_wants_to_be_sure(cluster: Cluster) -> None:
    cluster.put_peer(2)
    manager = cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    manager.reread()
    wait_for(lambda: len(cluster.events) == 2, 10)
    assert cluster.events[0] == cluster.events[1]


def test_every_blocked_call_ends_at_once(cluster: Cluster) -> None:
    manager = cluster.join()
    wait_for(lambda: cluster.control.watches() == 1)
    cluster.fault(verb="list", delay=30)
    blocked: list[BaseException] = []

    def ask() -> None:
        try:
            manager.renew(Lease(ATTRS, SUBNET))
        except BaseException as error:
            blocked.append(error)

    start = len(cluster.asked())
    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: len(cluster.asked()) >= start)
    began = time.monotonic()
    cluster.close()
    thread.join(10)
    assert time.monotonic() - began < 2
    assert {type(error) for error in (*cluster.ended, *blocked)} == {Cancelled}


def test_a_silent_server_is_left(cluster: Cluster) -> None:
    cluster.fault(verb="watch", cut=0, then="stall")
    cluster.join(cluster.open(timeouts=Timeouts(2.0, 2.0, silence=0.3)))
    cluster.put_peer(2)
    cluster.wait_for(2)


def test_after_a_move_of_the_uplink_connections_are_made_anew(cluster: Cluster) -> None:
    cluster.fault(verb="watch", cut=0, then="stall")
    manager = cluster.join()
    wait_for(lambda: cluster.asked("watch"))
    manager.reconnect()
    cluster.put_peer(2)
    cluster.wait_for(2)


# ---- our own node ---------------------------------------------------------------------------------


def test_annotations_that_somebody_removed_are_reported(cluster: Cluster) -> None:
    cluster.join()
    wait_for(lambda: cluster.own_events == [Added(Lease(ATTRS, SUBNET))])
    cluster.control.annotate("n1", {f"{PREFIX}public-ip": None})
    wait_for(lambda: cluster.own_events[1:] == [Added(Lease(LeaseAttrs(), SUBNET))])


def test_our_node_deleted_and_made_anew_is_reported_as_unwritten(cluster: Cluster) -> None:
    manager = cluster.join()
    wait_for(lambda: cluster.own_events)
    cluster.control.delete_node("n1")
    cluster.put_node("n1", "10.5.1.0/24")
    wait_for(lambda: cluster.own_events[-1] == Added(Lease(LeaseAttrs(), SUBNET)))
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
    assert event["involvedObject"]["name"] == "n1"
    assert event["message"] == "waiting for a lease: node n1 has no podCIDR yet"


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


def test_what_was_saved_is_replaced_once_the_api_server_answers(cluster: Cluster) -> None:
    with without_server(cluster):
        cluster.control.delete_node("n2")
        cluster.put_peer(3)
        cluster.fault(verb="list", status=503, times=3)
        cluster.join()
        cluster.wait_for(3)
        assert isinstance(cluster.events[0], Snapshot)
        assert peers(cluster.events[:1]) == {"10.5.2.0/24"}


def test_an_api_server_that_knows_our_node_no_more_outweighs_what_was_saved(cluster: Cluster) -> None:
    with without_server(cluster):
        cluster.control.delete_node("n1")
        manager = cluster.open()
        with pytest.raises(Retryable, match="not there yet"):
            manager.acquire(cluster.config, ATTRS, (None, None))


@pytest.mark.parametrize(
    "text", ["", "{no", "[]", '{"version":2,"own":"n1","nodes":[]}', '{"version":1,"own":"n1","nodes":[]}']
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
