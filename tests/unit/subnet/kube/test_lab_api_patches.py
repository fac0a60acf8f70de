"""Strategic merge patch as the lab's API server applies it (k8s.io/apimachinery, package strategicpatch)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.kube_api.patches import merge, strategic_merge

Object = dict[str, Any]


def conditions(*members: Object) -> Object:
    return {"status": {"conditions": list(members)}}


def types(node: Object) -> list[str]:
    return [condition["type"] for condition in node["status"]["conditions"]]


READY = {"type": "Ready", "status": "True"}
DISK = {"type": "DiskPressure", "status": "False"}
NETWORK = {"type": "NetworkUnavailable", "status": "False"}


def test_null_removes_and_objects_are_merged() -> None:
    node = {"metadata": {"annotations": {"a": "1", "b": "2"}, "labels": {"l": "x"}}}
    patch = {"metadata": {"annotations": {"a": None, "c": "3"}}}
    patched = {"metadata": {"annotations": {"b": "2", "c": "3"}, "labels": {"l": "x"}}}
    assert strategic_merge(node, patch) == patched
    assert merge(node, patch) == patched


def test_a_condition_is_merged_into_the_one_of_its_type() -> None:
    node = conditions({**READY, "reason": "KubeletReady"}, DISK)
    patched = strategic_merge(node, conditions({"type": "Ready", "status": "False"}))
    assert patched == conditions({"type": "Ready", "status": "False", "reason": "KubeletReady"}, DISK)


def test_a_new_condition_comes_first() -> None:
    assert types(strategic_merge(conditions(READY, DISK), conditions(NETWORK))) == [
        "NetworkUnavailable",
        "Ready",
        "DiskPressure",
    ]


def test_a_condition_can_be_deleted_by_its_type() -> None:
    patch = conditions({"$patch": "delete", "type": "Ready"})
    assert strategic_merge(conditions(READY, DISK), patch) == conditions(DISK)


def test_all_conditions_can_be_replaced() -> None:
    patch = conditions(NETWORK, {"$patch": "replace"})
    assert strategic_merge(conditions(READY, DISK), patch) == conditions(NETWORK)


def test_the_order_can_be_set() -> None:
    patch = conditions(NETWORK)
    patch["status"]["$setElementOrder/conditions"] = [
        {"type": "Ready"},
        {"type": "NetworkUnavailable"},
        {"type": "DiskPressure"},
    ]
    assert types(strategic_merge(conditions(DISK, READY), patch)) == [
        "Ready",
        "NetworkUnavailable",
        "DiskPressure",
    ]


def test_a_merge_patch_replaces_the_conditions() -> None:
    assert merge(conditions(READY, DISK), conditions(NETWORK)) == conditions(NETWORK)


def test_a_condition_without_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match="does not contain declared merge key: type"):
        strategic_merge(conditions(READY), conditions({"status": "False"}))


def test_plain_lists_grow_and_shrink_by_their_values() -> None:
    node = {"metadata": {"finalizers": ["a", "b"]}}
    patch = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["b", "c"]}}
    assert strategic_merge(node, patch) == {"metadata": {"finalizers": ["b", "c"]}}


def test_other_lists_are_replaced() -> None:
    node = {"status": {"images": [{"names": ["a"]}]}}
    patch = {"status": {"images": [{"names": ["b"]}]}}
    assert strategic_merge(node, patch) == patch


def test_an_object_can_be_replaced_deleted_or_cut_down() -> None:
    node = {"metadata": {"annotations": {"a": "1", "b": "2"}}}
    for change, left in (
        ({"$patch": "replace", "c": "3"}, {"c": "3"}),
        ({"$patch": "delete"}, {}),
        ({"$retainKeys": ["b", "c"], "c": "3"}, {"b": "2", "c": "3"}),
    ):
        patched = strategic_merge(node, {"metadata": {"annotations": change}})
        assert patched == {"metadata": {"annotations": left}}
