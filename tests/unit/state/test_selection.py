"""Which tests run on this host and which in the test machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SAMPLE = ("tests/netns/test_ipip.py", "tests/netns/test_lab.py")


def collected(which: str) -> set[str]:
    command = (sys.executable, "-m", "pytest", "--collect-only", "--needs-kernel", which, *SAMPLE)
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in said.splitlines() if "::" in line}


def test_each_test_runs_either_on_the_host_or_in_the_machine() -> None:
    everywhere, host, machine = collected("with"), collected("without"), collected("only")
    assert host
    assert machine
    assert host | machine == everywhere
    assert not host & machine
