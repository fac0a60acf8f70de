"""Outside ``runtime/`` no module waits, starts a thread, reads the wall clock or draws a random number.

So everything else can be stepped on a virtual clock: see tests/unit/simulation. Reading a socket or a pipe
that has a time limit is not found here: those are the thin shells around what is stepped.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flanneld

ROOT = Path(flanneld.__file__).parent

#: Programs of their own, each with the reason why it is not read here.
EXEMPT = {
    "backends/udp/proxy/": "the udp proxy is another program: it has a process, and nothing steps it",
}

#: Modules that are only good for waiting, for threads and processes, or for random numbers.
MODULES = frozenset(
    [
        "_thread",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "queue",
        "random",
        "sched",
        "secrets",
        "select",
        "selectors",
        "socketserver",
        "subprocess",
    ]
)
#: By module, what of it reads the wall clock, waits, starts threads or draws random numbers.
NAMES = {
    "time": frozenset(
        [
            "clock_gettime",
            "clock_gettime_ns",
            "monotonic",
            "monotonic_ns",
            "perf_counter",
            "perf_counter_ns",
            "process_time",
            "sleep",
            "thread_time",
            "time",
            "time_ns",
        ]
    ),
    "threading": frozenset(["Barrier", "BoundedSemaphore", "Condition", "Semaphore", "Thread", "Timer"]),
    "http": frozenset(["HTTPServer", "ThreadingHTTPServer"]),
    "os": frozenset(
        ["getrandom", "popen", "system", "urandom", "wait", "wait3", "wait4", "waitid", "waitpid"]
    ),
    "signal": frozenset(["pause", "sigtimedwait", "sigwait", "sigwaitinfo"]),
    "datetime": frozenset(["now", "today", "utcnow"]),
    "date": frozenset({"today"}),
    "uuid": frozenset(["uuid1", "uuid4"]),
}
#: Functions of ``time`` that read the clock unless they are given this many arguments.
ARGUMENTS = {"gmtime": 1, "localtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}
#: Methods that wait, by the number of arguments from which they are another thing's: of a lock, of a thread.
WAITS = {"acquire": 2, "communicate": 2, "join": 1, "wait": 9, "wait_for": 9}
#: Shells of ``runtime/`` that have a method ``wait``.
SHELLS = frozenset({"lock", "supervisor", "tasks", "_lock", "_supervisor"})


def sources() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(("runtime/", *EXEMPT)):
            yield path


def offences(source: str) -> list[str]:
    """Return the line and the text of each call or import that belongs into ``runtime/``."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt | ast.expr))
    return [f"{node.lineno}: {what}" for node in nodes for what in _offence(node)]


def _offence(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"import {each.name}" for each in names if each.name.split(".")[0] in MODULES)
            yield from (f"import {each.name} as {each.asname}" for each in names if _is_hidden(each))
        case ast.ImportFrom(module=str(module), names=names):
            top = module.split(".")[0]
            found = [each.name for each in names if each.name in NAMES.get(top, ()) or each.name == "*"]
            yield from (f"from {module} import {name}" for name in found)
            if top in MODULES:
                yield f"from {module} import ..."
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in NAMES.get(owner, ()):
            yield f"{owner}.{name}"
        case ast.Attribute(value=ast.Attribute(attr="datetime" | "date" as owner), attr=name) if (
            name in NAMES[owner]
        ):
            yield f"{owner}.{name}"
        case ast.Attribute(attr=name) if name in NAMES["http"]:
            yield f"http.server.{name}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name), args=args) if len(
            args
        ) < ARGUMENTS.get(name, 0):
            yield f"time.{name} of now"
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args) if len(args) < WAITS.get(
            name, 0
        ) and not (name == "wait" and _last(owner) in SHELLS):
            yield f"{ast.unparse(owner)}.{name}()"


def _is_hidden(module: ast.alias) -> bool:
    """Return True for another name of a module whose functions are looked for by its own."""
    return module.asname is not None and module.name.split(".")[0] in NAMES


def _last(owner: ast.expr) -> str:
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")


@pytest.mark.parametrize("path", [*sources()], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_leaves_waits_clocks_threads_and_chance_to_runtime(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("place", EXEMPT)
def test_exempt_place_exists(place: str) -> None:
    assert (ROOT / place).exists(), "it is gone: take it off the list"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import random", ["1: import random"]),
        ("from queue import SimpleQueue", ["1: from queue import ..."]),
        ("import concurrent.futures", ["1: import concurrent.futures"]),
        ("from time import sleep", ["1: from time import sleep"]),
        ("from threading import Lock, Thread", ["1: from threading import Thread"]),
        ("import time\ntime.sleep(1)", ["2: time.sleep"]),
        ("run(clock=time.time)", ["1: time.time"]),
        ("threading.Thread(target=f).start()", ["1: threading.Thread"]),
        ("os.urandom(6)", ["1: os.urandom"]),
        ("datetime.now()", ["1: datetime.now"]),
        ("datetime.datetime.now(UTC)", ["1: datetime.now"]),
        ("uuid.uuid4()", ["1: uuid.uuid4"]),
        ("time.strftime('%H')", ["1: time.strftime of now"]),
        ("time.gmtime()", ["1: time.gmtime of now"]),
        ("self._stop.wait(1)", ["1: self._stop.wait()"]),
        ("supervisor.stop.wait()", ["1: supervisor.stop.wait()"]),
        ("process.wait()", ["1: process.wait()"]),
        ("process.communicate()", ["1: process.communicate()"]),
        ("process.communicate(timeout=1)", ["1: process.communicate()"]),
        ("import subprocess", ["1: import subprocess"]),
        ("from subprocess import run", ["1: from subprocess import ..."]),
        ("from http.server import ThreadingHTTPServer", ["1: from http.server import ThreadingHTTPServer"]),
        ("http.server.ThreadingHTTPServer(here, serve)", ["1: http.server.ThreadingHTTPServer"]),
        ("from socketserver import ThreadingMixIn", ["1: from socketserver import ..."]),
        ("self._lock.acquire()", ["1: self._lock.acquire()"]),
        ("lock.acquire(True, timeout=3)", ["1: lock.acquire()"]),
        ("thread.join()", ["1: thread.join()"]),
        ("thread.join(timeout=3)", ["1: thread.join()"]),
        ("import time as t", ["1: import time as t"]),
        ("from time import *", ["1: from time import *"]),
        ("time.strftime('%H', time.gmtime(0))", []),
        ("from threading import Lock", []),
        ("self._supervisor.wait(tick)", []),
        ("waits.pause(stop, 1)", []),
        ("store.acquire(network, wanted, caller)", []),
        ("', '.join(words)", []),
        ("from http.server import BaseHTTPRequestHandler", []),
        ("with self._lock: pass", []),
    ],
)
def test_lint_finds_each_way_to_wait_and_nothing_else(source: str, found: list[str]) -> None:
    assert offences(source) == found
