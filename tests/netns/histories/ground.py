"""One node with its laboratory, on which all histories of a setting take place."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from typing import Any, Self

from tests.lab import Door, EtcdError, Lab, own_command
from tests.lab.etcd import TTL
from tests.lab.namespace import run
from tests.netns.charons import with_own_run
from tests.netns.histories.observed import Observed
from tests.netns.histories.packet_filter import Rules, wanted_rules
from tests.netns.histories.setting import OURS, Setting


class Ground:
    """``is_patient`` histories also wait for what takes half a minute."""

    def __init__(self, setting: Setting, *, is_patient: bool = False) -> None:
        self.setting = setting
        self.is_patient = is_patient
        self.lab = Lab(api=setting.api)
        #: What the history in progress has done so far, and what was wrong then.
        self.steps: list[str] = []
        self.failure: Exception | None = None
        #: When somebody damaged the packet filter, on the monotonic clock.
        self.damages: list[float] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.lab)
            self.door = stack.enter_context(Door(self.lab.switch, self.lab.etcd.address))
            (self.node,) = self.lab.add_nodes()
            self._furnish()
            self.lab.etcd.put_config(self.setting.network_config)
            self.start()
            self.node.wait_ready(20)
            self.own = self.subnet()
            self.wanted_rules = wanted_rules(self.setting, self.own)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _furnish(self) -> None:
        self.node.namespace.ip(
            "link add br9 type bridge",
            "link set br9 up",
            f"link add vxlan9 type vxlan id 9 dev eth0 local {OURS[4]} dstport 4789",
        )
        self.act("bridge fdb add 02:00:00:00:01:01 dev vxlan9 dst 198.18.0.99")

    def start(self) -> None:
        """Start the daemon; it meets etcd at the door."""
        # The legacy tables tell nobody what happens to them.
        flags = (f"--iptables-flavour={self.setting.flavour}", "--iptables-resync=1")
        command = with_own_run(self.node, *own_command()) if self.setting.type == "ipsec" else None
        self.node.start(
            f"--etcd-endpoints={self.door.url}", "--ip-masq", "--iface-wait=60", *flags, command=command
        )

    def subnet(self) -> str:
        """Our lease, as our node tells it to those who attach containers."""
        return "&".join(self.node.subnet(family) for family in self.setting.families)

    def act(self, *commands: str) -> None:
        """Run what may or may not work as things are."""
        for command in commands:
            tool, _, rest = command.partition(" ")
            run(tool, "-n", self.node.namespace.name, "-force", "-batch", "-", stdin=rest + "\n", check=False)

    def look(self) -> Observed:
        return Observed(self.node, self.setting)

    def rules(self) -> tuple[list[str], list[str]]:
        """The rules in the packet filter that are the daemon's, and those of others."""
        return Rules(self.node, self.setting).split(self.wanted_rules)

    def write(self, lease: str, value: dict[str, Any] | str, ttl: int | None = TTL) -> None:
        """Write a lease, be it sense or not."""
        text = value if isinstance(value, str) else json.dumps(value)
        self.lab.etcd.set(f"subnets/{lease.replace('/', '-')}", text, ttl)

    def remove(self, lease: str) -> None:
        with suppress(EtcdError):  # It may not be there, or just have expired.
            self.lab.etcd.delete_lease(lease)
