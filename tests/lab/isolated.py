"""A node with process, mount and control group namespaces of its own, and flanneld installed.

Its root file system is an overlay over this machine's, so nothing that is written in there is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.lab.daemon import ROOT
from tests.lab.namespace import run
from tests.lab.node import Node
from tests.lab.wait import wait_for

PROGRAM = """\
#!/bin/sh
export PYTHONPATH=/mnt/source:/mnt/site LD_LIBRARY_PATH=/mnt/python/lib
exec /mnt/python/bin/python3 -S -c 'from {module} import main; main()' "$@"
"""
#: Each program's path, and the module that holds its ``main``.
PROGRAMS = {"usr/bin/flanneld": "flanneld.__main__", "usr/bin/flannelctl": "flanneld.ctl.main"}

OVERLAY = """
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
rm -rf /mnt/root/var/lib/flannel # a real node's
python=$1 site=$2 source=$3 files=$4
cd /mnt/root
"""
MOUNTS = """
mkdir mnt/python mnt/site mnt/source
mount --bind "$python" mnt/python
mount --bind "$site" mnt/site
mount --bind "$source" mnt/source
cp -r "$files"/. .
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs dev/net
mknod -m 666 dev/net/tun c 10 200 # as udev makes it, which does not run here
"""
PIVOT = """
mkdir old
pivot_root . old
umount -l old
"""


class IsolatedNode:
    """A node whose first process is ``FIRST``, to be used in a ``with``.

    ``PREPARE`` changes the file system before ``files`` and mounts come, ``INSTALL`` after that. Both, as
    ``FIRST``, are lines of a shell. ``environment`` is for them.
    """

    PREPARE = INSTALL = ""
    FIRST = ""

    def __init__(self, node: Node, files: dict[str, str], environment: dict[str, str] | None = None) -> None:
        self.node = node
        self._files = {name: PROGRAM.format(module=module) for name, module in PROGRAMS.items()} | files
        self._environment = environment or {}
        self.control_group = _control_groups() / node.namespace.name
        self._log = node.directory / "first-process.log"

    def __enter__(self) -> Self:
        self.control_group.mkdir()
        # ``ip netns exec`` hides the control groups, so they are entered before it.
        enter = f'echo $$ >"$0"/cgroup.procs; exec ip netns exec {self.node.namespace.name} "$@"'
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup")
        script = OVERLAY + self.PREPARE + MOUNTS + self.INSTALL + PIVOT + self.FIRST
        places = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), str(self._write_files()))
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["sh", "-ec", enter, str(self.control_group), *alone, "sh", "-ec", script, "boot", *places],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
            )
        try:
            wait_for(self._is_up, 10, "the first process")
        except BaseException as failure:
            failure.add_note(self._log.read_text())
            self.close()
            raise
        self.node.subnet_file = self.path("run/flannel/subnet.env")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the first process, and with it all others."""
        self._process.kill()
        self._process.wait()
        wait_for(self._remove_control_groups, 10, "the processes to die")

    def run(self, *command: str, check: bool = True) -> str:
        """Return what a command says in there, as root."""
        return run(*self.entering(), *command, check=check).stdout.strip()

    def entering(self) -> tuple[str, ...]:
        """Return the beginning of a command that is run in there; its control group stays the caller's."""
        return ("nsenter", f"--target={self._first_process()}", "--all", "--root", "--wd")

    def path(self, name: str) -> Path:
        """Return a file in there, named without the leading slash."""
        return Path(f"/proc/{self._first_process()}/root", name)

    def _has_booted(self) -> bool:
        """Return True when the first process is ready for work."""
        raise NotImplementedError

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(IndexError):
            return self._has_booted()
        return False

    def _write_files(self) -> Path:
        root = self.node.directory / "root"
        for name, text in self._files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if text.startswith("#!") else 0o644)
        return root

    def _first_process(self) -> int:
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _processes(self) -> list[int]:
        files = self.control_group.rglob("cgroup.procs")
        return [int(line) for file in files for line in file.read_text().split()]

    def _remove_control_groups(self) -> bool:
        for directory in sorted(self.control_group.rglob("*/"), reverse=True):
            with suppress(OSError):
                directory.rmdir()
        with suppress(OSError):
            self.control_group.rmdir()
        return not self.control_group.exists()


def _control_groups() -> Path:
    """Return where this machine has version 2 of the control groups, which it may have beside version 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise FileNotFoundError(
        "no cgroup2 file system is mounted, and a node with processes of its own needs one"
    )
