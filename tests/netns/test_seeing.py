"""What an operator sees: the status socket, flannelctl and /metrics of real daemons."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flanneld.diagnostics.metrics import METRICS
from flanneld.reconcile.counters import FOUND, TOLD
from flanneld.runtime import clock
from tests.lab import Lab, Node, own_command, wait_for
from tests.netns.pair import DUAL_STACK

BACKEND = {"Type": "vxlan"}
HEALTH_PORT = 8471
PATIENCE = 60
MAC = "02:00:00:00:00:99"


def ctl_command(node: Node, *words: str, store: str = "") -> list[str]:
    command = [*own_command()[:-1], f"{own_command()[-1].removesuffix('flanneld')}flannelctl", *words]
    return [*command, f"--subnet-file={node.subnet_file}", *([f"--etcd-endpoints={store}"] if store else [])]


def flannelctl(node: Node, *words: str, store: str = "") -> subprocess.CompletedProcess[str]:
    return node.run(*ctl_command(node, *words, store=store), check=False)


def answer(node: Node, *words: str, store: str = "") -> dict[str, Any]:
    told: dict[str, Any] = json.loads(flannelctl(node, *words, "--output=json", store=store).stdout)
    return told


def findings(node: Node, store: str = "") -> dict[str, str]:
    """What the doctor found, by the names of the checks."""
    told = answer(node, "doctor", store=store)
    return {each["check"]: f"{each['problem']}: {each['evidence']}" for each in told["findings"]}


def settled(lab: Lab, *flags: str) -> tuple[Node, Node]:
    node, peer = lab.cluster(BACKEND, flags=flags)
    node.wait_for_route(peer.subnet(), PATIENCE)
    peer.wait_for_route(node.subnet(), PATIENCE)
    node.wait_for_log("Made our rules", PATIENCE)
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    return node, peer


def lease(public_ip: str, mac: str = MAC) -> dict[str, Any]:
    return {"PublicIP": public_ip, "BackendType": "vxlan", "BackendData": {"VtepMAC": mac}}


# ---- a node that is well ------------------------------------------------------------------------


def test_a_node_that_is_well_is_shown_as_it_is(lab: Lab) -> None:
    node, peer = settled(lab)
    pid = node.pid

    status = flannelctl(node, "status")
    assert status.returncode == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in status.stdout.splitlines())
    assert f"pid {pid}, since " in lines["daemon"]
    assert lines["ready"] == "yes"
    assert lines["peers"] == "1, 1 in the kernel"
    assert lines["lease"].startswith(f"{node.subnet()}, until ")
    assert lines["firewall"] == "nft, in place, 0 repairs"

    peers = flannelctl(node, "peers")
    assert (peers.returncode, peers.stdout) == (
        0,
        f"{'SUBNET':{len(peer.subnet())}}  PUBLIC IP   BACKEND  STATE          REASON\n"
        f"{peer.subnet()}  {peer.address}  vxlan    in the kernel\n",
    )
    routes = flannelctl(node, "routes")
    assert routes.returncode == 0
    assert [line.split()[:2] for line in routes.stdout.splitlines()[1:]] == [
        ["ok", kind] for kind in ("link", "address", "neighbor", "fdb", "route")
    ]
    events = flannelctl(node, "events").stdout
    head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +I +node"
    assert re.search(f"^{head} +Our subnet is {node.subnet()}", events, re.MULTILINE)


def test_the_way_to_a_container_is_traced(lab: Lab) -> None:
    node, peer = settled(lab)
    for target, hops in (
        (peer.container().address, ["lease", "route", "neigh", "fdb", "device", "uplink"]),
        (node.container().address, ["lease", "route"]),
        ("203.0.113.1", ["lease", "route", "source"]),
        (node.address, ["lease", "route"]),
        ("127.0.0.1", ["lease", "route"]),
    ):
        told = answer(node, "trace", target)["hops"]
        assert [(hop["hop"], hop["state"]) for hop in told] == [(hop, "ok") for hop in hops]
        assert flannelctl(node, "trace", target).returncode == 0


def problems(node: Node, target: str, *words: str) -> dict[str, str]:
    """The hops at which packets die, with what is found there or the reason."""
    hops = answer(node, "trace", target, *words)["hops"]
    return {hop["hop"]: f"{hop['found']}: {hop['note']}" for hop in hops if hop["state"] == "PROBLEM"}


def test_trace_and_netcheck_fail_where_this_host_loses_packets(lab: Lab) -> None:
    node, peer = settled(lab)
    container, target = node.container(), peer.container().address
    sender = f"--from-container={container.address}"
    hops = answer(node, "trace", target, sender)["hops"]
    assert [(hop["hop"], hop["state"]) for hop in hops[:2]] == [("container", "ok"), ("lease", "ok")]
    assert problems(node, target, sender) == {}

    node.namespace.ip("rule add to 10.5.0.0/16 blackhole priority 99")
    assert "99: " in problems(node, target)["lookup"]
    assert flannelctl(node, "trace", target).returncode == 1
    checked = answer(node, "netcheck", peer.subnet(), "--count=1")
    assert problems(node, target)["lookup"] in {
        f"{each['found']}: {each['note']}" for each in checked["checks"] if each["check"] == "lookup"
    }
    assert "99: " in checked["reason"]
    node.namespace.ip("rule del priority 99")
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    assert problems(node, target)["forwarding"] == "off: this node passes no packet of a container on"
    node.namespace.sysctl("net/ipv4/ip_forward", 1)
    container.namespace.ip("link set eth0 mtu 1500")
    assert "its MTU is above that of the network, 1450" in problems(node, target, sender)["container"]
    container.namespace.ip("route del default")
    assert "it has no route" in problems(node, target, sender)["container"]
    nobody = flannelctl(node, "trace", target, "--from-container=10.5.99.9")
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert "no container with 10.5.99.9 is found here" in nobody.stderr


def test_a_rule_that_drops_packets_to_a_peer_is_on_the_way_to_its_containers(lab: Lab) -> None:
    node, peer = settled(lab)
    node.run("nft", "add table inet wall")
    node.run("nft", "add chain inet wall c { type filter hook output priority 0; policy accept; }")
    node.run("nft", "add rule inet wall c udp dport 8472 drop")
    target = peer.subnet()[:-3]
    assert flannelctl(node, "trace", target).returncode == 1
    (hop,) = (hop for hop in answer(node, "trace", target)["hops"] if hop["hop"] == "filter")
    assert (hop["found"], hop["state"]) == ("chain c of table inet wall", "PROBLEM")
    assert hop["note"].startswith("drops UDP 8472 to its peers: udp dport 8472 drop # handle ")
    checks = answer(node, "netcheck")["checks"]
    (check,) = (check for check in checks if check["check"] == "filter")
    assert (check["found"], check["note"]) == ("chain c of table inet wall of this node", hop["note"])


def test_the_way_is_traced_over_ipv6_too(lab: Lab) -> None:
    node, peer = lab.cluster(BACKEND, **DUAL_STACK)
    node.wait_for_route(peer.subnet(), PATIENCE)
    there, here = (f"{each.subnet(6).removesuffix('/64')}7" for each in (peer, node))
    node.container()
    for target, hops in ((there, 6), (here, 2), (node.ipv6_address, 2), ("2001:db8::1", 3)):
        told = answer(node, "trace", target)["hops"]
        assert [hop["state"] for hop in told] == ["ok"] * hops, told


def test_looking_changes_nothing(lab: Lab) -> None:
    node, peer = settled(lab)
    with node.changes() as changes:
        for words in ("status", "peers", "routes", "events", f"trace {peer.subnet()[:-3]}", "doctor"):
            flannelctl(node, *words.split())
        assert changes.seen() == []


def test_a_doctor_finds_a_sound_node_sound(lab: Lab) -> None:
    node, peer = settled(lab)
    node.container().wait_for_reply(peer.container())
    assert {name for name in findings(node) if name not in ("bridges", "clock", "keepers")} == set()


def test_the_socket_is_the_owners_alone_and_goes_with_the_daemon(lab: Lab) -> None:
    node, _ = settled(lab)
    socket = node.subnet_file.with_name("flanneld.sock")
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    node.kill()
    assert flannelctl(node, "status").returncode == 3
    node.start()
    wait_for(lambda: flannelctl(node, "status").returncode == 0, 20, "a daemon that answers")
    node.stop()
    assert not socket.exists()


def test_daemon_that_was_killed_is_heard_from_its_events_file(lab: Lab) -> None:
    node, _ = settled(lab)
    before = answer(node, "events")["events"]
    node.kill()
    assert answer(node, "events")["events"] == before
    end = f"its log ends {clock.utc_text(before[-1]['time'])}: {before[-1]['text']}"
    assert f"does not answer; {end}" in flannelctl(node, "status").stdout
    assert findings(node, lab.etcd.endpoint)["daemon"].endswith(end)

    node.start("--iface=absent0")
    assert node.daemon.wait(20).status == 1
    error = answer(node, "events")["events"][-1]
    assert error["severity"] == "F"
    assert "absent0" in error["text"]
    last = f"its last error, {clock.utc_text(error['time'])}: {error['text']}"
    assert f"does not answer; {last}" in flannelctl(node, "status").stdout
    assert findings(node)["daemon"].endswith(last)

    node.start()
    node.wait_ready()
    node.kill()
    assert "absent0" in flannelctl(node, "events").stdout
    assert "its log ends" in flannelctl(node, "status").stdout  # that run had no error


def test_a_daemon_that_waits_says_for_what(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    node.start()
    node.wait_for_log("Couldn't fetch network config")
    done = flannelctl(node, "status")
    assert done.returncode == 1
    assert "no: no lease yet" in done.stdout
    assert "Couldn't fetch network config" in flannelctl(node, "events").stdout


# ---- what is wrong ------------------------------------------------------------------------------


def test_peers_that_are_refused_or_contested_are_shown_with_the_reason(lab: Lab) -> None:
    node, _ = settled(lab)
    lab.etcd.put_lease("10.5.201.0/24", lease("198.18.0.201"))
    lab.etcd.put_lease("10.5.202.0/24", lease("198.18.0.202"))
    lab.etcd.put_lease("10.5.203.0/24", {**lease("198.18.0.203"), "BackendData": {"VtepMAC": "no MAC"}})
    lab.etcd.put_lease("10.5.204.0/24", {"PublicIP": "198.18.0.204", "BackendType": "udp"})
    node.wait_for_log("10.5.204.0/24")

    def told() -> dict[str, dict[str, Any]]:
        return {peer["subnets"][0]: peer for peer in answer(node, "peers")["peers"]}

    wait_for(lambda: len(told()) == 5, what="all peers")
    peers = told()
    assert peers["10.5.201.0/24"]["conflicts"] == ["10.5.202.0/24"]
    assert peers["10.5.202.0/24"]["state"] == "contested"
    assert "no MAC" in peers["10.5.203.0/24"]["reason"]
    assert "udp" in peers["10.5.204.0/24"]["reason"]
    assert flannelctl(node, "peers").returncode == 1
    assert {"contested", "refusals"} <= findings(node).keys()


def test_repairs_are_reported(lab: Lab) -> None:
    node, peer = settled(lab)
    node.namespace.ip(f"route del {peer.subnet()}")
    node.wait_for_log("Restored route")
    told = wait_for(lambda: answer(node, "status")["repairs"], what="the repair to be told")
    assert told == [{"kind": "route", "cause": "notification", "number": 1}]
    assert f"Restored route {peer.subnet()}" in flannelctl(node, "events").stdout


def break_route(node: Node, peer: Node) -> None:
    node.namespace.ip(f"route del {peer.subnet()}")


def add_stale_route(node: Node, _peer: Node) -> None:
    node.namespace.ip("route add 10.5.250.0/24 via 10.5.250.0 dev flannel.1 onlink")


def remove_device(node: Node, _peer: Node) -> None:
    node.namespace.ip("link del flannel.1")


def change_mac(node: Node, _peer: Node) -> None:
    node.namespace.ip(f"link set flannel.1 address {MAC}")


def forget_subnet_file(node: Node, _peer: Node) -> None:
    node.subnet_file.unlink()


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (break_route, "missing"),
        (add_stale_route, "stale"),
        (remove_device, "devices"),
        (change_mac, "mac"),
        (forget_subnet_file, "subnet file"),
    ],
)
def test_doctor_finds_damage_without_a_daemon_by_the_store(
    lab: Lab, harm: Callable[[Node, Node], None], check: str
) -> None:
    node, peer = settled(lab)
    node.stop()
    harm(node, peer)
    found = findings(node, lab.etcd.endpoint)
    assert check in found
    assert "daemon" in found
    assert flannelctl(node, "doctor", store=lab.etcd.endpoint).returncode == 1


def test_routes_of_others_that_lead_packets_astray_are_named_and_left_alone(lab: Lab) -> None:
    node, peer = settled(lab)
    half = peer.subnet().replace("/24", "/25")
    target = peer.container().address
    node.namespace.ip(f"route add {half} dev eth0")
    assert half in findings(node)["detours"]
    hops = answer(node, "trace", target)["hops"]
    assert [hop["hop"] for hop in hops if hop["state"] == "PROBLEM"] == ["route"]
    assert node.wait_for_route(half)["dev"] == "eth0"


def test_a_daemon_that_is_stuck_hides_nothing(lab: Lab) -> None:
    node, peer = settled(lab)
    target = peer.container().address
    with node.paused():
        break_route(node, peer)
        trace = answer(node, "trace", target, store=lab.etcd.endpoint)
    assert [hop["hop"] for hop in trace["hops"] if hop["state"] == "PROBLEM"] == ["route"]
    assert "timed out" in trace["not_known"][0]


def test_doctor_without_daemon_and_store_names_what_is_unknown(lab: Lab) -> None:
    node, peer = settled(lab)
    node.stop()
    done = flannelctl(node, "routes")
    assert done.returncode == 3
    assert f"route {peer.subnet()} via" in done.stdout
    assert "not known: the store was not asked: give -etcd-endpoints" in done.stdout
    assert flannelctl(node, "trace", peer.subnet()[:-3]).returncode == 3


def test_doctor_finds_host_problems_while_the_daemon_runs(lab: Lab) -> None:
    node, _ = settled(lab, "--iptables-forward-rules=false", "--ip-masq")
    node.container()
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    node.run("iptables", "-P", "FORWARD", "DROP")
    node.namespace.ip(
        "link set cni0 mtu 1500",
        "link add old0 type bridge",
        "address add 10.5.251.1/24 dev old0",
        "link add veth9 type veth peer name veth8",
        "link set veth9 master old0",
    )
    lab.etcd.put_lease("10.5.252.0/24", lease("198.18.0.99", "02:00:00:00:00:01"))
    lab.etcd.put_lease("10.5.253.0/24", lease("198.18.0.99", "02:00:00:00:00:02"))
    node.wait_for_route("10.5.253.0/24")
    found = findings(node)
    expected = {"forwarding", "filters", "containers", "bridge subnet", "public ip"}
    assert expected <= found.keys(), found
    assert flannelctl(node, "doctor").returncode == 1


def test_doctor_runs_the_fixes_that_it_shows_if_it_may(lab: Lab) -> None:
    node, _ = settled(lab)
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    asked = flannelctl(node, "doctor", "--fix")
    assert asked.returncode == 1
    assert "fix       sysctl -w net.ipv4.ip_forward=1" in asked.stdout
    assert asked.stderr.startswith(
        "flannelctl: Run 1 command, those after fix of each PROBLEM; if so, give --yes"
    )
    assert "forwarding" in findings(node)
    done = answer(node, "doctor", "--fix", "--yes")
    assert done["ran"] == [{"command": ["sysctl", "-w", "net.ipv4.ip_forward=1"], "failure": ""}]
    assert (done["verdict"].partition(",")[0], findings(node).get("forwarding")) == ("Healthy", None)
    assert flannelctl(node, "doctor", "--fix").returncode == 0


def test_watching_doctor_runs_the_fixes_once(lab: Lab, tmp_path: Path) -> None:
    node, _ = settled(lab)
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    said = tmp_path / "said"
    with said.open("wb") as out:
        words = ctl_command(node, "doctor", "--fix", "--yes", "--watch=0.1", "--output=json")
        watching = node.namespace.start(*words, output=out)
        try:
            wait_for(lambda: '"Healthy' in said.read_text(), 40, "the fix")
            node.namespace.sysctl("net/ipv4/ip_forward", 0)
            wait_for(lambda: '"Broken' in said.read_text(), 40, "the finding that comes back")
        finally:
            watching.send_signal(signal.SIGTERM)
            watching.wait(20)
    assert said.read_text().count('"ran"') == 1


def test_a_store_that_is_away_is_seen(lab: Lab) -> None:
    node, _ = settled(lab)
    lab.etcd.stop()
    node.wait_for_log("etcd does not answer", 20)
    wait_for(lambda: not answer(node, "status")["store"]["answers"], what="the store to be away")
    assert "store" in findings(node)


def test_wrong_usage_has_a_status_of_its_own(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    for words in (["nonsense"], ["trace", "nowhere"], ["status", "--nonsense=1"]):
        assert flannelctl(node, *words).returncode == 2


# ---- metrics ------------------------------------------------------------------------------------


def metrics(node: Node) -> dict[str, float]:
    page = node.run("curl", "-sf", f"http://127.0.0.1:{HEALTH_PORT}/metrics").stdout
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(number) for name, number in lines}


def test_metrics_tell_what_the_daemon_does(lab: Lab) -> None:
    node, peer = settled(lab, f"--healthz-port={HEALTH_PORT}")
    before = metrics(node)
    assert before['flannel_peers{backend="vxlan",state="in-the-kernel"}'] == 1
    assert before['flannel_desired_objects{kind="route"}'] == 1
    assert before['flannel_actual_objects{kind="route"}'] == 1
    assert before['flannel_drift_objects{kind="route"}'] == 0
    assert before["flannel_ready"] == 1
    assert before["flannel_datastore_up"] == 1
    assert before["flannel_datastore_request_seconds_count"] >= 2
    assert before["flannel_lease_ttl_seconds"] == pytest.approx(86400, abs=600)
    assert before[f'flannel_subnet_info{{subnet="{node.subnet()}"}}'] == 1
    assert before["process_resident_memory_bytes"] > 0

    lab.etcd.put_lease("10.5.201.0/24", lease("198.18.0.201"))
    node.wait_for_route("10.5.201.0/24")
    node.namespace.ip(f"route del {peer.subnet()}")
    node.wait_for_log("Restored route")
    heals = 'flannel_heals_total{cause="notification",kind="route"}'
    assert before[heals] == 0
    wait_for(lambda: metrics(node)[heals] == 1, what="the repair to be counted")
    after = metrics(node)
    assert after["flannel_event_to_kernel_seconds_count"] > before["flannel_event_to_kernel_seconds_count"]
    assert after["flannel_watch_events_total"] > before["flannel_watch_events_total"]
    assert after['flannel_desired_objects{kind="route"}'] == 2


def test_repairs_of_rules_file_and_forwarding_are_counted(lab: Lab) -> None:
    node, _ = settled(lab, f"--healthz-port={HEALTH_PORT}", "--ip-masq", "--keep-forwarding")
    before = metrics(node)
    assert {
        before[f'flannel_heals_total{{cause="{cause}",kind="{kind}"}}']
        for kind in ("rules", "file")
        for cause in (TOLD, FOUND)
    } == {0}
    node.run("iptables", "-t", "nat", "-F")
    node.wait_for_log("Restored our rules")
    wait_for(lambda: firewall_repairs(node) >= 1, what="the repair to be counted")
    assert metrics(node)['flannel_heals_total{cause="notification",kind="rules"}'] >= 1
    node.subnet_file.unlink()
    node.wait_for_log("Restored /")
    node.namespace.sysctl("net/ipv4/ip_forward", 0)
    node.wait_for_log("Restored forwarding")
    heals = 'flannel_heals_total{cause="audit",kind="file"}'
    wait_for(lambda: metrics(node).get(heals) == 2, what="both repairs to be counted")


def test_labelled_counters_begin_at_0(lab: Lab) -> None:
    node, _ = settled(lab, f"--healthz-port={HEALTH_PORT}", "--ip-masq")
    page = metrics(node)
    for metric in METRICS:
        if metric.type == "counter" and metric.labels:
            assert [name for name in page if name.startswith(f"{metric.name}{{")], metric.name
    for kind in ("link", "address", "neighbor", "fdb", "route"):
        repaired = [page[f'flannel_heals_total{{cause="{cause}",kind="{kind}"}}'] for cause in (TOLD, FOUND)]
        refused = [
            page[f'flannel_netlink_errors_total{{errno="{why}",op="{kind}"}}'] for why in ("EPERM", "other")
        ]
        assert [*repaired, *refused] == [0, 0, 0, 0]
    assert page['flannel_firewall_resyncs_total{backend="iptables-nft",cause="unknown"}'] == 0
    assert answer(node, "status")["firewall"]["repairs"] == []


def test_rules_that_were_put_back_are_counted_for_both_families(lab: Lab) -> None:
    (node,) = lab.cluster(BACKEND, nodes=1, flags=["--ip-masq"], EnableNFTables=True, **DUAL_STACK)
    wait_for(lambda: node.log().count("Made our rules") == 2, PATIENCE, "the rules of both families")
    for number, table in enumerate(("ip flannel-ipv4", "ip6 flannel-ipv6"), 1):
        node.run("nft", "delete", "table", *table.split())
        wait_for(lambda: firewall_repairs(node) == number, what="the repair to be counted")  # noqa: B023


def firewall_repairs(node: Node) -> int:
    return sum(each["number"] for each in answer(node, "status")["firewall"]["repairs"])


def test_the_mtu_of_each_device_is_told(lab: Lab) -> None:
    node, _ = lab.cluster(BACKEND, flags=[f"--healthz-port={HEALTH_PORT}"], **DUAL_STACK)
    names = ("eth0", "flannel.1", "flannel-v6.1")
    wait_for(lambda: "flannel_mtu_bytes{" in str(metrics(node)), PATIENCE, "the devices to be told")
    told = {name: metrics(node)[f'flannel_mtu_bytes{{dev="{name}"}}'] for name in names}
    assert told == {name: (node.link(name) or {})["mtu"] for name in names}
    assert told == {"eth0": 1500, "flannel.1": 1450, "flannel-v6.1": 1430}


def test_metrics_without_the_library_are_unavailable(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError")
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": BACKEND})
    (node,) = lab.add_nodes()
    node.start(f"--healthz-port={HEALTH_PORT}", environment={"PYTHONPATH": str(tmp_path)})
    node.wait_ready()
    url = f"http://127.0.0.1:{HEALTH_PORT}/metrics"
    page, _, status = node.run("curl", "-s", "-w", "\n%{http_code}", url).stdout.rpartition("\n")
    assert status == "503"
    assert "pip install prometheus-client" in page
    assert node.run("curl", "-sf", f"http://127.0.0.1:{HEALTH_PORT}/healthz").stdout
