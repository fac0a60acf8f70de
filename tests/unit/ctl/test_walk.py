"""The stages of ``flannelctl netcheck`` on loopback, where each address of 127.0.0.0/8 is a host."""

from __future__ import annotations

import errno
from ipaddress import ip_address
from typing import Any

import pytest

from flanneld.ctl.netcheck import Series, Stage, Walk, spoilt
from flanneld.ctl.nodes import read
from flanneld.ctl.output import State
from flanneld.ctl.source import DataSource
from flanneld.model import IPAddress
from flanneld.state.resources import Address
from tests.unit.ctl.documents import object_of, status_of
from tests.unit.network.test_survey import closed_port, node

NODE, SUBNET, TARGET = "127.0.0.9", "127.0.7.0/24", "127.0.7.0"
OVERLAY = [object_of(Address("flannel.1", ip_address("127.0.6.0")))]


def document(**changes: Any) -> dict[str, Any]:
    told = {
        "network": {"backend": "vxlan", "port": closed_port()},
        "uplink": {"name": "lo", "mtu": 1500, "addresses": ["127.0.0.1"]},
        "mtu": 1450,
        "local": OVERLAY,
        "peers": [{"subnets": [SUBNET], "public_ips": [NODE, "127.0.0.8"], "backend": "vxlan"}],
    }
    return told | changes


def walked(
    port: int, count: int = 2, container: IPAddress | None = None, **changes: Any
) -> tuple[list[Series], list[str]]:
    told = status_of(document(**changes))
    said: list[str] = []
    return list(Walk(told.each_peer[0], told, port, count, said.append).stages(container)), said


def shown(found: list[Series]) -> list[tuple[str, str, int, int, int]]:
    """Stage, target, size, messages sent and answered of each."""
    return [(each.stage.value, each.to, each.size, each.sent, len(each.rtts)) for each in found]


def test_each_stage_to_a_node_is_walked_with_small_and_large_packets() -> None:
    with node() as port:
        found, said = walked(port, container=ip_address("127.0.7.9"))
    small = found[3].size
    assert shown(found) == [
        ("underlay", NODE, 84, 2, 2),
        ("port", NODE, small, 1, 0),
        ("tunnel", TARGET, 84, 2, 2),
        ("udp", TARGET, small, 2, 2),
        ("there", TARGET, 1450, 2, 2),
        ("back", TARGET, 1450, 2, 2),
        ("container", "127.0.7.9", 84, 2, 2),
    ]
    assert said == [f"{SUBNET} ({NODE}): {each.stage}" for each in found]
    assert (found[1].error, found[1].is_refused, found[1].arrived) == (errno.ECONNREFUSED, True, False)
    assert found[1].port > 0
    assert found[3].facts == {"version": "1"}
    assert all(each.lost == 0 for each in found if each.stage is not Stage.PORT)


def test_node_without_an_address_in_the_overlay_is_asked_at_its_public_ip() -> None:
    with node() as port:
        found, _ = walked(port, 1, local=[])
    assert [(each.stage.value, each.to, each.size) for each in found if each.stage is not Stage.PORT] == [
        ("underlay", NODE, 84),
        ("udp", NODE, found[-3].size),
        ("there", NODE, 1500),
        ("back", NODE, 1500),
    ]


@pytest.mark.parametrize(("local", "lacking"), [(OVERLAY, "mtu"), ([], "uplink")])
def test_without_a_known_size_no_large_packet_is_sent(local: list[Any], lacking: str) -> None:
    told = {key: value for key, value in document(local=local).items() if key != lacking}
    status = status_of(told)
    with node() as port:
        found = list(Walk(status.each_peer[0], status, port, 1, lambda _: None).stages(None))
    assert Stage.UDP in [each.stage for each in found]
    assert {Stage.THERE, Stage.BACK}.isdisjoint(each.stage for each in found)


def test_daemon_that_refuses_queries_is_asked_once() -> None:
    found, _ = walked(closed_port(), 5)
    assert shown(found)[-1][3:] == (1, 0)
    assert found[-1].is_refused
    assert found[-1].arrived


def test_lost_message_counts_and_the_next_ones_are_sent() -> None:
    with node(ignored=1) as port:
        found, _ = walked(port)
    udp = next(each for each in found if each.stage is Stage.UDP)
    assert (udp.sent, len(udp.rtts), udp.lost) == (2, 1, 1)


def test_carriers_of_another_family_are_no_ports_of_this_address() -> None:
    ranges = [{"network": "10.5.0.0/16", "subnet_len": 24}, {"network": "fc00::/48", "subnet_len": 64}]
    network = {"backend": "vxlan", "port": closed_port(), "ranges": ranges}
    with node() as port:
        found, _ = walked(port, 1, network=network)
    assert [each.stage for each in found].count(Stage.PORT) == 1
    with node() as port:
        found, _ = walked(port, 1, network={"backend": "ipip"})
    assert Stage.PORT not in [each.stage for each in found]


def udp(*rtts: float, error: int = 0, seen: list[str] | None = None) -> Series:
    return Series(Stage.UDP, TARGET, 84, 2, rtts, error, {"seen": seen} if seen else {})


@pytest.mark.parametrize(
    ("found", "results"),
    [
        ([udp(0.1)], [("checksums", State.OK)]),
        ([udp(error=errno.ECONNREFUSED)], [("checksums", State.OK)]),
        ([udp(0.1, seen=["127.0.6.0"])], [("checksums", State.OK), ("NAT, overlay", State.OK)]),
        ([udp(0.1, seen=["192.0.2.1"])], [("checksums", State.OK), ("NAT, overlay", State.HINT)]),
        ([], []),
    ],
    ids=["an answer", "refused", "its own address", "another address", "not asked"],
)
def test_what_becomes_of_udp_is_told_where_it_was_asked(
    found: list[Series], results: list[tuple[str, State]]
) -> None:
    told = status_of(document())
    seen = list(spoilt(told.each_peer[0], found, 1, told))
    assert [(each.check, each.state) for each in seen] == results
    alone = status_of(document(local=[]))
    assert [each.check for each in spoilt(alone.each_peer[0], found, 1, alone)] == ["checksums"] * bool(found)


@pytest.mark.parametrize(
    ("echo", "state", "text"),
    [
        ((0.1,), State.PROBLEM, "UDP arrives without checksums only; this node"),
        ((), State.UNKNOWN, "the node"),
    ],
)
def test_lost_queries_are_sent_without_checksums(echo: tuple[float, ...], state: State, text: str) -> None:
    told = status_of(document())
    with node() as port:
        found = [Series(Stage.TUNNEL, TARGET, 84, 2, echo), udp()]
        (result,) = spoilt(told.each_peer[0], found, port, told)
    assert result.state == state
    assert result.found.startswith(text)


def test_nodes_answer_queries_and_silent_ones_echoes_there_and_at_their_public_ip() -> None:
    peers = [
        {"subnets": [f"127.0.{number}.0/24"], "public_ips": [public]}
        for number, public in ((7, "127.0.0.7"), (8, "127.0.0.8"))
    ]
    with node() as port:
        told = status_of(document(answer_port=port, peers=peers))
        cluster = read(DataSource("daemon", told))
    assert [(each.answers, each.told and each.told.version) for each in cluster.nodes] == [
        ("daemon", "1")
    ] * 2
    assert cluster.own == {"127.0.6.0"}
    told = status_of(document(answer_port=closed_port(), peers=peers))
    silent = read(DataSource("daemon", told)).nodes
    assert [(each.answers, each.echo.arrived, each.underlay.arrived) for each in silent] == [
        ("kernel", True, True)
    ] * 2
    assert cluster.now > 0
