"""The kustomizations: one with the selector of upstream's releases, one for minikube, one for k3s."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld import config
from tests.kubernetes_objects import K3S_CNI_CONF, Object, files_of, kustomize, manifest, pod

#: Upstream releases what kustomize makes of its manifest, and that puts the latter label everywhere.
LABELS = {"app": "flannel", "k8s-app": "flannel"}


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, Object]:
    return kustomize("dist/kubernetes", tmp_path)


@pytest.fixture
def for_minikube(tmp_path: Path) -> dict[str, Object]:
    return kustomize("dist/minikube", tmp_path)


@pytest.fixture
def for_k3s(tmp_path: Path) -> dict[str, Object]:
    return kustomize("dist/k3s", tmp_path)


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


def test_k3s_keeps_its_cluster_cidr_and_the_cni_configuration_of_its_own_flannel(
    for_k3s: dict[str, Object],
) -> None:
    found = config.parse(for_k3s["ConfigMap"]["data"]["net-conf.json"])
    assert [str(each.network) for each in found.ranges] == ["10.42.0.0/16"]
    assert found.backend_type == "vxlan"
    assert files_of(for_k3s)["cni-conf.json"] == K3S_CNI_CONF


def test_a_node_that_runs_the_flannel_of_k3s_gets_no_pod(for_k3s: dict[str, Object]) -> None:
    affinity = pod(for_k3s)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["nodeSelectorTerms"]
    assert {"key": "k3s-flannel", "operator": "DoesNotExist"} in term["matchExpressions"]


def test_k3s_gets_the_other_objects_as_they_are(
    objects: dict[str, Object], for_k3s: dict[str, Object]
) -> None:
    for each in (objects, for_k3s):
        del each["ConfigMap"]["data"]
    del pod(for_k3s)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ][0]["matchExpressions"][1]
    assert for_k3s == objects
