"""Backends that encrypt, on a simulated host: their tables in memory, and the way of a packet there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address
from typing import Any

from flanneld.backends import registry
from flanneld.backends.contract import Host
from flanneld.backends.ipsec.backend import Ipsec
from flanneld.backends.ipsec.tables import CharonTable, ConnectionTable
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.backend import WireGuardBackend
from flanneld.backends.wireguard.keys import AllowedIp, DeviceKey, WgPeer
from flanneld.backends.wireguard.table import WireGuardTable
from flanneld.config import Config
from flanneld.model import IPAddress
from flanneld.network.xfrm import POLICIES, Action, Direction, XfrmPolicy
from flanneld.network.xfrm_table import XfrmPolicyTable
from flanneld.state.resources import Dummy, Link, Resource, WireGuard
from flanneld.state.table import Put, Scope, Seen, Table
from tests.unit.simulation.kernel import ENODEV, ENOENT, Kernel, KernelError
from tests.unit.simulation.kernel_tables import KernelTable

TYPES = ("wireguard", "ipsec")
#: What they need in the network config.
OPTIONS: Mapping[str, Mapping[str, object]] = {"ipsec": {"PSK": "0123456789abcdef" * 6}}


class Secrets:
    """Key files of a simulated host, by which its backends find its kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._files: dict[str, bytes] = {}

    def __call__(self, name: str, make: Callable[[], bytes] | None = None, *, variable: str = "") -> bytes:
        del variable
        if name not in self._files:
            assert make is not None
            self._files[name] = make()
        return self._files[name]


class HeldTable(KernelTable):
    """Resources that a kernel or charon holds, in place of the product's table, whose properties it has."""

    def __init__(self, kernel: Kernel, of: type[Table]) -> None:
        super().__init__(kernel)
        self.name, self.what, self.worker = of.name, of.what, of.worker
        self.vital, self.needs = of.vital, of.needs
        self._kernel = kernel

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        del scope
        return map(Seen, self._kernel.beside[self.name].values())

    def _put(self, put: Put) -> None:
        device = getattr(put.want, "device", None)
        if device is not None and device not in self._kernel.devices:
            raise KernelError(ENODEV)
        self._kernel.beside[self.name][put.want.key] = put.want

    def _drop(self, resource: Resource) -> None:
        if self._kernel.beside[self.name].pop(resource.key, None) is None:
            raise KernelError(ENOENT)


class _OnSimulatedHost:
    """Backend with other tables than the product's."""

    replaced: tuple[type[Table], ...] = ()

    def __init__(self, config: Config, host: Host) -> None:
        super().__init__(config, host)  # type: ignore[call-arg]
        assert isinstance(host.secret, Secrets)
        self._kernel = host.secret.kernel

    def tables(self) -> tuple[Table, ...]:
        return tuple(HeldTable(self._kernel, each) for each in self.replaced)


class SimulatedWireGuard(_OnSimulatedHost, WireGuardBackend):
    replaced = (WireGuardTable,)


class SimulatedIpsec(_OnSimulatedHost, Ipsec):
    replaced = (XfrmPolicyTable, CharonTable, ConnectionTable)


#: For the registry.
BACKENDS = {
    "wireguard": (__name__, SimulatedWireGuard.__name__),
    "ipsec": (__name__, SimulatedIpsec.__name__),
}


def encrypts(backend: str) -> bool:
    return registry.described(backend).encrypts


def policy_for(kernel: Kernel, source: IPAddress, target: IPAddress) -> XfrmPolicy | None:
    """Return the policy for a packet that leaves: the lowest priority number precedes."""
    found = [
        each
        for each in kernel.beside[POLICIES].values()
        if isinstance(each, XfrmPolicy)
        and each.direction is Direction.OUT
        and source in each.source
        and target in each.destination
    ]
    return min(found, key=lambda each: each.priority, default=None)


def is_in_the_clear(kernel: Kernel, source: IPAddress, target: IPAddress) -> bool:
    """Return True if a container's packet would leave the host without encryption."""
    route = kernel.route_to(target)
    if route is None or isinstance(kernel.devices[route.device], WireGuard | Dummy):
        return False
    policy = policy_for(kernel, source, target)
    return policy is None or (policy.tunnel is None and policy.action is Action.ALLOW)


def encrypted_end(
    kernel: Kernel, link: Link, source: IPAddress, target: IPAddress
) -> tuple[IPAddress | None, bytes]:
    """Return where a device or a policy sends a packet: an address, and the public key that it has."""
    if isinstance(link, Dummy):
        policy = policy_for(kernel, source, target)
        return (policy.tunnel.destination if policy and policy.tunnel else None), b""
    held: Iterable[Any] = kernel.beside[keys.TABLE].values()
    allowed = [
        each
        for each in held
        if isinstance(each, AllowedIp) and each.device == link.name and target in each.subnet
    ]
    key = max(allowed, key=lambda each: each.subnet.prefixlen).public_key if allowed else None
    peers = [
        each
        for each in held
        if isinstance(each, WgPeer) and each.device == link.name and each.public_key == key
    ]
    return (peers[0].endpoint, peers[0].public_key) if peers else (None, b"")


def accepts(kernel: Kernel, key: bytes, source: IPAddress, target: IPAddress) -> bool:
    """Return True if an encrypted packet from a container is taken at the other end."""
    if key:
        held = kernel.beside[keys.TABLE].values()
        return any(isinstance(each, DeviceKey) and each.public_key == key for each in held) and any(
            isinstance(each, AllowedIp) and source in each.subnet for each in held
        )
    assert isinstance(source, IPv4Address)
    assert isinstance(target, IPv4Address)
    return any(
        isinstance(each, XfrmPolicy)
        and each.direction is Direction.FWD
        and each.tunnel is not None
        and source in each.source
        and target in each.destination
        for each in kernel.beside[POLICIES].values()
    )
