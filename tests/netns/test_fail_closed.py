"""Guards of the encrypting backends: at no transition does a packet leave in the clear.

Each variant of the daemon goes through all transitions once, while a container sends to one of a peer. The
variants that lack a guard show that the capture sees packets in the clear, and what each guard is for. In the
last test a node cannot start its encrypting backend.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, charon_of, with_own_run
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.traffic import Stream
from tests.netns.wire import Wire, wire
from tests.vm.machine import lacks

WIREGUARD = {"Type": "wireguard", "PSK": "ZmxhbmVsZCBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="}
CONFIGS: dict[str, Mapping[str, Any]] = {"wireguard": WIREGUARD, "ipsec": IPSEC}
DEVICES = {"wireguard": "flannel-wg", "ipsec": "flannel-ipsec"}
#: Peers of the former backend: more than the removal guard lets go at once.
MANY = range(200, 225)
#: Packets of the container to wait for after a transition.
ENOUGH = 20

#: The daemon without some of its guards: policies that block, or routes and devices that lead nowhere.
LACKING = """
import sys
from flanneld.backends.ipsec.backend import DEVICE, Ipsec
from flanneld.backends.wireguard.backend import WireGuardBackend
from flanneld.main import main
from flanneld.network.xfrm import XfrmPolicy
from flanneld.state.resources import Blackhole

lacks = sys.argv.pop(1).split(",")

def is_there(each):
    if isinstance(each, XfrmPolicy) and each.is_guard:
        return "policies" not in lacks
    device = getattr(each, "device", getattr(each, "name", ""))
    return not (isinstance(each, Blackhole) or device == DEVICE) or "routes" not in lacks

def without_guards(method):
    return lambda *args: filter(is_there, method(*args))

for backend in (Ipsec, WireGuardBackend):
    backend.local = without_guards(backend.local)
    backend.peer = without_guards(backend.peer)
main()
"""


class Variant(NamedTuple):
    """Backend of a daemon, the guards that it lacks, and the backend that the node had before."""

    backend: str
    lacks: tuple[str, ...]
    former: str

    def __str__(self) -> str:
        return f"{self.backend} without {' and '.join(self.lacks)}" if self.lacks else self.backend


WHOLE = (Variant("wireguard", (), "vxlan"), Variant("ipsec", (), "host-gw"))
INCOMPLETE = (
    Variant("wireguard", ("routes",), "host-gw"),
    Variant("ipsec", ("policies",), "vxlan"),
    Variant("ipsec", ("routes",), "vxlan"),
    Variant("ipsec", ("policies", "routes"), "host-gw"),
)
TRANSITIONS = (
    "switch with many peers",
    "first contact",
    "kill -9",
    "loss of the device",
    "start",
    "restart",
    "loss of charon",
    "loss of the way to the peer",
    "loss of the peer",
)
#: Why nothing leaves in the clear at a transition even without the guards.
ANOTHER_GUARD = {
    "kill -9": "device, peers, policies and SAs stay in the kernel",
    "restart": "the same",
    "loss of charon": "SAs stay in the kernel, and the tunnel's policy drops packets without one",
}
#: The same for ipsec alone.
ANOTHER_GUARD_OF_IPSEC = {
    "loss of the device": "the tunnel's policy applies whichever route a packet has",
    "start": "the same",
}


def other_guard(variant: Variant, transition: str) -> str:
    """Return what keeps packets from leaving in the clear without the guards; empty if nothing does."""
    if variant.lacks in (("policies",), ("routes",)) and variant.backend == "ipsec":
        return "of policies and routes each is sufficient"
    own = ANOTHER_GUARD_OF_IPSEC if variant.backend == "ipsec" else {}
    return {**ANOTHER_GUARD, **own}.get(transition, "")


class History:
    """One variant's transitions. ``readable`` counts the packets in the clear at each."""

    def __init__(self, lab: Lab, variant: Variant) -> None:
        self._lab = lab
        self._variant = variant
        self.readable: dict[str, int] = {}
        self.node, self.peer = lab.cluster({"Type": variant.former})
        connect(self.node, self.peer)
        for number in MANY:
            lab.etcd.put_lease(f"10.5.{number}.0/24", lease(variant.former, number))
        self.node.wait_for_route(f"10.5.{MANY[-1]}.0/24")

    def run(self) -> None:
        node, peer, log = self.node, self.peer, self._lab.directory / "stream.log"
        stream = Stream(node.container().namespace, peer.container().address, log, 0.01)
        with stream, wire(self._lab, node, peer) as capture:
            # The former backend serves until the node is ready.
            self._switch()
            for transition, act in self._transitions():
                before = capture.readable
                with act():
                    wait_for_packets(node, capture)
                self.readable[transition] = capture.readable - before

    def _transitions(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        device = DEVICES[self._variant.backend]
        act: dict[str, Callable[[], Any]] = dict(
            zip(
                TRANSITIONS,
                (
                    nothing,
                    partial(after, self._peer_follows),
                    partial(after, self.node.kill),
                    partial(after, partial(self.node.run, "ip", "link", "del", device, check=False)),
                    partial(after, self._start_again),
                    partial(after, self.node.stop, self._start_again),
                    partial(after, self._kill_charon),
                    self._without_way,
                    partial(after, self._peer_leaves),
                ),
                strict=True,
            )
        )
        if self._variant.backend != "ipsec":
            del act["loss of charon"]
        yield from act.items()

    # ---- transitions -----------------------------------------------------------------------------

    def _switch(self) -> None:
        self.node.stop()
        self._lab.etcd.put_config({"Network": NETWORK, "Backend": CONFIGS[self._variant.backend]})
        self._start(self.node, self._variant.lacks)
        self.node.wait_for_log("In sync with", 60)

    def _peer_follows(self) -> None:
        self.peer.stop()
        self._start(self.peer)
        connect(self.node, self.peer)

    def _start_again(self) -> None:
        self._start(self.node, self._variant.lacks)
        connect(self.node, self.peer)

    def _kill_charon(self) -> None:
        former = charon_of(self.node)
        os.kill(former, signal.SIGKILL)
        wait_for(lambda: charon_of(self.node) not in (0, former), 60, "another charon")

    @contextmanager
    def _without_way(self) -> Iterator[None]:
        """Take the tunnel's policy, or the route, while the daemon cannot restore it."""
        with self.node.paused():
            ours, theirs = self.node.subnet(), self.peer.subnet()
            if self._variant.backend == "ipsec":
                self.node.run("ip", "xfrm", "policy", "delete", "src", ours, "dst", theirs, "dir", "out")
            else:
                self.node.run("ip", "route", "del", theirs)
            yield
        connect(self.node, self.peer)

    def _peer_leaves(self) -> None:
        subnet = self.peer.subnet()
        self.peer.stop()
        self._lab.etcd.delete_lease(subnet)
        self.node.wait_for_no_route(subnet)

    def _start(self, node: Node, lacks: tuple[str, ...] = ()) -> None:
        command = own_command()
        if lacks:
            command = [str(Path(command[0]).with_name("python")), "-c", LACKING, ",".join(lacks)]
        key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
        node.start(command=with_own_run(node, *command), environment=key)
        node.wait_ready(60)


@contextmanager
def after(*acts: Callable[[], object]) -> Iterator[None]:
    for act in acts:
        act()
    yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


def lease(former: str, number: int) -> dict[str, Any]:
    """Return the lease of a node that is not there."""
    found: dict[str, Any] = {"PublicIP": f"198.18.0.{number}", "BackendType": former}
    if former == "vxlan":
        found["BackendData"] = {"VNI": 1, "VtepMAC": f"02:00:00:00:01:{number - MANY[0]:02x}"}
    return found


@pytest.fixture(scope="module")
def histories() -> Callable[[Variant], dict[str, int]]:
    """Each variant's history, which is made when it is first asked for."""
    known: dict[Variant, dict[str, int]] = {}

    def of(variant: Variant) -> dict[str, int]:
        if variant not in known:
            with Lab() as lab:
                history = History(lab, variant)
                history.run()
            known[variant] = history.readable
        return known[variant]

    return of


Histories = Callable[[Variant], dict[str, int]]


@pytest.mark.needs_kernel("esp")
@pytest.mark.needs_kernel("wireguard")
@pytest.mark.parametrize("variant", WHOLE, ids=str)
def test_nothing_leaves_in_the_clear_at_any_transition(histories: Histories, variant: Variant) -> None:
    assert not any(histories(variant).values()), histories(variant)


@pytest.mark.long
@pytest.mark.needs_kernel("esp")
@pytest.mark.needs_kernel("wireguard")
@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("variant", INCOMPLETE, ids=str)
def test_without_a_guard_it_would_unless_there_is_another(
    histories: Histories, variant: Variant, transition: str
) -> None:
    """So the capture can see it, and the test above fails without the guard."""
    readable = histories(variant).get(transition, 0)
    has_other = other_guard(variant, transition) or transition not in histories(variant)
    assert bool(readable) == (not has_other)


# ---- an encrypting backend that cannot start -------------------------------------------------------


def start(node: Node, *, without: str = "") -> None:
    """Start the daemon, in a mount namespace in which the directory ``without`` is empty."""
    command = own_command()
    if without:
        command = ["sh", "-c", f'mount -t tmpfs tmpfs {without} && exec "$0" "$@"', *command]
    key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
    node.start(command=with_own_run(node, *command), environment=key)


def fail_for_kernel(node: Node) -> None:
    if not lacks("wireguard"):
        pytest.skip("this kernel has WireGuard")
    start(node)
    assert node.daemon.wait(20).status == 1


def fail_for_charon(node: Node) -> None:
    """Start the daemon without charon. On a kernel without dummy devices it ends, on any other it waits."""
    start(node, without="/usr/lib/ipsec")
    wait_for(lambda: not node.running or "Waiting for the kernel" in node.log(), 20, "the daemon to fail")
    if node.running:
        node.stop()


def guards(node: Node) -> list[str]:
    """Return the destinations of the guards of both families."""
    rows = [
        row
        for family in (4, 6)
        for row in node.namespace.json("ip", "-j", f"-{family}", "route", "show", "type", "unreachable")
    ]
    return [row["dst"] for row in rows if row["dst"] != "default"]


VXLAN, HOST_GW, UDP = ({"Type": name} for name in ("vxlan", "host-gw", "udp"))
PHASE_2 = {**WIREGUARD, "Also": VXLAN}


@pytest.mark.parametrize(
    ("former", "backend", "fail", "stacks"),
    [
        pytest.param(VXLAN, WIREGUARD, fail_for_kernel, {}, id="vxlan"),
        pytest.param(VXLAN, WIREGUARD, fail_for_kernel, DUAL_STACK, id="vxlan, dual stack"),
        pytest.param(HOST_GW, WIREGUARD, fail_for_kernel, DUAL_STACK, id="host-gw, dual stack"),
        pytest.param(UDP, WIREGUARD, fail_for_kernel, {}, id="udp"),
        pytest.param(VXLAN, PHASE_2, fail_for_kernel, DUAL_STACK, id="Also, dual stack"),
        pytest.param(VXLAN, IPSEC, fail_for_charon, {}, id="ipsec without charon"),
        pytest.param(VXLAN, {**IPSEC, "Also": VXLAN}, fail_for_charon, {}, id="Also, ipsec without charon"),
        pytest.param(UDP, IPSEC, fail_for_charon, {}, id="udp, ipsec without charon"),
    ],
)
def test_encrypting_backend_that_cannot_start_leaves_nothing_in_the_clear(
    lab: Lab,
    former: Mapping[str, Any],
    backend: Mapping[str, Any],
    fail: Callable[[Node], None],
    stacks: Mapping[str, Any],
) -> None:
    node, peer = lab.cluster(former, **stacks)
    connect(node, peer)
    node.stop()
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend, **stacks})
    fail(node)
    assert guards(node) == [NETWORK, DUAL_STACK["IPv6Network"]][: len(node.container().addresses)]
    with wire(lab, node, peer) as capture:
        for target in peer.container().addresses.values():
            with Stream(node.container().namespace, target, lab.directory / "stream.log", 0.01):
                wait_for_packets(node, capture)
        assert capture.readable == 0

    lab.etcd.put_config({"Network": NETWORK, "Backend": former, **stacks})
    start(node)
    node.wait_for_log("In sync with")
    connect(node, peer)
    assert guards(node) == []


def wait_for_packets(node: Node, capture: Wire) -> None:
    """Wait until the node's container has sent some more packets."""
    goal = sent(node) + ENOUGH
    wait_for(lambda: sent(node) >= goal, what="packets of the container")
    capture.drain()


def sent(node: Node) -> int:
    (link,) = node.container().namespace.json("ip", "-j", "-s", "link", "show", "eth0")
    count: int = link["stats64"]["tx"]["packets"]
    return count
