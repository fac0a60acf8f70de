"""The table of nodes: what a change of one means for the leases."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from ipaddress import IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.model import Added, Event, Lease, LeaseAttrs, LeaseKey, LeaseTable, Removed
from flanneld.subnet.kube.node_table import NodeTable
from flanneld.subnet.kube.nodes import KubeNode, lease_of

CONFIG = parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}')
OWN = Lease(LeaseAttrs(), IPv4Network("10.5.0.0/24"))


def node(name: str, number: int, mac: int = 0, **notes: str) -> KubeNode:
    data = json.dumps({"VtepMAC": f"02:00:00:00:{number:02x}:{mac:02x}"})
    known = {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": data,
        "public-ip": f"198.18.0.{number}",
    }
    return KubeNode(
        name,
        f"uid of {name}",
        (f"10.5.{number}.0/24",),
        known | {k.replace("_", "-"): v for k, v in notes.items()},
    )


def key(number: int) -> LeaseKey:
    return (IPv4Network(f"10.5.{number}.0/24"), None)


def lease(of: KubeNode) -> Lease:
    return lease_of(of, CONFIG)


def by_key(leases: Iterable[Lease]) -> dict[LeaseKey, Lease]:
    return {each.key: each for each in leases}


@pytest.fixture
def table() -> NodeTable:
    return NodeTable("own", OWN.key, CONFIG)


def test_a_new_node_is_a_lease_and_its_heartbeats_are_nothing(table: NodeTable) -> None:
    assert table.put(node("a", 1)) == [Added(lease(node("a", 1)))]
    assert table.put(node("a", 1)) == []


@pytest.mark.parametrize("change", ["backend_data", "backend_type", "public_ip"])
def test_a_change_of_what_a_node_announces_is_told(table: NodeTable, change: str) -> None:
    table.put(node("a", 1))
    value = {
        "backend_data": '{"VtepMAC":"02:00:00:00:00:99"}',
        "backend_type": "ipip",
        "public_ip": "198.18.0.99",
    }
    notes: dict[str, Any] = {change: value[change]}
    changed = node("a", 1, **notes)
    assert table.put(changed) == [Added(lease(changed))]


def test_losing_the_managed_annotation_is_a_removal(table: NodeTable) -> None:
    table.put(node("a", 1))
    assert table.put(node("a", 1, kube_subnet_manager="false")) == [Removed(key(1))]
    assert table.put(node("a", 1, kube_subnet_manager="false")) == []


def test_our_own_node_is_nobodys_peer(table: NodeTable) -> None:
    assert table.put(node("own", 1)) == []


def test_a_node_with_our_pod_cidr_is_named(table: NodeTable, caplog: pytest.LogCaptureFixture) -> None:
    table.put(node("a", 0))
    assert "node a: it has our own podCIDR 10.5.0.0/24" in caplog.text


def test_a_deleted_node_is_gone_once(table: NodeTable) -> None:
    table.put(node("a", 1))
    assert table.drop("a") == [Removed(key(1))]
    assert table.drop("a") == []


def test_another_pod_cidr_moves_the_lease(table: NodeTable) -> None:
    table.put(node("a", 1))
    assert table.put(node("a", 2)) == [Removed(key(1)), Added(lease(node("a", 2)))]


def test_garbage_keeps_what_was_known_and_is_complained_about_once(
    table: NodeTable, caplog: pytest.LogCaptureFixture
) -> None:
    table.put(node("a", 1))
    with caplog.at_level(logging.WARNING):
        for text in ("here", "here", "here"):
            assert table.put(node("a", 1, public_ip=text)) == []
        snapshot = table.replace([node("a", 1, public_ip="here")], OWN)
    assert len(caplog.records) == 1
    assert snapshot.leases == (lease(node("a", 1)), OWN)
    assert table.put(node("a", 1)) == []


def test_garbage_of_a_node_made_anew_owes_nothing_to_the_old_one(table: NodeTable) -> None:
    table.put(node("a", 1))
    assert table.put(replace(node("a", 2, public_ip="here"), uid="another")) == [Removed(key(1))]


def test_a_node_that_never_made_sense_is_there_all_the_same(table: NodeTable) -> None:
    snapshot = table.replace([node("a", 1, public_ip="here"), node("b", 2)], OWN)
    assert snapshot.leases == (lease(node("b", 2)), OWN)
    assert snapshot.unreadable == {key(1)}


def test_a_node_that_never_made_sense_can_go(table: NodeTable) -> None:
    table.put(node("a", 1, public_ip="here"))
    assert table.drop("a") == [Removed(key(1))]


def test_of_two_nodes_with_one_pod_cidr_the_first_by_name_has_it(
    table: NodeTable, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = node("a", 1), node("b", 1, public_ip="198.18.0.77")
    assert table.put(second) == [Added(lease(second))]
    assert table.put(first) == [Added(lease(first))]
    assert "Nodes a, b all have the podCIDR 10.5.1.0/24" in caplog.text
    assert table.put(node("b", 1, public_ip="198.18.0.78")) == []
    assert table.drop("a") == [Added(lease(node("b", 1, public_ip="198.18.0.78")))]
    assert table.drop("b") == [Removed(key(1))]


def test_a_list_tells_what_was_missed(table: NodeTable) -> None:
    for number in (1, 2, 3):
        table.put(node(f"n{number}", number))
    snapshot = table.replace([node("n1", 1), node("n2", 7), node("own", 0)], OWN)
    assert by_key(snapshot.leases) == by_key([lease(node("n1", 1)), lease(node("n2", 7)), OWN])
    assert {each.name for each in table.nodes()} == {"n1", "n2"}


names = st.sampled_from("abcd")
puts = st.builds(
    node, names, st.integers(1, 3), st.integers(0, 2), kube_subnet_manager=st.sampled_from(["true", ""])
)
changes = st.lists(puts | names, max_size=12)


@given(changes)
def test_news_one_by_one_and_a_list_lead_to_the_same(history: list[KubeNode | str]) -> None:
    one_by_one, there = NodeTable("own", OWN.key, CONFIG), dict[str, KubeNode]()
    told = LeaseTable(OWN.key, synced=True)
    for item in history:
        events: list[Event]
        if isinstance(item, str):
            there.pop(item, None)
            events = one_by_one.drop(item)
        else:
            there[item.name] = item
            events = one_by_one.put(item)
        for event in events:
            told.apply(event)
    listed = NodeTable("own", OWN.key, CONFIG).replace(there.values(), OWN)
    assert by_key(listed.leases) == by_key([*told, OWN])
