"""What the doctor says about the lease, the store, the daemon, and the addresses that nodes announce."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.ctl.checks import Facts
from flanneld.ctl.checks.store import EtcdHealth, ask_etcd, unlike_stored
from flanneld.ctl.nodes import Told
from flanneld.ctl.source import SourcePart, Unknown
from flanneld.errors import LEASE_TAKEN, LINK_BROADCAST
from tests.local_etcd import answering, server
from tests.unit.ctl.findings import HINT, PROBLEM, document, evidence, number, said
from tests.unit.ctl.test_checks import DOCUMENT, FORMER, NOW, WELL, peer


@pytest.mark.parametrize(
    ("status", "body", "is_healthy"),
    [(b"200 OK", b'{"health":"true"}', True), (b"503 No", b" no \n", False), (b"404 No", b"", False)],
)
def test_etcd_is_healthy_if_it_says_so(status: bytes, body: bytes, is_healthy: bool) -> None:
    head = b"HTTP/1.1 " + status + b"\r\nDate: Tue, 24 Nov 2015 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n"
    with server(answering(head % len(body) + body)) as url:
        word = ask_etcd(document(store=mute(f"etcd does not answer ({url}/: x)")).status)
    assert word is not None
    assert (word.url, word.is_healthy, word.said) == (url, is_healthy, body.decode().strip())


def mute(problem: str, **store: Any) -> dict[str, Any]:
    return {"name": "etcd v3 at x", "answers": False, "problem": problem} | store


@pytest.mark.parametrize(
    "problem",
    [
        "",
        "etcd does not answer",
        "the API server does not answer (http://127.0.0.1:1: refused)",
        "etcd does not answer (http://127.0.0.1: refused)",
        "etcd does not answer (http://127.0.0.1:1: refused)",
    ],
    ids=["none", "no server", "no etcd", "no port", "nobody there"],
)
def test_etcd_is_asked_only_where_a_problem_names_a_server(problem: str) -> None:
    assert ask_etcd(document(store=mute(problem)).status) is None


@pytest.mark.parametrize("date", [b"", b"Date: soon\r\n"])
def test_answer_without_a_date_is_no_answer_of_etcd(date: bytes) -> None:
    said_by = b"HTTP/1.1 200 OK\r\n" + date + b"Content-Length: 0\r\n\r\n"
    with server(answering(said_by)) as url:
        assert ask_etcd(document(store=mute(f"etcd does not answer ({url}: x)")).status) is None


CACHE = "the nodes saved in /x at 2023-11-14T22:13:20Z"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"synced": False}, ("the peers are not known yet", "no list of leases was read since the start")),
        (
            {"store": DOCUMENT["store"] | {"cache": CACHE}, "synced": False},
            ("the peers are known from a file only", f"leases are taken from {CACHE}"),
        ),
    ],
)
def test_peers_that_are_known_from_nowhere_or_a_file_are_told(
    changes: dict[str, Any], found: tuple[str, str] | None
) -> None:
    facts = document(**changes)
    assert [each[1] for each in said("synced", facts)] == ([found[0]] if found else [])
    assert evidence("synced", facts) == ([found[1]] if found else [])
    assert not said("removal_guard", document(removal_guard={"holds": False, "number": 3}))


RUNS = Told(network=("10.5.0.0/16 /24",), backend="vxlan", vni=1, port=8472, mtu=1450)


@pytest.mark.parametrize(
    ("backend", "changes", "unlike"),
    [
        ('{"Type": "vxlan"}', {}, []),
        ('{"Type": "vxlan"}', {"vni": 2}, ["VNI 2, the store has 1"]),
        ('{"Type": "vxlan"}', {"vni": None, "port": None}, []),
        ('{"Type": "vxlan", "Port": 8472}', {"port": 4789}, ["port 4789, the store has 8472"]),
        ('{"Type": "vxlan", "MTU": 1500}', {}, []),
        ('{"Type": "vxlan", "MTU": 1500}', {"mtu": 1430}, []),
        ('{"Type": "vxlan", "MTU": 1500}', {"mtu": 1449}, ["MTU 1449, the store has Backend.MTU 1500"]),
        ('{"Type": "vxlan"}', {"mtu": 1449}, []),
        ('{"Type": "host-gw"}', {"backend": "host-gw", "vni": 7, "port": 7, "mtu": 9000}, []),
        ('{"Type": "host-gw"}', {}, ["backend vxlan, the store has host-gw"]),
        ('{"Type": "host-gw"}', {"backend": None}, []),
        ('{"Type": "udp", "Also": {"Type": "vxlan"}}', {"vni": 2, "port": 7}, []),
        (
            '{"Type": "host-gw", "Also": {"Type": "vxlan"}}',
            {"backend": "udp"},
            ["backend udp, the store has host-gw or vxlan"],
        ),
        ("{}", {"backend": "udp"}, []),
        (
            '{"Type": "vxlan"}',
            {"network": ("10.6.0.0/16 /24", "fc00::/48 /64")},
            ["network 10.6.0.0/16 /24, fc00::/48 /64, the store has 10.5.0.0/16 /24"],
        ),
        ('{"Type": "vxlan"}', {"network": ()}, []),
    ],
)
def test_what_a_node_runs_is_compared_with_the_store_as_far_as_it_is_known(
    backend: str, changes: dict[str, Any], unlike: list[str]
) -> None:
    stored = parse(f'{{"Network": "10.5.0.0/16", "Backend": {backend}}}')
    assert list(unlike_stored(stored, replace(RUNS, **changes))) == unlike


def test_config_of_the_store_is_compared_with_a_daemon_only() -> None:
    facts = replace(WELL, stored=parse('{"Network": "10.6.0.0/16", "Backend": {"Type": "udp"}}'))
    assert evidence("config", facts) == [
        "network 10.5.0.0/16 /24, the store has 10.6.0.0/16 /24; backend vxlan, the store has udp"
    ]
    assert not said("config", replace(facts, origin="store"))


# ---- the lease and the clock ------------------------------------------------------------------------


def lease(**changes: Any) -> Facts:
    return document(lease=DOCUMENT["lease"] | changes)


@pytest.mark.parametrize(
    ("facts", "problems"),
    [
        (WELL, []),
        (lease(expires=NOW + 600), []),
        (lease(expires=NOW + 599), ["the lease ends in 599 s"]),
        (lease(expires=None), []),
        (lease(expires=0), []),
        (document(lease=None), []),
        (replace(document(lease=None), origin="store"), ["this node has no lease"]),
        (replace(WELL, origin="store"), []),
    ],
)
def test_lease_that_is_missing_or_ends_within_ten_minutes_is_told(facts: Facts, problems: list[str]) -> None:
    assert [problem for _, problem, _ in said("lease", facts)] == problems


@pytest.mark.parametrize(("renewals", "words"), [({}, "none"), ({"failed": 3}, "{'failed': 3}")])
def test_renewals_of_a_lease_that_ends_are_told(renewals: dict[str, int], words: str) -> None:
    found = evidence("lease", lease(expires=NOW, renewals=renewals))
    assert found == [f"subnet 10.5.1.0/24, renewals: {words}"]


@pytest.mark.parametrize(
    ("part", "text", "found"),
    [("lease", f"{LEASE_TAKEN} x; stop it", 1), ("store", f"{LEASE_TAKEN} x", 0), ("lease", "renewal", 0)],
)
def test_lease_that_another_node_took_is_told_with_the_remedy(part: str, text: str, found: int) -> None:
    facts = document(health={"conditions": [{"part": part, "problem": text}]})
    cure = "stop it; then restart flanneld here, and recreate the containers if its subnet is another one"
    assert said("lease", facts) == [(PROBLEM, f"{LEASE_TAKEN} x", cure)] * found


@pytest.mark.parametrize(
    ("ahead", "found"),
    [
        (300.0, []),
        (-300.0, []),
        (5400.0, ["this host's clock is 1.5 h ahead of etcd's"]),
        (-5400.0, ["this host's clock is 1.5 h behind etcd's"]),
        (301.0, ["this host's clock is 0.1 h ahead of etcd's"]),
    ],
)
def test_clock_may_differ_from_that_of_etcd_by_five_minutes(ahead: float, found: list[str]) -> None:
    facts = replace(WELL, etcd=EtcdHealth("https://etcd:2379", ahead, True, ""))
    assert [problem for _, problem, _ in said("clock", facts)] == found


@pytest.mark.parametrize(("is_synchronised", "found"), [(True, 0), (None, 0), (False, 1)])
def test_clock_that_is_known_not_to_be_synchronised_is_a_hint(
    is_synchronised: bool | None, found: int
) -> None:
    seen = said("clock", replace(WELL, clock_is_synchronised=is_synchronised))
    assert [severity for severity, *_ in seen] == [HINT] * found


# ---- the store and the daemon -----------------------------------------------------------------------

MUTE, NO_SPACE = "etcd does not answer (http://etcd:2379: x)", "etcd refuses: mvcc: database space exceeded"
SICK = EtcdHealth("http://etcd:2379", 0.0, False, "RAFT NO LEADER")


@pytest.mark.parametrize(
    ("store", "etcd", "told_by", "cure"),
    [
        (mute(MUTE, remedy="see that it runs"), None, "etcd v3 at x", "see that it runs"),
        (mute(MUTE), None, "etcd v3 at x", "see the log of the store"),
        (mute(MUTE, remedy="see"), replace(SICK, is_healthy=True), "etcd v3 at x", "see"),
        (mute(NO_SPACE, remedy="compact it"), SICK, "etcd v3 at x", "compact it"),
        (mute(MUTE, remedy="see that it runs"), SICK, "http://etcd:2379/health: RAFT NO LEADER", ""),
    ],
    ids=["mute", "no remedy", "healthy", "an alarm", "no leader"],
)
def test_store_with_a_problem_is_told_by_what_it_says_of_its_health(
    store: dict[str, Any], etcd: EtcdHealth | None, told_by: str, cure: str
) -> None:
    facts = replace(document(store=store), etcd=etcd)
    ((_, problem, how),) = said("store", facts)
    assert (problem, evidence("store", facts)) == (store["problem"], [told_by])
    assert how == cure if cure else "see that it runs" not in how


@pytest.mark.parametrize(
    ("part", "failed", "found"),
    [(SourcePart.STORE, True, 1), (SourcePart.STORE, False, 0), (SourcePart.DAEMON, True, 0)],
)
def test_store_that_was_asked_and_is_silent_is_told(part: SourcePart, failed: bool, found: int) -> None:
    facts = replace(WELL, unknown=(Unknown(part, "no route to host", failed=failed),))
    assert evidence("store", facts) == ["no route to host"] * found


@pytest.mark.parametrize(
    ("health", "told_by", "cure"),
    [
        ({"missing": ["no lease yet"]}, "no lease yet", "wait, or see its log"),
        ({"missing": ["no lease yet; look"]}, "no lease yet; look", "look"),
        (
            {"missing": ["no lease yet; look"], "waiting": ["etcd is full; compact it", "x"]},
            "no lease yet; etcd is full",
            "compact it",
        ),
    ],
)
def test_what_is_missing_is_told_with_what_the_daemon_waits_for(
    health: dict[str, Any], told_by: str, cure: str
) -> None:
    facts = document(health=health)
    assert (evidence("ready", facts), said("ready", facts)[0][2]) == ([told_by], cure)


SILENT = Unknown(SourcePart.DAEMON, "no daemon answers at /x")
EVENT = {"time": 0.0, "severity": "E", "source": "main", "text": "no etcd"}


@pytest.mark.parametrize(
    ("facts", "problem", "told_by"),
    [
        (replace(WELL, origin="host"), "the daemon is not running", ""),
        (replace(WELL, origin="store", unknown=(SILENT,)), "the daemon is not running", SILENT.reason),
        (
            replace(document(events=[EVENT]), origin="host", unknown=(SILENT,)),
            "the daemon is not running",
            f"{SILENT.reason}; its last error, 1970-01-01T00:00:00Z: no etcd",
        ),
        (
            replace(WELL, origin="host", unknown=(replace(SILENT, hangs=True),)),
            "the daemon hangs",
            SILENT.reason,
        ),
        (
            replace(WELL, origin="host", unknown=(replace(SILENT, part=SourcePart.STORE, hangs=True),)),
            "the daemon is not running",
            "",
        ),
    ],
    ids=["nothing known", "silent", "its last words", "it hangs", "the store hangs"],
)
def test_daemon_that_is_silent_is_told_with_its_last_words(facts: Facts, problem: str, told_by: str) -> None:
    ((_, what, how),) = said("daemon", facts)
    assert (what, evidence("daemon", facts)) == (problem, [told_by])
    assert ("systemctl restart" in how) is ("hangs" in problem)


@pytest.mark.parametrize(
    ("limits", "backend", "problem"),
    [
        ((7, "CAP_NET_ADMIN"), "vxlan", "the daemon runs in another network namespace than this host"),
        ((0, "CAP_NET_ADMIN"), "vxlan", "the daemon lacks CAP_NET_ADMIN"),
        ((0, "CAP_NET_ADMIN"), "alloc", ""),
        ((0, ""), "vxlan", ""),
    ],
)
def test_daemon_without_its_rights_or_elsewhere_is_told(
    limits: tuple[int, str], backend: str, problem: str
) -> None:
    facts = replace(document(network=DOCUMENT["network"] | {"backend": backend}), limits=limits)
    assert [what for _, what, _ in said("daemon", facts)] == [problem] * bool(problem)


def test_dry_run_of_a_start_is_told_with_its_remedy() -> None:
    fails = Unknown(SourcePart.START, "flanneld cannot start: no PSK", remedy="set it")
    facts = replace(WELL, origin="host", unknown=(SILENT, fails))
    assert said("start", facts) == [(PROBLEM, fails.reason, "set it; then start flanneld")]
    assert said("start", replace(facts, unknown=(replace(fails, remedy=""),)))[0][2].startswith("see its log")


def test_each_late_thread_and_lost_notifications_are_told() -> None:
    assert evidence("late", document(health={"late": ["a", "b"]})) == ["a", "b"]
    assert [each[1] for each in said("overruns", document(lost_notifications=1))] == [
        "notifications of the kernel were lost 1 time"
    ]


def test_refusals_of_a_clouds_tables_are_told_apart() -> None:
    refused = [
        {"object": table, "reason": f"{table} says no", "table": table, "remedy": remedy}
        for table, remedy in (("cloud-routes", "allow it"), ("cloud-forwarding", ""), ("routes", "x"))
    ]
    facts = document(refused=refused)
    assert said("cloud routes", facts) == [(PROBLEM, "cloud-routes says no", "allow it")]
    assert said("cloud forwarding", facts) == [(PROBLEM, "cloud-forwarding says no", "see the daemon's log")]


# ---- addresses ----------------------------------------------------------------------------------------


def announced(*peers: tuple[str, ...], own: tuple[str, ...] = (), backend: str = "vxlan") -> Facts:
    nodes = [
        DOCUMENT["peers"][0] | {"subnets": [f"10.5.{net}.0/24"], "public_ips": ips}
        for net, ips in enumerate(peers, 2)
    ]
    uplink = DOCUMENT["uplink"] | {"public_ips": own}
    return document(peers=nodes, uplink=uplink, network=DOCUMENT["network"] | {"backend": backend})


@pytest.mark.parametrize(
    ("facts", "problem", "by"),
    [
        (announced(("192.0.2.2",), ("192.0.2.3",), own=("192.0.2.1",)), "", ""),
        (
            announced(("192.0.2.2",), ("192.0.2.2",), own=("192.0.2.1",)),
            "the public IP 192.0.2.2 is used twice",
            "by 10.5.2.0/24, 10.5.3.0/24",
        ),
        (
            announced(("192.0.2.1",), own=("192.0.2.1",)),
            "the public IP 192.0.2.1 is used twice",
            "by 10.5.2.0/24, this node",
        ),
        (
            announced(("192.0.2.1",), own=("192.0.2.1",), backend="wireguard"),
            "several nodes have the public IP 192.0.2.1",
            "by 10.5.2.0/24, this node",
        ),
        (
            announced(("192.0.2.2",), ("192.0.2.2",), own=("192.0.2.1",), backend="wireguard"),
            "several nodes have the public IP 192.0.2.2",
            "by 10.5.2.0/24, 10.5.3.0/24",
        ),
        (
            announced(("192.0.2.1",), own=("192.0.2.1",), backend="xfrm-mesh"),
            "the public IP 192.0.2.1 is used twice",
            "by 10.5.2.0/24, this node",
        ),
        (
            announced(("2001:db8::2",), own=("192.0.2.1", "fe80::1")),
            "this node announces fe80::1, which leads nowhere from other nodes",
            "eth0 had only this IPv6 address",
        ),
        (announced(("fe80::2", "192.0.2.2"), own=("192.0.2.1", "fe80::1")), "", ""),
        (announced(("2001:db8::2",), own=("192.0.2.1", "2001:db8::1")), "", ""),
    ],
)
def test_public_ip_of_two_nodes_or_of_a_link_alone_is_told_with_who_has_it(
    facts: Facts, problem: str, by: str
) -> None:
    found = said("public ip", facts)
    assert [what for _, what, _ in found] == [problem] * bool(problem)
    assert evidence("public ip", facts) == [by] * bool(problem)
    severity = HINT if problem.startswith("several") else PROBLEM
    assert all(each is severity for each, *_ in found)


@pytest.mark.parametrize(
    ("subnets", "changes", "found"),
    [
        (["10.5.1.0/24"], {}, []),
        (["10.6.1.0/24", "fc00::/64"], {}, ["10.6.1.0/24", "fc00::/64"]),
        (["10.0.0.0/8"], {}, ["10.0.0.0/8"]),
        (["10.6.1.0/24"], {"origin": "host"}, []),
    ],
)
def test_each_subnet_outside_the_network_is_told(
    subnets: list[str], changes: dict[str, Any], found: list[str]
) -> None:
    facts = replace(lease(subnets=subnets), **changes)
    assert [problem for _, problem, _ in said("network", facts)] == [
        f"our subnet {each} is outside the network" for each in found
    ]
    ranges = {"backend": "vxlan", "ranges": []}
    assert not said("network", document(network=ranges, lease=DOCUMENT["lease"] | {"subnets": subnets}))


@pytest.mark.parametrize(("state", "found"), [("refused", 1), ("unsafe", 0), ("in the kernel", 0)])
def test_refused_lease_is_told_with_its_reason(state: str, found: int) -> None:
    facts = peer(state=state, reason="no VtepMAC")
    assert evidence("refusals", facts) == ["no VtepMAC"] * found
    assert number("unsafe leases", facts) == (state == "unsafe")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (f"192.0.2.255 is {LINK_BROADCAST}; correct it", "see whether the prefix length of eth0 is that of"),
        (
            "lo has 10.5.2.0/24; renumber it",
            "if it is not needed, and no address of lo is in it: ip route del local 10.5.2.0/24 dev lo; a",
        ),
        ("lo has 10.5.2.1; renumber it", "give this host's own network other addresses"),
        ("lo2 has 10.5.2.0/24; renumber it", "give this host's own network other addresses"),
        (
            "it announces 192.0.2.1, an address of this host; give it another",
            "if this address belongs to that node: ip address del 192.0.2.1 dev eth0; else correct",
        ),
        ("it announces 192.0.2.9, an address of this host", "give this host's own network other addresses"),
        ("br7 is connected to 10.5.2.0/24; renumber that", "give this host's own network other addresses"),
    ],
)
def test_unsafe_lease_gets_the_advice_that_fits_what_it_claims(reason: str, advice: str) -> None:
    facts = peer(state="unsafe", reason=reason)
    ((_, problem, how),) = said("unsafe leases", facts)
    assert problem == "the lease 10.5.2.0/24 would harm this host"
    assert evidence("unsafe leases", facts) == [reason.partition("; ")[0]]
    assert how.startswith(advice)
    assert not said("unsafe leases", FORMER)
