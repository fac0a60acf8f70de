"""What a test may ask of the server, over a unix socket: a line of JSON for each call and for each answer."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tests.lab.kube_api import nodes
from tests.lab.kube_api.access import EVERYTHING, FLANNEL, User
from tests.lab.kube_api.crowd import beat, crowd
from tests.lab.kube_api.faults import Fault
from tests.lab.kube_api.server import Connection, Server

Object = dict[str, Any]
ROLES = {"flannel": FLANNEL, "admin": EVERYTHING}


class Control:
    """The calls. What they write is shaped as the server does it, but not refused."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._api = server.api
        self._store = server.api.store
        self._beating = threading.Event()

    def put_node(self, node: Object) -> Object:
        """Write a whole node over what may be there, which keeps its uid."""
        name = node["metadata"]["name"]
        with self._store.lock:
            old = self._store.get("nodes", name)
            if old is None:
                made = nodes.shaped(node | {"metadata": nodes.born(node["metadata"])})
            else:
                made = nodes.shaped(node | {"metadata": old["metadata"] | node["metadata"]})
            self._store.put("nodes", name, made)
            return made

    def node(self, name: str) -> Object | None:
        return self._store.get("nodes", name)

    def names(self) -> list[str]:
        return [name for name, _ in self._store.items("nodes")]

    def annotate(self, name: str, annotations: dict[str, str | None]) -> Object:
        """Set annotations; None removes one."""
        with self._store.lock:
            node = self._existing(name)
            there = node["metadata"].get("annotations", {}) | annotations
            node["metadata"]["annotations"] = {
                key: value for key, value in there.items() if value is not None
            }
            return self._written(node)

    def set_pod_cidrs(self, name: str, cidrs: list[str]) -> Object:
        """Give a node other podCIDRs, even those that the server would not take."""
        with self._store.lock:
            node = self._existing(name)
            node["spec"] = {key: node["spec"][key] for key in node["spec"] if not key.startswith("podCIDR")}
            node["spec"] |= {"podCIDR": cidrs[0], "podCIDRs": cidrs} if cidrs else {}
            return self._written(node)

    def delete_node(self, name: str) -> None:
        self._api.delete_node(name)

    def put_pod(self, namespace: str, name: str, node: str) -> None:
        metadata = nodes.born({"name": name, "namespace": namespace})
        spec = {"nodeName": node} if node else {}
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": "Running" if node else "Pending"}}
        self._store.put("pods", f"{namespace}/{name}", pod)

    def events(self) -> list[Object]:
        return [json.loads(item) for _, item in self._store.items("events")]

    def put_crowd(self, number: int, network: str, first_address: str, backend: str) -> None:
        for node in crowd(number, network, first_address, backend):
            self._store.put("nodes", node["metadata"]["name"], node)

    def start_heartbeats(self, per_second: float) -> None:
        """Let kubelets of all nodes in turn write their status, so often all in all."""
        self._beating = threading.Event()
        threading.Thread(target=self._beat, args=(per_second, self._beating), daemon=True).start()

    def stop_heartbeats(self) -> None:
        self._beating.set()

    def add_fault(self, fault: Object) -> None:
        self._server.faults.add(Fault(**fault))

    def clear_faults(self) -> None:
        self._server.faults.clear()

    def disturb_watches(self, fault: Object) -> int:
        """Strike all open watches with a fault's ``line``, ``error`` or ``then``; return how many there were."""
        with self._store.lock:
            watches = [found.watch for found in list(self._server.connections) if found.watch is not None]
            for watch in watches:
                watch.order = Fault(**fault)
            self._store.lock.notify_all()
        return len(watches)

    def watches(self) -> int:
        """How many are open."""
        return sum(found.watch is not None for found in list(self._server.connections))

    def close_connections(self, idle_only: bool) -> int:
        """Shut connections down, all or those between two requests; return how many."""
        found = [each for each in list(self._server.connections) if each.idle or not idle_only]
        for connection in found:
            _shut(connection)
        return len(found)

    def compact(self) -> int:
        return self._store.compact()

    def jump(self, versions: int) -> int:
        return self._store.jump(versions)

    def version(self) -> int:
        return self._store.version

    def requests(self, start: int) -> list[Object]:
        return self._server.notes[start:]

    def put_token(
        self, token: str, user: str, role: str, extra: list[tuple[str, str]], seconds: float | None
    ) -> None:
        """Let in whoever shows the token, for so many seconds or for good."""
        rules = ROLES.get(role, frozenset()) | {(verb, resource) for verb, resource in extra}
        until = float("inf") if seconds is None else time.monotonic() + seconds
        self._api.access.tokens[token] = User(user, rules, until)

    def revoke_token(self, token: str) -> None:
        self._api.access.tokens.pop(token, None)

    def set_bookmark_interval(self, seconds: float) -> None:
        """From now on, for new watches."""
        self._api.bookmark_interval = seconds

    def set_patience(self, seconds: float) -> None:
        """How long a list waits for a version that is yet to come."""
        self._api.patience = seconds

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


def serve(control: Control, path: Path) -> None:
    """Take calls until the process ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(control, client), daemon=True).start()


def _serve(control: Control, client: socket.socket) -> None:
    with client, client.makefile("rwb") as stream:
        for line in stream:
            name, arguments = json.loads(line)
            try:
                answer = {"result": getattr(control, name)(**arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


def _shut(connection: Connection) -> None:
    try:
        connection.socket.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was over already
