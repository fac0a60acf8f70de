"""One fault: how to break a network, and what the doctor has to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import missing
from tests.faults.world import VXLAN, Kind, Step, World
from tests.lab import wait_for

PROBLEM, HINT = "problem", "hint"


@dataclass(frozen=True)
class Fault:
    """Steps that break the first node, and the finding that names the cause.

    ``check`` is the finding's check, ``says`` a part of its problem or evidence, with braces filled in. If
    there are no steps, this kind of network is broken as such, and stays so.

    Without ``heal`` the printed fix heals. Commands in ``heal`` must be in the printed advice; functions do
    what the words of ``advice`` say. ``after`` cleans up what is no part of the fault.
    Before that packets flow again, unless ``needs_more`` tells what else that takes.

    ``cuts`` tells that packets between containers are lost meanwhile; None if chance decides. If they are,
    the doctor of the second node must see that, too: its check ``peer_sees``, or "tunnel", names the broken
    node, or says ``peer_says``. It may be several checks with " or " between. ``peer_blind`` is the reason
    why the peer cannot; then it must find nothing, or with ``ONE_OF_MANY`` no more than silent containers.

    ``is_long`` marks what takes more than ten times as long as others. ``needs`` is a feature that not every
    kernel has, as ``tests/vm/probe`` names it.
    """

    check: str
    says: str
    harm: tuple[Step, ...]
    kind: Kind = VXLAN
    cuts: bool | None = True
    severity: str = PROBLEM
    heal: tuple[Step, ...] = ()
    advice: str = ""
    after: tuple[Step, ...] = ()
    needs_more: str = ""
    peer_sees: str = ""
    peer_says: str = ""
    peer_blind: str = ""
    is_long: bool = False
    needs: str = ""


#: Check of a peer that sees packets for containers lost, though the node itself answers.
BEHIND = "peers' containers"
#: Reasons why a peer sees nothing of packets that are lost.
ONE_OF_MANY = "a silent container may mean it, if others of its node answer"
NO_LEASE = "without a lease other nodes do not know of the node"


# ---- steps that are no commands -----------------------------------------------------------------


def on_peer(*steps: str) -> Callable[[World], None]:
    """Return the step that runs commands on the second node."""
    return lambda world: world.run(*steps, on=world.peer)


def stop(world: World) -> None:
    world.node.stop()


def kill(world: World) -> None:
    world.node.kill()


def start(world: World) -> None:
    """Start the daemon with the flags that it had at first."""
    restart()(world)
    world.node.wait_ready()


def ready(world: World) -> None:
    world.node.wait_ready()


#: Binds the UDP port in its first argument.
LISTENER = (
    "import socket, sys, time; it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
    "it.bind(('', int(sys.argv[1]))); print('bound', flush=True); time.sleep(600)"
)


def listener(port: int) -> Callable[[World], None]:
    """Return the step that binds a UDP port to another program."""

    def act(world: World) -> None:
        log = world.node.directory / "listener.log"
        with log.open("wb") as output:
            world.listener = world.node.namespace.start("python3", "-c", LISTENER, str(port), output=output)
        wait_for(lambda: "bound" in log.read_text(), what="the listener")

    return act


def no_listener(world: World) -> None:
    assert world.listener is not None
    world.listener.kill()
    world.listener.wait()


def start_in_vain_with(*flags: str) -> Callable[[World], None]:
    """Return the step that starts the daemon with more flags, and sees it end because it cannot work."""

    def act(world: World) -> None:
        world.start(world.node, *flags)
        wait_for(lambda: not world.node.running, 20, "the daemon to end")
        assert world.node.daemon.status() == 1, world.node.log()

    return act


start_in_vain = start_in_vain_with()


def configured(**settings: object) -> Callable[[World], None]:
    """Return the step that writes other settings of the backend; none for those of this kind of network."""
    return lambda world: world.put_config(**settings)


def without_kind(kind: str) -> Callable[[World], None]:
    """Return the step that lets the broken node's kernel lack a kind of device."""

    def act(world: World) -> None:
        world.without = missing.kind_of_device(kind, world.programs)

    return act


def without_charon(world: World) -> None:
    world.without = missing.charon()


def nothing_missing(world: World) -> None:
    world.without = []


def restart(*flags: str) -> Callable[[World], None]:
    """Return the step that starts the daemon again with more flags, and waits for its socket."""

    def act(world: World) -> None:
        if world.node.running:
            world.node.stop()
        world.start(world.node, *(flag.format(**world.words) for flag in flags))
        world.wait_for_answer()

    return act


def restarted_with(**settings: object) -> Step:
    """Return the step that gives other settings of the backend to this node alone."""

    def act(world: World) -> None:
        world.put_config(**settings)
        restart()(world)
        world.put_config()

    return act
