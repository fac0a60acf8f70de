"""The objects for Kubernetes, from the manifest and as Helm makes them from the chart, and parts of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

from flanneld import __version__

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "dist/kubernetes/kube-flannel.yml"
CHART = ROOT / "dist/chart/kube-flannel"
#: An image's tag may not have a plus.
IMAGE = f"localhost/flanneld:{__version__.replace('+', '-')}"

Object = dict[str, Any]
Objects = Mapping[str, Object]

#: What k3s v1.35 writes for its own flannel, from pkg/agent/flannel/setup_linux.go of its sources.
K3S_CNI_CONF: Object = {
    "name": "cbr0",
    "cniVersion": "1.0.0",
    "plugins": [
        {
            "type": "flannel",
            "delegate": {"hairpinMode": True, "forceAddress": True, "isDefaultGateway": True},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
        {"type": "bandwidth", "capabilities": {"bandwidth": True}},
    ],
}


def read(text: str) -> dict[str, Object]:
    """The objects of a YAML text by kind; there is one of each."""
    found = [each for each in yaml.safe_load_all(text) if each]
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def manifest() -> dict[str, Object]:
    return read(MANIFEST.read_text())


def kustomize(folder: str, home: Path) -> dict[str, Object]:
    """What kubectl makes of a kustomization, by kind. ``home`` is an empty directory."""
    done = subprocess.run(
        ["kubectl", "kustomize", ROOT / folder],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def render(values: Object, namespace: str = "kube-flannel") -> dict[str, Object]:
    """What Helm makes of the chart."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="flannel", namespace=namespace)
    return read("\n---\n".join(files.values()))


def files_of(objects: Objects) -> Object:
    """The files of the ConfigMap, read."""
    return {name: json.loads(text) for name, text in objects["ConfigMap"]["data"].items()}


def pod(objects: Objects) -> Object:
    spec: Object = objects["DaemonSet"]["spec"]["template"]["spec"]
    return spec


def daemon(objects: Objects) -> Object:
    """The container that runs flanneld."""
    container: Object = pod(objects)["containers"][0]
    return container


def arguments(objects: Objects) -> list[str]:
    """flanneld's arguments. The chart has some in the command, where upstream's tests look for them."""
    found = daemon(objects)
    return [*found["command"][1:], *found["args"]]


def init_containers(objects: Objects) -> dict[str, Object]:
    return {each["name"]: each for each in pod(objects)["initContainers"]}


def volumes(objects: Objects) -> dict[str, Object]:
    return {each["name"]: each for each in pod(objects)["volumes"]}
