"""``flannelctl nodes``: which address of a node is asked, what is told of it, and how it is shown."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.ctl.checks.cluster import remarks
from flanneld.ctl.nodes import (
    Cluster,
    ClusterNode,
    Told,
    answer_remedy,
    gather,
    own_node,
    plain,
    port_of,
    table,
    target_of,
    told,
    vxlan_of,
)
from flanneld.ctl.output import when
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, Status
from flanneld.model import IPAddress
from flanneld.network.survey import SILENCE, Reply
from flanneld.options import Options
from flanneld.state.resources import Address, Vxlan
from tests.unit.ctl.documents import object_of, status_of
from tests.unit.ctl.test_cluster import MUTE, NOW, TOLD, cluster, node

OWN4, OWN6 = ip_address("10.5.1.0"), ip_address("fc00:5:0:1::")
PEER = PeerStatus(("fc00:5:0:2::/64", "10.5.2.0/24"), ("192.0.2.2", "2001:db8::2"))


@pytest.mark.parametrize(
    ("own", "peer", "target"),
    [
        ({OWN4}, PEER, ("10.5.2.0", True)),
        ({OWN6}, PEER, ("fc00:5:0:2::", True)),
        ({OWN4, OWN6}, PEER, ("fc00:5:0:2::", True)),
        (set(), PEER, ("192.0.2.2", False)),
        (set(), replace(PEER, public_ips=()), None),
        ({OWN4}, replace(PEER, subnets=("fc00:5:0:2::/64",)), None),
    ],
    ids=["IPv4", "IPv6", "the first", "no overlay", "no address", "another family"],
)
def test_node_is_asked_in_the_overlay_where_we_have_an_address_there(
    own: set[IPAddress], peer: PeerStatus, target: tuple[str, bool] | None
) -> None:
    found = target_of(peer, own)
    assert (found and (str(found[0]), found[1])) == target


@pytest.mark.parametrize(
    ("document", "flag", "port"),
    [({"answer_port": 8471}, 9, 8471), ({"answer_port": 0}, 9, 9), ({}, 9, 9), ({}, 0, 8470)],
)
def test_port_to_ask_is_the_daemons_own_or_that_of_the_flags(
    document: dict[str, Any], flag: int, port: int
) -> None:
    assert port_of(DataSource("daemon", status_of(document), options=Options(answer_port=flag))) == port


def test_remedy_for_a_mute_daemon_names_port_and_place() -> None:
    assert answer_remedy(8471, "here").startswith(
        "start flanneld here with -answer-port=8471, and let UDP 8471 in"
    )


VXLAN = Vxlan("flannel.1", 7, 2, ip_address("192.0.2.1"), 4789, "02:00:00:00:00:01", 1450)
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "pid": 7,
    "store": {"name": "etcd v3 at x", "answers": True},
    "health": {
        "ready": False,
        "conditions": [{"part": part, "problem": "x"} for part in ("store", "lease", "store")],
    },
    "network": {
        "backend": "vxlan",
        "also": "wireguard",
        "ranges": [{"network": "10.5.0.0/16", "subnet_len": 24}],
    },
    "lease": {"subnets": ["10.5.1.0/24"], "expires": NOW, "macs": ["02:00:00:00:00:01"]},
    "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": ["203.0.113.1"]},
    "mtu": 1450,
    "local": [object_of(Address("flannel.1", OWN4)), object_of(VXLAN)],
}


def test_this_node_is_told_by_its_own_status() -> None:
    found = own_node(status_of(DOCUMENT))
    assert (found.subnets, found.public_ips, found.macs) == (
        ("10.5.1.0/24",),
        ("203.0.113.1",),
        ("02:00:00:00:00:01",),
    )
    assert (found.backend, found.also, found.vnis, found.expires) == ("vxlan", "wireguard", (7,), NOW)
    assert (found.is_own, found.is_running, found.answers) == (True, True, "daemon")
    assert found.told == Told(
        "1.0",
        ("10.5.0.0/16 /24",),
        "vxlan",
        7,
        4789,
        1450,
        1500,
        "etcd v3",
        ready=False,
        conditions=("lease", "store"),
    )
    assert vxlan_of(status_of(DOCUMENT)) == VXLAN


def test_this_node_without_a_daemon_answers_nothing() -> None:
    found = own_node(status_of({key: DOCUMENT[key] for key in ("lease", "network")}))
    assert (found.is_running, found.answers, found.vnis, found.public_ips) == (False, "nothing", (), ())
    assert own_node(Status()).also is not None
    assert vxlan_of(Status()) is None


@pytest.mark.parametrize(
    ("changes", "answers", "rtt"),
    [
        ({}, "daemon", 0.001),
        (MUTE, "nothing", None),
        ({**MUTE, "echo": Reply(0.002)}, "kernel", 0.002),
        ({**MUTE, "query": Reply(error=111)}, "kernel", None),
        ({**MUTE, "underlay": Reply(0.003)}, "host", None),
        ({**MUTE, "echo": Reply(0.002), "underlay": Reply(0.003)}, "kernel", 0.002),
        ({"echo": Reply(0.002)}, "daemon", 0.001),
    ],
)
def test_farthest_part_of_a_node_that_answers_is_told(
    changes: dict[str, Any], answers: str, rtt: float | None
) -> None:
    found = node(4, **changes)
    assert (found.answers, found.rtt) == (answers, rtt)


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"seen": ["10.5.1.0", "x"]}, "10.5.1.0"),
        ({"seen": []}, None),
        ({"seen": "10.5.1.0"}, None),
        ({}, None),
    ],
)
def test_address_that_a_node_sees_is_the_first_that_it_tells(facts: dict[str, Any], seen: str | None) -> None:
    assert told(facts).seen == seen


def test_replies_are_those_of_the_targets_and_of_their_first_public_ip() -> None:
    peers = [
        {"subnets": ["10.5.2.0/24"], "public_ips": ["192.0.2.2", "192.0.2.9"], "macs": ["02:00:00:00:00:0A"]},
        {"subnets": ["10.5.3.0/24"], "conflicts": ["a", "b"]},
        {"subnets": ["fc00::/64"], "public_ips": ["192.0.2.4"], "reason": "why", "conflicts": ["c"]},
    ]
    echo = {ip_address("10.5.2.0"): Reply(0.1), ip_address("192.0.2.2"): Reply(0.2)}

    def ask(replies: dict[IPAddress, Reply]) -> Any:
        return lambda targets: {each: replies.get(each, SILENCE) for each in targets}

    status = status_of({"peers": peers, "local": [object_of(Address("flannel.1", OWN4))]})
    first, second, third = gather(status, ask({}), ask(echo), NOW).nodes
    assert (first.echo.rtt, first.underlay.rtt, first.in_overlay) == (0.1, 0.2, True)
    assert first.macs == ("02:00:00:00:00:0a",)
    assert (second.underlay, second.reason) == (SILENCE, "a, b")
    assert (third.target, third.in_overlay, third.reason) == (None, False, "why")


NO_ONE: Any = dict


def test_this_node_is_listed_only_if_its_lease_is_known() -> None:
    def nodes(document: dict[str, Any]) -> list[bool]:
        return [each.is_own for each in gather(status_of(document), NO_ONE, NO_ONE, NOW).nodes]

    assert (nodes({}), nodes({"lease": None}), nodes(DOCUMENT)) == ([], [True], [True])
    assert gather(status_of(DOCUMENT), NO_ONE, NO_ONE, NOW).own == {"10.5.1.0"}


def test_wide_table_has_what_the_lease_and_the_daemon_say_beside() -> None:
    found = cluster(told=replace(TOLD, conditions=("a", "b")), also="wireguard")
    rows = {row[0]: row for row in table(found, [], is_wide=True).rows}
    columns = table(found, [], is_wide=True).columns
    assert columns[10:] == ("uplink mtu", "also", "mac", "lease ends", "conditions", "note")
    ends = when(NOW + 80_000)
    assert rows["10.5.4.0/24"][10:] == ("1500", "wireguard", "02:00:00:00:00:04", ends, "a, b", "")
    mute = table(cluster(**MUTE, expires=None), [], is_wide=True).rows[-1]
    assert mute[10:] == ("-", "-", "02:00:00:00:00:04", "-", "-", "")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({**MUTE, "echo": Reply(0.1)}, "does not answer queries"),
        (
            {**MUTE, "echo": Reply(0.1), "expires": NOW - 1},
            "its lease has expired; does not answer queries",
        ),
        (MUTE, "no answer"),
    ],
)
def test_note_of_a_node_ends_with_what_explains_missing_columns(changes: dict[str, Any], note: str) -> None:
    found = cluster(**changes)
    rows = {row[0]: row for row in table(found, remarks(found)).rows}
    assert rows["10.5.4.0/24"][-1] == note


def test_nodes_are_told_to_programs_with_all_that_breaks_a_rule() -> None:
    found = cluster(told=replace(TOLD, mtu=1400), also="wireguard")
    described = plain(found, remarks(found))
    assert described[1] | {"notes": []} == {
        "subnets": ("10.5.2.0/24",),
        "public_ips": ("198.18.0.2",),
        "is_own": False,
        "state": "ok",
        "answers": "daemon",
        "rtt": 0.001,
        "backend": "vxlan",
        "also": None,
        "vni": 1,
        "expires": NOW + 80_000,
        "port": 8472,
        "mtu": 1450,
        "uplink_mtu": 1500,
        "version": "1.0",
        "store": "etcd v2",
        "ready": True,
        "conditions": (),
        "notes": [],
    }
    assert described[3]["also"] == "wireguard"
    assert described[3]["notes"] == [{"rule": "MTUs", "text": "MTU 1400, most have 1450"}]
    mute = plain(cluster(**MUTE), [])[3]
    assert (mute["port"], mute["ready"], mute["conditions"]) == (None, None, None)


def test_config_of_the_store_is_beaten_by_no_majority_of_nodes_that_tell_nothing() -> None:
    stored = parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": 2}}')
    mute = (node(number, **MUTE) for number in (1, 2))
    found = remarks(Cluster((*mute,), frozenset(), NOW, stored))
    assert {each.text for each in found if each.rule.name == "configs"} == {"VNI 1, the store has 2"}


def test_vni_of_a_node_is_its_lowest() -> None:
    assert ClusterNode(("a",), vnis=(9, "x", 3)).vni == 3
    assert ClusterNode(("a",), vnis=(True,)).vni is None
