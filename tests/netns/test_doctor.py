"""What the doctor says of single hosts, where it must not advise to remove anything.

``tests/faults`` shows what it says of broken networks, and that its fixes heal them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import DUAL_STACK
from tests.netns.test_seeing import BACKEND, PATIENCE, answer, flannelctl

#: The link of the lab is inside this network: the mistake of a host whose LAN is.
AROUND_THE_LAN: dict[str, Any] = {"Network": "198.18.0.0/16", "SubnetMin": "198.18.100.0"}


# ---- what is no reason to remove anything -------------------------------------------------------


def test_a_lan_inside_the_network_is_never_told_to_be_deleted(lab: Lab) -> None:
    node, peer = lab.cluster(BACKEND, **AROUND_THE_LAN)
    node.wait_for_route(peer.subnet(), PATIENCE)
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    told = answer(node, "doctor")["findings"]
    (found,) = [each for each in told if each["about"] == "eth0"]
    assert found["problem"] == f"eth0 has {node.address}, which is inside the cluster network"
    assert found["fix"] is None
    assert "delete" not in str(told)


def test_a_bridge_that_nothing_is_plugged_into_is_no_problem(lab: Lab) -> None:
    (node,) = lab.cluster(BACKEND, nodes=1)
    gateway = node.env()["FLANNEL_SUBNET"]
    node.namespace.ip("link add cni0 up type bridge", f"address add {gateway} dev cni0")
    node.namespace.ip("link add old0 up type bridge", "address add 10.5.251.1/24 dev old0")
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    assert [each for each in answer(node, "doctor")["findings"] if each["about"] in ("cni0", "old0")] == []
    assert flannelctl(node, "doctor").returncode == 0


def test_a_route_of_the_administrator_inside_the_network_is_not_called_left_over(lab: Lab) -> None:
    (node,) = lab.cluster(BACKEND, nodes=1)
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    node.namespace.ip("route add 10.5.9.0/24 via 198.18.0.77 dev eth0")
    assert flannelctl(node, "routes").returncode == 0
    assert "10.5.9.0/24" not in str(answer(node, "doctor"))


# ---- properties of a device ---------------------------------------------------------------------

#: A property of a device as it should be made, what it is made with instead, and how the doctor names both.
DRIFTS = {
    "vni": ("id 1", "id 2", "has vni 2, wanted 1"),
    "parent": ("dev eth0", "dev other0", "has parent other0, wanted eth0"),
    "local": ("local {local}", "local {other}", "has local {other}, wanted {local}"),
    "port": ("dstport 8472", "dstport 8473", "has port 8473, wanted 8472"),
    "learning": ("nolearning", "learning", "has learning on, wanted off"),
    "gbp": ("nolearning", "nolearning gbp", "has gbp on, wanted off"),
    "mtu": ("mtu {mtu}", "mtu 1400", "has mtu 1400, wanted {mtu}"),
    "up": ("up type", "type", "has up off, wanted on"),
}
DEVICE = " ".join(
    (
        "link add {name} address {mac} mtu {mtu} up type vxlan",
        "id 1 dev eth0 local {local} dstport 8472 nolearning",
    )
)


@pytest.fixture(scope="module")
def stopped() -> Iterator[tuple[Lab, Node]]:
    """A node with devices of both families, whose daemon is gone."""
    with Lab() as lab:
        node, peer = lab.cluster(BACKEND, **DUAL_STACK)
        node.wait_for_route(peer.subnet(), PATIENCE)
        node.stop()
        node.namespace.ip("link add other0 up type bridge")
        yield lab, node


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("what", DRIFTS)
def test_a_property_of_the_tunnel_that_differs_is_named(
    stopped: tuple[Lab, Node], what: str, family: int
) -> None:
    lab, node = stopped
    name = "flannel.1" if family == 4 else "flannel-v6.1"
    values = {
        "name": name,
        "mac": (node.link(name) or {})["address"],
        "mtu": 1450 if family == 4 else 1430,
        "local": node.address if family == 4 else node.ipv6_address,
        "other": "198.18.0.77" if family == 4 else "fd00:18::77",
    }
    right, wrong, told = DRIFTS[what]
    assert right in DEVICE
    node.namespace.ip(f"link del {name}", DEVICE.replace(right, wrong).format(**values))
    done = answer(node, "doctor", store=lab.etcd.endpoint)["findings"]
    found = [each["problem"] for each in done if each["check"] == "devices" and each["about"] == name]
    assert found == [f"{name} {told.format(**values)}"]
    routes = answer(node, "routes", store=lab.etcd.endpoint)["objects"]
    (entry,) = [each for each in routes if each["state"] == "different"]
    assert [each["property"] for each in entry["differences"]] == [what]
    node.namespace.ip(f"link del {name}", DEVICE.format(**values))
    assert "devices" not in [
        each["check"] for each in answer(node, "doctor", store=lab.etcd.endpoint)["findings"]
    ]
