"""Findings of the doctor for tests, and nodes that differ from one that is well."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from msgspec.structs import replace

from flanneld.ctl.checks import Facts
from flanneld.ctl.doctor import examine
from flanneld.findings import Severity
from tests.unit.ctl.documents import status_of
from tests.unit.ctl.test_checks import DOCUMENT, WELL

PROBLEM, HINT = Severity.PROBLEM, Severity.HINT


def said(name: str, facts: Facts) -> list[tuple[Severity, str, str]]:
    """Severity, problem and cure of the findings of a check."""
    return [(each.severity, each.problem, each.cure) for check, each in examine(facts) if check.name == name]


def evidence(name: str, facts: Facts) -> list[str]:
    return [finding.evidence for check, finding in examine(facts) if check.name == name]


def number(name: str, facts: Facts) -> int:
    return len(said(name, facts))


def document(**changes: Any) -> Facts:
    return replace(WELL, status=status_of(deepcopy(DOCUMENT) | changes))


def backend(name: str, *ranges: str, **network: Any) -> Facts:
    nets = [{"network": each, "subnet_len": 24} for each in ranges or ("10.5.0.0/16",)]
    return document(network={"ranges": nets, "backend": name} | network)
