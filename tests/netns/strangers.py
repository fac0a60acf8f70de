"""Peers that are in etcd and nowhere else: they come, go and are led to like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from tests.lab import Lab, Node, wait_for

#: Where strangers are, no node gets a subnet: to be added to the network config.
ABOVE_STRANGERS: dict[str, Any] = {"SubnetMin": "10.5.100.0"}
#: No test is about how long these things take, in seconds.
PATIENT = 60.0
_LOWEST = IPv4Address("10.5.0.0")
_MACS = "02:00:00:00:"


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node whose number, below 1600, is in all that it has. Its subnet is small, for there may be many."""

    number: int
    backend: str = "vxlan"

    @property
    def vtep(self) -> str:
        return str(_LOWEST + 16 * self.number)

    @property
    def subnet(self) -> str:
        return f"{self.vtep}/28"

    @property
    def mac(self) -> str:
        return f"{_MACS}{self.number >> 8:02x}:{self.number & 255:02x}"

    @property
    def attributes(self) -> dict[str, Any]:
        """What it says of itself."""
        told = {"PublicIP": f"198.18.0.{100 + self.number % 100}", "BackendType": self.backend}
        return told | ({"BackendData": {"VtepMAC": self.mac}} if self.backend == "vxlan" else {})

    @property
    def objects(self) -> set[str]:
        """What leads to it."""
        if self.backend == "host-gw":
            return {f"{self.subnet} eth0"}
        return {f"{self.subnet} flannel.1", self.vtep, self.mac}

    def come(self, lab: Lab) -> None:
        lab.etcd.put_lease(self.subnet, self.attributes)

    def go(self, lab: Lab) -> None:
        lab.etcd.delete_lease(self.subnet)

    def damage(self, node: Node) -> None:
        """Remove all that leads to it."""
        if self.backend == "vxlan":
            node.run("bridge", "fdb", "del", self.mac, "dev", "flannel.1")
            node.namespace.ip(f"neigh del {self.vtep} dev flannel.1")
        node.namespace.ip(f"route del {self.subnet}")


def objects(node: Node) -> set[str]:
    """All that leads to strangers."""
    routes = {f"{row['dst']} {row['dev']}" for row in node.routes() if _is_strange(row["dst"])}
    vteps = {row["dst"] for row in node.neighbors("flannel.1") if _is_strange(row["dst"])}
    return routes | vteps | {row["mac"] for row in node.fdb("flannel.1") if row["mac"].startswith(_MACS)}


def _is_strange(destination: str) -> bool:
    first, second, third, *_ = (*destination.split("."), "", "")
    return (first, second) == ("10", "5") and int(third) < 100


def are_led_to(node: Node, strangers: Sequence[Stranger]) -> bool:
    """Does all lead to these, and nothing to others?"""
    return objects(node) == set[str]().union(*(each.objects for each in strangers))


def settle(*nodes: Node) -> None:
    """Wait until the daemons of two nodes have nothing left to do, and their containers reach each other."""
    for node in nodes:
        node.wait_ready(PATIENT)
    one, other = (node.container() for node in nodes)
    one.wait_for_reply(other, PATIENT)
    for node in nodes:
        node.wait_for_log("rules with", PATIENT)


def wait_for_just(node: Node, strangers: Sequence[Stranger], deadline: float = PATIENT) -> None:
    """Wait until these strangers are led to and no others."""
    wait_for(lambda: are_led_to(node, strangers), deadline, f"just {len(strangers)} peers: {strangers[:3]}")
