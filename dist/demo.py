"""A tour of a flannel network on one machine: real daemons, a real store, network namespaces for nodes."""

# ruff: noqa: T201  A demonstration prints.

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab import CommandError, Container, EtcdError, Lab, Node, own_command, wait_for
from tests.lab.etcd import PREFIX
from tests.lab.lab import NETWORK
from tests.netns.cni_runtime import Runtime, kept_conf, kept_conf_file, kept_conf_flags
from tests.netns.kube import start, write_net_conf
from tests.vm import machine

if TYPE_CHECKING:
    from flanneld.subnet.embedded.store import KeyStore

BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
BACKENDS = ("vxlan", "host-gw", "udp", "ipip")
FAILURES = (AssertionError, CommandError, EtcdError, OSError)
ROUND_TRIP = re.compile(r"= [\d.]+/([\d.]+)/")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dist/demo", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="vxlan")
    parser.add_argument(
        "--store",
        choices=STORES,
        default="embedded",
        help="a file on the first node, etcd, or a Kubernetes API",
    )
    parser.add_argument(
        "--kubernetes",
        dest="store",
        action="store_const",
        const="kubernetes",
        help="nodes with podCIDRs, and pods by CNI plug-ins; the same as --store kubernetes",
    )
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="2 to 50; default 3")
    parser.add_argument("--keep", action="store_true", help="leave the network standing until Ctrl-C")
    chosen = parser.parse_args()
    if not 2 <= chosen.nodes <= 50:
        parser.error("--nodes takes a number from 2 to 50")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if chosen.backend == "ipip" and machine.lacks("ipip"):
            return _in_the_machine(keep=chosen.keep)
        with Lab(has_etcd=chosen.store == "etcd") as lab:
            tour = Tour(lab, STORES[chosen.store](lab), chosen.backend, chosen.nodes)
            passed = tour.run()
            if chosen.keep:
                _keep(lab)
    except KeyboardInterrupt:
        return 130
    except (*FAILURES, machine.MachineError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print(f"\n{BOLD}{'All is well' if passed else 'Something FAILED, see above'}; cleaned up.{PLAIN}")
    return 0 if passed else 1


def _in_the_machine(*, keep: bool) -> int:
    without = " --keep has no effect there." if keep else ""
    print(f"This kernel has no ipip: the tour is in a small virtual machine that has.{without}", flush=True)
    return machine.run(
        [sys.executable, "-m", "dist.demo", *(word for word in sys.argv[1:] if word != "--keep")]
    )


class Store:
    """A place of leases, with the containers and files of nodes that have theirs there."""

    where: str

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def start(self, config: dict[str, Any], number: int) -> list[Node]:
        """Write the network config and start the nodes."""
        raise NotImplementedError

    def leases(self) -> list[tuple[str, str, str]]:
        """Return key, value and remaining time of each lease."""
        raise NotImplementedError

    def delete_lease(self, subnet: str) -> None:
        """Delete a lease, as its end would."""
        raise NotImplementedError

    def container(self, node: Node) -> Container:
        """Make a container in the subnet of a node."""
        return node.container()

    def files(self, node: Node) -> list[Path]:
        """Return the files that the daemon has written for a container runtime."""
        return [node.subnet_file]


class EtcdStore(Store):
    """The leases in etcd."""

    where = f"in etcd, {PREFIX}/subnets"

    def start(self, config: dict[str, Any], number: int) -> list[Node]:
        return self._lab.cluster(config["Backend"], nodes=number)

    def leases(self) -> list[tuple[str, str, str]]:
        found = self._lab.etcd.children("subnets")
        return [
            (lease["key"].rpartition("/")[2], lease["value"], f"(for {lease.get('ttl')} s)")
            for lease in found
        ]

    def delete_lease(self, subnet: str) -> None:
        self._lab.etcd.delete_lease(subnet)


class FileStore(Store):
    """The leases in a file of the first node, which serves them to the others."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._file = lab.directory / "leases.db"
        self.where = f"in {self._file} of n1"

    def start(self, config: dict[str, Any], number: int) -> list[Node]:
        """Start the node with the file, and others that know its address only."""
        first, *others = nodes = self._lab.add_nodes(number)
        served = f"{first.address}:8888"
        first.start(f"--listen={served}", f"--store={self._file}", f"--network={json.dumps(config)}")
        for node in others:
            node.start(f"--remote={served}")
        for node in nodes:
            node.wait_ready()
        return nodes

    def leases(self) -> list[tuple[str, str, str]]:
        found, _ = self._open().below(f"{PREFIX}/subnets")
        return [(each.key.rpartition("/")[2], each.value, f"(for {each.ttl or 0:.0f} s)") for each in found]

    def delete_lease(self, subnet: str) -> None:
        store, key = self._open(), f"{PREFIX}/subnets/{subnet.replace('/', '-')}"
        store.remove(key, store.get(key)[0].modified)

    def _open(self) -> KeyStore:
        from flanneld.subnet.embedded.store import open_file  # --help runs without flanneld's dependencies

        return open_file(str(self._file))


class KubernetesStore(Store):
    """The leases in a Kubernetes API, and the pods that a container runtime makes as the daemon tells it."""

    where = "in Kubernetes, by the nodes' podCIDRs and annotations"

    def start(self, config: dict[str, Any], number: int) -> list[Node]:
        write_net_conf(self._lab, config["Backend"])
        nodes = self._lab.add_nodes(number)
        for node in nodes:
            self._lab.kube.add(node)
            start(self._lab, node, "-ip-masq", *kept_conf_flags(node))
        for node in nodes:
            node.wait_ready()
        return nodes

    def leases(self) -> list[tuple[str, str, str]]:
        control = self._lab.kube.control
        return [
            (f"{name} {pod_cidr}", json.dumps(control.annotations(name)), "")
            for name, pod_cidr in self._nodes()
        ]

    def delete_lease(self, subnet: str) -> None:
        for name, pod_cidr in self._nodes():
            if pod_cidr == subnet:
                self._lab.kube.control.delete_node(name)

    def container(self, node: Node) -> Container:
        runtime = Runtime(node)
        runtime.use(kept_conf(node))
        return runtime.add(1)

    def files(self, node: Node) -> list[Path]:
        return [*super().files(node), kept_conf_file(node)]

    def _nodes(self) -> list[tuple[str, str]]:
        control = self._lab.kube.control
        found = {name: control.node(name) for name in control.names()}
        return [(name, node["spec"]["podCIDR"]) for name, node in found.items() if node]


STORES: dict[str, Callable[[Lab], Store]] = {
    "embedded": FileStore,
    "etcd": EtcdStore,
    "kubernetes": KubernetesStore,
}


class Tour:
    """Steps of the demonstration; each shows something and checks it."""

    def __init__(self, lab: Lab, store: Store, backend: str, nodes: int) -> None:
        self.lab = lab
        self.store = store
        self.backend = backend
        self.number = nodes
        self.passed = True
        self.containers: dict[str, Container] = {}

    def run(self) -> bool:
        """Run all steps. Return True if every check passed."""
        try:
            nodes = self.start()
            self.show_leases()
            for node in nodes:
                self.show_node(node)
            self.ping_all(nodes)
            self.measure(nodes[0], nodes[1])
            self.stop(nodes[-1], nodes[:-1])
        except FAILURES as error:
            self.check(False, str(error))
            for node in self.lab.nodes:
                headline(f"Log of the daemon on {node.name}")
                print(node.logs()[-3000:])
        return self.passed

    def check(self, good: bool, what: str) -> None:
        self.passed &= good
        print(f"{'ok' if good else 'FAILED'}: {what}")

    def start(self) -> list[Node]:
        headline(f"{self.number} nodes, backend {self.backend}, daemon {shlex.join(own_command())}")
        begin = time.monotonic()
        config = {"Network": NETWORK, "Backend": {"Type": self.backend}}
        nodes = self.store.start(config, self.number)
        self.containers = {node.name: self.store.container(node) for node in nodes}
        print(json.dumps(config))
        for node in nodes:
            print(f"{node.name}: {node.address}, container {self.containers[node.name].address}")
        for one, other in itertools.permutations(self.containers.values(), 2):
            one.wait_for_reply(other)
        self.check(True, f"all containers reach each other {time.monotonic() - begin:.1f} s after the start")
        return nodes

    def show_leases(self) -> None:
        headline(f"Leases {self.store.where}")
        leases = self.store.leases()
        for key, value, left in leases:
            print(f"{key}  {value}  {left}")
        self.check(len(leases) == self.number, f"{len(leases)} leases for {self.number} nodes")

    def show_node(self, node: Node) -> None:
        headline(f"Node {node.name}, {node.address}")
        for file in self.store.files(node):
            show(node, "cat", str(file))
        show(node, "ip", "route")
        show(node, "ip", "neigh")
        if self.backend == "vxlan":
            show(node, "bridge", "fdb", "show", "dev", "flannel.1")

    def ping_all(self, nodes: list[Node]) -> None:
        headline("Pings from container to container")
        for one, other in itertools.permutations(nodes, 2):
            source, target = self.containers[one.name], self.containers[other.name]
            said = source.run("ping", "-n", "-c", "3", "-i", "0.05", "-W", "1", target.address, check=False)
            time_taken = ROUND_TRIP.search(said.stdout)
            self.check(
                " 0% packet loss" in said.stdout,
                f"{one.name} {source.address} -> {other.name} {target.address}"
                f" {time_taken[1] if time_taken else '-'} ms",
            )

    def measure(self, one: Node, other: Node) -> None:
        headline(f"TCP throughput, {one.name} to {other.name}, one stream")
        rate = throughput(self.containers[one.name], self.containers[other.name])
        self.check(rate > 0, f"{rate / 1e9:.2f} Gbit/s between two containers")

    def stop(self, node: Node, others: list[Node]) -> None:
        headline(f"The daemon on {node.name} gets SIGTERM")
        near, far, lost = self.containers[others[0].name], self.containers[node.name], node.subnet()
        status, seconds = node.stop()
        self.check(status == 0, f"it ended with status {status} after {seconds * 1000:.0f} ms")
        self.check(near.reaches(far), "its containers are still reached: what forwards is not the daemon")

        headline(f"Its lease {lost} is deleted")
        begin = time.monotonic()
        self.store.delete_lease(lost)
        for other in others:
            wait_for(partial(has_forgotten, other, lost), what=f"{other.name} to forget {lost}")
        self.check(True, f"all others forgot it within {(time.monotonic() - begin) * 1000:.0f} ms")
        show(others[0], "ip", "route")
        self.check(not near.reaches(far), f"{others[0].name} no longer reaches {far.address}")
        for one, other in itertools.permutations(others, 2):
            good = self.containers[one.name].reaches(self.containers[other.name])
            self.check(good, f"{one.name} still reaches {other.name}")


def has_forgotten(node: Node, subnet: str) -> bool:
    return subnet not in {route["dst"] for route in node.routes()}


def throughput(client: Container, server: Container) -> float:
    """Return the throughput of one TCP stream over two seconds, in bits per second."""
    server.run("iperf3", "--server", "--one-off", "--daemon")
    wait_for(lambda: ":5201" in server.run("ss", "-Hltn").stdout, what="iperf3 to listen")
    said = json.loads(client.run("iperf3", "--json", "--time", "2", "--client", server.address).stdout)
    return float(said["end"]["sum_received"]["bits_per_second"])


def headline(text: str) -> None:
    print(f"\n{BOLD}== {text}{PLAIN}", flush=True)


def show(node: Node, *command: str) -> None:
    """Run a command on a node and print it with its output."""
    print(f"{node.name}# {shlex.join(command)}")
    print(node.run(*command).stdout.rstrip() or "(nothing)")


def _keep(lab: Lab) -> None:
    headline("The network stands; Ctrl-C takes it down")
    for node in lab.nodes:
        print(f"ip netns exec {node.namespace.name} bash    # {node.name}; its files: {node.directory}")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
