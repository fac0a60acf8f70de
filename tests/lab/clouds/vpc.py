"""State of a cloud in the lab that we wrote ourselves: instances and one table of routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.lab.clouds.service import Service


@dataclass
class Instance:
    """A node. ``hop`` is how a route names it."""

    name: str
    address: str
    hop: str
    forwards: bool = True


@dataclass
class Route:
    hop: str
    name: str
    #: As the cloud says it: its status, whether it is enabled.
    state: Any = None


@dataclass
class VpcService(Service):
    """A cloud with its table: routes by destination, at most ``limit`` of them."""

    instances: dict[str, Instance] = field(default_factory=dict)
    table: dict[str, Route] = field(default_factory=dict)
    limit: int = 50
    #: The access key that is good.
    key: tuple[str, str] = ("lab-key", "lab-secret")
    number: int = 0

    def hop_of(self, name: str, address: str) -> str:
        raise NotImplementedError

    def add_node(self, address: str) -> str:
        """Make an instance with an address; return the next hop that leads to it."""
        with self.lock:
            name = f"i-{address.replace('.', '-')}"
            self.instances[address] = Instance(name, address, self.hop_of(name, address))
            return self.instances[address].hop

    def terminate(self, address: str) -> None:
        with self.lock:
            del self.instances[address]

    def forbid_forwarding(self, address: str) -> None:
        with self.lock:
            self.instances[address].forwards = False

    def set_route(self, destination: str, hop: str, state: Any = None) -> None:
        """Write a route as somebody at the console does."""
        with self.lock:
            self.number += 1
            self.table[destination] = Route(hop, self.named(destination), state)

    def named(self, destination: str) -> str:
        del destination
        return str(self.number)

    def drop_route(self, destination: str) -> None:
        with self.lock:
            self.table.pop(destination, None)

    def routes(self) -> dict[str, str]:
        """Return the next hops by destination."""
        with self.lock:
            return {destination: route.hop for destination, route in self.table.items()}

    def deny(self, purpose: str) -> None:
        with self.lock:
            self.denied.add(self.actions[purpose])

    def revoke(self) -> None:
        """Make the key that was good a bad one."""
        with self.lock:
            self.key = (self.key[0], f"{self.key[1]}-new")

    def of(self, address: str) -> Instance:
        """Return the instance that asks; on loopback there is one."""
        return self.instances.get(address) or next(iter(self.instances.values()))
