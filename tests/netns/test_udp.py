"""The udp backend in real namespaces: what its packets and its pump go through."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.udp.client import NoProxy, ProxyClient, RunningProxy
from flanneld.network.rtnetlink.tables import AUDIT_PERIOD
from tests.lab import Lab, Node, own_command, wait_for
from tests.netns.exchange import check_content
from tests.netns.pair import Pair, connect, state
from tests.netns.test_capabilities import NOBODY, confined
from tests.netns.test_cleanup import cleanup

TUN = "flannel0"
PLANES = ["native", "python"]

#: As udev makes it: everybody may open it, and the capability decides.
OPEN_TUN = (
    'mount -t tmpfs tmpfs /dev/net; mknod -m 666 /dev/net/tun c 10 200; chmod 666 /dev/net/tun; exec "$@"'
)


@pytest.fixture(params=PLANES)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One for each data plane."""
    return {"Type": "udp", "DataPlane": request.param}


@pytest.fixture
def nodes(lab: Lab, backend: dict[str, Any]) -> list[Node]:
    """Two nodes whose containers reach each other."""
    nodes = lab.cluster(backend)
    connect(*nodes)
    return nodes


def pump_of(node: Node, tun: str = TUN) -> RunningProxy | None:
    """The pump of a node, asked as a daemon asks it."""
    with node.namespace.entered():
        client = ProxyClient(tun)
        try:
            return client.hello()
        except NoProxy:
            return None
        finally:
            client.close()


def pid_of(node: Node) -> int:
    pump = pump_of(node)
    assert pump
    return pump.pid


def replace(node: Node) -> None:
    """Kill the pump, and wait until there is another one."""
    before = pid_of(node)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: (pump := pump_of(node)) and pump.pid != before, what="another pump")


def counters(node: Node) -> dict[str, int]:
    with node.namespace.entered():
        client = ProxyClient(TUN)
        try:
            return client.counters()
        finally:
            client.close()


# ---- carrying packets ----------------------------------------------------------------------------


def test_packets_arrive_unchanged(nodes: list[Node]) -> None:
    one, other = nodes
    check_content(one.container(), other.container(), one.directory / "echo")
    check_content(other.container(), one.container(), other.directory / "echo")


def test_a_node_has_what_upstream_gives_it(nodes: list[Node]) -> None:
    node, _ = nodes
    base = node.subnet().partition("/")[0]
    link = node.link(TUN) or {}
    assert (link["mtu"], link["linkinfo"]["info_kind"], "UP" in link["flags"]) == (1472, "tun", True)
    assert f"{base}/32" in node.addresses(TUN)
    assert [(row["dst"], row.get("gateway")) for row in node.routes(TUN)] == [("10.5.0.0/16", None)]
    assert node.env()["FLANNEL_MTU"] == "1472"


@pytest.fixture(scope="module", params=PLANES)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Two nodes for tests that leave them as they were."""
    with Lab() as lab:
        one, other = lab.cluster({"Type": "udp", "DataPlane": request.param})
        connect(one, other)
        yield one, other


@pytest.mark.parametrize(
    ("flags", "answered"),
    [
        (("-M", "do", "-s", "1444"), True),
        (("-M", "do", "-s", "1445"), False),
        (("-s", "8000"), True),
        (("-s", "60000"), True),
    ],
)
def test_a_packet_up_to_the_mtu_passes_unfragmented(
    shared: tuple[Node, Node], flags: tuple[str, ...], answered: bool
) -> None:
    one, other = shared
    done = one.container().run(
        "ping", "-n", "-c", "1", "-W", "30", *flags, other.container().address, check=False
    )
    assert (done.returncode == 0) is answered


def test_a_hop_costs_two(shared: tuple[Node, Node]) -> None:
    """Each host's own hop costs one more, on either side: so three are too few, and 64 arrive as 60."""
    one, other = shared

    def ping(*flags: str, patience: str = "30") -> str:
        command = ("ping", "-n", "-c", "1", "-W", patience, *flags, other.container().address)
        return one.container().run(*command, check=False).stdout

    assert "ttl=60" in ping()
    assert "ttl=60" in ping("-t", "5")
    for ttl in ("2", "3", "4"):
        assert "ttl=" not in ping("-t", ttl, patience="0.5")


def test_a_packet_for_nobody_is_counted_and_does_no_harm(shared: tuple[Node, Node]) -> None:
    one, other = shared
    before = counters(one)["no_route"]
    assert not one.container().reaches("10.5.255.77", 0.2)
    wait_for(lambda: counters(one)["no_route"] > before, what="the packet to be counted")
    assert one.container().reaches(other.container())


# ---- daemon and pump, each without the other -----------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_of_the_daemon_loses_nothing(nodes: list[Node], how: str) -> None:
    node, peer = nodes
    before = pid_of(node)
    with node.container().ping(peer.container()) as there, peer.container().ping(node.container()) as back:
        there.wait_for_replies()
        getattr(node, how)()
        there.wait_for_replies()
        node.start()
        node.wait_ready()
        node.wait_for_log("In sync with 1 peer")
        there.wait_for_replies()
        back.wait_for_replies()
        assert (there.lost(), back.lost()) == (0, 0)
    assert pid_of(node) == before
    assert "made 0 objects, removed 0" in node.log()


def test_a_killed_pump_is_replaced_at_once(nodes: list[Node]) -> None:
    node, peer = nodes
    with node.container().ping(peer.container()) as ping:
        for _ in range(3):
            ping.wait_for_replies()
            replace(node)
        ping.wait_for_replies()
        # Of fifty a second. An audit would have found the second and the third an audit's period later.
        assert ping.lost() < 50 * 2 * AUDIT_PERIOD
    healed = "Restored udp proxy of flannel0"
    wait_for(lambda: node.log().count(healed) == 3, what="three repairs in the log")


def test_a_pump_without_a_daemon_goes_on_and_takes_its_device_along_when_it_is_told_to_end(
    nodes: list[Node],
) -> None:
    node, peer = nodes
    node.kill()
    assert node.container().reaches(peer.container())
    # Another thread takes the signal: the wait of the main one goes on, as with a signal just before it.
    pid = pid_of(node)
    thread = next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid))
    ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM)
    wait_for(lambda: node.link(TUN) is None, what="the device to go")
    assert node.routes(TUN) == []


def test_peers_come_and_go_while_the_pump_runs(lab: Lab, nodes: list[Node]) -> None:
    node, _ = nodes
    before = pid_of(node)
    (third,) = lab.add_nodes()
    third.start()
    third.wait_ready()
    connect(node, third)
    third.stop()
    lab.etcd.delete_lease(third.subnet())
    wait_for(lambda: not node.container().reaches(third.container(), 0.1), what="the peer to be forgotten")
    assert pid_of(node) == before


def test_another_data_plane_takes_over_in_an_instant(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "udp", "DataPlane": "python"})
    connect(node, peer)
    with node.container().ping(peer.container()) as ping:
        ping.wait_for_replies()
        # One or two packets are lost. While a pump starts, a third of all would be. A busy machine may take
        # as much of one change, not of each.
        shares = []
        for plane in ("native", "python") * 3:
            answered = ping.replies()
            lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "udp", "DataPlane": plane}})
            node.stop()
            node.start()
            node.wait_ready()
            node.wait_for_log(f"Using the {plane} data plane")
            ping.wait_for_replies()
            passed = max(ping.replies()) - max(answered)
            shares.append(1 - len(ping.replies() - answered) / passed)
        assert min(shares[::2]) < 1 / 6
        assert min(shares[1::2]) < 1 / 6
    # It may be too busy to answer in time.
    pump = wait_for(lambda: pump_of(node), what="its answer")
    assert pump is not None
    assert pump.plane == "python"


def test_as_process_1_of_a_container_the_daemon_takes_the_pump_and_its_device_along(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "udp"}})
    (node,) = lab.add_nodes()
    contained = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM")
    node.start(command=[*contained, *own_command()])
    node.wait_ready()
    assert node.link(TUN)
    node.kill()  # Of unshare, which passes it on as SIGTERM.
    wait_for(lambda: node.link(TUN) is None, what="the device to go")


# ---- healing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "healed"),
    [
        (
            ["ip link del flannel0"],
            ["Restored link flannel0", "Restored udp proxy", "Restored peer {subnet}"],
        ),
        (["ip link set flannel0 down"], ["Restored link flannel0", "Restored route 10.5.0.0/16"]),
        (["ip link set flannel0 mtu 1300"], ["Restored link flannel0"]),
        (["ip route del 10.5.0.0/16"], ["Restored route 10.5.0.0/16"]),
        (["ip route replace 10.5.0.0/16 via {gateway}"], ["Restored route 10.5.0.0/16"]),
        (["ip address del {own}/32 dev flannel0"], ["Restored address {own}/32"]),
        (["ip route add 10.99.0.0/16 dev flannel0"], ["Removed route 10.99.0.0/16"]),
    ],
)
def test_changes_of_the_udp_tunnel_are_repaired(pair: Pair, commands: list[str], healed: list[str]) -> None:
    pair.check_healing(commands, healed)


@pytest.fixture(scope="module", params=PLANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Lab() as lab:
        node, peer = lab.cluster({"Type": "udp", "DataPlane": request.param})
        connect(node, peer)
        yield Pair(lab, node, peer, state(node))


def test_the_pump_follows_the_uplink(lab: Lab, nodes: list[Node]) -> None:
    node, peer = nodes
    node.namespace.ip("link set eth0 mtu 1400")
    wait_for(lambda: (pump := pump_of(node)) and pump.settings.mtu == 1372, what="another pump")
    connect(node, peer)
    node.namespace.ip(
        "address del 198.18.0.1/24 dev eth0",
        "address add 198.18.0.77/24 dev eth0",
        "route add default via 198.18.0.254",
    )
    wait_for(
        lambda: (pump := pump_of(node)) and str(pump.settings.local) == "198.18.0.77", 10, "another pump"
    )
    wait_for(lambda: "198.18.0.77" in str(lab.etcd.leases()), what="the lease to follow")
    node.container().wait_for_reply(peer.container())


def test_several_daemons_on_a_host_have_a_device_each(lab: Lab) -> None:
    first, peer = lab.cluster({"Type": "udp"})
    connect(first, peer)
    lab.etcd.set("/other/config", '{"Network": "10.6.0.0/16", "Backend": {"Type": "udp", "Port": 8286}}')
    second = Node(first.namespace, 9, lab.etcd.endpoint, lab.directory / "second", 18)
    second.start("--etcd-prefix=/other")
    second.wait_ready()
    assert [row["dst"] for row in second.routes("flannel1")] == ["10.6.0.0/16"]
    connect(first, peer)
    second.kill()
    second.start("--etcd-prefix=/other")
    second.wait_ready()
    assert pump_of(first, "flannel2") is None
    second.close()


def test_another_network_goes_through_the_same_device(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "udp"})
    lab.etcd.put_config({"Network": "10.6.0.0/16", "Backend": {"Type": "udp"}})
    for node in nodes:
        node.stop()
        node.start()
        node.wait_ready()
        node.wait_for_no_route("10.5.0.0/16")
        assert [row["dst"] for row in node.routes("flannel0")] == ["10.6.0.0/16"]
        assert node.link("flannel1") is None
    connect(*nodes)


@pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "nobody"])
def test_two_capabilities_and_the_device_are_enough(lab: Lab, backend: dict[str, Any], user: int) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    nodes = lab.add_nodes(2)
    for node in nodes:
        confined_command = (
            "unshare",
            "--mount",
            "sh",
            "-ec",
            OPEN_TUN,
            "sh",
            *confined(node, user),
            "-m",
            "flanneld",
        )
        node.start("--subnet-file=/mnt/node/run/subnet.env", command=confined_command)
        node.subnet_file = node.directory / "run/subnet.env"
    for node in nodes:
        node.wait_ready()
    connect(*nodes)


# ---- leaving -------------------------------------------------------------------------------------


def test_cleanup_leaves_nothing(nodes: list[Node]) -> None:
    node, _ = nodes
    node.stop()
    pump = pump_of(node)
    assert pump
    announced = cleanup(node, "--dry-run")
    assert pump_of(node)
    removed = cleanup(node)
    assert [line.replace("would remove", "removed") for line in announced] == removed
    assert f"removed udp proxy of flannel0 on 198.18.0.1:8285, process {pump.pid}" in removed
    assert (node.link(TUN), pump_of(node)) == (None, None)
    assert cleanup(node) == []


# ---- bad input -----------------------------------------------------------------------------------

HOLD = """
import signal, socket
held = socket.socket(type=socket.SOCK_DGRAM)
held.bind(("198.18.0.1", 8285))
signal.pause()
"""
HIDE_TUN = 'mount -t tmpfs tmpfs /dev/net && exec "$@"'
#: As the kernel makes it, where no udev runs; its owner is one that the daemon is not.
CLOSED_TUN = f"""
mount -t tmpfs tmpfs /dev/net; mknod -m 600 /dev/net/tun c 10 200; chown {NOBODY} /dev/net/tun
exec setpriv --inh-caps=-dac_override --bounding-set=-dac_override "$@"
"""
NO_RIGHTS = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")


def lonely(lab: Lab, backend: dict[str, Any] | None = None) -> Node:
    """A node of a udp network whose daemon is yet to be started."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "udp", **(backend or {})}})
    return lab.add_nodes()[0]


def test_a_port_in_use_is_waited_for_and_its_holder_is_named(lab: Lab) -> None:
    node = lonely(lab)
    with (node.directory / "holder").open("wb") as output:
        holder = node.namespace.start("/usr/bin/python3", "-c", HOLD, output=output)
    wait_for(lambda: ":8285" in node.run("ss", "-Hlun").stdout, what="the port to be taken")
    node.start()
    (line,) = node.wait_for_log("Waiting for the kernel", 10)
    assert re.search(
        rf"198\.18\.0\.1:8285, UDP: in use by process {holder.pid} \(.*\), which has to be stopped", line
    )
    assert not node.env()
    holder.kill()
    holder.wait()
    node.wait_ready()


def test_without_dev_net_tun_the_daemon_ends_and_names_the_remedy(lab: Lab) -> None:
    node = lonely(lab)
    daemon = node.start(command=["unshare", "--mount", "sh", "-c", HIDE_TUN, "sh", *own_command()])
    assert daemon.wait(10).status == 1
    assert "no /dev/net/tun; load the module with `modprobe tun`, or give the container" in daemon.log()


def test_without_access_to_the_device_the_daemon_ends_and_names_the_remedy(lab: Lab) -> None:
    node = lonely(lab)
    command = ["unshare", "--mount", "sh", "-ec", CLOSED_TUN, "sh", *own_command()]
    daemon = node.start("--ip-blackhole-route", command=command)
    assert daemon.wait(10).status == 1
    assert "let everybody open /dev/net/tun, as udev does (chmod 666)" in daemon.log()
    assert "blackhole" not in node.run("ip", "route").stdout


def test_without_the_capability_the_daemon_ends_and_names_it(lab: Lab) -> None:
    node = lonely(lab)
    daemon = node.start(command=[*NO_RIGHTS, *own_command()])
    assert daemon.wait(10).status == 1
    assert "CAP_NET_ADMIN" in daemon.log()


def test_a_peer_whose_public_ip_is_no_hosts_is_refused_and_the_rest_goes_on(
    lab: Lab, nodes: list[Node]
) -> None:
    node, peer = nodes
    for number, public_ip in enumerate(("127.0.0.1", "224.0.0.5", "255.255.255.255")):
        lab.etcd.put_lease(f"10.5.{250 + number}.0/24", {"PublicIP": public_ip})
        node.wait_for_log(f"{public_ip}, which is no host's")
    connect(node, peer)


def test_an_uplink_with_a_small_mtu_works(lab: Lab, backend: dict[str, Any]) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    one, other = lab.add_nodes(2)
    for node in (one, other):
        node.namespace.ip("link set eth0 mtu 500")
        node.start()
        node.wait_ready()
    assert one.env()["FLANNEL_MTU"] == "472"
    connect(one, other)
    assert one.container().run("ping", "-c", "1", "-W", "30", "-s", "3000", other.container().address)


#: Noise in all lengths, and packets cut short anywhere, from a host and port that are given.
FLOOD = """
import os, random, socket, sys, time
target, seconds = sys.argv[1], float(sys.argv[2])
out = socket.socket(type=socket.SOCK_DGRAM)
whole = bytes.fromhex("4500005400004000401100000a0501020a050202") + bytes(64)
end = time.monotonic() + seconds
while time.monotonic() < end:
    for _ in range(100):
        noise, cut = os.urandom(random.randrange(0, 1472)), whole[: random.randrange(0, 85)]
        out.sendto(random.choice((noise, cut)), (target, 8285))
"""


@pytest.mark.parametrize("accept_any", [False, True], ids=["peers only", "anybody"])
def test_garbage_at_full_rate_is_counted_and_stops_nothing(
    lab: Lab, backend: dict[str, Any], accept_any: bool
) -> None:
    node, peer = lab.cluster(backend | {"AcceptAnySource": accept_any})
    connect(node, peer)
    (stranger,) = lab.add_nodes()
    before, pid = counters(node), pid_of(node)

    def grown(*names: str) -> bool:
        now = counters(node)
        return all(now[name] > before[name] for name in names)

    for source, counted in (
        (stranger, ["malformed" if accept_any else "not_a_peer"]),
        (peer, ["received_packets", "malformed"]),
    ):

        def flooded(source: Node = source, counted: list[str] = counted) -> bool:
            """A slow plane takes few of them from its buffer, so perhaps none of a kind."""
            source.run("/usr/bin/python3", "-c", FLOOD, "198.18.0.1", "0.5")
            return grown(*counted)

        wait_for(flooded, 10, f"{counted} to be counted")
    assert grown("not_a_peer") is not accept_any
    connect(node, peer)
    assert pid_of(node) == pid
    assert not [line for line in node.log().splitlines() if line.startswith(("W", "E"))]


def test_strangers_are_not_listened_to_unless_that_is_asked_for(lab: Lab, nodes: list[Node]) -> None:
    node, peer = nodes
    (stranger,) = lab.add_nodes()
    before = counters(node)
    stranger.run("/usr/bin/python3", "-c", FLOOD, "198.18.0.1", "0.1")
    # A slow plane is not yet through with what lies in its buffer.
    wait_for(lambda: counters(node)["not_a_peer"] > before["not_a_peer"], what="strangers to be counted")
    assert counters(node)["received_packets"] == before["received_packets"]
    connect(node, peer)
