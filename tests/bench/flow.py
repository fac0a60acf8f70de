"""Traffic between containers of two nodes: how much of it gets through, and what CPU it takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tests.bench.figures import Figure
from tests.bench.process import MachineLoad, own_time
from tests.lab import Container, Lab, Node
from tests.lab.lab import NETWORK
from tests.lab.namespace import inhabitants, run

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
}
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
_SMALL = 64  # bytes
_GIGA = 1e9
#: What the server needs to listen, and a flow to find its pace, in seconds.
_PATIENCE = 10.0
_WARM_UP = 1


def flow(backend: str, sender: Sequence[str], receiver: Sequence[str], seconds: float) -> Figures:
    """Start two nodes and send from a container of one to a container of the other, as fast as possible.

    Raises ``AssertionError`` or ``CommandError`` when something does not work.
    """
    with Lab() as lab:
        nodes = _path(lab) if backend == PATH else _cluster(lab, backend, sender, receiver)
        for node in nodes:
            _like_a_card(lab, node)
        source, target = (node.container() for node in nodes)
        source.wait_for_reply(target, _PATIENCE)
        figures = _tcp(nodes, source, target, seconds)
        figures |= _small_packets(source, target, seconds)
        for node in nodes:
            assert backend == PATH or node.running, f"a daemon ended; its log:\n{node.log()[-2000:]}"
        return figures


def _cluster(lab: Lab, backend: str, sender: Sequence[str], receiver: Sequence[str]) -> list[Node]:
    lab.etcd.put_config({"Network": NETWORK, "Backend": dict(CONFIGS[backend])})
    nodes = lab.add_nodes(2)
    for node, command in zip(nodes, (sender, receiver), strict=True):
        node.start(command=command)
    for node in nodes:
        node.wait_ready(_PATIENCE)
    return nodes


def _path(lab: Lab) -> list[Node]:
    """The same two nodes with a route to each other, written by hand."""
    nodes = lab.add_nodes(2)
    first, second = nodes
    for node, other in ((first, second), (second, first)):
        node.subnet_file.write_text(f"FLANNEL_SUBNET=10.5.{node.number}.1/24\nFLANNEL_MTU=1500\n")
        node.namespace.ip(f"route add 10.5.{other.number}.0/24 via {other.address}")
    return nodes


def _like_a_card(lab: Lab, node: Node) -> None:
    settings = [word for setting in _CARD.items() for word in setting]
    # Features that this kernel's veth does not have cannot be switched off, and need not be.
    run("ip", "netns", "exec", node.namespace.name, "ethtool", "-K", "eth0", *settings, check=False)
    run("ip", "netns", "exec", lab.switch.name, "ethtool", "-K", node.name, *settings, check=False)
    shown = node.run("ethtool", "-k", "eth0").stdout
    assert "tcp-segmentation-offload: off" in shown, shown


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
