"""Changes that others make on this host while the daemon runs: subnet.env and the kernel's forwarding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import DUAL_STACK
from tests.netns.test_conditions import ready_page, service_status, troubles
from tests.netns.test_seeing import HEALTH_PORT, answer, findings, flannelctl, settled

#: Seconds in which the daemon notices a change, on a machine that is busy.
SOON = 20
HEALTH = f"--healthz-port={HEALTH_PORT}"
#: By family, the setting and what a finding calls it.
FORWARDING = {
    4: ("net/ipv4/ip_forward", "net.ipv4.ip_forward"),
    6: ("net/ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"),
}


def setting(node: Node, path: str) -> str:
    with node.namespace.entered():
        return Path("/proc/sys", path).read_text().strip()


# ---- subnet.env ---------------------------------------------------------------------------------


def remove(file: Path) -> None:
    file.unlink()


def overwrite(file: Path) -> None:
    file.write_text("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.250.1/24\nFLANNEL_MTU=9000\n")


@pytest.mark.parametrize(("harm", "what"), [(remove, "removed"), (overwrite, "changed")])
def test_subnet_env_that_others_remove_or_change_is_written_again(
    lab: Lab, harm: Callable[[Path], None], what: str
) -> None:
    node, _ = settled(lab)
    file = node.subnet_file
    before = file.read_text()
    harm(file)
    wait_for(lambda: file.exists() and file.read_text() == before, SOON, "subnet.env to be restored")
    (line,) = node.wait_for_log("Restored", SOON)
    assert line.endswith(f"Restored {file}: another program had {what} it")
    assert troubles(node) == {}


def test_subnet_env_that_cannot_be_restored_makes_the_node_unready_until_it_is(lab: Lab) -> None:
    node, _ = settled(lab, HEALTH)
    file = node.subnet_file
    file.unlink()
    file.mkdir()
    (file / "anything").touch()
    wait_for(lambda: ready_page(node).startswith("flanneld is not ready yet\n"), SOON, "an unready node")
    problem = f"cannot write {file}: Is a directory"
    assert problem in ready_page(node)
    assert troubles(node)["subnet file"].startswith(problem)
    assert problem in findings(node)["ready"]
    wait_for(lambda: f"; subnet file: {problem}" in service_status(node), SOON, "STATUS= to tell it")
    assert len(node.wait_for_log(problem)) == 1
    (file / "anything").unlink()
    file.rmdir()
    wait_for(lambda: ready_page(node).startswith("flanneld is ready\n"), SOON, "a ready node")
    wait_for(lambda: problem not in service_status(node), SOON, "STATUS= to forget it")
    assert "FLANNEL_SUBNET" in node.env()


# ---- forwarding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [4, 6])
def test_forwarding_that_is_switched_off_is_told_and_left_to_the_operator(lab: Lab, family: int) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, flags=(HEALTH,), **DUAL_STACK)
    node.wait_for_route(peer.subnet())
    wait_for(lambda: troubles(node) == {}, SOON, "a node that is well")
    path, name = FORWARDING[family]
    node.namespace.sysctl(path, 0)
    told = f"{name} is 0: this host passes no IPv{family} packets on"
    wait_for(lambda: troubles(node).get("forwarding", "").startswith(told), SOON, "the status to tell it")
    wait_for(lambda: f"; forwarding: {told}" in service_status(node), SOON, "STATUS= to tell it")
    assert f"[-]forwarding: {told}" in ready_page(node)
    assert f"{name} is 0" in findings(node)["forwarding"]
    assert flannelctl(node, "status").returncode == 1
    assert len(node.wait_for_log(f"settings are not in place: forwarding of IPv{family}: {name} is 0")) == 1
    assert setting(node, path) == "0"
    fix = next(each["fix"] for each in answer(node, "doctor")["findings"] if each["check"] == "forwarding")
    for command in fix:
        node.run(*command)
    wait_for(lambda: troubles(node) == {}, SOON, "the end to be told")
    wait_for(lambda: "forwarding" not in service_status(node), SOON, "STATUS= to forget it")


@pytest.mark.parametrize("family", [4, 6])
def test_forwarding_is_switched_on_again_if_that_is_wanted(lab: Lab, family: int) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, flags=("--keep-forwarding",), **DUAL_STACK)
    node.wait_for_route(peer.subnet())
    wait_for(lambda: troubles(node) == {}, SOON, "a node that is well")
    path, name = FORWARDING[family]
    node.namespace.sysctl(path, 0)
    wait_for(lambda: setting(node, path) == "1", SOON, "forwarding to be on again")
    (line,) = node.wait_for_log(f"Restored forwarding of IPv{family}", SOON)
    assert line.endswith(f"another program had left {name} is 0")
    assert troubles(node) == {}


# ---- the store ----------------------------------------------------------------------------------


def told_everywhere(node: Node, what: str) -> None:
    """See that log, STATUS=, /readyz, status and doctor use the same words for what is waited for."""
    wait_for(lambda: what in service_status(node), SOON, f"{what!r} in STATUS=")
    (line,) = node.wait_for_log(what)
    reason = line.partition("] ")[2].removeprefix("Waiting for ").partition(": ")[2]
    assert reason in service_status(node)
    assert reason in ready_page(node)
    assert reason in flannelctl(node, "status").stdout
    found = {each["check"]: each for each in answer(node, "doctor")["findings"]}
    assert f"{found['store']['problem']}; {found['store']['advice']}" == reason
    assert found["store"]["problem"] in found["ready"]["evidence"]
    assert "does not answer" not in ready_page(node)
    assert answer(node, "status")["store"]["answers"]
    assert not node.service_manager.ready()


def start(lab: Lab) -> Node:
    (node,) = lab.add_nodes(1)
    node.start(HEALTH, "--etcd-api=v2")
    return node


def test_an_etcd_without_a_network_config_is_not_said_to_be_silent(lab: Lab) -> None:
    node = start(lab)
    told_everywhere(node, "etcd answers, but has no network config at /coreos.com/network/config")


def test_a_wrong_network_config_is_a_condition_of_its_own(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/33"})
    told_everywhere(start(lab), "the network config is wrong")


def test_a_full_network_is_a_condition_of_its_own(lab: Lab) -> None:
    config: dict[str, Any] = {"Network": "10.5.0.0/22", "SubnetLen": 24, "Backend": {"Type": "vxlan"}}
    lab.etcd.put_config(config)
    for number in range(4):
        lease = {"PublicIP": f"198.18.0.{200 + number}", "BackendType": "vxlan"}
        lab.etcd.put_lease(f"10.5.{number}.0/24", lease)
    told_everywhere(start(lab), "is free, ")


def test_a_silent_etcd_is_said_to_be_silent(lab: Lab) -> None:
    lab.etcd.stop()
    node = start(lab)
    wait_for(lambda: "etcd does not answer" in service_status(node), SOON, "STATUS= to tell it")
    assert "etcd does not answer" in ready_page(node)
    assert "etcd does not answer" in json.dumps(troubles(node))
    assert not answer(node, "status")["store"]["answers"]
