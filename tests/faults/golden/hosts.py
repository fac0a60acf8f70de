"""The golden hosts: a healthy one, one that waits for its network config, and twelve broken ones."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from flanneld import __version__
from flanneld.ctl.commands import COMMANDS
from flanneld.ctl.source import ask
from flanneld.subnet.subnet_file import beside
from tests.faults.golden import stable
from tests.faults.table import FAULTS
from tests.faults.test_faults import diagnosed, heal, wait_for_health
from tests.faults.world import VXLAN, VXLAN_V3, Kind, World
from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.kept import Kept
from tests.netns.test_seeing import ctl_command, flannelctl

HEALTH_PORT = 8471
FLAGS = ("--ip-masq", f"--healthz-port={HEALTH_PORT}")
GOLDEN = Kind(flags=(*FLAGS, "--etcd-api=v3"), api="v3")
#: Those of ``tests/faults`` that are kept: of each theme some, of one kind of network.
BROKEN = (
    "daemon stopped",
    "daemon that cannot start",
    "subnet.env of another node",
    "blackhole for a node",
    "device with another VNI while the daemon is stopped",
    "route of a vanished peer while the daemon is stopped",
    "etcd stopped",
    "forwarding off",
    "rule by source",
    "INPUT drops the port",
    "bridge with the MTU of Ethernet",
    "lease with our public IP",
)
#: Commands of flannelctl whose output is kept, by the name of the file.
SHOWN = ("status", "peers", "routes", "doctor", "nodes")

#: What is kept of a host, by file name: functions that read it now.
Pages = dict[str, Callable[[], str]]
Host = Callable[["Kept[Kind, World]"], AbstractContextManager[Pages]]


class GoldenWorld(World):
    """Network whose nodes have subnets by their numbers, and whose first node joins last.

    So two runs have the same leases in the same order.
    """

    def _build(self) -> list[Node]:
        self.put_config()
        nodes = self.lab.add_nodes(3)
        for node in reversed(nodes):
            self.start(node)
            node.wait_ready()
        return nodes

    def start(self, node: Node, *flags: str) -> None:
        if not node.subnet_file.exists():
            take_subnet(node)
        super().start(node, *flags)


def take_subnet(node: Node) -> None:
    """Let a node have had a subnet, as after a reboot."""
    node.subnet_file.write_text(
        f"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.{node.number}.1/24\nFLANNEL_MTU=1450\n"
        "FLANNEL_IPMASQ=false\n"
    )


def kept_worlds() -> Kept[Kind, World]:
    """Return the networks, none of which is built yet."""

    def build(kind: Kind, stack: ExitStack) -> World:
        programs = Path(stack.enter_context(TemporaryDirectory(prefix="flanneld-golden-")))
        return GoldenWorld(stack.enter_context(Lab(api=kind.api)), kind, programs)

    return Kept(build)


# ---- the hosts ----------------------------------------------------------------------------------


@contextmanager
def programs(_worlds: Kept[Kind, World]) -> Iterator[Pages]:
    """The help of both programs, which is that of any host."""
    with Lab(has_etcd=False) as lab:
        (node,) = lab.add_nodes()

        def ctl(*words: str) -> str:
            command = ctl_command(node, *words)[:-1]  # without the subnet file
            return node.run("env", "COLUMNS=110", *command).stdout

        yield {
            "flanneld.txt": lambda: node.run(*own_command(), "-help").stdout,
            "flannelctl.txt": lambda: ctl("--help"),
            **{f"flannelctl-{name}.txt": partial(ctl, name, "--help") for name in sorted(COMMANDS)},
        }


@contextmanager
def healthy(worlds: Kept[Kind, World]) -> Iterator[Pages]:
    with worlds.get(GOLDEN) as world:
        node = world.node
        names = names_of(world.lab)
        yield {
            **seen(node, names),
            "subnet.env": node.subnet_file.read_text,
            "metrics.txt": lambda: stable.metrics(page(node, "metrics"), names),
            "plan.txt": lambda: stable.text(plan(node), names),
            "trace.txt": lambda: stable.table(
                flannelctl(node, "trace", world.peer.container().address).stdout, names
            ),
        }


@contextmanager
def waiting(_worlds: Kept[Kind, World]) -> Iterator[Pages]:
    """A node whose store has no network config."""
    with Lab() as lab:
        (node,) = lab.add_nodes()
        node.start(*FLAGS)
        node.wait_for_log("Couldn't fetch network config")
        wait_for(lambda: beside(node.subnet_file, "sock").exists(), 20, "the status socket")
        names = names_of(lab)
        yield {
            **seen(node, names),
            "metrics.txt": lambda: stable.metrics(page(node, "metrics"), names),
        }


@contextmanager
def new(worlds: Kept[Kind, World]) -> Iterator[Pages]:
    """A host on which no daemon has run yet: the plan of its first start."""
    with worlds.get(GOLDEN) as world:
        (node,) = world.lab.add_nodes()
        take_subnet(node)
        yield {"plan.txt": lambda: stable.text(plan(node), names_of(world.lab))}


@contextmanager
def broken(name: str, worlds: Kept[Kind, World]) -> Iterator[Pages]:
    """The first node of a network with a fault, which is healed afterwards."""
    fault = FAULTS[name]
    assert fault.kind == VXLAN
    with worlds.get(VXLAN_V3) as world:  # whose leases are in an order
        world.look()
        world.run(*fault.harm)
        found = diagnosed(world, fault)
        names = names_of(world.lab)
        yield {
            "doctor.txt": lambda: stable.text(
                flannelctl(world.node, "doctor", store=world.lab.etcd.endpoint).stdout, names
            )
        }
        heal(world, fault, found)
        world.run(*fault.after)
        world.wait_for_packets()
        for node in (world.node, world.peer):
            wait_for_health(world, node)


HOSTS: dict[str, Host] = {
    "programs": programs,
    "healthy": healthy,
    "new": new,
    "waiting": waiting,
    **{name.replace(" ", "-"): partial(broken, name) for name in BROKEN},
}


# ---- what is seen of them -----------------------------------------------------------------------


def seen(node: Node, names: Mapping[str, str]) -> Pages:
    """Return what any daemon shows."""

    def status() -> str:
        told, _ = ask(beside(node.subnet_file, "sock"), 20)
        return stable.document(told.decode(), names)

    def shown(command: str) -> str:
        return stable.table(flannelctl(node, command).stdout, names)

    return {
        "status.json": status,
        "log.txt": lambda: stable.log(node.log(), names),
        **{f"{command}.txt": partial(shown, command) for command in SHOWN},
    }


def page(node: Node, name: str) -> str:
    with node.namespace.entered(), urlopen(f"http://127.0.0.1:{HEALTH_PORT}/{name}", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def plan(node: Node) -> str:
    own = (f"--etcd-endpoints={node.endpoints}", f"--subnet-file={node.subnet_file}")
    return node.run(*own_command(), *own, "--plan", *FLAGS).stdout


def names_of(lab: Lab) -> dict[str, str]:
    """Return the strings that are of this lab, each with a name."""
    names = {lab.name: "lab", __version__: "version", platform.python_version(): "python"}
    for node in lab.nodes:
        names[str(node.directory)] = node.name
        for device in ("eth0", "flannel.1", "cni0"):
            names[(node.link(device) or {}).get("address", "")] = f"mac of {device} on {node.name}"
    return names
