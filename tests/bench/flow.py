"""Traffic between containers of two nodes: how much of it gets through, and what CPU it takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_interface
from statistics import mean
from typing import Any

from tests.bench.figures import Figure
from tests.bench.process import MachineLoad, own_time
from tests.bench.tunnels import by_hand
from tests.lab import Container, Lab, Namespace, Node
from tests.lab.forks import exact
from tests.lab.lab import NETWORK
from tests.lab.namespace import batch, inhabitants

Figures = dict[Figure, float]

#: The backends by the names they have in the table. ``path`` is static routes without any daemon: the limit.
PATH = "path"
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    PATH: {"Type": "host-gw"},
    "host-gw": {"Type": "host-gw"},
    "vxlan": {"Type": "vxlan"},
    "udp": {"Type": "udp"},
    "udp/python": {"Type": "udp", "DataPlane": "python"},
    "ipip": {"Type": "ipip"},
    "wireguard": {"Type": "wireguard"},
    "ipsec": {"Type": "ipsec", "PSK": "a pre-shared key for measurements, " * 3},
}
#: What the kernel must have for a backend: tests/vm/probe.
NEEDS = {"ipip": "ipip", "wireguard": "wireguard", "ipsec": "esp"}
#: charon's socket is under /run, whatever network namespace it is in.
_OWN_RUN = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs run /run && exec "$0" "$@"')
#: What a network card without segmentation of UDP and of tunnels does not do (ethtool(8)): packets are
#: on the wire one by one, and are put together by the receiver.
_CARD = {
    **dict.fromkeys(
        (
            "tso",
            "tx-udp-segmentation",
            "tx-udp_tnl-segmentation",
            "tx-udp_tnl-csum-segmentation",
            "tx-gre-segmentation",
            "tx-ipxip4-segmentation",
        ),
        "off",
    ),
    "gso": "on",
    "gro": "on",
}
_WIRE = "wire"
_SMALL = 64  # bytes
_GIGA = 1e9
#: What the server needs to listen, and a flow to find its pace, in seconds.
_PATIENCE = 10.0
_WARM_UP = 1
_TURN = 1.0
#: Seconds for the daemons to become idle, and their CPU seconds in one second from which they are.
_SETTLES, _IDLE = 60.0, 0.03


def flow(backend: str, daemons: tuple[Sequence[str], Sequence[str]] | None, seconds: float) -> Figures:
    """Start two nodes and send from a container of one to a container of the other, as fast as possible.

    Without daemons the nodes have routes by hand. Raises ``AssertionError`` or ``CommandError`` when
    something does not work.
    """
    with Lab() as lab, exact():
        nodes = lab.add_nodes(2)
        _wire(nodes)
        if daemons is not None:
            _start(lab, nodes, CONFIGS[backend], daemons)
        else:
            _route(nodes)
        source, target = (_container(node) for node in nodes)
        source.wait_for_reply(target, _PATIENCE)
        figures = _tcp(nodes, source, target, seconds)
        figures |= _small_packets(source, target, seconds)
        for node in nodes:
            assert daemons is None or node.running, f"a daemon ended; its log:\n{node.log()[-2000:]}"
        return figures


def side_by_side(backend: str, command: Sequence[str], seconds: float) -> dict[str, Figures]:
    """Send through a tunnel of two daemons and through one by hand, in turns of a second.

    The turns come as A B B A, so that both meet the same spells of a busy machine. All of it is the figure of
    one round. The CPU of the idle daemons is lost to both.
    """
    with Lab() as lab, exact():
        nodes = lab.add_nodes(4)
        pairs = {"ours": nodes[:2], "peer": nodes[2:]}
        for pair in pairs.values():
            _wire(pair)
        _start(lab, pairs["ours"], CONFIGS[backend], (command, command))
        by_hand(backend, pairs["peer"], _address)
        ends = {name: [_container(node) for node in pair] for name, pair in pairs.items()}
        for source, target in ends.values():
            source.wait_for_reply(target, _PATIENCE)
        _let_settle(pairs["ours"])
        turns: dict[str, list[float]] = {name: [] for name in pairs}
        for turn in range(round(seconds)):
            for name in list(pairs)[:: 1 if turn % 2 else -1]:
                source, target = ends[name]
                turns[name].append(_tcp(pairs[name], source, target, _TURN)[Figure.TCP])
        assert all(node.running for node in pairs["ours"])
        return {name: {Figure.TCP: mean(figures)} for name, figures in turns.items()}


def _wire(nodes: list[Node]) -> None:
    """A cable between the two nodes, with cards at its ends; the lab's switch is for etcd alone."""
    first, second = nodes
    first.namespace.ip(f"link add {_WIRE} type veth peer name {_WIRE} netns {second.namespace.name}")
    card = [word for setting in _CARD.items() for word in setting]
    for node in nodes:
        node.namespace.ip(f"address add {_address(node)}/24 dev {_WIRE}", f"link set {_WIRE} up")
        # Features that this kernel's veth does not have cannot be switched off, and need not be.
        node.run("ethtool", "-K", _WIRE, *card, check=False)
        shown = node.run("ethtool", "-k", _WIRE).stdout
        assert "tcp-segmentation-offload: off" in shown, shown


def _address(node: Node) -> str:
    return f"192.0.2.{node.number}"


def _start(lab: Lab, nodes: list[Node], config: Mapping[str, Any], commands: Iterable[Sequence[str]]) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": dict(config)})
    for node, command in zip(nodes, commands, strict=True):
        key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
        wrapped = [*_OWN_RUN, *command] if config["Type"] == "ipsec" else command
        node.start(f"-iface={_WIRE}", command=wrapped, environment=key)
    for node in nodes:
        node.wait_ready(_PATIENCE)


def _let_settle(nodes: list[Node]) -> None:
    """Wait until the daemons are idle: what a start still does would cost the flow a CPU."""
    deadline = time.monotonic() + _SETTLES
    while time.monotonic() < deadline:
        cost = _Cost(nodes)
        time.sleep(1)
        if cost.seconds()[0] < _IDLE:
            return


def _route(nodes: list[Node]) -> None:
    """A route from each node to the other's containers, written by hand."""
    for node, other in zip(nodes, reversed(nodes), strict=True):
        node.subnet_file.write_text(f"FLANNEL_SUBNET=10.5.{node.number}.1/24\nFLANNEL_MTU=1500\n")
        node.namespace.ip(f"route add 10.5.{other.number}.0/24 via {_address(other)}")


def _container(node: Node) -> Container:
    """A container that its node routes to: a bridge would be one more thing that takes time."""
    env = node.env()
    gateway = ip_interface(env["FLANNEL_SUBNET"])
    address = gateway.ip + 1
    inside = Namespace(f"{node.namespace.name}c1")
    batch(f"netns add {inside.name}")
    mtu = env["FLANNEL_MTU"]
    node.namespace.ip(
        f"link add veth1 mtu {mtu} type veth peer name eth0 mtu {mtu} netns {inside.name}",
        f"address add {gateway} dev veth1",
        "link set veth1 up",
    )
    inside.ip(
        "link set lo up",
        f"address add {address}/{gateway.network.prefixlen} dev eth0",
        "link set eth0 up",
        f"route add default via {gateway.ip}",
    )
    return Container(inside, {4: str(address)}, node.directory)


def _tcp(nodes: list[Node], source: Container, target: Container, seconds: float) -> Figures:
    cost = _Cost(nodes)
    end = _iperf(source, target, "-t", f"{seconds:g}", "-O", str(_WARM_UP))
    proxy, machine = cost.seconds()
    # What is counted by iperf leaves the warm-up out; what it cost does not.
    gigabytes = end["sum_received"]["bytes"] / _GIGA * (seconds + _WARM_UP) / seconds
    return {
        Figure.TCP: end["sum_received"]["bits_per_second"] / _GIGA,
        Figure.TCP_NODE_CPU: proxy / gigabytes,
        Figure.TCP_CPU: machine / gigabytes,
    }


def _small_packets(source: Container, target: Container, seconds: float) -> Figures:
    end = _iperf(source, target, "-t", f"{seconds:g}", "-u", "-b", "0", "-l", str(_SMALL))
    received = end.get("sum_received", end["sum"])
    arrived = received["packets"] - received["lost_packets"]
    return {Figure.PACKETS: arrived / received["seconds"] / 1000}


def _iperf(source: Container, target: Container, *options: str) -> dict[str, Any]:
    """Run iperf3 once; what it says about the end."""
    log = os.open(os.devnull, os.O_WRONLY)
    with os.fdopen(log, "wb") as nowhere:
        server = target.namespace.start("iperf3", "-s", "-1", output=nowhere)
        try:
            _wait_for_server(lambda: target.run("ss", "-Hltn", "sport = :5201").stdout)
            done = source.run("iperf3", "-c", target.address, "-J", *options, check=False, timeout=120)
        finally:
            server.kill()
            server.wait()
    said = json.loads(done.stdout)
    assert "error" not in said, said["error"]
    end: dict[str, Any] = said["end"]
    return end


def _wait_for_server(listening: Callable[[], str]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not listening():
        assert time.monotonic() < deadline, "iperf3 does not listen"
        time.sleep(0.02)


class _Cost:
    """CPU seconds since this was made: of the nodes' processes, containers left out, and of the machine."""

    def __init__(self, nodes: list[Node]) -> None:
        self._pids = inhabitants(node.namespace for node in nodes)
        self._begin = time.monotonic()
        self._before = self._used()
        self._load = MachineLoad()

    def seconds(self) -> tuple[float, float]:
        elapsed = time.monotonic() - self._begin
        return self._used() - self._before, self._load.busy() * elapsed * (os.cpu_count() or 1)

    def _used(self) -> float:
        used = 0.0
        for pid in self._pids:
            with suppress(OSError):  # ended meanwhile
                used += own_time(pid)
        return used
