"""A Kubernetes API server in a namespace, and what a daemon needs to find it and to be let in."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.lab.credentials import make_certificates, write_kubeconfig, write_service_account
from tests.lab.forks import KUBE_API
from tests.lab.kube_api.calls import remote
from tests.lab.kube_api.control import Control, Object
from tests.lab.namespace import Namespace
from tests.lab.node import Node
from tests.lab.wait import wait_for

PORT = 6443
TOKEN = "flannel-token"  # good from the start, with no more rights than upstream's ClusterRole gives


class Kube:
    """One API server. Its objects outlive ``stop``, ``kill`` and another ``start``; the history does not.

    Without TLS whoever has no token may do what flannel may; with it he may do nothing. Tests read and write
    its objects, order faults and look at requests through ``control``.
    """

    control: Control

    def __init__(self, namespace: Namespace, address: str, directory: Path) -> None:
        self.namespace = namespace
        self.address = address
        self._directory = directory / "kube"
        self._directory.mkdir()
        self._log = directory / "kube.log"
        self._tls = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, tls: bool | None = None) -> None:
        """Start and wait until it answers; ``tls`` None leaves that as it was.

        Flags: ``--version=N`` makes resource versions go on from N at least, ``--window=N`` keeps N changes.
        """
        self._tls = self._tls if tls is None else tls
        socket = self._directory / "control"
        socket.unlink(missing_ok=True)
        own = [f"--address={self.address}", f"--port={PORT}", f"--control={socket}", f"--token={TOKEN}"]
        own += [f"--journal={self._directory / 'journal'}"]
        own += ["--anonymous=nobody" if self._tls else "--anonymous=flannel"]
        if self._tls:
            own += [f"--certificates={make_certificates(self._directory, self.address)}"]
        with self._log.open("ab") as output:
            self._process = self.namespace.start(*KUBE_API, *own, *flags, output=output)

        def listens() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the API server ended:\n{self.log()[-2000:]}"
            return socket.exists()

        wait_for(listens, 10, "the API server to listen")
        self.control = remote(socket)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process and wait for it."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def kill(self) -> None:
        """End it as a power failure would."""
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and start it again with the same objects and an empty history."""
        self.stop(how)
        self.start()

    def forget(self) -> None:
        """Lose all objects, while it is stopped."""
        (self._directory / "journal").unlink(missing_ok=True)

    def back_up(self) -> None:
        """Copy all objects with their versions, for ``restore``."""
        shutil.copy(self._directory / "journal", self._directory / "backup")

    def restore(self) -> None:
        """Have the objects of the last backup, and its version, while it is stopped."""
        shutil.copy(self._directory / "backup", self._directory / "journal")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Make it take connections and requests, and say nothing, for a while."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def add(self, node: Node, *pod_cidrs: str, annotations: Mapping[str, str] | None = None) -> Object:
        """Make the object of a node of the lab; its podCIDR is 10.5.<number>.0/24 by default."""
        cidrs = pod_cidrs or (f"10.5.{node.number}.0/24",)
        return self.control.put_node(node.name, *cidrs, annotations=annotations, address=node.address)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.address}:{PORT}"

    def flags(self) -> list[str]:
        """Flags for a daemon that needs no credentials, which is so without TLS."""
        return ["--kube-subnet-mgr", f"--kube-api-url={self.url}"]

    def kubeconfig(self, path: Path, token: str = TOKEN) -> Path:
        """Write a kubeconfig file with this token."""
        write_kubeconfig(path, self.url, token, self._ca)
        return path

    def service_account(self, folder: Path, token: str = TOKEN) -> Path:
        """Write what a pod finds of its service account, or rotate it; see ``as_pod`` and ``in_cluster``."""
        write_service_account(folder, token, self._ca)
        return folder

    def in_cluster(self) -> dict[str, str]:
        """The variables that tell a pod where the API server is."""
        return {"KUBERNETES_SERVICE_HOST": self.address, "KUBERNETES_SERVICE_PORT": str(PORT)}

    @property
    def _ca(self) -> Path | None:
        return self._directory / "ca.crt" if self._tls else None
