"""A kubelet that runs the manifest's pod out of the image on a node of a lab, with a container runtime."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.image.built_image import BuiltImage
from tests.kubernetes_objects import Object, daemon, files_of, init_containers, manifest, volumes
from tests.lab import Lab, Node, wait_for
from tests.netns.cni_runtime import Runtime

MADE = manifest()
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
PATIENCE = 30.0


class Kubelet:
    """Runs the containers of the pod on one node. What the manifest mounts of the host is in ``host``."""

    def __init__(self, lab: Lab, image: BuiltImage, node: Node, **config: Any) -> None:
        """``config`` adds to the network config of the manifest or replaces parts of it."""
        self.node = node
        self.host = node.directory / "host"
        self._lab = lab
        self._image = image
        self._config = node.directory / "config"
        self._config.mkdir()
        files = files_of(MADE)
        files["net-conf.json"] |= config
        for name, content in files.items():
            (self._config / name).write_text(json.dumps(content))
        self._account = lab.kube.service_account(node.directory / "account")

    def run_init_containers(self) -> None:
        for container in init_containers(MADE).values():
            words = [*container["command"], *container["args"]]
            self.node.run(*self._image.contained(*words, mounts=self._mounts(container)))

    def start_daemon(self) -> None:
        container = daemon(MADE)
        variables = {each["name"]: self._value(each) for each in container["env"]}
        variables |= {**self._lab.kube.in_cluster(), "NOTIFY_SOCKET": "/run/flannel/notify"}
        command = self._image.contained(
            *container["command"], mounts=self._mounts(container), environment=variables
        )
        self.node.start("--subnet-file=/run/flannel/subnet.env", *container["args"], command=command)

    def start_pod(self) -> None:
        """Do what follows a start of the host or an update of the pod, until the daemon is ready."""
        self.run_init_containers()
        self.start_daemon()
        self.node.wait_ready(PATIENCE)

    def runtime(self, *shared: str) -> Runtime:
        """Return a runtime with the daemon's configuration and the plug-ins that are on the host.

        The host has nothing else but this machine's directories ``shared``: no Python, no iptables.
        """
        conf = self.host / "etc/cni/net.d/10-flannel.conflist"
        wait_for(conf.exists, PATIENCE, "the CNI configuration")
        runtime = Runtime(self.node, "/opt/cni/bin", self.host, shared)
        runtime.use(json.loads(conf.read_text()))
        return runtime

    def is_alive_and_ready(self) -> bool:
        return all(self._asks(probe) == 200 for probe in ("livenessProbe", "readinessProbe"))

    def _asks(self, probe: str) -> int:
        """The status with which the daemon answers a probe, 0 without an answer."""
        (port,) = daemon(MADE)["ports"]
        connection = HTTPConnection(self.node.address, port["containerPort"], timeout=60)
        try:
            with self.node.namespace.entered():
                connection.connect()
            connection.request("GET", daemon(MADE)[probe]["httpGet"]["path"])
            return connection.getresponse().status
        except ConnectionError:
            return 0
        finally:
            connection.close()

    def _mounts(self, container: Object) -> dict[str, Path]:
        """By their place in the container; files are left out, of which each has its own."""
        names = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        found = {place: volumes(MADE)[name] for place, name in names.items()}
        directories = {
            place: self._directory(volume)
            for place, volume in found.items()
            if volume.get("hostPath", {}).get("type") != "FileOrCreate"
        }
        return directories | {ACCOUNT: self._account}

    def _directory(self, volume: Object) -> Path:
        if "configMap" in volume:
            return self._config
        path = str(volume["hostPath"]["path"])
        if path == "/run/flannel":  # where the lab looks for subnet.env
            return self.node.directory
        directory = self.host / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _value(self, variable: Object) -> str:
        fields = {
            "spec.nodeName": self.node.name,
            "metadata.name": f"kube-flannel-ds-{self.node.name}",
            "metadata.namespace": MADE["DaemonSet"]["metadata"]["namespace"],
        }
        value = variable.get("value")
        return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else str(value)


def kubelets(lab: Lab, image: BuiltImage, nodes: int = 2, **config: Any) -> list[Kubelet]:
    """Nodes that the API server lets in with the service account of the manifest only.

    Their podCIDRs are 10.244.<number>.0/24 and, if ``config`` enables IPv6, fc00:5:0:<number>::/64.
    """
    lab.kube.stop()
    lab.kube.start(tls=True)
    return [add_kubelet(lab, image, node, node.number, **config) for node in lab.add_nodes(nodes)]


def add_kubelet(lab: Lab, image: BuiltImage, node: Node, number: int, **config: Any) -> Kubelet:
    """Make the object of a node with the podCIDR of this number, and its kubelet."""
    cidrs = [f"10.244.{number}.0/24", *([f"fc00:5:0:{number}::/64"] if config.get("EnableIPv6") else [])]
    lab.kube.add(node, *cidrs)
    return Kubelet(lab, image, node, **config)
