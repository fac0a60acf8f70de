"""Drivers of a backend from another package: each is closed, whatever way the daemon goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "lamp"}}
SOON = 20
#: A backend whose driver writes down what becomes of it, and breaks where it is told to.
PACKAGE = """
import os
from dataclasses import dataclass
from pathlib import Path

from flanneld.backends.host_gw import HostGw
from flanneld.state.resources import Kind


@dataclass(frozen=True)
class Lamp:
    kind = Kind.OUTSIDE

    @property
    def key(self):
        return (self.kind, "lamp")


class Driver:
    handles = Lamp
    reads = 0

    def __init__(self, address):
        self.address = address
        self.note("opened")

    def note(self, what):
        with Path(os.environ["LAMP_NOTES"]).open("a") as notes:
            notes.write(f"{what} {self.address}\\n")

    def read(self):
        self.reads += 1
        if str(self.reads) == os.environ.get("LAMP_BREAKS_AT"):
            raise RuntimeError("the lamp is broken")
        return ()

    def put(self, lamp):
        pass

    drop = put

    def close(self):
        self.note("closed")


class Backend(HostGw):
    def __init__(self, config, host):
        super().__init__(config, host)
        self.address = host.uplink.local(4)

    def drivers(self):
        return [Driver(self.address)]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as an installer leaves it."""
    (tmp_path / "lamp.py").write_text(PACKAGE)
    info = tmp_path / "lamp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamp\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flanneld.backends]\nlamp = lamp:Backend\n")
    return tmp_path


def start(lab: Lab, package: Path, **variables: str) -> Node:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes(1)
    environment = {"PYTHONPATH": str(package), "LAMP_NOTES": str(package / "notes"), **variables}
    node.start("--iface=eth0", environment=environment)
    return node


def notes(package: Path) -> list[str]:
    return (package / "notes").read_text().splitlines()


def test_a_stop_closes_the_driver(lab: Lab, package: Path) -> None:
    node = start(lab, package)
    node.wait_ready()
    assert node.stop().status == 0
    assert notes(package) == [f"opened {node.address}", f"closed {node.address}"]


@pytest.mark.parametrize("reading", [pytest.param(1, id="start"), pytest.param(2, id="thread")])
def test_a_failure_closes_the_driver(lab: Lab, package: Path, reading: int) -> None:
    node = start(lab, package, LAMP_BREAKS_AT=str(reading))
    assert node.daemon.wait(SOON).status == 1
    assert "the lamp is broken" in node.log()
    assert notes(package) == [f"opened {node.address}", f"closed {node.address}"]


def test_a_move_of_the_uplink_closes_the_driver_before_the_next_is_opened(lab: Lab, package: Path) -> None:
    node = start(lab, package)
    node.wait_ready()
    moved = f"198.{node.link_number}.0.77"
    node.namespace.ip(f"address del {node.address}/24 dev eth0", f"address add {moved}/24 dev eth0")
    wait_for(lambda: f"opened {moved}" in notes(package), SOON, "the driver of the new backend")
    assert node.stop().status == 0
    assert notes(package) == [
        f"opened {node.address}",
        f"closed {node.address}",
        f"opened {moved}",
        f"closed {moved}",
    ]
