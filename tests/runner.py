"""Run lints and tests as steps, show what runs, and end with what failed or was not run; see tests/run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.order import record
from tests.report import NOT_RUN, REPEAT, TOOK, TRIED
from tests.vm.machine import SHARED, lacks

PYTHON = ".venv/bin/python"
PYTEST = (PYTHON, "-m", "pytest")
CORES = os.cpu_count() or 1
#: Tests wait for three quarters of their time, those of what decides never; others want their share.
WORKERS, WORKERS_BESIDE_OTHERS = 4 * CORES, 3 * CORES
MACHINES = 2  # with one CPU each
UNIT = ("tests/unit", "tests/fuzz", "tests/browser", "docs")
NAMESPACES = ("tests/netns", "tests/interop", "tests/faults", "tests/bench")
ALL = (*UNIT, *NAMESPACES)
#: Takes as long as all others of its folder.
HISTORIES = "tests/netns/test_model.py"
#: Unit tests that run servers and programs, or try every moment of a story. The others are of what decides.
SLOWER = (
    "backends/cloud",
    "backends/extension",
    "backends/udp",
    "ctl/test_stores.py",
    "diagnostics/test_health_server.py",
    "diagnostics/test_status_socket.py",
    "packaging",
    "runtime",
    "simulation/test_crash_points.py",
    "simulation/test_stale_views.py",
    "subnet/embedded",
    "subnet/etcd",
    "subnet/kube",
    "subnet/remote",
    "subnet/test_misbehaving_servers.py",
    "subnet/test_slow_servers.py",
    "subnet/test_stores.py",
    "test_report.py",
    "test_runner.py",
)
#: Tests marked ``needs_kernel`` run in the machine if this kernel lacks what they need.
FEATURES = ("ipip", "wireguard", "esp", "police", "own-clock")
SEARCH = (PYTHON, "-m", "tests.unit.simulation", "search")
#: What pytest gets to select tests, by the word that ``--long=`` runs alone.
PARTS = {
    "unit": UNIT,
    "netns": ("tests/netns", f"--ignore={HISTORIES}"),
    "histories": (HISTORIES,),
    "interop": ("tests/interop",),
    "faults": ("tests/faults",),
    "benchmarks": ("tests/bench",),
}
#: By the word that ``--long=`` runs alone, what is none of those.
LONG = {
    "image": (*PYTEST, "--long", "tests/image"),
    "recipes": (*PYTEST, "--long", "tests/recipes"),
    "mutation": (PYTHON, "-m", "tests.mutation"),
    "random-mutants": (PYTHON, "-m", "tests.mutation", "--random"),
    **{
        f"clusters-{store}": (*SEARCH, f"--store={store}", "--first=0", "--seeds=10000")
        for store in ("v2", "v3", "both", "kube")
    },
}
#: Runs a command beside four processes that want a whole core each.
BUSY = 'for _ in 1 2 3 4; do while :; do :; done & done; "$@"; status=$?; kill $(jobs -p); exit $status'
#: Seed of the order of a run without ``--shuffles``: a change is not to be blamed for the order.
SEED = 3614037022
#: Option of pytest with which it runs no test.
COLLECT = "--collect-only"
NO_TESTS = 5  # pytest's exit status when none was selected
PACE = 30.0  # seconds between two lines of progress, where one cannot overwrite the other


@dataclass(eq=False)
class Step:
    """One command, which begins when the step ``after`` has passed; ``reason`` says why it is not run.

    If it is ``optional`` it may be left out, and what it finds is told without a failure of the run.
    """

    name: str
    command: tuple[str, ...] = ()
    reason: str = ""
    optional: bool = False
    after: Step | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path(os.devnull)
    begin: float = 0.0  # on the monotonic clock
    seconds: float = 0.0
    cpu: float = 0.0  # seconds, of the command and all its processes
    status: int | None = None

    @property
    def verdict(self) -> str:
        if self.reason:
            return "not run"
        return "passed" if self.status == 0 else "found" if self.optional else "FAILED"

    @property
    def must_wait(self) -> bool:
        return self.after is not None and self.after.status is None and not self.after.reason

    @property
    def failed(self) -> bool:
        return self.verdict == "FAILED" or (self.verdict == "not run" and not self.optional)

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def __str__(self) -> str:
        if self.reason:
            return f"{self.verdict:<8} {self.name}: {self.reason}"
        return f"{self.verdict:<8} {self.name:<24} {self.seconds:6.1f} s, {self.cpu:.1f} s of CPU"


def plan(
    more: Sequence[str],
    *,
    fast: bool = False,
    long: str = "",
    is_root: bool = True,
    lacking: Sequence[str] = (),
    shared: str = "",
) -> list[list[Step]]:
    """Return the steps in lanes: those of a lane run one after the other, the lanes beside each other.

    ``more`` are arguments for pytest; ``lacking`` are the features that this kernel lacks. ``long`` is a part
    of what takes long, or "all". ``shared`` is a folder, in which machines divide their tests.
    """
    if long in LONG:
        return [[long_step(long, more)]]
    folders = PARTS.get(long, ALL)
    lanes = [
        [
            Step("ruff check", (".venv/bin/ruff", "check")),
            Step("ruff format", (".venv/bin/ruff", "format", "--check")),
            Step("mypy", (".venv/bin/mypy",)),
            Step("import-linter", (".venv/bin/lint-imports", "--no-logo")),
        ]
    ]
    if fast:
        deciding = (f"--ignore=tests/unit/{path}" for path in SLOWER)
        command = (*spread(CORES, more), *deciding, "tests/unit", "docs")
        lanes[0].append(Step("unit tests of what decides", command))
        return lanes
    lanes[0].append(Step("new clusters", (*SEARCH, "--seconds=15"), optional=True))
    here = (*spread(WORKERS_BESIDE_OTHERS if lacking else WORKERS, more), *needs("without", lacking))
    # Else each process of the tests, also in a machine, would compile them all for itself.
    collection = Step("collection of the tests", (*PYTEST, COLLECT, "-qq", *more, *folders))
    lanes.append([collection])
    if is_root:
        lanes[1].append(Step("tests", (*here, *folders)))
    else:
        reason = "they make network namespaces; run tests/run as root"
        lanes[1] += [Step("unit tests", (*here, *UNIT)), Step("tests in namespaces", reason=reason)]
    if namespaces := lacking and [folder for folder in folders if folder not in UNIT]:
        kernel = Step("kernel of the machine", ("tests/vm/build",), after=collection)
        limit = ("--limit", "10800" if long else "3600")
        inside = (PYTHON, "-m", "tests.vm.machine", "--shared", shared, *limit)
        only = (*PYTEST, *needs("only", lacking), "--claims", f"{SHARED}/claims")
        lanes.append([kernel])
        # One for the clock alone, which belongs to no host.
        for number in range(1, min(MACHINES, len(lacking)) + 1):
            command = (*inside, "--number", str(number), *only, *more, *namespaces)
            lanes.append([Step(f"tests in machine {number}", command, after=kernel)])
    why = "takes from minutes to hours; add --long, or --long="
    lanes[1] += [
        long_step(name, more) if long == "all" else Step(name, reason=f"{why}{name}", optional=True)
        for name in LONG
    ]
    return lanes


def spread(workers: int, more: Sequence[str]) -> tuple[str, ...]:
    """Return pytest with as many processes. Each takes neighbours: few make a module's fixture."""
    return (*PYTEST, "-n", str(workers), "--dist", "worksteal", *more)


def needs(which: str, lacking: Sequence[str]) -> tuple[str, ...]:
    """Return pytest's options for the tests with, without or only those that need what this kernel lacks."""
    return ("--needs-kernel", which, "--lacks", ",".join(lacking)) if lacking else ("--needs-kernel", "with")


def long_step(name: str, more: Sequence[str]) -> Step:
    """Return a step that takes long; ``more`` are arguments for pytest."""
    command = LONG[name]
    return Step(name, (*command, *more) if command[:3] == PYTEST else command)


class Progress:
    """One line about what runs: overwritten on a terminal, else written from time to time."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._begin = self._last = time.monotonic()

    def show(self, running: Iterable[Step]) -> None:
        now = time.monotonic()
        if now - self._last < (0.5 if self._is_terminal else PACE):
            return
        self._last = now
        minutes, seconds = divmod(int(now - self._begin), 60)
        line = f"{minutes}:{seconds:02d} " + " | ".join(
            f"{each.name}: {activity(each.text)}" for each in running
        )
        self._write(line[: shutil.get_terminal_size().columns - 1] if self._is_terminal else f"{line}\n")

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._is_terminal else text, end="", flush=True)


def activity(text: str) -> str:
    """Return what a command does, from its output so far: pytest's dots, or any other's last line."""
    marks = "".join(re.findall(r"^([.FEsxX]+)(?: +\[ *\d+%\])?$", text, re.MULTILINE))
    if marks:
        percent = re.findall(r"\[ *(\d+)%\]$", text, re.MULTILINE)
        bad = marks.count("F") + marks.count("E")
        return f"{percent[-1] if percent else 0} %" + (f", {bad} failed" if bad else "")
    return next((line for line in reversed(text.splitlines()) if line.strip()), "begun")


class Run:
    """The steps of a plan, each with its output in a file of ``folder``."""

    def __init__(self, lanes: Sequence[Sequence[Step]], folder: Path, *, selects: bool) -> None:
        self._waiting = [list(lane) for lane in lanes]
        self._running: dict[int, Step] = {}  # by lane
        self._folder = folder
        self._selects = selects  # arguments may select none of a step's tests
        self._progress = Progress()

    def go(self) -> None:
        """Run all to their end, or end them."""
        try:
            while any(self._waiting) or self._running:
                self._begin_and_end()
                self._progress.show(self._running.values())
                time.sleep(0.1)
        finally:
            self._progress.clear()
            for step in self._running.values():
                kill(step)

    def _begin_and_end(self) -> None:
        for lane, step in list(self._running.items()):
            if has_ended(step):
                del self._running[lane]
                if step.status == NO_TESTS and self._selects:
                    step.reason, step.optional = "the arguments select none of its tests", True
                self._say(step)
        for lane, steps in enumerate(self._waiting):
            if steps and lane not in self._running and not steps[0].must_wait:
                self._begin(lane, steps.pop(0))

    def _begin(self, lane: int, step: Step) -> None:
        if step.after is not None and step.after.verdict != "passed":
            step.reason = f"{step.after.name}: {step.after.verdict}"
        if step.reason:
            self._say(step)
            return
        step.log = self._folder / re.sub(r"\W+", "-", step.name)
        step.begin = time.monotonic()
        with step.log.open("wb") as output:
            step.process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
        self._running[lane] = step

    def _say(self, step: Step) -> None:
        self._progress.clear()
        if step.verdict == "FAILED":
            print(f"\n== {step.name}: {shlex.join(step.command)}\n{step.text}")
        print(step, flush=True)


def has_ended(step: Step) -> bool:
    """Ask without waiting; note when and how."""
    assert step.process is not None
    pid, status, usage = os.wait4(step.process.pid, os.WNOHANG)
    if not pid:
        return False
    step.status = step.process.returncode = os.waitstatus_to_exitcode(status)
    step.seconds = time.monotonic() - step.begin
    step.cpu = usage.ru_utime + usage.ru_stime
    return True


def kill(step: Step) -> None:
    """End a command and all its processes."""
    assert step.process is not None
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(step.process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            step.process.wait(10)


def summary(steps: Collection[Step]) -> str:
    """Return each verdict, the tests that were not run, counts, and the commands that repeat what failed."""
    lines = ["", "== summary", *map(str, steps)]
    said = [line for step in steps for line in step.text.splitlines()]
    lines += sorted({line for line in said if line.startswith((NOT_RUN, TRIED))})
    for step in steps:
        if step.verdict in ("FAILED", "found"):
            lines += failures(step) or [REPEAT + shlex.join(step.command)]
    return "\n".join(lines)


def failures(step: Step) -> list[str]:
    """Return the commands that repeat the tests that failed so far."""
    return [line for line in step.text.splitlines() if line.startswith(REPEAT)]


def passed(steps: Collection[Step]) -> bool:
    """Return True if nothing failed, and some tests ran."""
    ran = [step for step in steps if step.verdict == "passed"]
    tests_ran = any("pytest" in step.command and COLLECT not in step.command for step in ran)
    return (tests_ran or any(step.name in LONG for step in ran)) and not any(step.failed for step in steps)


def shuffles(more: Sequence[str], times: int, lacking: Sequence[str]) -> list[list[Step]]:
    """Return runs of the tests on this host, each in an order of its own, three of them while it is busy."""
    tests = (*needs("without", lacking), *ALL)
    busy = ("bash", "-c", BUSY, "busy", *spread(WORKERS_BESIDE_OTHERS, more), *tests)
    idle = (*spread(WORKERS, more), *tests)
    return [
        [
            Step(f"shuffle {number} beside busy ones", busy)
            if number <= 3
            else Step(f"shuffle {number}", idle)
            for number in range(1, times + 1)
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/run", allow_abbrev=False)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--long", default="", choices=["all", *PARTS, *LONG], metavar="PART")
    parser.add_argument("--shuffles", type=int, default=0, metavar="TIMES")
    parser.add_argument("--randomly-seed", type=int, default=SEED, metavar="SEED")
    # Without "=" it takes no value: what follows is for pytest.
    chosen, more = parser.parse_known_args([re.sub("^--long$", "--long=all", each) for each in sys.argv[1:]])
    more += ["--long"] * bool(chosen.long)
    is_root = os.geteuid() == 0
    lacking = [feature for feature in FEATURES if is_root and lacks(feature)]
    # Each of several runs has its own order.
    has_order = not chosen.shuffles and "no:randomly" not in more
    order = [f"--randomly-seed={chosen.randomly_seed}"] if has_order else []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="flanneld-tests-") as folder:
        if chosen.shuffles:
            lanes = shuffles(more, chosen.shuffles, lacking)
        else:
            lanes = plan(
                [*more, *order],
                fast=chosen.fast,
                long=chosen.long,
                is_root=is_root,
                lacking=lacking,
                shared=folder,
            )
        steps = [step for lane in lanes for step in lane]
        try:
            Run(lanes, Path(folder), selects=bool(more)).go()
        except KeyboardInterrupt:
            print(*(line for step in steps for line in failures(step)), "interrupted", sep="\n")
            return 130
        for line in (line for step in steps for line in step.text.splitlines() if line.startswith(TOOK)):
            record("machine", json.loads(line.removeprefix(TOOK)))
        print(summary(steps))
        if order:
            given = [each for each in sys.argv[1:] if each not in order]
            print(f"order: {shlex.join(['tests/run', *given, *order])}")
    return 0 if passed(steps) else 1


if __name__ == "__main__":
    sys.exit(main())
