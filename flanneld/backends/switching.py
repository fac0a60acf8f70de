"""Two backends on one node, while a cluster switches from one to the other node by node.

``Backend.Type`` carries the packets to each peer that announces it, ``Backend.Also`` those to other peers.
Devices, addresses, entries and keys of both backends exist, so packets from a peer arrive by either. Each
peer's route, or the XFRM policy that takes its place, is that of the backend used for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from flanneld.backends.contract import (
    Backend,
    Factory,
    Host,
    Option,
    OtherBackend,
    announced,
    complete,
    ports,
    read_options,
    with_also,
)
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.network.xfrm import XfrmPolicy
from flanneld.state.resources import Kind, Link, Resource
from flanneld.state.table import Table

#: Option in ``Backend.Also``: reach peers without encryption though ``Backend.Type`` encrypts.
ALLOW_CLEAR = "AllowUnencryptedPeers"


def beside(make_first: Factory, make_second: Factory) -> Factory:
    """Return a factory for a node with two backends. The network config has options for both."""

    def make(config: Config, host: Host) -> Switching:
        other = config.also
        assert other is not None
        identities = host.identity or (None, None)
        first, second = (
            complete(factory(each, _host_for(each, host, identity)))
            for factory, each, identity in zip(
                (make_first, make_second), (config, other), identities, strict=True
            )
        )
        refuse_pair((config, first), (other, second))
        return Switching(config.backend_type, first, second, **read_options(other, Switching.options))

    return make


def _host_for(config: Config, host: Host, identity: Any) -> Host:
    """Return the facts for one backend, with its own identity and its former attributes."""
    stored = announced(host.stored, config.backend_type) if host.stored else None
    return replace(host, identity=identity, stored=stored or host.stored, is_shared=True)


def refuse_pair(*pair: tuple[Config, Backend | type[Backend]]) -> None:
    """Raise ``Fatal`` for two backends that cannot run on one node. Their classes tell it, too."""
    remedy = "choose another type there, or remove Backend.Also and switch all nodes at once"
    one, other = (config.backend_type for config, _ in pair)
    if one == other:
        raise Fatal(f"Backend.Type and Backend.Also.Type are both {one}", remedy)
    for each, backend in pair:
        if backend.stands_alone or not backend.has_peers:
            raise Fatal(f"{each.backend_type} cannot run beside another one, as Backend.Also asks", remedy)
    kinds = [each if isinstance(each, type) else type(each) for _, each in pair]
    with_tables = [
        each for (_, each), kind in zip(pair, kinds, strict=True) if kind.tables is not Backend.tables
    ]
    if len({each.exit_policy for each in with_tables}) > 1:
        raise Fatal(f"{one} and {other} differ in what is removed when the daemon ends", remedy)
    taken = [{port for _, port in ports(backend, config) if port} for config, backend in pair]
    if common := taken[0] & taken[1]:
        raise Fatal(
            f"{one} and {other} both use UDP port {min(common)}", "choose another port for one of them"
        )


class Switching(Backend):
    """Pair of backends: ``first`` leads to each peer that announces it, ``second`` to the others.

    If only ``first`` encrypts, peers that do not announce it are refused, unless ``allows_clear``.
    """

    options = (Option(ALLOW_CLEAR, "allows_clear", False),)
    switches = True

    def __init__(self, first_type: str, first: Backend, second: Backend, *, allows_clear: bool) -> None:
        self._type = first_type
        self._first = first
        self._second = second
        self._refuses_clear = first.encrypts and not second.encrypts and not allows_clear
        self.encrypts = first.encrypts
        self.exit_policy = (first if first.gives("tables") else second).exit_policy

    @property
    def mtu(self) -> int:
        """Smaller MTU of both backends."""
        return min(self._first.mtu, self._second.mtu)

    def identity(self) -> tuple[Any, Any]:
        return self._first.identity(), self._second.identity()

    def claims(self) -> tuple[str, ...]:
        return (*self._first.claims(), *self._second.claims())

    def attributes(self) -> LeaseAttrs:
        return with_also(self._first.attributes(), self._second.attributes())

    def is_self(self, attrs: LeaseAttrs, /) -> bool:
        """Return the answer of the backend that recognizes itself by more than the public IP."""
        second = self._second.gives("is_self") and not self._first.gives("is_self")
        return (self._second if second else self._first).is_self(attrs)

    def tables(self) -> tuple[Table, ...]:
        return (*self._first.tables(), *self._second.tables())

    def clear_devices(self, own: Lease, /) -> frozenset[str]:
        """Return the devices that may lead to peers of an encrypted network only during the switch."""
        if not self.encrypts or self._second.encrypts:
            return frozenset()
        return frozenset(each.name for each in self._second.local(own) if isinstance(each, Link))

    def local(self, own: Lease, /) -> Iterator[Resource]:
        yield from self._first.local(own)
        yield from _without_ways(self._second.local(own))

    def peer(self, own: Lease, lease: Lease, /) -> Iterator[Resource]:
        try:
            yield from self._first.peer(own, lease)
        except OtherBackend:
            yield from self._by_second(own, lease)
            return
        try:
            yield from _without_ways(self._second.peer(own, lease))
        except OtherBackend:
            return

    def _by_second(self, own: Lease, lease: Lease) -> tuple[Resource, ...]:
        resources = tuple(self._second.peer(own, lease))
        if self._refuses_clear:
            raise OtherBackend(
                f"{lease} does not announce {self._type}, and would be reached unencrypted",
                f"give its node the config with Backend.Also, or set {ALLOW_CLEAR} there until it has it",
            )
        return resources


def _without_ways(resources: Iterable[Resource]) -> Iterator[Resource]:
    """Yield the resources by which packets arrive, without those that decide how packets leave."""
    for each in resources:
        if each.kind is not Kind.ROUTE and not (isinstance(each, XfrmPolicy) and each.leads):
            yield each
