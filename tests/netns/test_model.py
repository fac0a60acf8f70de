"""Whatever happens to a node in whichever order, its kernel ends as it should be.

Hypothesis draws histories: leases come and go, somebody tampers with the kernel, the daemon is killed,
stopped and started at any moment, etcd is started anew or forgets. When all is quiet again, the kernel must
hold what ``kernel_model`` computes from the leases, others' objects must be untouched and our subnet ours.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Self, cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.lab import EtcdError, Lab, Node, wait_for
from tests.lab.etcd import TTL
from tests.lab.namespace import run
from tests.netns.kernel_model import Observed, wanted

#: A refusal is tried again after up to some seconds.
SOON = 15.0
APIS = {"vxlan": "v3", "host-gw": "v2"}

ANYWHERE = (
    "ip route del {subnet} via {gateway}",
    "ip route replace {subnet} via 198.18.0.254",
    "ip route replace {subnet} dev lo",
    "ip route replace blackhole {subnet}",
    "ip link set eth0 mtu 1400",
    "ip link set eth0 mtu 1500",
    "ip link set eth0 down",  # and up again
)
TUNNEL = (
    "ip neigh del {base} dev flannel.1",
    "ip neigh replace {base} lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent",
    "ip neigh replace {base} lladdr {mac} dev flannel.1 nud stale",
    "ip neigh add 10.5.0.7 lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent",
    "bridge fdb del {mac} dev flannel.1",
    "bridge fdb replace {mac} dev flannel.1 dst 198.18.0.99 self permanent",
    "bridge fdb replace {mac} dev flannel.1 dst 198.18.0.99 port 99 self permanent",
    "bridge fdb replace {mac} dev flannel.1 dst 198.18.0.99 vni 99 self permanent",
    "bridge fdb add 02:00:00:00:00:99 dev flannel.1 dst 198.18.0.99",
    "bridge fdb add 02:00:00:00:00:97 dev flannel.1 dst 198.18.0.99 port 99",
    "ip address flush dev flannel.1 scope global",
    "ip address add 10.5.0.7/32 dev flannel.1",
    "ip route add 10.99.0.0/16 dev flannel.1",
    "ip route flush dev flannel.1",
    "ip neigh flush dev flannel.1 nud permanent",
    "ip link set flannel.1 down",
    "ip link set flannel.1 up",
    "ip link set flannel.1 address 02:00:00:00:00:98",
    "ip link set flannel.1 mtu 1300",
    "ip link set flannel.1 type vxlan learning",
    "ip link del flannel.1",
    "ip link add flannel.1 type bridge",
    "ip link add flannel.1 type vxlan id 2 dev eth0 local 198.18.0.1 dstport 8472",
)
#: What an operator or another program has.
FOREIGN = (
    "route add 192.0.2.0/24 via 198.18.0.254",
    "route add 10.5.3.0/24 via 198.18.0.254 metric 50",
    "route add 10.5.2.0/24 via 198.18.0.101 metric 50",
    "route add 10.5.2.0/24 tos 0x10 via 198.18.0.254",
    "route add 10.5.1.0/24 via 198.18.0.254 table 100",
    "route add 10.5.4.0/25 via 198.18.0.254",
    "route add 10.5.0.0/20 via 198.18.0.254",
    "route add blackhole 10.5.5.0/24 metric 9000",
    "route add 172.30.0.0/24 via 198.18.0.254 proto 70",  # another flanneld's
    "neighbor add 198.18.0.99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
    "address add 198.18.0.201/24 dev eth0",
    "address add 192.168.77.1/24 dev br9",
    "rule add to 10.5.3.0/24 lookup 100 pref 500",
)
#: The kernel removes with a link that is set down what leads through it.
BOUNCE = ("link set eth0 down", "link set eth0 up", "route add default via 198.18.0.254")

subnets = st.integers(1, 6).map("10.5.{}.0/24".format)
hosts = st.integers(101, 103).map("198.18.0.{}".format)
macs = st.integers(1, 4).map("02:00:00:00:01:{:02x}".format)
places = st.integers(0, 5)
moments = st.integers(0, 300)  # milliseconds


FIRST_PEERS = [
    (f"10.5.{number}.0/24", f"198.18.0.{100 + number}", f"02:00:00:00:01:{number:02x}")
    for number in (1, 2, 3)
]


class Ground:
    """One node with its laboratory, on which all histories of a backend take place."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.lab = Lab(api=APIS[backend])
        #: What the history in progress has done so far, and what was wrong then.
        self.steps: list[str] = []
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self.lab.__enter__()
        try:
            (self.node,) = self.lab.cluster({"Type": self.backend}, nodes=1, SubnetMin="10.5.100.0")
            self.own = self.node.subnet()
            self.node.namespace.ip(
                "link add br9 type bridge",
                "link set br9 up",
                "link add vxlan9 type vxlan id 9 dev eth0 local 198.18.0.1 dstport 4789",
            )
            self.act("bridge fdb add 02:00:00:00:01:01 dev vxlan9 dst 198.18.0.99")
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def act(self, *commands: str) -> None:
        """Run what may or may not work as things are."""
        for command in commands:
            tool, _, rest = command.partition(" ")
            run(tool, "-n", self.node.namespace.name, "-force", "-batch", "-", stdin=rest + "\n", check=False)

    def look(self) -> Observed:
        return Observed(self.node)

    def leases(self) -> dict[str, Any]:
        return self.lab.etcd.leases()

    def remove_lease(self, subnet: str) -> None:
        with suppress(EtcdError):  # It may just have expired.
            self.lab.etcd.delete_lease(subnet)


#: They run after each step and are none.
INVARIANTS = ("others_objects_are_untouched", "the_daemon_has_nothing_grave_to_say")


def told(method: Callable[..., None]) -> Callable[..., None]:
    """Write down what is done, and the first thing that goes wrong: it need not happen a second time."""

    @wraps(method)
    def run(self: Histories, **drawn: Any) -> None:
        ground = self.ground
        if method.__name__ not in INVARIANTS:
            ground.steps.append(f"{method.__name__}({', '.join(f'{k}={v!r}' for k, v in drawn.items())})")
        try:
            method(self, **drawn)
        except Exception as failure:
            ground.failure = ground.failure or failure
            raise

    return run


class Histories(RuleBasedStateMachine):
    """One history. ``ground`` is as the one before has left it."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.node: Node = ground.node
        self.paused = False
        #: Subnets to which somebody else may have a route of his own by now.
        self.strays: set[str] = set()
        self.added: list[str] = []
        self.sysctls: dict[str, int] = {}
        if ground.failure:
            raise ground.failure
        ground.steps.clear()
        self._begin()

    @told
    def _begin(self) -> None:
        ground = self.ground
        self._clear_away()
        for subnet, host, mac in FIRST_PEERS:
            ground.lab.etcd.put_lease(subnet, self._attributes(host, mac))
        self._settle()
        self.foreign = ground.look().foreign()

    # ---- the leases ------------------------------------------------------------------------------

    @rule(subnet=subnets, host=hosts, mac=macs, ttl=st.sampled_from([TTL, TTL, 1]))
    @told
    def a_peer_comes(self, subnet: str, host: str, mac: str, ttl: int) -> None:
        self.ground.lab.etcd.put_lease(subnet, self._attributes(host, mac), ttl)

    @rule(subnet=subnets, host=hosts, to_another_backend=st.booleans())
    @told
    def a_peer_goes(self, subnet: str, host: str, to_another_backend: bool) -> None:
        if to_another_backend:
            self.ground.lab.etcd.put_lease(subnet, {"PublicIP": host, "BackendType": "ipip"})
        else:
            self.ground.remove_lease(subnet)

    # ---- the store -------------------------------------------------------------------------------

    @rule(how=st.sampled_from([signal.SIGTERM, signal.SIGKILL, None]))
    @told
    def etcd_is_started_anew_or_forgets(self, how: signal.Signals | None) -> None:
        etcd = self.ground.lab.etcd
        if how:
            etcd.restart(how)
        else:
            etcd.set("/unrelated", "")  # Nothing cannot be forgotten twice.
            etcd.forget_history()

    # ---- the kernel ------------------------------------------------------------------------------

    @rule(what=st.lists(st.sampled_from(ANYWHERE), min_size=1, max_size=2), peer=places, quiet=st.booleans())
    @told
    def somebody_tampers_with_a_way(self, what: list[str], peer: int, quiet: bool) -> None:
        self._tamper(what, peer, quiet)

    @precondition(lambda self: self.ground.backend == "vxlan")
    @rule(what=st.lists(st.sampled_from(TUNNEL), min_size=1, max_size=3), peer=places, quiet=st.booleans())
    @told
    def somebody_tampers_with_the_tunnel(self, what: list[str], peer: int, quiet: bool) -> None:
        self._tamper(what, peer, quiet)

    @rule(what=st.sampled_from(FOREIGN))
    @told
    def somebody_adds_what_is_his(self, what: str) -> None:
        if what in self.added:
            return
        self.ground.node.namespace.ip(what)
        self.added.append(what)
        now = self.ground.look().foreign()
        assert _size(now) > _size(self.foreign), f"{what}: it is gone at once"
        self.foreign = now

    @rule(value=st.integers(0, 2), name=st.sampled_from(["all", "eth0", "default"]))
    @told
    def somebody_sets_a_sysctl(self, value: int, name: str) -> None:
        path = f"net/ipv4/conf/{name}/rp_filter"
        self.node.namespace.sysctl(path, value)
        self.sysctls[path] = value

    # ---- the daemon ------------------------------------------------------------------------------

    @rule(how=st.sampled_from([signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP]))
    @told
    def the_daemon_ends_or_is_stopped_in_its_tracks(self, how: signal.Signals) -> None:
        if how != signal.SIGSTOP:
            self._end(how)
        elif self.node.running:
            os.kill(self.node.pid, how)
            self.paused = True

    @rule(moment=moments, killed=st.booleans())
    @told
    def the_daemon_is_started_or_goes_on(self, moment: int, killed: bool) -> None:
        self._resume()
        self._start()
        if killed:
            time.sleep(moment / 1000)  # Any moment will do.
            self._end(signal.SIGKILL)

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    @told
    def others_objects_are_untouched(self) -> None:
        self._check_others()

    @invariant()
    @told
    def the_daemon_has_nothing_grave_to_say(self) -> None:
        self._check_log()

    @told
    def teardown(self) -> None:
        self._settle()
        self._check_others()
        self._check_log()

    def _settle(self) -> None:
        self._resume()
        self._start()
        ground = self.ground
        try:
            wait_for(self._is_right, SOON)
        except AssertionError:
            seen = ground.look()
            assert seen.ours(self._lone_strays()) == self._wanted(seen)
        assert ground.own in ground.leases()

    def _check_others(self) -> None:
        assert self.ground.look().foreign() == self.foreign
        with self.node.namespace.entered():
            found = {path: int(Path("/proc/sys", path).read_text()) for path in self.sysctls}
        assert found == self.sysctls

    def _check_log(self) -> None:
        log = self.node.logs()
        assert "Traceback" not in log, log
        assert not [line for line in log.splitlines() if line.startswith(("E", "F"))]

    # ---- how -------------------------------------------------------------------------------------

    def _attributes(self, host: str, mac: str) -> dict[str, Any]:
        data = {"BackendData": {"VtepMAC": mac}} if self.ground.backend == "vxlan" else {}
        return {"PublicIP": host, "BackendType": self.ground.backend, **data}

    def _tamper(self, what: list[str], place: int, quiet: bool) -> None:
        """Do something to what leads to one of the peers, and perhaps wait until it is healed."""
        leases = self._peers()
        peers = sorted(leases)
        for each in what:
            if each == "ip link set eth0 down":
                self.ground.act(*(f"ip {command}" for command in (*BOUNCE, *self.added)))
            elif "{" not in each:
                self.ground.act(each)
            elif peers:
                subnet = peers[place % len(peers)]
                self._tamper_with_a_peer(each, subnet, leases[subnet])
        if quiet:
            self._settle()

    def _tamper_with_a_peer(self, what: str, subnet: str, attributes: dict[str, Any]) -> None:
        if "replace" in what and "{subnet}" in what:
            self.strays.add(subnet)
        base = subnet.partition("/")[0]
        gateway = base if self.ground.backend == "vxlan" else attributes["PublicIP"]
        mac = attributes.get("BackendData", {}).get("VtepMAC", "")
        self.ground.act(what.format(subnet=subnet, base=base, gateway=gateway, mac=mac))

    def _start(self) -> None:
        if not self.node.running:
            self.node.start()

    def _end(self, how: signal.Signals) -> None:
        if self.node.running:
            self._resume()
            # Python itself knows nothing yet of ending in good order.
            assert self.node.daemon.end(how, 10).status in (0, -how)

    def _resume(self) -> None:
        if self.paused:
            os.kill(self.node.pid, signal.SIGCONT)
            self.paused = False

    def _peers(self) -> dict[str, Any]:
        """The leases that lead to somewhere."""
        ground = self.ground
        found = ground.leases().items()
        return {
            net: data for net, data in found if net != ground.own and data["BackendType"] == ground.backend
        }

    def _lone_strays(self) -> set[str]:
        return self.strays.difference(self._peers())

    def _wanted(self, seen: Observed) -> dict[str, Any]:
        ground = self.ground
        return wanted(ground.leases(), ground.own, ground.backend, seen.mtu("eth0"))

    def _is_right(self) -> bool:
        assert self.node.running, f"the daemon ended: {self.node.daemon.status()}:\n{self.node.log()}"
        seen = self.ground.look()
        return seen.ours(self._lone_strays()) == self._wanted(seen)

    def _clear_away(self) -> None:
        """What the history before has left."""
        for subnet in self.ground.leases():
            if subnet != self.ground.own:
                self.ground.remove_lease(subnet)
        ways = self.ground.look().ours(())["routes"]
        self.ground.act(
            "ip link set eth0 mtu 1500",
            *(f"ip {each.replace(' add ', ' del ')}" for each in FOREIGN),
            *(f"ip route del {each[1]} {each[0]}" for each in ways if each[2] != "flannel.1"),
        )


def _size(found: dict[str, Any]) -> int:
    return sum(map(len, found.values()))


@pytest.fixture(params=["vxlan", "host-gw"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    with Ground(request.param) as ground:
        yield ground


def check(ground: Ground, start: int, histories: int, steps: int) -> None:
    """Draw so many histories. None is made smaller: what happens depends on the moment, too."""
    how = settings(
        max_examples=histories,
        stateful_step_count=steps,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(cast(Any, seed(start)(lambda: Histories(ground))), settings=how)
    except Exception as error:
        story = "\n".join(ground.steps)
        raise AssertionError(
            f"{ground.failure or error}\n--hypothesis-seed={start}:\n{story}"
        ) from ground.failure


def test_after_some_histories_the_kernel_is_as_it_should_be(ground: Ground) -> None:
    check(ground, start=20261121, histories=4, steps=20)


@pytest.mark.long
def test_after_many_histories_the_kernel_is_as_it_should_be(
    ground: Ground, pytestconfig: pytest.Config
) -> None:
    """With the seed that ``--hypothesis-seed`` gives, else another one each time."""
    given = pytestconfig.getoption("--hypothesis-seed")
    check(ground, start=int(given or random.randrange(1 << 32)), histories=60, steps=40)
