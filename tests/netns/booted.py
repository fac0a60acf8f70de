"""A node whose first process is systemd, with flanneld installed as docs/running.md says.

systemd gets process, mount and control group namespaces of its own and an overlay over this machine's
file system, so nothing that it or the daemon writes is left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.lab import Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.isolated import IsolatedNode

#: The targets that units depend on. All other units stay out: they would start this machine's services.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user", "nss-lookup")

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

#: The Debian package's.
DEFAULTS = ROOT / "dist/debian/default"

PREPARE = """
rm -rf etc/systemd/system/* usr/lib/systemd/system-generators/*
mkdir units
cp $(for name in $TARGETS; do echo "usr/lib/systemd/system/$name.target"; done) units/
mount -t tmpfs tmpfs usr/lib/systemd/system
mv units/* usr/lib/systemd/system/
"""
INSTALL = """
mnt/source/dist/systemd/install --docker .
systemd-sysusers --root="$PWD" flannel.conf
systemd-tmpfiles --root="$PWD" --create flannel.conf
"""
SYSTEMD = """
exec env -i PATH="$PATH" container=lab \\
    /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
"""


class BootedNode(IsolatedNode):
    """A node of a lab, booted, to be used in a ``with``. The node's ``subnet_file`` is the service's then."""

    PREPARE, INSTALL, FIRST = PREPARE, INSTALL, SYSTEMD

    def __init__(self, node: Node, endpoints: str) -> None:
        files = {
            "usr/sbin/dockerd": DOCKERD,
            "usr/lib/systemd/system/docker.service": DOCKER_SERVICE,
            "usr/lib/systemd/system/flanneld.service.d/test.conf": FOR_THE_TEST,
            "usr/lib/systemd/system/docker.service.d/test.conf": DOCKER_FOR_THE_TEST,
            "etc/default/flanneld": f"{DEFAULTS.read_text()}FLANNELD_ETCD_ENDPOINTS={endpoints}\n",
        }
        super().__init__(node, files, {"TARGETS": " ".join(TARGETS)})

    def systemctl(self, *words: str, check: bool = True) -> str:
        """What ``systemctl`` says in there."""
        return self.run("systemctl", "--no-pager", *words, check=check)

    def set_watchdog(self, unit: str, seconds: int) -> None:
        """Set a service's watchdog interval, from its next start on."""
        drop_in = self.path(f"run/systemd/system/{unit}.service.d/watchdog.conf")
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(f"[Service]\nWatchdogSec={seconds}\n")
        self.systemctl("daemon-reload")

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", f"--property={what}", unit)

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

    def _has_booted(self) -> bool:
        return self.systemctl("is-active", "basic.target", check=False) == "active"
