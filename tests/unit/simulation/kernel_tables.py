"""Tables over the model of a kernel, as the daemon has them over rtnetlink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    Blackhole,
    FdbEntry,
    ForeignLink,
    Key,
    Link,
    Neighbor,
    Resource,
    RivalRoute,
    Route,
    Vxlan,
)
from flanneld.state.table import Claim, Failure, Put, Report, Scope, Seen
from tests.unit.simulation.kernel import EEXIST, ENOENT, Kernel, KernelError, KernelRoute

_KERNELS = 2


class KernelTable:
    """``Table`` over one part of a kernel."""

    name = ""
    worker = "kernel"
    vital = True
    needs: frozenset[str] = frozenset({"links"})

    def __init__(self, kernel: Kernel, left: Callable[[], Iterable[Link]] = tuple) -> None:
        self._kernel = kernel
        self._left = left
        self.what = f"the {self.name}"
        self.audit: float | None = 30.0
        self.unreadable = False
        self.writes = 0

    def read(self, scope: Scope) -> Iterable[Seen]:
        if self.unreadable:
            raise Retryable("the dump was interrupted")
        return list(self._seen(scope))

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            self._kernel.before_write()
            try:
                self._put(put)
            except KernelError as refusal:
                report.failed.append(Failure(put.want, str(refusal), is_taken=str(refusal) == EEXIST))
            else:
                self.writes += 1
                self._kernel.log(f"wrote {put.want}")
                self._kernel.after_write()
                report.made.append(put.want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        for each in found:
            self._kernel.before_write()
            try:
                self._drop(each)
            except KernelError:
                continue  # it is gone already
            self.writes += 1
            self._kernel.log(f"removed {each}")
            self._kernel.after_write()
            report.removed.append(each)
        return report

    def close(self, *, remove: bool) -> None:
        del remove

    def _claim(self, device: str) -> Claim:
        return Claim.OURS if device in self._kernel.domain.links else Claim.FOREIGN

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        raise NotImplementedError

    def _put(self, put: Put) -> None:
        raise NotImplementedError

    def _drop(self, resource: Resource) -> None:
        raise NotImplementedError


class Links(KernelTable):
    name = "links"
    needs = frozenset()

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        left = {link.name for link in self._left()}
        for seen in self._kernel.links():
            is_wanted = seen.make.key in scope.desired
            if isinstance(seen.make, ForeignLink):
                yield Seen(seen.make, Claim.FOREIGN)
            elif is_wanted:
                yield Seen(seen.make)
            elif seen.name in left:
                yield Seen(seen.make, Claim.LEFT)

    def _put(self, put: Put) -> None:
        want, actual = put.want, self._kernel.link(put.want.key[1])  # type: ignore[arg-type]
        assert isinstance(want, Link)
        if actual is None:
            renamed = self._under_another_name(want) if isinstance(want, Vxlan) else None
            if renamed is None:
                self._kernel.add_link(want)
                return
            self._kernel.rename_link(renamed.name, want.name)
            actual = self._kernel.link(want.name)
            assert actual is not None
        there = actual.make
        if isinstance(there, ForeignLink):
            raise KernelError(EEXIST)
        if there == want:
            return
        if type(there) is type(want) and replace(there, mtu=want.mtu, up=want.up) == want:
            self._kernel.set_link(want)
            self._kernel.set_up(want.name)
            return
        self._kernel.delete_link(want.name)
        self._kernel.add_link(want)

    def _under_another_name(self, want: Vxlan) -> Vxlan | None:
        for each in self._kernel.devices.values():
            if isinstance(each, Vxlan) and (each.vni, each.port, each.local) == (
                want.vni,
                want.port,
                want.local,
            ):
                return each
        return None

    def _drop(self, resource: Resource) -> None:
        assert isinstance(resource, Link)
        self._kernel.delete_link(resource.name)


class Addresses(KernelTable):
    name = "addresses"

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        domain = self._kernel.domain
        for device, address, length in self._kernel.addresses_held.values():
            if device in domain.links and length == address.max_prefixlen:
                is_ours = domain.owns_address(address, adopt=scope.adopt)
                yield Seen(Address(device, address), Claim.OURS if is_ours else Claim.FOREIGN)

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, Address)
        self._kernel.add_address(put.want.device, put.want.address, put.want.address.max_prefixlen)

    def _drop(self, resource: Resource) -> None:
        assert isinstance(resource, Address)
        self._kernel.delete_address(resource.device, resource.address)


class Neighbors(KernelTable):
    name = "neighbors"

    @property
    def _held(self) -> dict[Key, Neighbor] | dict[Key, FdbEntry]:
        return self._kernel.neighbors

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        del scope
        for entry in self._held.values():
            yield Seen(entry, self._claim(entry.device))

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, Neighbor)
        self._kernel.replace_neighbor(put.want)

    def _drop(self, resource: Resource) -> None:
        if self._held.pop(resource.key, None) is None:
            raise KernelError(ENOENT)


class Fdb(Neighbors):
    name = "fdb"

    @property
    def _held(self) -> dict[Key, Neighbor] | dict[Key, FdbEntry]:
        return self._kernel.fdb

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, FdbEntry)
        self._kernel.replace_fdb(put.want)


class Routes(KernelTable):
    name = "routes"

    def __init__(self, kernel: Kernel, left: Callable[[], Iterable[Link]] = tuple) -> None:
        super().__init__(kernel, left)
        #: What this run has made or taken over.
        self._ours: set[Key] = set()

    def _seen(self, scope: Scope) -> Iterator[Seen]:
        """Yield the first route to each prefix, and one of ours behind it that is not wanted."""
        for guard in self._kernel.blackholes.values():
            is_ours = self._kernel.domain.owns_blackhole(guard, adopt=scope.adopt)
            yield Seen(guard, Claim.OURS if is_ours else Claim.FOREIGN)
        for by_network in self._kernel.routes.values():
            for there in by_network.values():
                found = [each for each in there if each.metric == 0]
                for held in found[:1]:
                    yield self._what(held, scope)
                for held in found[1:]:
                    if self._kernel.owns(held, adopt=scope.adopt) and held.route.key not in scope.desired:
                        yield self._what(held, scope)

    def _what(self, held: KernelRoute, scope: Scope) -> Seen:
        if held.protocol == _KERNELS and held.route.device not in self._kernel.domain.links:
            return Seen(RivalRoute(held.route.key, is_connected=True), Claim.FOREIGN)
        if not self._kernel.owns(held, adopt=scope.adopt):
            return Seen(held.route, Claim.FOREIGN)
        self._ours.add(held.route.key)
        return Seen(held.route)

    def _put(self, put: Put) -> None:
        """Replace what stands there if this run made it, or take one of ours to the front."""
        want = put.want
        if isinstance(want, Blackhole):
            self._kernel.blackholes[want.key] = want
            return
        assert isinstance(want, Route)
        there = [each for each in self._kernel.at(want.destination) if each.metric == 0]
        ours = [each for each in there if self._kernel.owns(each, adopt=want.key in self._ours)]
        if not there or put.was is None or (put.claim is None and want.key not in self._ours):
            self._add(want)
        elif ours and there[0] not in ours:
            for each in ours:
                self._kernel.delete_route(each.route)
            self._add(want, in_front=True)
        elif want.key in self._ours:
            self._add(want, over=True)
        else:
            raise KernelError(f"{put.was} stands there and is not flannel's")
        self._ours.add(want.key)

    def _add(self, want: Route, *, over: bool = False, in_front: bool = False) -> None:
        protocol = PROTO_BOOT if want.device in self._kernel.domain.links else PROTO_FLANNEL
        self._kernel.add_route(want, protocol, over=over, in_front=in_front)

    def _drop(self, resource: Resource) -> None:
        """One that another program made just as we would have stays."""
        if isinstance(resource, Blackhole):
            del self._kernel.blackholes[resource.key]
            return
        assert isinstance(resource, Route)
        if resource.key not in self._ours:
            raise KernelError(ENOENT)
        self._kernel.delete_route(resource)
        self._ours.discard(resource.key)


_TABLES = (Links, Addresses, Neighbors, Fdb, Routes)


def tables(kernel: Kernel, left: Callable[[], Iterable[Link]] = tuple) -> dict[str, KernelTable]:
    """Return the tables of a kernel in the order of making; ``left`` names devices of earlier runs."""
    return {table.name: table(kernel, left) for table in _TABLES}


def by_table(resources: Iterable[Resource]) -> dict[str, dict[Key, Resource]]:
    """Return a part of the desired state for each table."""
    state: dict[str, dict[Key, Resource]] = {table.name: {} for table in _TABLES}
    for resource in resources:
        state[str(resource.key[0])][resource.key] = resource
    return state
