"""The shape of a Node: what the server fills in, drops, sorts and refuses."""

from __future__ import annotations

import re
import time
from typing import Any
from uuid import uuid4

from tests.lab.kube_api import refusals

Object = dict[str, Any]

_METADATA = (
    *("name", "generateName", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"),
    *("deletionTimestamp", "deletionGracePeriodSeconds", "labels", "annotations", "ownerReferences"),
    *("finalizers", "managedFields"),
)
_SPEC = ("podCIDR", "podCIDRs", "providerID", "unschedulable", "taints")
_STATUS = (
    *("capacity", "allocatable", "phase", "conditions", "addresses", "daemonEndpoints", "nodeInfo", "images"),
    *("volumesInUse", "volumesAttached", "config", "runtimeHandlers", "features"),
)
_CONDITION = ("type", "status", "lastHeartbeatTime", "lastTransitionTime", "reason", "message")
_NODE_INFO = (
    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion"),
    *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
)
#: Part of every Node, since Go does not omit structs.
NO_STATUS: Object = {
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
    "nodeInfo": dict.fromkeys(_NODE_INFO, ""),
}
_NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_KEY = re.compile(rf"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_NAME}")
_FRACTION = re.compile(r"\.\d+(?=Z$)")
_FIXED_CIDR = 'Forbidden: node updates may not change podCIDR except from "" to valid'


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def born(metadata: Object) -> Object:
    """The metadata of an object that is just made."""
    return metadata | {"uid": str(uuid4()), "creationTimestamp": now()}


def new_node(node: Object) -> Object:
    """A Node as it is kept after a POST."""
    spec = node.get("spec") or {}
    taints = spec.get("taints") or []
    if _NOT_READY not in taints:
        spec = spec | {"taints": [*taints, _NOT_READY]}
    return shaped(node | {"metadata": born(node.get("metadata") or {}), "spec": spec})


def shaped(node: Object) -> Object:
    """A Node with the server's members only, in its order and forms, without kind and apiVersion."""
    metadata = _only(node.get("metadata") or {}, _METADATA)
    for name in ("labels", "annotations"):
        if name in metadata:
            metadata[name] = dict(sorted(metadata[name].items()))
    status = NO_STATUS | _only(node.get("status") or {}, _STATUS)
    if "conditions" in status:
        status["conditions"] = [_condition(condition) for condition in status["conditions"]]
    return {
        "metadata": metadata,
        "spec": _only(_with_both_cidrs(node.get("spec") or {}), _SPEC),
        "status": _only(status, _STATUS),
    }


def changed(old: Object, new: Object, subresource: str) -> Object:
    """What is kept when ``new`` is written over ``old``; raises ``Refusal``.

    Labels and annotations can be written through either path, spec through the node only and status
    through its subresource only.
    """
    metadata = (new.get("metadata") or {}) | {
        name: old["metadata"][name]
        for name in ("name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
        if name in old["metadata"]
    }
    kept = "spec" if subresource else "status"
    result = shaped(new | {"metadata": metadata, kept: old[kept]})
    check(result)
    cidrs = old["spec"].get("podCIDRs")
    if cidrs and result["spec"].get("podCIDRs") != cidrs:
        fixed = ("FieldValueForbidden", _FIXED_CIDR, "spec.podCIDRs")
        raise refusals.invalid("Node", metadata["name"], [fixed])
    return result


def check(node: Object) -> None:
    """Refuse annotation keys that are no qualified names."""
    for key in node["metadata"].get("annotations", {}):
        if not _KEY.fullmatch(key):
            raise refusals.bad_annotation_key(node["metadata"]["name"], key)


def check_patch(patch: Object) -> None:
    """Refuse labels and annotations that are no text."""
    metadata = patch.get("metadata") or {}
    for name in ("labels", "annotations"):
        for value in (metadata.get(name) or {}).values():
            if value is not None and not isinstance(value, str):
                problem = f'Invalid value: "{_go(patch)}": cannot convert {_go_type(value)} to string'
                raise refusals.invalid("", "", [("FieldValueInvalid", problem, "patch")])


def _only(values: Object, names: tuple[str, ...]) -> Object:
    return {name: values[name] for name in names if values.get(name) not in (None, {}, [], "")}


def _condition(condition: Object) -> Object:
    """Times are written even when there is none, whole seconds only."""
    whole: Object = {"type": "", "status": ""} | _only(condition, _CONDITION)
    for name in ("lastHeartbeatTime", "lastTransitionTime"):
        whole[name] = _FRACTION.sub("", whole[name]) if whole.get(name) else None
    return {name: whole[name] for name in _CONDITION if name in whole}


def _with_both_cidrs(spec: Object) -> Object:
    first, every = spec.get("podCIDR"), spec.get("podCIDRs")
    if first and (not every or every[0] != first):
        return spec | {"podCIDRs": [first]}
    return spec | {"podCIDR": every[0]} if every else spec


def _go(value: Any) -> str:
    """As Go's ``%v`` prints decoded JSON."""
    if isinstance(value, dict):
        return "map[" + " ".join(f"{key}:{_go(value[key])}" for key in sorted(value)) + "]"
    if isinstance(value, list):
        return "[" + " ".join(map(_go, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "<nil>", True: "true", False: "false"}[value]
    return str(value)


def _go_type(value: Any) -> str:
    names = {bool: "bool", int: "int64", float: "float64", dict: "map[string]interface {}"}
    return names.get(type(value), "[]interface {}")
