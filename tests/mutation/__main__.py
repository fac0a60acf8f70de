"""Make mutants of the deciding modules and run the unit tests of their module on each.

Fails if the tests kill less than 95 % of the mutants, or if survivors.toml does not name a survivor.
Works on copies, so the code itself is never changed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

from tests.mutation.mutants import Mutant, sample

GOAL = 0.95
COUNT = 650
SEED = 1
#: Seconds beyond ten times what the tests take. Generous, since a mutant that takes longer counts as killed.
GRACE = 30.0
#: Bytes of address space for one run of the tests: a mutant may ask for all there is.
MEMORY = 4 << 30

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Job:
    """One run of a module's tests; without a mutant, of the code as it is."""

    module: str
    tests: tuple[str, ...]
    mutant: Mutant | None = None
    limit: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """``output`` is that of the tests."""

    killed: bool
    timed_out: bool
    seconds: float
    output: str


def main() -> int:
    arguments = _arguments()
    modules: dict[str, list[str]] = tomllib.loads((HERE / "modules.toml").read_text())
    tests = {module: tuple(modules[module]) for module in arguments.modules or modules}
    sources = {module: (ROOT / module).read_text() for module in tests}
    mutants = sample(sources, arguments.count, arguments.seed)
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ProcessPoolExecutor(arguments.jobs, initializer=_enter_copy, initargs=(folder,)) as pool,
    ):
        plain = [Job(module, tests[module]) for module in tests]
        limits = {}
        for job, outcome in zip(plain, pool.map(_run, plain), strict=True):
            if outcome.killed:
                sys.exit(f"{outcome.output}\nthe tests of {job.module} fail without a mutant")
            limits[job.module] = GRACE + 10 * outcome.seconds
        mutated = [Job(each.module, tests[each.module], each, limits[each.module]) for each in mutants]
        return _report(zip(mutants, pool.map(_run, mutated), strict=True), _accepted())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "modules", nargs="*", metavar="flanneld/....py", help="modules (default: all in modules.toml)"
    )
    parser.add_argument("--count", type=int, default=COUNT, help="number of mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the sample (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per CPU)")
    return parser.parse_args()


def _accepted() -> dict[Key, str]:
    known = tomllib.loads((HERE / "survivors.toml").read_text()).get("survivor", [])
    return {(each["module"], each["was"], each["now"]): each["reason"] for each in known}


# ---- in a process of the pool --------------------------------------------------------------------


def _enter_copy(folder: str) -> None:
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in ("flanneld", "tests"):
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    os.chdir(copy)
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"  # cosmic-ray reads nothing else
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _run(job: Job) -> Outcome:
    options = "-x -q -p no:cacheprovider --hypothesis-profile=mutation"
    command = f"{sys.executable} -m pytest {options} {' '.join(job.tests)}"
    path, begin = Path(job.module), time.monotonic()
    source = path.read_text()
    try:
        if job.mutant is not None:
            path.write_text(job.mutant.text)
        result, output = run_tests(command, job.limit)
    finally:
        path.write_text(source)
    if result is TestOutcome.INCOMPETENT:
        raise RuntimeError(f"the tests of {job.module} cannot be run: {output}")
    return Outcome(result is TestOutcome.KILLED, output == "timeout", time.monotonic() - begin, output)


# ---- the report ----------------------------------------------------------------------------------


def _report(results: Iterable[tuple[Mutant, Outcome]], accepted: dict[Key, str]) -> int:
    """Print each survivor without a reason as it is found, then the figures."""
    total, killed, late, unnamed = Counter[str](), Counter[str](), 0, 0
    for mutant, outcome in results:
        total[mutant.module] += 1
        killed[mutant.module] += outcome.killed
        late += outcome.timed_out
        if not outcome.killed and (mutant.module, mutant.was, mutant.now) not in accepted:
            unnamed += 1
            print(_as_entry(mutant), flush=True)
    for module in sorted(total):
        print(f"{killed[module]:4d} of {total[module]:3d}  {module}")
    all_killed, count = killed.total(), total.total()
    print(f"{all_killed} of {count} mutants killed ({all_killed / count:.1%}), {late} by the time limit")
    print(f"{count - all_killed - unnamed} survived for a reason in survivors.toml, {unnamed} without one")
    return 1 if unnamed or all_killed < GOAL * count else 0


def _as_entry(mutant: Mutant) -> str:
    facts = {"module": mutant.module, "was": mutant.was, "now": mutant.now, "reason": ""}
    lines = [f"{name} = {_quoted(text)}" for name, text in facts.items()]
    return "\n".join(["", f"[[survivor]]  # line {mutant.line}", *lines])


def _quoted(text: str) -> str:
    """A TOML string."""
    return f"'{text}'" if "'" not in text else f"'''{text}'''"


if __name__ == "__main__":
    sys.exit(main())
