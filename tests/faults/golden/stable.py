"""What two runs have in common: texts without times, process IDs, MACs and paths of the lab (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

#: What differs between two runs, each with what stands for it.
_CHANGING = (
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?( [+-]\d{4} UTC| UTC|Z)?( m=\S+)?", "<time>"),
    (r"\b1[6-9]\d{8}(\.\d+)?\b", "<seconds since 1970>"),
    (r"\b[0-9a-f]{2}(:[0-9a-f]{2}){5}\b", "<mac>"),
    (r"\bpid \d+", "pid <pid>"),
    (r'"parent": \d+', '"parent": <index>'),
    (r"\b\d+(\.\d+)? ms\b", "<n> ms"),
    (r"\b2[2-4]h\d+m\d+s\b", "<a day>"),
)
#: Samples of the metrics page whose values are of no two runs: of this process, histograms, times, and
#: counters of what is done again and again.
_MEASURED = re.compile(r"^process_|_(bucket|sum|count|seconds|requests_total|events_total|errors_total)$")
#: The last log line of the daemon's main thread, and those that other threads may write before it.
_LAST_IN_ORDER = re.compile(r"Running backend\.$|Couldn't fetch network config")
_OF_OTHERS = re.compile(r"Start healthz server|Answering queries")


def text(said: str, names: Mapping[str, str]) -> str:
    """Return a text with ``<name>`` for each of the strings, and for what no two runs have in common."""
    for string in sorted(filter(None, names), key=len, reverse=True):
        said = said.replace(string, f"<{names[string]}>")
    for pattern, name in _CHANGING:
        said = re.sub(pattern, name, said)
    return said


def document(said: str, names: Mapping[str, str]) -> str:
    """Return a status document, indented, in its own order of keys; the log has a file of its own."""
    status = json.loads(said)
    status["events"] = "<events>"
    for key in ("pid", "started", "time"):
        status[key] = f"<{key}>"
    for key in ("requests", "last_event", "errors"):
        status["store"][key] = status["store"][key] and f"<{key}>"
    if "last_sync" in status:
        status["last_sync"] = "<last_sync>"
    return text(json.dumps(status, indent=1, ensure_ascii=False) + "\n", names)


def table(said: str, names: Mapping[str, str]) -> str:
    """Return a table without the width of its columns, which depends on what is in them."""
    return re.sub(r"(?<=\S) {2,}", "  ", text(said, names))


def log(said: str, names: Mapping[str, str]) -> str:
    """Return a log's lines with severity and text: those of the start, then those of all threads, sorted."""
    lines = [re.sub(r"^([IWEF])\d{4} \S+ +\d+ [\w.]+:\d+\] ", r"\1 ", line) for line in said.splitlines()]
    stable = [text(line, names) for line in lines]
    last = next((number for number, line in enumerate(stable, 1) if _LAST_IN_ORDER.search(line)), 0)
    first = [line for line in stable[:last] if not _OF_OTHERS.search(line)]
    rest = [line for line in stable[:last] if _OF_OTHERS.search(line)] + stable[last:]
    return "".join(f"{line}\n" for line in (*first, "", *sorted(rest)))


def metrics(said: str, names: Mapping[str, str]) -> str:
    """Return a metrics page with ``<n>`` for each value that is measured."""
    return text("".join(f"{_sample(line)}\n" for line in said.splitlines()), names)


def _sample(line: str) -> str:
    head, _, value = line.rpartition(" ")
    measured = not line.startswith("#") and _MEASURED.search(head.partition("{")[0])
    return f"{head} <n>" if measured else f"{head} {value}"
