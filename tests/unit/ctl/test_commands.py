"""What commands of ``flannelctl`` print and return for what a daemon tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.main import FINE, NO_DAEMON, PROBLEMS, run
from flanneld.ctl.output import when
from tests.unit.ctl.test_main import daemon, told

CONDITION = {"part": "store", "problem": "x"}
PEER: dict[str, Any] = {"subnets": ["10.5.2.0/24"], "public_ips": ["192.0.2.2"], "state": "in the kernel"}


def ran(folder: Path, document: dict[str, Any], *words: str) -> int:
    with daemon(folder, json.dumps({"version": "1"} | document).encode()):
        return run([*words, f"--subnet-file={folder / 'subnet.env'}"], {})


@pytest.mark.parametrize(
    ("health", "status"),
    [
        ({}, FINE),
        ({"conditions": []}, FINE),
        ({"missing": ["a lease"]}, PROBLEMS),
        ({"late": ["reconciler"]}, PROBLEMS),
        ({"conditions": [CONDITION]}, PROBLEMS),
        ({"waiting": ["etcd"]}, FINE),
    ],
)
def test_status_is_wrong_if_something_is_missing_late_or_a_condition(
    health: dict[str, Any], status: int, tmp_path: Path
) -> None:
    assert ran(tmp_path, {"health": health}, "status") == status
    assert ran(tmp_path, {}, "status") == FINE


@pytest.mark.parametrize(("state", "status"), [("in the kernel", FINE), ("refused", PROBLEMS)])
def test_peers_are_wrong_if_one_is_lost(state: str, status: int, tmp_path: Path) -> None:
    assert ran(tmp_path, {"peers": [PEER, PEER | {"state": state}]}, "peers") == status


EVENTS = [
    {"time": 1.0, "severity": "I", "source": "peers", "text": "Restored route 10.5.2.0/24", "more": 7},
    {"time": 2.0, "severity": "E", "source": "store", "text": "etcd is away"},
]


def test_lines_of_the_log_are_shown_with_time_severity_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"peers": [PEER], "events": EVENTS}
    assert ran(tmp_path, document, "logs") == FINE
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["TIME", "FROM", "EVENT"],
        [*when(1.0).split(), "I", "peers", "Restored route 10.5.2.0/24"],
        [*when(2.0).split(), "E", "store", "etcd is away"],
    ]
    ran(tmp_path, document, "logs", "192.0.2.2")
    shown = capsys.readouterr().out
    assert "Restored route" in shown
    assert "etcd is away" not in shown
    ran(tmp_path, document, "logs", "10.5.2.0/24", "--output=json")
    assert told(capsys)["events"] == EVENTS[:1]


@pytest.mark.parametrize(
    ("form", "first"),
    [("text", "this node has no lease"), ("dot", "graph flannel {"), ("html", "<!DOCTYPE html>")],
)
def test_graph_is_in_the_form_that_is_asked_for(
    form: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, {}, "graph", f"--format={form}") == FINE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first
    shown = [name for name in ("rtt", "backend", "mtu", "store") for line in lines if f">{name}</th>" in line]
    assert shown == (["rtt", "backend", "mtu", "store"] if form == "html" else [])


def test_graph_for_programs_has_nodes_and_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"lease": {"subnets": ["10.5.1.0/24"]}, "pid": 7}
    assert ran(tmp_path, own, "graph", "--output=json") == FINE
    answer = told(capsys)
    assert [each["subnets"] for each in answer["nodes"]] == [["10.5.1.0/24"]]
    assert (answer["edges"], answer["not_known"]) == ([], [])
    assert ran(tmp_path, own, "graph") == FINE
    assert capsys.readouterr().out == "10.5.1.0/24  -  this node\n"


def test_graph_is_wrong_if_a_node_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"lease": {"subnets": ["10.5.1.0/24"], "expires": 1.0}, "pid": 7}
    assert ran(tmp_path, own, "graph") == PROBLEMS
    assert "this node" in capsys.readouterr().out


def test_notes_say_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", f"--subnet-file={tmp_path / 'subnet.env'}"], {}) == NO_DAEMON
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not known: ")]
    assert len(notes) == 2
    assert notes[1] == "not known: the store was not asked: give -etcd-endpoints"
