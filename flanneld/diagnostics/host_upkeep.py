"""Upkeep of host settings beside the network: subnet.env, the CNI configuration, the kernel's forwarding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld.model import Family
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.reconcile.permits import everything
from flanneld.reconcile.worker import Worker
from flanneld.runtime import clock
from flanneld.runtime.loop import MakeLoop
from flanneld.state.desired import Delta
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put, Table
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable

if TYPE_CHECKING:
    from flanneld.subnet.cni_conf import CniConfTable  # few daemons have one


class HostUpkeep(Worker):
    """Worker for the subnet file and the forwarding of ``families``; ``uplink`` returns the interface."""

    def __init__(
        self,
        path: Path,
        families: tuple[Family, ...],
        uplink: Callable[[], str],
        *,
        stop: threading.Event,
        make_loop: MakeLoop,
        keep_forwarding: bool,
        on_write: Callable[[], None],
        cni: CniConfTable | None = None,
    ) -> None:
        self._cni = cni
        self._path = path
        self._wanted: dict[Key, Resource] = {}
        self._is_running = False
        self._forwarding = KernelForwardingTable(families, uplink, keep=keep_forwarding)
        tables: list[Table] = [SubnetFileTable(path, on_write), *filter(None, [cni]), self._forwarding]
        super().__init__("host", tables, stop=stop, make_loop=make_loop)

    def write(self, env: SubnetEnv) -> None:
        """Set the contents of the files: written at once before ``maintain``, by the thread after it."""
        self._want(SubnetEnvFile.of(self._path, env), *([self._cni.desired(env)] if self._cni else ()))

    def maintain(self) -> None:
        """Switch forwarding on and keep it so; from now on a thread steps."""
        self._want(*self._forwarding.desired)
        self._is_running = True

    def _want(self, *resources: Resource) -> None:
        self._wanted |= {resource.key: resource for resource in resources}
        self.send(Delta(tuple(map(Put, self._wanted.values()))), everything(), whole=True)
        if not self._is_running:
            self.step(clock.now())

    @property
    def file_problem(self) -> str:
        """Reason why the subnet file does not hold what it should; empty if it does."""
        (state,) = (each for each in self.states() if each.name == subnet_file.TABLE)
        return "" if state.settled else state.trouble
