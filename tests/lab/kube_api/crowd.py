"""Nodes as real ones are, in large numbers: 16.6 KB of JSON each, of which a flannel daemon needs 0.5 KB."""

from __future__ import annotations

import json
import random
from ipaddress import ip_address, ip_network
from itertools import islice
from typing import Any
from uuid import UUID

from tests.lab.kube_api import nodes

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
    """So many nodes ``crowd-1``..., with podCIDRs from the end of ``network``, addresses upward from one.

    MACs are made from the number. They are the same at every call.
    """
    subnets = list(islice(reversed(list(ip_network(network).subnets(new_prefix=length))), number))
    if len(subnets) < number:
        raise ValueError(f"{network} has room for {len(subnets)} nodes only; take a larger network")
    first = ip_address(first_address)
    one = _node()
    text = json.dumps(one)
    made = []
    for count in range(1, number + 1):
        node = json.loads(text)
        address = str(first + count - 1)
        data = json.dumps({"VNI": 1, "VtepMAC": mac(count)}, separators=(",", ":"))
        node["metadata"] |= {"name": f"crowd-{count}", "uid": str(UUID(int=count))}
        node["metadata"]["labels"]["kubernetes.io/hostname"] = f"crowd-{count}"
        node["metadata"]["annotations"] |= {
            f"{PREFIX}backend-data": data if backend == "vxlan" else "null",
            f"{PREFIX}backend-type": backend,
            f"{PREFIX}kube-subnet-manager": "true",
            f"{PREFIX}public-ip": address,
        }
        node["spec"] = {
            "podCIDR": str(subnets[count - 1]),
            "providerID": f"metal:///rack-{count % 40}/{count}",
        }
        node["status"]["addresses"] = [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": f"crowd-{count}"},
        ]
        made.append(nodes.shaped(node))
    return made


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


def _node() -> dict[str, Any]:
    labels = {
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": "m5.4xlarge",
        "topology.kubernetes.io/region": "region-1",
        "topology.kubernetes.io/zone": "region-1a",
    }
    annotations = {
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
            "creationTimestamp": BORN,
            "labels": labels,
            "annotations": annotations,
            "managedFields": [_manager(name) for name in ("kubelet", "kube-controller-manager", "flanneld")],
        },
        "status": {
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
