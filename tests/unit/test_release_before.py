"""Upgrade and downgrade by one version: the files that outlive the daemon are read by the other version.

``golden/release-before`` has files as the version before wrote them. Its code, from the history, reads those
of today.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.model import LeaseAttrs
from flanneld.reconcile.last_run import Device, FileStamp, Machine, RunRecord, StateFile, StoreAddress
from flanneld.subnet.embedded.store import LOCAL, open_file, store_of
from flanneld.subnet.embedded.tokens import Tokens
from flanneld.subnet.kube.node_table import NodeCache, Saved
from flanneld.subnet.kube.nodes import KubeNode

#: Last commit before the files got addresses of the store, the order of leases, and their owners, and later
#: the attributes of before and the path's MTU.
BEFORE = "c8706ccbdb21642dadcf317d1c9f7708caf1b189"
ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "golden" / "release-before"

ATTRS = LeaseAttrs(IPv4Address("192.0.2.11"), None, "vxlan", {"VNI": 1, "VtepMAC": "5e:9e:99:14:a0:5c"})
SUBNET, RESERVED = IPv4Network("10.5.40.0/24"), IPv4Network("10.5.9.0/24")
RECORD = RunRecord(
    boot_id="b6c0d773-d689-4bc9-9153-a38bd10130ec",
    machine=Machine("02:18:00:00:00:01", "4c4c4544-0042-3510-8051-b7c04f4d3232"),
    store="etcd v3 at http://192.0.2.10:2379 under /coreos.com/network",
    subnets=(SUBNET, None),
    attributes=ATTRS,
    devices=(Device(5, "vxlan", "5e:9e:99:14:a0:5c", "flannel.1"),),
    subnet_file=FileStamp(4711, 1_700_000_000_123_456_789),
    adopted=frozenset({RESERVED}),
)
LEASE_KEY = "/coreos.com/network/subnets/10.5.40.0-24"

#: Reads all three files, then uses the store as a node and adds a lease, with the code of the version before.
READER = """
import json, sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from flanneld.model import LeaseAttrs
from flanneld.reconcile.past.state_file import StateFile
from flanneld.subnet.embedded.opening import manager_of, open_store
from flanneld.subnet.embedded.tokens import Tokens
from flanneld.subnet.kube.node_cache import NodeCache

folder = Path(sys.argv[1])
state = StateFile(folder / "flanneld.state").load()
nodes = NodeCache(str(folder), "n1").load()
store = open_store(str(folder / "leases.db"))
manager = manager_of(store)
config = manager.network_config()
leases, _ = store.below("/coreos.com/network/subnets")
ours = manager.acquire(config, state.attributes, (None, None))
manager.renew(ours)
manager.acquire(config, LeaseAttrs(IPv4Address("192.0.2.12")), (IPv4Network("10.5.41.0/24"), None))
print(json.dumps({
    "state": [state.store, str(state.subnets[0]), str(state.attributes), state.devices[0].mac],
    "nodes": [nodes.own.name, [[each.name, each.notes["public-ip"]] for each in nodes.peers]],
    "leases": [each.key.rpartition("/")[2] for each in leases],
    "ours": str(ours),
    "tokens": [each.state for each in Tokens(store.database).listed()],
}))
"""


def node(number: int, created: int = 0) -> KubeNode:
    mac = f"5e:9e:99:14:a0:0{number}"
    notes = {
        "public-ip": f"192.0.2.{number}",
        "backend-type": "vxlan",
        "kube-subnet-manager": "true",
        "backend-data": json.dumps({"VNI": 1, "VtepMAC": mac}, separators=(",", ":")),
    }
    return KubeNode(f"n{number}", f"uid-{number}", (f"10.5.{number}.0/24",), notes, created)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the version before, from the history."""
    folder = tmp_path_factory.mktemp("before")
    archive = ["git", "-C", str(ROOT), "archive", BEFORE, "flanneld"]
    found = subprocess.run(archive, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history lacks {BEFORE}: {found.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "x", "-C", str(folder)], input=found.stdout, check=True)
    return folder


def test_files_of_the_version_before_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("flanneld.state", "kube-nodes.json"):
        shutil.copy(FILES / name, tmp_path)
    assert StateFile(tmp_path / "flanneld.state").load() == RECORD
    assert NodeCache(str(tmp_path), "n1").load() == Saved(node(1), (node(2),))
    with sqlite3.connect(tmp_path / "leases.db") as made:
        made.executescript((FILES / "leases.sql").read_text())
    store = open_file(str(tmp_path / "leases.db"))
    own = store_of(store)
    leases = {str(each): each for each in own.read_leases()}
    assert (leases[str(SUBNET)].attrs, leases[str(RESERVED)].expires) == (ATTRS, None)
    assert [each.state for each in Tokens(store.database).listed()]
    assert store.owner(LEASE_KEY) == ""
    assert own.acquire(own.network_config(), ATTRS, (None, None)).subnet == SUBNET
    assert store.owner(LEASE_KEY) == LOCAL
    assert [each.levelno for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_files_of_today_are_read_by_the_version_before_and_then_again(tmp_path: Path, before: Path) -> None:
    address = StoreAddress(IPv4Address("10.5.77.9"), 472_222, is_outside=True)
    record = replace(
        RECORD,
        store_addresses=(address,),
        store_tried=1_700_000_000,
        earlier=(replace(ATTRS, public_ip=IPv4Address("192.0.2.10")),),
        path_mtu=(1450, 1350),
        former=((IPv4Network("10.6.0.0/16"), IPv4Network("10.6.3.0/24")),),
    )
    fields = {name: getattr(record, name) for name in RunRecord.__struct_fields__}
    StateFile(tmp_path / "flanneld.state").update(**fields)
    NodeCache(str(tmp_path), "n1").save(Saved(node(1, 1_700_000_000), (node(2, 1_700_000_001),)))
    with sqlite3.connect(tmp_path / "leases.db") as made:
        made.executescript((FILES / "leases.sql").read_text())
    store = open_file(str(tmp_path / "leases.db"))
    own = store_of(store)
    own.acquire(own.network_config(), ATTRS, (None, None))
    store.database.close()
    found = run_before(before, tmp_path)
    assert found["state"] == [RECORD.store, str(SUBNET), str(ATTRS), "5e:9e:99:14:a0:5c"]
    assert found["nodes"] == ["n1", [["n2", "192.0.2.2"]]]
    assert (found["leases"], found["ours"]) == (["10.5.40.0-24", "10.5.9.0-24"], str(SUBNET))
    assert len(found["tokens"]) == 1
    store = open_file(str(tmp_path / "leases.db"))
    assert store.owner(LEASE_KEY) == ""  # what it has written is nobody's
    leases = {each.subnet: each for each in store_of(store).read_leases()}
    assert set(leases) == {SUBNET, RESERVED, IPv4Network("10.5.41.0/24")}


def run_before(before: Path, folder: Path) -> dict[str, Any]:
    variables = os.environ | {"PYTHONPATH": str(before)}
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder)],
        cwd=before,
        env=variables,
        check=True,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
