"""Which processes count as running daemons, and how each is stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flanneld.diagnostics.cleanup import how_to_stop, is_daemon, running


@pytest.mark.parametrize(
    ("names", "words", "expected"),
    [
        (["flanneld"], ["/opt/bin/flanneld", "--kube-subnet-mgr"], True),
        (["flanneld-amd64"], ["./flanneld-amd64", "-ip-masq"], True),
        (["flanneld", "python3.11"], ["/venv/bin/python", "/venv/bin/flanneld", "-v=1"], True),
        (["python3.11", "python3.11"], ["python3", "-m", "flanneld"], True),
        (["python3.11", "python3.11"], ["python3.11", "-P", "-m", "flanneld", "-iface=eth0"], True),
        (["python3.11"], ["python3", "-S", "-P", "-m", "flanneld.backends.udp.proxy", "flannel0"], False),
        (["flanneld"], ["/venv/bin/python", "/venv/bin/flanneld", "--cleanup"], False),
        (["flanneld"], ["flanneld", "-plan=true"], False),
        (["flannelctl"], ["/venv/bin/python", "/venv/bin/flannelctl", "status"], False),
        (["sudo"], ["sudo", "flanneld", "-ip-masq"], False),
        (["bash"], ["bash", "-c", "flanneld"], False),
        (["kworker/0:1"], [], False),
        (["python3"], ["python3", "-i"], False),
    ],
)
def test_a_daemon_is_known_by_its_name_and_call(names: list[str], words: list[str], expected: bool) -> None:
    assert is_daemon(names, words) is expected


@pytest.mark.parametrize(
    ("cgroup", "remedy"),
    [
        ("0::/system.slice/flanneld.service\n", "systemctl stop flanneld.service"),
        (
            "1:name=systemd:/system.slice/flanneld@blue.service\n0::/\n",
            "systemctl stop flanneld@blue.service",
        ),
        (
            "1:x:/a.slice/flanneld@red.service\n0::/flanneld@blue.service",
            "systemctl stop flanneld@red.service",
        ),
        (
            "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0123.scope\n",
            "kubectl delete its DaemonSet",
        ),
        ("0::/system.slice/docker-0123456789abcdef.scope\n", "docker stop 0123456789ab"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", "kill 42"),
        ("0::/system.slice/ssh.service\n", "kill 42"),
        ("", "kill 42"),
    ],
)
def test_the_remedy_fits_whoever_started_it(cgroup: str, remedy: str) -> None:
    assert how_to_stop(42, cgroup).startswith(remedy)


def process(proc: Path, pid: int, parent: int, *words: str) -> None:
    (proc / f"{pid}/ns").mkdir(parents=True)
    os.link(proc / "self/ns/net", proc / f"{pid}/ns/net")
    (proc / f"{pid}/comm").write_text(f"{Path(words[0]).name}\n")
    (proc / f"{pid}/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (proc / f"{pid}/status").write_text(f"Name:\tx\nPPid:\t{parent}\n")


def test_a_child_that_has_yet_to_become_another_program_is_no_daemon(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/net").touch()
    process(tmp_path, 100, 1, "/opt/bin/flanneld", "-ip-masq")
    process(tmp_path, 50, 100, "/opt/bin/flanneld", "-ip-masq")
    process(tmp_path, 101, 100, "iptables-nft-restore")
    process(tmp_path, 102, 100, "/opt/bin/flanneld", "-ip-masq")
    (tmp_path / "102/status").unlink()  # it ends while it is looked at
    process(tmp_path, 200, 1, "/opt/bin/flanneld", "-subnet-file=/other.env")
    assert [daemon.pid for daemon in running(tmp_path)] == [100, 200]


def test_this_process_and_those_that_started_it_are_no_other_daemons(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/net").touch()
    process(tmp_path, os.getpid(), 1_000_000, "/opt/bin/flanneld", "-ip-masq")
    process(tmp_path, 1_000_000, 1_000_001, "/opt/bin/flanneld-run")
    process(tmp_path, 1_000_001, 1, "/opt/bin/flanneld-service")
    process(tmp_path, 1_000_002, 1, "/opt/bin/flanneld")
    assert [daemon.pid for daemon in running(tmp_path)] == [1_000_002]


def test_daemon_of_another_network_namespace_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/net").touch()
    process(tmp_path, 1_000_000, 1, "/opt/bin/flanneld")
    (tmp_path / "1000000/ns/net").unlink()
    (tmp_path / "1000000/ns/net").touch()
    assert list(running(tmp_path)) == []
