"""``flanneld --plan``: the changes that a startup would make to this host, as commands."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flanneld.diagnostics import host_checks
from flanneld.diagnostics.dry_run import Notes, Outcome, dry_run
from flanneld.network import iproute2_commands
from flanneld.network.firewall import detect, rules
from flanneld.network.firewall.command import IptablesRunner
from flanneld.network.firewall.driver import Driver
from flanneld.network.firewall.edits import RuleOwnership, claim, edits_for
from flanneld.network.firewall.iptables.restore import Restore
from flanneld.network.firewall.iptables.text import restore_text
from flanneld.network.firewall.rules import Rules, Style
from flanneld.network.firewall.rules_sweep import PLACES, RulePlace, driver, may_hold
from flanneld.options import Options
from flanneld.reconcile.firewall import FirewallSettings, firewall_settings
from flanneld.state.resources import Kind, Resource
from flanneld.subnet import subnet_file
from flanneld.subnet.manager import SubnetManager
from flanneld.subnet.subnet_file import SubnetEnv


def print_plan(wanted: Options, manager: SubnetManager, say: Callable[[str], None]) -> None:
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
    yield from _subnet_file(wanted, outcome)
    yield from _settings(outcome, services=wanted.kube_subnet_mgr)
    yield from kernel_lines(outcome, local=False)
    if any(net is not None for net in outcome.own.key):
        settings = firewall_settings(wanted, outcome.config, outcome.own.key, outcome.previous)
        yield from _rules(settings, IptablesRunner(threading.Event()))


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


def _subnet_file(wanted: Options, outcome: Outcome) -> Iterator[str]:
    subnets = tuple(net for net in outcome.own.key if net is not None)
    if not subnets:
        return
    networks = tuple(each.network for each in outcome.config.ranges)
    text = subnet_file.render(SubnetEnv(networks, subnets, outcome.mtu, wanted.ip_masq))
    path = Path(wanted.subnet_file)
    try:
        if path.read_text() == text:
            return
    except (OSError, UnicodeDecodeError):
        pass
    yield f"printf '%s\\n' {' '.join(text.split())} > {shlex.quote(str(path))}"


def _settings(outcome: Outcome, *, services: bool) -> Iterator[str]:
    facts = host_checks.read_facts(outcome.config.families, outcome.uplink.name, services=services)
    yield from (finding.command for finding in host_checks.findings(facts) if finding.settings)


# ---- rules of the packet filter -----------------------------------------------------------------


def _rules(settings: FirewallSettings, run: IptablesRunner) -> Iterator[str]:
    """Yield the commands that install the rules, then those that remove an earlier run's elsewhere."""
    if not (settings.purpose or settings.former):
        return
    place: RulePlace = "native"
    if not settings.native:
        place, _ = detect.choose(settings.flavour, detect.look([nets.family for nets in settings.nets]))
    style: Style = "native" if settings.native else settings.style
    purpose = settings.purpose
    for nets in settings.nets:
        former = next((each for each in settings.former if each.family == nets.family), None)
        mine = claim([nets], former, masquerade=purpose.masquerade, forward=purpose.forward)
        yield from _changes(driver(place, nets.family, run), rules.desired_rules(style, nets, purpose), mine)
        for other in PLACES:
            if other != place and may_hold(other, nets.family, mine):
                yield from _changes(driver(other, nets.family, run), {}, mine)


def _changes(there: Driver, wanted: Rules, mine: RuleOwnership) -> Iterator[str]:
    edits = edits_for(wanted, there.read(), mine)
    if not edits:
        return
    if isinstance(there, Restore):
        yield f"{there.name}-restore --noflush <<'END'"
        yield from restore_text(edits).splitlines()
    else:
        from flanneld.network.firewall.nftables.driver import Nftables  # not needed on most hosts

        assert isinstance(there, Nftables)
        yield "nft -j -f - <<'END'"
        yield json.dumps({"nftables": there.orders(edits)})
    yield "END"
