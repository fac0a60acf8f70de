"""Containers as Docker and as a CNI runtime make them out of subnet.env, on two nodes."""

from __future__ import annotations

import re
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_interface

import pytest

from tests.lab import Container, Lab, Namespace, Node
from tests.lab.daemon import ROOT
from tests.lab.namespace import batch, run
from tests.netns.cni_runtime import Runtime

#: Makes the n-th container of a node, the first is 1.
Maker = Callable[[Node, int], Container]


def docker(node: Node, number: int = 1) -> Container:
    """What dockerd does with the options that mk-docker-opts.sh writes: ``--bip`` and ``--mtu``."""
    options = docker_options(node)
    gateway, mtu = ip_interface(options["bip"]), options["mtu"]
    if not node.link("docker0"):
        node.namespace.ip(
            f"link add docker0 mtu {mtu} type bridge",
            f"address add {gateway} dev docker0",
            "link set docker0 up",
        )
    inside = Namespace(f"{node.namespace.name}c{number}")
    address = gateway.ip + number
    batch(f"netns add {inside.name}")
    node.namespace.ip(
        f"link add veth{number} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {inside.name}",
        f"link set veth{number} master docker0 up",
    )
    inside.ip(
        "link set lo up",
        "link set eth0 up",
        f"address add {address}/{gateway.network.prefixlen} dev eth0",
        f"route add default via {gateway.ip}",
    )
    return Container(inside, {4: str(address)}, node.directory)


def docker_options(node: Node) -> dict[str, str]:
    """``{"bip": "10.5.7.1/24", "mtu": "1450", "ip-masq": "true"}``"""
    file = node.directory / "docker.env"
    run(str(ROOT / "dist/mk-docker-opts.sh"), "-c", "-f", str(node.subnet_file), "-d", str(file))
    (line,) = shlex.split(file.read_text())
    return dict(re.findall("--([^=]+)=([^ ]+)", line.partition("=")[2]))


def cni(node: Node, number: int = 1) -> Container:
    return Runtime(node).add(number)


@pytest.fixture(params=[docker, cni])
def runtime(request: pytest.FixtureRequest) -> Maker:
    chosen: Maker = request.param
    return chosen


@dataclass(frozen=True)
class Pair:
    """A container on each of two nodes, which reach each other."""

    lab: Lab
    backend: str
    one: Container
    other: Container


CLUSTERS = [
    pytest.param((kind, runtime), id=f"{kind}-{runtime.__name__}")
    for kind in ("vxlan", "host-gw")
    for runtime in (docker, cni)
]


@pytest.fixture(scope="module", params=CLUSTERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind, runtime = request.param
    with Lab() as lab:
        one, other = (runtime(node, 1) for node in lab.cluster({"Type": kind}, flags=["-ip-masq"]))
        one.wait_for_reply(other)
        other.wait_for_reply(one)
        yield Pair(lab, kind, one, other)


def ping(pair: Pair, size: int) -> str:
    """What ping says about one IPv4 packet of so many bytes that must not be taken apart."""
    payload = size - 20 - 8
    command = ("ping", "-n", "-c", "1", "-W", "30", "-M", "do", "-s", str(payload), pair.other.address)
    done = pair.one.run(*command, check=False)
    return done.stdout + done.stderr


@contextmanager
def connected(client: Container, server: Container) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection, the client's first."""
    with server.namespace.entered():
        listener = socket.create_server((server.address, 0))
    with listener, client.namespace.entered():
        near = socket.create_connection(listener.getsockname(), timeout=60)
        listener.settimeout(60)
        far, _ = listener.accept()
    with near, far:
        far.settimeout(60)
        yield near, far


def test_the_gateway_is_the_first_address_of_the_subnet(lab: Lab, runtime: Maker) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    container = runtime(node, 1)
    (default,) = container.namespace.json("ip", "-j", "route", "show", "default")
    network = ip_interface(node.env()["FLANNEL_SUBNET"]).network
    assert default["gateway"] == str(network[1])
    assert container.address == str(network[2])
    container.wait_for_reply(default["gateway"])


def test_two_containers_of_a_node_reach_each_other(lab: Lab, runtime: Maker) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    one, other = runtime(node, 1), runtime(node, 2)
    one.wait_for_reply(other)


def test_a_container_sees_the_real_address_of_one_on_another_node(pair: Pair) -> None:
    with connected(pair.one, pair.other) as (near, far):
        assert far.getpeername()[0] == pair.one.address
        assert near.getpeername()[0] == pair.other.address


def test_tcp_carries_data_between_nodes(pair: Pair) -> None:
    data = bytes(range(256)) * 4096  # 1 MiB, more than any buffer on the way
    with connected(pair.one, pair.other) as (near, far):
        sender = threading.Thread(target=near.sendall, args=(data,))
        sender.start()
        received = far.makefile("rb").read(len(data))
        sender.join()
    assert received == data


def test_packets_of_the_mtu_pass_and_larger_ones_do_not(pair: Pair) -> None:
    mtu = int(pair.lab.nodes[0].env()["FLANNEL_MTU"])
    assert mtu == {"vxlan": 1450, "host-gw": 1500}[pair.backend]
    assert " 0% packet loss" in ping(pair, mtu)
    assert "too long" in ping(pair, mtu + 1)


def test_docker_is_told_to_masquerade_when_flannel_does_not(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    assert docker_options(node) == {
        "bip": node.env()["FLANNEL_SUBNET"],
        "mtu": "1450",
        "ip-masq": "true",
    }


def outsider(lab: Lab) -> Container:
    """A host that is no node: it has no route to the containers."""
    return Container(lab.switch, {4: lab.etcd.address}, lab.directory)


def test_the_world_outside_sees_the_address_of_the_node(pair: Pair) -> None:
    node = pair.lab.nodes[0]
    with connected(pair.one, outsider(pair.lab)) as (_, far):
        assert far.getpeername()[0] == node.address


def test_masquerading_spares_the_network_itself(pair: Pair) -> None:
    with connected(pair.one, pair.other) as (_, far):
        assert far.getpeername()[0] == pair.one.address


def test_docker_does_not_masquerade_where_flannel_does(pair: Pair) -> None:
    assert docker_options(pair.lab.nodes[0])["ip-masq"] == "false"
