"""An API server that comes back with another history than before, and how soon that is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flanneld.errors import NoAnswer
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube import watch
from flanneld.subnet.kube.access import Access
from flanneld.subnet.kube.api import Api, ApiRefusal, ApiTimeouts, Expired, NoServer
from flanneld.subnet.kube.watch import backoffs, is_behind
from tests.lab.credentials import write_kubeconfig
from tests.lab.wait import wait_for
from tests.local_cluster import Cluster
from tests.local_etcd import server, silent
from tests.local_kube import FLANNEL_TOKEN, LocalKube, running_kube


@contextmanager
def cluster_with_journal(directory: Path, *, until_it_fails: bool = False) -> Iterator[Cluster]:
    """A cluster of n1, which is us, and n2; its server has ended on exit if it shall be missed."""
    with running_kube(journal=directory / "journal") as kube:
        cluster = Cluster(kube, directory)
        cluster.put_node("n1", "10.5.1.0/24")
        cluster.put_peer(2)
        shutil.copy(directory / "journal", directory / "backup")
        cluster.join()
        wait_for(lambda: cluster.control.watches() == 1)
        cluster.control.jump(100)
        cluster.put_peer(3)
        cluster.wait_for(2, 3)
        if not until_it_fails:
            yield cluster
    if until_it_fails:
        yield cluster


def move_to(cluster: Cluster, kube: LocalKube) -> None:
    """Have the daemon find another API server at its next connection."""
    write_kubeconfig(cluster.directory / f"kubeconfig-{FLANNEL_TOKEN}", kube.url, FLANNEL_TOKEN, None)
    cluster.control.close_connections()


def moved(cluster: Cluster, kube: LocalKube) -> Cluster:
    """What the test does to the other API server."""
    other = Cluster(kube, cluster.directory)
    other.events = cluster.events
    return other


def test_a_store_that_went_back_to_an_earlier_version_is_listed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        cluster_with_journal(tmp_path) as cluster,
        running_kube(journal=tmp_path / "backup") as kube,
        cluster,
    ):
        move_to(cluster, kube)
        cluster.wait_for(2)
    assert caplog.text.count("version went back; was its store restored?") == 1


def test_a_restored_store_that_has_overtaken_the_version_we_know_is_listed_again(tmp_path: Path) -> None:
    with (
        cluster_with_journal(tmp_path, until_it_fails=True) as cluster,
        running_kube(journal=tmp_path / "backup") as kube,
        cluster,
    ):
        other = moved(cluster, kube)
        other.put_peer(4)
        kube.control.jump(1000)
        assert kube.control.version() > cluster.control.version()
        move_to(cluster, kube)
        other.wait_for(2, 4)
        assert cluster.ended == []


def test_another_cluster_with_a_node_of_our_name_is_listed(tmp_path: Path) -> None:
    with cluster_with_journal(tmp_path) as cluster, running_kube() as kube, cluster:
        other = moved(cluster, kube)
        other.put_node("n1", "10.5.1.0/24")
        other.put_peer(5)
        kube.control.jump(1000)
        move_to(cluster, kube)
        other.wait_for(5)


def lists_of_all(cluster: Cluster) -> list[dict[str, Any]]:
    return [each for each in cluster.asked("list") if "fieldSelector" not in each["query"]]


@pytest.mark.parametrize(("gap", "lists"), [(-1.0, 2), (3600.0, 1)])
def test_all_nodes_are_listed_after_a_long_silence_and_not_after_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float, lists: int
) -> None:
    monkeypatch.setattr(watch, "LONGEST_SILENCE", gap)
    with cluster_with_journal(tmp_path) as cluster, cluster:
        before = len(lists_of_all(cluster))
        cluster.control.close_connections()
        cluster.put_peer(4)
        cluster.wait_for(2, 3, 4)
        assert len(lists_of_all(cluster)) - before == lists - 1


@pytest.mark.parametrize(
    ("now", "known", "behind"),
    [("9", "10", True), ("10", "10", False), ("11", "9", False), ("a", "9", False), ("9", "b", False)],
)
def test_versions_are_compared_as_numbers(now: str, known: str, behind: bool) -> None:
    assert is_behind(now, known) is behind


# ---- how soon it is asked again -------------------------------------------------------------------

OUTAGE = 20


def slowest() -> Backoff:
    return Backoff(chance=lambda: 1.0)


@pytest.mark.parametrize("kind", [Expired, ApiRefusal])
@pytest.mark.parametrize("outage", [NoAnswer, NoServer])
def test_the_first_answer_after_an_outage_does_not_pay_for_it(outage: type, kind: type) -> None:
    """410 (its history is gone) and 403 (it does not know our rights yet) are what a new server says."""
    pauses = backoffs(slowest)
    for _ in range(OUTAGE):
        pauses.pause(outage)
    assert pauses.pause(kind) < 2.0
    assert sum(pauses.pause(kind) for _ in range(2)) < 10.0


def test_a_server_that_always_says_410_is_asked_ever_more_rarely() -> None:
    pauses = backoffs(slowest)
    assert [pauses.pause(Expired) for _ in range(OUTAGE)][-1] == 40.0


def test_while_there_is_no_connection_the_servers_return_is_noticed_within_seconds() -> None:
    pauses = backoffs(slowest)
    assert max(pauses.pause(NoServer) for _ in range(OUTAGE)) <= 4.0
    assert [pauses.pause(NoAnswer) for _ in range(OUTAGE)][-1] == 40.0


# ---- what is said of a silent one -----------------------------------------------------------------


def complaint(url: str, timeouts: ApiTimeouts) -> str:
    with pytest.raises(NoAnswer) as failure:
        Api(Access(url, "", {}), timeouts).get("/api/v1/nodes")
    return str(failure.value)


def test_a_silent_server_is_said_to_be_silent_for_as_long_as_it_was() -> None:
    with server(silent) as url:
        assert "no answer within 0.5 s" in complaint(url, ApiTimeouts(connect=60, read=0.5))
        assert "no answer within 0.1 s" in complaint(
            url.replace("http://", "https://"), ApiTimeouts(connect=0.1, read=60)
        )
