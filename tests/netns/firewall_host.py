"""A host with nothing but packet filters, and the daemon's firewall task on it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from tests.lab import Namespace, wait_for
from tests.lab.daemon import ROOT
from tests.lab.namespace import batch, remove
from tests.netns.rule_keeper import STARTED, STEP

NETS = [("10.5.0.0/16", "10.5.72.0/24"), ("fc00:5::/48", "fc00:5:0:72::/64")]
#: Where rules can be, and what the task is told to put them there.
WAYS: dict[str, dict[str, Any]] = {
    "nft": {"flavour": "nft"},
    "legacy": {"flavour": "legacy", "without_python_iptables": True},
    "python-iptables": {"flavour": "legacy"},
    "nftables": {"native": True},
}
#: Every program of iptables that could be started.
PROGRAMS = [
    f"{family}tables{flavour}{suffix}"
    for family in ("ip", "ip6")
    for flavour in ("-nft", "-legacy", "")
    for suffix in ("", "-restore", "-save")
]
MARK = "flannel-test-mark"

_numbers = itertools.count(1)


class Keeper:
    """The firewall task in a process of its own."""

    def __init__(self, host: Host, wishes: dict[str, Any], environment: dict[str, str], before: str) -> None:
        self._path = host.directory / f"keeper-{next(_numbers)}.log"
        task = (sys.executable, "-m", "tests.netns.rule_keeper", json.dumps({"nets": NETS} | wishes))
        command = ("sh", "-ec", f'{before}; exec "$@"' if before else 'exec "$@"', "sh", *task)
        everything = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "XTABLES_LOCKFILE": str(host.lock),
            **environment,
        }
        with self._path.open("wb") as output:
            self._process = host.namespace.start(*command, output=output, environment=everything)

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._path.read_text()

    def lines(self, severities: str = "WEF") -> list[str]:
        """What was logged with these severities, without the head of the line."""
        return [
            line.partition("] ")[2]
            for line in self.log().splitlines()
            if re.match(f"[{severities}][0-9]{{4}} ", line)
        ]

    def wait_started(self) -> None:
        def started() -> bool:
            assert self._process.poll() is None, self.log()
            return STARTED in self.log()

        wait_for(started, 20, "the rules to be set")

    def wait_for_line(self, what: str, deadline: float = 5) -> None:
        wait_for(lambda: what in self.log(), deadline, f"the log to say {what!r}; it says:\n{self.log()}")

    def steps(self) -> int:
        """Return the number of the task's steps: with right rules each is an audit of some tables."""
        return self.log().count(STEP)

    def times(self, what: str) -> list[float]:
        """When lines that hold this were logged, in seconds since the first of them."""
        lines = [line for line in self.log().splitlines() if what in line]
        moments = [datetime.strptime(line.split()[1], "%H:%M:%S.%f") for line in lines]
        return [(moment - moments[0]) % timedelta(days=1) / timedelta(seconds=1) for moment in moments]

    def stop(self) -> None:
        """Ask it to end and wait for that."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # tells where its threads are
            self._process.wait()
            raise AssertionError(f"it does not end:\n{self.log()}") from None

    def wait(self) -> int:
        return self._process.wait(60)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Watched:
    """All that ``nft monitor`` has seen since this was made."""

    def __init__(self, host: Host, path: Path) -> None:
        self._host = host
        self._path = path
        # It says nothing when it is ready: it has to see something first.
        wait_for(lambda: self._set_mark() and MARK in path.read_text(), 5, "nft monitor to listen")

    def changes(self) -> list[str]:
        """One line for each, up to now."""
        last = self._set_mark()
        wait_for(
            lambda: f"delete table inet {last}\n" in self._path.read_text(), 5, "nft monitor to catch up"
        )
        lines = self._path.read_text().splitlines()
        return [line for line in lines if MARK not in line and not line.startswith("# new generation")]

    def _set_mark(self) -> str:
        """Make a change that is known from all others."""
        mark = f"{MARK}-{next(_numbers)}"
        self._host.sh(f"nft add table inet {mark}; nft delete table inet {mark}")
        return mark


class Host:
    """A network namespace. Its lock for the legacy tables is its own."""

    def __init__(self, namespace: Namespace, directory: Path) -> None:
        self.namespace = namespace
        self.directory = directory
        self.lock = directory / "xtables.lock"
        self._keepers: list[Keeper] = []

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
        remove([self.namespace])

    def sh(self, script: str, stdin: str = "") -> str:
        """Run a shell script here to its end; what it says on stdout."""
        command = ("env", f"XTABLES_LOCKFILE={self.lock}", "sh", "-ec", script)
        return self.namespace.run(*command, stdin=stdin).stdout

    def start(self, *, environment: dict[str, str] | None = None, before: str = "", **wishes: Any) -> Keeper:
        """Start the task; ``before`` is what a shell does first, in its own view of the file system."""
        keeper = Keeper(self, wishes, environment or {}, before)
        self._keepers.append(keeper)
        return keeper

    def keep(self, *, environment: dict[str, str] | None = None, **wishes: Any) -> Keeper:
        """Start the task and wait until the rules have been set."""
        keeper = self.start(environment=environment, **wishes)
        keeper.wait_started()
        return keeper

    def set_once(self, **wishes: Any) -> str:
        """Let the task set the rules and end; what it logged."""
        keeper = self.keep(**wishes)
        keeper.stop()
        return keeper.log()

    def rules(self, flavour: str, family: int = 4) -> list[str]:
        """All rules, chain by chain: ``nat -A POSTROUTING -j ...``, without looking where nothing is."""
        names = Path(f"/proc/thread-self/net/ip{'6' if family == 6 else ''}_tables_names")
        with self.namespace.entered():
            if flavour == "legacy" and not names.read_text():
                return []
        table, found = "", []
        for line in self.sh(f"ip{'6' if family == 6 else ''}tables-{flavour}-save").splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif line.startswith("-A"):
                found.append(f"{table} {line}")
        return sorted(found, key=lambda line: line.split()[:3])

    def chains(self, flavour: str) -> list[str]:
        """The chains of our own in the IPv4 tables."""
        return re.findall(r"^:(FLANNEL-\S+)", self.sh(f"iptables-{flavour}-save"), re.MULTILINE)

    def native(self, family: int = 4) -> str:
        """Our own table in nftables, empty when there is none."""
        names = f"{'ip' if family == 4 else 'ip6'} flannel-ipv{family}"
        return self.namespace.run("nft", "list", "table", *names.split(), check=False).stdout

    def state(self, way: str) -> list[str]:
        """All the rules of both families in the place that belongs to a way."""
        if way == "nftables":
            return (self.native(4) + self.native(6)).splitlines()
        flavour = "nft" if way == "nft" else "legacy"
        return self.rules(flavour, 4) + self.rules(flavour, 6)

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """What changes in nf_tables meanwhile."""
        path = self.directory / f"monitor-{next(_numbers)}"
        with path.open("wb") as output:
            process = self.namespace.start("nft", "monitor", output=output)
        try:
            yield Watched(self, path)
        finally:
            process.kill()
            process.wait()

    def spies(self) -> tuple[dict[str, str], Path]:
        """An environment in which each start of a program of iptables is noted in a file."""
        notes = self.directory / "notes"
        notes.touch()
        self.stub(
            PROGRAMS,
            f'name=${{0##*/}}; echo "$name $*" >>{notes}; exec -a "$name" "/usr/sbin/$name" "$@"',
        )
        return {"PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}"}, notes

    def stub(self, programs: list[str], script: str) -> dict[str, str]:
        """Put a script in the place of programs; the environment in which it is found."""
        place = self.directory / "bin"
        place.mkdir(exist_ok=True)
        for program in programs:
            path = place / program
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(0o755)
        return {"PATH": f"{place}:{os.environ['PATH']}"}


@contextmanager
def host(directory: Path) -> Iterator[Host]:
    namespace = Namespace(f"fl{os.getpid()}.host{next(_numbers)}")
    batch(f"netns add {namespace.name}")
    made = Host(namespace, directory)
    try:
        yield made
    finally:
        made.close()
