"""``flannelctl netcheck`` where a router on the way carries less than the nodes' interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.lab import NETWORK
from tests.netns.pair import connect
from tests.netns.test_seeing import HEALTH_PORT, answer, findings, flannelctl


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
        pytest.param("wireguard", 1420, marks=[pytest.mark.needs_kernel("wireguard"), pytest.mark.long]),
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
        each.wait_for_log("In sync with", 60)
    assert carried(node, peer.subnet()) == {"underlay": (1400, 1400), "tunnel": (inner - 100, inner - 100)}
    assert "path" not in findings(node)


def test_a_name_of_no_peer_is_refused(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    node.wait_for_log("In sync with")
    done = flannelctl(node, "mtu", "10.5.99.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no peer is known at 10.5.99.1; flannelctl peers lists them" in done.stderr


def test_silence_of_a_peer_sets_the_exit_status(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, nodes=2)
    connect(node, peer)
    assert [flannelctl(node, name, peer.subnet()).returncode for name in ("mtu", "netcheck")] == [0, 0]
    peer.namespace.ip("link set eth0 down")
    assert [flannelctl(node, name, peer.subnet()).returncode for name in ("mtu", "netcheck")] == [1, 1]


def device_mtu(node: Node, device: str) -> int:
    link = node.link(device)
    assert link is not None
    return int(link["mtu"])


@pytest.mark.parametrize(
    ("backend", "device", "inner", "lower"),
    [
        ("vxlan", "flannel.1", 1450, 1350),
        ("udp", "flannel0", 1472, 1372),
        pytest.param(
            "ipip", "flannel.ipip", 1480, 1380, marks=[pytest.mark.needs_kernel("ipip"), pytest.mark.long]
        ),
        # Packets are padded to a multiple of 16, and IPv4's header is 20 bytes shorter than IPv6's.
        pytest.param("wireguard", "flannel-wg", 1420, 1328, marks=pytest.mark.needs_kernel("wireguard")),
    ],
)
def test_mtu_follows_a_path_that_loses_larger_packets(
    lab: Lab, backend: str, device: str, inner: int, lower: int
) -> None:
    """A container that was made before goes on sending packets of its own size, and these arrive."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": backend}})
    (node,), (peer,) = lab.add_nodes(1), lab.add_nodes(1, routed=True)

    def start(*flags: str) -> None:
        for each in (node, peer):
            environment = {"WIREGUARD_KEY_FILE": str(each.directory / "wgkey")}
            each.start(f"--healthz-port={HEALTH_PORT}", *flags, environment=environment)
        for each in (node, peer):
            each.wait_ready(60)

    def mtus() -> set[tuple[int, str]]:
        return {(device_mtu(each, device), each.env()["FLANNEL_MTU"]) for each in (node, peer)}

    start("--follow-path-mtu")
    connect(node, peer)
    for each in (node, peer):
        each.namespace.ip("link set eth0 gso_max_segs 1")  # what is dropped below are packets, as on a wire
    before, target = node.container(), peer.container().address
    large = ("ping", "-n", "-c", "1", "-W", "1", "-M", "dont", "-s", str(inner - 28), target)
    assert before.run(*large).returncode == 0
    lab.switch.run(
        "nft", "-f", "-", stdin="table ip narrow { chain c { type filter hook forward priority 0;"
        " meta length > 1400 drop; ip frag-off & 0x3fff != 0 drop; }; }"
    )  # fmt: skip
    assert before.run(*large, check=False).returncode != 0
    with before.ping(target) as ping:
        for each in (node, peer):
            each.wait_for_log(f"Lowered the MTU to {lower}, from {inner}: the path to", 120)
        wait_for(lambda: mtus() == {(lower, str(lower))}, 20, "the lower MTU on both nodes")
        before.run(*large)
        ping.wait_for_replies()
        ping.stop()
    assert ping.lost() == 0
    assert all(" has mtu " not in each.log() for each in (node, peer))
    assert f"{lower}, lowered from {inner} by -follow-path-mtu" in flannelctl(node, "status").stdout
    metrics = node.run("curl", "-s", f"http://127.0.0.1:{HEALTH_PORT}/metrics").stdout
    assert f"flannel_mtu_lowered_bytes {inner - lower}.0" in metrics
    for flags, mtu in ((["--follow-path-mtu"], lower), ([], inner)):
        for each in (node, peer):
            each.stop()
        start(*flags)
        assert mtus() == {(mtu, str(mtu))}


def test_flags_without_effect_are_named(lab: Lab) -> None:
    (node,) = lab.cluster(
        {"Type": "host-gw"}, nodes=1, flags=("--follow-path-mtu", "--public-name=home.example.org")
    )
    node.wait_for_log("-follow-path-mtu has no effect: host-gw has no tunnel")
    node.wait_for_log("-public-name has no effect")
