"""Another daemon, named by ``FLANNELD_PEER``, is content with the lab's Kubernetes API server."""

from __future__ import annotations

import json

from tests.lab import Lab, peer_command
from tests.lab.credentials import as_pod

PREFIX = "flannel.alpha.coreos.com/"


def test_the_peer_lists_watches_and_patches(lab: Lab) -> None:
    first, second = lab.kube_cluster({"Type": "vxlan"}, command=peer_command())
    control = lab.kube.control
    first.container().wait_for_reply(second.container())
    assert [first.subnet(), second.subnet()] == ["10.5.1.0/24", "10.5.2.0/24"]
    annotations = control.annotations("n1")
    assert annotations[f"{PREFIX}public-ip"] == first.address
    assert (
        json.loads(annotations[f"{PREFIX}backend-data"])["VtepMAC"]
        == (first.link("flannel.1") or {})["address"]
    )
    condition = control.condition("n1")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("False", "FlannelIsUp")
    control.put_peer("n3", "10.5.3.0/24", "198.18.0.3", "vxlan", {"VtepMAC": "02:00:00:00:00:03"})
    first.wait_for_route("10.5.3.0/24")
    control.delete_node("n3")
    first.wait_for_no_route("10.5.3.0/24")


def test_the_peer_goes_on_after_a_restart_that_lost_the_history(lab: Lab) -> None:
    (node,) = lab.kube_cluster({"Type": "host-gw"}, nodes=1, command=peer_command())
    lab.kube.restart()
    lab.kube.control.put_peer("n3", "10.5.3.0/24", "198.18.0.3", "host-gw")
    node.wait_for_route("10.5.3.0/24", 10)


def test_the_peer_comes_in_as_a_pod(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    lab.kube.stop()
    lab.kube.start(tls=True)
    lab.kube.add(node)
    account = lab.kube.service_account(lab.directory / "account")
    net_conf = lab.directory / "net-conf.json"
    net_conf.write_text(json.dumps({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}))
    lab.kube.control.put_pod("kube-flannel", "ds-x", node.name)
    node.start(
        "--kube-subnet-mgr",
        f"--net-config-path={net_conf}",
        command=as_pod(account, peer_command()),
        environment={**lab.kube.in_cluster(), "POD_NAME": "ds-x", "POD_NAMESPACE": "kube-flannel"},
    )
    node.wait_ready(10)
    assert {request["status"] for request in lab.kube.control.requests()} == {200}
