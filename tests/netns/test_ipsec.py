"""The ipsec backend in whole clusters, with real charons: who talks to whom, and nothing in the clear."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.ipsec import charon as charon_process
from flanneld.backends.ipsec.resources import ConnectionSas, is_encapsulated
from flanneld.backends.ipsec.vici import text
from flanneld.network import xfrm_table
from flanneld.network.rtnetlink.netlink import NLM_F_REQUEST, message
from flanneld.network.xfrm import XfrmPolicy, guards, tunnel_policies
from flanneld.network.xfrm_table import open_xfrm, policies
from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, PSK, associations, charon_of, control, loaded, with_own_run
from tests.netns.kube import HEALTH_PORT, readiness, write_net_conf
from tests.netns.kube import start as start_with_kube
from tests.netns.pair import connect
from tests.netns.test_seeing import flannelctl
from tests.netns.traffic import Sniffer, Stream

pytestmark = pytest.mark.needs_kernel("esp")

DEVICE = "flannel-ipsec"
#: Seconds: two readings of charon, one of which waits for an answer as long as it may.
SOON = 40
SELDOM = """
from flanneld.backends.ipsec.tables import ConnectionTable
from flanneld.main import main

ConnectionTable.audit = 3600.0
main()
"""


def start(node: Node, *flags: str) -> None:
    health = f"--healthz-port={HEALTH_PORT}"
    node.start(health, *flags, command=with_own_run(node, *own_command()))


def cluster(lab: Lab, *flags: str, backend: Mapping[str, Any] = IPSEC) -> list[Node]:
    """Start two nodes whose containers reach each other."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": dict(backend)})
    started = lab.add_nodes(2)
    for node in started:
        start(node, *flags)
    for node in started:
        node.wait_ready()
    talk(*started)
    return started


def talk(node: Node, peer: Node) -> None:
    for one, other in itertools.permutations((node, peer)):
        connect(one, other)


def found(node: Node) -> set[XfrmPolicy]:
    with node.namespace.entered(), closing(open_xfrm()) as kernel:
        return set(policies(kernel))


def wanted(node: Node, *peers: Node) -> set[XfrmPolicy]:
    own, here = IPv4Network(node.subnet()), IPv4Address(node.address)
    tunnels = (
        tunnel_policies(own, IPv4Network(each.subnet()), here, IPv4Address(each.address)) for each in peers
    )
    return {*guards(IPv4Network(NETWORK), own), *itertools.chain.from_iterable(tunnels)}


def all_of(node: Node, peer: Node) -> tuple[list[str], list[str]]:
    """Return the names that charon has to know."""
    name = f"{node.address}-{node.subnet()}-{peer.subnet()}-{peer.address}"
    return [name], sorted(f"flannel-{each.address}" for each in (node, peer))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    with Lab() as lab:
        yield cluster(lab)


@contextmanager
def underlay(node: Node, peer: Node, directory: Path) -> Iterator[Callable[[], int]]:
    """Send to a peer's container all the time; yield what counts the packets that are readable outside."""
    target = peer.container().address
    with Sniffer(node.namespace, "eth0") as sniffer:
        stream = Stream(node.container().namespace, target, directory / "stream.log", 0.01)
        with stream:
            yield lambda: len(sniffer.listen(0.3))


# ---- what there is --------------------------------------------------------------------------------


def test_policies_and_mtu_are_upstreams(pair: list[Node]) -> None:
    node, peer = pair
    assert found(node) == wanted(node, peer)
    assert node.env()["FLANNEL_MTU"] == "1423"
    text = node.run("ip", "xfrm", "policy", "list", "dir", "out", "dst", peer.subnet()).stdout.split()
    template = f"tmpl src {node.address} dst {peer.address} proto esp reqid 11 mode tunnel"
    assert f"src {node.subnet()} dst {peer.subnet()} dir out priority 0 {template}" in " ".join(text)
    assert loaded(node) == all_of(node, peer)


def test_this_host_reaches_containers_of_peers_encrypted(pair: list[Node]) -> None:
    node, peer = pair
    assert node.addresses(DEVICE) == [f"{node.subnet().removesuffix('/24')}/32"]
    done = node.run("ping", "-n", "-c", "1", "-W", "10", peer.container().address, check=False)
    assert done.returncode == 0


def test_own_containers_reach_each_other_and_this_host(pair: list[Node]) -> None:
    node, _ = pair
    node.container(2).wait_for_reply(node.container())
    node.container().wait_for_reply(node.container(2))


def test_no_tool_shows_the_key(pair: list[Node]) -> None:
    node, peer = pair
    words = ("status", "peers", "routes", "events", "doctor")
    told = [flannelctl(node, word, f"--output={form}").stdout for word in words for form in ("table", "json")]
    assert all(told)
    assert peer.subnet() in told[2]
    told.append(node.run("ps", "axww").stdout)
    assert [text for text in told if PSK.strip() in text] == []
    for pid in (node.pid, charon_of(node)):
        assert PSK.strip().encode() not in Path(f"/proc/{pid}/environ").read_bytes()


# ---- healing --------------------------------------------------------------------------------------


def test_flushed_policies_are_restored_and_nothing_leaks(pair: list[Node], tmp_path: Path) -> None:
    node, peer = pair
    with underlay(node, peer, tmp_path) as plain:
        for _ in range(3):
            node.run("ip", "xfrm", "policy", "flush")
            wait_for(lambda: found(node) >= wanted(node, peer), SOON, "the policies to be back")
        assert plain() == 0
        with node.paused():
            node.run("ip", "xfrm", "policy", "flush")
            assert plain() == 0
            # Without the route into the device it would: that is what the capture can see.
            node.run("ip", "route", "del", peer.subnet(), "dev", DEVICE)
            node.run("ip", "route", "del", "unreachable", NETWORK, "metric", "65535")
            wait_for(lambda: plain() > 0, what="a readable packet")
    wait_for(lambda: found(node) == wanted(node, peer), SOON, "the policies to be back")
    node.wait_for_route(peer.subnet())
    talk(node, peer)


def test_a_policy_without_a_route_leads_to_no_peer(pair: list[Node]) -> None:
    """So an unreachable route cannot be the only one: the kernel looks at policies after routes."""
    node, peer = pair
    with node.paused():
        node.run("ip", "route", "del", peer.subnet(), "dev", DEVICE)
        assert found(node) == wanted(node, peer)
        assert not node.container().reaches(peer.container(), 1)
    node.wait_for_route(peer.subnet())
    talk(node, peer)


def test_blocking_policies_hold_where_other_routes_lead_past_the_device(
    pair: list[Node], tmp_path: Path
) -> None:
    """The other layer: a more specific route of somebody else, for a subnet without a tunnel."""
    node, peer = pair
    guard = guards(IPv4Network(NETWORK), None)
    host = peer.container().address
    tunnels = [each for each in wanted(node, peer) if each.tunnel]
    with underlay(node, peer, tmp_path) as plain, node.paused():
        node.run("ip", "route", "add", f"{host}/32", "via", peer.address)
        delete(node, tunnels)
        assert plain() == 0
        delete(node, guard)
        wait_for(lambda: plain() > 0, what="a readable packet")
    node.run("ip", "route", "del", f"{host}/32")
    wait_for(lambda: found(node) == wanted(node, peer), SOON, "the policies to be back")
    talk(node, peer)


def removals(node: Node, logged: int) -> list[str]:
    """Return the commands against policies that were logged since. A route of the test before may be, too."""
    return re.findall("remove it: (ip xfrm .*)", node.log()[logged:])


def test_a_policy_past_the_encryption_keeps_the_node_from_ready_and_stays(pair: list[Node]) -> None:
    """Another program's, three times: it is named each time, and gone by the command that the log names."""
    node, _ = pair
    selector = f"src {NETWORK} dst 10.5.128.0/17"
    wait_for(lambda: readiness(node)[0] == 200, SOON, "the node to be ready")
    for packets in ("", "", "proto icmp"):
        logged = len(node.log())
        node.run(*f"ip xfrm policy add {selector} {packets} dir out priority 100".split())
        wait_for(lambda: readiness(node)[0] == 503, SOON, "the node not to be ready")
        removal = wait_for(partial(removals, node, logged), SOON, "the policy to be named")[-1]
        assert removal in flannelctl(node, "doctor").stdout
        node.run(*removal.split())
        wait_for(lambda: readiness(node)[0] == 200, SOON, "the node to be ready again")
    assert "Encryption no longer bypassed" in node.log()


def delete(node: Node, gone: list[XfrmPolicy]) -> None:
    with node.namespace.entered(), closing(open_xfrm()) as kernel:
        bodies = (
            message(xfrm_table.DELETE_POLICY, NLM_F_REQUEST, xfrm_table.pack_policy_id(each), place)
            for place, each in enumerate(gone)
        )
        assert [failed for failed in kernel.write(bodies) if failed] == []


def test_a_node_that_joins_makes_one_pair_of_sas_with_each_peer(lab: Lab) -> None:
    """A peer calls it before its charon can answer. Answered later, that call would make a second pair."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
    nodes = lab.add_nodes(2)
    for node in nodes:
        start(node)
        node.wait_for_log("In sync with")
    talk(*nodes)

    def found() -> list[ConnectionSas]:
        return [each for node in nodes for each in associations(node).values()]

    wait_for(lambda: not any(each.is_negotiating for each in found()), what="charon to end its negotiations")
    assert [len(each.children) for each in found()] == [1, 1]


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["dies", "is stopped", "hangs"]
)
def test_charon_that_ends_or_hangs_is_replaced(pair: list[Node], tmp_path: Path, how: signal.Signals) -> None:
    node, peer = pair
    charon = charon_of(node)
    assert charon
    with underlay(node, peer, tmp_path) as plain:
        os.kill(charon, how)
        wait_for(lambda: charon_of(node) not in (0, charon), SOON, "another charon")
        wait_for(lambda: loaded(node) == all_of(node, peer), SOON, "keys and connection to be loaded")
        assert plain() == 0
    talk(node, peer)


def flush(*nodes: Node) -> None:
    for node in nodes:
        node.run("ip", "xfrm", "state", "flush")


def flush_first(node: Node, _peer: Node) -> None:
    flush(node)


def delete_incoming(node: Node, _peer: Node) -> None:
    for spi in negotiated(node):
        node.run("ip", "xfrm", "state", "delete", "dst", node.address, "proto", "esp", "spi", f"0x{spi}")


@pytest.mark.parametrize("lose", [flush_first, flush, delete_incoming])
def test_lost_sas_are_negotiated_again_and_nothing_leaks(
    pair: list[Node], tmp_path: Path, lose: Callable[[Node, Node], None]
) -> None:
    """charon does not notice: it would lose all packets until the next rekeying, after up to an hour."""
    node, peer = pair
    talk(node, peer)
    wait_for(lambda: bool(negotiated(node)), SOON, "SAs of the present charon")
    with underlay(node, peer, tmp_path) as plain, node.container().ping(peer.container()) as ping:
        ping.wait_for_replies()
        before = negotiated(node)
        lose(node, peer)
        wait_for(lambda: negotiated(node).isdisjoint(before), SOON, "other SAs")
        ping.wait_for_replies()
        assert plain() == 0
    talk(node, peer)


def test_a_flush_of_sas_is_heard(lab: Lab) -> None:
    """This daemon reads charon once an hour unless a notification asks for it."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
    node, peer = lab.add_nodes(2)
    node.start(command=with_own_run(node, sys.executable, "-c", SELDOM))
    start(peer)
    for each in (node, peer):
        each.wait_ready()
    talk(node, peer)
    before = negotiated(node)
    flush(node)
    wait_for(lambda: negotiated(node).isdisjoint(before), SOON, "other SAs")
    talk(node, peer)


def test_connections_lost_by_charon_are_loaded_again(pair: list[Node]) -> None:
    node, peer = pair
    before = all_of(node, peer)
    wait_for(lambda: loaded(node) == before, SOON, "keys and connections to be there")
    with control(node) as charon:
        charon.ask("unload-conn", {"name": before[0][0]})
        charon.ask("clear-creds")
    wait_for(lambda: loaded(node) == before, SOON, "keys and connections to be back")


# ---- start, end and peers that go -----------------------------------------------------------------


@pytest.mark.parametrize("end", [Node.stop, Node.kill], ids=["SIGTERM", "SIGKILL"])
def test_a_restart_loses_no_packet_and_ends_no_association(
    pair: list[Node], end: Callable[[Node], object]
) -> None:
    node, peer = pair
    talk(node, peer)
    wait_for(lambda: bool(negotiated(node)), SOON, "SAs of the present charon")
    before = negotiated(node)
    with node.container().ping(peer.container()) as out, peer.container().ping(node.container()) as back:
        out.wait_for_replies()
        end(node)
        out.wait_for_replies()
        start(node)
        node.wait_ready()
        node.wait_for_log("In sync with")
        wait_for(lambda: loaded(node) == all_of(node, peer), SOON, "keys and connection to be loaded")
        out.wait_for_replies()
        back.wait_for_replies()
        assert (out.lost(), back.lost()) == (0, 0)
    assert negotiated(node) >= before


def negotiated(node: Node) -> set[str]:
    """Return the SPIs of this node's SAs."""
    return {text(each, "spi-in") for sas in associations(node).values() for each in sas.children}


@pytest.mark.parametrize("change", [pytest.param("settings", marks=pytest.mark.long), "program"])
def test_a_charon_that_is_out_of_date_is_replaced(lab: Lab, tmp_path: Path, change: str) -> None:
    program = tmp_path / "charon"
    lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
    (node,) = lab.add_nodes()

    def run() -> int:
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        node.start(command=with_own_run(node, *own_command()), environment=path)
        node.wait_ready()
        node.stop()
        return charon_of(node)

    shutil.copy(charon_process.find_charon(), program)
    former = run()
    assert run() == former
    if change == "settings":
        lab.etcd.put_config({"Network": NETWORK, "Backend": {**IPSEC, "UDPEncap": True}})
    else:
        program.unlink()
        shutil.copy(charon_process.find_charon(), program)
    assert run() not in (0, former)


def test_charon_is_replaced_while_the_leases_are_those_saved_on_disk(lab: Lab, tmp_path: Path) -> None:
    """The saved leases replace nothing that leads to peers. charon is needed whatever they say."""
    write_net_conf(lab, IPSEC)
    node, peer = lab.add_nodes(2)
    saved = tmp_path / "kube-nodes.json"

    def run(each: Node) -> None:
        flags = [f"--state-dir={tmp_path}"] if each is node else []
        start_with_kube(lab, each, *flags, command=with_own_run(each, *own_command()))

    for each in (node, peer):
        lab.kube.add(each)
        run(each)
    for each in (node, peer):
        each.wait_ready()
    talk(node, peer)
    wait_for(lambda: saved.exists() and peer.name in saved.read_text(), SOON, "both nodes to be saved")
    former = charon_of(node)
    with underlay(node, peer, tmp_path) as plain:
        lab.kube.kill()
        node.kill()
        write_net_conf(lab, {**IPSEC, "UDPEncap": True})
        run(node)
        node.wait_for_log("Using the nodes saved in")
        wait_for(lambda: charon_of(node) not in (0, former), SOON, "a charon with the new settings")
        wait_for(lambda: loaded(node) == all_of(node, peer), SOON, "its keys and connection")
        talk(node, peer)
        assert plain() == 0
    assert any(is_encapsulated(each) for each in associations(node).values())


def test_a_stop_does_not_wait_for_a_charon_that_starts(lab: Lab, tmp_path: Path) -> None:
    """The start of this one would be given up after 20 s, and the log would say so."""
    charon = tmp_path / "charon"
    charon.write_text("#!/bin/sh\necho $$ > /run/charon.pid && exec sleep 1000\n")
    charon.chmod(0o755)
    lab.etcd.put_config({"Network": NETWORK, "Backend": IPSEC})
    (node,) = lab.add_nodes()
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    node.start(command=with_own_run(node, *own_command()), environment=path)
    wait_for(lambda: bool(charon_of(node)), what="charon to be started")
    assert node.stop(60).status == 0
    assert "does not answer" not in node.log()


@pytest.mark.parametrize(
    "masquerade", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "masquerading"]
)
def test_nothing_leaves_in_the_clear(lab: Lab, tmp_path: Path, masquerade: bool) -> None:
    flags = ("--ip-masq",) if masquerade else ()
    node, peer = cluster(lab, *flags)
    assert lab.etcd.lease_values()[node.subnet()] == f'{{"PublicIP":"{node.address}","BackendType":"ipsec"}}'
    with underlay(node, peer, tmp_path) as plain:
        charon = charon_of(node)
        assert charon
        node.kill()
        assert found(node) == wanted(node, peer)
        assert plain() == 0
        stale = tunnel_policies(
            IPv4Network(node.subnet()),
            IPv4Network("10.5.254.0/24"),
            IPv4Address(node.address),
            IPv4Address("198.18.0.99"),
        )
        with node.namespace.entered(), closing(open_xfrm()) as kernel:
            made = (
                message(xfrm_table.NEW_POLICY, NLM_F_REQUEST, xfrm_table.pack_policy(each), place)
                for place, each in enumerate(stale)
            )
            assert [failed for failed in kernel.write(made) if failed] == []
        start(node, *flags)
        node.wait_ready()
        talk(node, peer)
        assert charon_of(node) == charon
        wait_for(lambda: found(node) == wanted(node, peer), SOON, "what an earlier run left to be swept")
        assert plain() == 0
        peer.stop()
        lab.etcd.delete_lease(peer.subnet())
        wait_for(lambda: found(node) == wanted(node), SOON, "the policies to go")
        wait_for(lambda: loaded(node) == ([], [f"flannel-{node.address}"]), SOON, "connection and key to go")
        assert associations(node) == {}
        assert plain() == 0
    assert PSK.strip() not in node.logs()
    tools(lab, node)


def tools(lab: Lab, node: Node) -> None:
    """-plan and -cleanup know what there is, and show no key."""
    own = (f"--etcd-endpoints={lab.etcd.endpoint}", f"--subnet-file={node.subnet_file}")
    command = with_own_run(node, *own_command(), *own)
    node.stop()
    delete(node, guards(IPv4Network(NETWORK), None)[:1])
    planned = node.run(*command, "--plan").stdout
    assert f"# new: policy src {NETWORK} dst {NETWORK} dir in priority 4294967295 action block" in planned
    assert PSK.strip() not in planned
    cleaned = node.run(*command, "--cleanup").stdout
    assert "action block" in cleaned
    assert found(node) == set()
    assert node.link(DEVICE) is None
    wait_for(lambda: not charon_of(node), what="charon to end")


@pytest.mark.long  # charon needs minutes to say so
def test_wrong_keys_are_named(lab: Lab) -> None:
    node, peer = cluster(lab, backend={**IPSEC, "UDPEncap": True})
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**IPSEC, "UDPEncap": True, "PSK": PSK[::-1]}})
    peer.stop()
    start(peer)
    peer.wait_ready()
    node.wait_for_log(f"IKE with {peer.address} for {peer.subnet()} fails", SOON)
    wait_for(lambda: "give all nodes one PSK" in flannelctl(node, "doctor").stdout, SOON, "the advice")


def test_another_backend_sweeps_the_policies(lab: Lab) -> None:
    node, peer = cluster(lab, backend={**IPSEC, "UDPEncap": True})
    assert node.env()["FLANNEL_MTU"] == "1415"
    states = node.run("ip", "xfrm", "state").stdout
    assert "encap type espinudp sport 4500 dport 4500" in states
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "host-gw"}})
    for each in (node, peer):
        each.stop()
        start(each)
    for each in (node, peer):
        each.wait_ready()
    talk(node, peer)
    for each in (node, peer):
        assert found(each) == set()
    wait_for(lambda: all(each.link(DEVICE) is None for each in (node, peer)), what="the former device to go")
    wait_for(lambda: not any(map(charon_of, (node, peer))), what="charon to end")


@pytest.mark.parametrize(
    "backend", [IPSEC, pytest.param({"Type": "host-gw"}, marks=pytest.mark.long)], ids=["ipsec", "host-gw"]
)
def test_policies_of_a_former_network_go(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = cluster(lab)
    for each in (node, peer):
        each.stop()
    lab.etcd.delete_lease(peer.subnet())
    former = IPv4Network(NETWORK)
    lab.etcd.put_config({"Network": "10.6.0.0/16", "Backend": backend})
    start(node)
    node.wait_ready()
    wait_for(
        lambda: not any(each.source.overlaps(former) for each in found(node)), SOON, "the policies to go"
    )
    assert bool(found(node)) == (backend is IPSEC)
