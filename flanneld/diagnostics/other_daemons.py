"""Lookup of running daemons of any flannel, Go's or this one, in this network namespace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

#: Names of the program: ``flanneld``, or a release's ``flanneld-amd64``; not the udp proxy's module.
_PROGRAM = re.compile(r"flanneld([-_].*)?")
_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*")
#: Options of calls that do not run the daemon.
_ERRAND = re.compile(r"--?(cleanup|plan|migrate-etcd-v2-to-v3|version|help|h)(=.*)?")
_UNIT = re.compile(r"/([^/\n]+\.service)(?:\n|$)")
_CONTAINER = re.compile(r"/docker[-/]([0-9a-f]{12})")


class OtherDaemon(Struct, frozen=True, gc=False):
    """A running daemon, and the command that stops it for good."""

    pid: int
    remedy: str


def running(proc: Path = Path("/proc")) -> Iterator[OtherDaemon]:
    """Yield the daemons of this network namespace, except this process and its ancestors.

    Daemons in an invisible PID namespace are not found, nor, without root, those of other users.
    """
    here = (proc / "self/ns/net").stat()
    own = set(_ancestors(proc))
    found: dict[int, Path] = {}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            if os.path.samestat((process / "ns/net").stat(), here) and is_daemon(*_call_of(process)):
                found[int(process.name)] = process
    for pid in sorted(found.keys() - own):
        # A child between fork and exec looks like its parent.
        if _parent_of(found[pid]) not in found:
            yield OtherDaemon(pid, how_to_stop(pid, _text(found[pid] / "cgroup")))


def is_daemon(names: Sequence[str], words: Sequence[str]) -> bool:
    """Return True if a process runs the daemon, by its names and its command line."""
    program, rest = "", list(words[1:])
    if words and _INTERPRETER.fullmatch(Path(words[0]).name):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest.pop(0)
        if rest[:1] == ["-m"]:
            rest.pop(0)
        program = Path(rest.pop(0)).name if rest else ""
    elif words:
        program = Path(words[0]).name
    is_flanneld = any(_PROGRAM.fullmatch(name) for name in (*names, program))
    return is_flanneld and not any(_ERRAND.fullmatch(word) for word in rest)


def how_to_stop(pid: int, cgroup: str) -> str:
    """Return the command that stops a daemon for good, by the manager in its cgroup (cgroups(7))."""
    if "kubepods" in cgroup:
        return "kubectl delete its DaemonSet, or keep it from this node with a nodeSelector"
    if container := _CONTAINER.search(cgroup):
        return f"docker stop {container[1]}"
    units = [unit for unit in _UNIT.findall(cgroup) if "flannel" in unit]
    return f"systemctl stop {units[0]}" if units else f"kill {pid}"


def _ancestors(proc: Path) -> Iterator[int]:
    """Yield the pids of this process, its parent, and so on."""
    pid = os.getpid()
    while pid > 1:
        yield pid
        pid = _parent_of(proc / str(pid))


def _parent_of(process: Path) -> int:
    """Return the pid of the parent, 0 if unknown."""
    found = re.search(r"^PPid:\s*([0-9]+)$", _text(process / "status"), re.MULTILINE)
    return int(found[1]) if found else 0


def _call_of(process: Path) -> tuple[list[str], list[str]]:
    """Return the names of a process, and its command line. Raises ``OSError``."""
    names = [(process / "comm").read_text().strip()]
    with suppress(OSError):
        names.append((process / "exe").readlink().name)
    return names, (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
