"""A session of tests that changes the host fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.daemon import ROOT

HOOKS = "from tests.hermetic import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary\n"
TEST = "import pathlib, subprocess\n\n\ndef test_that_passes():\n    {act}\n"
#: A host on which a real node keeps its cache.
HOST = """
mount -t tmpfs tmpfs /var/lib
mkdir /var/lib/flannel
echo '{}' >/var/lib/flannel/kube-nodes.json
exec "$@"
"""


@pytest.mark.parametrize(
    ("act", "line", "workers"),
    [
        ("pass", "", 0),
        ("pass", "", 2),
        ("subprocess.call(['ip', 'link', 'add', 'left', 'type', 'bridge'])", "+ link ifname=left", 2),
        ("subprocess.call(['ip', 'rule', 'add', 'to', '10.7.0.0/16'])", "+ IPv4 rule priority=32765", 0),
        ("subprocess.call(['ip', '-6', 'route', 'add', 'blackhole', 'fd07::/64'])", "+ IPv6 route", 0),
        ("subprocess.call(['nft', 'add', 'table', 'ip', 'left'])", "+ firewall table ip left", 0),
        (
            "pathlib.Path('/var/lib/flannel/kube-nodes.json').write_text('')",
            "- file /var/lib/flannel/kube-",
            0,
        ),
    ],
)
def test_session_fails_if_a_test_changes_the_host(tmp_path: Path, act: str, line: str, workers: int) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(TEST.format(act=act))
    host = ["unshare", "-n", "-m", "sh", "-ec", HOST, "sh", "env", f"PYTHONPATH={ROOT}"]
    session = [
        sys.executable,
        "-m",
        "pytest",
        "-c/dev/null",
        f"-n{workers}",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    done = subprocess.run([*host, *session], capture_output=True, text=True, check=False)
    assert (done.returncode, "1 passed" in done.stdout) == (int(bool(line)), True), done.stdout
    assert line in done.stdout
