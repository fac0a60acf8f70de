"""Files and settings under test, which outlive the daemon."""

from __future__ import annotations

import tempfile
from ipaddress import IPv4Network
from pathlib import Path

from flanneld.network.host_settings import KernelForwardingTable
from flanneld.subnet.cni_conf import CniConfTable
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable
from tests.lab.namespace import Namespace
from tests.netns.conformance.host import OnHost

ENV = SubnetEnv((IPv4Network("10.1.0.0/16"),), (IPv4Network("10.1.5.0/24"),), 1450, ip_masq=True)


class SubnetFile(OnHost):
    """The file from which container runtimes take this node's subnet."""

    lasts = writes_anew = True
    can_be_blind = False

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        self._path = Path(self._directory.name) / "subnet.env"
        self.resources = [SubnetEnvFile.of(self._path, ENV)]
        self.drifts = (
            f"rm {self._path}",
            f"echo FLANNEL_MTU=9000 >>{self._path}",
            f"echo FLANNEL_MTU=9000 >{self._path}.new; mv {self._path}.new {self._path}",
            f"ln -sf /dev/null {self._path}",
        )
        self.foreign = (f"echo FLANNEL_MTU=1400 >{self._directory.name}/blue.env",)
        self.shows_foreign = f"cat {self._directory.name}/blue.env"

    def make(self) -> SubnetFileTable:
        return SubnetFileTable(self._path)

    def close(self) -> None:
        self._directory.cleanup()


class CniConfFile(OnHost):
    """The file from which container runtimes take their network."""

    lasts = True
    can_be_blind = False

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        self._path = Path(self._directory.name) / "10-flannel.conflist"
        self.resources = [self.make().desired(ENV)]
        # Two: a third would be given way to.
        self.drifts = (f"rm {self._path}", f"ln -sf /dev/null {self._path}")
        self.foreign = (f"echo '{{}}' >{self._directory.name}/20-other.conflist",)
        self.shows_foreign = f"cat {self._directory.name}/20-other.conflist"

    def make(self) -> CniConfTable:
        template = {"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}
        return CniConfTable(self._path, template, Path("/usr/lib/cni"))

    def close(self) -> None:
        self._directory.cleanup()


class Forwarding(OnHost):
    """The kernel's switch of each family."""

    lasts = True
    can_be_blind = False
    drifts = ("sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv6.conf.all.forwarding=0")

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self.resources = self._table().desired

    def make(self) -> KernelForwardingTable:
        return self._table()

    def _table(self) -> KernelForwardingTable:
        return KernelForwardingTable((4, 6), lambda: "up0", keep=True)
