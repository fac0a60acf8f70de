"""A cloud of the lab on loopback, and a node's tables over it, in the daemon's own reconciler."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Protocol

import pytest

from flanneld.backends import registry
from flanneld.backends.cloud.backend import CloudBackend
from flanneld.backends.cloud.contract import ErrorKind
from flanneld.backends.cloud.routes import CloudRoutes
from flanneld.backends.contract import Host
from flanneld.config import parse
from flanneld.model import Lease, Uplink
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.reconcile.upkeep import TableState
from flanneld.runtime.sockets.http_client import HttpClient
from flanneld.runtime.waits import DetachedCalls
from flanneld.state.permits import Knowledge, Permits
from tests.clock import Clock
from tests.lab.clouds.kinds import make_cloud
from tests.lab.clouds.service import Service, served

OURS, THEIRS, SUBNET = "198.18.0.1", "198.18.0.2", "10.5.1.0/24"
KINDS = ("aws-vpc", "gce", "ali-vpc", "tencent-vpc")
#: Seconds after which any pause between two tries is over, and any own write visible.
LATER = 400.0


class Cloud(Protocol):
    """What all clouds of the lab do for a test."""

    kind: str
    calls: list[str]
    stale: dict[str, int]
    garbage: dict[str, bytes]
    late: dict[str, float]
    is_down: bool
    limit: int
    actions: Mapping[str, str]

    def add_node(self, address: str) -> str: ...
    def terminate(self, address: str) -> None: ...
    def set_route(self, destination: str, hop: str) -> None: ...
    def drop_route(self, destination: str) -> None: ...
    def routes(self) -> dict[str, str]: ...
    def deny(self, purpose: str) -> None: ...
    def revoke(self) -> None: ...
    def fail(self, purpose: str, trouble: ErrorKind, times: float = 1) -> None: ...
    def heal(self) -> None: ...
    def made(self, *purposes: str) -> int: ...


class Bench:
    """A cloud with two instances; ``hop`` leads to ours, ``their_hop`` to the other one."""

    def __init__(self, cloud: Any, url: str, metadata: str, clock: Clock, room: Path) -> None:
        self.cloud: Cloud = cloud
        self.url = url
        self.clock = clock
        self.room = room
        self.hop, self.their_hop = cloud.add_node(OURS), cloud.add_node(THEIRS)
        self._options = {"Type": cloud.kind, "Endpoint": url}
        if cloud.kind in ("ali-vpc", "tencent-vpc"):
            self._options |= {"MetadataEndpoint": f"{metadata}/latest/meta-data"}
        if cloud.kind == "ali-vpc":
            self._options |= {"InstanceEndpoint": url}

    def node(self, subnet: str = SUBNET, address: str = OURS, **options: Any) -> Node:
        config = {"Network": "10.5.0.0/16", "Backend": self._options | options}
        return Node(config, subnet, address, self.room, self.clock)

    def wait(self, seconds: float = LATER) -> None:
        self.clock.time += seconds


class Node:
    """A node's backend and its tables. ``audit`` reads and repairs all of them."""

    def __init__(self, config: Any, subnet: str, address: str, room: Path, clock: Clock) -> None:
        own = IPv4Address(address)
        stop = threading.Event()
        host = Host(
            Uplink("eth0", 2, 1500, own, own),
            None,
            lambda _: None,
            lambda _: None,
            bytes,
            http=HttpClient(stop).ask,
            call=DetachedCalls(stop).run,
            beside=lambda suffix: room / f"flanneld.{suffix}",
        )
        self.clock = clock
        self.sweeps = True
        backend = registry.load(config["Backend"]["Type"])(parse(json.dumps(config)), host)
        assert isinstance(backend, CloudBackend)
        self.backend = backend
        lease = Lease(backend.attributes(), IPv4Network(subnet), None)
        self.tables = backend.tables()
        self.desired = list(backend.local(lease))
        self.reconciler = Reconciler(
            self.tables,
            desired_by_table(self.desired),
            lambda: False,
            permits=Permits(lambda: Knowledge(synced=self.sweeps)),
        )

    @property
    def routes(self) -> CloudRoutes:
        found = self.tables[0]
        assert isinstance(found, CloudRoutes)
        return found

    def audit(self, *, sweep: bool = True) -> tuple[list[str], list[str]]:
        """Return what was made and removed in the cloud's table."""
        self.sweeps = sweep
        report = self.reconciler.converge(self.clock.now())
        return (
            [str(each) for each in report.made if each.key[0] == "cloud-routes"],
            [str(each) for each in report.removed],
        )

    def state(self) -> TableState:
        return next(each for each in self.reconciler.states() if each.name == "cloud-routes")

    def complaint(self) -> str:
        """Return why the route is not there, with the remedy."""
        state = self.state()
        if state.failed:
            return f"{state.failed[0].reason}; {state.failed[0].remedy}"
        return state.problem


def set_credentials(cloud: Any, url: str, metadata: str, room: Path, environment: pytest.MonkeyPatch) -> None:
    """Let SDKs find the cloud's key and metadata service."""
    if cloud.kind == "gce":
        cloud.make_account(room / "account.json", url)
        environment.setenv("GCE_METADATA_HOST", metadata.removeprefix("http://"))
        environment.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(room / "account.json"))
    elif cloud.kind == "aws-vpc":
        environment.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata)
        environment.setenv("AWS_ACCESS_KEY_ID", cloud.key[0])
        environment.setenv("AWS_SECRET_ACCESS_KEY", cloud.key[1])
    else:
        environment.setenv("ACCESS_KEY_ID", cloud.key[0])
        environment.setenv("ACCESS_KEY_SECRET", cloud.key[1])


@contextmanager
def bench(kind: str, clock: Clock, room: Path, environment: pytest.MonkeyPatch) -> Iterator[Bench]:
    cloud: Service = make_cloud(kind)
    with served(cloud) as url, served(cloud, metadata=True) as metadata:
        set_credentials(cloud, url, metadata, room, environment)
        yield Bench(cloud, url, metadata, clock, room)
