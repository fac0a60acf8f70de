"""The cluster itself: a switch, an etcd behind it, and as many nodes as asked for."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tests.lab.etcd import Etcd
from tests.lab.kube import Kube
from tests.lab.namespace import Namespace, batch, named, remove
from tests.lab.node import Node
from tests.lab.wait import wait_for

#: The links that nodes can be on: 198.18.0.0/24 and fd00:18::/64, and likewise with 19 (RFC 2544).
LINK, SECOND_LINK = 18, 19
ADDRESS = f"198.{LINK}.0.254"  # etcd's, and the first link's gateway
NETWORK = "10.5.0.0/16"
#: Range of the nodes' IPv4 subnets; leases that tests write are outside. Without IPv4 Go's daemons would make
#: a part of their keys of it.
OWN_SUBNETS = {"SubnetMin": "10.5.160.0", "SubnetMax": "10.5.192.0"}

#: The API of etcd in which networks are unless a test says otherwise.
API = os.environ.get("FLANNELD_TEST_API", "v2")

#: etcd reserves 64 MB for each file of its write-ahead log, and a container's /dev/shm may be smaller.
ENOUGH = 1 << 30

_numbers = itertools.count(1)


class Lab:
    """A laboratory of its own: any number can stand side by side, in one process or in many.

    ``api`` is that of etcd in which the network is, ``program`` the etcd if it is not the usual one. What an
    earlier lab left behind because its process was killed is cleared away at the start of the next.
    """

    def __init__(self, nodes: int = 0, api: str = API, program: str = "", *, has_etcd: bool = True) -> None:
        self.name = f"fl{os.getpid()}.{next(_numbers)}"
        self.directory = _room() / self.name
        self.nodes: list[Node] = []
        self._first_nodes = nodes
        self._api = api
        self._program = program
        self._has_etcd = has_etcd
        self._routes = False

    def __enter__(self) -> Self:
        self._lock = _claim(self.directory)
        self.switch = Namespace(f"{self.name}-switch")
        self.etcd = Etcd(self.switch, ADDRESS, self.directory, self._api, self._program)
        try:
            self._build_switch()
            if self._has_etcd:
                self.etcd.start()
            self.add_nodes(self._first_nodes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down, whatever state it is in."""
        try:
            for node in self.nodes:
                node.close()
            self.etcd.kill()
            if "kube" in vars(self):
                self.kube.kill()
            _clear(self.directory)
        finally:
            os.close(self._lock)

    @cached_property
    def kube(self) -> Kube:
        """The Kubernetes API server, started when it is first asked for."""
        kube = Kube(self.switch, ADDRESS, self.directory)
        kube.start()
        return kube

    def add_nodes(self, number: int = 1, *, routed: bool = False) -> list[Node]:
        """Plug in more nodes; their daemons are yet to be started.

        Routed ones are on a link of their own: for the others they are behind the default gateway.
        """
        if routed and not self._routes:
            self._routes = True
            self._build_second_link()
        numbers = range(len(self.nodes) + 1, len(self.nodes) + 1 + number)
        namespaces = [Namespace(f"{self.name}-n{each}") for each in numbers]
        batch(*(f"netns add {each.name}" for each in namespaces))
        added = [
            self._build_node(*each, SECOND_LINK if routed else LINK)
            for each in zip(namespaces, numbers, strict=True)
        ]
        self.plug_in(*added)
        self.nodes += added
        return added

    def plug_in(self, *nodes: Node) -> None:
        """Make the uplinks of nodes, with their addresses and default routes."""
        self.switch.ip(
            *(
                line
                for node in nodes
                for line in (
                    f"link add {node.name} type veth peer name eth0 netns {node.namespace.name}"
                    f" address 02:18:00:00:00:{node.number:02x} mtu 1500",
                    f"link set {node.name} master {_bridge(node.link_number)} up",
                )
            )
        )
        for node in nodes:
            node.namespace.ip(
                "link set lo up",
                f"address add {node.address}/24 dev eth0",
                f"address add {node.ipv6_address}/64 dev eth0",
                "link set eth0 up",
                f"route add default via {gateway(node.link_number)}",
            )
        for node in nodes:
            node.namespace.add_default_route(gateway(node.link_number, 6))
        # A busy kernel enables a port seconds after both ends have a carrier.
        wait_for(lambda: {node.name for node in nodes} <= self._ports(), what="the switch to forward packets")

    def _ports(self) -> set[str]:
        ports = self.switch.json("bridge", "-j", "link")
        return {port["ifname"] for port in ports if port["state"] == "forwarding"}

    @contextmanager
    def unplugged(self, node: Node) -> Iterator[None]:
        """Cut a node off for a while, behind its back: its interface stays up and packets get lost."""
        self.switch.ip(f"link set {node.name} nomaster")
        try:
            yield
        finally:
            self.switch.ip(f"link set {node.name} master br0")

    def cluster(
        self,
        backend: Mapping[str, Any],
        nodes: int = 2,
        command: Sequence[str] | None = None,
        flags: Sequence[str] = (),
        **config: Any,
    ) -> list[Node]:
        """Write a network config, start so many new nodes with a daemon each and wait until they are ready.

        ``config`` adds to the network config or replaces parts of it: ``SubnetLen=26``.
        """
        has_range = config.keys() & {"Network", *OWN_SUBNETS} or not config.get("EnableIPv4", True)
        own = {} if has_range else OWN_SUBNETS
        self.etcd.put_config({"Network": NETWORK, "Backend": dict(backend), **own, **config})
        started = self.add_nodes(nodes)
        for node in started:
            node.start(*flags, command=command)
        for node in started:
            node.wait_ready()
        return started

    def kube_cluster(
        self,
        backend: Mapping[str, Any],
        nodes: int = 2,
        command: Sequence[str] | None = None,
        flags: Sequence[str] = (),
        **config: Any,
    ) -> list[Node]:
        """The same for ``--kube-subnet-mgr``: each node's podCIDR is 10.5.<number>.0/24."""
        net_conf = self.directory / "net-conf.json"
        net_conf.write_text(json.dumps({"Network": NETWORK, "Backend": dict(backend), **config}))
        started = self.add_nodes(nodes)
        for node in started:
            self.kube.add(node)
            own = [*self.kube.flags(), f"--net-config-path={net_conf}", *flags]
            node.start(*own, command=command, environment={"NODE_NAME": node.name})
        for node in started:
            node.wait_ready()
        return started

    def _build_switch(self) -> None:
        batch(f"netns add {self.switch.name}")
        _skip_duplicate_address_detection(self.switch)
        self._build_bridge(LINK)

    def _build_second_link(self) -> None:
        self.switch.sysctl("net/ipv4/ip_forward", 1)
        self.switch.sysctl("net/ipv6/conf/all/forwarding", 1)
        self._build_bridge(SECOND_LINK)

    def _build_bridge(self, link: int) -> None:
        name = _bridge(link)
        # A switch's ports have no addresses of their own that the nodes might come to know.
        self.switch.sysctl("net/ipv6/conf/default/disable_ipv6", 0)
        self.switch.ip(
            "link set lo up",
            # Without a MAC of its own a bridge takes its ports', and the nodes' ARP entries go stale.
            f"link add {name} address 02:{link}:00:00:00:fe type bridge",
            f"address add {gateway(link)}/24 dev {name}",
            f"address add {gateway(link, 6)}/64 dev {name}",
            f"link set {name} up",
        )
        self.switch.sysctl("net/ipv6/conf/default/disable_ipv6", 1)

    def _build_node(self, namespace: Namespace, number: int, link: int) -> Node:
        node = Node(namespace, number, self.etcd.endpoint, self.directory / f"n{number}", link)
        _skip_duplicate_address_detection(namespace)
        namespace.sysctl("net/ipv4/ip_forward", 1)
        namespace.sysctl("net/ipv6/conf/all/forwarding", 1)
        return node


def gateway(link: int, family: int = 4) -> str:
    """The switch's own address on a link."""
    return f"198.{link}.0.254" if family == 4 else f"fd00:{link}::fe"


def _bridge(link: int) -> str:
    return f"br{link - LINK}"


def _skip_duplicate_address_detection(namespace: Namespace) -> None:
    """Let IPv6 addresses work at once, not after a second of asking whether someone else has them."""
    namespace.sysctl("net/ipv6/conf/default/accept_dad", 0)


def _rooms() -> tuple[Path, Path]:
    """Where labs may keep their files: in memory and on disk."""
    return Path("/dev/shm/flannel-lab"), Path(tempfile.gettempdir(), "flannel-lab")


def _room() -> Path:
    """In memory if there is enough of it just now, since etcd syncs each write."""
    memory, disk = _rooms()
    with suppress(OSError):
        if shutil.disk_usage(memory.parent).free > ENOUGH:
            return memory
    return disk


def _claim(directory: Path) -> int:
    """Make a lab's directory and lock it for as long as its process lives, after clearing dead labs away.

    The lock on the room keeps others from taking a directory for dead that is just being made.
    """
    if os.geteuid() != 0:
        raise PermissionError("the lab makes network namespaces; run it as root")
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    for room in filter(Path.exists, _rooms()):
        with _behind_its_door(room):
            for other in room.iterdir():
                _clear_if_dead(other)
    with _behind_its_door(directory.parent):
        directory.mkdir()
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


@contextmanager
def _behind_its_door(room: Path) -> Iterator[None]:
    door = os.open(room, os.O_RDONLY)
    try:
        fcntl.flock(door, fcntl.LOCK_EX)
        yield
    finally:
        os.close(door)


def _clear_if_dead(directory: Path) -> None:
    try:
        lock = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return  # Its own process has just taken it down.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _clear(directory)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _clear(directory: Path) -> None:
    remove(named(f"{directory.name}-"))
    shutil.rmtree(directory, ignore_errors=True)
