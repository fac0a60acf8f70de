"""Peers that are in etcd and nowhere else: they come, go and are led to like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab import Lab, Node, wait_for

#: Where strangers are, no node gets a subnet: to be added to the network config.
ABOVE_STRANGERS: dict[str, Any] = {"SubnetMin": "10.5.100.0"}

NUMBERS = range(100)
KINDS = ("vxlan", "host-gw")


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node whose number is in all that it has."""

    number: int
    backend: str = "vxlan"

    @property
    def subnet(self) -> str:
        return f"10.5.{self.number}.0/24"

    @property
    def vtep(self) -> str:
        return f"10.5.{self.number}.0"

    @property
    def mac(self) -> str:
        return f"02:00:00:00:00:{self.number:02x}"

    @property
    def attributes(self) -> dict[str, Any]:
        """What it says of itself."""
        told = {"PublicIP": f"198.18.0.{100 + self.number}", "BackendType": self.backend}
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
    routes = {f"{route['dst']} {route['dev']}" for route in node.routes()}
    vteps = {entry["dst"] for entry in node.neighbors("flannel.1")}
    macs = {entry["mac"] for entry in node.fdb("flannel.1")}
    everything = set[str]().union(*(Stranger(n, kind).objects for n in NUMBERS for kind in KINDS))
    return everything & (routes | vteps | macs)


def are_led_to(node: Node, strangers: Sequence[Stranger]) -> bool:
    """Does all lead to these, and nothing to others?"""
    return objects(node) == set[str]().union(*(each.objects for each in strangers))


def wait_for_just(node: Node, strangers: Sequence[Stranger], deadline: float = 20) -> None:
    """Wait until these strangers are led to and no others."""
    wait_for(lambda: are_led_to(node, strangers), deadline, f"just these peers: {strangers}")
