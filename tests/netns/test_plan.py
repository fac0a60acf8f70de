"""``flanneld --plan``: what a start would change, and nothing that it does change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node, own_command
from tests.netns.pair import DUAL_STACK

NETWORK = "10.5.0.0/16"
PATIENCE = 60


def plan(lab: Lab, node: Node, *flags: str, check: bool = True) -> str:
    done = node.run(
        *own_command(),
        f"--etcd-endpoints={lab.etcd.endpoint}",
        f"--subnet-file={node.subnet_file}",
        "--plan",
        *flags,
        check=check,
    )
    return done.stdout if check else done.stderr


def carry_out(node: Node, script: str) -> None:
    node.run("sh", "-ec", script)


def cleanup(node: Node) -> None:
    node.run(*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup")


def settled(lab: Lab, backend: dict[str, Any], *flags: str, **config: Any) -> tuple[Node, Node]:
    """Two nodes whose daemons have done all there is to do."""
    node, peer = lab.cluster(backend, flags=flags, **config)
    # The peers of udp are no routes of their own.
    node.wait_for_route(peer.subnet() if backend["Type"] != "udp" else "10.5.0.0/16", PATIENCE)
    node.wait_for_log("Made our rules", PATIENCE)
    return node, peer


@pytest.mark.parametrize(
    "backend", ["vxlan", "host-gw", "udp", pytest.param("ipip", marks=pytest.mark.needs_kernel("ipip"))]
)
def test_beside_a_daemon_that_has_done_its_work_there_is_nothing_to_plan(lab: Lab, backend: str) -> None:
    node, _ = settled(lab, {"Type": backend}, "--ip-masq", "--ip-blackhole-route")
    with node.changes() as changes:
        assert plan(lab, node, "--ip-masq", "--ip-blackhole-route") == ""
        assert changes.seen() == []


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_a_plan_that_is_carried_out_leaves_nothing_to_plan_and_nothing_to_do(
    lab: Lab, backend: dict[str, Any]
) -> None:
    flags = ("--ip-masq", "--ip-blackhole-route")
    node, peer = settled(lab, backend, *flags)
    node.stop()
    cleanup(node)
    node.namespace.ip(
        f"route add {peer.subnet()} dev eth0 proto 70", "route add 10.5.250.0/24 dev eth0 proto 70"
    )
    node.namespace.sysctl("net/ipv4/ip_forward", 0)

    script = plan(lab, node, *flags)
    assert not node.subnet_file.exists()
    assert "sysctl -w net.ipv4.ip_forward=1" in script
    assert "ip route del 10.5.250.0/24 dev eth0" in script
    carry_out(node, script)
    assert plan(lab, node, *flags) == ""

    with node.changes() as changes:
        node.start(*flags)
        node.wait_for_log("In sync with 1 peer: made 0 objects, removed 0")
        assert changes.seen() == []


def test_a_plan_says_of_the_pump_what_a_start_would_do_with_it(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "udp"})
    pump, way = f"udp proxy of flannel0 on {node.address}:8285", f"peer {peer.subnet()} at {peer.address}"
    node.stop()
    assert plan(lab, node) == ""

    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "udp", "Port": 8286}})
    lab.etcd.delete_lease(peer.subnet())
    assert plan(lab, node).splitlines() == [
        f"# no more: {way} in the proxy of flannel0",
        f"# changed: udp proxy of flannel0 on {node.address}:8286 in place of {pump}",
    ]


def test_planned_commands_make_the_same_tun_as_the_daemon(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "udp"})
    node.stop()
    made = tun(node)
    cleanup(node)
    script = plan(lab, node)
    new = [
        f"# new: udp proxy of flannel0 on {node.address}:8285",
        f"# new: peer {peer.subnet()} at {peer.address} in the proxy of flannel0",
    ]
    assert [line for line in script.splitlines() if line.startswith("#")] == new
    carry_out(node, script)
    assert tun(node) == made
    assert plan(lab, node).splitlines() == new
    node.start()
    node.wait_for_log("In sync with 1 peer", PATIENCE)
    assert tun(node) == made


def tun(node: Node) -> dict[str, Any]:
    """What of the device does not depend on whether a pump reads it."""
    link = node.link("flannel0") or {}
    return {
        "link": {name: link.get(name) for name in ("mtu", "link_type")},
        "addresses": node.addresses("flannel0"),
        "routes": [route | {"flags": []} for route in node.routes("flannel0")],
    }


def test_a_node_without_a_lease_is_told_so_and_gets_none(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    first, *rest = plan(lab, node).splitlines()
    assert first.startswith("# this node has no lease yet; its subnet would be any free one")
    assert rest[0].startswith("ip link add flannel.1 ")
    assert lab.etcd.leases() == {}

    node.subnet_file.write_text(f"FLANNEL_NETWORK={NETWORK}\nFLANNEL_SUBNET=10.5.40.1/24\n")
    lines = plan(lab, node).splitlines()
    assert "10.5.40.0/24, which its last run had" in lines[0]
    assert "ip address replace 10.5.40.0/32 dev flannel.1" in lines
    assert lab.etcd.leases() == {}


def test_a_device_that_has_to_be_replaced_takes_its_routes_along(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"})
    node.stop()
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan", "Port": 4789}})
    lines = plan(lab, node).splitlines()
    assert lines[0] == "ip link del flannel.1"
    assert f"ip route replace {peer.subnet()} via {peer.subnet()[:-3]} dev flannel.1 onlink" in lines
    carry_out(node, "\n".join(lines))
    assert plan(lab, node) == ""


@pytest.mark.parametrize("enabled", [True, False], ids=["nftables", "iptables"])
def test_rules_that_others_removed_are_in_the_plan(lab: Lab, enabled: bool) -> None:
    node, _ = settled(lab, {"Type": "host-gw"}, "--ip-masq", EnableNFTables=enabled)
    node.stop()
    assert plan(lab, node, "--ip-masq") == ""
    node.run("nft", "flush", "ruleset")
    script = plan(lab, node, "--ip-masq")
    assert script.startswith("nft -j -f - " if enabled else "iptables-nft-restore --noflush")
    carry_out(node, script)
    assert plan(lab, node, "--ip-masq") == ""


def test_a_plan_needs_an_etcd_and_says_so(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    assert "etcd answers, but has no network config" in plan(lab, node, check=False)


def test_a_plan_warns_of_the_network_config_as_a_start_does(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan", "Prot": 4789}})
    (node,) = lab.add_nodes()
    assert "Unknown key Prot in Backend of the network config; did you mean Port?" in plan(
        lab, node, check=False
    )


def test_with_kubernetes_too_a_plan_announces_nothing(lab: Lab) -> None:
    node, peer = lab.kube_cluster({"Type": "vxlan"})
    node.wait_for_route(peer.subnet())
    node.wait_for_log("Made our rules")
    with_kube = [*lab.kube.flags(), f"--net-config-path={lab.directory / 'net-conf.json'}"]

    def planned() -> str:
        command = [*own_command(), f"--subnet-file={node.subnet_file}", "--plan", *with_kube]
        return node.run(*command, variables={"NODE_NAME": node.name}).stdout

    assert planned() == ""
    node.stop()
    cleanup(node)
    before = lab.kube.control.annotations(node.name)
    script = planned()
    assert f"ip route replace {peer.subnet()} via {peer.subnet()[:-3]} dev flannel.1 onlink" in script
    carry_out(node, script)
    assert planned() == ""
    assert lab.kube.control.annotations(node.name) == before


def test_rules_of_a_family_that_the_network_gave_up_are_in_the_plan(lab: Lab) -> None:
    node, _ = settled(lab, {"Type": "host-gw"}, "--ip-masq", **DUAL_STACK)
    node.stop()
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "host-gw"}})
    lab.etcd.put_lease(node.subnet(), {"PublicIP": node.address, "BackendType": "host-gw"})
    script = plan(lab, node, "--ip-masq")
    assert "\nip6tables-nft-restore --noflush" in script
    carry_out(node, script)
    assert "flanneld" not in node.run("ip6tables-nft-save").stdout
    assert plan(lab, node, "--ip-masq") == ""
