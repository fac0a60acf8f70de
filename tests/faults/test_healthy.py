"""The doctor finds nothing in a healthy network of any kind, idle or busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.world import (
    DIRECT,
    DUAL,
    HOST_GW,
    HOST_GW_DUAL,
    IPIP,
    IPSEC,
    LEGACY,
    MASQUERADE,
    NATIVE,
    NO_RULES,
    UDP,
    VXLAN,
    VXLAN_V3,
    WIREGUARD,
    Kind,
    World,
    kept_worlds,
    wait_until_healthy,
)
from tests.lab import Lab
from tests.lab.kept import Kept
from tests.netns.pair import connect
from tests.netns.test_file_store import fleet
from tests.netns.test_seeing import flannelctl

KINDS = {
    "vxlan": VXLAN,
    "vxlan, v3": VXLAN_V3,
    "vxlan, both families": DUAL,
    "vxlan, DirectRouting": DIRECT,
    "vxlan, iptables-legacy": LEGACY,
    "vxlan, nftables": NATIVE,
    "vxlan, masquerade": MASQUERADE,
    "vxlan, no rules": NO_RULES,
    "host-gw": HOST_GW,
    "host-gw, both families": HOST_GW_DUAL,
    "udp": UDP,
    "ipip": IPIP,
    "wireguard": WIREGUARD,
    "ipsec": IPSEC,
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Kept[Kind, World]]:
    kept = kept_worlds()
    yield kept
    kept.close()


@pytest.mark.parametrize("kind", [kind.marked(kind, name) for name, kind in KINDS.items()])
def test_doctor_finds_nothing_in_a_healthy_network_idle_or_busy(
    worlds: Kept[Kind, World], kind: Kind
) -> None:
    with worlds.get(kind) as world:
        assert findings(world) == []
        with ExitStack() as traffic:
            for node, other in zip(world.nodes, reversed(world.nodes), strict=True):
                traffic.enter_context(node.container().ping(other.container(), 0.002))
            world.lab.etcd.write(100)
            assert findings(world) == []


def findings(world: World) -> list[str]:
    return [str(said) for node in world.nodes if str(said := world.doctor(node)) != "status 0"]


@pytest.mark.parametrize("store", ["kubernetes", "file"])
def test_doctor_finds_no_problem_with_other_stores(lab: Lab, store: str) -> None:
    nodes = lab.kube_cluster({"Type": "vxlan"}) if store == "kubernetes" else fleet(lab, {"Type": "vxlan"}, 2)
    connect(*nodes)
    for node in nodes:
        wait_until_healthy(node)
        done = flannelctl(node, "doctor")
        problems = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
        assert (done.returncode, problems) == (0, []), done.stdout
