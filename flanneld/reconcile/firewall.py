"""Firewall worker: tables of rules, and the reconciler that maintains them in a thread of its own.

For nf_tables the kernel notifies of removed rules, and they are restored within milliseconds. The legacy
tables send no notifications, so they are read every ``--iptables-resync`` seconds. The rules stay when the
daemon ends, so that containers keep their connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from ipaddress import ip_network
from itertools import starmap
from typing import TYPE_CHECKING, cast

from msgspec import Struct
from msgspec.structs import replace

from flanneld.backends.registry import clear_ports
from flanneld.config import Config
from flanneld.errors import Fatal, Retryable
from flanneld.findings import line
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, LeaseKey
from flanneld.network.firewall import placing
from flanneld.network.firewall.driver import Driver, IptablesRunner, Unavailable, carry_out
from flanneld.network.firewall.foreign import forward_drops, of_network
from flanneld.network.firewall.iptables import PythonIptables
from flanneld.network.firewall.netlink import has_guard
from flanneld.network.firewall.placing import PLACES, FlavourOption, RulePlace, described, driver, stale_rules
from flanneld.network.firewall.rules import Nets, Purpose, RuleOwnership, Rules, Style, claim, desired_rules
from flanneld.network.firewall.tables import RuleSet, RulesTable
from flanneld.options import Options
from flanneld.reconcile.reconciler import desired_by_table
from flanneld.reconcile.upkeep import TableState
from flanneld.reconcile.worker import Worker
from flanneld.runtime.process import is_claimed
from flanneld.runtime.supervisor import MakeLoop
from flanneld.state.desired import Delta
from flanneld.state.permits import Permits
from flanneld.state.resources import GUARD, Key, Resource
from flanneld.state.table import Put
from flanneld.subnet.subnet_file import NetworkAndSubnet, paired

if TYPE_CHECKING:
    from flanneld.network.firewall.guard import GuardTable  # rarely needed

log = logging.getLogger(__name__)

#: Name of the worker, and of its thread.
NAME = "firewall"
#: Rules for spared destinations at most with iptables, which takes each packet through all of them.
MOST_SPARED = 256
#: Bytes of a listing of others' rules or sets: it serves only a warning, and takes several times the memory.
_LARGEST_FOREIGN = 8 << 20
#: Seconds between two looks at the nodes' addresses: many leases may change in a row.
NODES_PERIOD = 1.0


class FirewallSettings(Struct, frozen=True, gc=False):
    """Desired rules, and the driver to set them.

    ``former`` are the networks of earlier runs, if known. ``native`` selects a table of our own in
    nftables. ``resync`` is in seconds. With ``guards`` another worker guards the tunnel.
    With ``spares_nodes`` packets to other nodes are not masqueraded.
    """

    nets: tuple[Nets, ...]
    former: tuple[Nets, ...]
    purpose: Purpose
    style: Style = "own-chains"
    flavour: FlavourOption = "auto"
    native: bool = False
    resync: float = 5.0
    guards: bool = False
    spares_nodes: bool = False


def firewall_settings(
    options: Options, config: Config, own: LeaseKey, former: Iterable[NetworkAndSubnet]
) -> FirewallSettings:
    """Return the rules that the options and the network config ask for. Raises ``Fatal`` if these differ."""
    purpose = Purpose(
        masquerade=options.ip_masq,
        forward=options.iptables_forward_rules,
        random=not options.ip_masq_fully_random_disable,
    )
    style: Style = "v0.12" if options.iptables_rules == "v0.12" else "own-chains"
    spares = bool(config.spared or config.spares_nodes) and purpose.masquerade
    if spares and style == "v0.12" and not config.enable_nftables:
        problem = "the network config has MasqueradeExceptions, and the rules of v0.12 have none"
        raise Fatal(problem, "start without -iptables-rules=v0.12")
    nets = tuple(starmap(Nets, paired(config.networks, own)))
    return FirewallSettings(
        nets=tuple(each.sparing(config.spared) for each in nets) if spares else nets,
        former=tuple(starmap(Nets, former)),
        purpose=purpose,
        style=style,
        flavour=cast("FlavourOption", options.iptables_flavour),
        native=config.enable_nftables,
        resync=options.iptables_resync,
        guards=options.guard_tunnel and bool(clear_ports(config)),
        spares_nodes=config.spares_nodes and purpose.masquerade,
    )


def _rules(
    settings: FirewallSettings, place: RulePlace, more: Collection[IPNetwork] = ()
) -> tuple[dict[Family, Rules], str]:
    """Return the rules of each family in a place, and a problem if there are too many to spare."""
    style: Style = "native" if place == "native" else settings.style
    all_nets: Sequence[Nets] = [each.sparing(more) for each in settings.nets] if more else settings.nets
    most = max((len(each.spared) for each in all_nets), default=0)
    problem = ""
    if style != "native" and most > MOST_SPARED:
        all_nets = [
            replace(each, spared=()) if len(each.spared) > MOST_SPARED else each for each in settings.nets
        ]
        problem = (
            f"nodes see this node's address in place of the containers': {most} MasqueradeExceptions, and"
            f" iptables is given {MOST_SPARED} at most; set EnableNFTables in the network config"
        )
    return {nets.family: desired_rules(style, nets, settings.purpose) for nets in all_nets}, problem


class PlacedRules(Struct, frozen=True, gc=False):
    """Desired rules in the place that was chosen, and the tables of all places that may hold ours."""

    place: RulePlace
    reason: str
    desired: tuple[RuleSet, ...]
    tables: tuple[RulesTable, ...]


def place_rules(
    settings: FirewallSettings,
    stop: threading.Event,
    ran: Callable[[], None] = lambda: None,
    *,
    is_dry_run: bool = False,
) -> PlacedRules:
    """Choose the place of the rules. ``ran`` is called after each command. Raises ``Unavailable``.

    Where the kernel cannot have iptables' rules, nftables is their place; a dry run does not try that.
    Rules in other places, and of families without a network now, are removed once the new ones are set.
    """
    commands = IptablesRunner(stop, ran=ran)
    place: RulePlace = "native"
    reason = "requested by EnableNFTables in the network config"
    if not settings.native:
        facts = placing.look([nets.family for nets in settings.nets])
        place, reason = flavour, _ = placing.choose(settings.flavour, facts)
        is_free = settings.flavour == "auto" and not is_dry_run
        (rules, _), (native, _) = _rules(settings, flavour), _rules(settings, "native")
        if is_free and placing.must_be_native(flavour, rules, native, commands):
            place, reason = "native", "the kernel refuses iptables' rules"
    used = [
        RulesTable(
            place,
            nets.family,
            _claim(settings, nets.family),
            _driver(place, nets.family, commands, stop),
            commands,
            audit=max(1.0, settings.resync),
        )
        for nets in settings.nets
    ]
    needs = frozenset(table.name for table in used)
    families = {table.family for table in used}
    others = [
        RulesTable(other, family, _claim(settings, family), None, commands, needs=needs)
        for family in dict.fromkeys(nets.family for nets in (*settings.nets, *settings.former))
        for other in PLACES
        if family not in families or other != place
    ]
    rules, _ = _rules(settings, place)
    return PlacedRules(
        place, reason, tuple(table.desired(rules[table.family]) for table in used), (*used, *others)
    )


def _driver(place: RulePlace, family: Family, commands: IptablesRunner, stop: threading.Event) -> Driver:
    if place == "legacy" and family == 4:
        try:
            return PythonIptables(commands, stop)
        except Unavailable as reason:
            log.info("Using iptables-legacy-restore: %s", reason)
    return driver(place, family, commands)


def _claim(settings: FirewallSettings, family: Family) -> RuleOwnership:
    now = [nets for nets in settings.nets if nets.family == family]
    former = [nets for nets in settings.former if nets.family == family]
    purpose = settings.purpose
    return claim(now, *former, masquerade=purpose.masquerade, forward=purpose.forward)


class Firewall(Worker):
    """Worker for the rules of all families, which chooses its tables itself.

    Its first step puts the rules in place, if ``prepare`` has not. The second warns of other programs'
    chains. ``nodes`` returns the addresses to spare beside the configured ones, None if they are not known.
    Until ``leases_changed`` was called, those of an earlier run are spared.
    """

    def __init__(
        self,
        settings: FirewallSettings,
        *,
        stop: threading.Event,
        make_loop: MakeLoop,
        nodes: Callable[[], Collection[IPAddress] | None] | None = None,
    ) -> None:
        super().__init__(NAME, stop=stop, make_loop=make_loop, permits=Permits())
        self._settings = settings
        self._is_prepared = self._has_warned = False
        self.placed = PlacedRules("nft", "", (), ())
        #: Health condition: why not all nodes are spared.
        self.problem = ""
        self._nodes = nodes
        self._desired_rules: dict[str, dict[Key, Resource]] = {}
        self._has_news = False
        self._next_look = 0.0

    def leases_changed(self) -> None:
        """Look soon at the nodes: all leases are known, and some may have changed. From any thread."""
        if self._nodes is not None:
            self._has_news = True
            self.cancel()

    # ---- status, from any thread -----------------------------------------------------------------

    def states(self) -> list[TableState]:
        """Return the status of the tables in use. From any thread."""
        used = {each.table for each in self.placed.desired}
        return [state for state in super().states() if state.name in used]

    @property
    def repairs(self) -> dict[tuple[str, str], int]:
        """Return repairs by driver and by the program that removed the rules, or "unknown"; that from 0."""
        names = {each.table: each.name for each in self.placed.desired}
        numbers = {(name, "unknown"): 0 for name in names.values()}
        for state in self.states():
            for by, number in state.repairs.items():
                key = (names[state.name], by)
                numbers[key] = numbers.get(key, 0) + number
        return numbers

    def unsettled(self) -> list[Family]:
        """Return the families whose rules are not, or may not be, in place."""
        if not self._is_prepared:
            return [nets.family for nets in self._settings.nets if self._settings.purpose]
        families = {each.name: each.family for each in self.placed.tables}
        return [families[each.name] for each in self.states() if not each.settled]

    def has_swept(self) -> bool:
        """Return True if no rule of an earlier run is left, in the tables that are not used either."""
        are_swept = all(table.is_used or table.is_swept for table in self.placed.tables)
        return self._is_prepared and are_swept and all(state.settled for state in super().states())

    # ---- the loop ----------------------------------------------------------------------------

    def prepare(self, now: float) -> None:
        """Put the rules in place, for instance before the first packet. A later step repeats what failed.

        Raises ``Fatal`` if this host can never have the rules that ``--ip-masq`` asks for.
        """
        if self._settings.purpose or self._settings.former:
            self._place()
        self.use((*self.placed.tables, *old_guards(self._settings)), self._desired_rules)
        self._is_prepared = True
        for table in self.placed.tables if self.placed.place != "legacy" else ():
            if table.is_used:
                table.listen()
        super().step(now)

    def step(self, now: float) -> float:
        """Do the due work. Return the time of the next step."""
        if not self._is_prepared:
            self.prepare(now)
        elif not self._has_warned:
            self._has_warned = True
            self._warn_of_dropping()
        else:
            if self._has_news and now >= self._next_look:
                self._look_at_nodes(now)
            due = super().step(now)
            return min(due, self._next_look) if self._has_news else due
        return now

    def _look_at_nodes(self, now: float) -> None:
        self._has_news, self._next_look = False, now + NODES_PERIOD
        nodes = self._nodes() if self._nodes else None
        used = [table for table in self.placed.tables if table.is_used]
        if nodes is None or not used:
            return
        rules, self.problem = _rules(self._settings, self.placed.place, list(map(ip_network, nodes)))
        wanted = tuple(table.desired(rules[table.family]) for table in used)
        changed = tuple(each for each in wanted if each not in self.placed.desired)
        self.placed = replace(self.placed, desired=wanted)
        for each in changed:
            self._desired_rules[each.table][each.key] = each
        if changed:
            self.reconciler.change(Delta(tuple(map(Put, changed))), now)

    def _place(self) -> None:
        """Choose the tables and their rules, if this host can have any."""
        purpose = self._settings.purpose
        try:
            placed = place_rules(self._settings, self._stop, self.is_alive)
        except Unavailable as missing:
            if purpose.masquerade:
                raise Fatal(f"cannot masquerade: {missing.problem}", missing.remedy) from missing
            if purpose.forward:
                log.warning("No FORWARD rules: %s", missing)
            return
        tools = f"{', '.join(dict.fromkeys(each.name for each in placed.desired))} ({placed.reason})"
        if purpose.masquerade:
            log.info("Setting up masking rules with %s", tools)
        if purpose.forward:
            log.info("Changing default FORWARD chain policy to ACCEPT for the network, with %s", tools)
        used = [table for table in placed.tables if table.is_used]
        earlier = [net for each in used for net in each.spared()] if self._nodes is not None else []
        rules, self.problem = _rules(self._settings, placed.place, earlier)
        if earlier:
            placed = replace(placed, desired=tuple(each.desired(rules[each.family]) for each in used))
        self.placed = placed
        self._desired_rules = desired_by_table(placed.desired)

    def _warn_of_dropping(self) -> None:
        """Warn of chains that drop packets: our rules accept them in one table at most."""
        commands = IptablesRunner(self._stop, ran=self.is_alive, longest_output=_LARGEST_FOREIGN)
        for nets in self._settings.nets:
            for found in forward_drops(nets.network, commands):
                log.warning(
                    "The %s drops the network's packets unless it accepts them itself; run as root: %s",
                    found,
                    line(found.accept(*of_network(nets.network))),
                )


def old_guards(settings: FirewallSettings) -> list[GuardTable]:
    """Return the tables of an earlier run that guarded the tunnel, if no daemon on this host does."""
    there = [] if settings.guards else list(filter(has_guard, FAMILIES))
    if not there or is_claimed(GUARD):
        return []
    from flanneld.network.firewall.guard import GuardTable  # rarely needed

    try:
        return [GuardTable(family) for family in there]
    except Fatal as missing:
        log.warning(
            "An earlier run's guard drops new nodes' packets, and without libnftables it stays; %s",
            missing.remedy,
        )
        return []


def retire(
    former: Iterable[NetworkAndSubnet] = (), *, everything: bool = True, dry_run: bool = False
) -> tuple[list[str], list[str]]:
    """Remove all rules that flannel made for the ``former`` networks, or for any, from every table.

    Return the removed rules, and the reasons why some may be left. ``former`` are the networks of earlier
    runs: unmarked rules, as in v0.12, are recognized only by them. With ``dry_run`` nothing is changed.
    """
    commands = IptablesRunner()
    known = list(starmap(Nets, former))
    removed: list[str] = []
    failures: list[str] = []
    for family in FAMILIES:
        of_family = [nets for nets in known if nets.family == family]
        claimed = claim((), *of_family, masquerade=True, forward=True)
        if everything:
            claimed = replace(claimed, networks=None)
        for place in PLACES:
            try:
                there, edits = stale_rules(place, family, claimed, commands)
                if there:
                    stuck = () if dry_run else carry_out(there, edits)
                    removed += (f"{there.name}: {line}" for line in described(edits, stuck))
            except Retryable as failure:
                failures.append(f"rules for IPv{family}: {failure}")
    try:
        if any(map(has_guard, FAMILIES)):
            from flanneld.network.firewall.guard import retire as retire_guard

            removed += retire_guard(dry_run=dry_run)
    except Retryable as failure:
        failures.append(f"guard of the tunnel: {failure}")
    return removed, failures
