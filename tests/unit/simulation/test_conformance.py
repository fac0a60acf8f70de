"""The model of a kernel holds what the conformance suite expects of the real one, by the same commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.state.resources import ForeignLink, Link, Route, Vxlan
from flanneld.state.table import Table
from tests.conformance.suite import PROPERTIES, Subject, after_any_history_all_is_as_wanted
from tests.netns.conformance import kernel as real_kernel
from tests.netns.conformance.host import OnHost
from tests.netns.conformance.subjects import SUBJECTS
from tests.unit.simulation import commands
from tests.unit.simulation.kernel import Kernel, KernelError
from tests.unit.simulation.kernel_tables import KernelTable, tables

_LINKS = (
    Vxlan("vx4", 1, 2, ip_address("192.0.2.1"), 8472, "02:00:00:00:00:04", 1450),
    Vxlan("vx6", 1, 2, ip_address("fd77::1"), 8472, "02:00:00:00:00:06", 1430, cpu_checksums=True),
)


def host() -> Kernel:
    """Return a host as that of the suite on real kernels."""
    kernel = Kernel("up0", (ip_address("192.0.2.1"), 24), (ip_address("fd77::1"), 64))
    kernel.domain = real_kernel.DOMAIN
    kernel.add_link(ForeignLink(commands.OTHER_KIND, "loopback"))
    kernel.add_link(Vxlan("other0", 9, 0, ip_address("192.0.2.1"), 4789, "02:00:00:00:00:09", 1450))
    for link in _LINKS:
        kernel.add_link(link)
    return kernel


class OfModel(Subject):
    """The subject of a real kernel, on the model."""

    def __init__(self, name: str, real: type[OnHost]) -> None:
        self.kernel = host()
        self._name = name
        self.resources = _LINKS if name == "links" else real.resources
        self.drifts = real.drifts
        self.foreign = real.foreign

    def make(self) -> Table:
        def left() -> list[Link]:
            return [each for each in self.kernel.devices.values() if each.name in real_kernel.OURS]  # type: ignore[misc]

        return tables(self.kernel, left)[self._name]

    def do(self, command: str, *, check: bool = True) -> str:
        try:
            commands.run(self.kernel, command)
        except KernelError:
            if check:
                raise
        return ""

    def show_foreign(self) -> str:
        """Show all that is not on a device of ours, and foreign addresses there."""
        kernel, ours = self.kernel, real_kernel.OURS
        held = [
            *(each for name, each in kernel.devices.items() if name not in ours),
            *(
                each
                for each in kernel.addresses_held.values()
                if each[0] not in ours or not kernel.domain.owns_address(each[1], adopt=False) or each[2] < 32
            ),
            *(each for each in kernel.neighbors.values() if each.device not in ours),
            *(each for each in kernel.fdb.values() if each.device not in ours),
            *(each for each in kernel.all_routes() if not kernel.owns(each)),
        ]
        return "\n".join(sorted(map(str, held)))

    def clear(self) -> None:
        for each in self.resources:
            assert isinstance(each, Route)
            there = self.kernel.at(each.destination)
            there[:] = [held for held in there if held.metric or self.kernel.owns(held)]

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        assert isinstance(table, KernelTable)
        table.unreadable = True
        yield


MODELLED: dict[str, tuple[str, type[OnHost]]] = {
    "links": ("links", real_kernel.Links),
    "addresses": ("addresses", real_kernel.Addresses),
    "neighbors": ("neighbors", real_kernel.Neighbors),
    "fdb": ("fdb", real_kernel.Fdb),
    "tunnelled routes": ("routes", real_kernel.TunnelledRoutes),
    "direct routes": ("routes", real_kernel.DirectRoutes),
}
#: What no backend of a simulated cluster has: devices of other kinds, and the guards of encrypted networks.
NOT_MODELLED = {"TUN device", "dummy device", "ipip device", "WireGuard device", "guard routes"}
each_table = pytest.mark.parametrize("name", MODELLED)


@each_table
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda each: each.__name__)
def test_model_is_a_table_as_the_reconciler_expects(name: str, holds: Callable[[Subject], None]) -> None:
    holds(OfModel(*MODELLED[name]))


@each_table
@given(data=st.data())
def test_model_is_as_wanted_after_any_history(name: str, data: st.DataObject) -> None:
    after_any_history_all_is_as_wanted(OfModel(*MODELLED[name]), data)


def test_each_table_of_the_kernel_is_modelled() -> None:
    known = {name for name, subject in SUBJECTS.items() if issubclass_of_kernel(subject)}
    assert MODELLED.keys() | NOT_MODELLED == known


def issubclass_of_kernel(subject: object) -> bool:
    return isinstance(subject, type) and issubclass(subject, real_kernel.OfKernel)
