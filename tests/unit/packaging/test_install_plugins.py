"""The script with which the image brings CNI plug-ins to a host."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.kubernetes_objects import ROOT

WORKS, BROKEN = "#!/bin/sh\necho '{}'\n", "#!/bin/sh\necho no such library >&2\nexit 127\n"
RECORD = '{"cniVersion":"0.3.1","ipam":{"type":"host-local"},"name":"cbr0"}'
HOUR = 3600


class Host:
    """A host's directories, and the image's plug-ins."""

    def __init__(self, root: Path) -> None:
        self.image, self.programs, self.state = root / "image", root / "bin", root / "cni"
        self.records, self.addresses = self.state / "flannel", self.state / "networks/cbr0"
        for directory in (self.image, self.programs, self.records, self.addresses):
            directory.mkdir(parents=True)
        for name in ("bridge", "host-local"):
            self.write(self.image / name, WORKS)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def record(self, container: str, text: str = RECORD, age: float = HOUR) -> Path:
        path = self.records / container
        path.write_text(text)
        then = time.time() - age
        os.utime(path, (then, then))
        return path

    def install(self) -> str:
        places = map(str, (self.image, self.programs, self.state))
        script = str(ROOT / "dist/image/install-plugins")
        done = subprocess.run([script, *places], check=True, capture_output=True, text=True)
        assert done.stdout == ""
        return done.stderr


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_missing_plug_ins_are_copied_and_can_be_run(host: Host) -> None:
    assert host.install() == ""
    assert {path.name for path in host.programs.iterdir()} == {"bridge", "host-local"}
    assert {path.stat().st_mode & 0o777 for path in host.programs.iterdir()} == {0o755}


def test_plug_in_of_the_host_stays(host: Host) -> None:
    host.write(host.programs / "bridge", "#!/bin/sh\necho '{\"newer\": 1}'\n")
    before = (host.programs / "bridge").stat()
    for _ in range(2):
        assert host.install() == ""
    assert (host.programs / "bridge").stat().st_mtime_ns == before.st_mtime_ns


def test_plug_in_that_does_not_run_is_named_and_stays(host: Host) -> None:
    host.write(host.programs / "bridge", BROKEN)
    said = host.install()
    assert f"{host.programs / 'bridge'} stays, but is no CNI plug-in that runs here: no such library" in said
    assert (host.programs / "bridge").read_text() == BROKEN
    assert (host.programs / "host-local").exists()


def test_records_of_containers_without_an_address_are_removed(host: Host) -> None:
    """A runtime that uses the daemon's configuration deletes containers without flannel's plug-in."""
    dead, alive, new = host.record("dead"), host.record("alive"), host.record("new", age=60)
    elsewhere = host.record("elsewhere", RECORD.replace('"host-local"', '"host-local","dataDir":"/x"'))
    other = host.record("other", RECORD.replace("host-local", "dhcp"))
    (host.addresses / "10.5.72.2").write_text("alive\r\neth0")
    host.install()
    assert not dead.exists()
    assert all(path.exists() for path in (alive, new, elsewhere, other))


def test_host_without_records_is_no_failure(host: Host) -> None:
    host.records.rmdir()
    assert host.install() == ""
