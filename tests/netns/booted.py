"""A node whose first process is systemd, with flanneld installed as docs/systemd.md says.

systemd gets process, mount and control group namespaces of its own and an overlay over this machine's
file system, so nothing that it or the daemon writes is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.lab import Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.namespace import run

#: The targets that units depend on. All other units stay out: they would start this machine's services.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user", "nss-lookup")

FLANNELD = """\
#!/bin/sh
export PYTHONPATH=/mnt/source:/mnt/site LD_LIBRARY_PATH=/mnt/python/lib
exec /mnt/python/bin/python3 -m flanneld "$@"
"""
#: Record the arguments, complete as soon as the file exists, and run on.
DOCKERD = """\
#!/bin/sh
printf '%s\\n' "$@" >/run/dockerd.new
mv /run/dockerd.new /run/dockerd
exec sleep infinity
"""
DOCKER_SERVICE = """\
[Service]
ExecStart=/usr/sbin/dockerd $DOCKER_OPTS
Restart=on-failure
"""
#: No journal runs here, and a test has less time than an operator. The watchdog keeps its three minutes:
#: a busy machine starves a daemon for seconds, and systemd would restart it in the middle of any test.
FOR_THE_TEST = """\
[Service]
StandardError=append:/run/flanneld.log
RestartSec=100ms
"""
DOCKER_FOR_THE_TEST = """\
[Service]
RestartSec=100ms
"""

BOOT = """
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
python=$1 site=$2 source=$3 files=$4
cd /mnt/root
rm -rf etc/systemd/system/* usr/lib/systemd/system-generators/*
mkdir units mnt/python mnt/site mnt/source
cp $(for name in $TARGETS; do echo "usr/lib/systemd/system/$name.target"; done) units/
mount -t tmpfs tmpfs usr/lib/systemd/system
mv units/* usr/lib/systemd/system/
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
mnt/source/dist/systemd/install --docker .
systemd-sysusers --root="$PWD" flannel.conf
systemd-tmpfiles --root="$PWD" --create flannel.conf
mkdir old
pivot_root . old
umount -l old
exec env -i PATH="$PATH" container=lab \
    /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
"""


class BootedNode:
    """A node of a lab, booted, to be used in a ``with``. The node's ``subnet_file`` is the service's then."""

    def __init__(self, node: Node, endpoints: str) -> None:
        self.node = node
        self._endpoints = endpoints
        self._cgroup = _control_groups() / node.namespace.name
        self._log = node.directory / "systemd.log"

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        # ``ip netns exec`` hides the control groups, so they are entered before it.
        enter = f'echo $$ >"$0"/cgroup.procs; exec ip netns exec {self.node.namespace.name} "$@"'
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup")
        places = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), str(self._files()))
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["sh", "-ec", enter, str(self._cgroup), *alone, "sh", "-ec", BOOT, "boot", *places],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TARGETS": " ".join(TARGETS)},
            )
        try:
            wait_for(self._has_booted, 10, "systemd to boot")
        except BaseException as failure:
            failure.add_note(self._log.read_text())
            self.close()
            raise
        self.node.subnet_file = self.path("run/flannel/subnet.env")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill systemd, and with it all that it has started."""
        self._process.kill()
        self._process.wait()
        wait_for(self._remove_control_groups, 10, "the services to die")

    def systemctl(self, *words: str, check: bool = True) -> str:
        """What ``systemctl`` says in there."""
        return self.run("systemctl", "--no-pager", *words, check=check)

    def run(self, *command: str, check: bool = True) -> str:
        """What a command says in there, as root."""
        enter = ("nsenter", f"--target={self._first_process()}", "--all", "--root", "--wd")
        return run(*enter, *command, check=check).stdout.strip()

    def set_watchdog(self, unit: str, seconds: int) -> None:
        """Set a service's watchdog interval, from its next start on."""
        drop_in = self.path(f"run/systemd/system/{unit}.service.d/watchdog.conf")
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(f"[Service]\nWatchdogSec={seconds}\n")
        self.systemctl("daemon-reload")

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", f"--property={what}", unit)

    def path(self, name: str) -> Path:
        """A file in there, named without the leading slash."""
        return Path(f"/proc/{self._first_process()}/root", name)

    def processes(self, word: str) -> list[int]:
        """The processes that were started with this word, as this machine numbers them."""
        found = []
        for process in self._processes():
            with suppress(OSError):
                if word.encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def pid(self, unit: str) -> int:
        """The main process of a service, as this machine numbers it."""
        inside = self.show(unit, "MainPID")
        for process in self._processes():
            with suppress(OSError):
                status = Path(f"/proc/{process}/status").read_text()
                if f"\nNSpid:\t{process}\t{inside}\n" in status:
                    return process
        raise AssertionError(f"{unit} has no main process")

    def wait_for(self, condition: Callable[[], bool], what: str, deadline: float = 10) -> None:
        """Wait for something; if it never comes, the log of flanneld is with the failure."""
        try:
            wait_for(condition, deadline, what)
        except AssertionError as failure:
            failure.add_note(f"log of flanneld:\n{self.log()}")
            raise

    def log(self) -> str:
        """What the runs of flanneld have written."""
        file = self.path("run/flanneld.log")
        return file.read_text() if file.exists() else ""

    def _files(self) -> Path:
        root = self.node.directory / "root"
        for name, text in {
            "usr/bin/flanneld": FLANNELD,
            "usr/sbin/dockerd": DOCKERD,
            "usr/lib/systemd/system/docker.service": DOCKER_SERVICE,
            "usr/lib/systemd/system/flanneld.service.d/test.conf": FOR_THE_TEST,
            "usr/lib/systemd/system/docker.service.d/test.conf": DOCKER_FOR_THE_TEST,
            "etc/default/flanneld": f"FLANNELD_ETCD_ENDPOINTS={self._endpoints}\n",
        }.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if text.startswith("#!") else 0o644)
        return root

    def _has_booted(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(IndexError):
            return self.systemctl("is-active", "basic.target", check=False) == "active"
        return False

    def _first_process(self) -> int:
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _processes(self) -> list[int]:
        files = self._cgroup.rglob("cgroup.procs")
        return [int(line) for file in files for line in file.read_text().split()]

    def _remove_control_groups(self) -> bool:
        for directory in sorted(self._cgroup.rglob("*/"), reverse=True):
            with suppress(OSError):
                directory.rmdir()
        with suppress(OSError):
            self._cgroup.rmdir()
        return not self._cgroup.exists()


def _control_groups() -> Path:
    """Where this machine has version 2 of the control groups, which it may have beside version 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise FileNotFoundError("no cgroup2 file system is mounted, and systemd needs one")
