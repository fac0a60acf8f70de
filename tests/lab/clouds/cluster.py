"""Nodes of a lab in a cloud: the switch's namespace is the VPC's router and holds the cloud's services."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.lab.clouds.kinds import METADATA
from tests.lab.daemon import ROOT
from tests.lab.kube_api.calls import remote
from tests.lab.lab import ADDRESS, NETWORK, Lab
from tests.lab.node import Node
from tests.lab.wait import wait_for

_URL = f"http://{ADDRESS}:8080"


class CloudLab:
    """A cloud in the lab's switch. ``ask`` calls a method of it."""

    def __init__(self, lab: Lab, kind: str) -> None:
        self.lab = lab
        self.kind = kind
        self._socket = lab.directory / "cloud"
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, name: str, *values: Any) -> Any:
        return getattr(remote(self._socket), name)(*values)

    def routes(self) -> dict[str, str]:
        found: dict[str, str] = self.ask("routes")
        return found

    def start(self) -> None:
        switch, metadata = self.lab.switch, METADATA[self.kind]
        switch.ip(f"address add {metadata}/32 dev lo")
        switch.sysctl("net/ipv4/ip_forward", 1)
        # Nodes must not learn a way around the router.
        switch.sysctl("net/ipv4/conf/all/send_redirects", 0)
        switch.sysctl("net/ipv4/conf/br0/send_redirects", 0)
        log = self.lab.directory / "cloud.log"
        with log.open("ab") as output:
            self._process = switch.start(
                *(sys.executable, "-m", "tests.lab.clouds", self.kind),
                *(f"--address={ADDRESS}", f"--control={self._socket}"),
                output=output,
                environment={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )

        def listens() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the cloud ended:\n{log.read_text()[-2000:]}"
            return self._socket.exists()

        wait_for(listens, 60, "the cloud to listen")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)

    def nodes(self, number: int = 2) -> list[Node]:
        """Add nodes as instances of the cloud; their daemons are yet to be started."""
        options = {"Type": self.kind, "Endpoint": _URL}
        if self.kind == "ali-vpc":
            options["InstanceEndpoint"] = _URL
        if self.kind == "tencent-vpc":
            # Only the cloud's own name servers know the name of the service.
            options["MetadataEndpoint"] = f"http://{METADATA[self.kind]}/latest/meta-data"
        self.lab.etcd.put_config({"Network": NETWORK, "Backend": options})
        added = self.lab.add_nodes(number)
        for node in added:
            self.ask("add_node", node.address)
        return added

    def run(self, node: Node, *flags: str) -> None:
        """Start a node's daemon, and wait until it is ready."""
        self.launch(node, *flags)
        node.wait_ready(60)

    def launch(self, node: Node, *flags: str) -> None:
        node.start(*flags, environment=self.environment())

    def environment(self) -> dict[str, str]:
        """Return what a daemon needs to find its credentials: from the instance's role where it can."""
        if self.kind == "gce":
            return {"GCE_METADATA_HOST": METADATA[self.kind], "GCE_METADATA_IP": METADATA[self.kind]}
        if self.kind == "tencent-vpc":
            key, secret = self.ask("key")
            return {"ACCESS_KEY_ID": key, "ACCESS_KEY_SECRET": secret}
        return {}


@contextmanager
def cloud_lab(lab: Lab, kind: str) -> Iterator[CloudLab]:
    made = CloudLab(lab, kind)
    try:
        made.start()
        yield made
    finally:
        made.stop()
