"""A Kubernetes cluster on loopback for tests of the store, and what a reader of the store's events knows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from flanneld.model import Added, Cached, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube.api import ApiTimeouts
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.store import Deliver
from tests.lab.credentials import write_kubeconfig
from tests.lab.kube_api.crowd import PREFIX
from tests.lab.kube_api.faults import Fault
from tests.lab.wait import wait_for
from tests.local_kube import DEADLINE, FLANNEL_TOKEN, LocalKube, running_kube

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}
ATTRS = LeaseAttrs(IPv4Address("198.18.0.1"), None, "vxlan", {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"})
SUBNET = IPv4Network("10.5.1.0/24")
QUICK = ApiTimeouts(connect=20.0, read=20.0, silence=30.0)


PATIENT = Backoff(0.02, 0.08)


class Cluster:
    """An API server with our node ``n1``, and a manager for that node."""

    def __init__(self, kube: LocalKube, directory: Path) -> None:
        self.kube = kube
        self.control = kube.control
        self.directory = directory
        self.net_config = directory / "net-conf.json"
        self.net_config.write_text(json.dumps(CONFIG))
        self.state_dir = directory / "state"
        self.events: list[Event] = []
        self.own_events: list[Event] = []
        self.ended: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._managers: list[KubeStore] = []

    def open(
        self,
        token: str = FLANNEL_TOKEN,
        environ: Mapping[str, str] | None = None,
        url: str = "",
        prefix: str = PREFIX.rstrip("/"),
        timeouts: ApiTimeouts = QUICK,
        backoff: Backoff = PATIENT,
    ) -> KubeStore:
        """A manager; with its config read, for all tests but those of the config need that."""
        kubeconfig = self.directory / f"kubeconfig-{token}"
        write_kubeconfig(kubeconfig, url or self.kube.url, token, None)
        options = KubeOptions("", str(kubeconfig), prefix, str(self.net_config), str(self.state_dir))
        manager = KubeStore(options, environ or {"NODE_NAME": "n1"}, timeouts, lambda: replace(backoff))
        self._managers.append(manager)
        self.config = manager.network_config()
        return manager

    def join(self, manager: KubeStore | None = None, attrs: LeaseAttrs = ATTRS) -> KubeStore:
        """Take the lease and start both watches."""
        manager = manager or self.open()
        manager.acquire(self.config, attrs, (None, None))
        self.start_watches(manager, attrs)
        return manager

    def start_watches(self, manager: KubeStore, attrs: LeaseAttrs = ATTRS) -> None:
        self.start(manager.watch, self.events)
        self.start(lambda deliver: manager.watch_own(Lease(attrs, SUBNET), deliver), self.own_events)

    def put_node(self, name: str, *cidrs: str, **notes: str) -> None:
        annotations = {PREFIX + key.replace("_", "-"): value for key, value in notes.items()}
        self.control.put_node(name, *cidrs, annotations=annotations)

    def put_peer(self, number: int, **notes: str) -> None:
        data = json.dumps({"VtepMAC": f"02:00:00:00:00:{number:02x}"})
        known = {"kube_subnet_manager": "true", "backend_type": "vxlan", "backend_data": data}
        self.put_node(
            f"n{number}", f"10.5.{number}.0/24", **{**known, "public_ip": f"198.18.0.{number}", **notes}
        )

    def notes(self, name: str = "n1") -> dict[str, str]:
        """Our annotations on a node."""
        found = self.control.annotations(name).items()
        return {key.removeprefix(PREFIX): value for key, value in found if key.startswith(PREFIX)}

    def fault(self, **fault: Any) -> None:
        self.control.add_fault(Fault(**fault))

    def asked(self, verb: str = "", start: int = 0) -> list[dict[str, Any]]:
        return self.control.requests(verb, start=start)

    def wait_for(self, *numbers: int) -> None:
        """Wait until just these peers are known."""
        wanted = {f"10.5.{number}.0/24" for number in numbers}
        wait_for(lambda: peers(self.events) == wanted, 10, f"{wanted} of {self.events}")

    def close(self) -> None:
        for manager in self._managers:
            manager.close()
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, watch: Callable[[Deliver], None], events: list[Event]) -> None:
        def run() -> None:
            try:
                watch(events.extend)
            except BaseException as error:
                self.ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)


def peers(events: list[Event]) -> set[str]:
    """The subnets that a reader of all events knows, our own left out."""
    there: set[str] = set()
    for event in list(events):
        match event:
            case Added(lease):
                there.add(str(lease))
            case Removed((subnet, _)):
                there.discard(str(subnet))
            case Cached(leases):
                there |= {str(lease) for lease in leases}
            case Snapshot(leases):
                there = {str(lease) for lease in leases}
    return there - {str(SUBNET)}


@contextmanager
def running_cluster(directory: Path) -> Iterator[Cluster]:
    """Run an API server that knows our node."""
    with running_kube() as kube, Cluster(kube, directory) as cluster:
        cluster.put_node("n1", "10.5.1.0/24")
        yield cluster
