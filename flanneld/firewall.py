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
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from flanneld import clock
from flanneld.errors import Fatal, Retryable
from flanneld.glog import Once
from flanneld.inbox import Inbox
from flanneld.model import FAMILIES, Family, IPNetwork, LeaseKey
from flanneld.network.firewall import detect
from flanneld.network.firewall.command import Commands
from flanneld.network.firewall.detect import Wish
from flanneld.network.firewall.driver import Driver, Rejected, Unavailable, carry_out
from flanneld.network.firewall.legacy import PythonIptables
from flanneld.network.firewall.netfilter import Netfilter, Removal, Removals
from flanneld.network.firewall.plan import Claim, Edit, claim, lost, plan
from flanneld.network.firewall.rules import IPTABLES_CHAINS, NATIVE_TABLE, Nets, Purpose, Rules, Style, wanted
from flanneld.network.firewall.sweep import PLACES, Place, described, driver, sweep
from flanneld.network.firewall.text import rule_text

log = logging.getLogger(__name__)

_IDLE = 30.0
#: Lets a burst of notifications end before the rules are read.
_SETTLE = 0.005
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
#: Others may change the rules between our look and our change.
_ATTEMPTS = 3
#: Where somebody keeps undoing our work, each repair in so many seconds doubles the pause before the next.
_FIGHT, _FIRST_PAUSE, _LAST_PAUSE = 60.0, 0.1, 30.0
_SUSPICIOUS = 5
#: So many rules are worth reading in one line.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the rules are for. ``former`` is what the last run had, as far as is known."""

    nets: tuple[Nets, ...]
    former: tuple[Nets, ...]
    purpose: Purpose
    style: Style = "own-chains"
    flavour: Wish = "auto"
    native: bool = False
    resync: float = 5.0


def pairs(networks: Iterable[IPNetwork], subnets: LeaseKey) -> tuple[Nets, ...]:
    """The network and the subnet of each family that has both."""
    by_family = {network.version: network for network in networks}
    return tuple(
        Nets(by_family[subnet.version], subnet)
        for subnet in subnets
        if subnet and subnet.version in by_family
    )


class Firewall:
    """The rules of all families. ``start`` once, then ``run`` in a thread; ``cancel`` from any other."""

    def __init__(self, wishes: Wishes, *, stop: threading.Event, heartbeat: Callable[[float], None]) -> None:
        self._wishes = wishes
        self._stop = stop
        self._heartbeat = heartbeat
        self._inbox: Inbox[None] = Inbox()
        self._commands = Commands()
        self._once = Once()
        self._drivers: dict[Family, Driver] = {}
        self._wanted: dict[Family, Rules] = {}
        self._claims: dict[Family, Claim] = {}
        self._place: Place = "nft"
        self._removals: Removals | None = None
        self._culprits: set[str] = set()
        self._dirty: set[Family] = set()
        self._right: set[Family] = set()
        self._stuck: set[Edit] = set()
        self._to_sweep: list[tuple[Place, Family]] = []
        self._next = math.inf
        self._retry_delay = _FIRST_RETRY
        self._repairs: deque[float] = deque()

    # ---- before the first packet -------------------------------------------------------------

    def start(self) -> None:
        """Put the rules in place; what cannot be done now is logged and tried again by ``run``.

        Raises ``Fatal`` if it can never be done, though ``--ip-masq`` asks for it.
        """
        wishes = self._wishes
        if not wishes.purpose and not wishes.former:
            return
        try:
            reason = self._choose_place()
            self._make_drivers()
        except Unavailable as missing:
            if wishes.purpose.masquerade:
                raise Fatal(f"cannot masquerade: {missing.problem}", missing.remedy) from missing
            if wishes.purpose.forward:
                log.warning("No rules to forward the network's traffic: %s", missing)
            return
        if wishes.purpose:
            names = ", ".join(self._drivers[family].name for family in sorted(self._drivers))
            log.info("Packet filter rules go through %s: %s", names, reason)
        self._listen()
        self._dirty = set(self._drivers)
        self._check()
        self._warn_of_dropping()

    def _choose_place(self) -> str:
        if self._wishes.native:
            self._place = "native"
            return "EnableNFTables in the network config asks for it"
        facts = detect.look([nets.family for nets in self._wishes.nets])
        self._place, reason = detect.choose(self._wishes.flavour, facts)
        return reason

    def _make_drivers(self) -> None:
        purpose = self._wishes.purpose
        style: Style = "native" if self._wishes.native else self._wishes.style
        former = {nets.family: nets for nets in self._wishes.former}
        for nets in self._wishes.nets:
            family = nets.family
            self._drivers[family] = self._driver(family)
            self._wanted[family] = wanted(style, nets, purpose)
            self._claims[family] = claim(
                [nets], former.get(family), masquerade=purpose.masquerade, forward=purpose.forward
            )
        self._to_sweep = [
            (place, family) for place in PLACES if place != self._place for family in self._drivers
        ]

    def _driver(self, family: Family) -> Driver:
        if self._place == "legacy" and family == 4:
            try:
                return PythonIptables(self._stop)
            except Unavailable as reason:
                log.info("Using iptables-legacy-restore: %s", reason)
        return driver(self._place, family, self._commands)

    def _listen(self) -> None:
        if self._place == "legacy":
            return
        try:
            self._removals = Removals()
        except OSError as error:
            log.warning(
                "nf_tables does not notify us (%s): reading the rules every %g s", error, self._period
            )

    def _warn_of_dropping(self) -> None:
        """What another table drops no rule of ours can let through, unless it is in the same table."""
        if self._place != "native" or not self._wishes.purpose.forward:
            return
        with suppress(OSError):
            netfilter = Netfilter()
            for family in self._drivers:
                for table in netfilter.dropping(family):
                    log.warning(
                        "Table %s drops what it does not accept in its FORWARD chain, and no other table can "
                        "overrule that; accept %s there, or do without EnableNFTables",
                        table,
                        next(nets.network for nets in self._wishes.nets if nets.family == family),
                    )
            netfilter.close()

    # ---- the loop ----------------------------------------------------------------------------

    @property
    def _period(self) -> float:
        return max(1.0, self._wishes.resync)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._inbox, select.POLLIN)
        if self._removals:
            poll.register(self._removals, select.POLLIN)
        while not self._stop.is_set():
            self._heartbeat(4 * _IDLE)
            poll.poll(min(_IDLE, max(0.0, self._next - clock.now())) * 1000)
            self._inbox.drain()
            self._hear()
            if clock.now() >= self._next and not self._stop.is_set():
                self._check()

    def cancel(self) -> None:
        self._commands.cancel()
        self._inbox.wake()

    def _hear(self) -> None:
        """Note which rules may be gone, and look at them soon."""
        for removal in self._removals.read() if self._removals else ():
            concerned = {family for family in self._drivers if self._concerns(family, removal)}
            if concerned:
                self._dirty |= concerned
                self._culprits.add(removal.by)
                self._next = min(self._next, max(clock.now() + _SETTLE, self._earliest_repair()))

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
        """Look at the rules that may be wrong and put them right; after that, at what is left elsewhere."""
        self._next = math.inf
        if self._removals is None:
            self._next = clock.now() + self._period
            self._dirty = set(self._drivers)
        failed = [family for family in sorted(self._dirty) if not self._put_right(family)]
        if not failed:
            self._sweep()
        self._culprits.clear()
        if failed or self._to_sweep:
            self._next = min(self._next, clock.now() + self._retry_delay)
            self._retry_delay = min(2 * self._retry_delay, _LAST_RETRY)
        else:
            self._retry_delay = _FIRST_RETRY

    def _put_right(self, family: Family) -> bool:
        try:
            self._converge(family)
        except Retryable as failure:
            if not self._stop.is_set():
                self._once.warn(
                    log, family, f"The packet filter rules for IPv{family} are not in place: {failure}"
                )
            return False
        self._dirty.discard(family)
        self._right.add(family)
        if self._once.clear(family):
            log.info("The packet filter rules for IPv%d are in place", family)
        return True

    def _converge(self, family: Family) -> None:
        """Read, compare, change, until a reading shows that all is right. Raises ``Retryable``."""
        there = self._drivers[family]
        failure: Retryable = Retryable(
            f"{there.name}: what was written was not there a moment later", "see who removes it"
        )
        for _ in range(_ATTEMPTS):
            found = there.read()
            edits = self._plan(family, found)
            if not edits:
                return
            try:
                self._stuck.update(self._carry_out(family, edits, found))
            except Rejected as rejection:
                failure = rejection
                continue
            self._account(family, edits, found)
            # Our own change is news as well; the next reading takes care of it.
            self._hear()
            self._dirty.discard(family)
        raise failure

    def _plan(self, family: Family, found: Rules) -> tuple[Edit, ...]:
        edits = plan(self._wanted[family], found, self._claims[family])
        return tuple(edit for edit in edits if edit not in self._stuck)

    def _carry_out(self, family: Family, edits: tuple[Edit, ...], found: Rules) -> tuple[Edit, ...]:
        there = self._drivers[family]
        try:
            return carry_out(there, edits)
        except Rejected:
            purpose = self._wishes.purpose
            if family in self._right or not (purpose.masquerade and purpose.random):
                raise
            plainer = _without_random(self._wanted[family])
            stuck = carry_out(there, plan(plainer, found, self._claims[family]))
            self._wanted[family] = plainer
            log.warning("%s does not know fully random source ports: masquerading without", there.name)
            return stuck

    def _account(self, family: Family, edits: tuple[Edit, ...], found: Rules) -> None:
        """Say what was changed, and why if it had been right before."""
        name = self._drivers[family].name
        missing = [f"{table} {chain} {rule_text(rule)}" for (table, chain), rule in lost(edits, found)]
        if family not in self._right:
            removed = list(described(edits))
            log.info("Set %d rules with %s", len(missing), name)
            if removed:
                log.info("Removed with %s what an earlier run left: %s", name, _some(removed))
            return
        culprits = ", ".join(sorted(filter(None, self._culprits)))
        what = f"missing were {_some(missing)}" if missing else "they were out of order"
        log.warning(
            "Restored our rules with %s%s: %s", name, f", changed by {culprits}" if culprits else "", what
        )
        self._repairs.append(clock.now())
        if len(self._recent_repairs()) == _SUSPICIOUS:
            log.warning(
                "Our rules have been removed %d times in %d s: two programs keep undoing each other's work; "
                "waiting longer from now on before each repair",
                _SUSPICIOUS,
                _FIGHT,
            )

    def _recent_repairs(self) -> deque[float]:
        while self._repairs and self._repairs[0] < clock.now() - _FIGHT:
            self._repairs.popleft()
        return self._repairs

    def _earliest_repair(self) -> float:
        recent = self._recent_repairs()
        return recent[-1] + min(_FIRST_PAUSE * 2 ** len(recent), _LAST_PAUSE) if recent else 0.0

    def _sweep(self) -> None:
        """Remove what an earlier run left elsewhere, now that its successor is in place."""
        remaining = []
        for place, family in self._to_sweep:
            try:
                removed = sweep(place, family, self._claims[family], self._commands)
            except Unavailable as missing:
                log.warning(
                    "Rules that an earlier flanneld left (IPv%d, %s) stay: %s", family, place, missing
                )
            except Retryable as failure:
                self._once.warn(log, (place, family), f"Cannot remove what an earlier run left: {failure}")
                remaining.append((place, family))
            else:
                if removed:
                    log.info("Removed what an earlier run left: %s", _some(removed))
        self._to_sweep = remaining


def retire(former: Iterable[Nets], *, dry_run: bool = False) -> list[str]:
    """Remove all rules that flannel made, of any network and wherever they are, and say what they were.

    ``former`` is what the last run had: unmarked rules, as in v0.12, are known by these networks only.
    With ``dry_run`` nothing is changed. What cannot be removed is logged.
    """
    commands = Commands()
    known = {nets.family: nets for nets in former}
    removed: list[str] = []
    for family in FAMILIES:
        everything = replace(claim((), known.get(family), masquerade=True, forward=True), networks=None)
        for place in PLACES:
            try:
                removed += sweep(place, family, everything, commands, dry_run=dry_run)
            except Retryable as failure:
                log.warning("Rules of flannel may be left (IPv%d, %s): %s", family, place, failure)
    return removed


def _without_random(rules: Rules) -> Rules:
    return {chain: tuple(replace(rule, random=False) for rule in inside) for chain, inside in rules.items()}


def _some(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = f"; and {len(lines) - _FEW} more" if len(lines) > _FEW else ""
    return "; ".join(lines[:_FEW]) + more
