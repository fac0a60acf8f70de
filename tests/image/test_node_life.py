"""The life of nodes that have neither Python nor iptables nor CNI plug-ins, only what the image brings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.image.built_image import BuiltImage
from tests.image.kubelet import PATIENCE, Kubelet, add_kubelet, kubelets
from tests.lab import CommandError, Lab, wait_for
from tests.lab.namespace import batch
from tests.netns.pair import DUAL_STACK
from tests.netns.test_cni_plugin import accepts, everywhere, ports
from tests.netns.test_kube_outage import saved

pytestmark = pytest.mark.long

PODS = 50
AT_ONCE = 4
#: The parts of this machine that bring iptables.
SYSTEM = [
    each for each in ("usr", "bin", "sbin", "lib", "lib64", "etc/alternatives") if Path("/", each).exists()
]
PORT = 8080
HOST_PORT = {"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}


def started(lab: Lab, image: BuiltImage, nodes: int = 2, **config: object) -> list[Kubelet]:
    found = kubelets(lab, image, nodes, **config)
    for kubelet in found:
        kubelet.start_pod()
    return found


def reboot(kubelet: Kubelet) -> None:
    """Lose all that the kernel and /run hold."""
    node = kubelet.node
    node.kill()
    for link in ("flannel.1", "cni0"):
        node.namespace.ip(f"link delete {link}")
    node.run("nft", "flush", "ruleset")
    for path in (node.subnet_file, *node.directory.glob("flanneld*")):
        path.unlink()


def test_fifty_pods_on_each_of_three_nodes_come_and_go_and_leave_nothing(lab: Lab, image: BuiltImage) -> None:
    runtimes = [kubelet.runtime() for kubelet in started(lab, image, 3)]
    numbers = range(1, PODS + 1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ring = [
            pod
            for row in pool.map(lambda number: [each.add(number) for each in runtimes], numbers)
            for pod in row
        ]
        assert len({pod.address for pod in ring}) == 3 * PODS
        # The next one is on another node.
        pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
        everywhere(pool.map(lambda pair: pair[0].wait_for_reply(pair[1], PATIENCE), pairs))
        for runtime in runtimes:
            assert len(ports(runtime.node)) == len(runtime.reserved()) == PODS
            everywhere(pool.map(runtime.delete, numbers))
            assert (ports(runtime.node), runtime.reserved()) == ([], [])


def test_pods_have_both_families(lab: Lab, image: BuiltImage) -> None:
    one, other = (kubelet.runtime().add(1) for kubelet in started(lab, image, **DUAL_STACK))
    for family in (4, 6):
        one.wait_for_reply(other.addresses[family], PATIENCE)


def test_host_port_needs_iptables_on_the_host(lab: Lab, image: BuiltImage) -> None:
    here, there = started(lab, image)
    with pytest.raises(CommandError, match="iptables"):
        here.runtime().add(1, portMappings=[HOST_PORT])
    runtime = here.runtime(*SYSTEM)
    pod, peer = runtime.add(2, portMappings=[HOST_PORT]), there.runtime().add(1)
    for client in (peer, pod):  # the pod's own connection returns through its port of the bridge
        assert accepts(pod, 80, client=client, address=(here.node.address, PORT))
    runtime.delete(2)
    assert "CNI-DN" not in here.node.run("iptables-save", "-t", "nat").stdout


def test_restart_and_upgrade_lose_no_packet_and_keep_the_plug_ins_of_the_host(
    lab: Lab, image: BuiltImage
) -> None:
    here, there = started(lab, image)
    pod, peer = here.runtime().add(1), there.runtime().add(1)
    pod.wait_for_reply(peer)
    bridge, flannel = (here.host / "opt/cni/bin" / name for name in ("bridge", "flannel"))
    bridge.write_bytes(bridge.read_bytes() + b"another version")
    flannel.write_bytes(b"an earlier version")
    before = bridge.read_bytes()
    with pod.ping(peer) as ping:
        for _ in range(2):
            here.node.stop()
            here.start_pod()
            ping.wait_for_replies()
        assert ping.lost() == 0
    assert bridge.read_bytes() == before
    assert flannel.read_bytes() == (image.root / "flannel").read_bytes()
    here.runtime().add(2).wait_for_reply(peer)


def test_host_that_boots_while_the_api_server_is_away_has_pods_again(lab: Lab, image: BuiltImage) -> None:
    here, there = started(lab, image)
    runtime, peer = here.runtime(), there.runtime().add(1)
    pod = runtime.add(1)
    pod.wait_for_reply(peer)
    state = here.host / "var/lib/flannel"
    wait_for(lambda: saved(state) == ["n1", "n2"], PATIENCE, "the saved nodes")
    lab.kube.kill()
    batch(f"netns del {pod.namespace.name}")
    reboot(here)
    here.start_pod()
    runtime.delete(1)
    assert runtime.reserved() == []
    pod = here.runtime().add(2)
    pod.wait_for_reply(peer, 1)
    with pod.ping(peer) as ping:
        lab.kube.start()
        ping.wait_for_replies(100, PATIENCE)
        assert ping.lost() == 0


def test_subnet_of_a_deleted_node_is_free_for_the_next(lab: Lab, image: BuiltImage) -> None:
    first, second = started(lab, image)
    pod, lost = first.runtime().add(1), second.runtime()
    pod.wait_for_reply(lost.add(1))
    lab.kube.control.delete_node(second.node.name)
    first.node.wait_for_no_route("10.244.2.0/24", PATIENCE)
    lost.delete(1)
    assert lost.reserved() == []
    second.node.stop()

    (node,) = lab.add_nodes()
    third = add_kubelet(lab, image, node, 2)
    third.start_pod()
    newcomer = third.runtime().add(1)
    assert newcomer.address == "10.244.2.2"
    newcomer.wait_for_reply(pod)
