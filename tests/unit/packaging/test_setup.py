"""dist/setup on a host where another program uses apt."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes_objects import ROOT

#: Refuses twice as apt-get does whose lock another program holds, then for good.
APT_GET = """#!/bin/sh
echo call >>"$CALLS"
[ "$(wc -l <"$CALLS")" -gt 2 ] && { echo 'E: Unable to locate package' >&2; exit 100; }
echo 'E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)' >&2
exit 100
"""
PROGRAMS = ("bash", "cat", "dirname", "flock", "rm", "sh", "sleep", "wc", "chmod")


def test_setup_waits_for_the_lock_of_another_apt_and_says_so_once(tmp_path: Path) -> None:
    script, programs, calls = tmp_path / "dist/setup", tmp_path / "bin", tmp_path / "calls"
    script.parent.mkdir()
    shutil.copy(ROOT / "dist/setup", script)
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, text in {"apt-get": APT_GET, "id": "#!/bin/sh\necho 0\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    done = subprocess.run(
        ["bash", script, "--no-etcd"],
        env={**os.environ, "PATH": str(programs), "CALLS": str(calls)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.count("another program holds apt's lock; waiting for at most five minutes") == 1
    assert "E: Unable to locate package" in done.stderr
    assert done.stderr.endswith("set-up: apt-get failed\n")
    assert len(calls.read_text().splitlines()) == 4
