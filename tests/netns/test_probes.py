"""Probes of peers, over the way that containers' packets take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import DUAL_STACK
from tests.netns.test_seeing import HEALTH_PORT, answer, findings, flannelctl, metrics

PATIENCE = 60
OFTEN = "--peer-probes=600"


def probe(node: Node) -> dict[str, Any]:
    """The last one, ``{}`` for none, and before the peer's lease is known."""
    return next((peer["probe"] or {} for peer in answer(node, "peers")["peers"]), {})


def probed(lab: Lab, backend: str, **config: Any) -> tuple[Node, Node]:
    node, peer = lab.cluster({"Type": backend}, flags=(OFTEN, f"--healthz-port={HEALTH_PORT}"), **config)
    wait_for(lambda: probe(node).get("rtt"), PATIENCE, "an answer")
    return node, peer


@pytest.mark.parametrize(
    "backend",
    ["vxlan", "host-gw", "udp", pytest.param("ipip", marks=pytest.mark.needs_kernel("ipip"))],
)
def test_peers_answer_at_their_end_of_the_tunnel_and_else_at_their_public_ip(lab: Lab, backend: str) -> None:
    node, peer = probed(lab, backend)
    expected = peer.address if backend == "host-gw" else peer.subnet().removesuffix("/24")
    assert probe(node)["target"] == expected


def test_a_peer_that_is_silent_is_counted_and_shown_until_it_answers(lab: Lab) -> None:
    """By the socket for which the kernel sorts answers; in the other tests by a raw one."""
    node, peer = probed(lab, "vxlan")
    node.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
    assert metrics(node)["flannel_peer_probe_rtt_seconds_count"] >= 1
    with lab.unplugged(peer):
        wait_for(lambda: probe(node)["rtt"] is None, PATIENCE, "a probe without an answer")
        assert "no answer" in flannelctl(node, "peers").stdout
        assert metrics(node)["flannel_peer_probe_loss_ratio"] > 0
        assert "probes" in findings(node)
    wait_for(lambda: probe(node)["rtt"], PATIENCE, "an answer again")


def test_both_families_are_asked(lab: Lab) -> None:
    node, peer = probed(lab, "vxlan", **DUAL_STACK)

    def answered() -> bool:
        last = probe(node)
        return last["target"] == peer.subnet(6).removesuffix("/64") and bool(last["rtt"])

    wait_for(answered, PATIENCE, "an answer over IPv6")


def test_probes_are_off_by_default(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"}, flags=(f"--healthz-port={HEALTH_PORT}",))
    node.wait_for_route(peer.subnet())
    assert "probe" not in answer(node, "peers")["peers"][0]
    assert not [name for name in metrics(node) if name.startswith("flannel_peer_probe")]
