"""``flanneld --plan``: the changes that a startup would make to this host, as commands."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from flanneld.diagnostics.dry_run import Notes, Outcome, dry_run
from flanneld.diagnostics.host_checks import KernelForwardingTable
from flanneld.network import iproute2_commands
from flanneld.options import Options
from flanneld.reconcile.firewall import firewall_settings, place_rules
from flanneld.reconcile.reconciler import desired_by_table
from flanneld.state.resources import Kind, Resource
from flanneld.state.table import Scope
from flanneld.subnet.store import Store
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile, SubnetFileTable


class _Scripted(Protocol):
    """Table that tells its changes as shell commands."""

    name: str

    def script(self, scope: Scope) -> Iterator[str]: ...


def print_plan(wanted: Options, manager: Store, say: Callable[[str], None]) -> None:
    """Print each command on a line, and changes without a command as comments; nothing if all is right.

    Raises ``Retryable`` and ``Fatal`` where a startup would wait or end.
    """
    outcome = dry_run(wanted, manager)
    for line in lines(wanted, outcome):
        say(_harmless(line) if line.startswith("#") else line)


def lines(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the plan in the order of a startup."""
    yield from _lease(outcome)
    yield from kernel_lines(outcome, local=True)
    yield from _host(wanted, outcome)
    yield from kernel_lines(outcome, local=False)
    yield from _rules(wanted, outcome)


def _harmless(comment: str) -> str:
    """Return a comment without control characters: the plan may be run by a shell."""
    return "".join(each if each.isprintable() else "?" for each in comment)


def _lease(outcome: Outcome) -> Iterator[str]:
    if outcome.has_lease:
        return
    likely = str(outcome.own)
    yield "# this node has no lease yet; " + (
        f"the plan is for {likely}, which its last run had and nobody has now"
        if likely
        else "its subnet would be any free one, so what rests on that is left out"
    )


def kernel_lines(outcome: Outcome, *, local: bool) -> Iterator[str]:
    """Yield commands for devices and addresses, or for objects of peers and stale ones."""
    notes = outcome.notes
    if local:
        for link, actual in notes.devices.values():
            yield from map(shlex.join, iproute2_commands.link(link, actual, outcome.uplink.name))
    else:
        yield from filter(None, map(_drop, notes.drops))
        for route in notes.behind.values():
            ways = iproute2_commands.bring_to_front(route, outcome.domain.links, spread=outcome.spread)
            yield from map(shlex.join, ways)
    for resource in sorted(notes.puts.values(), key=lambda each: each.kind):
        if (resource.kind is resource.kind.ADDRESS) is local:
            if resource.kind is Kind.REMOTE:
                yield _outside(resource, notes)
            elif made := iproute2_commands.put(resource, outcome.domain.links, spread=outcome.spread):
                yield shlex.join(made)


def _drop(resource: Resource) -> str:
    if resource.kind is Kind.REMOTE:
        return f"# no more: {resource}"
    return shlex.join(iproute2_commands.drop(resource) or ())


def _outside(resource: Resource, notes: Notes) -> str:
    """Return a comment for a change in a backend's own table, which has no command."""
    there = notes.outside.get(resource.key)
    calls = f": {notes.calls[resource.key]}" if notes.calls.get(resource.key) else ""
    if there is None:
        return f"# new: {resource}{calls}"
    was = f" in place of {there}" if str(there) != str(resource) else ", with other settings than it has"
    return f"# changed: {resource}{was}{calls}"


def _host(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the commands for subnet.env and the kernel's forwarding."""
    config, own, path = outcome.config, outcome.own.key, Path(wanted.subnet_file)
    if any(own):
        env = SubnetEnv.of(config, own, outcome.mtu, ip_masq=wanted.ip_masq)
        yield from _scripts([SubnetFileTable(path)], [SubnetEnvFile.of(path, env)])
        if wanted.cni_conf:
            from flanneld.subnet.cni_conf import open_table

            cni = open_table(wanted)
            yield from _scripts([cni], [cni.desired(env)])
    forwarding = KernelForwardingTable(config.families, lambda: outcome.uplink.name, keep=True)
    yield from _scripts([forwarding], forwarding.desired)


def _rules(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the commands that install the rules, then those that remove an earlier run's elsewhere."""
    settings = firewall_settings(wanted, outcome.config, outcome.own.key, outcome.previous)
    if any(outcome.own.key) and (settings.purpose or settings.former):
        placed = place_rules(settings, threading.Event())
        yield from _scripts(placed.tables, placed.desired)


def _scripts(tables: Iterable[_Scripted], desired: Iterable[Resource]) -> Iterator[str]:
    by_table = desired_by_table(desired)
    for table in tables:
        yield from table.script(Scope(by_table.get(table.name, {})))
