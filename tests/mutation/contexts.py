"""Which tests run a line of flanneld/: a pytest plug-in that records it, and the record, one for each tree.

Coverage starts in each Python process and names the test by PYTEST_CURRENT_TEST: daemons in namespaces count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tests.lab.forks import FORKS
from tests.lab.node import Node
from tests.runner import WORKERS

ROOT = Path(__file__).parents[2]
UNIT, NAMESPACES = ("tests/unit/", "tests/fuzz/"), ("tests/netns/", "tests/faults/")
#: Variables for the plug-in: the file for the results, and the file with the tests to run.
RESULTS, CHOSEN = "MUTATION_RESULTS", "MUTATION_CHOSEN"
PLUGIN = f"-p {__name__} -p no:cacheprovider -p no:randomly"
_CONFIG = """[run]
source = {root}/flanneld
data_file = {folder}/lines
context = ${{PYTEST_CURRENT_TEST-}}
parallel = true
patch = _exit
sigterm = true
"""
_seconds: defaultdict[str, float] = defaultdict(float)
_failed: list[str] = []


def pytest_configure() -> None:
    if Coverage.current():
        # A process that is killed records nothing.
        Node.kill = Node.stop  # type: ignore[method-assign]
        subprocess.Popen.kill = _end  # type: ignore[assignment, method-assign]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process by SIGTERM; one that ignores it, as unshare(1) does, by SIGKILL."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.send_signal(signal.SIGKILL)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHOSEN in os.environ:
        chosen = frozenset(json.loads(Path(os.environ[CHOSEN]).read_text()))
        items[:] = [item for item in items if chosen & {item.nodeid, item.nodeid.partition("::")[0]}]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if coverage := Coverage.current():
        coverage.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if coverage := Coverage.current():
        coverage.save()
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[RESULTS]).write_text(json.dumps({"seconds": _seconds, "failed": _failed}))


class Record:
    """The tests that passed, the lines that each runs and the seconds that it takes; cached by tree."""

    def __init__(self) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flanneld-tests"
        folder = cache / f"lines-{_hash_of_tree()}"
        results = folder / "results.json"
        if not results.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _make(folder, results)
        found = json.loads(results.read_text())
        passed = found["seconds"].keys() - set(found["failed"])
        self.seconds: dict[str, float] = {test: found["seconds"][test] for test in passed}
        self._lines = CoverageData(str(folder / "lines"))
        self._lines.read()

    def tests_of(self, module: str, line: int) -> tuple[list[str], list[str]]:
        """Return the unit tests that run a line, and those in namespaces, quickest first.

        A line that runs on import gets the tests that run a line with its name, else any of the module.
        """
        source, contexts = (ROOT / module).read_text(), self._lines.contexts_by_lineno(str(ROOT / module))
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
        lines: Iterable[int] = [line]
        if not any(isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line for node in around):
            parts = [part for node in around if isinstance(node, ast.Assign) for part in node.targets]
            names = re.findall(r"\w+", " ".join(map(ast.unparse, parts)))
            named = re.compile("|".join(rf"\b{name}\b" for name in names) or "$^")
            texts = enumerate(source.splitlines(), 1)
            lines = [number for number, text in texts if named.search(text) and any(contexts.get(number, ()))]
            lines = lines or contexts
        # A subprocess adds the phase: "tests/unit/test_x.py::test_y (call)".
        found = {context.partition(" (")[0] for number in lines for context in contexts.get(number, ())}
        tests = sorted(found & self.seconds.keys(), key=self.seconds.__getitem__)
        unit = [test for test in tests if test.startswith(UNIT)]
        return unit, [test for test in tests if test.startswith(NAMESPACES)]


def _make(folder: Path, results: Path) -> None:
    print(f"recording which tests run each line, into {folder}", flush=True)
    config = folder / "config"
    config.write_text(_CONFIG.format(root=ROOT, folder=folder))
    # A forked program would write over the lines of the one before it.
    own = {"COVERAGE_PROCESS_START": str(config), RESULTS: str(results), FORKS: "0"}
    environment = os.environ | own
    folders = [*UNIT, *NAMESPACES] if os.geteuid() == 0 else UNIT
    options = f"-q -n {WORKERS} --dist worksteal --needs-kernel without {PLUGIN}"
    python = [sys.executable, "-m"]
    run = subprocess.run([*python, "pytest", *options.split(), *folders], cwd=ROOT, env=environment)
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not results.exists():
        results.unlink(missing_ok=True)
        sys.exit("the tests were not run: nothing is recorded")
    subprocess.run([*python, "coverage", "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)


def _hash_of_tree() -> str:
    files = [path for folder in ("flanneld", "tests") for path in (ROOT / folder).rglob("*.py")]
    parts = [f"{path}\0{path.read_text()}" for path in sorted(files) if path.parent != Path(__file__).parent]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
