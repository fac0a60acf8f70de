"""Keeps flannel's packet filter rules in place, in a thread of its own.

    config, lease, options -> wanted rules -> difference to what is there -> one change -> read back

In nf_tables the kernel says when somebody removes rules, and ours are back within milliseconds; nothing at
all happens before that. The legacy tables tell nobody, so they are read every ``--iptables-resync``
seconds. Nothing is undone when the daemon ends: its containers go on talking.
"""

from __future__ import annotations

import logging
import math
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.glog import Once, counted
from flanneld.config import Config
from flanneld.errors import Fatal, Retryable
from flanneld.model import FAMILIES, Family, IPNetwork, LeaseKey
from flanneld.network.firewall import detect
from flanneld.network.firewall.command import Commands
from flanneld.network.firewall.contest_backoff import ContestBackoff
from flanneld.network.firewall.detect import Wish
from flanneld.network.firewall.driver import Driver, Unavailable
from flanneld.network.firewall.forwarding import dropping, in_the_way
from flanneld.network.firewall.nftables.netlink import Removal, Removals
from flanneld.network.firewall.plan import Claim, claim
from flanneld.network.firewall.rules import IPTABLES_CHAINS, NATIVE_TABLE, Nets, Purpose, Style, wanted
from flanneld.network.firewall.sweep import PLACES, Place, driver, sweep
from flanneld.network.firewall.upkeep import Change, Upkeep
from flanneld.options import Options
from flanneld.runtime import clock, shell
from flanneld.runtime.event_queue import EventQueue
from flanneld.subnet.subnet_file import Previous

log = logging.getLogger(__name__)

_IDLE = 30.0
#: Lets a burst of notifications end before the rules are read.
_SETTLE = 0.005
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
#: So many rules are worth reading in one line.
_FEW = 8


class Wishes(Struct, frozen=True, gc=False):
    """What the rules are for, and how to set them.

    ``former`` is what the last run had, as far as is known. ``native`` is for a table of our own in
    nftables. ``resync`` is in seconds.
    """

    nets: tuple[Nets, ...]
    former: tuple[Nets, ...]
    purpose: Purpose
    style: Style = "own-chains"
    flavour: Wish = "auto"
    native: bool = False
    resync: float = 5.0


def pairs(networks: Iterable[IPNetwork], subnets: LeaseKey) -> tuple[Nets, ...]:
    """The network and the subnet of each family that has both."""
    known = {network.version: network for network in networks}
    return tuple(Nets(known[net.version], net) for net in subnets if net and net.version in known)


def wishes_of(options: Options, config: Config, own: LeaseKey, previous: Previous) -> Wishes:
    """What the options and the network config ask for."""
    return Wishes(
        nets=pairs([each.network for each in config.ranges], own),
        former=pairs(previous.networks, previous.subnets),
        purpose=Purpose(
            masquerade=options.ip_masq,
            forward=options.iptables_forward_rules,
            random=not options.ip_masq_fully_random_disable,
        ),
        style="v0.12" if options.iptables_rules == "v0.12" else "own-chains",
        flavour=cast(Wish, options.iptables_flavour),
        native=config.enable_nftables,
        resync=options.iptables_resync,
    )


class Firewall:
    """The rules of all families. ``start`` once, then ``run`` in a thread; ``cancel`` from any other."""

    def __init__(self, wishes: Wishes, *, stop: threading.Event, heartbeat: Callable[[float], None]) -> None:
        self._wishes = wishes
        self._stop = stop
        self._heartbeat = heartbeat
        self._event_queue: EventQueue[None] = EventQueue()
        self._commands = Commands(stop)
        self._once = Once()
        self._place: Place = "nft"
        self._upkeep: dict[Family, Upkeep] = {}
        self._removals: Removals | None = None
        #: Families whose rules may be wrong, and the programs that made us think so.
        self._dirty: set[Family] = set()
        self._change_origins: set[str] = set()
        self._to_sweep: list[tuple[Place, Family]] = []
        self._next = math.inf
        #: What has just failed is not tried again before this, whatever happens.
        self._not_before = 0.0
        self._retry_delay = _FIRST_RETRY
        self._contest_backoff = ContestBackoff()
        #: By the way to the rules and who removed them, as far as that is known.
        self.repairs: dict[tuple[str, str], int] = {}

    @property
    def place(self) -> Place:
        """Where the rules are."""
        return self._place

    def unsettled(self) -> list[Family]:
        """The families whose rules are not, or may not be, in place. From any thread."""
        return [family for family, upkeep in self._upkeep.copy().items() if self._lacks(family, upkeep)]

    def is_fighting(self) -> bool:
        """Whether somebody keeps removing the rules. From any thread."""
        return self._contest_backoff.is_tried()

    def _lacks(self, family: Family, upkeep: Upkeep) -> bool:
        return family in self._dirty or not upkeep.settled

    # ---- before the first packet -------------------------------------------------------------

    def start(self) -> None:
        """Put the rules in place; what cannot be done now is logged, and tried again by ``run``.

        Raises ``Fatal`` if it can never be done, though ``--ip-masq`` asks for it.
        """
        if self._wishes.purpose or self._wishes.former:
            self._set_up()
        self._warn_of_dropping()

    def _set_up(self) -> None:
        purpose = self._wishes.purpose
        try:
            reason = self._choose_place()
            drivers = {nets.family: self._driver(nets.family) for nets in self._wishes.nets}
        except Unavailable as missing:
            if purpose.masquerade:
                raise Fatal(f"cannot masquerade: {missing.problem}", missing.remedy) from missing
            if purpose.forward:
                log.warning("No rules that forward the network's traffic: %s", missing)
            return
        if purpose:
            names = ", ".join(dict.fromkeys(each.name for each in drivers.values()))
            log.info("The rules of the packet filter go through %s: %s", names, reason)
        self._take_over(drivers)
        self._listen()
        self._check()

    def _choose_place(self) -> str:
        """Set the place, and say why it is that one."""
        if self._wishes.native:
            self._place = "native"
            return "EnableNFTables in the network config asks for it"
        facts = detect.look([nets.family for nets in self._wishes.nets])
        self._place, reason = detect.choose(self._wishes.flavour, facts)
        return reason

    def _driver(self, family: Family) -> Driver:
        if self._place == "legacy" and family == 4:
            from flanneld.network.firewall.iptables.legacy import PythonIptables  # not on most hosts

            try:
                return PythonIptables(self._stop)
            except Unavailable as reason:
                log.info("Using iptables-legacy-restore: %s", reason)
        return driver(self._place, family, self._commands)

    def _take_over(self, drivers: dict[Family, Driver]) -> None:
        style: Style = "native" if self._wishes.native else self._wishes.style
        for nets in self._wishes.nets:
            rules = wanted(style, nets, self._wishes.purpose)
            family = nets.family
            self._upkeep[family] = Upkeep(drivers[family], rules, self._claim(family))
            self._to_sweep += [(place, family) for place in PLACES if place != self._place]
        for former in self._wishes.former:
            if former.family not in drivers:
                self._to_sweep += [(place, former.family) for place in PLACES]
        self._dirty = set(drivers)

    def _claim(self, family: Family) -> Claim:
        now = [nets for nets in self._wishes.nets if nets.family == family]
        former = next((nets for nets in self._wishes.former if nets.family == family), None)
        purpose = self._wishes.purpose
        return claim(now, former, masquerade=purpose.masquerade, forward=purpose.forward)

    def _listen(self) -> None:
        if self._place == "legacy":
            return
        try:
            self._removals = Removals()
        except OSError as error:
            log.warning("No news from nf_tables (%s): reading the rules every %g s", error, self._period)

    def _warn_of_dropping(self) -> None:
        """Our rules accept in one table only, and none if that is left to others."""
        ours = self._place if self._upkeep and self._wishes.purpose.forward else None
        for nets in self._wishes.nets:
            for found in dropping(nets.family):
                if in_the_way(found, nets.network, ours):
                    log.warning(
                        "The %s drops the network's packets unless it accepts them itself; run as root: %s",
                        found,
                        shell.line(found.commands(nets.network)),
                    )

    def start_and_run(self) -> None:
        """For rules that nothing has to wait for."""
        self.start()
        self.run()

    # ---- the loop ----------------------------------------------------------------------------

    @property
    def _period(self) -> float:
        return max(1.0, self._wishes.resync)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._event_queue, select.POLLIN)
        if self._removals:
            poll.register(self._removals, select.POLLIN)
        while not self._stop.is_set():
            self._heartbeat(4 * _IDLE)
            poll.poll(min(_IDLE, max(0.0, self._due() - clock.now())) * 1000)
            self._event_queue.drain()
            self._hear()
            if clock.now() >= self._due() and not self._stop.is_set():
                self._check()

    def cancel(self) -> None:
        self._event_queue.wake()

    def _due(self) -> float:
        """When to look again: news may come before a failure or a repair is accounted for."""
        return max(self._next, self._not_before, self._contest_backoff.earliest())

    def _hear(self) -> None:
        """Note whose rules may be gone, and look at them soon."""
        for removal in self._removals.read() if self._removals else ():
            concerned = {family for family in self._upkeep if self._concerns(family, removal)}
            if concerned:
                self._dirty |= concerned
                self._change_origins.add(removal.by)
                self._next = min(self._next, clock.now() + _SETTLE)

    def _concerns(self, family: Family, removal: Removal) -> bool:
        if removal.family not in (None, family):
            return False
        if self._place == "native":
            return removal.table in ("", NATIVE_TABLE[family])
        return any(
            removal.table in ("", table) and removal.chain in ("", name) for table, name in IPTABLES_CHAINS
        )

    # ---- looking and repairing ---------------------------------------------------------------

    def _check(self) -> None:
        """Put right the rules that may be wrong; after that, look at what is left elsewhere."""
        self._next = math.inf
        if self._removals is None:
            self._next = clock.now() + self._period
            self._dirty = set(self._upkeep)
        change_origins, self._change_origins = self._change_origins, set()
        repairs = sum(self.repairs.values())
        failed = [family for family in sorted(self._dirty) if not self._put_right(family, change_origins)]
        if sum(self.repairs.values()) > repairs:
            self._lose_patience()
        if not self._dirty:
            self._sweep()
        if failed:
            self._not_before = clock.now() + self._retry_delay
        if failed or self._to_sweep:
            self._next = min(self._next, clock.now() + self._retry_delay)
            self._retry_delay = min(2 * self._retry_delay, _LAST_RETRY)
        else:
            self._retry_delay = _FIRST_RETRY

    def _put_right(self, family: Family, change_origins: set[str]) -> bool:
        upkeep = self._upkeep[family]
        was_right = upkeep.settled
        try:
            change = upkeep.converge(partial(self._take_note, family))
        except Retryable as failure:
            if not self._stop.is_set():
                self._once.warn(log, family, f"The rules for IPv{family} are not in place: {failure}")
            return False
        if self._once.clear(family):
            log.info("The rules for IPv%d are in place", family)
        if change and (was_right or not change.held):
            self._account(upkeep.name, change, change_origins)
        elif change:
            _say(upkeep.name, change)
        if change and not change.held:
            self._dirty.add(family)
            self._next = clock.now()
        else:
            self._dirty.discard(family)
        return True

    def _take_note(self, family: Family) -> None:
        """Our own change is news as well, of which the reading that follows takes care."""
        self._hear()
        self._dirty.discard(family)

    def _account(self, name: str, change: Change, change_origins: set[str]) -> None:
        """Count what was repaired, and say it."""
        key = (name, ",".join(sorted(change_origins)) or "unknown")
        self.repairs[key] = self.repairs.get(key, 0) + 1
        by = f" after a change by {', '.join(sorted(change_origins))}" if any(change_origins) else ""
        log.warning("Restored our rules with %s%s: %s", name, by, _what(change))

    def _lose_patience(self) -> None:
        """Wait longer with the next repair if there are many. Both families' at once count as one."""
        if self._contest_backoff.spend():
            log.warning(
                "Somebody keeps removing our rules: waiting longer and longer before each repair; "
                "find out which program it is, and stop it or exclude our chains there"
            )

    def _sweep(self) -> None:
        """Remove what an earlier run left elsewhere, now that its successor is in place."""
        remaining = []
        for place, family in self._to_sweep:
            try:
                removed = sweep(place, family, self._claim(family), self._commands)
            except Unavailable as missing:
                log.warning("What an earlier run may have left for IPv%d stays there: %s", family, missing)
            except Retryable as failure:
                self._once.warn(log, (place, family), f"Cannot remove what an earlier run left: {failure}")
                remaining.append((place, family))
            else:
                if removed:
                    log.info("Removed what an earlier run left: %s", _some(removed))
        self._to_sweep = remaining


def retire(
    former: Iterable[Nets], *, everything: bool = True, dry_run: bool = False
) -> tuple[list[str], list[str]]:
    """Remove all rules that flannel made for the ``former`` networks, or for any, wherever they are.

    Says what they were, and why some may be left. ``former`` is what the last run had: unmarked rules, as in
    v0.12, are known by these networks only. With ``dry_run`` nothing is changed.
    """
    commands = Commands(threading.Event())
    known = {nets.family: nets for nets in former}
    removed: list[str] = []
    failures: list[str] = []
    for family in FAMILIES:
        claimed = claim((), known.get(family), masquerade=True, forward=True)
        if everything:
            claimed = replace(claimed, networks=None)
        for place in PLACES:
            try:
                removed += sweep(place, family, claimed, commands, dry_run=dry_run)
            except Retryable as failure:
                failures.append(f"rules for IPv{family}: {failure}")
    return removed, failures


def _say(name: str, change: Change) -> None:
    """What the first change of a run did."""
    if change.missing:
        log.info("Set %s with %s", counted(change.number, "rule"), name)
    if change.removed:
        log.info("Removed with %s what an earlier run left: %s", name, _some(change.removed))


def _what(change: Change) -> str:
    if change.missing:
        return f"missing were {_some(change.missing)}"
    return f"too many were {_some(change.removed)}" if change.removed else "their order was wrong"


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _FEW} more" if len(lines) > _FEW else ""
    return "; ".join(lines[:_FEW]) + more
