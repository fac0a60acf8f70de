"""Tables of a backend from another package: they are closed at the daemon's end, and never end it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.test_networks import BLUE, PREFIX, directory, put, subnet

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "lamp"}}
SOON = 20
#: A backend whose table writes down what becomes of it, and breaks where it is told to.
PACKAGE = """
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from msgspec.structs import replace

from flanneld.backends.contract import ExitPolicy
from flanneld.backends.host_gw import HostGw
from flanneld.state.table import Report
from flanneld.state.resources import Kind
from flanneld.state.table import Seen


@dataclass(frozen=True)
class Lamp:
    address: str
    kind = Kind.REMOTE

    @property
    def key(self):
        return ("lamps", "lamp")


class Table:
    name = "lamps"
    what = "the lamps"
    worker = os.environ.get("LAMP_WORKER", "lamps")
    vital = "LAMP_IS_VITAL" in os.environ
    needs = frozenset()
    audit = 0.5
    reads = 0
    lit = None

    def __init__(self, address):
        self.address = address
        self.note("opened")

    def note(self, what):
        with Path(os.environ["LAMP_NOTES"]).open("a") as notes:
            notes.write(f"{what} {self.address}\\n")

    def read(self, scope):
        self.reads += 1
        if str(self.reads) == os.environ.get("LAMP_BREAKS_AT"):
            raise RuntimeError("the lamp is broken")
        if str(self.reads) == os.environ.get("LAMP_HANGS_AT"):
            self.note("hangs")
            Event().wait()
        return () if self.lit is None else (Seen(self.lit),)

    def put(self, puts):
        self.lit = puts[0].want
        self.address = self.lit.address
        self.note("lit")
        return Report(made=[self.lit])

    def drop(self, found):
        return Report(removed=list(found))

    def close(self, *, remove):
        self.note("removed" if remove else "closed")


class Backend(HostGw):
    exit_policy = ExitPolicy(os.environ.get("LAMP_EXIT", "keep"))

    def __init__(self, config, host):
        super().__init__(config, host)
        self.host = host
        self.address = host.uplink.local(4)

    def identity(self):
        key = self.host.secret("lamp.key", lambda: os.urandom(8).hex().encode(), variable="LAMP_KEY_FILE")
        return self.host.run('echo "$COLOUR $(cat)"', {"COLOUR": "red"}, key.decode()).output.strip()

    def attributes(self):
        return replace(super().attributes(), backend_data={"Lamp": self.host.identity})

    def is_self(self, attrs):
        return attrs.backend_data == {"Lamp": self.host.identity}

    def local(self, own):
        yield from super().local(own)
        yield Lamp(str(self.address))

    def tables(self):
        return [Table(self.address)]
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
    launch(node, package, **variables)
    return node


def launch(node: Node, package: Path, *flags: str, **variables: str) -> None:
    environment = {"PYTHONPATH": str(package), "LAMP_NOTES": str(package / "notes")}
    environment |= {"LAMP_KEY_FILE": str(package / "keys" / "lamp.key"), **variables}
    node.start("--iface=eth0", *flags, environment=environment)


def notes(package: Path) -> list[str]:
    return (package / "notes").read_text().splitlines()


def awaited(package: Path, line: str) -> None:
    wait_for(lambda: line in notes(package), SOON, f"the table to note: {line}")


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
def test_a_stop_closes_the_table(lab: Lab, package: Path, worker: str) -> None:
    node = start(lab, package, LAMP_WORKER=worker)
    node.wait_ready()
    awaited(package, f"lit {node.address}")
    assert node.stop().status == 0
    assert notes(package) == [f"{deed} {node.address}" for deed in ("opened", "lit", "closed")]


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
def test_table_of_a_thread_that_does_not_stop_in_time_stays_open(
    lab: Lab, package: Path, worker: str
) -> None:
    node = start(lab, package, LAMP_WORKER=worker, LAMP_HANGS_AT="3")
    node.wait_ready()
    awaited(package, f"hangs {node.address}")
    assert node.stop().status == 0
    assert f"{'reconciler' if worker == 'kernel' else worker} did not stop in time" in node.log()
    assert notes(package) == [f"{deed} {node.address}" for deed in ("opened", "lit", "hangs")]


def test_table_that_hangs_in_one_network_holds_back_no_other(package: Path) -> None:
    with Lab(api="v3") as lab:
        put(lab, "dim", CONFIG)
        put(lab, "blue", BLUE)
        (node,) = lab.add_nodes(1)
        flags = (f"--subnet-dir={directory(node)}", "--networks=dim,blue")
        launch(node, package, *flags, LAMP_HANGS_AT="3")
        for name in ("dim", "blue"):
            subnet(node, name)
        awaited(package, f"hangs {node.address}")
        lease = {"PublicIP": "198.18.0.9", "BackendType": "host-gw"}
        lab.etcd.set(f"{PREFIX}/blue/subnets/10.6.9.0-24", json.dumps(lease))
        node.wait_for_route("10.6.9.0/24")


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
@pytest.mark.parametrize("reading", [pytest.param(1, id="start"), pytest.param(3, id="thread")])
def test_a_table_that_breaks_does_not_end_the_daemon(
    lab: Lab, package: Path, reading: int, worker: str
) -> None:
    node = start(lab, package, LAMP_BREAKS_AT=str(reading), LAMP_WORKER=worker)
    node.wait_ready()
    node.wait_for_log("The lamps are not in place: the lamp is broken")
    node.wait_for_log("The lamps are in place")
    awaited(package, f"lit {node.address}")
    assert node.stop().status == 0
    assert notes(package)[-1] == f"closed {node.address}"


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
def test_the_daemon_is_ready_only_with_what_is_vital(lab: Lab, package: Path, worker: str) -> None:
    node = start(lab, package, LAMP_BREAKS_AT="1", LAMP_IS_VITAL="1", LAMP_WORKER=worker)
    node.wait_ready()
    assert "the lamp is broken" in node.log()
    assert notes(package) == [f"opened {node.address}", f"lit {node.address}"]


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
def test_a_move_of_the_uplink_changes_the_desired_state_of_the_same_table(
    lab: Lab, package: Path, worker: str
) -> None:
    node = start(lab, package, LAMP_WORKER=worker)
    node.wait_ready()
    moved = f"198.{node.link_number}.0.77"
    node.namespace.ip(f"address del {node.address}/24 dev eth0", f"address add {moved}/24 dev eth0")
    awaited(package, f"lit {moved}")
    assert node.stop().status == 0
    assert notes(package) == [
        f"opened {node.address}",
        f"lit {node.address}",
        f"lit {moved}",
        f"closed {moved}",
    ]


@pytest.mark.parametrize("worker", ["kernel", "lamps"])
def test_a_backend_declares_that_its_resources_go_with_the_daemon(
    lab: Lab, package: Path, worker: str
) -> None:
    node = start(lab, package, LAMP_WORKER=worker, LAMP_EXIT="remove")
    node.wait_ready()
    awaited(package, f"lit {node.address}")
    assert node.stop().status == 0
    assert notes(package)[-1] == f"removed {node.address}"


def lamp_of(lab: Lab, node: Node) -> tuple[str, str]:
    """The public IP and the identity in the node's lease."""
    value = lab.etcd.leases()[node.subnet()]
    return value["PublicIP"], value["BackendData"]["Lamp"]


def test_an_identity_out_of_a_key_and_a_command_is_kept_over_moves_and_restarts(
    lab: Lab, package: Path
) -> None:
    key = package / "keys" / "lamp.key"
    node = start(lab, package)
    node.wait_ready()
    subnet, lamp = node.subnet(), f"red {key.read_text()}"
    assert lamp_of(lab, node) == (str(node.address), lamp)
    assert stat.S_IMODE(key.stat().st_mode) == 0o400
    moved = f"198.{node.link_number}.0.77"
    node.namespace.ip(f"address del {node.address}/24 dev eth0", f"address add {moved}/24 dev eth0")
    wait_for(lambda: lamp_of(lab, node) == (moved, lamp), SOON, "the lease to follow")
    assert node.stop().status == 0
    node.namespace.ip(f"address del {moved}/24 dev eth0", f"address add {node.address}/24 dev eth0")
    for file in node.directory.glob("subnet.*"):
        file.unlink()
    launch(node, package)
    node.wait_ready()
    assert node.subnet() == subnet, "the key tells whose the lease is, under any public IP"
    assert lamp_of(lab, node) == (str(node.address), lamp)
