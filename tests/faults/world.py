"""Live networks of three nodes that faults are put into, one for each kind of network."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.daemon import Daemon
from tests.lab.kept import Kept
from tests.netns.charons import IPSEC as IPSEC_BACKEND
from tests.netns.charons import with_own_run
from tests.netns.pair import DUAL_STACK
from tests.netns.test_seeing import answer, ctl_command, flannelctl

NETWORK = "10.5.0.0/16"
#: Flag of nodes that answer each other's queries, as in all packages.
ANSWERS = "--answer-port=8470"
#: Seconds that a ping may take before it counts as lost.
LOST = 0.3


@dataclass(frozen=True)
class Kind:
    """Kind of network. The node in ``routed`` positions are behind the first link's gateway."""

    backend: Mapping[str, Any] = field(default_factory=lambda: {"Type": "vxlan"})
    config: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    api: str = "v2"
    routed: int = 0
    #: Feature of the kernel that the faults need, if it is not that of the backend.
    needs: str = ""

    def marked(self, value: object, name: str, *marks: pytest.MarkDecorator) -> Any:
        """Return a parameter of a test, marked with its network and with what the kernel needs for it."""
        of_backend = {"ipip": "ipip", "wireguard": "wireguard", "ipsec": "esp"}
        needs = self.needs or of_backend.get(self.backend["Type"])
        own = [pytest.mark.shares(repr(self)), *([pytest.mark.needs_kernel(needs)] if needs else ())]
        return pytest.param(value, id=name, marks=[*marks, *own])

    def __hash__(self) -> int:
        return hash(repr(self))


VXLAN = Kind()
VXLAN_XFRM = Kind(needs="esp")
VXLAN_V3 = Kind(api="v3", flags=("--etcd-api=v3",))
DUAL = Kind(config=DUAL_STACK)
HOST_GW = Kind({"Type": "host-gw"})
HOST_GW_DUAL = Kind({"Type": "host-gw"}, DUAL_STACK)
UDP = Kind({"Type": "udp"})
#: The daemon leaves FORWARD alone, so that nothing but a fix lets packets through.
NO_RULES = Kind(flags=("--iptables-forward-rules=false",))
NO_RULES_DUAL = Kind(config=DUAL_STACK, flags=("--iptables-forward-rules=false",))
DIRECT = Kind({"Type": "vxlan", "DirectRouting": True})
MASQUERADE = Kind(flags=("--ip-masq",))
IPIP = Kind({"Type": "ipip"})
WIREGUARD = Kind({"Type": "wireguard", "PSK": "ZmxhbmVsZCBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="})
IPSEC = Kind(IPSEC_BACKEND)
LEGACY = Kind(flags=("--iptables-flavour=legacy",))
VXLAN_ROUTED = Kind(routed=1)
HOST_GW_ROUTED = Kind({"Type": "host-gw"}, routed=1)
#: A network with a subnet for each of three nodes, and no more.
FULL = Kind(config={"SubnetLen": 24, "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.3.0"})
NATIVE = Kind({"Type": "vxlan"}, {"EnableNFTables": True})


class World:
    """Three nodes with a container each. The first one is the broken one, the second one its peer."""

    def __init__(self, lab: Lab, kind: Kind, programs: Path) -> None:
        self.lab = lab
        self.kind = kind
        #: Directory from which code may be run.
        self.programs = programs
        #: Command before those of the broken node, which hides a part of the host from them.
        self.without: list[str] = []
        #: What the doctor said last, for a failure's report.
        self.last: Diagnosis | None = None
        self.words: dict[str, str] = {}
        #: Another program of the broken node.
        self.listener: subprocess.Popen[bytes] | None = None
        #: Daemon in the namespace of a container.
        self.elsewhere: Daemon | None = None
        self.nodes = self._build()
        for node in self.nodes:
            node.container()
        self.wait_for_packets()
        for node in () if kind.routed else self.nodes:
            wait_until_healthy(node)

    def put_config(self, **settings: object) -> None:
        """Write the network config, with other settings of the backend."""
        kind = self.kind
        self.lab.etcd.put_config({"Network": NETWORK, "Backend": {**kind.backend, **settings}, **kind.config})

    def _build(self) -> list[Node]:
        kind = self.kind
        self.put_config()
        nodes = [*self.lab.add_nodes(3 - kind.routed), *self.lab.add_nodes(kind.routed, routed=True)]
        for node in nodes:
            self.start(node)
        for node in nodes:
            node.wait_ready()
        return nodes

    def start(self, node: Node, *flags: str) -> None:
        """Start the daemon of a node, with more flags than this kind has."""
        command = self._at_home(node, own_command())
        node.start(ANSWERS, *self.kind.flags, *flags, command=command, environment=_key_file(node))

    def _at_home(self, node: Node, command: Sequence[str]) -> list[str]:
        """Give a command the node's own /run if charon's socket is there, and hide what the node lacks."""
        at_home = with_own_run(node, *command) if self.kind.backend["Type"] == "ipsec" else list(command)
        return [*self.without, *at_home] if self.without and node is self.node else at_home

    @property
    def node(self) -> Node:
        return self.nodes[0]

    @property
    def peer(self) -> Node:
        return self.nodes[1]

    # ---- what faults and remedies do ------------------------------------------------------------

    def look(self) -> None:
        """Read the values for the braces of commands; a 6 marks those of IPv6.

        Called while the network is healthy: a former fault may have changed a subnet or a MAC address.
        """
        node, peer = self.node, self.peer
        self.words = words = {
            "container": node.container().namespace.name,
            "switch": self.lab.switch.name,
            "port": node.name,
            "peer_port": peer.name,
            "subnet_file": str(node.subnet_file),
            "directory": str(node.directory),
            "node": node.address,
            "peer": peer.address,
            "node6": node.ipv6_address,
            "peer6": peer.ipv6_address,
            "gateway": self.lab.etcd.address,
            "wide": f"{node.container().address}/16",
            "own_nobody": node.subnet().replace("0/24", "99"),
            "lan": peer.subnet().replace("0/24", "7"),
            "routed": self.nodes[2].address,
        }
        leases = self.lab.etcd.leases() if self.kind.backend["Type"] == "wireguard" else {}
        for word, each in (("own_key", node), ("key", peer)) if leases else ():
            words[word] = leases[each.subnet()]["BackendData"]["PublicKey"]
        for family, mark, device in ((4, "", "flannel.1"), (6, "6", "flannel-v6.1")):
            if family in node.container().addresses:
                words[f"own{mark}"] = node.subnet(family)
                words[f"subnet{mark}"] = peer.subnet(family)
                words[f"own_base{mark}"] = node.subnet(family).partition("/")[0]
                words[f"base{mark}"] = peer.subnet(family).partition("/")[0]
                words[f"own_gateway{mark}"] = node.env()[
                    "FLANNEL_SUBNET" if family == 4 else "FLANNEL_IPV6_SUBNET"
                ]
                words[f"container_address{mark}"] = (
                    f"{node.container().addresses[family]}/{words[f'own{mark}'].partition('/')[2]}"
                )
                words[f"container_ip{mark}"] = node.container().addresses[family]
                words[f"own_ip{mark}"] = words[f"own_gateway{mark}"].partition("/")[0]
                words[f"own_mac{mark}"] = (node.link(device) or {}).get("address", "")
                words[f"mac{mark}"] = (peer.link(device) or {}).get("address", "")

    def run(self, *steps: Step, on: Node | None = None) -> None:
        """Run shell commands on a node, the broken one by default, and functions, in their order."""
        for step in steps:
            if callable(step):
                step(self)
            else:
                (on or self.node).run("sh", "-ec", step.format(**self.words))

    # ---- what is seen ---------------------------------------------------------------------------

    def doctor(self, node: Node | None = None) -> Diagnosis:
        """Ask the doctor, with the flags of the daemon, as an operator would."""
        node = node or self.node
        words = ("doctor", "--output=json", *self.kind.flags)
        command = ctl_command(node, *words, store=self.lab.etcd.endpoint)
        done = node.run(*self._at_home(node, command), check=False, variables=_key_file(node))
        assert done.stdout, done.stderr
        self.last = Diagnosis(done.returncode, json.loads(done.stdout)["findings"])
        return self.last

    def wait_for_answer(self) -> None:
        """Wait until the daemon answers, whether it is ready or not."""
        wait_for(lambda: self.doctor_says_daemon(), 20, "the daemon to answer")

    def doctor_says_daemon(self) -> bool:
        return flannelctl(self.node, "status", "--output=json").returncode in (0, 1)

    def wait_for_trouble(self, part: str) -> None:
        """Wait until the daemon has a health condition."""

        def has_trouble() -> bool:
            health = answer(self.node, "status").get("health", {})
            return part in [each["part"] for each in health.get("conditions", ())]

        wait_for(has_trouble, 20, f"trouble of {part}")

    def wait_for_peer(self, subnet: str) -> None:
        """Wait until the daemon knows a peer."""

        def is_known() -> bool:
            return any(subnet in peer["subnets"] for peer in answer(self.node, "peers")["peers"])

        wait_for(is_known, 20, f"the peer {subnet}")

    def is_cut(self) -> bool:
        """Return True if a packet between a container of the broken node and one of its peer gets lost."""
        here, there = self.node.container(), self.peer.container()
        return not all(here.reaches(target, LOST) for target in there.addresses.values()) or not all(
            there.reaches(target, LOST) for target in here.addresses.values()
        )

    def wait_for_packets(self) -> None:
        wait_for(lambda: not self.is_cut(), 20, "packets to flow")


def _key_file(node: Node) -> dict[str, str]:
    return {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}


def wait_until_healthy(node: Node) -> None:
    """Wait until the daemon has no problem, and has placed its rules: without masquerading that is later."""

    def is_healthy() -> bool:
        done = flannelctl(node, "status", "--output=json")
        rules = json.loads(done.stdout)["firewall"] if done.returncode == 0 else None
        has_rules = rules and rules["place"] and not rules["not_in_place"]
        return bool(rules and (has_rules or not (rules["forward"] or rules["masquerade"])))

    wait_for(is_healthy, 60, "a healthy node")


#: A shell command, or what else is to be done.
Step = str | Callable[[World], object]


@dataclass(frozen=True)
class Diagnosis:
    """Exit status of the doctor, and its findings."""

    status: int
    findings: list[dict[str, Any]]

    def is_seen(self, checks: Iterable[str], words: Iterable[str]) -> bool:
        """Return True if a finding of one of the checks has one of the words in its problem or evidence."""
        found = [f"{each['problem']}\n{each['evidence']}" for check in checks for each in self.of(check)]
        return any(word in text for text in found for word in words)

    def of(self, check: str) -> list[dict[str, Any]]:
        return [each for each in self.findings if each["check"] == check]

    def __str__(self) -> str:
        shown = [
            f"{each['severity']} {each['check']}: {each['problem']} | {each['evidence']} | "
            f"{each['fix'] or each['advice']}"
            for each in self.findings
        ]
        return "\n".join([f"status {self.status}", *shown])


def kept_worlds() -> Kept[Kind, World]:
    """Return the networks, none of which is built yet."""

    def build(kind: Kind, stack: ExitStack) -> World:
        programs = Path(stack.enter_context(TemporaryDirectory(prefix="flanneld-faults-")))
        return World(stack.enter_context(Lab(api=kind.api)), kind, programs)

    return Kept(build)


def commands(words: Iterable[Iterable[str]]) -> list[str]:
    """Return a printed fix as shell commands."""
    import shlex

    return [shlex.join(each).replace("{", "{{").replace("}", "}}") for each in words]
