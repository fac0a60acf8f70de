"""What ``flanneld --cleanup`` finds and removes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab import Lab, Node
from tests.lab.daemon import own_command


def cleanup(node: Node, *flags: str) -> list[str]:
    done = node.run(*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup", *flags)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("flags", [[], ["--ip-masq"], ["--ip-masq", "--iptables-rules=v0.12"]])
def test_nothing_of_flannel_is_left_and_nothing_else_is_touched(
    lab: Lab, backend: dict[str, str], flags: list[str]
) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    node, peer = lab.add_nodes(2)
    before = (node.routes(), node.run("iptables-save").stdout, node.link("flannel.1"))
    for each in (node, peer):
        each.start("--ip-blackhole-route", *flags)
        each.wait_ready()
    node.wait_for_route(peer.subnet())
    node.wait_for_log("Set ")
    node.stop()

    announced = cleanup(node, "--dry-run")
    assert node.wait_for_route(peer.subnet())
    removed = cleanup(node)
    assert [line.replace("would remove", "removed") for line in announced] == removed
    assert any(peer.subnet() in line for line in removed)
    assert any("rule" in line for line in removed)

    assert node.routes() == before[0]
    assert node.link("flannel.1") == before[2]
    assert not node.subnet_file.exists()
    assert "10.5." not in node.run("iptables-save").stdout
    assert "FLANNEL" not in node.run("iptables-save").stdout
    assert cleanup(node) == []


def test_the_routes_that_a_go_flanneld_left_are_found(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}})
    (node,) = lab.add_nodes(1)
    node.start()
    node.wait_ready()
    node.stop()
    node.namespace.ip(
        "route add 10.5.0.0/24 via 198.18.0.99 dev eth0", "route add 192.0.2.0/24 via 198.18.0.99 dev eth0"
    )
    assert any(line.startswith("removed route 10.5.0.0/24") for line in cleanup(node))
    assert [route["dst"] for route in node.routes() if route.get("gateway") == "198.18.0.99"] == [
        "192.0.2.0/24"
    ]


def test_what_cannot_be_removed_is_said_and_shows_in_the_status(lab: Lab, tmp_path: Path) -> None:
    (node,) = lab.add_nodes(1)
    node.run("iptables-nft", "-N", "FLANNEL-FWD")
    broken = tmp_path / "iptables-nft-restore"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 4\n")
    broken.chmod(0o755)
    command = (*own_command(), f"--subnet-file={node.subnet_file}", "--cleanup")
    done = node.run("env", f"PATH={tmp_path}:{os.environ['PATH']}", *command, check=False)
    assert done.returncode == 1
    assert "could not remove rules for IPv4: iptables-nft-restore" in done.stdout
    assert "out of order" in done.stdout
    assert node.run(*command).stdout == "removed rule iptables-nft: filter FLANNEL-FWD\n"
