"""``flannelctl doctor``: run the checks and show their findings."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import UNSET, Struct

from flanneld.compat.glog import counted
from flanneld.ctl.checks import (
    THEMES,
    Check,
    Facts,
    cluster,
    containers,
    encryption,
    host,
    kernel,
    others,
    store,
)
from flanneld.ctl.output import State, TextTable, in_lines
from flanneld.ctl.source import DataSource
from flanneld.errors import Retryable
from flanneld.findings import Command, Finding, Fix, Severity
from flanneld.runtime.command import CommandRunner

#: The modules of checks. Of one theme, the checks and findings of the first come first.
_MODULES = (store, containers, encryption, host, kernel, cluster, others)
#: All checks, sorted by theme.
CHECKS = tuple(
    sorted(
        (each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)),
        key=lambda each: each.theme,
    )
)
#: Seconds for one command of a fix: a restart of the daemon waits for its start.
_FIX_TIME = 90.0
#: Checks that see effects: what another check finds may be the cause.
_SYMPTOMS = frozenset({"tunnel", "probes", "port", "ready", "missing", "refused", "stale", "silent nodes"})
#: Checks whose finding may name the subnet of a silent peer, and those that count the silent ones.
_OF_ONE_PEER, _OF_SILENCE = (
    frozenset({"tunnel", "handshakes", "former subnet"}),
    frozenset({"tunnel", "probes"}),
)
#: By a rule of the cluster, checks of this host that see the same on all nodes.
_SEEN_FROM_HERE = {
    "shared MACs": {"contested", "cloned mac"},
    "shared public IPs": {"public ip"},
    "unusable leases": {"contested", "refusals", "unsafe leases", "former subnet"},
}
#: By a check's name, its place behind the causes. That the daemon ended explains symptoms, and has a cause.
_RANKS = {"daemon": 1, **dict.fromkeys(_SYMPTOMS, 2)}


def examine(facts: Facts) -> list[tuple[Check, Finding]]:
    """Return all findings: problems before hints, causes before symptoms, then by theme (pure)."""
    found = [(check, finding) for check in CHECKS for finding in check.look(facts)]
    return _ranked(found)


def with_cluster(
    findings: list[tuple[Check, Finding]], found: list[cluster.Remark]
) -> list[tuple[Check, Finding]]:
    """Return the findings of this host and of the cluster: a silent node once, and never this one (pure)."""
    named = {finding.about for check, finding in findings if check.name in _OF_ONE_PEER}
    looked = {check.name for check, _ in findings}
    found = [
        each
        for each in found
        if looked.isdisjoint(_SEEN_FROM_HERE.get(each.rule.name, ()))
        and not (each.node.is_own and each.rule.name in ("silent nodes", "conditions"))
        and (each.rule.name != "silent nodes" or named.isdisjoint(each.node.subnets))
    ]
    if any(each.rule.name == "silent nodes" for each in found):  # that names all nodes at once
        findings = [each for each in findings if each[0].name not in _OF_SILENCE or each[1].about]
    return _ranked([*findings, *cluster.cluster_findings(found)])


def _ranked(found: list[tuple[Check, Finding]]) -> list[tuple[Check, Finding]]:
    return sorted(found, key=lambda each: (each[1].severity is Severity.HINT, _RANKS.get(each[0].name, 0)))


def fixes(findings: list[tuple[Check, Finding]]) -> list[tuple[Command, ...]]:
    """Return the commands of each problem with a fix, each once; hints may be intended (pure)."""
    found = (finding for _, finding in findings if finding.severity is Severity.PROBLEM)
    return list(dict.fromkeys(each.remedy.commands for each in found if isinstance(each.remedy, Fix)))


def run_fixes(chosen: Iterable[tuple[Command, ...]]) -> list[tuple[Command, str]]:
    """Run the commands of each fix up to the first that fails. Return them, each with its failure."""
    runner, ran = CommandRunner(threading.Event()), []
    for commands in chosen:
        for each in commands:
            try:
                done = runner.run(each, timeout=_FIX_TIME)
                failure = done.errors.strip() or f"status {done.status}" if done.status else ""
            except Retryable as error:
                failure = str(error)
            ran.append((each, failure))
            if failure:
                break
    return ran


class DoctorReport(Struct, frozen=True):
    """Findings, what is not known, and the checks beside those of this host (``more``)."""

    findings: list[tuple[Check, Finding]]
    unknown: Sequence[object] = ()
    more: Sequence[Check] = ()

    @classmethod
    def of(cls, source: DataSource, *, is_cluster: bool) -> DoctorReport:
        """Examine this host, and the cluster if asked to. Raises ``OSError``."""
        from flanneld.ctl.facts import gather

        facts = gather(source)
        if not is_cluster:
            return cls(examine(facts), facts.unknown)
        from flanneld.ctl import nodes

        stored = facts.stored if source.origin == "daemon" else UNSET
        nodes_seen, found = nodes.examine(source, stored)
        unknown = [*facts.unknown, *nodes.unanswered(nodes_seen, source)]
        return cls(with_cluster(examine(facts), found), unknown, cluster.CLUSTER_CHECKS)

    @property
    def problems(self) -> list[Finding]:
        return [finding for _, finding in self.findings if finding.severity is Severity.PROBLEM]

    @property
    def is_wrong(self) -> bool:
        """Return True unless there is nothing worse than a hint."""
        return bool(self.problems)

    @property
    def verdict(self) -> str:
        """Return the result in one line."""
        found = self.problems
        if found:
            more = f", and {counted(len(found) - 1, 'more problem')}" if len(found) > 1 else ""
            return f"Broken: {found[0].problem}{more}"
        return f"Healthy, with {counted(len(self.findings), 'hint')}" if self.findings else "Healthy"

    def tables(self) -> list[TextTable]:
        """Return the findings for a terminal."""
        problems = len(self.problems)
        checks, hints = len(CHECKS) + len(self.more), len(self.findings) - problems
        said = f"{checks} checks: {counted(problems, 'problem')}, {counted(hints, 'hint')}"
        return [
            in_lines([self.verdict]),
            *(TextTable((), list(_rows(check, finding))) for check, finding in self.findings),
            in_lines([*(f"not known: {why}" for why in self.unknown), said]),
        ]

    def plain(self) -> dict[str, Any]:
        """Return the findings as JSON: a fix as argument lists, or an advice as text."""
        return {
            "verdict": self.verdict,
            "checks": [
                {"theme": each.theme, "name": each.name, "meaning": each.meaning}
                for each in (*CHECKS, *self.more)
            ],
            "findings": [_plain(check, finding) for check, finding in self.findings],
            "not_known": list(map(str, self.unknown)),
        }


def _rows(check: Check, finding: Finding) -> Iterator[tuple[str, str]]:
    yield State.HINT if finding.severity is Severity.HINT else State.PROBLEM, finding.problem
    yield "check", f"{check.theme} {check.name}: {THEMES[check.theme]}"
    yield "evidence", finding.evidence
    yield "why", finding.why
    match finding.remedy:
        case Fix(commands):
            yield from (("fix", shlex.join(each)) for each in commands)
        case advice:
            yield "advice", advice.text


def _plain(check: Check, finding: Finding) -> dict[str, Any]:
    remedy = finding.remedy
    return {
        "theme": check.theme,
        "check": check.name,
        "severity": finding.severity,
        "about": finding.about,
        "problem": finding.problem,
        "evidence": finding.evidence,
        "why": finding.why,
        "fix": remedy.commands if isinstance(remedy, Fix) else None,
        "advice": None if isinstance(remedy, Fix) else remedy.text,
    }
