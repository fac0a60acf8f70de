"""Further endpoints in front of one etcd, that can die or hang."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import PORT


@contextmanager
def gateway(lab: Lab, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another endpoint, that passes everything on to etcd."""
    listen = f"{lab.etcd.address}:{port}"
    with (lab.directory / f"gateway-{port}.log").open("wb") as log:
        process = lab.switch.start(
            "etcd", "gateway", "start", f"--listen-addr={listen}", f"--endpoints={lab.etcd.address}:{PORT}",
            output=log,
        )  # fmt: skip
    try:
        wait_for(lambda: lab.switch.run("ss", "-Htln", "sport", "=", str(port)).stdout, what="the gateway")
        yield process
    finally:
        process.kill()
        process.wait()


def used_ports(node: Node) -> set[int]:
    """The ports to which the daemon has a connection."""
    peers = (line.split()[-1] for line in node.run("ss", "-Htn", "state", "established").stdout.splitlines())
    return {int(peer.rpartition(":")[2]) for peer in peers}
