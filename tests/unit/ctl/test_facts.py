"""Which configurations container runtimes find, and what the doctor reads of an uplink and of containers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl import doctor, drops, inside
from flanneld.ctl.checks import Facts
from flanneld.ctl.checks.host import CniFile, cni_confs
from flanneld.ctl.inside import Container
from flanneld.ctl.source import DataSource
from flanneld.network import interfaces
from flanneld.network.firewall.fate import DROP, Rule, Test
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.rtnetlink import traffic_control
from tests.unit.ctl import test_evidence
from tests.unit.ctl.documents import status_of
from tests.unit.ctl.test_checks import CONTAINER


def test_configs_come_in_the_order_of_their_names_with_the_plug_ins_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "20-other.conf").write_text('{"type": "bridge"}')
    (tmp_path / "10-flannel.conflist").write_text('{"plugins": [{"type": "flannel"}, {"type": "portmap"}]}')
    assert list(cni_confs(tmp_path)) == [
        CniFile(f"{tmp_path}/10-flannel.conflist", ("flannel", "portmap")),
        CniFile(f"{tmp_path}/20-other.conf", ("bridge",)),
    ]


def test_what_is_no_config_is_left_out(tmp_path: Path) -> None:
    for name, text in {
        "00-disabled.conflist.bak": '{"type": "calico"}',
        "01.conf": "no JSON",
        "02.conf": "[]",
        "03.conflist": '{"plugins": 7}',
        "04.conflist": '{"plugins": [{}]}',
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "05.conf").mkdir()
    assert list(cni_confs(tmp_path)) == []


def test_a_host_without_cni_has_none(tmp_path: Path) -> None:
    assert list(cni_confs(tmp_path / "net.d")) == []


@pytest.mark.parametrize(("cpus", "queues"), [(1, (1, 1)), (2, (1, 2)), (8, (1, 4)), (None, (1, 1))])
def test_queues_without_a_cpu_are_of_no_use(
    monkeypatch: pytest.MonkeyPatch, cpus: int | None, queues: tuple[int, int]
) -> None:
    monkeypatch.setattr(interfaces, "channels", lambda _name: (1, 4))
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert doctor._speed("lo") == (False, queues)


#: A node whose peer is not probed, and whose interfaces this host does not have.
DOCUMENT: dict[str, Any] = test_evidence.document(0) | {
    "devices": ["no-tunnel"],
    "uplink": {"name": "no-uplink", "mtu": 1500, "addresses": ["192.0.2.1"]},
    "peers": [test_evidence.peer(0) | {"state": "pending"}],
}
SILENT = replace(CONTAINER, port="no-port")
HEARD = replace(SILENT, path="/run/netns/b", address=SILENT.address + 1)


def gathered(document: dict[str, Any], port: str, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Facts about two containers. While the first gets no answers, each queue drops three packets."""
    dropped = 4
    tests = (Test("source", (ip_network("10.5.1.0/24"),)),)
    chains = {"FORWARD": (Rule(DROP, tests, text="-s 10.5.1.0/24 -j DROP"),)}
    base = BaseChain("nft", 4, "ip filter", "FORWARD", "forward", False, chains)

    def answered(facts: Facts) -> Iterator[Container]:
        nonlocal dropped
        dropped += 3
        yield replace(facts.containers[0], unanswered="all")

    def queue_drops(names: Mapping[int, str]) -> Counter[tuple[str, str]]:
        return Counter({(name, "tbf"): dropped for name in names.values()})

    monkeypatch.setattr(inside, "read_containers", lambda *_: [replace(SILENT, port=port), HEARD])
    monkeypatch.setattr(inside, "answered", answered)
    monkeypatch.setattr(traffic_control, "queue_drops", queue_drops)
    monkeypatch.setattr(drops, "read_bases", lambda _: [base])
    return doctor.gather(DataSource("host", status_of(document)))


def test_rules_are_looked_for_that_drop_packets_of_containers_without_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gathered(DOCUMENT, "no-port", monkeypatch).containers
    assert [(each.unanswered, each.dropped_by) for each in found] == [
        ("all", ("chain FORWARD of table ip filter: -s 10.5.1.0/24 -j DROP",)),
        ("", ()),
    ]


@pytest.mark.parametrize(
    ("changes", "port", "number"),
    [
        ({}, "no-port", 0),
        ({}, "lo", 3),
        ({"uplink": DOCUMENT["uplink"] | {"name": "lo"}}, "no-port", 3),
        ({"devices": ["lo"]}, "no-port", 3),
        ({"lease": {"subnets": ["127.0.0.0/24"]}}, "no-port", 3),
    ],
    ids=["none", "a container's port", "the uplink", "the tunnel", "the bridge"],
)
def test_packets_that_queues_drop_are_counted_on_each_way_of_containers(
    changes: dict[str, Any], port: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gathered(DOCUMENT | changes, port, monkeypatch).queued["lo", "tbf"] == number
