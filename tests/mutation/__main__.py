"""Make mutants of the deciding modules and run the unit tests of their module on each.

Fails if the tests kill less than 95 % of the mutants, or if survivors.toml does not name a survivor.
Works on copies, so the code itself is never changed.

With --random the mutants are drawn from all of flanneld/. Each gets the unit tests that run its line, the
quickest first: as many as took a quarter of 60 s when that was recorded. One that survives these gets tests
in namespaces in the same way, as root; they are counted apart. Where no test runs the line, it survives.
Fails if less than 82 % of the mutants are killed.

A mutant is undecided if its tests fail or take too long without it as well. These do not count, nor do the
survivors that are named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

from tests.mutation import contexts
from tests.mutation.mutants import Mutant, sample
from tests.report import TRIED

GOAL, RANDOM_GOAL = 0.95, 0.82
COUNT, RANDOM_COUNT = 650, 200
SEED = 1
#: Seconds beyond ten times what the tests of a module take. Generous, since a mutant that takes longer counts
#: as killed.
GRACE = 30.0
#: Seconds for a random mutant, and what its tests took when they were recorded.
LIMIT, BUDGET = 60.0, 15.0
#: Bytes of memory for each process of the tests: a mutant may ask for all there is. Not of address space, as
#: etcd maps 10 GiB of its file.
MEMORY = 4 << 30
#: A mutant may signal every process or remove every device: as root it gets namespaces of its own. The shell
#: is their process 1, since a daemon that is one itself behaves like the only program of a container. The
#: tests' networks have folders in /dev/shm that are named by process: two sandboxes count processes alike.
_BEFORE = "mount -t tmpfs none /run && mount -t tmpfs none /dev/shm && ip link set lo up"
SANDBOX = (
    f"unshare --net --mount --pid --fork --kill-child --mount-proc sh -c '{_BEFORE} && \"$@\"; exit $?' sh "
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Job:
    """Runs of tests, files or single ones, until one fails; without a mutant, of the code as it is."""

    stages: tuple[tuple[str, ...], ...]
    mutant: Mutant | None = None
    limit: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """``output`` is that of the tests."""

    verdict: str
    seconds: float = 0.0
    output: str = ""


def main() -> int:
    arguments = _arguments()
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ProcessPoolExecutor(arguments.jobs, initializer=_enter_copy, initargs=(folder,)) as pool,
    ):
        jobs = list(_random_jobs(arguments) if arguments.random else _jobs_of_modules(arguments, pool))
        return _report(jobs, pool.map(_run, jobs), is_random=arguments.random)


def _jobs_of_modules(arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> Iterator[Job]:
    modules: dict[str, list[str]] = tomllib.loads((HERE / "modules.toml").read_text())
    tests = {module: tuple(modules[module]) for module in arguments.modules or modules}
    limits = {}
    for module, outcome in zip(tests, pool.map(_run, (Job((each,)) for each in tests.values())), strict=True):
        if outcome.verdict != "survived":
            sys.exit(f"{outcome.output}\nthe tests of {module} fail without a mutant")
        limits[module] = GRACE + 10 * outcome.seconds
    for each in sample(_sources(tests), arguments.count or COUNT, arguments.seed or SEED):
        yield Job((tests[each.module],), each, limits[each.module])


def _random_jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 32)
    print(f"--random --seed {seed}", flush=True)
    record = contexts.Record()
    modules = [str(path.relative_to(ROOT)) for path in ROOT.glob("flanneld/**/*.py")]
    for mutant in sample(_sources(modules), arguments.count or RANDOM_COUNT, seed):
        stages = record.tests_of(mutant.module, mutant.line)
        yield Job(tuple(_affordable(mutant, each, record.seconds) for each in stages), mutant, LIMIT)


def _affordable(mutant: Mutant, tests: list[str], seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Return the tests that are named like the module, then the quickest, at least one.

    One case of each test comes before a second, since cases of one test have much in common.
    """
    cases, rank = Counter[str](), dict[str, int]()
    for test in tests:
        name = test.partition("[")[0]
        rank[test] = cases[name]
        cases[name] += 1
    tests.sort(key=lambda test: (f"/test_{Path(mutant.module).stem}.py" not in test, rank[test]))
    ends = itertools.accumulate(seconds[test] for test in tests)
    return tuple(tests[: max(1, sum(end < BUDGET for end in ends))])


def _sources(modules: Iterable[str]) -> dict[str, str]:
    return {module: (ROOT / module).read_text() for module in modules}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "modules", nargs="*", metavar="flanneld/....py", help="modules (default: all in modules.toml)"
    )
    parser.add_argument("--random", action="store_true", help="draw from all of flanneld/")
    parser.add_argument("--count", type=int, help=f"mutants (default {COUNT}, random {RANDOM_COUNT})")
    parser.add_argument("--seed", type=int, help=f"seed of the sample (default {SEED}, or a random one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per CPU)")
    return parser.parse_args()


# ---- in a process of the pool --------------------------------------------------------------------


def _enter_copy(folder: str) -> None:
    copy = Path(tempfile.mkdtemp(dir=folder)) / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__"))
    (copy / ".venv").symlink_to(ROOT / ".venv")
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # for processes that the tests start
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"  # cosmic-ray reads nothing else
    os.environ |= {contexts.RESULTS: "results.json", contexts.CHOSEN: "chosen.json"}
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _run(job: Job) -> Outcome:
    outcome = Outcome("no test runs the line")
    for tests in filter(None, job.stages):
        outcome = _run_stage(tests, job)
        if outcome.verdict != "survived":
            break
    return outcome


def _run_stage(tests: tuple[str, ...], job: Job) -> Outcome:
    begin = time.monotonic()
    if job.mutant is None:
        killed, output = _fails(tests, job.limit)
    else:
        path = Path(job.mutant.module)
        source = path.read_text()
        try:
            path.write_text(job.mutant.text)
            killed, output = _fails(tests, job.limit)
        finally:
            path.write_text(source)
    seconds = time.monotonic() - begin
    if not killed:
        return Outcome("survived", seconds, output)
    failed = json.loads(Path("results.json").read_text())["failed"]
    again = tests if output == "timeout" else failed
    if job.mutant is not None and again and _fails(again, job.limit)[0]:
        return Outcome("undecided", seconds, output)
    where = "in namespaces" if tests[0].startswith(contexts.NAMESPACES) else "by unit tests"
    how = "killed by the time limit" if output == "timeout" else "killed"
    return Outcome(f"{how} {where}", seconds, output)


def _fails(tests: Iterable[str], limit: float) -> tuple[bool, str]:
    """Run files or single tests. Return True if one fails, and the output; "timeout" after the limit."""
    Path("results.json").write_text('{"failed": []}')
    Path("chosen.json").write_text(json.dumps(list(tests)))
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    options = f"-x -q {contexts.PLUGIN} --hypothesis-profile=mutation"
    command = f"{sys.executable} -m pytest {options} {' '.join(files)}"
    result, output = run_tests((SANDBOX if os.geteuid() == 0 else "") + command, limit)
    if result is TestOutcome.INCOMPETENT:
        raise RuntimeError(f"{command} cannot be run: {output}")
    return result is TestOutcome.KILLED, output


# ---- the report ----------------------------------------------------------------------------------


def _report(jobs: Sequence[Job], outcomes: Iterable[Outcome], *, is_random: bool) -> int:
    """Print each survivor without a reason as it is found, then the figures."""
    accepted = _accepted()
    verdicts, total, killed = Counter[str](), Counter[str](), Counter[str]()
    for job, outcome in zip(jobs, outcomes, strict=True):
        mutant, verdict = job.mutant, outcome.verdict
        assert mutant is not None
        is_killed = verdict.startswith("killed")
        if not is_killed and (mutant.module, mutant.was, mutant.now) in accepted:
            verdict = "named in survivors.toml"
        elif not is_killed:
            print(_as_entry(mutant, f"{verdict}, {verdicts.total() + 1} of {len(jobs)}"), flush=True)
        verdicts[verdict] += 1
        total[mutant.module] += 1
        killed[mutant.module] += is_killed
    for module in sorted(total):
        print(f"{killed[module]:4d} of {total[module]:3d}  {module}")
    for verdict, number in verdicts.most_common():
        print(f"{number:4d} {verdict}")
    named, undecided = verdicts["named in survivors.toml"], verdicts["undecided"]
    all_killed, count = killed.total(), verdicts.total() - undecided - (named if is_random else 0)
    print(f"{TRIED}{count} mutants, {all_killed} of them killed ({all_killed / count:.1%})")
    if is_random:
        return 1 if all_killed < RANDOM_GOAL * count else 0
    return 1 if all_killed < GOAL * count or all_killed + named < count else 0


def _accepted() -> dict[Key, str]:
    known = tomllib.loads((HERE / "survivors.toml").read_text()).get("survivor", [])
    return {(each["module"], each["was"], each["now"]): each["reason"] for each in known}


def _as_entry(mutant: Mutant, verdict: str) -> str:
    facts = {"module": mutant.module, "was": mutant.was, "now": mutant.now, "reason": ""}
    lines = [f"{name} = {_quoted(text)}" for name, text in facts.items()]
    return "\n".join(["", f"[[survivor]]  # line {mutant.line}: {verdict}", *lines])


def _quoted(text: str) -> str:
    """A TOML string."""
    return f"'{text}'" if "'" not in text else f"'''{text}'''"


if __name__ == "__main__":
    sys.exit(main())
