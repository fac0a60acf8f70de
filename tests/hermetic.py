"""Hooks of pytest that fail a session after which this host is not as it was.

Tests work in network namespaces and folders of their own. A daemon that one of them starts without saying
where its files are would read and write those of a real node.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("/var/lib/flannel", "/run/flannel")
#: By what is asked for, the command and the facts that nobody but a person or a daemon changes.
COMMANDS = {
    "link": ("link", ("ifname", "address", "mtu", "master")),
    "IPv4 route": ("-4 route show table all", ("type", "dst", "gateway", "dev", "table", "metric")),
    "IPv6 route": ("-6 route show table all", ("type", "dst", "gateway", "dev", "table", "metric")),
    "IPv4 rule": ("-4 rule", ("priority", "src", "dst", "fwmark", "iif", "oif", "table", "action")),
    "IPv6 rule": ("-6 rule", ("priority", "src", "dst", "fwmark", "iif", "oif", "table", "action")),
}
#: Routes that come and go by themselves.
_OF_OTHERS = ("ra", "redirect", "dhcp")
_BEFORE = pytest.StashKey[set[str]]()
_CHANGES = pytest.StashKey[list[str]]()


def state_of_host() -> set[str]:
    """Return one line for each link, route, rule and file that tests must leave as it is."""
    lines = {f"file {path} {path.lstat().st_mtime_ns}" for top in FOLDERS for path in Path(top).rglob("*")}
    lines |= {f"folder {top}" for top in FOLDERS if Path(top).exists()}
    for what, (words, facts) in COMMANDS.items():
        lines |= {f"{what} {' '.join(_facts(row, facts))}" for row in _rows("ip", "-j", *words.split())}
    if shutil.which("nft"):
        done = subprocess.run(["nft", "-s", "list", "ruleset"], capture_output=True, text=True, check=False)
        lines |= {f"firewall {line.strip()}" for line in done.stdout.splitlines()}
    return lines


def _rows(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return [row for row in rows if row.get("protocol") not in _OF_OTHERS]


def _facts(row: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    return [f"{name}={row[name]}" for name in names if name in row]


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # once, in the process that has started the workers
        session.config.stash[_BEFORE] = state_of_host()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(_BEFORE, None)
    if before is None:
        return
    after = state_of_host()
    changes = [f"- {line}" for line in sorted(before - after)] + [
        f"+ {line}" for line in sorted(after - before)
    ]
    session.config.stash[_CHANGES] = changes
    if changes and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if changes := config.stash.get(_CHANGES, []):
        terminalreporter.section("the host is not as it was before the tests", red=True)
        terminalreporter.write_line(
            "Find the test that does not say where its files are, or works on the host:"
        )
        for line in changes:
            terminalreporter.write_line(line)
