"""Log lines as Kubernetes' components write them with ``--logging-format=json``.

One JSON object a line, with the keys of k8s.io/component-base/logs/json: ``ts`` (milliseconds since 1970),
``caller``, ``msg``, and ``v`` for what is no error. ``severity`` and ``stack`` are additions.
"""

from __future__ import annotations

import json
import logging

_SEVERITIES = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "fatal"}


def line_of(record: logging.LogRecord, below: list[str], verbosity: int) -> str:
    """Return a record as one line of JSON; ``below`` holds tracebacks, ``verbosity`` its level of ``-v``."""
    severity = _SEVERITIES.get(record.levelno, "info")
    entry: dict[str, float | int | str] = {
        "ts": round(record.created * 1000, 3),
        "caller": f"{record.filename}:{record.lineno}",
        "msg": record.getMessage(),
        "severity": severity,
    }
    if severity in ("info", "warning"):
        entry["v"] = verbosity
    if below:
        entry["stack"] = "\n".join(below)
    return json.dumps(entry)
