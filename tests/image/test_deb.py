"""The Debian package, built by one command, on a bare Debian without network: install, upgrade, purge."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld import __version__
from tests.lab.credentials import write_kubeconfig
from tests.lab.daemon import ROOT
from tests.lab.namespace import run

pytestmark = pytest.mark.long

#: Debian's packages that ours needs.
NEEDED = "iptables,libnftables1,python3,systemd"
#: Files that dpkg writes about any package, and the user database: a system user stays after a purge.
BOOKKEEPING = (
    "var/lib/dpkg",
    "var/log",
    "var/cache",
    "etc/passwd",
    "etc/group",
    "etc/shadow",
    "etc/gshadow",
    "etc/.pwd.lock",
)
PACKAGER = ("DEBFULLNAME=A Packager", "DEBEMAIL=packager@debian.org")
#: For a download and a build, in seconds.
DEADLINE = 1800


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package")
    built = run("env", *PACKAGER, str(ROOT / "dist/deb"), str(directory), timeout=DEADLINE)
    return Path(built.stdout.strip())


@pytest.fixture
def debian(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The file system of a minimal Debian with the packages that ours needs, and the parameter's."""
    root = tmp_path / "debian"
    suite = run("sh", "-c", ". /etc/os-release; echo $VERSION_CODENAME").stdout.strip()
    packages = ",".join([NEEDED, *getattr(request, "param", ())])
    run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={packages}",
        "--quiet",
        suite,
        str(root),
        timeout=DEADLINE,
    )
    yield root
    shutil.rmtree(root)


def inside(root: Path, *command: str, check: bool = True) -> str:
    """Run a command on that Debian, without network; return what it says."""
    isolated = ("unshare", "--net", "--mount-proc", "--fork", "--pid", f"--root={root}")
    done = run(*isolated, *command, check=check, timeout=300)
    return done.stdout + done.stderr


def install(root: Path, package: Path) -> None:
    shutil.copy(package, root / package.name)
    inside(root, "dpkg", "--install", f"/{package.name}")
    (root / package.name).unlink()


def files(root: Path) -> set[str]:
    found = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file())
    return {name for name in found if not name.startswith(BOOKKEEPING)}


def newer(package: Path, directory: Path) -> Path:
    """Return the same files as a later version: what changes between versions is not tested by this."""
    unpacked = directory / "unpacked"
    run("dpkg-deb", "--raw-extract", str(package), str(unpacked))
    control = unpacked / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {__version__}", f"Version: {__version__}.1"))
    later = directory / "later.deb"
    run("dpkg-deb", "--root-owner-group", "--build", str(unpacked), str(later))
    return later


def test_package_is_installed_upgraded_and_purged(package: Path, debian: Path, tmp_path: Path) -> None:
    before = files(debian)
    install(debian, package)
    assert __version__ in inside(debian, "flanneld", "-version")
    assert __version__ in inside(debian, "flannelctl", "--version")
    assert "-etcd-endpoints" in inside(debian, "flanneld", "-help")
    assert "flannel:" in (debian / "etc/passwd").read_text()
    assert (debian / "usr/share/man/man8/flannelctl.8.gz").is_file()

    defaults = debian / "etc/default/flanneld"
    defaults.write_text("FLANNELD_IFACE=eth1\n")
    install(debian, newer(package, tmp_path))
    assert defaults.read_text() == "FLANNELD_IFACE=eth1\n"
    assert f"{__version__}.1" in inside(debian, "dpkg-query", "--show", "flanneld")

    inside(debian, "dpkg", "--purge", "flanneld")
    assert files(debian) - before == set()
    assert "flannel:" in (debian / "etc/passwd").read_text()


def daemon_in_kubernetes(root: Path) -> str:
    """Run the daemon for ten seconds; return what it says of an API server at a port where nobody listens."""
    write_kubeconfig(root / "etc/kubeconfig", "http://127.0.0.1:1", "secret")
    (root / "etc/net-conf.json").write_text('{"Network": "10.5.0.0/16"}')
    files = ("-kubeconfig-file=/etc/kubeconfig", "-net-config-path=/etc/net-conf.json")
    command = ("timeout", "10", "env", "NODE_NAME=n1", "flanneld", "-kube-subnet-mgr", *files)
    return inside(root, *command, check=False)


def test_missing_client_of_kubernetes_is_named_with_its_package(package: Path, debian: Path) -> None:
    install(debian, package)
    said = daemon_in_kubernetes(debian)
    assert "needs the Python package kubernetes" in said
    assert "apt-get install python3-kubernetes" in said
    program = "import sys; sys.path.insert(0, '/usr/lib/flanneld'); import iptc, nftables"
    inside(debian, "/usr/bin/python3", "-c", program)


@pytest.mark.parametrize("debian", [("python3-kubernetes",)], indirect=True)
def test_debians_client_of_kubernetes_serves(package: Path, debian: Path) -> None:
    install(debian, package)
    said = daemon_in_kubernetes(debian)
    assert "this host reaches it" in said
    assert "Warning" not in said


def test_lintian_finds_no_error(package: Path) -> None:
    found = run("lintian", "--allow-root", "--fail-on=error", str(package), check=False, timeout=600)
    assert [line for line in found.stdout.splitlines() if line.startswith("E:")] == []
    assert found.returncode == 0, found.stderr
