"""Two nodes, one of which suffers while the other looks on; what it takes to see it heal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.lab import Lab, Node, wait_for

DUAL_STACK: dict[str, Any] = {"EnableIPv6": True, "IPv6Network": "fc00:5::/48"}

#: A repair takes some milliseconds. Without notifications it would take half a minute.
SOON = 3.0
#: Longer than the pause between two repairs where somebody keeps undoing them.
QUIET = 0.3

FIGHT = "Another program keeps changing"
DEVICES = ("flannel.1", "flannel-v6.1", "flannel0", "eth0")


def connect(one: Node, other: Node) -> None:
    """See that containers reach each other in each family that they have."""
    for target in other.container().addresses.values():
        one.container().wait_for_reply(target)


def state(node: Node) -> dict[str, Any]:
    """What the kernel holds, whichever number a device that was made anew has got."""
    found = node.kernel_state(*DEVICES)
    for device in found.values():
        for number in ("ifindex", "link_index"):
            (device["link"] or {}).pop(number, None)
        # The kernel gives a device without a MAC another one each time.
        device["addresses-6"] = [each for each in device["addresses-6"] if not each.startswith("fe80:")]
    return found


@dataclass(frozen=True, slots=True)
class Pair:
    """Their containers reach each other; ``before`` is what the node's kernel holds then."""

    lab: Lab
    node: Node
    peer: Node
    before: dict[str, Any]

    @classmethod
    def build(cls, lab: Lab, backend: str, config: Mapping[str, Any]) -> Pair:
        node, peer = lab.cluster({"Type": backend}, **config)
        connect(node, peer)
        return cls(lab, node, peer, state(node))

    def is_sound(self) -> bool:
        return self.node.running and state(self.node) == self.before

    def is_contested(self) -> bool:
        """Whether so much was repaired that the daemon takes its time, and sums up what it says."""
        return "keeps changing" in self.node.log()

    def fill_in(self, text: str) -> str:
        """Name what commands and log lines speak of; a 6 marks the IPv6 one."""
        words = {"gateway": self.lab.etcd.address}
        for family, mark, device in ((4, "", "flannel.1"), (6, "6", "flannel-v6.1")):
            if family in self.node.container().addresses:
                words["subnet" + mark] = self.peer.subnet(family)
                words["base" + mark] = self.peer.subnet(family).partition("/")[0]
                words["own" + mark] = self.node.subnet(family).partition("/")[0]
                words["mac" + mark] = (self.peer.link(device) or {}).get("address", "")
        return text.format(**words)

    def damage(self, *commands: str) -> None:
        """Do all of it before the daemon can answer, and see that it is not without effect."""
        with self.node.paused():
            for command in commands:
                self.node.run(*self.fill_in(command).split())
            assert not self.is_sound()

    def wait_until_healed(self) -> None:
        wait_for(self.is_sound, SOON, "the kernel to be as it was")

    def check_healing(self, commands: list[str], logged_as: list[str]) -> None:
        """Damage it and see that it heals, that the log says so, and that it is quiet then."""
        node = self.node
        logged = len(node.log())
        self.damage(*commands)
        self.wait_until_healed()
        lines = [self.fill_in(what) for what in logged_as]

        def told() -> bool:
            log = node.log()
            # Two repairs of an entry within seconds, as for two tests, are a fight: others and fewer lines.
            return all(line in log[logged:] for line in lines) or FIGHT in log

        wait_for(told, SOON, f"the log to say: {lines}")
        self.wait_until_quiet(QUIET)
        connect(node, self.peer)

    def wait_until_quiet(self, seconds: float) -> None:
        """Wait until, for so long, nothing is written to the kernel, nor to the log."""

        def quiet() -> bool:
            logged = self.node.log()
            with self.node.changes() as changes:
                return changes.during(seconds) == [] and self.node.log() == logged

        wait_for(quiet, what=f"{seconds} s in which nothing happens")


class Pairs:
    """One pair for each kind of network, for as long as the tests leave it sound."""

    def __init__(self) -> None:
        self._kept: dict[str, Pair] = {}

    def get(self, backend: str, *, dual_stack: bool = False) -> Pair:
        """Building a pair takes ten times as long as seeing it heal."""
        name = f"{backend} {dual_stack}"
        pair = self._kept.get(name)
        if pair is None or not pair.is_sound() or pair.is_contested():
            self._drop(name)
            with ExitStack() as stack:
                lab = stack.enter_context(Lab())
                pair = self._kept[name] = Pair.build(lab, backend, DUAL_STACK if dual_stack else {})
                stack.pop_all()  # It worked, so the laboratory stays.
        return pair

    def close(self) -> None:
        for name in tuple(self._kept):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._kept:
            self._kept.pop(name).lab.close()
