"""The native data plane under AddressSanitizer and UndefinedBehaviorSanitizer, fed with whatever may come."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flanneld.backends.udp.proxy import native

SOURCES = Path(native.__file__).with_name("udp_pump")
HARNESS = Path(__file__).with_name("udp_pump_fuzz.c")
REPLACED = ("read", "recvmmsg", "sendmsg", "sendmmsg", "writev", "write", "poll", "setsockopt", "getsockopt")
SEED = 20261121
#: The latter with ``--long``. A second of a processor tries about a thousand cases of 150 packets each.
SECONDS, LONG_SECONDS = 5, 60


def test_random_packets_do_no_harm(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    program = str(tmp_path / "fuzz")
    build(program)
    seconds = LONG_SECONDS if pytestconfig.getoption("--long") else SECONDS
    done = subprocess.run([program, str(SEED), str(seconds)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "packets" in done.stdout


def build(program: str) -> None:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    wrap = [f"-Wl,--wrap={name}" for name in REPLACED]
    sources = [str(HARNESS), *sorted(map(str, SOURCES.glob("*.c")))]
    command = ["cc", "-std=gnu11", "-O1", "-g", *warnings, *sanitizers, f"-I{SOURCES}", *sources]
    subprocess.run([*command, "-pthread", *wrap, "-o", program], check=True)
