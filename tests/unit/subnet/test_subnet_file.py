"""subnet.env, on a real file system."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.reconcile.reconciler import Reconciler
from flanneld.reconcile.upkeep import TableState
from flanneld.runtime import clock
from flanneld.state.resources import Key, Resource
from flanneld.subnet.subnet_file import (
    MAX_SIZE,
    TABLE,
    Previous,
    SubnetEnv,
    SubnetEnvFile,
    SubnetFileTable,
    read,
    render,
    stamp_of,
    write,
)

NETWORK, SUBNET = IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24")
IPV6_NETWORK, IPV6_SUBNET = IPv6Network("fc00::/48"), IPv6Network("fc00:0:0:7::/64")
ENV = SubnetEnv((NETWORK,), (SUBNET,), 1450, True)
DUAL = SubnetEnv((IPV6_NETWORK, NETWORK), (IPV6_SUBNET, SUBNET), 1430, False)

IPV4_LINES = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.72.1/24\n"
IPV6_LINES = "FLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00:0:0:7::1/64\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "flannel" / "subnet.env"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subnet") / "subnet.env"


def remembered(path: Path, content: str) -> Previous:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return read(path)


def names_in(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()]


# Rendering.


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (ENV, IPV4_LINES + "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"),
        (DUAL, IPV4_LINES + IPV6_LINES + "FLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n"),
        (
            SubnetEnv((IPV6_NETWORK,), (IPV6_SUBNET,), 1430, True),
            IPV6_LINES + "FLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n",
        ),
    ],
)
def test_the_text_is_upstreams_to_the_byte(env: SubnetEnv, text: str) -> None:
    assert render(env) == text


@pytest.mark.parametrize("subnet", ["10.5.72.7/32", "255.255.255.255/32"])
def test_a_subnet_of_one_address_keeps_to_its_own(subnet: str) -> None:
    assert f"FLANNEL_SUBNET={subnet}\n" in render(SubnetEnv((), (IPv4Network(subnet),), 1450, True))


# Writing.


def test_writing_makes_the_directory_and_the_file(path: Path) -> None:
    write(path, ENV)
    assert path.read_bytes() == render(ENV).encode()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_everybody_may_read_the_file_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(path, ENV)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_subnet_file_is_rewritten_at_each_start(path: Path) -> None:
    write(path, ENV)
    before = path.stat()
    write(path, ENV)
    assert path.stat().st_ino != before.st_ino
    assert path.read_text() == render(ENV)


def test_a_changed_file_is_replaced_and_never_rewritten(path: Path) -> None:
    write(path, ENV)
    with path.open() as reader:
        write(path, DUAL)
        assert reader.read() == render(ENV)
    assert path.read_text() == render(DUAL)
    assert names_in(path.parent) == ["subnet.env"]


def test_a_symlink_is_replaced_and_its_target_kept(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep me")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    write(path, ENV)
    assert not path.is_symlink()
    assert target.read_text() == "keep me"


def test_a_fifo_in_the_files_place_is_replaced(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    write(path, ENV)
    assert path.is_file()


def test_the_content_is_on_disk_before_the_name_and_the_name_before_the_return(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, int, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((name, os.fstat(descriptor).st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, ENV)
    (file, size, named), (directory, _, named_then) = synced
    assert file.parent == path.parent
    assert size == len(render(ENV))
    assert file.name.startswith(".subnet.env.")
    assert not named
    assert directory == path.parent
    assert named_then


FULL_DISK = """
import resource, sys
from ipaddress import IPv4Network
from pathlib import Path
from flanneld.errors import Retryable
from flanneld.subnet.subnet_file import SubnetEnv, write

resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    write(Path(sys.argv[1]), SubnetEnv((IPv4Network("10.9.0.0/16"),), (), 1450, True))
except Retryable as error:
    print(error)
"""


def test_no_room_for_the_new_file_leaves_the_old_one_intact(path: Path) -> None:
    write(path, ENV)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path], capture_output=True, check=True, text=True)
    assert done.stdout.startswith(f"cannot write {path}: File too large; ")
    assert "-subnet-file" in done.stdout
    assert path.read_text() == render(ENV)
    assert names_in(path.parent) == ["subnet.env"]


def test_a_disk_that_fails_at_the_last_moment_leaves_the_old_file_intact(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    write(path, ENV)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Retryable, match="Input/output error"):
        write(path, DUAL)
    assert path.read_text() == render(ENV)
    assert names_in(path.parent) == ["subnet.env"]


def test_a_directory_in_the_files_place_can_be_tried_again(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(Retryable, match=str(path)):
        write(path, ENV)
    assert names_in(path.parent) == ["subnet.env"]


def test_a_file_in_the_directorys_place_can_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(Retryable, match="cannot write"):
        write(tmp_path / "run" / "subnet.env", ENV)


# Writing later.


class File:
    """The table of the file in a reconciler, on a clock of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._now = 1000.0
        self._wanted: dict[Key, Resource] = {}
        with self._clock():
            self._reconciler = Reconciler([SubnetFileTable(path)], {TABLE: self._wanted}, lambda: False)

    def tell(self, env: SubnetEnv) -> None:
        file = SubnetEnvFile.of(self._path, env)
        self._wanted[file.key] = file
        with self._clock():
            self._reconciler.converge(self._now)

    def look(self, seconds: float = 1.0) -> None:
        with self._clock():
            end = self._now + seconds
            while self._now < end:
                self._now = min(end, max(self._now + 0.01, self._reconciler.step(self._now)))
            self._reconciler.step(self._now)

    @property
    def state(self) -> TableState:
        with self._clock():
            return self._reconciler.states()[0]

    @contextmanager
    def _clock(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now", lambda: self._now)
            patch.setattr(clock, "cpu_time", lambda: 0.0)
            yield


def test_unwritable_subnet_file_is_logged_once_and_written_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = File(path)
    path.mkdir(parents=True)
    file.tell(ENV)
    file.look(5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    path.rmdir()
    file.look(30)
    assert path.read_text() == render(ENV)
    assert f"Wrote subnet file to {path}" in caplog.messages
    assert caplog.messages[-1] == f"The contents of {path} are in place"


def test_the_latest_of_what_could_not_be_written_is_written(path: Path) -> None:
    file = File(path)
    path.mkdir(parents=True)
    for env in (ENV, DUAL):
        file.tell(env)
    path.rmdir()
    file.look(30)
    assert path.read_text() == render(DUAL)


def test_subnet_file_is_not_written_without_contents(path: Path) -> None:
    file = File(path)
    file.look()
    assert not path.exists()
    assert file.state.problem == ""


def test_equal_subnet_file_of_an_earlier_run_is_replaced(path: Path) -> None:
    write(path, ENV)
    before = path.stat().st_ino
    File(path).tell(ENV)
    assert (path.read_text(), path.stat().st_ino == before) == (render(ENV), False)


def test_written_subnet_file_is_not_rewritten(path: Path) -> None:
    file = File(path)
    file.tell(ENV)
    before = stamp_of(path)  # without the time of the last read
    file.tell(ENV)
    file.look(100)
    assert stamp_of(path) == before


def test_unwritable_subnet_file_is_a_problem_until_it_succeeds(path: Path) -> None:
    file = File(path)
    path.mkdir(parents=True)
    file.tell(ENV)
    assert file.state.problem.startswith(f"cannot write {path}: ")
    path.rmdir()
    file.look(30)
    assert file.state.problem == ""


# What others do to the file.


def remove(path: Path) -> None:
    path.unlink()


def remove_directory(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


def change(path: Path) -> None:
    path.write_text(render(ENV).replace("10.5.72.1", "10.5.73.1"))


def replace_by_another(path: Path) -> None:
    path.with_name("other").write_text(render(DUAL))
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (remove, "removed"),
        (remove_directory, "removed"),
        (change, "changed"),
        (replace_by_another, "changed"),
    ],
)
def test_changed_subnet_file_is_restored_and_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], what: str
) -> None:
    caplog.set_level(logging.WARNING)
    file = File(path)
    file.tell(ENV)
    harm(path)
    file.look(3)
    assert path.read_text() == render(ENV)
    assert caplog.messages == [f"Restored {path}: another program had {what} it"]
    assert file.state.settled


def test_a_file_that_says_the_same_is_left_as_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = File(path)
    file.tell(ENV)
    path.with_name("copy").write_text(render(ENV))
    path.with_name("copy").replace(path)
    before = path.stat().st_ino
    file.look()
    assert path.stat().st_ino == before
    assert caplog.messages == []


def test_a_program_that_does_not_stop_is_given_way_to_and_told_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = File(path)
    file.tell(ENV)
    writes, contested = set(), False
    for _ in range(600):
        remove(path) if path.exists() else None
        file.look()
        contested |= file.state.contested
        writes |= {path.stat().st_ino, path.stat().st_mtime_ns} if path.exists() else set()
    assert contested
    assert len(writes) < 120
    assert len(caplog.messages) <= 16
    file.look(60.0)
    assert path.read_text() == render(ENV)
    assert file.state.settled


# Reading.


def test_a_missing_file_means_nothing_and_costs_no_import(path: Path) -> None:
    program = (
        "import sys, pathlib; from flanneld.subnet.subnet_file import read; "
        "print(read(pathlib.Path(sys.argv[1])), 'dotenv' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=True, text=True)
    assert done.stdout == f"{Previous()} False\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "content",
    [
        IPV4_LINES,
        IPV4_LINES.replace("\n", "\r\n"),
        IPV4_LINES.removesuffix("\n"),
        "\ufeff" + IPV4_LINES,
        "# ours\nexport FLANNEL_NETWORK='10.5.0.0/16'\nFLANNEL_SUBNET = \"10.5.72.1/24\" # mine\n",
        "FLANNEL_NETWORK=10.5.0.0/16,\nFLANNEL_SUBNET=10.5.72.99/24\n",
        "FLANNEL_NETWORK=junk, 10.5.0.0/16\nFLANNEL_SUBNET=,10.5.72.1/24\n",
        "FLANNEL_SUBNET=10.9.9.1/24\n???\n" + IPV4_LINES,
        IPV4_LINES.replace("=", ": "),
        "FLANNEL_NETWORK: '10.5.0.0/16' # by hand\r\n  export FLANNEL_SUBNET :10.5.72.1/24",
    ],
)
def test_subnet_files_of_upstream_and_by_hand_are_parsed(path: Path, content: str) -> None:
    assert remembered(path, content) == Previous((NETWORK,), (SUBNET, None))


def test_both_families_are_remembered(path: Path) -> None:
    assert remembered(path, (IPV6_LINES + IPV4_LINES).replace("=", ":")) == Previous(
        (NETWORK, IPV6_NETWORK), (SUBNET, IPV6_SUBNET)
    )
    assert remembered(path, IPV6_LINES + IPV4_LINES) == Previous(
        (NETWORK, IPV6_NETWORK), (SUBNET, IPV6_SUBNET)
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        "10.5.72.1",
        "10.5.72.1/255.255.255.0",
        "10.5.72.1/33",
        "10.5.72/24",
        "fc00::1/64",
        "10.5.72.1/24,10.5.73.1/24",
        "junk",
    ],
)
def test_a_value_that_is_not_one_network_is_logged_and_counts_as_none(
    path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = f"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET={value}\n"
    assert remembered(path, content) == Previous((NETWORK,), (None, None))
    assert f"FLANNEL_SUBNET in {path}" in caplog.text


def test_a_name_without_a_value_counts_as_none(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remembered(path, "FLANNEL_SUBNET\n") == Previous()
    assert "FLANNEL_SUBNET" in caplog.text


def test_a_variable_that_is_absent_is_no_news(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remembered(path, "FLANNEL_MTU=1450\n") == Previous(mtu=1450)
    assert caplog.records == []


@pytest.mark.parametrize("value", ["", "-5", "1450.5", "mtu", "1" * 5000])
def test_mtu_that_is_no_number_counts_as_none(path: Path, value: str) -> None:
    assert remembered(path, f"FLANNEL_MTU={value}\n").mtu is None


def test_our_environment_does_not_leak_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "10.5.72.1/24")
    assert remembered(path, "FLANNEL_SUBNET=${OTHER}\n") == Previous()


def test_invalid_subnet_file_is_logged_and_counts_as_empty(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    binary = path.with_name("binary")
    binary.write_bytes(IPV4_LINES.encode() + b"\xff")
    huge = path.with_name("huge")
    huge.write_text(IPV4_LINES + "#" * MAX_SIZE)
    for odd in (fifo, binary, huge, path.parent, Path("/dev/zero"), binary / "below"):
        caplog.clear()
        assert read(odd) == Previous()
        assert str(odd) in caplog.text


networks = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False),
    st.ip_addresses(v=4),
    st.integers(0, 32),
)
ipv6_networks = st.builds(
    lambda address, length: IPv6Network((address, length), strict=False),
    st.ip_addresses(v=6),
    st.integers(0, 128),
)


@given(network=networks, subnet=networks, mtu=st.integers(0, 65535), masq=st.booleans())
def test_an_ipv4_file_reads_back(
    scratch: Path, network: IPv4Network, subnet: IPv4Network, mtu: int, masq: bool
) -> None:
    write(scratch, SubnetEnv((network,), (subnet,), mtu, masq))
    assert read(scratch) == Previous((network,), (subnet, None), mtu)


@given(networks, networks, ipv6_networks, ipv6_networks)
def test_a_file_of_both_families_reads_back(
    scratch: Path,
    network: IPv4Network,
    subnet: IPv4Network,
    ipv6_network: IPv6Network,
    ipv6_subnet: IPv6Network,
) -> None:
    write(scratch, SubnetEnv((ipv6_network, network), (subnet, ipv6_subnet), 1450, True))
    assert read(scratch) == Previous((network, ipv6_network), (subnet, ipv6_subnet), 1450)


names = st.sampled_from(["FLANNEL_NETWORK", "FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET", "export ", "${A}"])
pieces = st.one_of(
    names, st.sampled_from(["10.5.72.1/24", "fc00::1/64"]), st.sampled_from("=,/%'\"\\#\n\r \0\x1c\x85")
)


@given(st.one_of(st.binary(), st.lists(pieces, max_size=20).map("".join).map(str.encode)))
def test_any_bytes_can_be_read(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    previous = read(scratch)
    assert len(previous.networks) <= 2
    subnet, ipv6_subnet = previous.subnets
    assert subnet is None or isinstance(subnet, IPv4Network)
    assert ipv6_subnet is None or isinstance(ipv6_subnet, IPv6Network)


def test_a_network_without_a_subnet_has_no_range(path: Path) -> None:
    dual = remembered(path, IPV4_LINES + IPV6_LINES)
    assert dual.ranges == ((NETWORK, 24), (IPV6_NETWORK, 64))
    half = remembered(path, IPV4_LINES + "FLANNEL_IPV6_NETWORK=fc00::/48\n")
    assert half.ranges == ((NETWORK, 24),)
