"""Own programs, forked from a process that has their modules loaded: that saves half of a test's CPU time.

A forked program differs from one that was started in nothing but the modules that it finds loaded. It is the
caller's child, with its own name, arguments, environment, folder and open files. Tests of a start itself
use ``exact``. With ``FLANNELD_TEST_FORKS=0``, as with ``tests/run --long``, all programs are started.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The command of the lab's API server.
KUBE_API = (sys.executable, "-m", "tests.lab.kube_api")
#: The first words of each program's command, and the module whose ``main`` it runs.
PROGRAMS = {
    (str(ROOT / ".venv/bin/flanneld"),): "flanneld.__main__",
    (str(ROOT / ".venv/bin/flannelctl"),): "flanneld.ctl.main",
    KUBE_API: "tests.lab.kube_api.__main__",
}
#: Variable that is 0 if all programs are to be started.
FORKS = "FLANNELD_TEST_FORKS"
#: Gives a command a /run of its own, whose files are in the folder that comes next.
OWN_RUN = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /run && exec "$@"')
#: Gives it a firmware with the UUID that comes next: on this machine all nodes have one, or none.
OWN_UUID = (
    *("unshare", "-m", "sh", "-c"),
    "mount -t tmpfs none /sys/class && mkdir -p /sys/class/dmi/id"
    ' && echo "$0" > /sys/class/dmi/id/product_uuid && exec "$@"',
)
#: Modules with large libraries, some of which start threads.
_APART = (".aws", ".gce", ".ali", ".tencent", ".grpc", ".__main__", "._udp_pump")
#: Libraries that are imported where they are used.
_LAZY = ("kubernetes.client.exceptions", "kubernetes.config.kube_config", "prometheus_client")
# asm/unistd.h, linux/sched.h, linux/mount.h, linux/prctl.h
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CLONE_NEWNS, _CLONE_NEWNET = 0x8000, 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 1 << 19, 2
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_LONGEST = 1 << 20  # bytes of a request

_libc = ctypes.PyDLL(None, use_errno=True)
_lock = threading.Lock()
#: The process that made it, its end of the connection to the one that forks, and that one.
_forker: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None


@contextmanager
def exact() -> Iterator[None]:
    """Start programs as an operator does."""
    before = os.environ.get(FORKS, "1")
    os.environ[FORKS] = "0"
    try:
        yield
    finally:
        os.environ[FORKS] = before


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True for an own program whose variables do not concern the interpreter."""
    own, *_ = _parsed(command)
    differ = environment.items() ^ os.environ.items()
    of_interpreter = any(name.startswith(("PYTHON", "LD_")) for name, _ in differ)
    can = os.environ.get(FORKS) != "0" and os.uname().machine in _SYS_CLONE
    return can and bool(_program(own)) and not of_interpreter


def _program(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of ``PROGRAMS`` with which a command begins."""
    return next((words for words in PROGRAMS if tuple(command[: len(words)]) == words), ())


def _parsed(command: Sequence[str]) -> tuple[list[str], str, str]:
    """Return a command, and the folder of ``OWN_RUN`` and the UUID of ``OWN_UUID`` before it."""
    own, given = list(command), {OWN_RUN: "", OWN_UUID: ""}
    for words in given:
        if tuple(own[: len(words)]) == words:
            given[words], own = own[len(words)], own[len(words) + 1 :]
    return own, given[OWN_RUN], given[OWN_UUID]


class Forked(subprocess.Popen[Any]):
    """A program in a network namespace, as after ``ip netns exec``."""

    def __init__(self, namespace: str, command: Sequence[str], **rest: Any) -> None:
        self._namespace = namespace
        super().__init__(command, **rest)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        # The order of Popen's own arguments since Python 3.2; -1 stands for the caller's file.
        environment, ends = rest[5], rest[9:15]
        files = [own if end == -1 else end for own, end in enumerate((ends[0], ends[3], ends[5]))]
        command, run, uuid = _parsed(args)
        request = {
            "namespace": self._namespace,
            "command": command,
            "run": run,
            "uuid": uuid,
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
        }
        try:
            self.pid = _ask(json.dumps(request).encode(), files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _ask(request: bytes, files: list[int]) -> int:
    """Have a program forked; return its pid."""
    global _forker
    with _lock:
        if _forker is None or _forker[0] != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            program = f"from tests.lab import forks; forks.main({theirs.fileno()})"
            process = subprocess.Popen(
                (sys.executable, "-c", program),
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            _forker = os.getpid(), ours, process
        control = _forker[1]
        socket.send_fds(control, [request], files)
        answer = control.recv(64)
    if not answer:
        raise ChildProcessError("the process that forks programs has ended")
    return int(answer)


# ---- in the process that forks ---------------------------------------------------------------------


def _load() -> None:
    """Import all that a program may, before there is any thread."""
    import flanneld

    for module in pkgutil.walk_packages(flanneld.__path__, "flanneld."):
        if not module.name.endswith(_APART):
            importlib.import_module(module.name)
    importlib.import_module(PROGRAMS[KUBE_API])
    for name in _LAZY:
        with suppress(ImportError):
            importlib.import_module(name)
    assert threading.active_count() == 1


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork a program for each request; return it in the new process."""
    while True:
        data, files, _, _ = socket.recv_fds(control, _LONGEST, 3)
        if not data:
            os._exit(0)
        if pid := _fork_for_parent():
            for file in files:
                os.close(file)
            control.send(str(pid).encode())
            continue
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 1024)
        control.detach()
        request: dict[str, Any] = json.loads(data)
        return request


def _fork_for_parent() -> int:
    """Fork a child of this process' parent; see clone(2)."""
    ctypes.pythonapi.PyOS_BeforeFork()
    number = _SYS_CLONE[os.uname().machine]
    pid = int(_libc.syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid, "clone")


def _become(request: Mapping[str, Any]) -> None:
    """Take on a program's namespaces, folder, environment and name."""
    with Path("/run/netns", request["namespace"]).open() as namespace:
        _checked(_libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
    # As ip(8) does: /sys shows the devices of the namespace in which it was mounted.
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("", "/", "none", _MS_SLAVE | _MS_REC)
    _libc.umount2(b"/sys", _MNT_DETACH)
    _mount(request["namespace"], "/sys", "sysfs", 0)
    if request["run"]:
        _mount(request["run"], "/run", "none", _MS_BIND)
    if request["uuid"]:
        _mount("none", "/sys/class", "tmpfs", 0)
        firmware = Path("/sys/class/dmi/id")
        firmware.mkdir(parents=True)
        (firmware / "product_uuid").write_text(f"{request['uuid']}\n")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    command: list[str] = request["command"]
    program = _program(command)
    sys.argv, sys.path[0] = [command[0], *command[len(program) :]], str(Path(command[0]).parent)
    _libc.prctl(_PR_SET_NAME, Path(command[0]).name.encode(), 0, 0, 0)
    if program != KUBE_API:
        # The kernel puts the interpreter before the name of a script.
        command = [*Path(command[0]).open().readline().removeprefix("#!").split(), *command]  # noqa: SIM115
    _show_arguments(command)


def _show_arguments(words: Sequence[str]) -> None:
    """Have the kernel show these words in /proc/self/cmdline."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    buffer = ctypes.create_string_buffer(text, len(text))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))  # for as long as the process lives
    start = ctypes.addressof(buffer)
    _libc.sbrk.restype = ctypes.c_ulong
    # Their places in proc_pid_stat(5), from which this map differs in the arguments alone.
    stat = ["", "", "", *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, data, stack, environment = stat[26:28], stat[45:48], stat[28:29], stat[50:52]
    known = [*map(int, (*code, *data)), _libc.sbrk(0), *map(int, stack), start, start + len(text)]
    layout = struct.pack("@12Q2I", *known, *map(int, environment), 0, 0, 0xFFFFFFFF)
    size = ctypes.c_ulong(len(layout))
    # Not checked: a kernel without CONFIG_CHECKPOINT_RESTORE refuses it, and few tests need it.
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, size, ctypes.c_ulong(0))


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None), "mount"
    )


def _checked(result: int, what: str) -> int:
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def main(descriptor: int) -> None:
    """Fork programs at the request of the process at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the other process
    _load()
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(request)
    importlib.import_module(PROGRAMS[_program(request["command"])]).main()
