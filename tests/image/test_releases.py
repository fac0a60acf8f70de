"""The README's demo, the unit tests, the Debian package and the image on a later Debian than this host's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld import __version__
from tests.image.built_image import AUTHORITIES, Architecture, BuiltImage
from tests.lab.daemon import ROOT
from tests.lab.namespace import run

pytestmark = pytest.mark.long

RELEASE = "trixie"
#: What a bare host has, and what tells its package lists from others'.
BARE = "ca-certificates,git"
CROWD = "tests/unit/subnet/remote/test_strangers.py::test_crowd_without_a_request_keeps_nobody_from_an_answer"
#: For all that is downloaded and tested, in seconds.
DEADLINE = 7200

#: Run a command in a root file system as on a host: with devices, and with the network of this one.
ON_HOST = """
root=$1
shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
"""


class Debian:
    """Root file system of Debian ``RELEASE`` with a clone of this project in ``/srv/flanneld``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        options = ("--variant=minbase", "--quiet", f"--include={BARE}")
        run("mmdebstrap", *options, RELEASE, str(root), timeout=DEADLINE)
        if AUTHORITIES.exists():
            shutil.copy(AUTHORITIES, root / "etc/ssl/certs/ca-certificates.crt")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        run("git", "clone", "--quiet", str(ROOT), str(root / "srv/flanneld"), timeout=DEADLINE)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the clone; return what it says."""
        place = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", ON_HOST, "sh")
        words = ("sh", "-ec", 'cd /srv/flanneld && exec "$@"', "sh", *command)
        done = run(*place, str(self.root), *self._environment(), *words, check=check, timeout=DEADLINE)
        return done.stdout + done.stderr

    def _environment(self) -> list[str]:
        """Return what leads to this host's mirrors."""
        authorities = ["PIP_CERT=/etc/ssl/certs/ca-certificates.crt"] if AUTHORITIES.exists() else []
        return authorities + [
            f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")
        ]


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    root = tmp_path_factory.mktemp("release") / "debian"
    yield Debian(root)
    shutil.rmtree(root)


def test_demo_of_the_readme_is_well_on_a_later_debian(debian: Debian) -> None:
    assert "All is well" in debian.run("./dist/demo")


def test_unit_tests_pass_on_a_later_debian(debian: Debian) -> None:
    """But for one: with OpenSSL 3.5 the server's state of a handshake that was begun is larger."""
    debian.run("./dist/setup", "--dev")
    options = ("-n", "2", "--deselect", f"{CROWD}[hello-1200]")
    debian.run(".venv/bin/python", "-m", "pytest", *options, "tests/unit", "docs")


def test_package_built_on_a_later_debian_is_installed_there(debian: Debian) -> None:
    said = debian.run("./dist/deb", "/srv").splitlines()
    package = next(line for line in said if line.endswith(".deb"))
    debian.run("apt-get", "install", "-y", "--no-install-recommends", package)
    assert __version__ in debian.run("flanneld", "-version")
    assert __version__ in debian.run("flannelctl", "--version")


def test_image_on_a_later_debian_runs_the_daemon() -> None:
    machine = run("dpkg", "--print-architecture").stdout.strip()
    with BuiltImage(Architecture(machine, f"linux/{machine}", RELEASE)) as image:
        assert __version__ in image.run("/opt/bin/flanneld", "-version")
        assert RELEASE in image.run("cat", "/etc/os-release")
