"""Nonsense in Kubernetes and in files: it is named once, and hurts nobody else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.kube_api.crowd import PREFIX
from tests.netns.kube import SOON, complaints, overlay_routes, start, write_net_conf
from tests.netns.pair import connect

VXLAN = {"Type": "vxlan"}


def peer(number: int, **notes: str) -> dict[str, str]:
    """What a node announces, ``_`` for ``-``."""
    said = {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": json.dumps({"VtepMAC": f"02:00:00:00:00:{number:02x}"}),
        "public-ip": f"198.18.0.{number}",
    }
    said |= {name.replace("_", "-"): text for name, text in notes.items()}
    return {PREFIX + name: text for name, text in said.items()}


#: PodCIDRs and annotations, by the number of the node.
NONSENSE: dict[int, tuple[list[str], dict[str, str]]] = {
    101: (["10.5.101.0/24"], peer(101, public_ip="here")),
    102: (["10.5.102.0/24"], peer(102, public_ip="")),
    103: (["10.5.103.0/24"], peer(103, backend_data="{no")),
    104: (["10.5.104.0/24"], peer(104, backend_data="null")),
    105: (["10.5.105.0/24"], peer(105, backend_data='{"VtepMAC":"01:00:5e:00:00:01"}')),
    106: (["10.5.106.0/24"], peer(106, backend_data="[" * 5000)),
    107: (["10.5.107.0/24", "fd00::/64", "10.5.207.0/24"], peer(107)),
    108: (["10.5.108.0/24", "10.5.208.0/24"], peer(108)),
    109: (["10.9.109.0/24"], peer(109)),
    110: (["0.0.0.0/0"], peer(110)),
    111: (["10.5.0.0/16"], peer(111)),
    112: (["everywhere"], peer(112)),
    113: ([], peer(113)),
}


def put_nonsense(lab: Lab) -> None:
    for number, (cidrs, notes) in NONSENSE.items():
        lab.kube.control.put_node(f"n{number}", *cidrs, annotations=notes)


def wait_for_news(lab: Lab, node: Node) -> None:
    """Wait until the daemon has dealt with all that is in the API now."""
    lab.kube.control.put_node("n200", "10.5.200.0/24", annotations=peer(200))
    node.wait_for_route("10.5.200.0/24", SOON)
    lab.kube.control.delete_node("n200")
    node.wait_for_no_route("10.5.200.0/24", SOON)


def test_nonsense_is_named_once_a_node_and_hurts_nobody_else(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    with first.container().ping(second.container()) as ping:
        put_nonsense(lab)
        wait_for_news(lab, first)
        first.stop()
        start(lab, first)
        first.wait_ready()
        wait_for_news(lab, first)
        assert ping.lost() == 0
    assert overlay_routes(first) == {second.subnet()}
    said = complaints(first)
    by_lease = {105: "10.5.105.0/24", 104: "10.5.104.0/24", 111: "lease 10.5.0.0/16"}
    for number in NONSENSE:
        lines = [line for line in said if f"n{number} " in line or by_lease.get(number, "no lease") in line]
        assert len(lines) == 1, (number, said)
    assert len(said) == len(NONSENSE)
    assert max(map(len, said)) < 500


def test_nonsense_over_good_nodes_keeps_the_ways_to_them_and_can_be_put_right(lab: Lab) -> None:
    (node,) = lab.kube_cluster(VXLAN, nodes=1)
    numbers = [number for number in NONSENSE if 101 <= number <= 106]
    wanted = {f"10.5.{number}.0/24" for number in numbers}
    for number in numbers:
        lab.kube.control.put_node(f"n{number}", f"10.5.{number}.0/24", annotations=peer(number))
    wait_for(lambda: overlay_routes(node) == wanted, SOON)
    before = node.kernel_state("flannel.1")
    for number in numbers:
        lab.kube.control.put_node(f"n{number}", f"10.5.{number}.0/24", annotations=NONSENSE[number][1])
    wait_for_news(lab, node)
    assert node.kernel_state("flannel.1") == before
    node.stop()
    start(lab, node)
    node.wait_ready()
    wait_for_news(lab, node)
    assert node.kernel_state("flannel.1") == before
    for number in numbers:
        lab.kube.control.put_node(f"n{number}", f"10.5.{number}.0/24", annotations=peer(number))
    wait_for_news(lab, node)
    assert node.kernel_state("flannel.1") == before
    for number in numbers:
        lab.kube.control.delete_node(f"n{number}")
    wait_for(lambda: overlay_routes(node) == set(), SOON)


def test_two_nodes_with_one_pod_cidr_share_it_in_the_same_way_everywhere(lab: Lab) -> None:
    nodes = lab.kube_cluster({"Type": "host-gw"})
    for number in (52, 51):
        lab.kube.control.put_node(
            f"m{number}",
            "10.5.50.0/24",
            annotations=peer(number, backend_type="host-gw", backend_data="null"),
        )
    for node in nodes:
        wait_for_gateway(node, "198.18.0.51")
        assert len(node.wait_for_log("Nodes m51, m52 all have the podCIDR 10.5.50.0/24")) == 1
    lab.kube.control.delete_node("m51")
    for node in nodes:
        wait_for_gateway(node, "198.18.0.52")


def wait_for_gateway(node: Node, address: str) -> None:
    def gateways() -> list[str]:
        return [route["gateway"] for route in node.routes() if route["dst"] == "10.5.50.0/24"]

    wait_for(lambda: gateways() == [address], SOON, f"{address} as the gateway")


def test_a_node_with_our_pod_cidr_does_not_cut_us_off(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    with second.container().ping(first.container()) as ping:
        lab.kube.control.put_node("zz", first.subnet(), annotations=peer(77))
        wait_for_news(lab, second)
        wait_for_news(lab, first)
        assert "node zz: it has our own podCIDR" in first.log()
        assert first.running
        assert ping.lost() == 0


@pytest.mark.parametrize(
    ("cidrs", "reason"),
    [
        (["10.9.1.0/24"], "outside Network 10.5.0.0/16"),
        (["10.5.1.0/24", "fd00::/64", "10.5.2.0/24"], "has 3 podCIDRs"),
    ],
)
def test_our_own_node_is_waited_for_until_it_makes_sense(lab: Lab, cidrs: list[str], reason: str) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    lab.kube.add(node, *cidrs)
    start(lab, node)
    node.wait_for_log(
        f"Waiting for a lease: node n1 has {'the podCIDR' if 'outside' in reason else '3'}", SOON
    )
    assert reason in complaints(node)[0]
    lab.kube.control.set_pod_cidrs(node.name, "10.5.1.0/24")
    assert node.wait_ready()["FLANNEL_SUBNET"] == "10.5.1.1/24"
    assert len(complaints(node)) == 1


@pytest.mark.parametrize("text", [None, "{no", '{"Network":"10.5.0.0/16","Backend":7}'])
def test_a_network_config_that_is_missing_or_wrong_is_waited_for(lab: Lab, text: str | None) -> None:
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    path = lab.directory / "net-conf.json"
    if text is not None:
        path.write_text(text)
    start(lab, node)
    node.wait_for_log("Couldn't fetch network config", SOON)
    write_net_conf(lab, VXLAN)
    node.wait_ready()
    assert len(complaints(node)) == 1


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (["--kube-annotation-prefix=example.org/a/b"], {}, "-kube-annotation-prefix"),
        ([], {"NODE_NAME": ""}, "NODE_NAME"),
        (["--kube-api-url="], {}, "-kubeconfig-file or -kube-api-url"),
    ],
)
def test_unusable_config_ends_with_one_message(
    lab: Lab, flags: list[str], variables: dict[str, Any], words: str
) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    start(lab, node, *flags, environment={"NODE_NAME": node.name} | variables)
    assert node.daemon.wait(SOON).status == 1
    (line,) = complaints(node)
    assert words in line
