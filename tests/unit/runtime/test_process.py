"""A daemon in a process that may have too little, or that was given what it does not know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Ends the daemon before it does anything, with status 1.
WRONG = "-etcd-keyfile=/no/such/file"
WRONG_SAID = "Failed to create SubnetManager: only one of -etcd-certfile and -etcd-keyfile is set"
LINE = re.compile(r"[IWEF]\d{4} .*\.py:\d+\] ")


@pytest.fixture(autouse=True)
def own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the lock and the history of the daemon under test beside no file of a real one."""
    for name in [name for name in os.environ if name.startswith("FLANNELD")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLANNELD_SUBNET_FILE", str(tmp_path / "subnet.env"))


def run(command: list[str], limits: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command under limits that a shell sets: between fork and exec Python might need more itself."""
    return subprocess.run(
        ["sh", "-c", f'{limits} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | variables,
    )


def daemon(
    *flags: str, limits: str = "true", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "flanneld", *flags], limits, variables or {})


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """All lines but those of mere information, without their heads."""
    return [LINE.sub("", line) for line in done.stderr.splitlines() if not line.startswith("I")]


# ---- limits -------------------------------------------------------------------------------------


def test_too_few_descriptors_are_one_line_and_status_1() -> None:
    done = daemon(limits="ulimit -n 8")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "may have 8 file descriptors, and flanneld needs 64; raise the limit: ulimit -n" in line


def test_a_low_limit_that_may_be_raised_is_no_obstacle() -> None:
    (line,) = complaints(daemon(WRONG, limits="ulimit -S -n 16"))
    assert line.startswith(WRONG_SAID)


def test_a_limit_that_is_high_enough_stays() -> None:
    code = (
        "from resource import *; from flanneld.runtime.process import ensure_descriptors;"
        " setrlimit(RLIMIT_NOFILE, (5000, 6000)); ensure_descriptors(); print(getrlimit(RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(5000, 6000)\n"


def starts(kibibytes: int) -> bool:
    """Python itself needs some memory."""
    command = [sys.executable, "-c", "import runpy, resource, flanneld"]
    # With too little memory it may loop in an import: the limit of CPU time ends it.
    return run(command, f"ulimit -t 5 && ulimit -v {kibibytes}", {}).returncode == 0


def sizes() -> Iterator[int]:
    least = next(size for size in range(8 << 10, 512 << 10, 1 << 10) if starts(size))
    return (least + (step << 10) for step in range(1, 24))


def test_too_little_memory_is_one_line_and_status_1_wherever_it_ends() -> None:
    said = set()
    for size in sizes():
        # Seconds of CPU time, of which a start takes 0.2: a busy machine does not use them up.
        done = daemon(WRONG, limits=f"ulimit -t 5 && ulimit -v {size}")
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        (line,) = complaints(done)
        said.add(line.removeprefix("flanneld: ").partition(";")[0])
    assert "out of memory" in said
    assert said <= {"out of memory", WRONG_SAID}


@pytest.mark.parametrize(
    ("flags", "status"), [("-no-such-flag", 2), (WRONG, 1), ("-version", 0), ("-healthz-port=99999", 1)]
)
def test_a_closed_standard_error_changes_no_status(flags: str, status: int) -> None:
    command = f"exec {sys.executable} -m flanneld {flags} 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")


# ---- variables ----------------------------------------------------------------------------------


def test_a_wrong_value_of_a_variable_is_one_line_and_status_2() -> None:
    done = daemon(variables={"FLANNELD_HEALTHZ_PORT": "many"})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        'invalid value "many" for FLANNELD_HEALTHZ_PORT: parse error; correct or unset it'
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FLANNELD_ETCD_ENDPOINT", "did you mean FLANNELD_ETCD_ENDPOINTS?"),
        ("FLANNELD_HEALTH_PORT", "did you mean FLANNELD_HEALTHZ_PORT?"),
        ("FLANNELD_XYZZY", "flanneld -help lists the flags"),
    ],
)
def test_an_unknown_variable_is_warned_about_with_the_nearest_known_one(name: str, hint: str) -> None:
    done = daemon(WRONG, variables={name: "1"})
    unknown, wrong = complaints(done)
    assert unknown == f"Unknown variable {name}; {hint}"
    assert wrong.startswith(WRONG_SAID)


def test_variables_of_go_flanneld_that_mean_nothing_here_are_told_so() -> None:
    told = daemon(WRONG, variables={"EVENT_QUEUE_DEPTH": "5000", "CONT_WHEN_CACHE_NOT_READY": "true"}).stderr
    assert "EVENT_QUEUE_DEPTH has no effect: changes of nodes wait in no queue" in told
    assert "CONT_WHEN_CACHE_NOT_READY has no effect: the start waits for the list of nodes" in told


def test_service_variables_of_kubernetes_are_no_unknown_flags() -> None:
    done = daemon(
        WRONG,
        variables={
            "FLANNELD_SERVICE_HOST": "10.96.0.7",
            "FLANNELD_SERVICE_PORT": "8471",
            "FLANNELD_SERVICE_PORT_HEALTH": "8471",
            "FLANNELD_PORT": "tcp://10.96.0.7:8471",
            "FLANNELD_PORT_8471_TCP": "tcp://10.96.0.7:8471",
            "FLANNELD_PORT_8471_TCP_ADDR": "10.96.0.7",
        },
    )
    (line,) = complaints(done)
    assert line.startswith(WRONG_SAID)
