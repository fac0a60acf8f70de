"""What a host has of its own stays, whatever the leases claim: networks, addresses, gateways and routes."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import Daemon, own_command
from tests.netns.apis import both_apis
from tests.netns.go_daemon import write_as_go
from tests.netns.pair import DUAL_STACK, SOON, connect
from tests.netns.test_cleanup import cleanup
from tests.netns.test_seeing import answer, findings

#: No node gets a subnet below, so that leases there are of peers only.
ABOVE = {"SubnetMin": "10.5.100.0", "IPv6SubnetMin": "fc00:5:0:100::"}
SUBNET = {4: "10.5.55.0/24", 6: "fc00:5:0:55::/64"}
OTHER = {4: "10.5.56.0/24", 6: "fc00:5:0:56::/64"}
PEER = {4: "198.18.0.77", 6: "fd00:18::77"}
MAC = "02:00:00:00:00:77"

BRIDGE = ("link add br7 type bridge", "link set br7 up")
#: What a host may have where a lease leads, as commands of ip.
OBSTACLES: dict[str, dict[int, tuple[str, ...]]] = {
    "a bridge with just this network": {
        4: (*BRIDGE, "address add 10.5.55.1/24 dev br7"),
        6: (*BRIDGE, "address add fc00:5:0:55::1/64 dev br7 nodad"),
    },
    "a bridge with a part of it": {
        4: (*BRIDGE, "address add 10.5.55.129/28 dev br7"),
        6: (*BRIDGE, "address add fc00:5:0:55::1/112 dev br7 nodad"),
    },
    "a network of metric 100, as NetworkManager makes it": {
        4: (
            *BRIDGE,
            "address add 10.5.55.1/24 dev br7 noprefixroute",
            "route add 10.5.55.0/24 dev br7 proto kernel scope link src 10.5.55.1 metric 100",
        ),
        6: (
            *BRIDGE,
            "address add fc00:5:0:55::1/64 dev br7 nodad noprefixroute",
            "route add fc00:5:0:55::/64 dev br7 proto kernel metric 100",
        ),
    },
    "a network that DHCP or a router told of": {
        4: (*BRIDGE, "route add 10.5.55.0/24 dev br7 proto dhcp scope link metric 1002"),
        6: (*BRIDGE, "route add fc00:5:0:55::/64 dev br7 proto ra metric 100"),
    },
    "a single address": {
        4: ("address add 10.5.55.7/32 dev lo",),
        6: ("address add fc00:5:0:55::7/128 dev lo",),
    },
    "a gateway": {
        4: ("route add 203.0.113.0/24 via 10.5.55.3 dev eth0 onlink",),
        6: ("route add 2001:db8::/32 via fc00:5:0:55::3 dev eth0 onlink",),
    },
}


def lease(backend: str, public_ips: dict[int, str] | None = None, mac: str = MAC) -> dict[str, Any]:
    public_ips = PEER | (public_ips or {})
    told: dict[str, Any] = {"PublicIP": public_ips[4], "PublicIPv6": public_ips[6]}
    if backend != "udp":
        told["BackendType"] = backend
    if backend == "vxlan":
        told |= {"BackendData": {"VtepMAC": mac}, "BackendV6Data": {"VtepMAC": mac}}
    return told


def key(subnets: dict[int, str], families: tuple[int, ...]) -> str:
    return "&".join(subnets[family] for family in families)


def main_table(node: Node) -> dict[int, list[str]]:
    """All routes that flannel did not make.

    Without the flag of a link that has no carrier: a new link gets it a moment later.
    """
    return {
        family: [
            row.replace(" linkdown", "")
            for row in node.run("ip", f"-{family}", "route", "show").stdout.splitlines()
            if "dev flannel" not in row and "proto 70" not in row
        ]
        for family in (4, 6)
    }


def led_to(node: Node, subnet: str) -> list[Any]:
    """What of flannel's leads to a peer's subnet."""
    base = subnet.partition("/")[0]
    found: list[Any] = []
    for family, device in ((4, "flannel.1"), (6, "flannel-v6.1")):
        found += [each for each in node.neighbors(device, family) if each["dst"] == base]
        routes = node.routes(family=family)
        found += [each for each in routes if each["dst"] == subnet and is_flannels(each)]
    return found


def state(node: Node) -> str:
    """What the node tells of the peer with SUBNET."""
    peers = answer(node, "peers")["peers"]
    return next((each["state"] for each in peers if SUBNET[4] in each["subnets"]), "")


def is_flannels(route: dict[str, Any]) -> bool:
    return route.get("protocol") == "70" or route["dev"].startswith("flannel")


def start(lab: Lab, backend: dict[str, Any], *obstacles: str, after_go: bool = False, **config: Any) -> Node:
    """Start a node that has obstacles already, ``after_go`` on a host where Go flanneld ran before."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend, **ABOVE, **config})
    (node,) = lab.add_nodes()
    node.namespace.ip(*obstacles)
    if after_go:
        write_as_go(node)
    node.start()
    node.wait_ready()
    node.wait_for_log("In sync with")
    return node


def wait_until_led(node: Node, *subnets: str) -> None:
    wait_for(lambda: all(led_to(node, each) for each in subnets), SOON, f"ways to {subnets}")


@dataclass(frozen=True, slots=True)
class Stack:
    """The families of a network, with what that adds to its config."""

    families: tuple[int, ...]

    @property
    def config(self) -> dict[str, Any]:
        return DUAL_STACK if 6 in self.families else {}


@pytest.fixture(params=[(4,), (4, 6)], ids=["IPv4", "dual stack"])
def stack(request: pytest.FixtureRequest) -> Stack:
    return Stack(request.param)


# ---- networks, addresses and gateways -------------------------------------------------------------


@pytest.mark.parametrize("what", OBSTACLES)
def test_lease_over_hosts_own_network_changes_nothing(
    lab: Lab, backend: dict[str, Any], stack: Stack, what: str
) -> None:
    obstacle = OBSTACLES[what][stack.families[-1]]
    node = start(lab, backend, *obstacle, **stack.config)
    before = main_table(node)
    with node.changes() as changes:
        lab.etcd.put_lease(key(SUBNET, stack.families), lease(backend["Type"]))
        node.wait_for_log(f"Unsafe lease {SUBNET[4]}")
        lab.etcd.put_lease(key(OTHER, stack.families), lease(backend["Type"], mac="02:00:00:00:00:78"))
        wait_until_led(node, *(OTHER[family] for family in stack.families))
        assert not [line for line in changes.during(0.1) if any(net in line for net in SUBNET.values())]
    assert main_table(node) == before
    lab.etcd.delete_lease(key(SUBNET, stack.families))
    node.wait_for_log(f"Subnet removed: {SUBNET[4]}")
    node.stop()
    assert main_table(node) == before
    cleanup(node)
    assert main_table(node) == before


#: Networks that hold the uplink's own, by family: the config, the lease that claims it, and a harmless one.
AROUND_UPLINK: dict[int, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    4: (
        {"Network": "198.18.0.0/16", "SubnetMin": "198.18.128.0"},
        ("198.18.0.0/24",),
        ("198.18.7.0/24",),
    ),
    6: (
        {
            "Network": "10.5.0.0/16",
            "EnableIPv6": True,
            "IPv6Network": "fd00:18::/48",
            "IPv6SubnetMin": "fd00:18:0:100::",
        },
        ("10.5.155.0/24", "fd00:18::/64"),
        ("10.5.156.0/24", "fd00:18:0:7::/64"),
    ),
}


@both_apis
@pytest.mark.parametrize("family", [4, 6])
def test_uplinks_own_network_stays_in_place(lab: Lab, backend: dict[str, Any], family: int) -> None:
    """The host would be cut off from all others, and from the store."""
    config, claimed, harmless = AROUND_UPLINK[family]
    lab.etcd.put_config({**config, "Backend": backend})
    (node,) = lab.add_nodes()
    before = main_table(node)
    lab.etcd.put_lease("&".join(claimed), lease(backend["Type"], {4: "198.19.0.7", 6: "fd00:19::7"}))
    node.start()
    node.wait_ready()
    node.wait_for_log(f"Unsafe lease {','.join(claimed)}: eth0 ")
    assert main_table(node) == before
    lab.etcd.put_lease("&".join(harmless), lease(backend["Type"]))
    wait_until_led(node, *harmless)


@pytest.mark.parametrize("what", [name for name in OBSTACLES if name != "a gateway"])
def test_ways_to_peer_go_when_obstacle_appears_and_return_when_it_goes(
    lab: Lab, backend: dict[str, Any], stack: Stack, what: str
) -> None:
    family = stack.families[-1]
    lab.etcd.put_lease(key(SUBNET, stack.families), lease(backend["Type"]))
    node = start(lab, backend, **stack.config)
    subnets = [SUBNET[each] for each in stack.families]
    wait_until_led(node, *subnets)
    node.namespace.ip(*OBSTACLES[what][family])
    wait_for(lambda: not any(led_to(node, each) for each in subnets), SOON, "the ways to go")
    node.wait_for_log(f"Unsafe lease {SUBNET[4]}")
    for each in reversed(OBSTACLES[what][family]):
        # The words after the fifth say how it was made.
        if not each.startswith("link set"):
            node.run("ip", *each.replace(" add ", " delete ").split()[:5], check=False)
    wait_until_led(node, *subnets)
    node.wait_for_log("no longer harms this host")
    # The daemon may see the host between two commands, and tells each new reason.
    told = re.findall(rf"Unsafe lease {SUBNET[4]}.*", node.log())
    assert told == [each for each, _ in groupby(told)]
    commands = [each for each in OBSTACLES[what][family] if each not in BRIDGE]
    assert len(told) <= 2 * len(commands) - 1


def test_ways_to_peer_return_when_gateway_goes(lab: Lab, backend: dict[str, Any]) -> None:
    lab.etcd.put_lease(SUBNET[4], lease(backend["Type"]))
    node = start(lab, backend, *OBSTACLES["a gateway"][4])
    node.wait_for_log(f"Unsafe lease {SUBNET[4]}: 10.5.55.3 is a gateway of this host through eth0")
    assert not led_to(node, SUBNET[4])
    node.namespace.ip("route delete 203.0.113.0/24")
    wait_until_led(node, SUBNET[4])


def test_unsafe_lease_is_health_condition_and_finding(lab: Lab) -> None:
    lab.etcd.put_lease(SUBNET[4], lease("vxlan"))
    node = start(lab, {"Type": "vxlan"}, *OBSTACLES["a bridge with just this network"][4])
    node.wait_for_log(f"Unsafe lease {SUBNET[4]}")
    (peer,) = (each for each in answer(node, "peers")["peers"] if each["subnets"] == [SUBNET[4]])
    assert peer["state"] == "unsafe"
    assert "br7 " in peer["reason"]
    conditions = {each["part"]: each["problem"] for each in answer(node, "status")["health"]["conditions"]}
    assert f"{SUBNET[4]}: br7 " in conditions["peers"]
    assert "unsafe leases" in findings(node)


def test_network_around_the_clusters_is_warned_of_at_start(lab: Lab, backend: dict[str, Any]) -> None:
    lab.etcd.put_lease(SUBNET[4], lease(backend["Type"]))
    node = start(lab, backend, *BRIDGE, "address add 10.200.0.1/8 dev br7")
    node.wait_for_log("Network overlap: br7 is connected to 10.0.0.0/8")
    wait_until_led(node, SUBNET[4])


def test_bridge_of_our_own_containers_is_no_obstacle(lab: Lab, backend: dict[str, Any], stack: Stack) -> None:
    one, other = lab.cluster(backend, **stack.config)
    connect(one, other)
    for node in (one, other):
        node.stop()
        node.start()
        node.wait_ready()
        node.wait_for_log("In sync with")
    connect(one, other)
    assert "Unsafe" not in one.log() + other.log()


def test_second_daemon_on_host_is_no_obstacle(lab: Lab) -> None:
    other = {"Network": "10.6.0.0/16", "SubnetLen": 24, "Backend": {"Type": "vxlan", "VNI": 7}}
    lab.etcd.set("/other/config", json.dumps(other))
    nodes = lab.cluster({"Type": "vxlan"})
    daemons = []
    for node in nodes:
        flags = ["--etcd-prefix=/other", f"--subnet-file={node.directory / 'other.env'}"]
        command = [*own_command(), f"--etcd-endpoints={lab.etcd.endpoint}", *flags]
        daemons.append(Daemon(node.namespace, command, node.directory / "other.log", {}))
    try:
        for node in nodes:
            for device in ("flannel.1", "flannel.7"):
                wait_for(partial(node.routes, device), what=f"a way through {device}")
        logs = [*map(Node.log, nodes), *map(Daemon.log, daemons)]
    finally:
        ends = [daemon.end(signal.SIGTERM, 5) for daemon in daemons]
    assert [end.status for end in ends] == [0, 0]
    assert not [log for log in logs if "Unsafe" in log]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            ("address add 10.5.0.1/16 dev br7",),
            "br7 is connected to 10.5.0.0/16, and all of 10.5.0.0/16 would",
        ),
        (("route add 10.5.0.0/16 dev br7",), "route 10.5.0.0/16 dev br7 stands there and is not flannel's"),
    ],
    ids=["connected", "a route of others"],
)
def test_udp_daemon_ends_where_network_is_taken(lab: Lab, there: tuple[str, ...], said: str) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "udp"}})
    (node,) = lab.add_nodes()
    node.namespace.ip(*BRIDGE, *there)
    before = main_table(node)
    node.start()
    assert node.daemon.wait(20).status == 1
    assert said in node.log()
    assert main_table(node) == before


# ---- routes of others -----------------------------------------------------------------------------

#: Routes just where one to a peer would be, of kinds that no flanneld makes.
IN_THE_PLACE = {
    "another device": {4: "route add {} dev br7", 6: "route add {} dev br7"},
    "a blackhole": {4: "route add blackhole {}", 6: "route add blackhole {} metric 1024"},
    "a routing daemon's": {
        4: "route add {} via 198.18.0.254 proto bird",
        6: "route add {} via fd00:18::fe proto bird",
    },
}


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_route_of_others_stays_and_blocks_until_it_goes(
    lab: Lab, backend: dict[str, Any], stack: Stack, what: str
) -> None:
    family = stack.families[-1]
    foreign = IN_THE_PLACE[what][family].format(SUBNET[family])
    node = start(lab, backend, *BRIDGE, foreign, **stack.config)
    before = main_table(node)[family]
    lab.etcd.put_lease(key(SUBNET, stack.families), lease(backend["Type"]))
    node.wait_for_log(f"The routes are not in place: route {SUBNET[family]}")
    assert "stands there and is not flannel's" in node.log()
    assert main_table(node)[family] == before
    node.stop()
    node.start()
    node.wait_for_log("In sync with")
    assert main_table(node)[family] == before
    node.namespace.ip(foreign.replace(" add ", " delete "))
    wait_until_led(node, *(SUBNET[each] for each in stack.families))
    lab.etcd.delete_lease(key(SUBNET, stack.families))
    wait_for(lambda: not led_to(node, SUBNET[family]), SOON, "the way to go")


@pytest.mark.parametrize("family", [4, 6])
def test_route_that_go_left_with_another_gateway_is_replaced_in_place(
    lab: Lab, backend: dict[str, Any], family: int
) -> None:
    lab.etcd.put_lease(key(SUBNET, (4, 6)), lease(backend["Type"]))
    left = {4: "via 198.18.0.99 dev eth0", 6: "via fd00:18::99 dev eth0"}[family]
    node = start(lab, backend, f"route add {SUBNET[family]} {left}", after_go=True, **DUAL_STACK)
    wait_until_led(node, SUBNET[4], SUBNET[6])
    assert left not in str(main_table(node))
    assert "Refused" not in node.log()


def test_operators_route_that_is_as_ours_would_be_serves_and_stays(lab: Lab) -> None:
    node = start(lab, {"Type": "host-gw"})
    node.namespace.ip(f"route add {SUBNET[4]} via {PEER[4]} dev eth0 proto static")
    before = main_table(node)
    lab.etcd.put_lease(SUBNET[4], lease("host-gw"))
    node.wait_for_log(f"Subnet added: {SUBNET[4]} via")
    lab.etcd.put_lease(OTHER[4], lease("host-gw"))
    wait_until_led(node, OTHER[4])
    assert main_table(node) == before
    assert "Refused" not in node.log()
    lab.etcd.delete_lease(SUBNET[4])
    node.wait_for_log(f"Subnet removed: {SUBNET[4]}")
    lab.etcd.delete_lease(OTHER[4])
    wait_for(lambda: not led_to(node, OTHER[4]), SOON, "the other way to go")
    assert main_table(node) == before


# ---- public IPs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "public_ip",
    [
        pytest.param("198.18.0.201", id="a secondary address"),
        pytest.param("192.168.77.1", id="the address of a bridge"),
        pytest.param("198.18.0.255", id="the broadcast address of the link"),
        pytest.param("198.18.0.0", id="the network address of the link"),
        pytest.param("192.168.77.255", id="the broadcast address of another link"),
        pytest.param("10.5.56.9", id="an address in a leased subnet"),
        pytest.param("10.5.55.9", id="an address in the subnet of the lease"),
        pytest.param("own base", id="the tunnel's own address"),
        pytest.param("own container", id="an address in our own subnet"),
    ],
)
def test_public_ip_that_would_make_a_loop_is_refused(
    lab: Lab, any_backend: dict[str, Any], public_ip: str
) -> None:
    node = start(
        lab,
        any_backend,
        *BRIDGE,
        "address add 192.168.77.1/24 dev br7",
        "address add 198.18.0.201/24 dev eth0",
    )
    kind = any_backend["Type"]
    lab.etcd.put_lease(OTHER[4], lease(kind, mac="02:00:00:00:00:78"))
    base = node.subnet().partition("/")[0]
    public_ip = {"own base": base, "own container": base[:-1] + "9"}.get(public_ip, public_ip)
    lab.etcd.put_lease(SUBNET[4], lease(kind, {4: public_ip}))
    node.wait_for_log(f"Unsafe lease {SUBNET[4]}: it announces {public_ip}, ")
    assert not led_to(node, SUBNET[4])
    assert not [row for row in node.fdb("flannel.1") if row["dst"] == public_ip]
    wait_for(lambda: state(node) == "unsafe", SOON, "its state")
    lab.etcd.put_lease(SUBNET[4], lease(kind))
    node.wait_for_log("no longer harms this host")


@pytest.fixture(
    params=["vxlan", "host-gw", "udp", pytest.param("ipip", marks=pytest.mark.needs_kernel("ipip"))]
)
def any_backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Type": request.param}


@pytest.mark.parametrize("public_ip", ["198.18.0.1", "198.18.0.201", "192.168.77.1", "own base"])
def test_ping_to_peer_with_local_public_ip_makes_no_loop(lab: Lab, public_ip: str) -> None:
    node = start(
        lab,
        {"Type": "vxlan"},
        *BRIDGE,
        "address add 192.168.77.1/24 dev br7",
        "address add 198.18.0.201/24 dev eth0",
    )
    public_ip = public_ip.replace("own base", node.subnet().partition("/")[0])
    lab.etcd.put_lease(SUBNET[4], lease("vxlan", {4: public_ip}))
    node.wait_for_log(f"{SUBNET[4]} announces our own" if public_ip == node.address else "Unsafe lease")
    node.run("ping", "-c", "20", "-i", "0.01", "-W", "0.1", "10.5.55.9", check=False)
    statistics = node.namespace.json("ip", "-j", "-s", "link", "show", "dev", "flannel.1")
    assert statistics[0]["stats64"]["tx"]["packets"] <= 1  # a router solicitation, if any


def test_address_that_host_gets_later_withdraws_the_way_to_peer(
    lab: Lab, any_backend: dict[str, Any]
) -> None:
    lab.etcd.put_lease(SUBNET[4], lease(any_backend["Type"]))
    node = start(lab, any_backend)

    wait_for(lambda: state(node) == "in the kernel", SOON, "the way")
    node.namespace.ip(f"address add {PEER[4]}/32 dev lo")
    wait_for(lambda: state(node) == "unsafe", SOON, "the way to go")
    assert not led_to(node, SUBNET[4])
    node.namespace.ip(f"address delete {PEER[4]}/32 dev lo")
    wait_for(lambda: state(node) == "in the kernel", SOON, "the way to return")


def test_lease_around_public_ips_of_others_withdraws_them_until_it_goes(lab: Lab) -> None:
    """Packets for them would go into the tunnel that leads through them."""
    lab.etcd.put_lease(SUBNET[4], lease("vxlan", {4: "10.5.56.9"}))
    node = start(lab, {"Type": "vxlan"})
    wait_until_led(node, SUBNET[4])
    lab.etcd.put_lease(OTHER[4], lease("vxlan", mac="02:00:00:00:00:78"))
    wait_for(lambda: not led_to(node, SUBNET[4]), SOON, "the way to go")
    lab.etcd.delete_lease(OTHER[4])
    wait_until_led(node, SUBNET[4])


@pytest.mark.parametrize("api", ["v3"])
@pytest.mark.parametrize("claim", ["10.5.60.0/24", "10.5.32.0/19"])
def test_newcomers_subnet_around_the_public_ip_of_a_node_interrupts_nothing(lab: Lab, claim: str) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}, **ABOVE})
    node, other = lab.add_nodes(2)
    other.namespace.ip("address add 10.5.60.9/32 dev lo")
    node.namespace.ip(f"route add 10.5.0.0/18 via {other.address}")
    for each, flag in ((node, "-iface=eth0"), (other, "-public-ip=10.5.60.9")):
        each.start("-iface=eth0", flag)
        each.wait_ready()
    connect(node, other)
    with node.container().ping(other.container()) as ping:
        ping.wait_for_replies()
        lab.etcd.put_lease(claim, lease("vxlan"))
        node.wait_for_log(
            f"Unsafe lease {claim}: its subnet {claim} is around 10.5.60.9, the public IP of the older"
        )
        ping.wait_for_replies()
        node.stop()
        node.start("-iface=eth0")
        node.wait_ready()
        node.wait_for_log("In sync with")
        ping.wait_for_replies()
        ping.stop()
        assert ping.lost() == 0
    assert not led_to(node, claim)
    lab.etcd.put_lease(OTHER[4], lease("vxlan", mac="02:00:00:00:00:78"))
    wait_until_led(node, OTHER[4])
