"""The files for systemd, checked by systemd's own tools and without a running systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld import options
from flanneld.network import host_settings
from flanneld.network.query import DEFAULT_PORT

SYSTEMD = Path(__file__).parents[3] / "dist/systemd"
UNITS = Path("/usr/lib/systemd/system")

#: What is ours of a docker.service like Debian's.
DOCKER = """\
[Service]
Type=notify
EnvironmentFile=-/etc/default/docker
ExecStart=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS
"""


def install(*words: str) -> None:
    subprocess.run([SYSTEMD / "install", *words], check=True, timeout=60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with systemd's own units, ours, docker's, and the executables that they name."""
    shutil.copytree(UNITS, tmp_path / UNITS.relative_to("/"), symlinks=True)
    install("--docker", str(tmp_path))
    (tmp_path / "usr/lib/systemd/system/docker.service").write_text(DOCKER)
    for name in ("usr/bin/flanneld", "usr/sbin/dockerd"):
        executable = tmp_path / name
        executable.parent.mkdir(parents=True, exist_ok=True)
        executable.write_text("#!/bin/sh\n")
        executable.chmod(0o755)
    return tmp_path


def analyze(*words: str) -> str:
    """What systemd-analyze says when it is content."""
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_remove_takes_every_file_away_and_nothing_else(tmp_path: Path) -> None:
    before = {
        tmp_path / "usr/lib/systemd/system/other.service",
        tmp_path / "usr/lib/systemd/system/docker.service.d/own.conf",
    }
    for path in before:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    install("--docker", str(tmp_path))
    installed = {path for path in tmp_path.rglob("*") if path.is_file()}
    install("--remove", str(tmp_path))
    assert len(installed) > len(before)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "usr/lib/systemd/system/flanneld.service.d").exists()


def settings(file: Path) -> Iterator[tuple[str, str]]:
    """``name = value`` lines, those that are commented out by a bare # too."""
    for line in file.read_text().splitlines():
        found = re.fullmatch(r"#?(-?[a-z0-9_.-]+) = (\S+)", line)
        if found:
            yield found[1], found[2]


@pytest.mark.parametrize(
    "unit", ["flanneld.service", "docker.service", "flanneld-server.service", "flanneld-server.socket"]
)
def test_systemd_finds_no_fault_with_the_units(root: Path, unit: str) -> None:
    assert analyze("verify", f"--root={root}", unit) == ""


def test_a_fault_in_a_unit_is_found(root: Path) -> None:
    unit = root / "usr/lib/systemd/system/flanneld.service"
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHome=perhaps"))
    with pytest.raises(AssertionError, match="perhaps"):
        assert analyze("verify", f"--root={root}", "flanneld.service") == ""


@pytest.mark.parametrize("unit", ["flanneld.service", "flanneld-server.service"])
def test_the_service_is_exposed_no_more_than_networkd(root: Path, unit: str) -> None:
    said = analyze("security", "--offline=true", f"--root={root}", "--threshold=30", unit)
    found = re.search(rf"Overall exposure level for {unit}: ([0-9.]+)", said)
    assert found
    assert float(found[1]) <= 3.0


def test_docker_is_left_alone_unless_asked(tmp_path: Path) -> None:
    install(str(tmp_path))
    units = tmp_path / "usr/lib/systemd/system"
    assert sorted(path.name for path in units.iterdir()) == [
        "flanneld-server.service",
        "flanneld-server.socket",
        "flanneld.service",
    ]


def test_an_unknown_word_installs_nothing() -> None:
    done = subprocess.run([SYSTEMD / "install", "--dcoker"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


def test_the_settings_are_those_that_the_daemon_looks_at() -> None:
    named = {
        name.lstrip("-").replace(".", "/"): value
        for name, value in settings(SYSTEMD / "sysctl.d/flannel.conf")
    }
    wanted = {*host_settings.FORWARDING.values(), *host_settings.BRIDGED.values()}
    assert {name: value for name, value in named.items() if name in wanted} == dict.fromkeys(wanted, "1")
    assert named.keys() - wanted == {"net/ipv6/conf/eth0/accept_ra"}


def test_default_file_of_the_package_is_understood_and_lets_nodes_answer_each_other() -> None:
    lines = (SYSTEMD.parent / "debian/default").read_text().splitlines()
    shown = dict(line.removeprefix("#").split("=", 1) for line in lines if "FLANNELD_" in line)
    assert {f"FLANNELD_{flag.name.upper().replace('-', '_')}" for flag in options.FLAGS} >= shown.keys()
    in_force = dict(line.split("=", 1) for line in lines if line.startswith("FLANNELD_"))
    assert options.read([], in_force).answer_port == DEFAULT_PORT


@pytest.mark.parametrize("file", ["network/10-flannel.link", "network/10-flannel.network"])
@pytest.mark.parametrize(
    "device", ["flannel.1", "flannel-v6.1", "flannel0", "flannel.ipip", "flannel-wg", "flannel-ipsec"]
)
def test_all_devices_of_flannel_and_no_others_are_meant(file: str, device: str) -> None:
    (pattern,) = re.findall(r"^(?:Original)?Name=(.*)$", (SYSTEMD / file).read_text(), re.MULTILINE)
    assert Path(device).match(pattern)
    assert not any(Path(other).match(pattern) for other in ("eth0", "cni0", "docker0"))
