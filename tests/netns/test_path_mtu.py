"""``flannelctl netcheck`` where a router on the way carries less than the nodes' interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node
from tests.lab.lab import NETWORK
from tests.netns.pair import connect
from tests.netns.test_seeing import answer, findings, flannelctl


def carried(node: Node, *words: str) -> dict[str, tuple[int, int | None]]:
    found: list[dict[str, Any]] = answer(node, "netcheck", *words)["checks"]
    return {
        each["check"].removeprefix("path MTU, "): (each["wanted"], each["carried"])
        for each in found
        if "wanted" in each
    }


@pytest.mark.parametrize(
    ("backend", "inner"),
    [
        ("vxlan", 1450),
        pytest.param("wireguard", 1420, marks=pytest.mark.needs_kernel("wireguard")),
    ],
)
def test_a_path_that_carries_less_is_noticed(lab: Lab, backend: str, inner: int) -> None:
    """The tunnel's packets may be taken apart on the way, and still arrive."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": backend}})
    (node,), (peer,) = lab.add_nodes(1), lab.add_nodes(1, routed=True)
    for each in (node, peer):
        each.start(environment={"WIREGUARD_KEY_FILE": str(each.directory / "wgkey")})
    for each in (node, peer):
        each.wait_ready(60)
    connect(node, peer)
    connect(peer, node)
    assert carried(node, peer.subnet()) == {"underlay": (1500, 1500), "tunnel": (inner, inner)}
    container = f"--container={peer.container().address}"
    within = dict.fromkeys(("tunnel", "container"), (1000, 1000))
    assert carried(node, container, "--size=1000") == {"underlay": (1500 - inner + 1000,) * 2, **within}
    lab.switch.ip("link set br1 mtu 1400")
    assert carried(node, peer.address) == {"underlay": (1500, 1400), "tunnel": (inner, inner)}
    assert "set Backend.MTU to 1400 or less" in flannelctl(node, "netcheck", peer.subnet()).stdout
    assert "does not carry 1500 bytes" in findings(node)["path"]
    checks = {each["check"]: each for each in answer(node, "netcheck", peer.subnet())["checks"]}
    assert checks["path MTU, underlay"]["found"] == "1400 of 1500 bytes"
    change = f"set Backend.MTU to 1400 or less, which leaves {1400 - 1500 + inner} inside the tunnel"
    assert change in checks["path MTU, underlay"]["note"]
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": backend, "MTU": 1400}})
    for each in (node, peer):
        each.stop()
        each.start(environment={"WIREGUARD_KEY_FILE": str(each.directory / "wgkey")})
        each.wait_ready(60)
    assert carried(node, peer.subnet()) == {"underlay": (1400, 1400), "tunnel": (inner - 100, inner - 100)}
    assert "path" not in findings(node)


def test_a_name_of_no_peer_is_refused(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    done = flannelctl(node, "mtu", "10.5.99.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no peer is known at 10.5.99.1; flannelctl peers lists them" in done.stderr


def test_silence_of_a_peer_sets_the_exit_status(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, nodes=2)
    connect(node, peer)
    assert [flannelctl(node, name, peer.subnet()).returncode for name in ("mtu", "netcheck")] == [0, 0]
    peer.namespace.ip("link set eth0 down")
    assert [flannelctl(node, name, peer.subnet()).returncode for name in ("mtu", "netcheck")] == [1, 1]
