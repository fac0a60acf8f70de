"""Log lines as JSON, as a collector of logs reads them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from flanneld.compat import glog
from flanneld.compat.glog import V

log = logging.getLogger("flanneld.test_klog_json")
Stderr = pytest.CaptureFixture[str]


def entries(stderr: Stderr) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("level", "severity", "verbosity"),
    [
        (logging.INFO, "info", 0),
        (V(4), "info", 4),
        (logging.WARNING, "warning", 0),
        (logging.ERROR, "error", None),
        (logging.CRITICAL, "fatal", None),
    ],
)
def test_entry_states_severity_and_verbosity(
    capsys: Stderr, level: int, severity: str, verbosity: int | None
) -> None:
    glog.setup(verbosity=4, layout="json")
    log.log(level, "subnet %s", "10.1.5.0/24")
    (entry,) = entries(capsys)
    assert (entry["msg"], entry["severity"], entry.get("v")) == ("subnet 10.1.5.0/24", severity, verbosity)


def test_entry_states_time_in_milliseconds_and_caller(capsys: Stderr) -> None:
    glog.setup(layout="json")
    record = log.makeRecord("x", logging.INFO, "/src/main.py", 7, "up", (), None)
    record.created = 1580306777.047283
    log.handle(record)
    (entry,) = entries(capsys)
    assert (entry["ts"], entry["caller"]) == (1580306777047.283, "main.py:7")


def test_traceback_stays_inside_its_entry(capsys: Stderr) -> None:
    glog.setup(layout="json")
    try:
        int("no\nnumber")
    except ValueError:
        log.exception("failed:\n%s", "\x1b[31mforged")
    (entry,) = entries(capsys)
    assert entry["msg"] == "failed:\n\x1b[31mforged"
    assert entry["stack"].startswith("Traceback")
    assert "ValueError: invalid literal" in entry["stack"]
