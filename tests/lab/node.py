"""A node of the cluster: its namespace, its daemon, its containers, and what its kernel holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from tests.lab.changes import Changes
from tests.lab.daemon import Daemon, Exit, own_command
from tests.lab.namespace import Namespace, batch, suspend
from tests.lab.ping import Ping
from tests.lab.service_manager import ServiceManager
from tests.lab.wait import wait_for

Rows = list[dict[str, Any]]


class Container:
    """A namespace behind a node's ``cni0``, with one address of each of the node's subnets.

    ``address`` is the IPv4 one if there is one.
    """

    def __init__(self, namespace: Namespace, addresses: Mapping[int, str], directory: Path) -> None:
        self.namespace = namespace
        self.addresses = addresses
        self.address = next(iter(addresses.values()))
        self._directory = directory
        self._pings = 0

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return self.namespace.run(*command, check=check, timeout=timeout)

    def reaches(self, target: Container | str, patience: float = 10) -> bool:
        """Does one ping come back within so many seconds? If it does, that takes no longer than it has to."""
        done = self.run("ping", "-n", "-c", "1", "-W", str(patience), _address(target), check=False)
        return done.returncode == 0

    def wait_for_reply(self, target: Container | str, deadline: float = 20) -> None:
        """Wait until ``target`` answers."""
        what = f"a reply from {_address(target)} to {self.address}"
        wait_for(lambda: self.reaches(target, 0.5), deadline, what)

    def ping(self, target: Container | str, interval: float = 0.02) -> Ping:
        """Start a ping in the background, to be used in a ``with``."""
        self._pings += 1
        output = self._directory / f"{self.namespace.name}-ping-{self._pings}"
        return Ping(self.namespace, _address(target), output, interval)


class Node:
    """One host. Its daemon's files are its own, so that many nodes can share a machine's file system."""

    def __init__(
        self, namespace: Namespace, number: int, endpoints: str, directory: Path, link_number: int
    ) -> None:
        self.namespace = namespace
        self.number = number
        self.link_number = link_number
        self.name = f"n{number}"
        self.address = f"198.{link_number}.0.{number}"
        self.ipv6_address = f"fd00:{link_number}::{number:x}"
        self.directory = directory
        self.subnet_file = directory / "subnet.env"
        self.endpoints = endpoints
        self._daemons: list[Daemon] = []
        self._containers: dict[int, Container] = {}
        self._before: tuple[int, int] | None = None
        #: The daemon's defaults are the host's. As variables, since Go's has no such flags.
        self._files = {
            "FLANNELD_SUBNET_FILE": str(self.subnet_file),
            "FLANNELD_STATE_DIR": str(directory / "state"),
            "FLANNELD_SECRET_DIR": str(directory / "secrets"),
            "FLANNELD_SUBNET_DIR": str(directory / "networks"),
        }
        directory.mkdir()
        self.service_manager = ServiceManager(directory / "notify", namespace)

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout: float = 60,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this node to its end; raises ``CommandError`` unless ``check`` is off."""
        own = {**self._files, **(variables or {})}
        return self.namespace.run(*command, check=check, timeout=timeout, variables=own)

    def start(
        self,
        *flags: str,
        command: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Daemon:
        """Start a daemon, by default the one under test; ``flags`` come after the lab's own and win."""
        assert not self.running, f"{self.name} has a daemon already"
        self._before = self._written()
        self.service_manager.close()
        self.service_manager = ServiceManager(self.service_manager.path, self.namespace)
        own = [f"--etcd-endpoints={self.endpoints}", f"--subnet-file={self.subnet_file}"]
        daemon = Daemon(
            self.namespace,
            [*(command or own_command()), *own, *flags],
            self.directory / f"daemon-{len(self._daemons) + 1}.log",
            {"NOTIFY_SOCKET": str(self.service_manager.path)} | self._files | (environment or {}),
        )
        self._daemons.append(daemon)
        return daemon

    @property
    def daemon(self) -> Daemon:
        """The daemon that was started last."""
        return self._daemons[-1]

    @property
    def running(self) -> bool:
        return bool(self._daemons) and self.daemon.status() is None

    @property
    def pid(self) -> int:
        return self.daemon.pid

    def wait_ready(self, deadline: float = 20) -> dict[str, str]:
        """Wait until the daemon says it is ready, or has written subnet.env anew; return the variables there.

        A daemon that finds the file right leaves it as it is.
        """

        def ready() -> bool:
            self._assert_running()
            return self.service_manager.ready() or self._written() != self._before

        wait_for(ready, deadline, f"{self.name} to become ready; its log so far:\n{self.log()}")
        return self.env()

    def stop(self, deadline: float = 20) -> Exit:
        """SIGTERM the daemon and wait for it."""
        return self.daemon.end(signal.SIGTERM, deadline)

    def kill(self) -> Exit:
        """SIGKILL the daemon."""
        return self.daemon.end(signal.SIGKILL, 5)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the daemon in its tracks for a moment, so that several things happen to it at once."""
        suspend(self.pid)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill a daemon that still runs."""
        if self.running:
            self.kill()
        self.service_manager.close()

    def log(self) -> str:
        """What the daemon that was started last has written."""
        return self.daemon.log() if self._daemons else ""

    def wait_for_log(self, text: str, deadline: float = 20) -> list[str]:
        """Wait for a text in that log and return the lines that hold it."""

        def lines() -> list[str]:
            has_ended = not self.running  # before the last line
            found = [line for line in self.log().splitlines() if text in line]
            if has_ended and not found:
                self._assert_running()
            return found

        return wait_for(lines, deadline, f"{text!r} in the log of {self.name}:\n{self.log()}")

    def _assert_running(self) -> None:
        status = self.daemon.status()
        assert status is None, f"{self.name}: the daemon ended: {status}; its log:\n{self.log()}"

    def logs(self) -> str:
        """What all daemons of this node have written."""
        return "\n--- started again ---\n".join(daemon.log() for daemon in self._daemons)

    def env(self) -> dict[str, str]:
        """The variables in subnet.env, ``{}`` when there is no such file."""
        if not self.subnet_file.exists():
            return {}
        return dict(line.split("=", 1) for line in self.subnet_file.read_text().splitlines())

    def subnet(self, family: int = 4) -> str:
        """The node's lease as etcd names it, ``10.5.7.0/24``."""
        name = "FLANNEL_SUBNET" if family == 4 else "FLANNEL_IPV6_SUBNET"
        return str(ip_interface(self.env()[name]).network)

    def container(self, number: int = 1) -> Container:
        """The container of this number, made as the CNI bridge plug-in does if it is not there yet."""
        if number not in self._containers:
            self._containers[number] = self._attach(number)
        return self._containers[number]

    def link(self, device: str) -> dict[str, Any] | None:
        """A device with all its details, None when it does not exist."""
        return next(iter(self.namespace.json("ip", "-j", "-d", "link", "show", "dev", device)), None)

    def addresses(self, device: str, family: int = 4) -> list[str]:
        """``10.5.7.0/32`` and so on."""
        rows = self.namespace.json("ip", "-j", f"-{family}", "address", "show", "dev", device)
        return [_address_of(info) for row in rows for info in row["addr_info"]]

    def routes(self, device: str = "", family: int = 4) -> Rows:
        """The main table, or the part of it that leads out of ``device``."""
        return self.namespace.json("ip", "-j", f"-{family}", "route", "show", *_on(device))

    def wait_for_route(self, subnet: str, deadline: float = 20) -> dict[str, Any]:
        """Wait for a route to a peer's subnet and return it."""

        def found() -> Rows:
            return [route for route in self.routes() if route["dst"] == subnet]

        return wait_for(found, deadline, f"the route to {subnet} on {self.name}")[0]

    def wait_for_no_route(self, subnet: str, deadline: float = 20, family: int = 4) -> None:
        """Wait until there is none."""

        def gone() -> bool:
            return all(route["dst"] != subnet for route in self.routes(family=family))

        wait_for(gone, deadline, f"the route to {subnet} to go from {self.name}")

    def neighbors(self, device: str, family: int = 4) -> Rows:
        """The permanent ARP or NDP entries."""
        command = ("ip", "-j", f"-{family}", "neighbor", "show", *_on(device), "nud", "permanent")
        return self.namespace.json(*command)

    def fdb(self, device: str) -> Rows:
        """The forwarding entries that lead to another host."""
        rows = self.namespace.json("bridge", "-j", "fdb", "show", *_on(device))
        return [row for row in rows if "dst" in row]

    def changes(self) -> Changes:
        """Listen from now on to what changes in the kernel, to be used in a ``with``."""
        return Changes(self.namespace)

    def kernel_state(self, *devices: str) -> dict[str, Any]:
        """Everything above for these devices and both families, in an order that can be compared."""
        shown = ("link show", "address show", "route show", "neighbor show nud permanent")
        done = self.namespace.run("ip", "-j", "-d", "-batch", "-", stdin="\n".join(shown))
        links, addressed, routes, neighbors = map(json.loads, done.stdout.splitlines())
        rows = {
            "link": links,
            "fdb": self.fdb(""),
            "routes-4": routes,
            "routes-6": self.namespace.json("ip", "-j", "-d", "-6", "route", "show"),
            "neighbors-4": [row for row in neighbors if ":" not in row["dst"]],
            "neighbors-6": [row for row in neighbors if ":" in row["dst"]],
        }
        state: dict[str, Any] = {}
        for device in devices:
            found = {
                what: sorted((row for row in all_rows if _device(row) == device), key=str)
                for what, all_rows in rows.items()
            }
            infos = [info for row in addressed if _device(row) == device for info in row["addr_info"]]
            state[device] = {
                **found,
                "link": next(iter(found["link"]), None),
                "addresses-4": sorted(_address_of(info) for info in infos if info["family"] == "inet"),
                "addresses-6": sorted(_address_of(info) for info in infos if info["family"] == "inet6"),
            }
        return state

    def _written(self) -> tuple[int, int] | None:
        """What differs between two writings of subnet.env."""
        if not self.subnet_file.exists():
            return None
        found = self.subnet_file.stat()
        return found.st_ino, found.st_mtime_ns

    def _attach(self, number: int) -> Container:
        env = self.env()
        families = [family for family in ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET") if family in env]
        gateways = [ip_interface(env[family]) for family in families]
        inside = Namespace(f"{self.namespace.name}c{number}")
        batch(f"netns add {inside.name}")
        mtu = env["FLANNEL_MTU"]
        bridge = [
            f"link add cni0 mtu {mtu} type bridge",
            "link set cni0 up",
            *(f"address add {gateway} dev cni0 {_nodad(gateway.version)}" for gateway in gateways),
        ]
        self.namespace.ip(
            *([] if self.link("cni0") else bridge),
            f"link add veth{number} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {inside.name}",
            f"link set veth{number} master cni0 up",
        )
        own: dict[int, str] = {
            each.version: f"{each.ip + number}/{each.network.prefixlen}" for each in gateways
        }
        inside.ip(
            "link set lo up",
            "link set eth0 up",
            *(f"address add {address} dev eth0 {_nodad(version)}" for version, address in own.items()),
            *(f"route add default via {gateway.ip}" for gateway in gateways if gateway.version == 4),
        )
        for gateway in gateways:
            if gateway.version == 6:
                inside.add_default_route(str(gateway.ip))
        addresses = {version: address.partition("/")[0] for version, address in own.items()}
        return Container(inside, addresses, self.directory)


def _address(target: Container | str) -> str:
    return target if isinstance(target, str) else target.address


def _device(row: Mapping[str, Any]) -> str:
    return str(row.get("ifname", row.get("dev")))


def _address_of(info: Mapping[str, Any]) -> str:
    return f"{info['local']}/{info['prefixlen']}"


def _nodad(version: int) -> str:
    return "nodad" if version == 6 else ""


def _on(device: str) -> tuple[str, ...]:
    return ("dev", device) if device else ()
