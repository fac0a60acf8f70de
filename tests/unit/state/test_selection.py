"""Which tests run on this host and which in the test machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SAMPLE = ("tests/netns/test_ipip.py", "tests/netns/test_lab.py")


def collected(which: str, *more: str) -> set[str]:
    command = (sys.executable, "-m", "pytest", "--collect-only", "--needs-kernel", which, *more, *SAMPLE)
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in said.splitlines() if "::" in line}


def test_each_test_runs_either_on_the_host_or_in_the_machine() -> None:
    everywhere, host, machine = collected("with"), collected("without"), collected("only")
    assert host
    assert machine
    assert host | machine == everywhere
    assert not host & machine


def test_kernel_that_lacks_one_feature_has_only_its_tests_run_in_the_machine() -> None:
    host, machine = collected("without", "--lacks=ipip"), collected("only", "--lacks=ipip")
    assert {test.partition("::")[0] for test in machine} == {"tests/netns/test_ipip.py"}
    assert not host & machine
