"""The lab's Kubernetes API server as a process on the switch, reached from the nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Kube, Lab, Node
from tests.lab.credentials import as_pod
from tests.lab.kube import TOKEN
from tests.lab.kube_api.faults import Fault

#: What a client on a node does: one request, with a service account if there is one.
CLIENT = """
import json, os, pathlib, ssl, sys, urllib.error, urllib.request
account = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
request = urllib.request.Request(sys.argv[1])
context = None
if account.exists():
    request.add_header("Authorization", "Bearer " + (account / "token").read_text())
    if (account / "ca.crt").exists():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(account / "ca.crt")
try:
    with urllib.request.urlopen(request, timeout=float(sys.argv[2]), context=context) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as answer:
    print(json.dumps([answer.code, json.load(answer)]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def get(node: Node, url: str, account: Path | None = None, patience: float = 10) -> tuple[int, Any]:
    """Status and body of an answer; status 0 when none came."""
    command = ["python3", "-c", CLIENT, url, str(patience)]
    done = node.run(*(as_pod(account, command) if account else command))
    status, body = json.loads(done.stdout)
    return status, body


@pytest.fixture
def kube(lab: Lab) -> Kube:
    (node,) = lab.add_nodes(1)
    lab.kube.add(node)
    return lab.kube


def test_nodes_reach_it_over_the_switch(lab: Lab, kube: Kube) -> None:
    status, node = get(lab.nodes[0], f"{kube.url}/api/v1/nodes/n1")
    assert (status, node["spec"]["podCIDRs"]) == (200, ["10.5.1.0/24"])
    assert [request["path"] for request in kube.control.requests()] == ["/api/v1/nodes/n1"]
    kube.control.add_fault(Fault("get", status=503))
    assert get(lab.nodes[0], f"{kube.url}/api/v1/nodes/n1")[0] == 503


def test_killed_lab_server_restarts_with_or_without_objects(lab: Lab, kube: Kube) -> None:
    version = kube.control.version()
    kube.kill()
    assert get(lab.nodes[0], f"{kube.url}/api/v1/nodes/n1")[0] == 0
    kube.start(f"--version={version + 1000}")
    assert kube.control.names() == ["n1"]
    assert kube.control.version() == version + 1000
    kube.kill()
    kube.forget()
    kube.start()
    assert kube.control.names() == []
    assert kube.control.version() < version + 1000


def test_lab_server_can_hang(lab: Lab, kube: Kube) -> None:
    with kube.frozen():
        assert get(lab.nodes[0], f"{kube.url}/api/v1/nodes/n1", patience=0.3)[0] == 0
    assert get(lab.nodes[0], f"{kube.url}/api/v1/nodes/n1")[0] == 200


def test_a_pod_comes_in_with_its_service_account_only(lab: Lab, kube: Kube) -> None:
    kube.stop()
    kube.start(tls=True)
    (node,) = lab.nodes
    account = kube.service_account(lab.directory / "account")
    assert get(node, f"{kube.url}/api/v1/nodes/n1", account)[0] == 200
    assert "CERTIFICATE_VERIFY_FAILED" in get(node, f"{kube.url}/api/v1/nodes/n1")[1]
    kube.control.revoke_token(TOKEN)
    assert get(node, f"{kube.url}/api/v1/nodes/n1", account)[0] == 401
    kube.restart()
    assert get(node, f"{kube.url}/api/v1/nodes/n1", account)[0] == 401
    kube.control.put_token("another")
    kube.service_account(account, "another")
    assert get(node, f"{kube.url}/api/v1/nodes/n1", account)[0] == 200
