"""The manifest's pod, as kubelet runs it out of the image on two nodes, and pods in the network it makes."""

from __future__ import annotations

import json
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.image.built_image import BuiltImage
from tests.kubernetes_objects import Object, daemon, init_containers, manifest, volumes
from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT
from tests.netns.cni_runtime import Runtime

pytestmark = pytest.mark.long

MADE = manifest()
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
PATIENCE = 30.0


class Kubelet:
    """Runs the containers of the pod on one node. What the manifest mounts of the host is in ``host``."""

    def __init__(self, lab: Lab, image: BuiltImage, node: Node) -> None:
        self.node = node
        self.host = node.directory / "host"
        self._lab = lab
        self._image = image
        self._config = node.directory / "config"
        self._config.mkdir()
        for name, text in MADE["ConfigMap"]["data"].items():
            (self._config / name).write_text(text)
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


def kubelets(lab: Lab, image: BuiltImage) -> list[Kubelet]:
    """Two nodes that the API server lets in with the service account of the manifest only."""
    lab.kube.stop()
    lab.kube.start(tls=True)
    found = []
    for node in lab.add_nodes(2):
        lab.kube.add(node, f"10.244.{node.number}.0/24")
        found.append(Kubelet(lab, image, node))
    return found


def test_the_pod_makes_a_network_for_pods(lab: Lab, image: BuiltImage) -> None:
    pair = kubelets(lab, image)
    for kubelet in pair:
        kubelet.run_init_containers()
        kubelet.start_daemon()
    pods = []
    for kubelet in pair:
        kubelet.node.wait_ready(PATIENCE)
        conf = kubelet.host / "etc/cni/net.d/10-flannel.conflist"
        wait_for(conf.exists, PATIENCE, "the CNI configuration")
        conflist = json.loads(conf.read_text())
        assert [each["type"] for each in conflist["plugins"]] == ["bridge", "portmap"]
        runtime = Runtime(kubelet.node, programs=str(kubelet.host / "opt/cni/bin"))
        runtime.use(conflist)
        pods.append(runtime.add(1))
    pods[0].wait_for_reply(pods[1], PATIENCE)
    assert [pod.address.rpartition(".")[0] for pod in pods] == ["10.244.1", "10.244.2"]
    for kubelet in pair:
        wait_for(kubelet.is_alive_and_ready, PATIENCE, "an answer to both probes")
        condition = partial(lab.kube.control.condition, kubelet.node.name)
        wait_for(condition, PATIENCE, "the condition NetworkUnavailable")
        wait_for((kubelet.host / "var/lib/flannel/kube-nodes.json").exists, PATIENCE, "the saved nodes")
        assert [line for line in kubelet.node.log().splitlines() if line[0] in "EF"] == []


def test_the_plug_in_that_an_init_container_installs_is_ours_and_can_be_run(
    lab: Lab, image: BuiltImage
) -> None:
    kubelet = kubelets(lab, image)[0]
    for _ in range(2):  # as after each restart of the pod
        kubelet.run_init_containers()
        plugin = kubelet.host / "opt/cni/bin/flannel"
        assert plugin.read_bytes() == (ROOT / "dist/cni/flannel").read_bytes()
        assert plugin.stat().st_mode & 0o777 == 0o755
        assert {"bridge", "host-local", "loopback", "portmap"} <= {
            path.name for path in plugin.parent.iterdir()
        }
