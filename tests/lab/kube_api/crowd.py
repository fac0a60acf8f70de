"""Nodes as real ones are, in large numbers: 16.6 KB of JSON each, of which a flannel daemon needs 0.5 KB."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any
from uuid import UUID

from tests.lab.kube_api import nodes
from tests.lab.kube_api.store import dump

IMAGES = 50
PREFIX = "flannel.alpha.coreos.com/"
_HEALTH = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)
_RESOURCES = {
    "cpu": "16",
    "ephemeral-storage": "204700Mi",
    "hugepages-1Gi": "0",
    "hugepages-2Mi": "0",
    "memory": "65843576Ki",
    "pods": "110",
}
BORN = "2026-01-01T00:00:00Z"


def crowd(
    number: int, network: str, first_address: str, backend: str = "vxlan", length: int = 24
) -> list[dict[str, Any]]:
    """So many nodes, ``crowd-1`` and on, the same at every call.

    Their podCIDRs come from the end of ``network``, their addresses go upward from the first one, and their
    MACs are made from their numbers. Raises ``ValueError`` when the network is too small.
    """
    return [json.loads(item) for _, item in crowd_items(number, network, first_address, backend, length)]


def crowd_items(
    number: int, network: str, first_address: str, backend: str = "vxlan", length: int = 24
) -> Iterator[tuple[str, bytes]]:
    """The same as names and JSON, made quickly: one node is written and the others are copies of its text."""
    whole = ip_network(network)
    end, size = int(whole.broadcast_address) + 1, 1 << (32 - length)
    if number * size > whole.num_addresses:
        raise ValueError(f"{network} has no room for {number} nodes; take a larger network")
    first = ip_address(first_address)
    before, *rest = re.split(rb"@([A-Z]+)@", dump(nodes.shaped(_node(backend))))
    for count in range(1, number + 1):
        values = {
            b"NUMBER": str(count),
            b"UID": str(UUID(int=count)),
            b"ADDRESS": str(first + count - 1),
            b"CIDR": f"{ip_address(end - count * size)}/{length}",
            b"MAC": mac(count),
        }
        texts = [part if at % 2 else values[part].encode() for at, part in enumerate(rest)]
        yield f"crowd-{count}", b"".join([before, *texts])


def mac(number: int) -> str:
    """A locally administered unicast MAC."""
    return "0e:00:" + number.to_bytes(4, "big").hex(":")


def beat(node: dict[str, Any]) -> dict[str, Any]:
    """The node after a kubelet's heartbeat."""
    for condition in node["status"].get("conditions", []):
        condition["lastHeartbeatTime"] = nodes.now()
    # Within one second the time alone would change nothing, and nothing changed is no event.
    count = int(node["metadata"]["annotations"].get("test/heartbeats", "0")) + 1
    node["metadata"]["annotations"]["test/heartbeats"] = str(count)
    return nodes.shaped(node)


def _node(backend: str) -> dict[str, Any]:
    """A node with marks in place of what is different in each."""
    name, address = "crowd-@NUMBER@", "@ADDRESS@"
    data = json.dumps({"VNI": 1, "VtepMAC": "@MAC@"}, separators=(",", ":"))
    labels = {
        "kubernetes.io/hostname": name,
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": "m5.4xlarge",
        "topology.kubernetes.io/region": "region-1",
        "topology.kubernetes.io/zone": "region-1a",
    }
    annotations = {
        f"{PREFIX}backend-data": data if backend == "vxlan" else "null",
        f"{PREFIX}backend-type": backend,
        f"{PREFIX}kube-subnet-manager": "true",
        f"{PREFIX}public-ip": address,
        "node.alpha.kubernetes.io/ttl": "0",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    }
    times = {"lastHeartbeatTime": BORN, "lastTransitionTime": BORN}
    conditions = [
        {"type": kind, "status": status, **times, "reason": reason, "message": message}
        for kind, status, reason, message in _HEALTH
    ]
    flannel = {"reason": "FlannelIsUp", "message": "Flannel is running on this node"}
    conditions.insert(0, {"type": "NetworkUnavailable", "status": "False", **times, **flannel})
    return {
        "metadata": {
            "name": name,
            "uid": "@UID@",
            "creationTimestamp": BORN,
            "labels": labels,
            "annotations": annotations,
            "managedFields": [_manager(name) for name in ("kubelet", "kube-controller-manager", "flanneld")],
        },
        "spec": {"podCIDR": "@CIDR@", "providerID": "metal:///rack-7/@NUMBER@"},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": name},
            ],
            "capacity": _RESOURCES,
            "allocatable": _RESOURCES,
            "conditions": conditions,
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "nodeInfo": _node_info(),
            "images": _images(),
        },
    }


def _manager(name: str) -> dict[str, Any]:
    """About a kilobyte of bookkeeping."""
    members: dict[str, Any] = {".": {}}
    members |= {f"f:{part}": {} for part in ("lastHeartbeatTime", "lastTransitionTime", "message", "reason")}
    conditions = {f'k:{{"type":"{kind}"}}': members for kind, *_ in _HEALTH}
    annotations: dict[str, Any] = {
        f"f:{PREFIX}{part}": {} for part in ("backend-data", "backend-type", "public-ip")
    }
    fields = {"f:metadata": {"f:annotations": annotations}, "f:status": {"f:conditions": conditions}}
    fields["f:status"] |= {"f:allocatable": {f"f:{name}": {} for name in _RESOURCES}}
    entry = {"manager": name, "operation": "Update", "apiVersion": "v1", "time": BORN}
    return {**entry, "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": "status"}


def _node_info() -> dict[str, str]:
    return {
        "machineID": "8f0d2e9b6c3a4f5d9e7b1a2c3d4e5f60",
        "systemUUID": "ec2f0d2e-9b6c-3a4f-5d9e-7b1a2c3d4e5f",
        "bootID": "5e4f3d2c-1b0a-4987-8654-3210fedcba98",
        "kernelVersion": "6.1.0-18-cloud-amd64",
        "osImage": "Debian GNU/Linux 12 (bookworm)",
        "containerRuntimeVersion": "containerd://2.0.4",
        "kubeletVersion": "v1.36.2",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }


def _images() -> list[dict[str, Any]]:
    source = random.Random(1)
    images = []
    for number in range(IMAGES):
        name = f"registry.example.com/platform/team-{number % 7}/service-{number}"
        names = [f"{name}@sha256:{source.randbytes(32).hex()}", f"{name}:v1.{number}.0"]
        images.append({"names": names, "sizeBytes": source.randrange(10**7, 10**9)})
    return images
