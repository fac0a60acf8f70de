"""The manifest's pod, as kubelet runs it out of the image on two nodes, and pods in the network it makes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.image.built_image import BuiltImage
from tests.image.kubelet import PATIENCE, kubelets
from tests.lab import Lab, wait_for
from tests.lab.daemon import ROOT

pytestmark = pytest.mark.long


def test_the_pod_makes_a_network_for_pods(lab: Lab, image: BuiltImage) -> None:
    pair = kubelets(lab, image)
    pods = []
    for kubelet in pair:
        kubelet.start_pod()
        pods.append(kubelet.runtime().add(1))
    pods[0].wait_for_reply(pods[1], PATIENCE)
    assert [pod.address.rpartition(".")[0] for pod in pods] == ["10.244.1", "10.244.2"]
    for kubelet in pair:
        wait_for(kubelet.is_alive_and_ready, PATIENCE, "an answer to both probes")
        condition = partial(lab.kube.control.condition, kubelet.node.name)
        wait_for(condition, PATIENCE, "the condition NetworkUnavailable")
        wait_for((kubelet.host / "var/lib/flannel/kube-nodes.json").exists, PATIENCE, "the saved nodes")
        assert [line for line in kubelet.node.log().splitlines() if line[0] in "EF"] == []


def test_the_plug_in_that_an_init_container_installs_is_ours_and_can_be_run(
    lab: Lab, image: BuiltImage
) -> None:
    kubelet = kubelets(lab, image)[0]
    for _ in range(2):  # as after each restart of the pod
        kubelet.run_init_containers()
        plugin = kubelet.host / "opt/cni/bin/flannel"
        assert plugin.read_bytes() == (ROOT / "dist/cni/flannel").read_bytes()
        assert plugin.stat().st_mode & 0o777 == 0o755
        assert {"bridge", "host-local", "loopback", "portmap"} <= {
            path.name for path in plugin.parent.iterdir()
        }
