"""All faults, by name."""

from __future__ import annotations

from tests.faults import cluster, containers, daemon, encryption, firewall, forwarding, kernel, store
from tests.faults.fault import Fault

THEMES = {
    "daemon": daemon.FAULTS,
    "store": store.FAULTS,
    "kernel": kernel.FAULTS,
    "packet filter": firewall.FAULTS,
    "containers": {**containers.FAULTS, **forwarding.FAULTS},
    "cluster": cluster.FAULTS,
    "encryption": encryption.FAULTS,
}
FAULTS: dict[str, Fault] = {name: fault for faults in THEMES.values() for name, fault in faults.items()}
assert len(FAULTS) == sum(map(len, THEMES.values())), "two faults have one name"
