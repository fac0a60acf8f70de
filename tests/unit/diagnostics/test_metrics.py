"""/metrics, of a daemon that has not come far yet."""

from __future__ import annotations

import sys

import pytest

from flanneld.config import Config, parse
from flanneld.diagnostics.metrics import METRICS, page
from flanneld.errors import NoAnswer, Retryable
from flanneld.model import Lease, LeaseAttrs
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile.counters import counted
from tests.unit.diagnostics.stores import idle_node

CONFIG = parse('{"Network": "10.5.0.0/16"}')
LEASE, RENEWED = Lease(LeaseAttrs()), Lease(LeaseAttrs(), asof=2)


class Store:
    """As much of a store as is asked here."""

    problem: Retryable | None = None

    def __init__(self) -> None:
        self.fails = False

    def network_config(self) -> Config:
        if self.fails:
            raise NoAnswer("no answer", "wait")
        return CONFIG

    def renew(self, _lease: Lease) -> Lease:
        self.network_config()
        return RENEWED


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def node(store: Store) -> Node:
    manager = counted(store)  # type: ignore[arg-type] # it has what is used
    return idle_node(Options(), manager)


def lines(node: Node, accept: str = "") -> list[str]:
    return page(node, accept)[2].decode().splitlines()


def test_a_daemon_that_waits_has_metrics_too(node: Node) -> None:
    told = lines(node)
    assert [metric.name for metric in METRICS if f"# TYPE {metric.name} {metric.type}" not in told] == []
    assert "flannel_ready 0.0" in told
    assert "flannel_datastore_up 0.0" in told


def test_node_that_is_a_server_too_tells_what_it_was_asked(node: Node) -> None:
    node.more_metrics = lambda: "flannel_server_connections 3\n"
    _, content_type, body = page(node, "application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("text/plain; version=")
    text = body.decode()
    assert "# EOF" not in text
    assert text.endswith("flannel_server_connections 3\n")


def test_open_metrics_are_told_to_those_who_accept_them(node: Node) -> None:
    status, content_type, body = page(node, "application/openmetrics-text;version=1.0.0")
    assert status == 200
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_without_the_library_the_page_is_unavailable_and_says_what_to_install(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, content_type, body = page(node, "")
    assert (status, content_type) == (503, "text/plain; charset=utf-8")
    assert body.decode() == (
        "no metrics without prometheus_client; install it with:"
        " pip install prometheus-client, or apt install python3-prometheus-client\n"
    )


def test_requests_to_the_store_are_counted_and_their_answers_passed_on(node: Node, store: Store) -> None:
    assert node.store.network_config() == CONFIG
    assert node.store.renew(LEASE) == RENEWED
    store.fails = True
    with pytest.raises(Retryable):
        node.store.renew(LEASE)
    told = lines(node)
    assert "flannel_datastore_request_seconds_count 3.0" in told
    assert "flannel_datastore_errors_total 1.0" in told
    assert 'flannel_lease_renewals_total{result="ok"} 1.0' in told
    assert 'flannel_lease_renewals_total{result="error"} 1.0' in told
    assert "flannel_datastore_up 0.0" in told


def test_a_store_that_refuses_answers(node: Node, store: Store) -> None:
    node.store.network_config()
    store.problem = Retryable("etcd refuses access")
    assert "flannel_datastore_up 1.0" in lines(node)


def test_a_store_whose_watch_gets_no_answer_is_down(node: Node, store: Store) -> None:
    node.store.network_config()
    assert "flannel_datastore_up 1.0" in lines(node)
    store.problem = NoAnswer("etcd does not answer")
    assert "flannel_datastore_up 0.0" in lines(node)
