"""The kustomizations: one with the selector of upstream's releases, one for minikube."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flanneld import config
from tests.kubernetes_objects import MANIFEST, ROOT, Object, files_of, manifest, pod, read

#: Upstream releases what kustomize makes of its manifest, and that puts the latter label everywhere.
LABELS = {"app": "flannel", "k8s-app": "flannel"}


def build(kustomization: Path, home: Path) -> dict[str, Object]:
    """What kubectl makes of it, by kind."""
    done = subprocess.run(
        ["kubectl", "kustomize", kustomization],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, Object]:
    return build(MANIFEST.parent, tmp_path)


@pytest.fixture
def for_minikube(tmp_path: Path) -> dict[str, Object]:
    return build(ROOT / "dist/minikube", tmp_path)


def test_the_selector_is_that_of_upstreams_releases_since_it_cannot_be_changed(
    objects: dict[str, Object],
) -> None:
    spec = objects["DaemonSet"]["spec"]
    assert spec["selector"] == {"matchLabels": LABELS}
    assert spec["template"]["metadata"]["labels"] == {**LABELS, "tier": "node"}


def test_all_else_is_the_manifest(objects: dict[str, Object]) -> None:
    expected = manifest()
    for each in (objects["DaemonSet"]["spec"], expected["DaemonSet"]["spec"]):
        del each["selector"], each["template"]["metadata"]["labels"]
    assert objects == expected


def test_minikube_uses_host_gw_and_pulls_no_image(for_minikube: dict[str, Object]) -> None:
    found = config.parse(for_minikube["ConfigMap"]["data"]["net-conf.json"])
    assert found.backend_type == "host-gw"
    containers = [*pod(for_minikube)["initContainers"], *pod(for_minikube)["containers"]]
    assert {each["imagePullPolicy"] for each in containers} == {"Never"}


def test_minikube_gets_the_other_objects_as_they_are(
    objects: dict[str, Object], for_minikube: dict[str, Object]
) -> None:
    for each in [*pod(for_minikube)["initContainers"], *pod(for_minikube)["containers"]]:
        del each["imagePullPolicy"]
    assert files_of(for_minikube)["cni-conf.json"] == files_of(objects)["cni-conf.json"]
    del objects["ConfigMap"], for_minikube["ConfigMap"]
    assert for_minikube == objects
