"""What all histories have in common: how they begin and end, and what must hold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.lab import Node, wait_for
from tests.lab.etcd import TTL
from tests.netns.histories.ground import Ground
from tests.netns.histories.observed import is_vandals, leave_out
from tests.netns.histories.packet_filter import damage, script
from tests.netns.histories.setting import CROWD, PLAYERS, UPLINK, address, home, nets
from tests.netns.histories.vandalism import foreign
from tests.netns.histories.wanted import DATA, METRIC, PUBLIC_IP, wanted

#: A refusal is tried again after up to some seconds.
SOON = 25.0
#: Commands are checked only now and then, and nothing tells of what others do.
CHECK_PERIOD = 50.0
#: The daemon logs it once, when it has read the whole kernel and all leases.
IN_SYNC = "In sync with"
#: They run after each step and are none.
INVARIANTS = ("others_objects_are_untouched", "the_daemon_has_nothing_grave_to_say")


def told(method: Callable[..., None]) -> Callable[..., None]:
    """Write down what is done, and the first thing that goes wrong: it need not happen a second time."""

    @wraps(method)
    def run(self: History, **drawn: Any) -> None:
        ground = self.ground
        if method.__name__ not in INVARIANTS:
            ground.steps.append(f"{method.__name__}({', '.join(f'{k}={v!r}' for k, v in drawn.items())})")
        try:
            method(self, **drawn)
        except Exception as failure:
            ground.failure = ground.failure or failure
            raise

    return run


class History(RuleBasedStateMachine):
    """One history. ``ground`` is as the one before has left it."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.setting = ground.setting
        self.node: Node = ground.node
        self.paused = False
        #: Values of leases that make no sense.
        self.senseless: set[str] = set()
        #: Leases of which the daemon is known to have heard, as they are in the store; None: no lease.
        self.heard: dict[str, str | None] = {}
        #: What should lead to peers whose leases make no sense now, None for nothing. Of those that are not
        #: here nobody can say.
        self.kept: dict[str, str | None] = {}
        #: MAC address and host that each lease has announced, as the FDB has them.
        self.announced: dict[str, set[tuple[str, str]]] = {}
        #: Leases that soon expire.
        self.fleeting: set[str] = set()
        #: How long it may take until all is right, in seconds.
        self.patience = SOON + (CHECK_PERIOD if self.setting.type == "extension" else 0)
        #: Subnets to which somebody else may have a route of his own by now.
        self.strays: set[str] = set()
        #: Those that came when the daemon may not have had a route of its own there: they stay.
        self.excused: set[str] = set()
        #: Leases of peers where the host has a network of its own.
        self.taken: set[str] = set()
        #: What others have added by ``ip``, routes to hosts by host, and sysctls.
        self.added: list[str] = []
        self.detours: dict[str, str] = {}
        self.sysctls: dict[str, int] = {}
        self.foreign: dict[str, Any] = {"routes": []}
        if ground.failure:
            raise ground.failure
        ground.steps.clear()
        self._begin()

    @told
    def _begin(self) -> None:
        ground = self.ground
        ground.door.mend()
        self._clear_away()
        self.gather_the_crowd()
        for number in PLAYERS[:3]:
            self.write(self.setting.lease(number), self.setting.attributes(host=100 + number, mac=number))
        self.settle()
        self.foreign = ground.look().foreign()
        self.foreign_rules = ground.rules()[1]

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    @told
    def others_objects_are_untouched(self) -> None:
        found = self.ground.look().foreign() | {"packet filter": self.ground.rules()[1]}
        should = self.foreign | {"packet filter": self.foreign_rules}
        assert found == should, difference(found, should)
        with self.node.namespace.entered():
            found = {path: int(Path("/proc/sys", path).read_text()) for path in self.sysctls}
        assert found == self.sysctls

    @invariant()
    @told
    def the_daemon_has_nothing_grave_to_say(self) -> None:
        log = self.node.log()  # Of an earlier one its successor's start takes care.
        assert "Traceback" not in log, log
        assert not [line for line in log.splitlines() if line.startswith(("E", "F"))]

    @told
    def teardown(self) -> None:
        if not hasattr(self, "foreign_rules"):
            return  # It has not even begun.
        self.settle()
        self.others_objects_are_untouched()
        self.the_daemon_has_nothing_grave_to_say()

    def settle(self) -> None:
        """Let all go on as it should, and see that the daemon makes it right."""
        self.ground.door.mend()
        self.resume()
        self.start()
        try:
            wait_for(self._is_right, self.patience)
        except AssertionError:
            for found, should in (self._kernel(), self._rules()):
                assert found == should, difference(found, should)
            assert IN_SYNC in self.node.log(), f"never in sync:\n{self.node.log()}"
        stored = self.ground.lab.etcd.lease_values()
        assert self.ground.own in stored
        assert self.ground.subnet() == self.ground.own
        self.heard = {
            lease: stored.get(lease)
            for lease in map(self.setting.lease, (*PLAYERS, *CROWD))
            if lease not in self.fleeting and stored.get(lease) not in self.senseless
        }

    def _is_right(self) -> bool:
        assert self.node.running, f"the daemon ended: {self.node.daemon.status()}:\n{self.node.log()}"
        # The kernel may be right from an earlier run. Until the new one has read it, a route that replaces
        # the daemon's looks like one that was always somebody else's, and the daemon leaves those alone.
        if IN_SYNC not in self.node.log():
            return False
        found, should = self._kernel()
        if found == should:
            found, should = self._rules()
        return found == should

    def _kernel(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is in the kernel of the daemon's, and what should be."""
        seen = self.ground.look()
        sensible, unsure = self._leases()
        should = wanted(self.setting, sensible, self.ground.own, seen)
        led = {str(net) for lease in (*self._led(sensible), *unsure) for net in nets(lease).values()}
        found, should = leave_out(unsure, seen.ours(self.strays - led), should)
        # Once its neighbour is gone, nothing in the kernel tells whose end this is.
        ends = {end for lease in unsure for end in self.announced.get(lease, ())}
        for device, tunnel in found["tunnels"].items():
            known = should["tunnels"][device]["fdb"]
            tunnel["fdb"] = [each for each in tunnel["fdb"] if each in known or each[:2] not in ends]
        stuck = {each[0] for each in found["routes"] if each[0] in self.excused and is_vandals(each)}
        stuck |= self._barred() - {each[0] for each in found["routes"]}
        for state in (found, should):
            state["routes"] = [each for each in state["routes"] if each[0] not in stuck]
        return found, should

    def _barred(self) -> set[str]:
        """Subnets to which the kernel takes no new route of the daemon, so that one may be missing.

        IPv6 refuses an onlink gateway that another device has a route for.
        """
        if not self.setting.devices:
            return set()
        return {
            net for net, _, _, _, metric, *_ in self.foreign["routes"] if ":" in net and metric < METRIC[6]
        }

    def _rules(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same of the packet filter."""
        return {"packet filter": self.ground.rules()[0]}, {"packet filter": self.ground.wanted_rules}

    # ---- the leases ------------------------------------------------------------------------------

    def _leases(self) -> tuple[dict[str, Any], set[str]]:
        """All leases that count, and those of which nobody can say what the daemon makes of them."""
        stored = self.ground.lab.etcd.lease_values()
        sensible: dict[str, Any] = {self.ground.own: json.loads(stored[self.ground.own])}
        unsure = set()
        for lease in map(self.setting.lease, (*PLAYERS, *CROWD)):
            value = stored.get(lease)
            if value in self.senseless:
                if lease not in self.kept:
                    unsure.add(lease)
                value = self.kept.get(lease)
            if value is not None and lease not in self.taken:
                sensible[lease] = json.loads(value)
        return sensible, unsure

    def peers(self) -> dict[str, Any]:
        """The leases that lead somewhere."""
        return self._led(self._leases()[0])

    def _led(self, leases: dict[str, Any]) -> dict[str, Any]:
        own, type_ = self.ground.own, self.setting.type
        return {
            lease: attributes
            for lease, attributes in leases.items()
            if lease != own and attributes.get("BackendType", type_) == type_
        }

    def write(self, lease: str, attributes: dict[str, Any], ttl: int = TTL) -> None:
        """Write a lease that makes sense."""
        self._forget(lease)
        if self.setting.type == "vxlan":
            ends = {
                (attributes[DATA[each]]["VtepMAC"], attributes[PUBLIC_IP[each]])
                for each in self.setting.families
                if DATA[each] in attributes
            }
            self.announced.setdefault(lease, set()).update(ends)
        if ttl < TTL:
            self.fleeting.add(lease)
        self.ground.write(lease, attributes, ttl)

    def gather_the_crowd(self, shift: int = 0) -> None:
        """Have all of it there; with another ``shift`` the whole of it moves."""
        for number in CROWD:
            mac = CROWD.start + (number + shift) % len(CROWD)
            self.write(self.setting.lease(number), self.setting.attributes(100 + number + shift, mac))

    def remove(self, lease: str) -> None:
        self._forget(lease)
        self.ground.remove(lease)

    def garble(self, lease: str, value: str, *, wholly: bool) -> None:
        """Write something that makes no sense, or if not ``wholly``, perhaps a little."""
        if lease in self.heard and wholly and lease not in self.taken:
            self.kept[lease] = self.heard[lease]
        elif not wholly:
            self.kept.pop(lease, None)
        self.heard.pop(lease, None)
        self.fleeting.discard(lease)
        self.senseless.add(value)
        self.ground.write(lease, value)

    def _forget(self, lease: str) -> None:
        self.heard.pop(lease, None)
        self.kept.pop(lease, None)
        self.fleeting.discard(lease)

    # ---- the daemon ------------------------------------------------------------------------------

    def start(self) -> None:
        if not self.node.running:
            self.the_daemon_has_nothing_grave_to_say()
            self.ground.start()

    def end(self, how: signal.Signals) -> None:
        """End the daemon. The next one knows of a garbled lease no more than the kernel shows."""
        self.heard.clear()
        self.kept.clear()
        if self.node.running:
            self.resume()
            # Python itself knows nothing yet of ending in good order.
            assert self.node.daemon.end(how, 10).status in (0, -how)

    def pause(self) -> None:
        if self.node.running:
            os.kill(self.node.pid, signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        if self.paused:
            os.kill(self.node.pid, signal.SIGCONT)
            self.paused = False

    def _clear_away(self) -> None:
        """What the history before has left."""
        ground = self.ground
        stays = {ground.own, *map(self.setting.lease, CROWD)}
        for lease in set(ground.lab.etcd.lease_values()) - stays:
            ground.remove(lease)
        ways = ground.look().ours()["routes"]
        devices = self.setting.devices.values()
        hosts = [address(4, host) for host in self.setting.hosts]
        ground.act(
            f"ip link set {UPLINK} mtu 1500",
            *(f"ip {each.replace(' add ', ' del ')}" for each in foreign(self.setting)),
            *(f"ip route del {host}/32" for host in hosts),
            *(f"ip address del {home(number)} dev br9" for number in PLAYERS),
            *(f"ip route del {each[1]} {each[0]}" for each in ways if each[2] not in devices),
        )
        if ground.rules()[1]:
            ground.node.run(*script(self.setting, damage(self.setting)[0].command))


def difference(found: dict[str, Any], should: dict[str, Any], where: str = "") -> str:
    """What is there too much and too little, part by part."""
    lines = []
    for name in sorted(found.keys() | should.keys()):
        is_there, ought = found.get(name), should.get(name)
        if is_there == ought:
            continue
        if isinstance(is_there, dict) and isinstance(ought, dict):
            lines.append(difference(is_there, ought, f"{where}{name}: "))
        elif isinstance(is_there, list) and isinstance(ought, list):
            lines += [f"{where}{name}: should not be: {each}" for each in is_there if each not in ought]
            lines += [f"{where}{name}: is missing: {each}" for each in ought if each not in is_there]
            if sorted(is_there) == sorted(ought):
                lines.append(f"{where}{name}: the order: {is_there}")
        else:
            lines.append(f"{where}{name}: {is_there} instead of {ought}")
    return "\n".join(lines)
