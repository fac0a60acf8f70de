"""A Kubernetes API server in a namespace, what tests ask of it, and what a daemon needs to find it."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lab.credentials import make_certificates, write_kubeconfig, write_service_account
from tests.lab.daemon import ROOT
from tests.lab.kube_api.access import FLANNEL_USER
from tests.lab.kube_api.faults import Fault
from tests.lab.namespace import Namespace
from tests.lab.node import Node
from tests.lab.wait import wait_for

PORT = 6443
PREFIX = "flannel.alpha.coreos.com/"  # of the annotations, by default
TOKEN = "flannel-token"  # good from the start, with no more rights than upstream's ClusterRole gives

Object = dict[str, Any]


class Kube:
    """One API server. Its objects outlive ``stop``, ``kill`` and another ``start``; the history does not.

    Without TLS whoever has no token may do what flannel may; with it he may do nothing.
    """

    def __init__(self, namespace: Namespace, address: str, directory: Path) -> None:
        self.namespace = namespace
        self.address = address
        self._directory = directory / "kube"
        self._directory.mkdir()
        self._log = directory / "kube.log"
        self._tls = False
        self._tokens: dict[str, Object] = {TOKEN: {"user": FLANNEL_USER, "role": "flannel"}}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._stream: io.BufferedRWPair | None = None

    # ---- the process ----

    def start(self, *flags: str, tls: bool | None = None) -> None:
        """Start and wait until it answers; ``tls`` None leaves that as it was. Tokens of before are good again.

        Flags: ``--version=N`` makes resource versions go on from there at least, ``--window=N`` keeps so many changes.
        """
        self._tls = self._tls if tls is None else tls
        own = [f"--address={self.address}", f"--port={PORT}", f"--journal={self._directory / 'journal'}"]
        own += [f"--control={self._path}", "--anonymous=nobody" if self._tls else "--anonymous=flannel"]
        if self._tls:
            own += [f"--certificates={make_certificates(self._directory, self.address)}"]
        command = [sys.executable, "-m", "tests.lab.kube_api", *own, *flags]
        with self._log.open("ab") as output:
            self._process = self.namespace.start(
                *command, output=output, environment={"PYTHONPATH": str(ROOT)}
            )
        wait_for(self._connect, 10, f"the API server to answer; its log:\n{self.log()[-2000:]}")
        for token, rights in self._tokens.items():
            self.put_token(token, **rights)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process and wait for it."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None
            self._path.unlink(missing_ok=True)

    def kill(self) -> None:
        """End it as a power failure would."""
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and start it again with the same objects and an empty history."""
        self.stop(how)
        self.start()

    def forget(self) -> None:
        """Lose all objects, while it is stopped."""
        (self._directory / "journal").unlink(missing_ok=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Make it take connections and requests, and say nothing, for a while."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # ---- what a daemon needs ----

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.address}:{PORT}"

    @property
    def ca(self) -> Path:
        """The certificate authority's certificate, with TLS."""
        return self._directory / "ca.crt"

    def flags(self) -> list[str]:
        """Flags for a daemon that needs no credentials, which is so without TLS."""
        return ["--kube-subnet-mgr", f"--kube-api-url={self.url}"]

    def kubeconfig(self, path: Path, token: str = TOKEN) -> Path:
        """Write a kubeconfig file with this token."""
        write_kubeconfig(path, self.url, token, self.ca if self._tls else None)
        return path

    def service_account(self, folder: Path, token: str = TOKEN) -> Path:
        """Write, or rotate as kubelet does, what a pod finds in /var/run/secrets/kubernetes.io/serviceaccount."""
        write_service_account(folder, token, self.ca if self._tls else None)
        return folder

    def in_cluster(self) -> dict[str, str]:
        """The variables that tell a pod where the API server is."""
        return {"KUBERNETES_SERVICE_HOST": self.address, "KUBERNETES_SERVICE_PORT": str(PORT)}

    # ---- objects ----

    def add(self, node: Node, *pod_cidrs: str, annotations: Mapping[str, str] | None = None) -> Object:
        """Make the object of a node of the lab, as its kubelet would; the podCIDR is 10.5.<number>.0/24 by default."""
        return self.put_node(
            node.name,
            *(pod_cidrs or (f"10.5.{node.number}.0/24",)),
            annotations=annotations,
            address=node.address,
        )

    def put_node(
        self,
        name: str,
        *pod_cidrs: str,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        address: str = "",
    ) -> Object:
        """Write a node; nothing about podCIDRs is checked."""
        metadata = {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
            "annotations": {"node.alpha.kubernetes.io/ttl": "0", **(annotations or {})},
        }
        spec = {"podCIDR": pod_cidrs[0], "podCIDRs": list(pod_cidrs)} if pod_cidrs else {}
        addresses = [{"type": "InternalIP", "address": address}] if address else []
        node = {"metadata": metadata, "spec": spec, "status": {"addresses": addresses}}
        return self._ask("put_node", node=node)

    def put_peer(self, name: str, pod_cidr: str, public_ip: str, backend: str, data: Any = None) -> Object:
        """Write a node on which flannel runs; ``data`` is its backend data."""
        announced = {
            "backend-data": json.dumps(data, separators=(",", ":")),
            "backend-type": backend,
            "kube-subnet-manager": "true",
            "public-ip": public_ip,
        }
        return self.put_node(
            name, pod_cidr, annotations={PREFIX + key: value for key, value in announced.items()}
        )

    def node(self, name: str) -> Object | None:
        """The object, None when there is none."""
        return self._ask("node", name=name)

    def names(self) -> list[str]:
        """The names of all nodes."""
        return self._ask("names")

    def annotations(self, name: str) -> dict[str, str]:
        """A node's annotations, ``{}`` when there is no such node."""
        return ((self.node(name) or {}).get("metadata") or {}).get("annotations") or {}

    def condition(self, name: str, kind: str = "NetworkUnavailable") -> Object | None:
        """A node's condition of this type."""
        conditions = ((self.node(name) or {}).get("status") or {}).get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), None)

    def annotate(self, name: str, annotations: Mapping[str, str | None]) -> Object:
        """Set annotations, by their full names; None removes one."""
        return self._ask("annotate", name=name, annotations=dict(annotations))

    def set_pod_cidrs(self, name: str, *cidrs: str) -> Object:
        """Give a node other podCIDRs, or none, even those that a real server would refuse."""
        return self._ask("set_pod_cidrs", name=name, cidrs=list(cidrs))

    def delete_node(self, name: str) -> None:
        self._ask("delete_node", name=name)

    def put_pod(self, namespace: str, name: str, node: str) -> None:
        """Write a pod on a node, or on none yet."""
        self._ask("put_pod", namespace=namespace, name=name, node=node)

    def events(self) -> list[Object]:
        """The objects of kind Event that were posted."""
        return self._ask("events")

    def put_crowd(self, number: int, network: str, first_address: str, backend: str = "vxlan") -> None:
        """Write so many nodes of a real node's size; podCIDRs are taken from the end of ``network``."""
        self._ask("put_crowd", number=number, network=network, first_address=first_address, backend=backend)

    @contextmanager
    def heartbeats(self, per_second: float) -> Iterator[None]:
        """Let the nodes' kubelets write their status in turn, so often all in all."""
        self._ask("start_heartbeats", per_second=per_second)
        try:
            yield
        finally:
            self._ask("stop_heartbeats")

    # ---- versions ----

    def compact(self) -> int:
        """Make every version of before too old: for new watches and for further pages."""
        return self._ask("compact")

    def jump(self, versions: int = 1000) -> int:
        """Use up versions as writes of other resources do."""
        return self._ask("jump", versions=versions)

    def version(self) -> int:
        return self._ask("version")

    def set_bookmark_interval(self, seconds: float) -> None:
        """How often new watches get bookmarks, 60 s by default."""
        self._ask("set_bookmark_interval", seconds=seconds)

    def set_patience(self, seconds: float) -> None:
        """How long a list waits for a version that is yet to come, 3 s by default."""
        self._ask("set_patience", seconds=seconds)

    # ---- credentials ----

    def put_token(
        self,
        token: str,
        user: str = FLANNEL_USER,
        role: str = "flannel",
        extra: tuple[tuple[str, str], ...] = (),
        seconds: float | None = None,
    ) -> None:
        """Let in whoever shows this token: ``role`` is "flannel", "admin" or "", ``extra`` adds (verb, resource).

        With ``seconds`` it expires.
        """
        self._ask("put_token", token=token, user=user, role=role, extra=list(extra), seconds=seconds)
        if seconds is None:
            self._tokens[token] = {"user": user, "role": role, "extra": extra}

    def revoke_token(self, token: str = TOKEN) -> None:
        """An open watch lives on, as it really does."""
        self._ask("revoke_token", token=token)
        self._tokens.pop(token, None)

    # ---- what goes wrong ----

    def fault(self, fault: Fault) -> None:
        """Order a fault for requests to come; several take effect one after another."""
        self._ask("add_fault", fault=asdict(fault))

    def clear_faults(self) -> None:
        self._ask("clear_faults")

    def disturb_watches(self, fault: Fault) -> int:
        """Strike all open watches with a fault's ``line``, ``error`` or ``then``; return how many there were."""
        return self._ask("disturb_watches", fault=asdict(fault))

    def close_connections(self, *, idle_only: bool = False) -> int:
        """Close connections, all or those between two requests, and return how many."""
        return self._ask("close_connections", idle_only=idle_only)

    # ---- what was asked ----

    def requests(self, verb: str = "", resource: str = "", start: int = 0) -> list[Object]:
        """The requests since its start: verb, resource, name, namespace, path, query, user, headers, body, status, time.

        ``resource`` is "nodes", "nodes/status", "pods" or "events"; ``start`` leaves so many of all out.
        """
        return [
            request
            for request in self._ask("requests", start=start)
            if verb in ("", request["verb"]) and resource in ("", request["resource"])
        ]

    def patches(self, name: str = "") -> list[Object]:
        """The bodies of all patches of a node's status, or of all nodes'."""
        return [
            json.loads(request["body"])
            for request in self.requests("patch", "nodes/status")
            if name in ("", request["name"])
        ]

    def watches(self) -> int:
        """How many are open."""
        return self._ask("watches")

    @property
    def _path(self) -> Path:
        return self._directory / "control"

    def _connect(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the API server ended:\n{self.log()[-2000:]}"
        control = socket.socket(socket.AF_UNIX)
        control.settimeout(60)
        try:
            control.connect(str(self._path))
        except OSError:
            control.close()
            return False
        self._control = control
        self._stream = control.makefile("rwb")
        return True

    def _ask(self, call: str, **arguments: Any) -> Any:
        assert self._stream is not None, "the API server is not running"
        self._stream.write(json.dumps([call, arguments]).encode() + b"\n")
        self._stream.flush()
        answer = json.loads(self._stream.readline())
        if "error" in answer:
            raise RuntimeError(f"{call}: {answer['error']}")
        return answer["result"]
