"""What the tests of the Kubernetes mode share: one daemon at a time, what it asks, and what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.lab import Lab, Node
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.lab import NETWORK

HEALTH_PORT = 8472
#: A change in the API takes some milliseconds to arrive; this leaves a busy machine room.
SOON = 10.0


def write_net_conf(lab: Lab, backend: Mapping[str, Any], **config: Any) -> Path:
    path = lab.directory / "net-conf.json"
    path.write_text(json.dumps({"Network": NETWORK, "Backend": dict(backend), **config}))
    return path


def start(
    lab: Lab,
    node: Node,
    *flags: str,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a daemon that keeps its lease in the lab's Kubernetes, and do not wait for it."""
    own = [*lab.kube.flags(), f"--net-config-path={lab.directory / 'net-conf.json'}"]
    node.start(*own, *flags, command=command, environment=dict(environment or {"NODE_NAME": node.name}))


def notes(lab: Lab, node: Node) -> dict[str, str]:
    """What a node announces."""
    found = lab.kube.control.annotations(node.name).items()
    return {name.removeprefix(PREFIX): text for name, text in found if name.startswith(PREFIX)}


def readiness(node: Node) -> tuple[int, str]:
    """Status and body of /readyz, 0 while nobody listens."""
    connection = HTTPConnection("127.0.0.1", HEALTH_PORT, timeout=60)
    try:
        with node.namespace.entered():
            connection.connect()
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, response.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        connection.close()


def overlay_routes(node: Node, family: int = 4) -> set[str]:
    """The subnets of the peers to which the node knows a way."""
    subnets = ("10.5.", "fc00:5:")
    return {
        route["dst"]
        for route in node.routes(family=family)
        if route["dst"].startswith(subnets) and route["dev"] != "cni0" and "/" in route["dst"]
    }


def complaints(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if not line.startswith("I")]
