"""What stands in the way of forwarding, on a real kernel."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for

SCRIPT = """
from flanneld.compat import glog
from flanneld.network import host_settings
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.runtime import clock
glog.setup()
host_settings.report((4, 6), "eth0", services=True)
table = host_settings.KernelForwardingTable((4, 6), lambda: "eth0", keep=False)
Reconciler([table], desired_by_table(table.desired), lambda: False).converge(clock.now())
"""
REPORT = (sys.executable, "-c", SCRIPT)
#: The same where nothing in /proc/sys can be changed, as in a container without privileges.
READ_ONLY = (
    "sh",
    "-ec",
    'mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys; exec "$@"',
    "sh",
    *REPORT,
)


@pytest.fixture
def node(lab: Lab) -> Node:
    """A host that forwards nothing, and has all else in order."""
    (node,) = lab.add_nodes(1)
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    node.namespace.sysctl("net/ipv6/conf/all/forwarding", 0)
    for name in ("all", "eth0"):
        node.namespace.sysctl(f"net/ipv4/conf/{name}/rp_filter", 0)
    return node


def report(node: Node, command: tuple[str, ...] = REPORT) -> list[str]:
    """The lines that a report logs, without those about br_netfilter, which this host may lack."""
    lines = node.run(*command).stderr.splitlines()
    return [line for line in lines if "br_netfilter" not in line and "net.bridge" not in line]


def setting(node: Node, path: str) -> int:
    with node.namespace.entered():
        return int(Path("/proc/sys", path).read_text())


def test_forwarding_is_turned_on_and_that_is_said_once(node: Node) -> None:
    ipv4, ipv6 = report(node)
    assert ipv4.startswith("I")
    assert "mended by: sysctl -w net.ipv4.ip_forward=1" in ipv4
    assert "mended by: sysctl -w net.ipv6.conf.all.forwarding=1" in ipv6
    assert setting(node, "net/ipv4/ip_forward") == setting(node, "net/ipv6/conf/all/forwarding") == 1
    assert report(node) == []


def test_unwritable_setting_is_reported_with_its_command(node: Node) -> None:
    (line,) = report(node, READ_ONLY)
    assert line.startswith("W")
    assert line.endswith(", and 1 more; run as root: sysctl -w net.ipv4.ip_forward=1")
    assert setting(node, "net/ipv4/ip_forward") == setting(node, "net/ipv6/conf/all/forwarding") == 0


def test_a_default_route_from_router_advertisements_outlives_the_change(lab: Lab, node: Node) -> None:
    node.run("ip", "-6", "route", "del", "default")
    node.namespace.sysctl("net/ipv6/conf/eth0/accept_ra", 1)
    _advertise(lab)
    wait_for(lambda: _has_ipv6_default(node), what="a default route from the advertisement")
    _, ipv6 = report(node)
    assert "sysctl -w net.ipv6.conf.eth0.accept_ra=2 net.ipv6.conf.all.forwarding=1" in ipv6
    assert setting(node, "net/ipv6/conf/all/forwarding") == 1
    assert _has_ipv6_default(node)


def test_a_strict_uplink_beside_another_default_route_is_reported(node: Node) -> None:
    report(node)
    node.namespace.ip(
        "link add eth1 type bridge",
        "link set eth1 up",
        "route replace default dev eth1",
    )
    assert report(node) == []
    node.namespace.sysctl("net/ipv4/conf/all/rp_filter", 1)
    (line,) = report(node)
    assert line.endswith("run as root: sysctl -w net.ipv4.conf.eth0.rp_filter=2")


def test_a_strict_uplink_with_a_way_to_other_networks_is_in_order(node: Node) -> None:
    report(node)
    node.namespace.sysctl("net/ipv4/conf/all/rp_filter", 1)
    assert report(node) == []
    node.namespace.ip(
        "link add eth1 type bridge",
        "link set eth1 up",
        "route add 192.0.2.0/24 via 198.18.0.254",
        "route replace default dev eth1",
    )
    assert report(node) == []


def _advertise(lab: Lab) -> None:
    """One router advertisement (RFC 4861, 4.2) from the switch, which is a router for half an hour."""
    with lab.switch.entered(), socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as raw:
        raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)

        def sent() -> bool:
            """Send it, unless the switch's own address is still being checked for duplicates."""
            with suppress(OSError):
                return raw.sendto(body, ("ff02::1", 0, 0, socket.if_nametoindex("br0"))) > 0
            return False

        wait_for(sent, what="an address of the switch")


def _has_ipv6_default(node: Node) -> bool:
    return any(route["dst"] == "default" for route in node.routes("eth0", 6))
