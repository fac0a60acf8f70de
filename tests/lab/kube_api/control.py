"""What a test may ask of the server, in the same process or, by way of ``calls``, in another."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.lab.kube_api import nodes
from tests.lab.kube_api.access import FLANNEL_USER
from tests.lab.kube_api.crowd import PREFIX, beat, crowd_items
from tests.lab.kube_api.faults import Fault
from tests.lab.kube_api.server import Connection, Server

Object = dict[str, Any]


class Control:
    """The calls. What they write is shaped as the server does it, but never refused."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._api = server.api
        self._store = server.api.store
        self._beating = threading.Event()

    # ---- nodes ----

    def put_node(
        self,
        name: str,
        *pod_cidrs: str,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        address: str = "",
    ) -> Object:
        """Write a node as kubelet and controller manager would; one that was there keeps its uid."""
        with self._store.lock:
            old = self._store.get("nodes", name)
            metadata = {
                **(old["metadata"] if old else nodes.born({"name": name})),
                "labels": {"kubernetes.io/hostname": name, **(labels or {})},
                "annotations": {"node.alpha.kubernetes.io/ttl": "0", **(annotations or {})},
            }
            spec = {"podCIDR": pod_cidrs[0], "podCIDRs": list(pod_cidrs)} if pod_cidrs else {}
            addresses = [{"type": "InternalIP", "address": address}] if address else []
            return self._written({"metadata": metadata, "spec": spec, "status": {"addresses": addresses}})

    def put_peer(self, name: str, pod_cidr: str, public_ip: str, backend: str, data: Any = None) -> Object:
        """Write a node on which a flannel daemon runs; ``data`` is its backend data."""
        announced = {
            "backend-data": json.dumps(data, separators=(",", ":")),
            "backend-type": backend,
            "kube-subnet-manager": "true",
            "public-ip": public_ip,
        }
        annotations = {PREFIX + key: value for key, value in announced.items()}
        return self.put_node(name, pod_cidr, annotations=annotations, address=public_ip)

    def put_crowd(self, number: int, network: str, first_address: str, backend: str = "vxlan") -> None:
        """Write so many peers of a real node's size; podCIDRs are taken from the end of ``network``."""
        for name, item in crowd_items(number, network, first_address, backend):
            self._store.add_item("nodes", name, item)

    def node(self, name: str) -> Object | None:
        """The object, None when there is none."""
        return self._store.get("nodes", name)

    def names(self) -> list[str]:
        """The names of all nodes."""
        return [name for name, _ in self._store.items("nodes")]

    def annotations(self, name: str) -> dict[str, str]:
        """A node's annotations, ``{}`` when there is no such node."""
        node = self.node(name)
        return {} if node is None else dict(node["metadata"].get("annotations", {}))

    def condition(self, name: str, kind: str = "NetworkUnavailable") -> Object | None:
        """A node's condition of this type, None without one."""
        conditions = (self.node(name) or {"status": {}})["status"].get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), None)

    def annotate(self, name: str, annotations: Mapping[str, str | None]) -> Object:
        """Set annotations, by their full names; None removes one."""
        with self._store.lock:
            node = self._existing(name)
            there = node["metadata"].get("annotations", {}) | dict(annotations)
            node["metadata"]["annotations"] = {
                key: value for key, value in there.items() if value is not None
            }
            return self._written(node)

    def set_pod_cidrs(self, name: str, *cidrs: str) -> Object:
        """Give a node other podCIDRs, or none, even those that a real server would refuse."""
        with self._store.lock:
            node = self._existing(name)
            node["spec"] = {key: node["spec"][key] for key in node["spec"] if not key.startswith("podCIDR")}
            node["spec"] |= {"podCIDR": cidrs[0], "podCIDRs": list(cidrs)} if cidrs else {}
            return self._written(node)

    def delete_node(self, name: str) -> None:
        """Delete a node; one with finalizers is only marked."""
        self._api.delete_node(name)

    def start_heartbeats(self, per_second: float) -> None:
        """Let the kubelets of all nodes in turn write their status, so often all in all."""
        self._beating = threading.Event()
        threading.Thread(target=self._beat, args=(per_second, self._beating), daemon=True).start()

    def stop_heartbeats(self) -> None:
        self._beating.set()

    # ---- other objects ----

    def put_pod(self, namespace: str, name: str, node: str) -> None:
        """Write a pod on a node, or with "" on none yet."""
        metadata = nodes.born({"name": name, "namespace": namespace})
        spec = {"nodeName": node} if node else {}
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": "Running" if node else "Pending"}}
        self._store.put("pods", f"{namespace}/{name}", pod)

    def events(self) -> list[Object]:
        """The objects of kind Event that were posted."""
        return [json.loads(item) for _, item in self._store.items("events")]

    def put_token(
        self,
        token: str,
        user: str = FLANNEL_USER,
        role: str = "flannel",
        extra: Sequence[tuple[str, str]] = (),
        seconds: float | None = None,
    ) -> None:
        """Let in whoever shows this token, for so many seconds or for good.

        ``role`` is "flannel", "admin" or "nobody"; ``extra`` adds pairs of verb and resource.
        """
        self._api.access.put(token, user, role, extra, seconds)

    def revoke_token(self, token: str) -> None:
        """An open watch lives on, as it really does."""
        self._api.access.revoke(token)

    # ---- versions ----

    def version(self) -> int:
        """The present resource version of the cluster."""
        return self._store.version

    def jump(self, versions: int = 1000) -> int:
        """Use up versions as writes of other resources do; return the present one."""
        return self._store.jump(versions)

    def compact(self) -> int:
        """Make every version of before too old, for new watches and further pages; return the present one."""
        return self._store.compact()

    def set_bookmark_interval(self, seconds: float) -> None:
        """How often new watches get bookmarks; 60 s by default, and shortly before they end."""
        self._api.bookmark_interval = seconds

    def set_patience(self, seconds: float) -> None:
        """How long a list waits for a version that is yet to come; 3 s by default."""
        self._api.patience = seconds

    # ---- what goes wrong ----

    def add_fault(self, fault: Fault) -> None:
        """Order a fault for requests to come; of several that match, the first is used up first."""
        self._server.faults.add(fault)

    def clear_faults(self) -> None:
        """Forget all that still wait for a request."""
        self._server.faults.clear()

    def disturb_watches(self, fault: Fault) -> int:
        """Strike all open watches with a fault's ``line``, ``error`` or ``then``; return their number."""
        with self._store.lock:
            watches = [found.watch for found in list(self._server.connections) if found.watch is not None]
            for watch in watches:
                watch.order = fault
            self._store.lock.notify_all()
        return len(watches)

    def expire_watches(self) -> None:
        """Let all open watches end as if their time were up."""
        for found in list(self._server.connections):
            if found.watch is not None:
                found.watch.expire()

    def close_connections(self, *, idle_only: bool = False) -> int:
        """Close connections, all or those between two requests, and return how many."""
        found = [each for each in list(self._server.connections) if each.idle or not idle_only]
        for connection in found:
            _shut(connection)
        return len(found)

    # ---- what was asked ----

    def watches(self) -> int:
        """Count the open watches that will tell of every change from now on."""
        watches = [found.watch for found in list(self._server.connections)]
        return sum(watch is not None and watch.begun for watch in watches)

    def bookmarks(self) -> int:
        """How many bookmarks were sent to the watches that are open."""
        return sum(
            found.watch.bookmarks for found in list(self._server.connections) if found.watch is not None
        )

    def requests(self, verb: str = "", resource: str = "", start: int = 0) -> list[Object]:
        """The requests since the server's start, but for the first ``start`` of all.

        ``verb`` and ``resource`` are those of a ``Fault``. Each request has verb, resource, name, namespace,
        path, query, user, headers, body, status (0 while there is no answer) and time.
        """
        return [
            note
            for note in self._server.notes[start:]
            if verb in ("", note["verb"]) and resource in ("", note["resource"])
        ]

    def patches(self, name: str = "") -> list[Object]:
        """The bodies of all patches of a node's status, or of all nodes'."""
        asked = self.requests("patch", "nodes/status")
        return [json.loads(note["body"]) for note in asked if name in ("", note["name"])]

    def _existing(self, name: str) -> Object:
        node = self._store.get("nodes", name)
        if node is None:
            raise KeyError(f"there is no node {name}")
        return node

    def _written(self, node: Object) -> Object:
        made = nodes.shaped(node)
        self._store.put("nodes", made["metadata"]["name"], made)
        return made

    def _beat(self, per_second: float, stopped: threading.Event) -> None:
        due = time.monotonic()
        while True:
            for name in self.names():
                due += 1 / per_second
                if stopped.wait(max(0.0, due - time.monotonic())):
                    return
                with self._store.lock:
                    node = self._store.get("nodes", name)
                    if node is not None:
                        self._store.put("nodes", name, beat(node))


def _shut(connection: Connection) -> None:
    try:
        connection.socket.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was over already
