"""Upkeep of host settings beside the network: subnet.env, the CNI configuration, the kernel's forwarding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld.model import Family
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.reconcile.permits import everything
from flanneld.reconcile.worker import Worker
from flanneld.runtime import clock
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.desired import Delta
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable

if TYPE_CHECKING:
    from flanneld.subnet.cni_conf import CniConfTable  # few daemons have one

_NAME = "host"


class HostUpkeep:
    """Worker for the subnet file and the forwarding of ``families``; ``uplink`` returns the interface."""

    def __init__(
        self,
        path: Path,
        families: tuple[Family, ...],
        uplink: Callable[[], str],
        supervisor: Supervisor,
        *,
        keep_forwarding: bool,
        on_write: Callable[[], None],
        cni: CniConfTable | None = None,
    ) -> None:
        self._cni = cni
        self._path = path
        self._supervisor = supervisor
        self._desired: dict[Key, Resource] = {}
        self._is_running = False
        self._forwarding = KernelForwardingTable(families, uplink, keep=keep_forwarding)
        self.worker = Worker(
            _NAME,
            [SubnetFileTable(path, on_write), *filter(None, [cni]), self._forwarding],
            stop=supervisor.stop,
            heartbeat=partial(supervisor.heartbeat, _NAME),
            converged=set(),
        )

    def write(self, env: SubnetEnv) -> None:
        """Set the contents of the files: written at once before ``start``, by the thread after it."""
        self._want(SubnetEnvFile.of(self._path, env), *([self._cni.desired(env)] if self._cni else ()))

    def start(self) -> None:
        """Continue in a thread of its own, and maintain forwarding from now on."""
        self._want(*self._forwarding.desired)
        self._is_running = True
        self._supervisor.start(_NAME, self.worker.run, self.worker.cancel)

    def _want(self, *resources: Resource) -> None:
        self._desired |= {resource.key: resource for resource in resources}
        whole = Delta(tuple(map(Put, self._desired.values())))
        self.worker.send(whole, everything(), whole=True)
        if not self._is_running:
            self.worker.step(clock.now())

    @property
    def file_problem(self) -> str:
        """Reason why the subnet file does not hold what it should; empty if it does."""
        (state,) = (each for each in self.worker.reconciler.states() if each.name == subnet_file.TABLE)
        return "" if state.settled else state.trouble
