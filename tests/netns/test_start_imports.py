"""Modules that a start of vxlan on etcd's v2 API loads before subnet.env is written: most of its time."""

from __future__ import annotations

import sys

from tests.lab import Lab, Node

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}
#: Modules before subnet.env, with those of the interpreter: 287 and 272 with Python 3.11, and a few to spare.
BUDGET, BUDGET_OF_RESTART = 291, 276
#: Modules that a start does not need, each with many more or with much work behind it.
NOT_NEEDED = {
    "_hashlib",
    "_ssl",
    "asyncio",
    "dataclasses",
    "dns.message",
    "flanneld.backends.ipsec",
    "flanneld.diagnostics.describe",
    "flanneld.diagnostics.status",
    "flanneld.network.firewall.rules",
    "flanneld.network.xfrm",
    "flanneld.network.xfrm_table",
    "grpc",
    "http.server",
    "importlib.metadata",
    "inspect",
    "kubernetes",
    "pickle",  # of multiprocessing
    "prometheus_client",
    "subprocess",
}


def loaded_before_subnet_env(node: Node) -> list[str]:
    """Run a daemon until it maintains the packet filter, which comes next, and return the modules before."""
    node.start(command=[sys.executable, "-X", "importtime", "-m", "flanneld"])
    node.wait_ready()
    node.wait_for_log("| flanneld.reconcile.firewall")
    node.stop()
    rows = [row for row in node.log().splitlines() if row.startswith("import time:")]
    modules = [row.rpartition("|")[2].strip() for row in rows]
    return modules[1 : modules.index("flanneld.network.firewall")]


def test_start_loads_few_modules_and_restart_no_pyroute2(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    modules = loaded_before_subnet_env(node)
    assert {"etcd.client", "flanneld.network.rtnetlink.devices", "pyroute2"} <= set(modules)
    assert NOT_NEEDED.isdisjoint(modules)
    assert len(modules) <= BUDGET
    modules = loaded_before_subnet_env(node)
    assert (NOT_NEEDED | {"pyroute2", "multiprocessing"}).isdisjoint(modules)
    assert len(modules) <= BUDGET_OF_RESTART
