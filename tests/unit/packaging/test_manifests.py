"""The manifest for Kubernetes: its schemas, kubectl, upstream's names, and flanneld's own side of it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest

from flanneld import config, options
from flanneld.network.query import DEFAULT_PORT
from flanneld.subnet.kube.own_node import _EVENTS
from tests.kubernetes_objects import (
    IMAGE,
    MANIFEST,
    ROOT,
    Object,
    daemon,
    init_containers,
    manifest,
    pod,
    volumes,
)

MADE = manifest()

# ---- Kubernetes' schemas ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_kubernetes_knows_every_field(version: str) -> None:
    for each in MADE.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_check_above_finds_a_field_that_kubernetes_does_not_know() -> None:
    wrong = copy.deepcopy(MADE["DaemonSet"])
    wrong["spec"]["template"]["spec"]["hostNetworks"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


class Discovery(BaseHTTPRequestHandler):
    """An API server that says which kinds there are, and has no objects yet."""

    KINDS: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "v1": {"namespaces": "Namespace", "serviceaccounts": "ServiceAccount", "configmaps": "ConfigMap"},
        "apps/v1": {"daemonsets": "DaemonSet"},
        "rbac.authorization.k8s.io/v1": {
            "clusterroles": "ClusterRole",
            "clusterrolebindings": "ClusterRoleBinding",
            "roles": "Role",
            "rolebindings": "RoleBinding",
        },
    }
    CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = {"/api": {"kind": "APIVersions", "versions": ["v1"]}, "/apis": self._groups()}
        for version, kinds in self.KINDS.items():
            answers[f"/{'api' if version == 'v1' else 'apis'}/{version}"] = self._resources(version, kinds)
        missing = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
        }
        body = json.dumps(answers.get(path, missing)).encode()
        self.send_response(200 if path in answers else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _groups(self) -> Object:
        versions = [{"groupVersion": name, "version": "v1"} for name in self.KINDS if "/" in name]
        groups = [
            {"name": each["groupVersion"].split("/")[0], "versions": [each], "preferredVersion": each}
            for each in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _resources(self, version: str, kinds: Mapping[str, str]) -> Object:
        resources = [
            {
                "name": name,
                "kind": kind,
                "namespaced": kind not in self.CLUSTER_WIDE,
                "verbs": ["get", "create"],
            }
            for name, kind in kinds.items()
        ]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def api_server() -> Iterator[str]:
    """The URL of a ``Discovery``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Discovery) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_kubectl_would_create_every_object_of_the_manifest(api_server: str, tmp_path: Path) -> None:
    command = ("kubectl", "--kubeconfig", "", "--server", api_server)
    done = subprocess.run(
        [*command, "apply", "--dry-run=client", "--validate=false", "-f", MANIFEST],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count("created (dry run)")) == (0, len(MADE)), done.stderr


# ---- upstream's names ---------------------------------------------------------------------------


def test_the_objects_have_upstreams_names_so_that_they_take_its_objects_place() -> None:
    names = {
        kind: (each["metadata"]["name"], each["metadata"].get("namespace")) for kind, each in MADE.items()
    }
    assert names == {
        "Namespace": ("kube-flannel", None),
        "ServiceAccount": ("flannel", "kube-flannel"),
        "ClusterRole": ("flannel", None),
        "ClusterRoleBinding": ("flannel", None),
        "Role": ("flannel-events", "default"),
        "RoleBinding": ("flannel-events", "default"),
        "ConfigMap": ("kube-flannel-cfg", "kube-flannel"),
        "DaemonSet": ("kube-flannel-ds", "kube-flannel"),
    }


def test_the_selector_is_upstreams_since_it_cannot_be_changed() -> None:
    assert MADE["DaemonSet"]["spec"]["selector"] == {"matchLabels": {"app": "flannel"}}
    assert MADE["DaemonSet"]["spec"]["template"]["metadata"]["labels"] == {"app": "flannel", "tier": "node"}


def test_events_may_be_created_where_those_of_nodes_are() -> None:
    assert MADE["Role"]["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    assert MADE["RoleBinding"]["subjects"] == MADE["ClusterRoleBinding"]["subjects"]
    assert MADE["RoleBinding"]["roleRef"]["name"] == MADE["Role"]["metadata"]["name"]
    assert MADE["Role"]["metadata"]["namespace"] == _EVENTS.split("/")[4]


def test_other_rights_are_upstreams() -> None:
    rights = {
        (resource, verb)
        for rule in MADE["ClusterRole"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert rights == {
        ("pods", "get"),
        *{("nodes", verb) for verb in ("get", "list", "watch")},
        ("nodes/status", "patch"),
    }


def test_the_daemon_is_in_the_hosts_network_with_two_capabilities() -> None:
    assert pod(MADE)["hostNetwork"] is True
    assert daemon(MADE)["securityContext"] == {
        "privileged": False,
        "capabilities": {"add": ["NET_ADMIN", "NET_RAW"]},
    }
    assert MADE["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_daemon_goes_to_every_node_also_to_those_that_are_not_ready() -> None:
    assert pod(MADE)["priorityClassName"] == "system-node-critical"
    assert {each["effect"]: each["operator"] for each in pod(MADE)["tolerations"]} == {
        "NoExecute": "Exists",
        "NoSchedule": "Exists",
    }


def test_every_place_in_a_container_is_one_of_the_pods_volumes() -> None:
    containers = [*pod(MADE)["initContainers"], *pod(MADE)["containers"]]
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == set(volumes(MADE))


# ---- flanneld's own side ------------------------------------------------------------------------


def test_the_network_config_is_one_that_flanneld_understands() -> None:
    found = config.parse(MADE["ConfigMap"]["data"]["net-conf.json"])
    assert (str(found.ranges[0].network), found.backend_type, found.warnings) == (
        "10.244.0.0/16",
        "vxlan",
        (),
    )


def test_the_arguments_are_flags_of_flanneld() -> None:
    flags = {each.partition("=")[0].removeprefix("--") for each in daemon(MADE)["args"]}
    assert flags <= {flag.name for flag in options.FLAGS}


def test_nodes_answer_each_others_flannelctl() -> None:
    assert f"--answer-port={DEFAULT_PORT}" in daemon(MADE)["args"]


def test_no_variable_is_set_that_has_no_effect() -> None:
    assert {each["name"] for each in daemon(MADE)["env"]}.isdisjoint(options.WITHOUT_EFFECT)


def test_the_probes_ask_the_health_server() -> None:
    (port,) = daemon(MADE)["ports"]
    assert f"--healthz-port={port['containerPort']}" in daemon(MADE)["args"]
    asked = {name: daemon(MADE)[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")}
    assert asked == {
        "liveness": {"path": "/healthz", "port": port["name"]},
        "readiness": {"path": "/readyz", "port": port["name"]},
    }


def test_the_image_is_this_version() -> None:
    containers = [*init_containers(MADE).values(), daemon(MADE)]
    assert {each["image"] for each in containers} == {IMAGE}
    for told in ("Dockerfile", "docs/kubernetes.md"):
        assert f"docker build -t {IMAGE} .\n" in (ROOT / told).read_text()
