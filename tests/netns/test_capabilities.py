"""The daemon with no more rights than flanneld.service gives it: two capabilities, and none to be gained."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.lab import NETWORK

# linux/capability.h
NET_ADMIN_AND_NET_RAW = 1 << 12 | 1 << 13
NOBODY = 65534

#: What the daemon needs may lie where only root may look, and so may the node's files: it sees all of it
#: below /mnt. ``ip netns exec`` gives it a view of the file system of its own.
CONFINED = """
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/python /mnt/site /mnt/source /mnt/node
mount --bind "$1" /mnt/python
mount --bind "$2" /mnt/site
mount --bind "$3" /mnt/source
mount --bind "$4" /mnt/node
chown -R "$5:$5" /mnt/node
user=$5
shift 5
export PYTHONPATH=/mnt/source:/mnt/site LD_LIBRARY_PATH=/mnt/python/lib NOTIFY_SOCKET=/mnt/node/notify
cd /
exec setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
    --inh-caps=-all,+net_admin,+net_raw --ambient-caps=-all,+net_admin,+net_raw \
    --bounding-set=-all,+net_admin,+net_raw \
    /mnt/python/bin/python3 -S "$@"
"""
CHECK_HOST = """
from flanneld.compat import glog
from flanneld.network import host_settings
glog.setup()
host_settings.report((4, 6), "eth0")
"""

#: The flags and the config that lead to each kind of rules, and what shows them and takes them away.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nft": (("--iptables-flavour=nft",), {}),
    "legacy": (("--iptables-flavour=legacy", "--iptables-resync=1"), {}),
    "nftables": ((), {"EnableNFTables": True}),
}
RULES = {
    "nft": "iptables-nft -w -t nat -S FLANNEL-POSTRTG",
    "legacy": "iptables-legacy -w -t nat -S FLANNEL-POSTRTG",
    "nftables": "nft list chain ip flannel-ipv4 postrtg",
}
FLUSHES = {
    "nft": "iptables-nft -w -t nat -F FLANNEL-POSTRTG",
    "legacy": "iptables-legacy -w -t nat -F FLANNEL-POSTRTG",
    "nftables": "nft flush chain ip flannel-ipv4 postrtg",
}


@pytest.fixture(params=[pytest.param(0, id="root"), pytest.param(NOBODY, id="nobody")])
def user(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def cluster(lab: Lab, backend: dict[str, Any], user: int) -> list[Node]:
    """Two nodes whose daemons have only what the service file grants."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
    nodes = lab.add_nodes(2)
    for node in nodes:
        start(node, user)
    for node in nodes:
        node.wait_ready()
    return nodes


def start(node: Node, user: int, *flags: str) -> None:
    node.start(
        "--subnet-file=/mnt/node/run/subnet.env",
        *flags,
        command=(*confined(node, user), "-m", "flanneld"),
        environment={"XTABLES_LOCKFILE": "/mnt/node/xtables.lock"},
    )
    node.subnet_file = node.directory / "run/subnet.env"


def confined(node: Node, user: int) -> tuple[str, ...]:
    """A Python that has only these rights; what it is to do comes after this."""
    places = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), str(node.directory))
    return ("sh", "-ec", CONFINED, "sh", *places, str(user))


def read(node: Node, setting: str) -> str:
    with node.namespace.entered():
        return Path("/proc/sys", setting).read_text()


def status(node: Node) -> dict[str, str]:
    """What the kernel says of the daemon's process (proc(5))."""
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def rules(node: Node, way: str) -> str:
    return node.run(*RULES[way].split()).stdout


def test_the_daemon_has_exactly_two_capabilities_for_good(lab: Lab, user: int) -> None:
    node, _ = cluster(lab, {"Type": "vxlan"}, user)
    found = status(node)
    assert found["Uid"].split() == [str(user)] * 4
    assert found["NoNewPrivs"] == "1"
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(found[kind], 16) == NET_ADMIN_AND_NET_RAW, kind


def test_two_nodes_are_one_network(lab: Lab, backend: dict[str, Any], user: int) -> None:
    first, second = cluster(lab, backend, user)
    first.container().wait_for_reply(second.container())
    assert first.env()["FLANNEL_NETWORK"] == NETWORK
    assert not [line for node in (first, second) for line in node.log().splitlines() if line[0] in "WEF"]


def test_a_deleted_device_is_made_again(lab: Lab, user: int) -> None:
    first, second = cluster(lab, {"Type": "vxlan"}, user)
    first.container().wait_for_reply(second.container())
    before = (first.link("flannel.1") or {})["address"]
    first.namespace.ip("link del flannel.1")
    first.container().wait_for_reply(second.container())
    assert (first.link("flannel.1") or {})["address"] == before


def test_the_tunnel_takes_no_router_advertisements(lab: Lab, user: int) -> None:
    for node in cluster(lab, {"Type": "vxlan"}, user):
        assert read(node, "net/ipv6/conf/flannel.1/accept_ra") == "0\n"


@pytest.mark.parametrize("way", WAYS)
def test_the_rules_are_set_and_kept(lab: Lab, user: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, config = WAYS[way]
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}, **config})
    (node,) = lab.add_nodes(1)
    monkeypatch.setenv("XTABLES_LOCKFILE", str(node.directory / "xtables.lock"))
    start(node, user, "--ip-masq", *flags)
    node.wait_ready()
    before = rules(node, way)
    assert "224.0.0.0/4" in before
    node.run(*FLUSHES[way].split())
    wait_for(lambda: rules(node, way) == before, what="the rules to be back")


def test_forwarding_can_be_turned_on(lab: Lab, user: int) -> None:
    (node,) = lab.add_nodes(1)
    forwarding = ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding")
    for setting in forwarding:
        node.namespace.sysctl(setting, 0)
    assert node.run(*confined(node, user), "-c", CHECK_HOST).stderr.count("mended by") == 2
    assert [read(node, setting) for setting in forwarding] == ["1\n", "1\n"]


def test_a_restart_takes_the_lease_it_had(lab: Lab, user: int) -> None:
    first, second = cluster(lab, {"Type": "vxlan"}, user)
    subnet = first.subnet()
    assert first.stop().status == 0
    start(first, user)
    first.wait_ready()
    assert first.subnet() == subnet
    first.container().wait_for_reply(second.container())
    wait_for(lambda: len(lab.etcd.leases()) == 2, what="two leases")
