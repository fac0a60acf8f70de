"""``-disable-tx-checksum-offload``: a property of the VXLAN device that is kept like its others."""

from __future__ import annotations

import re

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import connect
from tests.netns.test_plan import plan, settled
from tests.netns.test_seeing import answer, flannelctl

FLAG = "--disable-tx-checksum-offload"
FEATURE = "tx-checksum-ip-generic"
PATIENCE = 20


def is_offloaded(node: Node, device: str = "flannel.1") -> bool:
    told = node.run("ethtool", "-k", device).stdout
    found = re.search(rf"{FEATURE}: (on|off)", told)
    assert found
    return found[1] == "on"


def test_offload_is_switched_off_and_stays_off(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"}, FLAG, "--ip-masq")
    assert not is_offloaded(node)
    connect(node, peer)
    assert plan(lab, node, FLAG, "--ip-masq") == ""
    assert flannelctl(node, "routes").returncode == 0

    with node.paused():
        node.run("ethtool", "-K", "flannel.1", FEATURE, "on")
        assert f"ethtool -K flannel.1 {FEATURE} off" in plan(lab, node, FLAG, "--ip-masq")
    wait_for(lambda: not is_offloaded(node), PATIENCE, "the offload to be off again")
    node.wait_for_log("has cpu_checksums False, wanted True", PATIENCE)
    node.run("ip", "link", "delete", "flannel.1")
    wait_for(lambda: node.link("flannel.1"), PATIENCE, "a new device")
    wait_for(lambda: not is_offloaded(node), PATIENCE, "the new device to be like the old one")


def test_offload_stays_as_it_is_without_the_flag(lab: Lab) -> None:
    node, _ = settled(lab, {"Type": "vxlan"})
    assert is_offloaded(node)
    index = (node.link("flannel.1") or {})["ifindex"]
    node.run("ethtool", "-K", "flannel.1", FEATURE, "off")
    # A change that the daemon does repair shows that it has looked.
    node.run("ip", "link", "set", "flannel.1", "mtu", "1400")
    wait_for(lambda: (node.link("flannel.1") or {})["mtu"] == 1450, PATIENCE, "the MTU to be repaired")
    assert not is_offloaded(node)
    node.stop()
    node.start(FLAG)
    node.wait_ready(PATIENCE)
    node.run("ethtool", "-K", "flannel.1", FEATURE, "on")
    wait_for(lambda: not is_offloaded(node), PATIENCE, "the offload to be off")
    assert (node.link("flannel.1") or {})["ifindex"] == index
    assert [each["state"] for each in answer(node, "routes")["objects"] if each["kind"] == "link"] == ["ok"]
