"""Network namespaces: made, entered, asked and removed here and nowhere else."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.lab.forks import Forked, can_fork
from tests.lab.wait import wait_for

RUN = Path("/run/netns")
CLONE_NEWNET = 0x40000000  # linux/sched.h

#: What ``ip`` and ``bridge`` say of a device that is not there, or goes while they look.
_NO_DEVICE = ("does not exist", "Cannot find device", "No such device")

_libc = ctypes.CDLL(None, use_errno=True)


#: Variables with settings of the tests.
_OF_TESTS = ("FLANNELD_TEST_", "FLANNELD_COMMAND", "FLANNELD_PEER")

#: Beginnings of programs that do not look at /sys. ``ip -n`` and ``ip netns exec`` mount it for a namespace,
#: which takes four times as long as most of what is asked.
_BLIND = ("ip", "bridge", "nft", "ping", "ss")


class CommandError(Exception):
    """A command failed or never ended; the message holds what it wrote to stderr."""


def run(
    *command: str,
    check: bool = True,
    timeout: float = 60,
    stdin: str = "",
    variables: Mapping[str, str] | None = None,
    namespace: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run to the end; raises ``CommandError`` unless ``check`` is off, and after ``timeout`` seconds.

    ``variables`` come before the caller's.
    """
    # A daemon warns of variables that look like its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with _begun(command, namespace, {**(variables or {}), **environment}, text=True, **pipes) as process:
        try:
            output, errors = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{' '.join(command)}: still runs after {timeout:g} s") from error
        finally:
            process.kill()
    if check and process.returncode != 0:
        raise CommandError(f"{' '.join(command)}: status {process.returncode}: {(errors or output).strip()}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _begun(
    command: tuple[str, ...], namespace: str, environment: dict[str, str] | None, **files: Any
) -> subprocess.Popen[Any]:
    """Start a process in a namespace if one is named."""
    if namespace and can_fork(command, os.environ if environment is None else environment):
        return Forked(namespace, command, env=environment, **files)
    if namespace and command[0].startswith(_BLIND):
        with Namespace(namespace).entered():
            return subprocess.Popen(command, env=environment, **files)
    inside = ["ip", "netns", "exec", namespace, *command] if namespace else command
    return subprocess.Popen(inside, env=environment, **files)


def batch(*lines: str) -> None:
    """Run several ``ip`` commands in one process; the first failure ends it and raises."""
    run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A named network namespace, visible to ``ip netns`` while it exists."""

    name: str

    def exists(self) -> bool:
        return (RUN / self.name).exists()

    def ip(self, *lines: str) -> None:
        """Run ``ip`` commands in here, one a line, without the leading ``ip``."""
        self.run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")

    def add_default_route(self, gateway: str) -> None:
        """Add it as soon as the device has a carrier, without which IPv6 knows no way to the gateway."""

        def is_added() -> bool:
            return self.run("ip", "route", "add", "default", "via", gateway, check=False).returncode == 0

        wait_for(is_added, what=f"a way from {self.name} to its gateway {gateway}")

    def sysctl(self, path: str, value: int) -> None:
        """Set ``net/ipv4/ip_forward`` and the like, for this namespace alone."""
        with self.entered():
            Path("/proc/sys", path).write_text(f"{value}\n")

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout: float = 60,
        stdin: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in here to its end; raises ``CommandError`` unless ``check`` is off."""
        return run(
            *command, check=check, timeout=timeout, stdin=stdin, variables=variables, namespace=self.name
        )

    def start(
        self, *command: str, output: IO[bytes], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in here; both its streams go to ``output``. Its pid is the command's own."""
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return _begun(command, self.name, environment, **files)

    def json(self, *command: str) -> list[dict[str, Any]]:
        """What ``ip -j ...`` or ``bridge -j ...`` says, ``[]`` about a device that does not exist."""
        done = self.run(*command, check=False)
        if done.returncode != 0:
            if any(words in done.stderr for words in _NO_DEVICE):
                return []
            raise CommandError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return [row for row in json.loads(done.stdout or "[]") if row]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread in here for a moment; a socket opened meanwhile stays in here."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(RUN / self.name, os.O_RDONLY)
            try:
                _setns(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _setns(home)
        finally:
            os.close(home)


def _setns(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}; the lab needs root")


def named(prefix: str) -> list[Namespace]:
    """The namespaces whose name starts so."""
    return [Namespace(path.name) for path in sorted(RUN.glob(f"{prefix}*"))]


def inhabitants(namespaces: Iterable[Namespace]) -> list[int]:
    """The processes that live in any of these, never this one."""
    inodes = {(RUN / namespace.name).stat().st_ino for namespace in namespaces}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "ns/net").stat().st_ino in inodes and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def suspend(pid: int) -> None:
    """Stop a process. SIGSTOP alone returns early: a thread in a system call finishes that first."""
    os.kill(pid, signal.SIGSTOP)

    def is_stopped() -> bool:
        stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(") ")[2].startswith(("T", "Z")) for stat in stats)

    wait_for(is_stopped, what=f"process {pid} to stop")


def remove(namespaces: list[Namespace]) -> None:
    """Kill who lives in them, by pid, and remove them with all they hold."""
    if not namespaces:
        return

    def emptied() -> bool:
        pids = inhabitants(namespaces)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_for(emptied, 10, "the processes of the lab to die")
    batch(*(f"netns del {namespace.name}" for namespace in namespaces))
