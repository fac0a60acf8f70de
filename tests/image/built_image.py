"""The image, built from the Dockerfile on a Debian that is made for it: there may be no registry at hand."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.lab.daemon import ROOT
from tests.lab.namespace import run

#: What this machine trusts, which may be more than Debian and pip do.
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_CONF = "[global]\ncert = /etc/authorities.crt\n"
#: What images of Debian called slim leave out of ``/usr/share``.
LEFT_OUT = ("doc", "info", "locale", "man")
ARCHIVE = "http://deb.debian.org/debian"
BASE = "localhost/debian"
IMAGE = "localhost/flanneld"
#: For all that is downloaded and compiled, in seconds; emulation is slow.
DEADLINE = 7200

#: What a container runtime does for a container that is in the host's network and not privileged: a root file
#: system and settings of the kernel that cannot be written, mounts, two capabilities.
CONTAINER = """
root=$1
shift
mount --bind "$root" /mnt
mount -t proc proc /mnt/proc
mount --bind /mnt/proc/sys /mnt/proc/sys
mount -o remount,bind,ro /mnt/proc/sys
mount -t sysfs -o ro sysfs /mnt/sys
mount -t tmpfs -o mode=755 tmpfs /mnt/dev
for device in null urandom; do
    touch /mnt/dev/$device
    mount --bind /dev/$device /mnt/dev/$device
done
mount -t tmpfs -o mode=755 tmpfs /mnt/run
touch /mnt/run/xtables.lock
while [ "$1" != -- ]; do
    mkdir -p "/mnt$2"
    mount --bind "$1" "/mnt$2"
    shift 2
done
shift
mount -o remount,bind,ro /mnt
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec env -i PATH=$PATH "$@"
"""
IN_THERE = (
    "chroot",
    "/mnt",
    "setpriv",
    "--inh-caps=-all,+net_admin,+net_raw",
    "--bounding-set=-all,+net_admin,+net_raw",
)


@dataclass(frozen=True)
class Architecture:
    """An architecture as Debian and as container images name it; ``suite``: a release that has it."""

    debian: str
    platform: str
    suite: str = ""


class BuiltImage:
    """The image, its file system in ``root``, to be used in a ``with``. Sizes are in bytes.

    Images and containers are in a directory of their own, and gone with it. Default: the host's architecture.
    """

    def __init__(self, architecture: Architecture | None = None) -> None:
        self._architecture = architecture

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="flanneld-image-"))
        try:
            self._build_base()
            self._buildah(
                "build",
                "--quiet",
                "--isolation=chroot",
                *self._platform(),
                f"--build-arg=BASE={BASE}",
                f"--tag={IMAGE}",
                str(ROOT),
            )
            self.base_size, self.root = _size(self._mount(BASE)), self._mount(IMAGE)
            self.size = _size(self.root)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all that was built."""
        self._buildah("rm", "--all", check=False)
        shutil.rmtree(self._directory)

    def config(self) -> dict[str, Any]:
        """What a container runtime is told: Entrypoint, User, Env and so on."""
        found: dict[str, Any] = json.loads(self._buildah("inspect", "--type=image", IMAGE))["OCIv1"]["config"]
        return found

    def run(self, *command: str) -> str:
        """What a command in the image says, on both its streams."""
        done = run("chroot", str(self.root), *command)
        return done.stdout + done.stderr

    def contained(
        self,
        *command: str,
        mounts: Mapping[str, Path],
        environment: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        """A command to be run on a node, in a container; ``mounts`` says where in there a directory is."""
        places = [word for place, directory in mounts.items() for word in (str(directory), place)]
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        script = ("sh", "-ec", CONTAINER, "sh", str(self.root))
        return (*script, *places, "--", *variables, *IN_THERE, *command)

    def _build_base(self) -> None:
        """A minimal Debian, as old as the one that the Dockerfile names.

        For another processor without updates: not every mirror has lists of them that fit their signature.
        """
        suite = re.findall(r"^ARG BASE=.*/debian:([a-z]+)-", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        options, sources = [], []
        if self._architecture:
            options = [f"--architectures={self._architecture.debian}"]
            suite = [self._architecture.suite or suite[0]]
            sources = [f"deb {ARCHIVE} {suite[0]} main"]
        options += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
        archive = self._directory / "debian.tar"
        command = ("mmdebstrap", "--variant=minbase", "--quiet", *options, *suite, str(archive), *sources)
        run(*command, timeout=DEADLINE)
        trust = self._directory / "trust"
        trust.mkdir()
        if AUTHORITIES.exists():
            shutil.copy(AUTHORITIES, trust / "authorities.crt")
            (trust / "pip.conf").write_text(PIP_CONF)
        container = self._buildah("from", *self._platform(), "scratch")
        self._buildah("add", "--quiet", container, str(archive), "/")
        self._buildah("add", "--quiet", container, str(trust), "/etc")
        self._buildah("commit", "--quiet", "--rm", container, BASE)

    def _platform(self) -> tuple[str, ...]:
        return (f"--platform={self._architecture.platform}",) if self._architecture else ()

    def _mount(self, image: str) -> Path:
        """The file system of a container of an image."""
        return Path(self._buildah("mount", self._buildah("from", *self._platform(), image)))

    def _buildah(self, *words: str, check: bool = True) -> str:
        store = (f"--root={self._directory}/store", f"--runroot={self._directory}/run")
        return run("buildah", *store, *words, check=check, timeout=DEADLINE).stdout.strip()


def _size(root: Path) -> int:
    return int(run("du", "--summarize", "--bytes", str(root)).stdout.split()[0])
